"""Training state in files: written by any number of ranks, read by any other number, and never half of it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyppo_async.errors import CheckpointError
from asyppo_async.trainer.worker.backend.state_files import Fragment, Progress, open_state, write_state

SHAPES = {"embedding": (7, 3), "norm": (5,), "bias": (1,)}
KINDS = ("weight", "exp_avg", "exp_avg_sq")
PROGRESS = Progress(num_steps=9, moment_steps=4)
Values = dict[str, dict[str, Tensor]]


def random_values() -> Values:
    torch.manual_seed(1)
    return {name: {kind: torch.randn(shape).view(-1) for kind in KINDS} for name, shape in SHAPES.items()}


def cut(values: Values, rank: int, num_ranks: int) -> list[Fragment]:
    """As ZeRO 1 and 2 do: parameters end to end, one piece of them for each rank, wherever that cuts one in two."""
    size = -(-sum(kinds["weight"].numel() for kinds in values.values()) // num_ranks)
    fragments, begin = [], 0
    for name, kinds in values.items():
        end = begin + kinds["weight"].numel()
        start, stop = max(begin, rank * size), min(end, (rank + 1) * size)
        if start < stop:
            own = {kind: tensor[start - begin : stop - begin] for kind, tensor in kinds.items()}
            fragments.append(Fragment(name=name, shape=SHAPES[name], start=start - begin, tensors=own))
        begin = end
    return fragments


def write(folder: Path, values: Values, num_ranks: int) -> None:
    folder.mkdir(exist_ok=True)
    for rank in range(num_ranks):
        write_state(folder, rank, num_ranks, cut(values, rank, num_ranks), PROGRESS)


@pytest.mark.report("P54")
def test_state_when_ranks_go_from_2_to_4_to_2_then_every_save_is_whole(tmp_path: Path) -> None:
    values = random_values()
    for turn, num_ranks in enumerate((2, 4, 2, 1, 30)):
        write(tmp_path / str(turn), values, num_ranks)
        read: Values = {
            name: {kind: torch.zeros_like(tensor) for kind, tensor in kinds.items()}
            for name, kinds in values.items()
        }
        with open_state(tmp_path / str(turn)) as files:
            files.check(SHAPES)
            assert files.progress == PROGRESS and files.has_moments
            for rank in range(3):
                files.fill(cut(read, rank, 3))
        for name, kinds in values.items():
            assert all(torch.equal(read[name][kind], kinds[kind]) for kind in KINDS)
        values = read


def test_state_when_it_is_written_is_safetensors(tmp_path: Path) -> None:
    values = random_values()
    values["norm"]["weight"] = values["norm"]["weight"].double()
    write(tmp_path, values, 1)
    tensors = load_file(tmp_path / "state-0.safetensors")
    assert len(tensors) == len(SHAPES) * len(KINDS)
    for key, tensor in tensors.items():
        kind, name = key.split(".")
        assert torch.equal(tensor, values[name][kind]) and tensor.dtype == values[name][kind].dtype


def test_state_when_a_file_is_missing_or_cut_short_then_it_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, random_values(), 2)
    last = tmp_path / "state-1.safetensors"
    content = last.read_bytes()
    for damaged in (content[:-1], b"", b"\x00" * 64):
        last.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"), open_state(tmp_path):
            pass
    last.unlink()
    with pytest.raises(CheckpointError, match="state-1"), open_state(tmp_path):
        pass


def test_state_when_it_is_of_another_model_then_nothing_is_read(tmp_path: Path) -> None:
    write(tmp_path, random_values(), 2)
    with open_state(tmp_path) as files:
        with pytest.raises(CheckpointError, match="lacks 1 weights, head first"):
            files.check({**SHAPES, "head": (2,)})
        with pytest.raises(CheckpointError, match="has 1 weights that do not train here, embedding first"):
            files.check({name: shape for name, shape in SHAPES.items() if name != "embedding"})
        with pytest.raises(CheckpointError, match=r"embedding of shape \[7, 3\], and this model of \[3, 7\]"):
            files.check(SHAPES | {"embedding": (3, 7)})


def test_state_when_no_file_has_some_elements_then_it_says_which(tmp_path: Path) -> None:
    values = random_values()
    write(tmp_path, values, 2)
    lost = [fragment for fragment in cut(values, 1, 2) if fragment.name != "bias"]
    write_state(tmp_path, 1, 2, lost, PROGRESS)
    with open_state(tmp_path) as files, pytest.raises(CheckpointError, match="lacks 1 weights, bias first"):
        files.check(SHAPES)
    short = Fragment(name="norm", shape=(5,), start=1, tensors=values["norm"])
    write_state(tmp_path, 1, 2, [*lost[:-1], short, *cut(values, 1, 2)[-1:]], PROGRESS)
    with (
        open_state(tmp_path) as files,
        pytest.raises(CheckpointError, match=r"elements of exp_avg\.norm, from 0 of 5"),
    ):
        files.check(SHAPES)
