"""Our learner against TRL's GRPOTrainer: one training step on the same completions, in one sitting, on CPUs.

    pip install --no-deps trl accelerate     # only for this comparison; extra `benchmarks`
    python -m benchmarks.learner [--model models/tiny/actor] [--responses 64] [--longest 512]

Every contender is a process of its own with one thread: one step to warm up, one that is measured. Sampling is not
counted, nor are the log-probs of before the step. Tokens are response tokens; seconds are CPU seconds of the process,
which a busy machine disturbs less than those of the clock, with one thread the same on a quiet one. Memory is the peak
above parameters, gradients and Adam's state. The last line is one JSON object:

    tokens_per_s_ratio_recompute    ours over TRL's, both computing layers again in the backward (TRL's default)
    memory_ratio_recompute          likewise, of the peak above the model's own state
    tokens_per_s_ratio_default      ours over TRL's, each as it comes
    ratio_to_floor                  of our default: 6 operations x parameters x tokens at the measured rate of matrices
    ..._equal                       the same three for responses of equal length
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.learner_contenders import CONTENDERS, Measured, Plan

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1800
MATRIX = 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny" / "actor")
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a response")
    parser.add_argument("--skip-equal", action="store_true", help="only the long-tailed lengths")
    arguments = parser.parse_args()
    floor = matrix_rate()
    result: dict[str, float] = {"matrix_gflop_per_s": floor / 1e9}
    for kind in ("tailed",) if arguments.skip_equal else ("tailed", "equal"):
        plan = plan_of(arguments.model, arguments.responses, arguments.longest, equal=kind == "equal")
        measured = {name: measure(name, plan) for name in CONTENDERS}
        suffix = "" if kind == "tailed" else "_equal"
        result |= {f"{name}{suffix}": value for name, value in ratios(measured, floor).items()}
    print(json.dumps(result))


def plan_of(model: Path, num_responses: int, longest: int, *, equal: bool) -> Plan:
    """Long-tailed lengths: log-normal about an eighth of the longest, cut there."""
    random = np.random.default_rng(0)
    tailed = np.exp(random.normal(np.log(longest / 8), 1.0, num_responses))
    lengths = np.clip(tailed, 2, longest).astype(int)
    if equal:
        lengths[:] = round(float(lengths.mean()))
    return Plan(model=str(model.absolute()), lengths=tuple(lengths.tolist()))


def measure(name: str, plan: Plan) -> Measured:
    """One contender in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "benchmarks.learner_contenders", name, plan.to_json(), str(output)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        measured = Measured(**json.loads(output.read_text()))
    print(f"{name:16} {measured.describe()}", flush=True)
    return measured


def ratios(measured: dict[str, Measured], floor: float) -> dict[str, float]:
    ours, ours_again, peer, peer_kept = (measured[name] for name in CONTENDERS)
    operations = 6 * ours.num_parameters * ours.num_input_tokens
    return {
        "tokens_per_s_ratio_recompute": ours_again.tokens_per_s / peer.tokens_per_s,
        "memory_ratio_recompute": ours_again.extra_bytes / peer.extra_bytes,
        "tokens_per_s_ratio_default": ours.tokens_per_s / peer.tokens_per_s,
        "tokens_per_s_ratio_kept": ours.tokens_per_s / peer_kept.tokens_per_s,
        "memory_ratio_kept": ours.extra_bytes / peer_kept.extra_bytes,
        "ratio_to_floor": operations / floor / ours.seconds,
    }


def matrix_rate(sizes: Sequence[int] = (MATRIX,) * 3) -> float:
    """Operations a second of a square float32 product on one thread; the best of five."""
    torch.set_num_threads(1)
    left, right = torch.rand(sizes[0], sizes[1]), torch.rand(sizes[1], sizes[2])
    rates = []
    for _ in range(5):
        started = time.process_time()
        left @ right
        rates.append(2 * sizes[0] * sizes[1] * sizes[2] / (time.process_time() - started))
    return max(rates)


if __name__ == "__main__":
    main()
