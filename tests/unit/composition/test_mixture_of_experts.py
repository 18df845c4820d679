"""GRPO-X for mixtures of experts: the engine's experts from the response to the gradient (R3)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyppo_async.errors import FleetMismatch
from asyppo_async.trainer.coordinator.batch import batch_of
from asyppo_async.types import Group
from benchmarks.trends.learning import TinyRun
from tests.unit.composition.tiny import PROMPTS, open_run, scripted_experts, shrunk

OFF = "actor.routing_replay=false"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def ratios_of_a_step(run: TinyRun) -> tuple[float, float, float]:
    """Smallest and largest proximal / behaviour, and the first optimizer step's mean policy / proximal."""
    result, metrics = await run.train()
    assert result.actor is not None
    return metrics["mismatch/ratio_min"], metrics["mismatch/ratio_max"], result.actor.steps[0].ratio_mean


async def test_ratios_when_the_engine_routes_by_a_script_are_one_only_with_replay() -> None:
    config = shrunk("grpo_x_moe")
    run, _, _ = open_run(config)
    assert await ratios_of_a_step(run) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)
    # The same engine, and a trainer that ignores what it says.
    deaf, _, _ = open_run(shrunk("grpo_x_moe", OFF), is_mixture=True)
    lowest, highest, _ = await ratios_of_a_step(deaf)
    assert lowest < 0.998 and highest > 1.002


async def test_router_when_its_choice_is_replayed_still_learns() -> None:
    run, policy, _ = open_run(shrunk("grpo_x_moe"))
    routers = [
        weight for name, weight in policy.module.named_parameters() if name.endswith("mlp.gate.weight")
    ]
    before = [weight.detach().clone() for weight in routers]
    await run.train()
    assert len(routers) == 2
    assert all(not torch.equal(now, then) for now, then in zip(routers, before, strict=True))


def groups_of(run: TinyRun) -> list[Group]:
    return run._sample(PROMPTS[:4], 0)


def test_batch_when_responses_carry_their_experts_has_them_position_by_position() -> None:
    config = shrunk("grpo_x_moe")
    run, _, _ = open_run(config)
    groups = groups_of(run)
    batch = batch_of(0, groups, config)
    assert batch.routed_experts is not None
    start = 0
    for group in groups:
        for trajectory in group.trajectories:
            fed = torch.tensor([[*group.prompt.token_ids, *trajectory.response.token_ids[:-1].tolist()]])
            own = batch.routed_experts[start : start + fed.shape[1]]
            np.testing.assert_array_equal(own, scripted_experts(fed)[0].numpy())
            start += fed.shape[1]
    assert start == len(batch.routed_experts)
    assert batch_of(0, groups, shrunk("grpo_x_moe", OFF)).routed_experts is None


@pytest.mark.parametrize("missing", [None, 1])
def test_batch_when_a_response_lacks_experts_says_which_prompt_and_what_to_do(missing: int | None) -> None:
    config = shrunk("grpo_x_moe")
    run, _, _ = open_run(config)
    groups = groups_of(run)
    first = groups[0].trajectories[0]
    routed = first.response.routed_experts
    assert routed is not None
    poorer = replace(first.response, routed_experts=None if missing is None else routed[:-missing])
    broken = replace(first, response=poorer)
    groups[0] = replace(groups[0], trajectories=(broken, *groups[0].trajectories[1:]))
    with pytest.raises(FleetMismatch, match=r"prompt p0 and returned .* set actor\.routing_replay = false"):
        batch_of(0, groups, config)
