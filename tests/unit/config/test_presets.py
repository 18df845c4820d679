"""Presets: how many optimizer steps they take, what they resolve to, and what contradicts them."""

import tomllib
from importlib import resources

import pytest

from asyppo_async.config.load import config_from_tree, dump_config, preset_names
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError

METHODS = [
    *("asyppo", "asyppo_faithful", "vcppo", "vapo", "s3ac", "s3ac_single", "ppo", "ppo_95", "ppo_asymmetric"),
    *("grpo", "grpo_x", "grpo_x_moe", "drgrpo", "rloo", "dapo", "reinforce_pp", "flash_reinforce", "gspo"),
    *("cispo", "areal", "sao", "spo", "tppo"),
]
PAPERS = ["asyppo_4b", "asyppo_14b", "vcppo_32b", "s3ac_1.5b_group", "s3ac_1.5b_single", "s3ac_moe"]


def load(preset: str, *overrides: str) -> TrainConfig:
    return config_from_tree({"preset": preset, "actor": {"model": "a"}, "critic": {"model": "c"}}, overrides)


def test_presets_are_those_that_are_documented() -> None:
    assert set(preset_names()) == {*METHODS, *PAPERS}


@pytest.mark.parametrize("preset", [*METHODS, *PAPERS])
def test_preset_when_dumped_loads_equal(preset: str) -> None:
    config = load(preset)
    assert config_from_tree(tomllib.loads(dump_config(config))) == config


@pytest.mark.parametrize("preset", PAPERS)
def test_set_up_of_a_paper_is_complete_without_another_preset(preset: str) -> None:
    text = (resources.files("asyppo_async.config.presets") / f"{preset}.toml").read_text(encoding="utf-8")
    assert "preset" not in tomllib.loads(text)
    config_from_tree({"preset": preset})


def test_asyppo_faithful_samples_as_the_paper_does() -> None:
    sampling = load("asyppo_faithful").sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.kept_tokens) == (
        0.99,
        0.99,
        100,
        True,
    )
    assert load("asyppo_faithful").algorithm == load("asyppo").algorithm


def test_set_ups_of_asyppo_hold_the_values_of_its_appendix() -> None:
    small, large = load("asyppo_4b"), load("asyppo_14b")
    for config in (small, large):
        assert (config.batch.prompts, config.batch.group_size, config.run.seed) == (64, 32, 42)
        assert (config.run.num_steps, config.evaluation.every_steps) == (500, 1)
        assert (config.actor.learning_rate_warmup_steps, config.critic.learning_rate_warmup_steps) == (50, 5)
        assert (config.sampling.max_tokens, config.staleness.max_staleness) == (8000, 1)
        assert config.task.system_prompt is not None and config.task.system_prompt.endswith("\\boxed{}.")
    assert (small.actor.epochs, large.actor.epochs) == (1, 4)


@pytest.mark.parametrize("preset", ["s3ac", "s3ac_single", "s3ac_1.5b_group", "s3ac_1.5b_single", "s3ac_moe"])
def test_s3ac_is_mask_only_in_log_space_with_values_from_before(preset: str) -> None:
    config = load(preset)
    algorithm = config.algorithm
    assert (algorithm.schedule, algorithm.loss, algorithm.mismatch) == ("pre", "cispo", "icepop_mask")
    (gate,) = algorithm.sequence_gates
    assert (gate.kind, gate.high) == ("max_log_ratio", 5.0)
    assert (algorithm.lambda_actor, algorithm.lambda_alpha) == ("adaptive", 1.5)
    assert (config.actor.max_grad_norm, config.critic.max_grad_norm, config.critic.epochs) == (1.0, 10.0, 2)


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        ("asyppo", ("critic.count=0",), "takes its advantages from critics, and critic.count is 0"),
        ("s3ac", ("critic.count=0",), "critic.count is 0"),
        ("grpo", ("selection.prompts=daps",), "asks the critics for V(s_0)"),
        ("grpo", ("critic.count=1",), "does not read the 1 critics"),
        ("grpo", ("batch.group_size=1",), "compares the responses of a group"),
        ("rloo", ("batch.group_size=1",), "compares the responses of a group"),
        ("s3ac_single", ("selection.group_filter=replace",), "always all right or all wrong"),
        ("sao", ("algorithm.mismatch=icepop",), "counts the mismatch twice"),
        ("cispo", ("algorithm.loss_reference=behaviour",), "counts the mismatch twice"),
        ("cispo", ("algorithm.loss=dppo",), "counts the mismatch twice"),
        ("grpo", ("algorithm.loss=gepo_expectation",), "would count the mismatch twice"),
        (
            "ppo",
            ("algorithm.loss=gspo", "algorithm.mismatch=none"),
            "needs one advantage for a whole response",
        ),
        ("asyppo_faithful", ("sampling.kept_tokens=false",), "sampling.kept_tokens = true"),
        (
            "asyppo",
            ("algorithm.advantage_values=crossfit", "critic.data=shared"),
            "has not seen the response",
        ),
        ("s3ac", ("algorithm.advantage_values=post",), "trains them beside the actor"),
        ("s3ac", ("selection.decay_by_std=1", "critic.count=1"), "disagreement of critics"),
        ("asyppo", ("selection.floor_by_std=1",), "disagreement of critics"),
        ("asyppo", ("algorithm.value_aggregation=confidence", "critic.data=shared"), "has not seen"),
        ("ppo_asymmetric", ("algorithm.estimator=evpo",), "from before they saw the batch"),
        ("ppo", ("algorithm.advantage_mask_share=0.2",), "use two critics or set both shares to 0"),
        ("grpo", ("algorithm.truncated=bootstrap",), "ends a response with a critic's value"),
        ("grpo", ("algorithm.loss=aspo",), "needs a cap"),
        ("grpo", ("actor.reference=initial",), r"kl_coefficient is 0; set a coefficient"),
        ("grpo", ("algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k1"), "set actor.reference"),
        ("gspo", ("algorithm.dual_clip=3",), "has no meaning"),
        ("dapo", ("sampling.max_tokens=100",), "overlong_cache_tokens = 4096 exceeds"),
        ("reinforce_pp", ("algorithm.whiten_advantages=batch",), "whitens over the batch itself"),
        ("spo", ("selection.spo_factor_max=0.5",), "exceeds spo_factor_max"),
        ("s3ac_single", ("selection.prompts=greso",), "groups without variance"),
        ("s3ac_single", ("algorithm.group_entropy_scaling=true",), "needs groups"),
    ],
)
def test_preset_when_contradicted_gives_the_reason(
    preset: str, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(preset, *overrides)
    assert words in str(caught.value)


def test_critic_when_none_is_asked_for_needs_no_model() -> None:
    config = config_from_tree({"preset": "grpo", "actor": {"model": "a"}})
    assert config.critic.count == 0 and config.critic.model is None
    with pytest.raises(ConfigError, match=r"critic\.model is missing"):
        config_from_tree({"preset": "asyppo", "actor": {"model": "a"}})
