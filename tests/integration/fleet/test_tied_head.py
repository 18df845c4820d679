"""The fault that is cured: a head tied to the embedding keeps its packed weights through an update (float32, CPU)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def test_tied_head_when_the_cure_is_off_then_the_probe_sees_it(make_model) -> None:
    program = Path(__file__).with_name("tied_head_faults.py")
    run = subprocess.run(
        [sys.executable, str(program), str(make_model(True, "float32"))],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    gaps = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    assert gaps["start"] < 1e-5
    assert gaps["uncured"] > 1e-2
    assert gaps["cured"] < 1e-5
