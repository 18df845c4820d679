"""A reward that misbehaves in every way, in a whole run."""

import os
import shutil
from pathlib import Path

import pytest

from tests.integration.chaos.conftest import ChaosRunner, ScriptedServer, check_lineage, rows


@pytest.mark.report("P46")
@pytest.mark.timeout(200)
def test_run_whose_reward_hangs_raises_fills_memory_and_dies_trains_the_rest_of_each_group(
    runner: ChaosRunner, server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).with_name("cruel_reward.py"), tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    settings = {
        "task.name": "custom:cruel_reward:cruel",
        "task.reward_processes": 2,
        "task.reward_timeout_s": 3,
        "task.reward_memory_gib": 0.25,
        "failures.reward_share": 0.9,
    }
    arguments = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = runner.finish(runner.start("cruel", "--fleet", server.address, *arguments), "cruel", timeout_s=180)
    assert done.code == 0, done.err
    check_lineage(done, 40)
    lost = done.summary["responses_lost"]
    assert isinstance(lost, dict) and lost["late_reward"] > 0 and lost["failed_reward"] > 0, lost
    log = (done.folder / "logs" / "trainer.log").read_text()
    for words in (
        "no reward within 3 s",
        "RuntimeError: a cruel reward",
        "MemoryError: the task needs more than task.reward_memory_gib allows",
        "the reward child ended with exit code 3",
    ):
        assert words in log, words
    rewards = {row["reward"] for row in rows(done.folder, "samples.jsonl")}
    assert rewards <= {-1.0, 1.0}, "a lost one is no reward of 0"
