"""Faults inside the engine's worker, and that an update after them is whole (float32, tied head, CPU)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FLOOR = 1e-5

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def gaps(make_model) -> dict[str, float]:
    program = Path(__file__).with_name("engine_faults.py")
    run = subprocess.run(
        [sys.executable, str(program), str(make_model(True, "float32"))],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, float] = json.loads(
        next(line for line in run.stdout.splitlines() if line.startswith("{"))
    )
    return found


def test_tied_head_when_its_cure_is_off_then_the_probe_sees_it(gaps: dict[str, float]) -> None:
    """A head tied to the embedding keeps its packed weights through an update."""
    assert gaps["start"] < FLOOR
    assert gaps["uncured"] > 1000 * FLOOR
    assert gaps["cured"] < FLOOR


def test_update_when_aborted_before_a_tensor_came_then_the_old_weights_are_back(
    gaps: dict[str, float],
) -> None:
    assert gaps["aborted"] < FLOOR


def test_update_when_repeated_after_it_broke_between_q_and_k_then_nothing_of_the_first_is_left(
    gaps: dict[str, float],
) -> None:
    assert "broken" in gaps
    assert gaps["repeated"] < FLOOR


def test_make_room_when_running_responses_hold_all_kv_then_a_probe_goes_before_them_and_they_go_on(
    gaps: dict[str, float],
) -> None:
    assert gaps["ended"] == 0
    assert gaps["put back"] < FLOOR
