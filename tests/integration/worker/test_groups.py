"""An actor group of two ranks and two critics: what they answer is what one rank in this process answers."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from transformers import AutoModelForCausalLM

from asyppo_async.errors import TrainingDiverged, WeightSyncError
from asyppo_async.trainer.worker.clients import ActorGroup, CriticGroup
from asyppo_async.trainer.worker.messages import ActorForward, CriticForward, OptimizerStep
from asyppo_async.types import TokenSequences
from asyppo_async.weights.buckets import plan_buckets
from asyppo_async.weights.manifest import manifest_of_checkpoint
from asyppo_async.weights.transfer import WeightGroup, receive_into, tensors_in
from tests.unit.worker.learners import actor_request, critic_request, open_actor, open_critic

Groups = tuple[ActorGroup, tuple[CriticGroup, ...]]


def assert_same_steps(got: tuple[OptimizerStep, ...], expected: tuple[OptimizerStep, ...]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert figures_of(one) == pytest.approx(figures_of(other), rel=1e-4, abs=1e-7, nan_ok=True)


def figures_of(step: OptimizerStep) -> dict[str, float]:
    figures = dataclasses.asdict(step)
    return figures | (figures.pop("parts") or {})


async def test_forward_over_two_ranks_comes_back_in_the_order_of_the_request(
    groups: Groups, tiny_folder: Path, sequences: TokenSequences
) -> None:
    request = ActorForward(sequences=sequences, temperature=0.9)
    result = await groups[0].forward(request)
    expected = open_actor(tiny_folder, dtype="float32").learner.forward(request)
    np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=2e-6)
    np.testing.assert_allclose(result.entropies, expected.entropies, atol=2e-6)
    assert result.compute_s > 0


@pytest.mark.report("P61")
async def test_critics_start_alike_and_part_when_they_train_on_different_data(
    groups: Groups, tiny_folder: Path, sequences: TokenSequences
) -> None:
    _, (first, second) = groups
    request = CriticForward(sequences=sequences)
    before = await asyncio.gather(first.forward(request), second.forward(request))
    np.testing.assert_array_equal(before[0].values, before[1].values)
    critic = open_critic(tiny_folder, dtype="float32")
    np.testing.assert_allclose(before[0].values, critic.learner.forward(request).values, atol=2e-6)

    train = critic_request(sequences, [5, 4])
    others = critic_request(sequences, [5, 4], targets=-train.targets)
    result, _ = await asyncio.gather(first.train(train), second.train(others))
    assert_same_steps(result.steps, critic.learner.train(train).steps)
    after = await asyncio.gather(first.forward(request), second.forward(request))
    np.testing.assert_allclose(after[0].values, critic.learner.forward(request).values, atol=1e-4)
    assert np.abs(after[0].values - after[1].values).max() > 1e-3


async def test_training_sending_and_saving_over_two_ranks_give_what_one_rank_gives(
    groups: Groups, tiny_folder: Path, sequences: TokenSequences, tmp_path: Path
) -> None:
    actor, _ = groups
    plain = actor_request(sequences, [5, 0, 4, 1])
    request = dataclasses.replace(plain, masked=plain.policy_weights == 0)
    alone = open_actor(tiny_folder, dtype="float32", budget=5)
    result = await actor.train(request)
    assert_same_steps(result.steps, alone.learner.train(request).steps)
    assert [step.skipped for step in result.steps] == [False, True, False, False]
    assert result.steps[0].ratio_p1 < 1 < result.steps[0].ratio_p99
    assert 0 < result.steps[0].masked_clip_fraction < 1

    await actor.save(tmp_path / "final")
    assert (tmp_path / "final" / "chat_template.jinja").is_file()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32).state_dict()
    initial = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).state_dict()
    for name, tensor in alone.module.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, atol=2e-5, rtol=0)
        assert not torch.equal(saved[name], initial[name])

    received = await receive(actor, epoch=3)
    assert set(received) == set(saved) - {"lm_head.weight"}
    for name, tensor in received.items():
        assert torch.equal(tensor, saved[name]), name


async def receive(
    actor: ActorGroup, epoch: int, bucket_bytes: int = 2048, deadline_s: float = 10
) -> dict[str, torch.Tensor]:
    """Publish to a receiver in this process, in buckets smaller than the embedding."""
    manifest = await actor.manifest()
    store = await actor.open_session(
        host="127.0.0.1", epoch=epoch, world_size=2, backend="gloo", deadline_s=10
    )
    buffer = torch.zeros(manifest.num_bytes, dtype=torch.uint8)

    def join() -> WeightGroup:
        return WeightGroup.join(
            backend="gloo",
            store=(store.host, store.port),
            rank=1,
            world_size=2,
            epoch=epoch,
            deadline_s=10,
        )

    group, _ = await asyncio.gather(asyncio.to_thread(join), actor.join_session(epoch=epoch, deadline_s=10))
    buckets = plan_buckets(manifest, bucket_bytes)
    assert len(buckets) > 3
    sent, report = await asyncio.gather(
        actor.send_weights(version=1, deadline_s=deadline_s),
        asyncio.to_thread(receive_into, group, manifest, buckets, buffer, deadline_s),
    )
    assert sent.checksums == report.checksums
    assert sent.num_bytes == manifest.num_bytes
    await actor.close_session()
    group.close()
    tensors = dict(tensors_in(manifest, buffer))
    first = manifest.tensors[0].name
    bytes_of_first = tensors[first].contiguous().view(torch.uint8).numpy().tobytes()
    assert sent.checksums[0] == xxhash.xxh3_64_intdigest(bytes_of_first)
    return tensors


async def test_manifest_is_that_of_the_checkpoint(groups: Groups, tiny_folder: Path) -> None:
    assert await groups[0].manifest() == manifest_of_checkpoint(tiny_folder, "float32")


async def test_receiver_that_does_not_come_is_an_error_in_time_and_the_actor_goes_on(
    groups: Groups, sequences: TokenSequences
) -> None:
    actor, _ = groups
    await actor.open_session(host="127.0.0.1", epoch=8, world_size=2, backend="gloo", deadline_s=1)
    with pytest.raises(WeightSyncError, match="could not join the weight session epoch 8"):
        await actor.join_session(epoch=8, deadline_s=1)
    with pytest.raises(WeightSyncError, match="no weight session is joined"):
        await actor.send_weights(version=1, deadline_s=1)
    await actor.close_session()
    assert len((await actor.forward(ActorForward(sequences=sequences, temperature=1.0))).logprobs) > 0


async def test_steps_that_are_not_finite_are_skipped_on_both_ranks_until_the_budget_is_spent(
    groups: Groups, sequences: TokenSequences
) -> None:
    actor, _ = groups
    before = await actor.forward(ActorForward(sequences=sequences, temperature=1.0))
    broken = np.full(sequences.num_response_tokens, np.nan, dtype=np.float32)
    result = await actor.train(actor_request(sequences, [5, 4], advantages=broken))
    assert [step.skipped for step in result.steps] == [True, True]
    with pytest.raises(TrainingDiverged, match="non_finite_budget allows 5"):
        await actor.train(actor_request(sequences, [5, 4, 9, 9], advantages=broken))
    after = await actor.forward(ActorForward(sequences=sequences, temperature=1.0))
    np.testing.assert_array_equal(after.logprobs, before.logprobs)


async def test_empty_batch_comes_back_empty(groups: Groups) -> None:
    empty = np.zeros(0, dtype=np.int32)
    nothing = TokenSequences(
        prompt_token_ids=empty, prompt_lengths=empty, response_token_ids=empty, response_lengths=empty
    )
    result = await groups[0].forward(ActorForward(sequences=nothing, temperature=1.0))
    assert len(result.logprobs) == 0
