"""Layers of a configuration, and what a wrong one says."""

import tomllib
from pathlib import Path

import pytest

from asyppo_async.config.load import config_from_tree, dump_config, load_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError

MODELS = {"actor": {"model": "a"}, "critic": {"model": "c"}}


def load(tree: dict[str, object], *overrides: str) -> TrainConfig:
    return config_from_tree({**MODELS, **tree}, overrides)


def test_config_when_layered_takes_the_last_word() -> None:
    config = load(
        {"preset": "asyppo", "batch": {"prompts": 8}}, "batch.group_size=4", "critic.mini_batches=1"
    )
    assert config.actor.epochs == 4, "from the preset"
    assert config.batch.prompts == 8, "the file overrides the preset"
    assert config.batch.group_size == 4, "--set overrides both"
    assert config.run.seed == 0, "a default"


def test_config_when_dumped_loads_equal() -> None:
    each = 'critic.each=[{model="small", frozen=["backbone"]}, {head_learning_rate=1e-3}]'
    config = load({"preset": "asyppo", "task": {"params": {"min_numbers": 4}}}, "critic.value_clip=0.2", each)
    assert config_from_tree(tomllib.loads(dump_config(config))) == config


def test_override_when_it_is_a_bare_word_is_a_string() -> None:
    assert load({}, "run.name=my-run").run.name == "my-run"
    assert load({}, "actor.model=models/x").actor.model == Path("models/x")


@pytest.mark.parametrize(
    ("tree", "overrides", "words"),
    [
        (
            {"actor": {"model": "a", "learning_rat": 1}},
            (),
            "unknown key 'actor.learning_rat'; did you mean 'learning_rate'?",
        ),
        (
            {"run": {"max_staleness": 1}},
            (),
            "unknown key 'run.max_staleness'; did you mean 'staleness.max_staleness'?",
        ),
        ({"run": {"colour": "red"}}, (), "unknown key 'run.colour'; known: name, folder"),
        ({"stalenes": {}}, (), "unknown key 'stalenes'; did you mean 'staleness'?"),
        ({}, ("run.num_steps=0",), "run.num_steps: Input should be greater than or equal to 1, got 0"),
        ({}, ("algorithm.advantage_mask_share=1.5",), "algorithm.advantage_mask_share"),
        (
            {},
            ("staleness.on_stale=throw",),
            "staleness.on_stale: Input should be 'wait', 'mask' or 'drop', got 'throw'",
        ),
        ({"preset": "asypo"}, (), "unknown preset 'asypo'; did you mean 'asyppo'?"),
        ({}, ("run.num_steps",), "--set takes section.key=value, got 'run.num_steps'"),
        ({"actor": {}}, (), "'actor.model' is missing"),
    ],
)
def test_config_when_a_key_is_wrong_says_which_and_what_instead(
    tree: dict[str, object], overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tree, *overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("sampling.top_p=0.9",), "sampling.top_p = 0.9"),
        (
            ("placement.mode=colocated", "algorithm.schedule=critic_ahead", "algorithm.lambda_critic=1"),
            "'colocated' groups compute in turn; use the schedule 'post'",
        ),
        (("actor.devices=[0, 1]", "critic.devices=[1]"), "device 1 is in the devices of more than one"),
        (
            (
                "placement.mode=colocated",
                "actor.backend=deepspeed",
                "actor.zero_stage=1",
                "actor.dtype=bfloat16",
            ),
            "use zero_stage = 2, or placement.moves = 'none'",
        ),
        (("actor.offload.optimizer=cpu",), "actor.offload is DeepSpeed's, and actor.backend is 'plain'"),
        (
            ("critic.backend=deepspeed", "critic.offload.weights=cpu"),
            "which are only with critic.zero_stage = 3, got 2",
        ),
        (
            ("actor.backend=deepspeed", "actor.offload.optimizer=cpu", "actor.dtype=bfloat16"),
            "sum the gradients of micro-batches in bfloat16; use zero_stage = 3 or float32",
        ),
        (("sampling.top_k=50",), "top_k = 50"),
        (("critic.count=1",), "use two critics or set both shares to 0"),
        (("critic.count=4", "batch.group_size=2"), "critic.count = 4 exceeds batch.group_size = 2"),
        (("algorithm.schedule=critic_ahead", "staleness.max_staleness=0"), "use at least 1"),
        (("algorithm.mismatch_low=6.0",), "exceeds mismatch_high"),
        (("batch.prompts=1", "batch.group_size=2", "actor.mini_batches=3"), "exceeds the 2 responses"),
        (
            ("batch.prompts=1", "batch.group_size=4", "critic.mini_batches=3"),
            "exceeds the 2 responses that each critic",
        ),
        (("critic.each=[{learning_rate=1e-5}]",), "critic.each describes 1 critics, and critic.count is 2"),
        (("critic.each=[{learning_rat=1e-5}, {}]",), "did you mean 'learning_rate'?"),
        (("weights.backend=nccl",), "host memory receives over gloo only"),
        (("weights.encoding=delta",), "nearly every float32 weight changes"),
        (
            ("weights.encoding=delta", "weights.way=direct", "actor.dtype=bfloat16"),
            'the copy in host memory that weights.way = "direct" does without',
        ),
        (("weights.way=folder",), "the way folder and a folder go together"),
        (("weights.folder=/shared/versions",), "the way folder and a folder go together"),
    ],
)
def test_config_when_settings_contradict_gives_the_reason(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match="config: ") as caught:
        load({}, *overrides)
    assert words in str(caught.value)


def test_config_when_one_critic_needs_no_disagreement_loads() -> None:
    config = load(
        {}, "critic.count=1", "algorithm.advantage_mask_share=0", "algorithm.entropy_filter_share=0"
    )
    assert config.critic.count == 1


def test_load_when_the_file_is_not_there_or_broken_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no config file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("run = [")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(tmp_path / "broken.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
