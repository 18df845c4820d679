"""A group's training state in files that any number of ranks, and every training engine, can read.

Each rank writes the elements that it holds of each parameter, and where in the parameter they lie; whoever reads takes
what it needs out of all files. Nothing is gathered, neither to write nor to read. The files are safetensors:

state-0.safetensors ...     tensors KIND.PARAMETER [n], KIND one of `weight`, `exp_avg`, `exp_avg_sq`, `average`
    metadata                parts (number of files), num_steps, moment_steps, places (JSON: [first element, shape])
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyppo_async.errors import CheckpointError

WEIGHT = "weight"
AVERAGE = "average"
_DTYPE_NAMES = {torch.float32: "F32", torch.float64: "F64"}
_PIECE_ELEMENTS = 2**24
"""Of a tensor on its way into a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """The elements of one parameter that a rank trains; all tensors are views, written from and read into."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """The first of them in the flat parameter."""
    tensors: Mapping[str, Tensor]
    """By kind, each [n]: the master of the weight, and what the optimizer keeps of it, if it has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Numbers of a state, the same on every rank."""

    num_steps: int
    """Optimizer steps made; where the schedule stands."""
    moment_steps: int
    """Of them those since the optimizer last started anew."""


def write_state(
    folder: Path, part: int, num_parts: int, fragments: Iterable[Fragment], progress: Progress
) -> None:
    """One rank's file, written piece by piece.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = _file(folder, part)
    places: dict[str, list[object]] = {}
    tensors: dict[str, Tensor] = {}
    for fragment in fragments:
        places[fragment.name] = [fragment.start, list(fragment.shape)]
        for kind, tensor in fragment.tensors.items():
            tensors[f"{kind}.{fragment.name}"] = tensor.detach().reshape(-1)
    header: dict[str, object] = {
        "__metadata__": {
            "parts": str(num_parts),
            "num_steps": str(progress.num_steps),
            "moment_steps": str(progress.moment_steps),
            "places": json.dumps(places),
        }
    }
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": [tensor.numel()],
            "data_offsets": [begin, end],
        }
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    try:
        with path.open("wb") as file:
            file.write(len(words).to_bytes(8, "little") + words)
            for tensor in tensors.values():
                for piece in torch.split(tensor, _PIECE_ELEMENTS):
                    file.write(piece.cpu().numpy().data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


class StateFiles:
    """The files of all ranks that wrote, as one."""

    def __init__(self, folder: Path, files: list[Any], *, average: bool) -> None:
        """`average`: give the averages for the weights."""
        self._folder = folder
        self._weight_kind = AVERAGE if average else WEIGHT
        first = files[0].metadata()
        self.progress = Progress(num_steps=int(first["num_steps"]), moment_steps=int(first["moment_steps"]))
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._runs: dict[str, list[tuple[int, Any]]] = {}
        """By key: first element and slice of each file that holds some."""
        for file in files:
            places = json.loads(file.metadata()["places"])
            self._shapes |= {name: tuple(shape) for name, (_, shape) in places.items()}
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                start = places[key.split(".", 1)[1]][0]
                self._runs.setdefault(key, []).append((start, file.get_slice(key)))
        self.kinds = {key.split(".", 1)[0] for key in self._runs}
        """What is there of every parameter."""
        if self._weight_kind not in self.kinds:
            raise CheckpointError(
                f"{folder} has no average of the weights: actor.ema_decay was 0 when it was written"
            )

    @property
    def has_moments(self) -> bool:
        return "exp_avg" in self.kinds

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare with the parameters of a model.

        Raises:
            CheckpointError: other parameters, or elements of them that no file has; nothing has been changed.
        """
        missing = sorted(shapes.keys() - self._shapes.keys())
        if missing:
            raise CheckpointError(f"{self._folder} lacks {len(missing)} weights, {missing[0]} first")
        unknown = sorted(self._shapes.keys() - shapes.keys())
        if unknown:
            raise CheckpointError(
                f"{self._folder} has {len(unknown)} weights that do not train here, {unknown[0]} first"
            )
        for name, shape in shapes.items():
            if self._shapes[name] != shape:
                raise CheckpointError(
                    f"{self._folder} has {name} of shape {list(self._shapes[name])}, and this model of {list(shape)}"
                )
            for kind in sorted(self.kinds):
                self._check_whole(f"{kind}.{name}", torch.Size(shape).numel())

    def read(self, kind: str, name: str, start: int, into: Tensor) -> None:
        """Fill `into` [n] with the elements of a parameter from `start` on."""
        kind = self._weight_kind if kind == WEIGHT else kind
        end = start + into.numel()
        for first, values in self._runs[f"{kind}.{name}"]:
            begin, stop = max(start, first), min(end, first + values.get_shape()[0])
            if begin < stop:
                into[begin - start : stop - start].copy_(values[begin - first : stop - first])

    def fill(self, fragments: Iterable[Fragment]) -> None:
        """Read everything that is there and the fragments have room for."""
        for fragment in fragments:
            for kind, tensor in fragment.tensors.items():
                if kind in self.kinds:
                    self.read(kind, fragment.name, fragment.start, tensor)

    def _check_whole(self, key: str, num_elements: int) -> None:
        reached = 0
        for first, values in sorted(self._runs.get(key, ()), key=lambda run: run[0]):
            if first > reached:
                break
            reached = max(reached, first + values.get_shape()[0])
        if reached < num_elements:
            raise CheckpointError(
                f"{self._folder} lacks elements of {key}, from {reached} of {num_elements} on"
            )


@contextmanager
def open_state(folder: Path, *, average: bool = False) -> Iterator[StateFiles]:
    """What `write_state` of all ranks has left in a folder; `average`: with the averages for the weights.

    Raises:
        CheckpointError: a file is missing or cannot be read, also later, while the context is open.
    """
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(_file(folder, 0), framework="pt"))]
            files += [
                stack.enter_context(safe_open(_file(folder, part), framework="pt"))
                for part in range(1, int(files[0].metadata()["parts"]))
            ]
            yield StateFiles(folder, files, average=average)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the state in {folder} cannot be read: {error}") from error


def _file(folder: Path, part: int) -> Path:
    return folder / f"state-{part}.safetensors"
