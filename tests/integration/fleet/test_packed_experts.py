"""The experts of a mixture after weight updates, on vLLM's own layer in a process of its own; no engine around it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_experts_when_updated_are_packed_again_which_vllm_alone_leaves_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.fleet.expert_program", address],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    gaps = json.loads(done.stdout.splitlines()[-1])
    assert gaps["loaded"] < 1e-5
    for name in ("updated_2", "updated_3", "nothing_loaded"):
        assert gaps[name] < 1e-5, name
    # The fault that the packing is there for; once vLLM packs them itself, `PackedExperts` can go.
    assert gaps["updated_by_vllm_alone"] > 0.1
