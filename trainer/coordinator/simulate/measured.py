"""What a run measured, as the assumptions of a simulation: its figures in, `[simulate]` out."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyppo_async.config.load import load_config
from asyppo_async.config.sections import SimulateSection, TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.simulate.plan import division_of, scenario_of
from asyppo_async.trainer.coordinator.simulate.scenario import Scenario
from asyppo_async.trainer.coordinator.simulate.world import World

_NUM_FIRST = 2
"""First steps of a run that are left out: compilation, caches, an empty queue."""
_P95 = 1.6449
"""Standard deviations from the median to the 95th percentile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of a response."""

    mean: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians over the steps of a run, the first ones left out."""

    config: TrainConfig
    num_steps: int
    step_s: float
    wait_s: float
    first_wait_s: float
    """Of the very first step, when the whole fleet generates and nobody trains."""
    training_s: float
    """What is left of a step without wait and publication."""
    publication_s: float
    pause_s: float
    batch_tokens: float
    lengths: Lengths
    first_lengths: Lengths
    """Of the first batch."""


def read_run(folder: Path) -> Measured:
    """The figures of a run folder.

    Raises:
        ConfigError: no such run, or too few steps.
    """
    path = folder / "metrics.jsonl"
    config = load_config(folder / "config.toml")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no metrics.jsonl; --from-run takes the folder of a run") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} holds a line that is no JSON: {error}") from None
    rows = [row for row in rows if not row.get("abandoned", False)]
    if len(rows) < _NUM_FIRST + 2:
        raise ConfigError(f"{path} has {len(rows)} steps; at least {_NUM_FIRST + 2} are needed")
    later = rows[_NUM_FIRST:]
    publication_s, pause_s = _median(later, "time/publication_s"), _median(later, "weights/commit_s")
    return Measured(
        config=config,
        num_steps=len(rows),
        step_s=_median(later, "time/step_s"),
        wait_s=_median(later, "time/wait_s"),
        first_wait_s=float(rows[0]["time/wait_s"]),
        training_s=statistics.median(
            row["time/step_s"] - row["time/wait_s"] - row["time/publication_s"] for row in later
        ),
        publication_s=publication_s,
        pause_s=min(pause_s, publication_s),
        batch_tokens=_median(later, "batch/tokens"),
        lengths=_lengths(later),
        first_lengths=_lengths(rows[:1]),
    )


def assume(config: TrainConfig, measured: Measured) -> TrainConfig:
    """`config` with the measured speeds, lengths and times in its `[simulate]`.

    The speed of the fleet is scaled so that the simulated wait for a batch is the measured one where nothing but
    generation is in it: every step of a synchronous run, the first step of another.
    """
    assumed = config.simulate.model_copy(
        update={
            "num_servers": max(1, len(measured.config.fleet.servers)),
            "trainer_gpus": 1,
            "prompt_tokens": 0,
            "train_tokens_per_s": measured.batch_tokens / max(1e-9, measured.training_s),
            "step_overhead_s": 0.0,
            "publication_s": measured.publication_s - measured.pause_s,
            "pause_s": measured.pause_s,
        }
    )
    is_synchronous = measured.config.staleness.max_staleness == 0
    wait_s = measured.wait_s if is_synchronous else measured.first_wait_s
    lengths = measured.lengths if is_synchronous else measured.first_lengths
    as_it_was = measured.config.model_copy(update={"simulate": _with_lengths(assumed, lengths)})
    speed = first_wait_s(scenario_of(as_it_was, division_of(as_it_was))) / max(1e-3, wait_s)
    assumed = _with_lengths(assumed, measured.lengths).model_copy(
        update={
            "alone_tokens_per_s": assumed.alone_tokens_per_s * speed,
            "full_tokens_per_s": assumed.full_tokens_per_s * speed,
        }
    )
    return config.model_copy(update={"simulate": assumed})


def _with_lengths(assumed: SimulateSection, lengths: Lengths) -> SimulateSection:
    """Log-normal lengths with this mean and percentile; half of the variance belongs to the prompt."""
    sigma = log_sigma(lengths.mean, lengths.p95)
    return assumed.model_copy(
        update={
            "median_tokens": lengths.mean / math.exp(sigma**2 / 2),
            "prompt_sigma": sigma / math.sqrt(2),
            "member_sigma": sigma / math.sqrt(2),
        }
    )


def first_wait_s(scenario: Scenario) -> float:
    """Seconds from the first admission to the first batch."""
    outcome = World(scenario, debug=False).run(until_step=1)
    return outcome.steps[0].began_s - scenario.publication_s - scenario.pause_s


def log_sigma(mean: float, p95: float) -> float:
    """Standard deviation of the log of a log-normal length with this mean and 95th percentile.

    `p95 / mean = exp(1.645 s - s^2 / 2)`; the smaller root, 0 if the percentile is below the mean.
    """
    discriminant = _P95**2 - 2 * math.log(max(1.0, p95 / max(1e-9, mean)))
    return _P95 - math.sqrt(max(0.0, discriminant))


def _lengths(rows: Sequence[Mapping[str, float]]) -> Lengths:
    return Lengths(
        mean=_median(rows, "response/length_mean_tokens"), p95=_median(rows, "response/length_p95_tokens")
    )


def _median(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """Of the rows that have it; 0 if none has."""
    return statistics.median([row[name] for row in rows if name in row] or [0.0])
