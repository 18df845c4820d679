"""What is simulated: servers, lengths, trainer, publications, faults. All of it follows from numbers and one seed."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

from asyppo_async.algorithms.seeded import seeded_uniform
from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.draws import Draw
from asyppo_async.trainer.coordinator.sampler import Candidate, EpochSampler

FaultKind = Literal["crash", "freeze", "slow", "pin", "kill_coordinator"]
KvOnUpdate = Literal["keep", "recompute"]

_NORMAL = NormalDist()
_ROUNDING = 1e-9
"""Of speeds that were scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """One fleet server. A decode iteration takes `base + per_sequence * running` seconds and gives each a token."""

    num_slots: int
    base_s: float
    per_sequence_s: float
    prefill_s_per_token: float
    """Decoding stands still while a prompt is read; the members of a group share the prompt's KV."""
    joins_s: float
    """0: there from the start."""

    @classmethod
    def from_rates(
        cls,
        *,
        num_slots: int,
        alone_tokens_per_s: float,
        full_tokens_per_s: float,
        prefill_tokens_per_s: float,
    ) -> "ServerPlan":
        """From the speed of one sequence alone, and of all together with every slot taken.

        Raises:
            ValueError: all together cannot be slower than one, or faster than as many alone.
        """
        most = num_slots * alone_tokens_per_s * (1 + _ROUNDING)
        if not alone_tokens_per_s <= full_tokens_per_s <= most:
            raise ValueError(
                f"{num_slots} sequences make between {alone_tokens_per_s:g} and "
                f"{num_slots * alone_tokens_per_s:g} tokens/s if one alone makes {alone_tokens_per_s:g}, "
                f"got {full_tokens_per_s:g}"
            )
        more = max(1, num_slots - 1)
        per_sequence_s = max(0.0, num_slots / full_tokens_per_s - 1 / alone_tokens_per_s) / more
        return cls(
            num_slots=num_slots,
            base_s=1 / alone_tokens_per_s - per_sequence_s,
            per_sequence_s=per_sequence_s,
            prefill_s_per_token=1 / prefill_tokens_per_s,
            joins_s=0.0,
        )

    @property
    def full_tokens_per_s(self) -> float:
        """With every slot taken."""
        return self.num_slots / (self.base_s + self.per_sequence_s * self.num_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`crash`: gone, back as a joiner after the duration. `freeze`: no progress. `slow`: a tenth of the speed.

    `pin`: stands aside for an evaluation, if others are left to train with.
    """

    kind: FaultKind
    at_s: float
    duration_s: float
    server: int
    """Index; of no meaning for `kill_coordinator`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan:
    """Response lengths: log-normal over prompts (the tail belongs to the prompt), and again within a prompt."""

    median_tokens: float
    prompt_sigma: float
    member_sigma: float
    max_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A whole run. Fractions are probabilities, drawn from hashes so that they do not depend on the schedule."""

    seed: int
    settings: DecisionSettings
    num_prompts: int
    num_epochs: int | None
    least_acceptance: float
    """Of a prompt by the sampler; the others lie between it and 1. 1: every candidate is a draw."""
    servers: tuple[ServerPlan, ...]
    lengths: LengthPlan
    step_s: float
    step_s_per_token: float
    skipped_fraction: float
    """Steps in which nothing is trainable: short, version + 1 all the same."""
    critic_ahead: bool
    publication_s: float
    pause_s: float
    """How long a server stands still to load the weights."""
    weights: Literal["staged", "direct"]
    """`direct`: the old weights are gone from the pause on, so the loss of a receiver leaves the others without."""
    publication_blocks_trainer: bool
    kv_on_update: KvOnUpdate
    """`recompute`: after a publication a server reads prompts and responses in flight again."""
    members_apart: bool
    """Each member of a group goes to a server of its own choice; else the group stays together (one prefill)."""
    failed_publication_fraction: float
    """Publications that have to be sent again."""
    filtered_fraction: float
    """Groups with equal rewards."""
    failed_reward_fraction: float
    """Of members."""
    doomed_fraction: float
    """Prompts whose every attempt fails."""
    lost_fraction: float
    """Of messages that a group is complete."""
    duplicated_fraction: float
    deadline_s: float
    """For a whole attempt; what is missing then is lost."""
    faults: tuple[Fault, ...]
    checkpoint_every_steps: int
    restores_queue: bool
    """Whether a resumed coordinator still has the queued trajectories."""

    def chance(self, what: str, *keys: int | str) -> float:
        """A number in [0, 1) that depends on the seed and the names only."""
        return seeded_uniform(self.seed, what, *keys)

    def happens(self, fraction: float, what: str, *keys: int | str) -> bool:
        """Whether a thing that happens to this fraction happens to this one; most fractions are 0 and cost nothing."""
        return fraction > 0 and self.chance(what, *keys) < fraction

    def training_s(self, num_tokens: int) -> float:
        """Seconds of a step with a batch of so many tokens."""
        return self.step_s + self.step_s_per_token * num_tokens

    def length(self, draw: Draw, member: int) -> int:
        """Tokens of one response; the same prompt is long on every attempt."""
        plan = self.lengths
        log_length = math.log(plan.median_tokens)
        if plan.prompt_sigma:
            log_length += plan.prompt_sigma * _gauss(self.seed, "prompt", draw.prompt_id)
        if plan.member_sigma:
            of_member = _gauss(self.seed, "member", draw.prompt_id, draw.draw_id, draw.attempt, member)
            log_length += plan.member_sigma * of_member
        return max(1, min(plan.max_tokens, round(math.exp(log_length))))


@lru_cache(maxsize=4096)
def _gauss(seed: int, what: str, *keys: int | str) -> float:
    """The members of a group ask for the same prompt."""
    return _NORMAL.inv_cdf(max(1e-15, seeded_uniform(seed, what, *keys)))


class ChoosingSampler:
    """Implements `Sampler`: by epochs, each prompt with an acceptance of its own."""

    def __init__(self, scenario: Scenario) -> None:
        prompt_ids = [f"p{index}" for index in range(scenario.num_prompts)]
        self._scenario = scenario
        self._epochs = EpochSampler(prompt_ids=prompt_ids, seed=scenario.seed, num_epochs=scenario.num_epochs)

    @property
    def num_prompts(self) -> int:
        return self._epochs.num_prompts

    @property
    def num_considered(self) -> int:
        return self._epochs.num_considered

    @property
    def exhausted(self) -> bool:
        return self._epochs.exhausted

    def seek(self, num_considered: int) -> None:
        self._epochs.seek(num_considered)

    def next_candidate(self) -> Candidate:
        candidate, least = self._epochs.next_candidate(), self._scenario.least_acceptance
        if least == 1:
            return candidate
        acceptance = least + (1 - least) * self._scenario.chance("acceptance", candidate.prompt_id)
        accepted = self._scenario.chance("accepted", candidate.number) < acceptance
        return replace(candidate, accepted=accepted, acceptance=acceptance)


def sampler_of(scenario: Scenario) -> ChoosingSampler:
    """The prompts of a scenario."""
    return ChoosingSampler(scenario)
