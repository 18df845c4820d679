"""How much of the shorter side an asynchronous step hides: its time against generation, training and their sum.

    python -m benchmarks.overlap [--models models/tiny] [--engines scripted real] [--step-s 10.5] [--repeats 2]

One server on the first core, the trainer on the second. The scripted engine takes the time that it is told to, and no
core; training is repeated until it takes `--step-s`, then both sides are made as long. The real engine's step is as
long as it is; training is repeated to meet it. Synchronous runs measure each side alone, asynchronous ones take turns
with them, all in one sitting. Checkpoints after every second step, an evaluation in passing. The last line is one JSON
object, by engine:

    over_longer, over_sum    median asynchronous step over the longer side alone, and over both one after the other
    generation_s, training_s medians of synchronous steps: the wait for the batch; train, publish, probe
    step_s                   median asynchronous step
    parts                    of an asynchronous step, and of a synchronous one: seconds of the wait for a batch, of the
                             worker groups, of the publication, and of all else
    bubbles                  by what went on: its seconds, and the tokens a second that the server made in that time,
                             over those that it made at other times, publications left out
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from asyppo_async.rpc.client import FleetClient
from benchmarks.async_step import BIN, ROOT, RUN_TIMEOUT_S, START_TIMEOUT_S, start_server

Row = dict[str, float]

WARM_UP_STEPS = 2
CALIBRATION_STEPS = 4
SCRIPTED = {"algorithm.mismatch": "none", "weights.probe_tolerance": 1e9}
"""What the scripted engine says has nothing to do with the model."""
CALIBRATION_DELTA_S = 0.05
"""Of the scripted engine, for two tokens of every response; generation takes as many times longer as this does."""
BESIDE = ("log", "save", "commit", "evaluation")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=ROOT / "models" / "tiny", help="actor/ and critic/")
    parser.add_argument("--engines", nargs="+", choices=["scripted", "real"], default=["scripted", "real"])
    parser.add_argument("--steps", type=int, default=8, help="of each asynchronous run, warm-up included")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each kind")
    parser.add_argument(
        "--step-s", type=float, default=10.5, help="that training takes beside the scripted engine"
    )
    parser.add_argument("--max-num-seqs", type=int, default=26, help="of the real engine")
    parser.add_argument("--group-size", type=int, default=8)
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed, one for each side")
    with tempfile.TemporaryDirectory() as name:
        sitting = Sitting(arguments, Path(name))
        print(json.dumps({engine: sitting.measure(engine) for engine in arguments.engines}))


class Sitting:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        self._first, self._second = sorted(os.sched_getaffinity(0))[:2]
        self._num_runs = 0

    def measure(self, engine: str) -> dict[str, object]:
        """Balance the sides, then let both kinds take turns."""
        if engine == "real":
            with ended(*start_server(self._arguments, self._folder, core=self._first)) as address:
                return self._compare(address, self._epochs(address, {}, wanted_s=None), {})
        with self._scripted(CALIBRATION_DELTA_S) as address:
            epochs = self._epochs(address, SCRIPTED, wanted_s=self._arguments.step_s)
            generation_s, training_s = sides(self._run(address, 0, CALIBRATION_STEPS, epochs, SCRIPTED))
        with self._scripted(CALIBRATION_DELTA_S * training_s / generation_s) as address:
            return self._compare(address, epochs, SCRIPTED)

    def _epochs(self, address: str, settings: dict[str, object], *, wanted_s: float | None) -> int:
        """So many that training takes `wanted_s`, or as long as generation."""
        generation_s, once_s = sides(self._run(address, 0, CALIBRATION_STEPS, 1, settings))
        per_epoch_s = (sides(self._run(address, 0, CALIBRATION_STEPS, 3, settings))[1] - once_s) / 2
        return max(1, 1 + round(((wanted_s or generation_s) - once_s) / per_epoch_s))

    def _compare(self, address: str, epochs: int, settings: dict[str, object]) -> dict[str, object]:
        rows: dict[int, list[Row]] = {0: [], 2: []}
        tokens: list[tuple[float, int]] = []
        for _ in range(self._arguments.repeats):
            rows[0] += self._run(address, 0, CALIBRATION_STEPS, epochs, settings)
            with watched(address, tokens):
                rows[2] += self._run(address, 2, self._arguments.steps, epochs, settings)
            print(f"{address}: {[round(row['time/step_s'], 2) for row in rows[2]]}", flush=True)
        generation_s, training_s = sides(rows[0])
        longer_s = max(generation_s, training_s)
        step_s = median(rows[2], "time/step_s")
        return {
            "over_longer": round(step_s / longer_s, 3),
            "over_sum": round(step_s / (generation_s + training_s), 3),
            "generation_s": round(generation_s, 2),
            "training_s": round(training_s, 2),
            "step_s": round(step_s, 2),
            "epochs": epochs,
            "parts": {"asynchronous": parts(rows[2]), "synchronous": parts(rows[0])},
            "bubbles": bubbles(rows[2], tokens),
        }

    @contextmanager
    def _scripted(self, delta_s: float) -> Iterator[str]:
        ready = self._folder / f"scripted-{delta_s:g}.json"
        command = [sys.executable, "-m", "tests.integration.chaos.scripted_server"]
        command += [str(self._arguments.models / "actor"), str(ready), "0", str(delta_s)]
        pinned = ["taskset", "-c", str(self._first), *command]
        process = subprocess.Popen(pinned, stderr=subprocess.DEVNULL, cwd=ROOT)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                process.kill()
                raise SystemExit("the scripted server did not start")
            time.sleep(0.1)
        with ended(process, f"127.0.0.1:{json.loads(ready.read_text())['port']}") as address:
            yield address

    def _run(
        self, address: str, staleness: int, steps: int, epochs: int, more: dict[str, object]
    ) -> list[Row]:
        """The steps behind the warm-up."""
        name = f"run-{self._num_runs}"
        self._num_runs += 1
        models = self._arguments.models.resolve()
        settings = {
            "run.folder": self._folder,
            "run.name": name,
            "run.num_steps": steps,
            "run.seed": self._num_runs,
            "actor.model": models / "actor",
            "critic.model": models / "critic",
            "actor.epochs": epochs,
            "critic.epochs": epochs,
            "batch.group_size": self._arguments.group_size,
            "staleness.max_staleness": staleness,
            "staleness.lead": "saturated",
            "checkpoint.every_steps": 2 if staleness else 0,
            "evaluation.every_steps": 4 if staleness else 0,
            "evaluation.samples_per_prompt": 1,
            "evaluation.greedy": "false",
            "task.num_heldout": 8,
            **more,
        }
        command = [str(BIN / "asyppo-train"), str(ROOT / "examples" / "quickstart.toml"), "--fleet", address]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        pinned = ["taskset", "-c", str(self._second), *command]
        subprocess.run(pinned, check=True, stdout=subprocess.DEVNULL, timeout=RUN_TIMEOUT_S)
        lines = (self._folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines][WARM_UP_STEPS:]


def median(rows: list[Row], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def sides(rows: list[Row]) -> tuple[float, float]:
    """Seconds of generation and of the rest, in synchronous steps."""
    return (
        median(rows, "time/wait_s"),
        statistics.median(row["time/step_s"] - row["time/wait_s"] for row in rows),
    )


def parts(rows: list[Row]) -> dict[str, float]:
    """Medians, one after the other."""
    found = {"wait": median(rows, "time/wait_s"), "publication": median(rows, "time/publication_s")}
    found["groups"] = statistics.median(map(groups_s, rows))
    found["other"] = median(rows, "time/step_s") - sum(found.values())
    return {name: round(value, 2) for name, value in found.items()}


def groups_s(row: Row) -> float:
    """Time in which at least one group worked on the step."""
    spans = sorted(
        (span["start_s"], span["end_s"])
        for span in row["trace"]  # type: ignore[attr-defined]
        if span["phase"] not in (*BESIDE, "publication")
    )
    total_s, until_s = 0.0, 0.0
    for start_s, end_s in spans:
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


@contextmanager
def ended(process: "subprocess.Popen[bytes]", address: str) -> Iterator[str]:
    try:
        yield address
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def watched(address: str, tokens: list[tuple[float, int]]) -> Iterator[None]:
    """Note what the server has sent so far, ten times a second."""
    stop = threading.Event()

    async def watch() -> None:
        async with FleetClient(address) as client:
            while not stop.is_set():
                tokens.append((time.time(), (await client.info(5.0)).sent_tokens))
                await asyncio.sleep(0.1)

    thread = threading.Thread(target=asyncio.run, args=(watch(),))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def bubbles(rows: list[Row], tokens: list[tuple[float, int]]) -> dict[str, dict[str, float]]:
    """Whether generation slowed down while something else went on."""
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in (*BESIDE, "publication")}
    for row in rows:
        for span in row["trace"]:  # type: ignore[attr-defined]
            if span["phase"] in spans:
                began_s = row["trace_began_unix_s"]
                spans[span["phase"]].append((began_s + span["start_s"], began_s + span["end_s"]))
    first_s = min(row["trace_began_unix_s"] for row in rows)
    made: dict[str, list[float]] = {name: [0.0, 0.0] for name in (*BESIDE, "publication", "nothing")}
    for (start_s, before), (end_s, after) in pairwise(tokens):
        if start_s < first_s or after < before or end_s - start_s > 1:
            continue  # before the warm-up's end, or between two runs
        within = [name for name in spans if any(a < end_s and start_s < b for a, b in spans[name])]
        for name in ["publication"] if "publication" in within else within or ["nothing"]:
            made[name][0] += end_s - start_s
            made[name][1] += after - before
    usual = made["nothing"][1] / max(made["nothing"][0], 1e-9)
    return {
        name: {"seconds": round(seconds, 1), "rate": round(number / seconds / usual, 2)}
        for name, (seconds, number) in made.items()
        if seconds and name in BESIDE
    }


if __name__ == "__main__":
    main()
