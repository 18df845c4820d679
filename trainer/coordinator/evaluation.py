"""Held-out accuracy, greedy and sampled, on one pinned version (design section 8)."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from asyppo_async.config.sections import EvaluationSection
from asyppo_async.trainer.coordinator.rewards import RewardPool, Scored
from asyppo_async.trainer.coordinator.rollouts import Decode, Generator
from asyppo_async.trainer.coordinator.waits import Waits
from asyppo_async.types import Prompt, Response, SamplingParams

MAX_CONCURRENT_PROMPTS = 64
"""Prompts of an evaluation that are generated at once, so that a fleet's queue keeps room for training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One row of evaluations.jsonl."""

    version: int
    """The version that the responses are of; the newest of them where a publication came in between."""
    oldest_version: int
    """Less than `version` where the evaluation outlasted `hold_s`, so that its responses are of several versions."""
    prompts: int
    samples: int
    accuracy: float
    """Share of right responses (reward 1) at temperature 1: avg@k over the prompts."""
    accuracy_standard_error: float
    """Over prompts; the samples of one prompt are not independent."""
    greedy_accuracy: float
    """NaN where it was not asked for."""
    mean_reward: float
    mean_length_tokens: float
    repeated_responses: int
    """Responses that a publication cut through and that were made again on the next version."""
    failed_responses: int
    """Without a reward (late or failed); they count as wrong."""
    held_s: float
    """How long a publication waited for this evaluation."""
    seconds: float


class PinnedVersion:
    """Lets an evaluation hold publications back, for a bounded time."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._free = asyncio.Event()
        self._free.set()
        self.held_s = 0.0
        """Time that publications waited since `hold` was entered last."""

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Within the block publications wait, at most `hold_s` each."""
        self._free.clear()
        self.held_s = 0.0
        try:
            yield
        finally:
            self._free.set()

    async def wait(self) -> None:
        """Called before a publication commits."""
        if self._free.is_set():
            return
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._hold_s):
                await self._free.wait()
        except TimeoutError:
            self._free.set()  # it had its time: responses that cross the version are made again
        self.held_s += time.monotonic() - started_s


@dataclass(frozen=True, slots=True)
class _Scores:
    rewards: list[float]
    lengths: list[int]
    repeated: int
    failed: int
    oldest_version: int
    version: int


class Evaluator:
    """Evaluates on held-out prompts over the fleet."""

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        generator: Generator,
        rewards: RewardPool,
        decode: Decode,
        sampling: SamplingParams,
        settings: EvaluationSection,
        deadline_s: float,
        pinned: PinnedVersion,
        waits: Waits,
    ) -> None:
        self._prompts = prompts
        self._generator = generator
        self._rewards = rewards
        self._decode = decode
        self._sampling = sampling
        self._settings = settings
        self._deadline_s = deadline_s
        self._pinned = pinned
        self._waits = waits

    async def evaluate(self, num_prompts: int = 0) -> Evaluation:
        """Evaluate the served version on the first `num_prompts` held-out prompts; 0: all."""
        prompts = self._prompts[: num_prompts or None]
        started_s = time.monotonic()
        sampled = replace(self._sampling, temperature=1.0)
        async with self._pinned.hold():
            scores = await self._score_all(prompts, sampled, self._settings.samples_per_prompt)
            greedy, greedy_scores = math.nan, []
            if self._settings.greedy:
                greedy_scores = await self._score_all(prompts, replace(sampled, temperature=0.0), 1)
                greedy = _accuracy([score.rewards for score in greedy_scores])
        lengths = [length for score in scores for length in score.lengths]
        rewards = [reward for score in scores for reward in score.rewards]
        return Evaluation(
            version=max(score.version for score in (*scores, *greedy_scores)),
            oldest_version=min(score.oldest_version for score in (*scores, *greedy_scores)),
            prompts=len(prompts),
            samples=len(rewards),
            accuracy=_accuracy([score.rewards for score in scores]),
            accuracy_standard_error=_standard_error([score.rewards for score in scores]),
            greedy_accuracy=greedy,
            mean_reward=sum(rewards) / len(rewards),
            mean_length_tokens=sum(lengths) / len(lengths),
            repeated_responses=sum(score.repeated for score in scores),
            failed_responses=sum(score.failed for score in scores),
            held_s=self._pinned.held_s,
            seconds=time.monotonic() - started_s,
        )

    async def _score_all(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, num_samples: int
    ) -> list[_Scores]:
        room = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)

        async def one(prompt: Prompt) -> _Scores:
            async with room:
                return await self._score_prompt(prompt, sampling, num_samples)

        async with asyncio.TaskGroup() as tasks:
            scores = [tasks.create_task(one(prompt)) for prompt in prompts]
        return [score.result() for score in scores]

    async def _score_prompt(self, prompt: Prompt, sampling: SamplingParams, num_samples: int) -> _Scores:
        responses: list[Response] = []
        repeated = 0
        while len(responses) < num_samples:
            generated = await self._generator.generate(
                prompt,
                num_samples=num_samples - len(responses),
                sampling=sampling,
                deadline_s=self._deadline_s,
                on_tokens=lambda _: self._waits.progress(),
            )
            whole = [response for response in generated.responses if _is_of_one_version(response)]
            repeated += len(generated.responses) - len(whole)
            responses += whole
        async with asyncio.TaskGroup() as tasks:
            outcomes = [
                tasks.create_task(self._rewards.score(prompt, self._decode(response.token_ids.tolist())))
                for response in responses
            ]
        values = [outcome.result() for outcome in outcomes]
        return _Scores(
            rewards=[value.value if isinstance(value, Scored) else -1.0 for value in values],
            lengths=[len(response.token_ids) for response in responses],
            repeated=repeated,
            failed=sum(not isinstance(value, Scored) for value in values),
            oldest_version=min(int(response.versions.min()) for response in responses),
            version=max(int(response.versions.max()) for response in responses),
        )


def _is_of_one_version(response: Response) -> bool:
    return bool(response.versions[0] == response.versions[-1])


def _accuracy(rewards: Sequence[Sequence[float]]) -> float:
    """Mean over prompts of the share of right responses."""
    return sum(_right(row) for row in rewards) / len(rewards)


def _right(rewards: Sequence[float]) -> float:
    return sum(reward >= 1.0 for reward in rewards) / len(rewards)


def _standard_error(rewards: Sequence[Sequence[float]]) -> float:
    if len(rewards) < 2:
        return math.nan
    shares = [_right(row) for row in rewards]
    mean = sum(shares) / len(shares)
    variance = sum((share - mean) ** 2 for share in shares) / (len(shares) - 1)
    return math.sqrt(variance / len(shares))
