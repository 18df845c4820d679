"""`asyppo-train best-of RUN`: the run's critics as process reward on held-out prompts, against a vote and a first try.

Best of n: n responses of each prompt, the critics choose one by their last, mean or lowest value. Beam search: n
beginnings grow by m tokens at a time; the b of highest value stay and fill the n places again, so that as many tokens
are sampled as n whole responses have.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyppo_async.algorithms.best_of import SCORES, choose_best, keep_best, majority, score_of
from asyppo_async.config.load import load_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.tasks.arithmetic import final_number
from asyppo_async.trainer.coordinator.critic_side import CriticSide
from asyppo_async.trainer.coordinator.rewards import Scored
from asyppo_async.trainer.coordinator.trace import Trace
from asyppo_async.trainer.material import Material, open_material
from asyppo_async.trainer.parts import Parts, open_parts_once
from asyppo_async.trainer.run_folder import RunFolder
from asyppo_async.types import Float32Array, Int32Array, Prompt, concatenate_sequences

MAX_CONCURRENT_PROMPTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOf:
    """Accuracy on the held-out prompts by way of choosing."""

    prompts: int
    n: int
    accuracy: dict[str, float]
    standard_error: dict[str, float]
    tokens: dict[str, float]
    """Sampled tokens of a prompt, mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """n beginnings, m tokens at a time, the b best go on."""

    n: int
    beams: int
    step_tokens: int


def best_of_config(folder: Path, overrides: Sequence[str]) -> TrainConfig:
    """The settings of a run, with its trained actor and critics in place of the initial ones.

    Raises:
        ConfigError: `folder` is no run folder, or it holds no trained models.
    """
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is no run folder: it has no config.toml")
    for part in ("model", "critics"):
        if not (folder / part).is_dir():
            raise ConfigError(f"run {folder} has no {part}/: it has not ended, or it has no critics")
    trained = [f"actor.model={folder / 'model'}", f"critic.model={folder / 'critics'}"]
    config = load_config(folder / "config.toml", [*trained, *overrides])
    run = {"name": f"{config.run.name}-best-of", "overwrite": True}
    return config.without_training_of_actor().model_copy(
        update={
            "run": config.run.model_copy(update=run),
            "critic": config.critic.without_own_models(),  # the trained ones lie in one folder
        }
    )


async def best_of(config: TrainConfig, search: Search, on_phase: Callable[[str], None]) -> BestOf:
    """Sample, score, choose, on every held-out prompt (`evaluation.num_prompts`; 0: all).

    Raises:
        AsyppoError: As an evaluation.
    """
    material = await open_material(config)
    prompts = material.heldout[: config.evaluation.num_prompts or None]
    async with open_parts_once(config, material, RunFolder.create(config), on_phase, on_phase) as parts:
        chooser = _Chooser(config, material, parts, search)
        room = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)

        async def one(prompt: Prompt) -> "_Outcome":
            async with room:
                return await chooser.of(prompt)

        on_phase(f"best of {search.n} on {len(prompts)} prompts")
        async with asyncio.TaskGroup() as tasks:
            outcomes = [tasks.create_task(one(prompt)) for prompt in prompts]
    return _summed([outcome.result() for outcome in outcomes], search.n)


@dataclass(frozen=True, slots=True)
class _Outcome:
    right: dict[str, bool]
    tokens: dict[str, int]


