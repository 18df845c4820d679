"""What a rank moves out of another group's way: it comes back bit for bit, and what it had is free."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from asyppo_async.trainer.worker.away import release_device
from asyppo_async.trainer.worker.backend.plain import PlainBackend
from asyppo_async.trainer.worker.control import ComputeDtype
from asyppo_async.trainer.worker.model import load_policy
from asyppo_async.trainer.worker.world import World
from tests.unit.worker.learners import RecordingBackend, write_model

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]
WHERES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


def trained(folder: Path, dtype: ComputeDtype, where: str) -> PlainBackend:
    """After two steps, so that there are moments."""
    policy = load_policy(folder, dtype)
    policy.module.to(where)
    backend = RecordingBackend(policy, World.alone())
    for _ in range(2):
        step(backend)
    return backend


def step(backend: PlainBackend) -> None:
    backend.backward(sum(((weight - 0.3) ** 2).sum() for weight in backend._module.parameters()))
    backend.step()


def held(backend: PlainBackend, *, weights: bool) -> list[Tensor]:
    """What is to move: moments, masters that are not the weights themselves, and the weights if asked."""
    tensors = [value for state in backend._optimizer.state.values() for value in state.values()]
    own = {id(weight): weight for weight in backend._weights}
    tensors += [master for master in backend._masters if id(master) not in own]
    return [*tensors, *own.values()] if weights else tensors


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", WHERES)
def test_state_when_moved_out_and_back_has_the_same_bits_and_trains_to_the_same_bits(
    tiny_folder: Path, dtype: ComputeDtype, where: str, weights: bool
) -> None:
    stayed, moved = trained(tiny_folder, dtype, where), trained(tiny_folder, dtype, where)
    for _ in range(2):
        places = [StorageWeakRef(tensor.untyped_storage()) for tensor in held(moved, weights=weights)]
        assert places
        moved.to_host(weights=weights)
        assert all(place.expired() for place in places)
        assert all(tensor.device.type == "cpu" for tensor in held(moved, weights=weights))
        moved.to_device()
        step(moved)
        step(stayed)
    both = zip(held(moved, weights=True), held(stayed, weights=True), strict=True)
    assert all(torch.equal(one, other) and one.device == other.device for one, other in both)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("weights", [False, True])
def test_device_memory_when_a_rank_has_moved_out_is_what_it_was_before(tmp_path: Path, weights: bool) -> None:
    folder = write_model(tmp_path, hidden_size=256, intermediate_size=512)
    before = torch.cuda.memory_reserved()
    backend = trained(folder, "bfloat16", "cuda")
    own = sum(weight.numel() * weight.element_size() for weight in backend._module.parameters())
    backend.to_host(weights=weights)
    release_device()
    slack = 4 * 2**20
    assert torch.cuda.memory_allocated() <= slack + (0 if weights else own)
    assert torch.cuda.memory_reserved() <= before + slack + (0 if weights else 2 * own)
