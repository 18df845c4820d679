"""How many optimizer steps a batch of each set-up resolves to, for actor and critics."""

import numpy as np
import pytest

from asyppo_async.config.load import config_from_tree
from asyppo_async.trainer.coordinator.arithmetic import actor_request, critic_requests, decide_tokens
from asyppo_async.trainer.coordinator.batch import batch_of
from tests.unit.coordinator.worked_batch import make_group

# Actor: epochs x (responses / mini-batch); each critic: epochs x mini-batches over its own responses.
STEPS = {
    "asyppo": (8, 2, 1024),
    "asyppo_faithful": (8, 2, 1024),
    "asyppo_4b": (2, 2, 1024),
    "asyppo_14b": (8, 2, 1024),
    "vcppo_32b": (16, 16, 512),
    "s3ac": (8, 16, 512),
    "s3ac_single": (8, 16, 512),
    "s3ac_1.5b_group": (8, 16, 512),
    "s3ac_1.5b_single": (8, 16, 512),
    "s3ac_moe": (8, 16, 512),
    "vapo": (16, 16, 512),
    "dapo": (16, 0, 512),
    "flash_reinforce": (1, 0, 128),
}


@pytest.mark.parametrize("preset", STEPS)
def test_batch_resolves_to_the_optimizer_steps_of_the_paper(preset: str) -> None:
    config = config_from_tree({"preset": preset, "actor": {"model": "a"}, "critic": {"model": "c"}})
    size = config.batch.group_size
    rewards = [1.0, -1.0] * (size // 2) or [1.0]
    groups = [make_group(draw, [1] * size, rewards) for draw in range(config.batch.prompts)]
    batch = batch_of(0, groups, config)
    num_tokens = batch.sequences.num_response_tokens
    values = np.random.default_rng(0).normal(0, 0.3, (config.critic.count, num_tokens)).astype(np.float32)
    proximal, trained = batch.behaviour_logprobs, np.ones(num_tokens, dtype=np.bool_)
    decisions = decide_tokens(batch, values, proximal, stale=~trained, algorithm=config.algorithm)
    actor = actor_request(
        batch,
        decisions,
        proximal,
        algorithm=config.algorithm,
        actor=config.actor,
        sampling=config.sampling,
        seed=0,
    )
    critics = critic_requests(
        batch, values=values, trained=trained, algorithm=config.algorithm, critic=config.critic, seed=0
    )
    actor_steps, critic_steps, mini_batch = STEPS[preset]
    assert actor.mini_batches.sizes.tolist() == [mini_batch] * actor_steps
    assert len(critics) == config.critic.count
    for critic in critics:
        assert len(critic.mini_batches.sizes) == critic_steps
    if preset.startswith("asyppo"):
        assert [critic.mini_batches.sizes.tolist() for critic in critics] == [[512, 512]] * 2