class _Chooser:
    def __init__(self, config: TrainConfig, material: Material, parts: Parts, search: Search) -> None:
        self._config = config
        self._material = material
        self._parts = parts
        self._search = search
        self._side = CriticSide(config, parts.critics)

    async def of(self, prompt: Prompt) -> _Outcome:
        """Every way of choosing, on one prompt."""
        whole = await self._sample(prompt, self._search.n, self._material.sampling.max_tokens)
        values = await self._values([(prompt.token_ids, ids) for ids in whole])
        texts = [self._material.decode(ids.tolist()) for ids in whole]
        chosen = {f"critic, {how}": choose_best(values, how) for how in SCORES}
        chosen |= {"majority": majority([_answer(prompt, text) for text in texts]), "first sample": 0}
        scores = [await self._is_right(prompt, ids) for ids in whole]
        right = {way: scores[index] for way, index in chosen.items()} | {"any of them": any(scores)}
        tokens = dict.fromkeys(right, sum(map(len, whole))) | {"first sample": len(whole[0])}
        found, num_tokens = await self._beam(prompt)
        right["beam search"], tokens["beam search"] = await self._is_right(prompt, found), num_tokens
        return _Outcome(right, tokens)

    async def _beam(self, prompt: Prompt) -> tuple[Int32Array, int]:
        """The end of the search with the highest last value, and how many tokens were sampled."""
        search, stops = self._search, self._material.sampling.stop_token_ids
        longest = self._material.sampling.max_tokens
        open_ends: list[Int32Array] = [np.zeros(0, dtype=np.int32)]
        ended: list[Int32Array] = []
        num_sampled = 0
        while open_ends and len(ended) < search.n:
            places = search.n - len(ended)
            grown: list[Int32Array] = []
            for index, start in enumerate(open_ends):
                count = places // len(open_ends) + (index < places % len(open_ends))
                step = min(search.step_tokens, longest - len(start))
                longer = replace(prompt, token_ids=(*prompt.token_ids, *start.tolist()))
                parts = await self._sample(longer, count, step) if count else []
                num_sampled += sum(map(len, parts))
                grown += [np.concatenate([start, part]) for part in parts]
            ended += [ids for ids in grown if ids[-1] in stops or len(ids) >= longest]
            going = [ids for ids in grown if ids[-1] not in stops and len(ids) < longest]
            if not going:
                break
            values = await self._values([(prompt.token_ids, ids) for ids in going])
            best = keep_best([score_of(own, "last") for own in values], search.beams)
            open_ends = [going[index] for index in best]
        values = await self._values([(prompt.token_ids, ids) for ids in ended])
        return ended[choose_best(values, "last")], num_sampled

    async def _sample(self, prompt: Prompt, count: int, max_tokens: int) -> list[Int32Array]:
        generated = await self._parts.fleet.generate(
            prompt,
            num_samples=count,
            sampling=replace(self._material.sampling, max_tokens=max_tokens),
            deadline_s=self._config.fleet.group_deadline_s,
            on_tokens=lambda _: None,
            on_server=lambda _: None,
        )
        return [response.token_ids for response in generated.responses]

    async def _values(self, pairs: Sequence[tuple[tuple[int, ...], Int32Array]]) -> list[NDArray[np.float32]]:
        """[T] mean over the critics, of each response."""
        sequences = concatenate_sequences(pairs)
        values: Float32Array = (await self._side.values_of(sequences, Trace())).mean(axis=0)
        return np.split(values, np.cumsum(sequences.response_lengths)[:-1])

    async def _is_right(self, prompt: Prompt, ids: Int32Array) -> bool:
        outcome = await self._parts.rewards.score(prompt, self._material.decode(ids.tolist()))
        return isinstance(outcome, Scored) and outcome.value >= 1


def _answer(prompt: Prompt, text: str) -> str | None:
    """What is voted on: the final number, or the last box, or the whole text."""
    if prompt.task == "arithmetic":
        return final_number(text)
    _, found, rest = text.rpartition("\\boxed{")
    return (rest.partition("}")[0] if found else text.strip()) or None


def _summed(outcomes: Sequence[_Outcome], number: int) -> BestOf:
    ways = list(outcomes[0].right)
    shares = {way: float(np.mean([outcome.right[way] for outcome in outcomes])) for way in ways}
    return BestOf(
        prompts=len(outcomes),
        n=number,
        accuracy=shares,
        standard_error={way: float(np.sqrt(p * (1 - p) / len(outcomes))) for way, p in shares.items()},
        tokens={way: float(np.mean([outcome.tokens[way] for outcome in outcomes])) for way in ways},
    )
