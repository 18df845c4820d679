"""The commands around critics, from a run that fills a pool to critics that choose: programs, a scripted engine."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyppo_async.trainer.pool.pool import open_pool
from tests.integration.chaos.conftest import ChaosRunner, ScriptedServer, rows, wait_for_steps
from tests.integration.run.conftest import Finished

STEPS = 5
RESPONSES = 4
"""Of a prompt."""


@pytest.fixture(scope="module")
def coin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Options of a task that finds every second response right."""
    folder = tmp_path_factory.mktemp("coin")
    shutil.copy(Path(__file__).with_name("coin_reward.py"), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield ["--set", "task.name=custom:coin_reward:coin"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool") / "pool"


def uneven(models: Path) -> str:
    """One critic as the settings say, and one of the actor's size whose backbone is frozen."""
    return f'critic.each=[{{}}, {{model="{models / "actor"}", frozen=["backbone"], head_learning_rate=1e-3}}]'


@pytest.fixture(scope="module")
def run(runner: ChaosRunner, server: ScriptedServer, models: Path, coin: list[str], pool: Path) -> Finished:
    """Of an uneven ensemble, with a pool; it was killed once and came back."""
    settings = [
        uneven(models),
        "pool.save=true",
        f"pool.path={pool}",
        "pool.policy_steps=2",
        f"run.num_steps={STEPS}",
    ]
    options = [word for setting in settings for word in ("--set", setting)]
    process = runner.start("watched", "--fleet", server.address, *coin, *options)
    wait_for_steps(process, runner.folder / "runs" / "watched", more=2)
    process.kill()
    process.communicate(timeout=30)
    done = runner.finish(runner.resume("watched"), "watched", timeout_s=240)
    assert done.code == 0, done.err
    return done


def command(runner: ChaosRunner, *words: str) -> str:
    done = runner.finish(runner.command(*words), "none", timeout_s=240)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.long
@pytest.mark.timeout(290)
def test_pool_of_a_run_when_it_was_killed_and_resumed_then_holds_every_trained_response_whole(
    run: Finished, runner: ChaosRunner, pool: Path
) -> None:
    assert run.summary["resumes"] == 1 and run.summary["steps"] == STEPS
    opened = open_pool(pool)
    entries = opened.entries
    held = Counter((one.prompt.id, one.sample_index) for one in opened.read(entries))
    for draw in rows(run.folder, "draws.jsonl"):
        if draw["outcome"] == "trained":
            assert all(held[(draw["prompt"], sample)] for sample in range(RESPONSES)), draw
    assert {entry.policy for entry in entries} <= {f"watched@{version}" for version in (0, 2, 4)}
    assert {entry.is_right for entry in entries} == {True, False}
    shown = command(runner, "pool", "info", str(pool), "--least", "1000")
    assert f"{len(entries)} trajectories" in shown and "hold fewer than 1000" in shown


@pytest.mark.long
@pytest.mark.timeout(290)
def test_trace_of_a_run_when_asked_for_a_prompt_then_shows_its_tokens_with_both_critics(
    run: Finished, runner: ChaosRunner
) -> None:
    traces = rows(run.folder, "traces.jsonl")
    assert {len(trace["values"]) for trace in traces} == {2}
    prompt = str(traces[0]["prompt_id"])
    out = command(runner, "trace", str(run.folder), "--prompt", prompt)
    page = Path(out.split()[0])
    assert page.name == "trace.html" and prompt in page.read_text()
    small, large = [
        json.loads((run.folder / "critics" / f"critic-{m}" / "config.json").read_text()) for m in (0, 1)
    ]
    assert small["num_hidden_layers"] < large["num_hidden_layers"], "each critic is saved as what it is"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_critics_when_pretrained_over_a_collected_pool_then_load_into_a_run_and_choose(
    run: Finished, runner: ChaosRunner, server: ScriptedServer, coin: list[str], models: Path, tmp_path: Path
) -> None:
    fleet, collected = ["--fleet", server.address], tmp_path / "collected"
    policies = json.dumps([str(models / "actor"), str(run.folder / "model")])
    into = ["--set", f"pool.path={collected}", "--set", "pool.prompts=20"]
    out = command(
        runner,
        "pool",
        "collect",
        str(runner.config),
        *fleet,
        *coin,
        *into,
        "--set",
        f"pool.policies={policies}",
    )
    assert out.count("80 trajectories") == 2 and "0 lost" in out
    assert {entry.policy for entry in open_pool(collected).entries} == set(json.loads(policies))

    settings = ["run.name=taught", "pretrain.responses=16", "pretrain.heldout_every_steps=1", uneven(models)]
    options = [word for setting in settings for word in ("--set", setting)]
    out = command(runner, "pretrain-critics", str(runner.config), "--pool", str(collected), *options)
    critics = runner.folder / "runs" / "taught-critics" / "critics"
    assert str(critics) in out and (critics / "critic-1" / "value_head.safetensors").is_file()

    begun = [*fleet, *coin, "--set", f"critic.model={critics}", "--set", "run.num_steps=2"]
    done = runner.finish(runner.start("taught", *begun), "taught")
    assert done.code == 0, done.err


@pytest.mark.long
@pytest.mark.timeout(600)
def test_best_of_when_the_critics_are_uneven_then_all_ways_of_choosing_are_compared(
    run: Finished, runner: ChaosRunner, server: ScriptedServer, tmp_path: Path
) -> None:
    table = tmp_path / "best-of.json"
    options = ["--n", "4", "--beams", "2", "--step-tokens", "4", "--json", str(table)]
    command(runner, "best-of", str(run.folder), "--fleet", server.address, *options)
    found = json.loads(table.read_text())
    assert (found["prompts"], found["n"]) == (2, 4)
    ways = {
        "critic, last",
        "critic, mean",
        "critic, min",
        "majority",
        "first sample",
        "any of them",
        "beam search",
    }
    assert set(found["accuracy"]) == ways
    assert found["accuracy"]["any of them"] == max(found["accuracy"][way] for way in ways - {"beam search"})
    assert found["tokens"]["beam search"] <= 4 * 24


@pytest.mark.long
@pytest.mark.timeout(600)
def test_critics_when_pretrained_over_a_frozen_policy_then_stop_by_themselves_or_at_the_most_steps(
    runner: ChaosRunner, server: ScriptedServer, coin: list[str], models: Path
) -> None:
    settings = [
        "run.name=frozen",
        "pretrain.max_steps=4",
        "pretrain.responses=8",
        "pretrain.heldout_every_steps=2",
    ]
    out = command(
        runner,
        "pretrain-critics",
        str(runner.config),
        "--policy",
        str(models / "actor"),
        "--fleet",
        server.address,
        *coin,
        *[word for setting in settings for word in ("--set", setting)],
    )
    assert "frozen-critics/critics" in out
    assert len(rows(runner.folder / "runs" / "frozen-critics", "metrics.jsonl")) == 4


@pytest.mark.long
@pytest.mark.timeout(600)
def test_reference_success_when_measured_then_every_prompt_of_the_run_has_its_share(
    run: Finished, runner: ChaosRunner, server: ScriptedServer
) -> None:
    options = ["--samples", "8", "--prompts", "12", "--fleet", server.address]
    out = command(runner, "reference-success", str(run.folder), *options)
    assert "8 responses of" in out and "considered" in out
    found = json.loads((run.folder / "reference_success.json").read_text())
    assert len(found["p_ref"]) == 12 and found["samples"] == 8
    assert all((8 * share).is_integer() for share in found["p_ref"].values())
    drawn = [row["prompt"] for row in rows(run.folder, "draws.jsonl") if row["outcome"] == "trained"]
    measured = [found["p_ref"][prompt] for prompt in drawn if prompt in found["p_ref"]]
    assert found["sets"]["trained"]["draws"] == len(measured) > 0
    assert found["sets"]["trained"]["mean"] == pytest.approx(sum(measured) / len(measured))
