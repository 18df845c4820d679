"""Held-out accuracy, greedy and sampled, on one pinned version (design section 8)."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asyppo_async.config.sections import EvaluationSection
from asyppo_async.trainer.coordinator.accuracy import average, passes
from asyppo_async.trainer.coordinator.pinning import Pin, Pinning
from asyppo_async.trainer.coordinator.rewards import RewardPool, Scored
from asyppo_async.trainer.coordinator.rollouts import Decode, decoded
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
    pass_at: Mapping[str, float]
    """pass@k at temperature 1, by k = 1, 2, 4, ... up to the samples per prompt."""
    pass_at_standard_error: Mapping[str, float]
    accuracy_by_task: Mapping[str, float]
    """`accuracy` of each task of a mix; empty where there is one task."""
    greedy_accuracy: float
    """NaN where it was not asked for."""
    mean_reward: float
    mean_length_tokens: float
    repeated_responses: int
    """Responses that a publication cut through and that were made again on the next version."""
    failed_responses: int
    """Without a reward (late or failed); they count as wrong."""
    server: str
    """The one that stood aside for it and skipped publications; empty: any."""
    skipped_publications: int
    """That the server missed; the first one after the evaluation brings it up to date."""
    held_s: float
    """How long publications waited for this evaluation; 0 where a server stood aside."""
    trainer_wait_s: float
    """How long the training loop waited meanwhile, for batches and for held publications."""
    seconds: float


@dataclass(frozen=True, slots=True)
class _Scores:
    rewards: list[float]
    lengths: list[int]
    repeated: int
    failed: int
    oldest_version: int
    version: int

    @property
    def right(self) -> list[bool]:
        """Which samples have the reward 1."""
        return [reward >= 1.0 for reward in self.rewards]


class Evaluator:
    """Evaluates on held-out prompts over the fleet."""

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        rewards: RewardPool,
        decode: Decode,
        sampling: SamplingParams,
        settings: EvaluationSection,
        deadline_s: float,
        pinning: Pinning,
        waits: Waits,
    ) -> None:
        self._prompts = prompts
        self._rewards = rewards
        self._decode = decode
        self._sampling = sampling
        self._settings = settings
        self._deadline_s = deadline_s
        self._pinning = pinning
        self._waits = waits

    async def evaluate(self) -> Evaluation:
        """Evaluate the served version on every held-out prompt, with the whole fleet; nobody publishes meanwhile."""
        return await self._evaluate(self._prompts, self._pinning.on_whole_fleet())

    async def evaluate_beside_training(self) -> Evaluation:
        """Evaluate one version while training goes on, on the first `evaluation.num_prompts` prompts (0: all)."""
        async with self._pinning.beside_training() as pin:
            return await self._evaluate(self._prompts[: self._settings.num_prompts or None], pin)

    async def _evaluate(self, prompts: Sequence[Prompt], pin: Pin) -> Evaluation:
        started_s = time.monotonic()
        sampled = replace(self._sampling, temperature=1.0)
        scores = await self._score_all(pin, prompts, sampled, self._settings.samples_per_prompt)
        greedy, greedy_scores = math.nan, []
        if self._settings.greedy:
            greedy_scores = await self._score_all(pin, prompts, replace(sampled, temperature=0.0), 1)
            greedy = average([score.right for score in greedy_scores]).value
        lengths = [length for score in scores for length in score.lengths]
        rewards = [reward for score in scores for reward in score.rewards]
        accuracy, pass_at = (
            average([score.right for score in scores]),
            passes([score.right for score in scores]),
        )
        return Evaluation(
            version=max(score.version for score in (*scores, *greedy_scores)),
            oldest_version=min(score.oldest_version for score in (*scores, *greedy_scores)),
            prompts=len(prompts),
            samples=len(rewards),
            accuracy=accuracy.value,
            accuracy_standard_error=accuracy.standard_error,
            pass_at={str(k): estimate.value for k, estimate in pass_at.items()},
            pass_at_standard_error={str(k): estimate.standard_error for k, estimate in pass_at.items()},
            accuracy_by_task=_by_task(prompts, scores),
            greedy_accuracy=greedy,
            mean_reward=sum(rewards) / len(rewards),
            mean_length_tokens=sum(lengths) / len(lengths),
            repeated_responses=sum(score.repeated for score in scores),
            failed_responses=sum(score.failed for score in scores),
            server=pin.member.address if pin.member is not None else "",
            skipped_publications=pin.skipped_publications,
            held_s=pin.held_s,
            trainer_wait_s=pin.trainer_wait_s,
            seconds=time.monotonic() - started_s,
        )

    async def _score_all(
        self, pin: Pin, prompts: Sequence[Prompt], sampling: SamplingParams, num_samples: int
    ) -> list[_Scores]:
        room = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)

        async def one(prompt: Prompt) -> _Scores:
            async with room:
                return await self._score_prompt(pin, prompt, sampling, num_samples)

        async with asyncio.TaskGroup() as tasks:
            scores = [tasks.create_task(one(prompt)) for prompt in prompts]
        return [score.result() for score in scores]

    async def _score_prompt(
        self, pin: Pin, prompt: Prompt, sampling: SamplingParams, num_samples: int
    ) -> _Scores:
        responses: list[Response] = []
        repeated = 0
        while len(responses) < num_samples:
            generated = await pin.generate(
                prompt,
                num_samples=num_samples - len(responses),
                sampling=sampling,
                deadline_s=self._deadline_s,
                on_tokens=lambda _: self._waits.progress(),
            )
            whole = [response for response in generated.responses if _is_of_one_version(response)]
            repeated += len(generated.responses) - len(whole)
            responses += whole
        texts = await decoded(responses, self._decode, generated.server)
        async with asyncio.TaskGroup() as tasks:
            outcomes = [tasks.create_task(self._rewards.score(prompt, text)) for text in texts]
        values = [outcome.result() for outcome in outcomes]
        return _Scores(
            rewards=[value.value if isinstance(value, Scored) else -1.0 for value in values],
            lengths=[len(response.token_ids) for response in responses],
            repeated=repeated,
            failed=sum(not isinstance(value, Scored) for value in values),
            oldest_version=min(response.versions.oldest for response in responses),
            version=max(response.versions.newest for response in responses),
        )


def _is_of_one_version(response: Response) -> bool:
    return response.versions.oldest == response.versions.newest


def _by_task(prompts: Sequence[Prompt], scores: Sequence[_Scores]) -> dict[str, float]:
    rows: dict[str, list[list[bool]]] = {}
    for prompt, score in zip(prompts, scores, strict=True):
        rows.setdefault(prompt.task, []).append(score.right)
    return {task: average(right).value for task, right in sorted(rows.items())} if len(rows) > 1 else {}
