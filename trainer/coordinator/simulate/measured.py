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
from asyppo_async.trainer.coordinator.simulate.plan import division_of, num_warm_up, scenario_of
from asyppo_async.trainer.coordinator.simulate.world import World

_NUM_FIRST = 2
"""First steps of a run that are left out: compilation, caches, an empty queue."""
_NUM_SIMULATED = 8
_SLOWEST, _FASTEST, _PRECISION = 1e-4, 1e4, 0.005
"""Of the search for the fleet's speed, in times of the assumed one."""
IN_FLIGHT = "rollout/in_flight_mean_s"
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
    in_flight_s: float
    """Of a group, from its admission until it was generated and rewarded."""
    training_s: float
    """What is left of a step without wait and publication."""
    publication_s: float
    pause_s: float
    batch_tokens: float
    lengths: Lengths

    def is_of(self, config: TrainConfig) -> bool:
        """Whether the run had these settings, what is assumed of the machines aside."""
        return config.model_copy(update={"simulate": self.config.simulate}) == self.config


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
    if IN_FLIGHT not in rows[-1]:
        raise ConfigError(f"{path} has no {IN_FLIGHT}: the run was made before it was measured; run it again")
    later = rows[_NUM_FIRST:]
    publication_s, pause_s = _median(later, "time/publication_s"), _median(later, "weights/commit_s")
    return Measured(
        config=config,
        num_steps=len(rows),
        step_s=_median(later, "time/step_s"),
        wait_s=_median(later, "time/wait_s"),
        in_flight_s=_median(later, IN_FLIGHT),
        training_s=statistics.median(
            row["time/step_s"] - row["time/wait_s"] - row["time/publication_s"] for row in later
        ),
        publication_s=publication_s,
        pause_s=min(pause_s, publication_s),
        batch_tokens=_median(later, "batch/tokens"),
        lengths=_lengths(later),
    )


def assume(config: TrainConfig, measured: Measured) -> TrainConfig:
    """`config` with the measured speeds, lengths and times in its `[simulate]`.

    The speed of the fleet is the one at which the run, simulated as it was, takes as long to generate as it did: what
    a synchronous run waits for a batch, what a group of another is in flight. Only the ratio of the speeds alone and
    full is left as assumed.
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
    assumed = _with_lengths(assumed, measured.lengths)
    as_it_was = measured.config.model_copy(update={"simulate": assumed})
    return config.model_copy(update={"simulate": _at_speed(config, assumed, _speed_of(as_it_was, measured))})


def _speed_of(as_it_was: TrainConfig, measured: Measured) -> float:
    """By bisection: how many times the assumed speed the fleet has."""
    is_synchronous = as_it_was.staleness.max_staleness == 0
    wanted_s = max(1e-3, measured.wait_s if is_synchronous else measured.in_flight_s)

    def generation_s(speed: float) -> float:
        config = as_it_was.model_copy(update={"simulate": _at_speed(as_it_was, as_it_was.simulate, speed)})
        world = World(scenario_of(config, division_of(config)), debug=False)
        steps = world.run(until_step=num_warm_up(config) + _NUM_SIMULATED).steps[num_warm_up(config) :]
        return statistics.fmean(step.waited_s if is_synchronous else step.in_flight_s for step in steps)

    slow, fast = _SLOWEST, _FASTEST
    while fast / slow > 1 + _PRECISION:
        middle = math.sqrt(slow * fast)
        slow, fast = (middle, fast) if generation_s(middle) > wanted_s else (slow, middle)
    return math.sqrt(slow * fast)


def _at_speed(config: TrainConfig, assumed: SimulateSection, speed: float) -> SimulateSection:
    """Both speeds scaled, the one of a full server limited to what that many slots can make."""
    alone = assumed.alone_tokens_per_s
    full = min(max(alone, assumed.full_tokens_per_s), alone * config.fleet.max_num_seqs)
    return assumed.model_copy(update={"alone_tokens_per_s": alone * speed, "full_tokens_per_s": full * speed})


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
