"""What a run should not do unnoticed: cut answers, equal rewards, answers that shrink, critics that know nothing."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW_STEPS = 10
"""Means are over so many steps: at the start, and now."""
LENGTH_FALL = 0.3
POSITION_CORRELATION = 0.1
BLIND_STEPS = 20
"""Steps without a break in which a critic's explained variance is below 0."""
CUT_SHARE = 0.5
EQUAL_SHARE = 0.9

_LENGTH = "response/length_mean_tokens"
_CORRELATION = "advantage/correlation_with_position"
_STOPPED = "response/stopped_share"
_EQUAL = "reward/groups_all_equal"


@dataclass(slots=True)
class Alarms:
    """Reads the rows of a run one after the other; every alarm is raised once, and again after it had ended."""

    _first_lengths: list[float] = field(default_factory=list)
    _lengths: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _correlations: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _cut_shares: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _equal_shares: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _blind: dict[str, int] = field(default_factory=dict)
    _raised: set[str] = field(default_factory=set)

    def after(self, row: Mapping[str, object]) -> list[str]:
        """Words of the alarms that this step raises, each with what to do."""
        words = []
        for name, text in (
            *self._cutting(row),
            *self._equality(row),
            *self._shrinking(row),
            *self._blindness(row),
        ):
            if text is None:
                self._raised.discard(name)
            elif name not in self._raised:
                self._raised.add(name)
                words.append(text)
        return words

    @property
    def raised(self) -> frozenset[str]:
        """Alarms that hold now: `cut`, `equal`, `length`, or the name of a critic."""
        return frozenset(self._raised)

    def _cutting(self, row: Mapping[str, object]) -> list[tuple[str, str | None]]:
        """Too short a limit teaches nothing but brevity: a response that is cut off has no answer."""
        stopped = _number(row, _STOPPED)
        if math.isnan(stopped):
            return []
        self._cut_shares.append(1 - stopped)
        cut = _mean(list(self._cut_shares))
        if cut <= CUT_SHARE:
            return [("cut", None)]
        return [
            (
                "cut",
                f"{cut:.0%} of the responses were cut off at sampling.max_tokens before they had ended. Raise it, or "
                "say with algorithm.truncated what a response that is cut off counts",
            )
        ]

    def _equality(self, row: Mapping[str, object]) -> list[tuple[str, str | None]]:
        """Where all responses to a prompt earn the same, their comparison says nothing."""
        equal = _number(row, _EQUAL)
        if math.isnan(equal) or row.get("batch/groups") == row.get("batch/responses"):  # groups of one
            return []
        self._equal_shares.append(equal)
        share = _mean(list(self._equal_shares))
        if share <= EQUAL_SHARE:
            return [("equal", None)]
        return [
            (
                "equal",
                f"in {share:.0%} of the groups all responses earned the same reward, so that there is next to nothing "
                "to learn from. Look at samples.jsonl: is the task too easy or too hard, is an answer cut off or not "
                "understood? Choose other prompts, or let [selection] choose them",
            )
        ]

    def _shrinking(self, row: Mapping[str, object]) -> list[tuple[str, str | None]]:
        """VC-PPO's failure: answers shorten while the advantage depends on where in the answer a token stands."""
        length, correlation = _number(row, _LENGTH), _number(row, _CORRELATION)
        if math.isnan(length) or math.isnan(correlation):
            return []
        if len(self._first_lengths) < WINDOW_STEPS:
            self._first_lengths.append(length)
        self._lengths.append(length)
        self._correlations.append(correlation)
        if len(self._lengths) < WINDOW_STEPS:
            return []
        start, now = _mean(self._first_lengths), _mean(list(self._lengths))
        tilt = _mean(list(self._correlations))
        if now > (1 - LENGTH_FALL) * start or abs(tilt) <= POSITION_CORRELATION:
            return [("length", None)]
        return [
            (
                "length",
                f"answers have become shorter by {1 - now / start:.0%} ({start:.1f} to {now:.1f} tokens) while the "
                f"advantage depends on the position in the answer (correlation {tilt:+.2f}): the critics' values are "
                "biased along it. Pretrain them (asyppo-train pretrain-critics), set critic.warmup_steps, or raise "
                "algorithm.lambda_actor",
            )
        ]

    def _blindness(self, row: Mapping[str, object]) -> list[tuple[str, str | None]]:
        found: list[tuple[str, str | None]] = []
        for key in row:
            critic, _, kind = key.partition("/")
            if kind != "explained_variance_used" or not critic.startswith("critic_"):
                continue
            value = _number(row, key)
            if math.isnan(value):
                continue  # the returns of this batch did not vary
            self._blind[critic] = self._blind.get(critic, 0) + 1 if value < 0 else 0
            if self._blind[critic] < BLIND_STEPS:
                found.append((critic, None))
                continue
            found.append(
                (
                    critic,
                    f"{critic.replace('_', ' ')} has explained less than nothing of the returns for {BLIND_STEPS} "
                    f"steps (explained variance {value:.2f}): its values only add noise. Lower critic.learning_rate, "
                    "pretrain it, or use algorithm.estimator = 'evpo'",
                )
            )
        return found


def _number(row: Mapping[str, object], key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
