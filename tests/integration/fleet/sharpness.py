"""How sharp the probe is: what it says when one tensor at a time is another one on the wire."""

from collections.abc import AsyncIterator, Sequence

import torch

from asyppo_async.trainer.coordinator.publication import FLOOR_FACTOR, SMALLEST_BOUND
from tests.integration.fleet.conftest import DEADLINE_S, Trainer

FACTOR = 1.02
NUM_IDENTITIES = 3


async def bound_of(trainer: Trainer) -> float:
    """Ten times the largest gap of three publications of what the trainer has, as a run measures it."""
    gaps = []
    for version in range(NUM_IDENTITIES):
        scored, sampled = await trainer.publish(version)
        gaps.append(max(scored.mean, sampled.mean))
    return max(FLOOR_FACTOR * max(gaps), SMALLEST_BOUND)


async def gaps_with_one_scaled(trainer: Trainer, names: Sequence[str]) -> AsyncIterator[tuple[str, float]]:
    """Each tensor in turn times 1.02 on the wire, its checksum with it, so that only the probe can tell.

    The next one heals it: every publication carries all tensors. A tensor whose output is normalised again at once
    (`is_normalised`) computes the same times any factor, so of those only one half is scaled.
    """
    version = NUM_IDENTITIES
    for name in names:

        def on_wire(each: str, tensor: torch.Tensor, scaled: str = name) -> torch.Tensor:
            if each != scaled:
                return tensor
            changed = tensor.clone()
            part = changed[:, : changed.shape[1] // 2] if is_normalised(trainer, each) else changed
            part.mul_(FACTOR)
            return changed

        version += 1
        await trainer.commit(version, await trainer.stage(version, on_wire))
        scored, sampled = await trainer.probe(version)
        yield name, max(scored.mean, sampled.mean)
        await trainer.client.weights.verdict(trainer.epoch, version, False, DEADLINE_S)


def is_normalised(trainer: Trainer, name: str) -> bool:
    """Qwen3 takes the root mean square out of every head's queries and keys."""
    prefix = name.removesuffix("_proj.weight")
    return prefix.endswith((".q", ".k")) and f"{prefix}_norm.weight" in dict(trainer.tensors())


def one_of_each_kind(names: Sequence[str]) -> list[str]:
    """Of the first layer and of the last one, and what is outside the layers."""
    numbers = {int(part) for name in names for part in name.split(".") if part.isdigit()}
    ends = {str(min(numbers)), str(max(numbers))}
    return [
        name
        for name in names
        if not any(part.isdigit() for part in name.split(".")) or ends & set(name.split("."))
    ]
