"""Steps in which only the critics train: the actor stays what it was, to the bit, and then moves."""

import asyncio

import pytest
import torch
from torch import nn

from tests.unit.composition.tiny import open_run, shrunk


def copy_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in module.state_dict().items()}


def same(module: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())


@pytest.mark.report("P62")
@pytest.mark.parametrize("preset", ["asyppo", "vcppo"])
def test_actor_keeps_every_bit_until_the_critics_have_warmed_up(preset: str) -> None:
    run, policy, critics = open_run(shrunk(preset, "critic.warmup_steps=2"))
    start, trained = copy_of(policy.module), [copy_of(critic.module) for critic in critics]
    for step in range(2):
        result, metrics = asyncio.run(run.train())
        assert result.actor is None and "actor/loss" not in metrics
        assert same(policy.module, start)
        assert not any(same(critic.module, before) for critic, before in zip(critics, trained, strict=True))
        assert metrics["critic_0/optimizer_steps"] > 0, step
    result, metrics = asyncio.run(run.train())
    assert result.actor is not None and not same(policy.module, start)


@pytest.mark.report("P62")
def test_values_of_a_step_are_those_of_the_critics_at_that_step() -> None:
    """Warm or not: what is asked of a critic about a batch is asked when the batch is trained, never before."""
    run, _, critics = open_run(shrunk("s3ac", "critic.warmup_steps=1"))
    for _ in range(3):
        before = [copy_of(critic.module) for critic in critics]
        result, _ = asyncio.run(run.train())
        now = [copy_of(critic.module) for critic in critics]
        sequences = result.batch.sequences
        for critic, old, new in zip(critics, before, now, strict=True):
            critic.module.load_state_dict(old)
            prompt = sequences.prompt_token_ids[: sequences.prompt_lengths[0]]
            ids = torch.tensor(
                [[*prompt.tolist(), *sequences.response_token_ids[: sequences.response_lengths[0]]]]
            )
            states = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
            with torch.no_grad():
                expected = critic.values(ids, states)
            torch.testing.assert_close(torch.from_numpy(result.values[0, : len(states)].copy()), expected)
            critic.module.load_state_dict(new)
