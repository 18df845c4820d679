"""Asynchronous against synchronous training: seconds of one step, in one sitting.

    python benchmarks/async_step.py [--models models/tiny] [--steps 12] [--repeats 3]

One server on the first core, the trainer on the second, so that generation and training each have a core of their own
whatever runs when. Runs of both kinds take turns; the last line is one JSON object:

    ratio               median asynchronous step (eta 2) over median synchronous step
    generation_s        median time that a synchronous step waits for its batch
    training_s          median rest of a synchronous step: train, publish, probe
    balance             the smaller of the two over the larger; the figure means little below 0.8
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
WARM_UP_STEPS = 3
START_TIMEOUT_S = 240
RUN_TIMEOUT_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=Path, default=ROOT / "models" / "tiny", help="folder with actor/ and critic/"
    )
    parser.add_argument("--steps", type=int, default=12, help="steps of each run, warm-up included")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1, help="more makes training longer")
    parser.add_argument("--max-num-seqs", type=int, default=26, help="fewer makes generation longer")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed, one for each side")
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(compare(arguments, Path(name))))


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    server, address = start_server(arguments, folder, core=first)
    try:
        rows: dict[int, list[dict[str, float]]] = {0: [], 2: []}
        for repeat in range(arguments.repeats):
            for staleness in rows:
                new = run(arguments, folder, address, staleness=staleness, repeat=repeat, core=second)
                rows[staleness] += new
                median_s = statistics.median(row["time/step_s"] for row in new)
                print(f"max_staleness {staleness}, run {repeat + 1}: {median_s:.3f} s a step", flush=True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    synchronous_s = statistics.median(row["time/step_s"] for row in rows[0])
    asynchronous_s = statistics.median(row["time/step_s"] for row in rows[2])
    generation_s = statistics.median(row["time/wait_s"] for row in rows[0])
    training_s = statistics.median(row["time/step_s"] - row["time/wait_s"] for row in rows[0])
    return {
        "ratio": round(asynchronous_s / synchronous_s, 3),
        "synchronous_step_s": round(synchronous_s, 3),
        "asynchronous_step_s": round(asynchronous_s, 3),
        "generation_s": round(generation_s, 3),
        "training_s": round(training_s, 3),
        "balance": round(min(generation_s, training_s) / max(generation_s, training_s), 3),
    }


def start_server(
    arguments: argparse.Namespace, folder: Path, *, core: int
) -> tuple[subprocess.Popen[bytes], str]:
    ready = folder / "ready.json"
    command = [BIN / "asyppo-fleet", "serve", "--model", arguments.models / "actor", "--port", "0"]
    options = ["--ready-file", ready, "--max-num-seqs", str(arguments.max_num_seqs)]
    options += ["--max-model-len", "128", "--num-threads", "1"]
    process = subprocess.Popen(["taskset", "-c", str(core), *command, *options], stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise SystemExit("the fleet server did not start; run `asyppo-fleet serve` to see why")
        time.sleep(0.2)
    place = json.loads(ready.read_text())
    return process, f"{place['host']}:{place['port']}"


def run(
    arguments: argparse.Namespace, folder: Path, address: str, *, staleness: int, repeat: int, core: int
) -> list[dict[str, float]]:
    name = f"staleness-{staleness}-{repeat}"
    settings = {
        "run.folder": folder,
        "run.name": name,
        "run.num_steps": arguments.steps,
        "run.seed": repeat,
        "actor.model": arguments.models / "actor",
        "critic.model": arguments.models / "critic",
        "actor.epochs": arguments.epochs,
        "batch.group_size": arguments.group_size,
        "staleness.max_staleness": staleness,
        "staleness.lead": "saturated",
        "evaluation.every_steps": 0,
        "evaluation.samples_per_prompt": 1,
        "evaluation.greedy": "false",
        "task.num_heldout": 8,
    }
    command = [BIN / "asyppo-train", ROOT / "examples" / "quickstart.toml", "--fleet", address]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    subprocess.run(
        ["taskset", "-c", str(core), *command], check=True, stdout=subprocess.DEVNULL, timeout=RUN_TIMEOUT_S
    )
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][WARM_UP_STEPS:]


if __name__ == "__main__":
    main()
