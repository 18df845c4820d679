"""What overlaps in a step, and what is computed from what: proven by the trace of scripted groups."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from asyppo_async.config.load import config_from_tree
from asyppo_async.trainer.coordinator.batch import Batch, build_batch
from asyppo_async.trainer.coordinator.measures.tokens import staleness_of
from asyppo_async.trainer.coordinator.report import step_metrics, token_use
from asyppo_async.trainer.coordinator.step import StepResult, StepRunner
from asyppo_async.trainer.coordinator.trace import Span, Trace
from asyppo_async.trainer.worker.messages import (
    ActorForward,
    ActorForwardResult,
    ActorTrain,
    CriticForward,
    CriticForwardResult,
    CriticTrain,
    OptimizerStep,
    TrainResult,
)
from tests.unit.coordinator.worked_batch import VALUES, worked_groups

PHASE_S = 0.2
"""Long against the hop to a thread, so that what is started together overlaps on a busy machine too."""


def update() -> TrainResult:
    step = OptimizerStep(
        loss=0.1,
        grad_norm=1.0,
        learning_rate=1e-3,
        skipped=False,
        num_tokens=10,
        entropy=0.5,
        clip_fraction_low=0.0,
        clip_fraction_high=0.1,
        ratio_mean=1.0,
        ratio_max=1.2,
        kl_proximal=0.01,
        kl_proximal_k1=0.02,
        ratio_p1=0.9,
        ratio_p99=1.1,
    )
    return TrainResult(steps=(step,), compute_s=PHASE_S)


@dataclass
class ScriptedActor:
    proximal: float = -0.5
    trains: list[ActorTrain] = field(default_factory=list)

    async def forward(self, request: ActorForward) -> ActorForwardResult:
        await asyncio.sleep(PHASE_S)
        logprobs = np.full(request.sequences.num_response_tokens, self.proximal, dtype=np.float32)
        return ActorForwardResult(logprobs=logprobs, entropies=np.ones_like(logprobs), compute_s=PHASE_S)

    async def train(self, request: ActorTrain) -> TrainResult:
        await asyncio.sleep(4 * PHASE_S)
        self.trains.append(request)
        return update()


@dataclass
class ScriptedCritic:
    """Its values move by 0.1 with every update, so that a test sees which ones were used."""

    values: list[float]
    trains: list[CriticTrain] = field(default_factory=list)

    async def forward(self, request: CriticForward) -> CriticForwardResult:
        await asyncio.sleep(PHASE_S)
        values = np.array(self.values, dtype=np.float32) + np.float32(0.1 * len(self.trains))
        return CriticForwardResult(values=values, compute_s=PHASE_S)

    async def train(self, request: CriticTrain) -> TrainResult:
        await asyncio.sleep(PHASE_S)
        self.trains.append(request)
        return update()


def batch_of(step: int) -> Batch:
    return build_batch(step, worked_groups(), num_critics=2, critic_data="group_split", seed=0)


async def run_steps(schedule: str, *overrides: str, steps: int = 1, actor: ScriptedActor | None = None):
    tree = {"actor": {"model": "a"}, "critic": {"model": "c"}, "batch": {"prompts": 2, "group_size": 2}}
    defaults = ["critic.mini_batches=1", "actor.mini_batches=1", f"algorithm.schedule={schedule}"]
    config = config_from_tree(tree, [*defaults, *overrides])
    critics = (ScriptedCritic(VALUES[0]), ScriptedCritic(VALUES[1]))
    runner = StepRunner(config, actor or ScriptedActor(), critics)
    results: list[tuple[StepResult, Trace]] = []
    for step in range(steps):

        async def ahead(step: int = step) -> Batch | None:
            return batch_of(step + 1) if step + 1 < steps else None

        trace = Trace()
        results.append((await runner.run(batch_of(step), trace, ahead), trace))
    return results, critics


def spans(trace: Trace, phase: str, step: int | None = None) -> list[Span]:
    return [span for span in trace.spans if span.phase == phase and step in (None, span.step)]


def overlap(first: Span, second: Span) -> bool:
    return first.start_s < second.end_s and second.start_s < first.end_s


async def test_post_trains_critics_beside_the_proximal_forward_and_uses_their_new_values() -> None:
    ((result, trace),), critics = await run_steps("post")
    (proximal,), (actor_train,) = spans(trace, "actor_forward"), spans(trace, "actor_train")
    critic_trains, critic_forwards = spans(trace, "critic_train"), spans(trace, "critic_forward")
    assert len(critic_trains) == len(critic_forwards) == 2
    assert all(overlap(proximal, span) for span in critic_trains)
    assert overlap(*critic_trains), "critics train at once"
    assert min(span.start_s for span in critic_forwards) >= max(span.end_s for span in critic_trains)
    assert actor_train.start_s >= max(span.end_s for span in critic_forwards)
    np.testing.assert_allclose(result.values, np.array(VALUES) + 0.1, atol=1e-6)
    assert result.values_before is None
    assert all(len(critic.trains) == 1 for critic in critics)


async def test_pre_uses_values_from_before_and_trains_all_at_once() -> None:
    ((result, trace),), _ = await run_steps("pre")
    (proximal,), (actor_train,) = spans(trace, "actor_forward"), spans(trace, "actor_train")
    assert all(overlap(proximal, span) for span in spans(trace, "critic_forward"))
    assert all(overlap(actor_train, span) for span in spans(trace, "critic_train"))
    np.testing.assert_allclose(result.values, np.array(VALUES), atol=1e-6)


async def test_critic_ahead_trains_critics_on_the_next_batch_while_the_actor_trains() -> None:
    results, critics = await run_steps("critic_ahead", "staleness.max_staleness=2", steps=3)
    for step, (result, trace) in enumerate(results):
        (actor_train,) = spans(trace, "actor_train", step)
        following = spans(trace, "critic_train", step + 1)
        assert len(following) == (2 if step < 2 else 0)
        assert all(overlap(actor_train, span) for span in following)
        assert bool(spans(trace, "critic_train", step)) == (step == 0), "later ones were done a step ahead"
        np.testing.assert_allclose(result.values, np.array(VALUES) + 0.1 * (step + 1), atol=1e-6)
    assert all(len(critic.trains) == 3 for critic in critics), "each batch trained once"


async def test_post_when_critics_train_on_kept_tokens_waits_for_the_proximal_logprobs() -> None:
    ((_, trace),), critics = await run_steps(
        "post", "algorithm.critic_trains_on=kept", actor=ScriptedActor(proximal=-0.5 + np.log(100))
    )
    (proximal,) = spans(trace, "actor_forward")
    assert all(span.start_s >= proximal.end_s for span in spans(trace, "critic_train"))
    assert all((critic.trains[0].weights == 0).all() for critic in critics), "every token was rejected"


async def test_step_when_nothing_is_trainable_leaves_the_actor_alone() -> None:
    actor = ScriptedActor(proximal=-0.5 + np.log(100))
    ((result, trace),), _ = await run_steps("post", actor=actor)
    assert result.actor is None and not actor.trains and not spans(trace, "actor_train")
    use = token_use(result)
    assert (use.trained, use.rejected, use.total) == (0, 10, 10)


async def test_step_when_the_value_loss_is_clipped_hands_over_the_old_values() -> None:
    _, critics = await run_steps("post", "critic.value_clip=0.2")
    for index, critic in enumerate(critics):
        (request,) = critic.trains
        assert request.value_clip == pytest.approx(0.2)
        assert np.isin(request.old_values.round(4), np.array(VALUES[index], dtype=np.float32).round(4)).all()


async def test_metrics_of_a_step_are_finite_and_name_what_the_issue_of_a_run_is() -> None:
    ((result, trace),), _ = await run_steps("pre")
    row = step_metrics(result, trace)
    assert row["reward/mean"] == 0 and row["reward/accuracy"] == 0.5
    assert row["value_std/advantage_masked_share"] == row["value_std/entropy_filtered_share"] == 0.2
    assert row["tokens/trained"] == 10 and row["tokens/rejected"] == 0
    assert row["mismatch/ratio_mean"] == pytest.approx(1.0)
    assert row["mismatch/gap_mean_staleness_0"] == 0
    assert all(np.isfinite(value) for value in row.values()), row
    assert staleness_of(result).token_histogram == (10,)


async def test_metrics_of_a_step_with_several_tasks_have_the_mean_reward_of_each() -> None:
    ((result, trace),), _ = await run_steps("pre")
    assert not [name for name in step_metrics(result, trace) if name.startswith("reward/mean_")]
    first, second = result.batch.groups
    moved = replace(first, prompt=replace(first.prompt, task="other"))
    mixed = replace(result, batch=replace(result.batch, groups=(moved, second)))
    row = step_metrics(mixed, trace)
    for group in (moved, second):
        rewards = [trajectory.reward for trajectory in group.trajectories]
        assert row[f"reward/mean_{group.prompt.task}"] == sum(rewards) / len(rewards)
