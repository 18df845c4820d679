"""Every method preset trains the quickstart's model over the real engine: sizes are cut, the method stays.

One server lives through all of them, and each run claims it anew.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from asyppo_async.config.load import config_from_tree, load_preset, preset_names
from asyppo_async.config.sections import TrainConfig
from tests.integration.run.conftest import ROOT, Runner, Server
from tests.static.test_algorithm_docs import quoted, rows

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

METHODS = [name for row in rows("## Presets") for name in quoted(row[2])]
NUM_STEPS = 2
MAX_TOKENS = 40
NOT_HERE = {"grpo_x_moe": ("actor.routing_replay=false",)}
"""What an engine on a CPU cannot do: vLLM returns no routing there, and the quickstart's model is dense."""


@pytest.fixture(scope="module")
def models() -> Path:
    """The quickstart's (`make models`): right in four of ten, so that groups are mixed, as dynamic sampling wants."""
    folder = ROOT / "models" / "tiny"
    if not (folder / "warmup.json").is_file():
        command = [sys.executable, ROOT / "examples" / "tiny_models.py", "--out", folder]
        subprocess.run(command, check=True, timeout=800)
    return folder


def cut(preset: str, models: Path) -> list[str]:
    """Overrides that make two steps of the preset a matter of seconds."""
    tree = load_preset(preset)
    batch, algorithm = (dict(tree.get(section, {})) for section in ("batch", "algorithm"))  # type: ignore[call-overload]
    grouped = batch.get("group_size", 8) > 1
    overrides = [
        f"actor.model={models / 'actor'}",
        f"critic.model={models / 'critic'}",
        f"batch.prompts={4 if grouped else 16}",
        f"batch.group_size={4 if grouped else 1}",
        f"sampling.max_tokens={MAX_TOKENS}",
        "actor.learning_rate=1e-4",
        "actor.learning_rate_warmup_steps=0",
        "actor.mini_batches=2",
        "critic.learning_rate_warmup_steps=0",
        "critic.warmup_steps=0",
        "critic.mini_batches=2",
        *NOT_HERE.get(preset, ()),
    ]
    if algorithm.get("overlong_cache_tokens", 0):
        overrides.append("algorithm.overlong_cache_tokens=8")
    if "uniform_steps" in tree.get("selection", {}):  # type: ignore[operator]
        overrides += ["selection.uniform_steps=1", "selection.ramp_steps=1"]
    return overrides


def cut_config(preset: str, models: Path) -> TrainConfig:
    return config_from_tree({"preset": preset}, cut(preset, models))


def test_methods_of_the_documentation_are_all_presets_but_the_papers_own_set_ups() -> None:
    papers = {"asyppo_4b", "asyppo_14b", "vcppo_32b", "s3ac_1.5b_group", "s3ac_1.5b_single", "s3ac_moe"}
    assert set(METHODS) == set(preset_names()) - papers and len(METHODS) == 23


@pytest.mark.parametrize("preset", METHODS)
def test_preset_over_the_real_engine_trains_two_steps(
    runner: Runner, server: Server, models: Path, tmp_path: Path, preset: str
) -> None:
    expected = cut_config(preset, models)
    config = tmp_path / "run.toml"
    config.write_text(
        runner.config.read_text().split("[actor]")[0].replace('"asyppo"', f'"{preset}"')
        + "[actor]\nnum_threads = 1\n[critic]\nnum_threads = 1\n"
        + "[task]\nnum_train = 2000\nnum_heldout = 8\n[evaluation]\nsamples_per_prompt = 1\n"
    )
    settings = [*cut(preset, models), f"run.num_steps={NUM_STEPS}"]
    sets = [part for setting in settings for part in ("--set", setting)]
    process = runner.start(preset, "--fleet", server.address, *sets, config=config)
    done = runner.finish(process, preset, timeout_s=600)
    assert done.code == 0, done.err
    assert done.summary["steps"] == NUM_STEPS == len(done.rows)
    # Of the probe: a response that a publication cut has tokens of this version on KV of the one before.
    assert done.summary["logprob_gap_fresh_mean"] < 1e-4
    assert done.summary["max_staleness_seen"] <= expected.staleness.max_staleness
    taken = expected.actor.epochs * expected.actor.mini_batches
    for row in done.rows:
        assert 0 < row["actor/optimizer_steps"] <= taken and row["actor/skipped_steps"] < taken
        assert row["actor/grad_norm"] > 0
        for critic in range(expected.critic.count):
            assert row[f"critic_{critic}/optimizer_steps"] > 0
        assert f"critic_{expected.critic.count}/loss" not in row
    trained = AutoModelForCausalLM.from_pretrained(done.folder / "model").state_dict()
    start = AutoModelForCausalLM.from_pretrained(models / "actor").state_dict()
    assert any(not trained[name].equal(start[name]) for name in start)
