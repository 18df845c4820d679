"""What a publication carries: names, full shapes and types of every tensor, laid out in one linear byte space."""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from asyppo_async.errors import WeightSyncError

Dtype = Literal["float32", "bfloat16"]

ALIGNMENT_BYTES = 64
"""Every tensor starts at a multiple of this, so that a slice of the byte space can be viewed in any type."""

_ELEMENT_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
_TIED_PAIRS = (("lm_head.weight", "model.embed_tokens.weight"),)
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    name: str
    """Checkpoint (Hugging Face) name; tied tensors are named once."""
    shape: tuple[int, ...]
    """Full, un-partitioned."""
    dtype: Dtype

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * _ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Tensor i occupies the bytes `[offsets[i], offsets[i] + tensors[i].num_bytes)`, in the order of the wire."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = {spec.name for spec in self.tensors}
        if len(names) != len(self.tensors):
            raise ValueError("a manifest names every tensor once")

    @property
    def offsets(self) -> tuple[int, ...]:
        offsets = []
        end = 0
        for spec in self.tensors:
            offsets.append(end)
            end = _aligned(end + spec.num_bytes)
        return tuple(offsets)

    @property
    def num_bytes(self) -> int:
        """End of the byte space: what a receiver has to hold."""
        if not self.tensors:
            return 0
        return self.offsets[-1] + self.tensors[-1].num_bytes

    def difference(self, other: "Manifest") -> list[str]:
        """One line for each tensor that `other` lacks, has beyond this one, or has in another shape or type.

        The order is not compared: it belongs to the wire, and the sender's counts.
        """
        mine = {spec.name: spec for spec in self.tensors}
        theirs = {spec.name: spec for spec in other.tensors}
        lines = [f"missing: {_describe(mine[name])}" for name in mine if name not in theirs]
        lines += [f"unexpected: {_describe(theirs[name])}" for name in theirs if name not in mine]
        lines += [
            f"differs: {_describe(spec)} here, {_describe(theirs[name])} there"
            for name, spec in mine.items()
            if name in theirs and theirs[name] != spec
        ]
        return lines


def manifest_of_checkpoint(folder: Path, dtype: Dtype) -> Manifest:
    """The manifest of a safetensors checkpoint, from its headers alone, as it is published in `dtype`.

    Raises:
        WeightSyncError: the folder holds no safetensors file, or one whose header cannot be read.
    """
    if dtype not in get_args(Dtype):
        raise ValueError(f"weights are published as float32 or bfloat16, got {dtype!r}")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _checkpoint_files(folder):
        shapes.update(_shapes_of_file(path))
    if _is_tied(folder):
        for tied, kept in _TIED_PAIRS:
            if kept in shapes:
                shapes.pop(tied, None)
    specs = [TensorSpec(name=name, shape=shape, dtype=dtype) for name, shape in shapes.items()]
    return Manifest(tensors=tuple(sorted(specs, key=_wire_key)))


def leaf_module(name: str) -> str:
    """The engine's leaf module that a tensor belongs to: q, k, v share one, gate and up, and all experts.

    An engine loads a module when all its tensors are there, so they stay together on the wire where they fit.
    """
    parts = name.split(".")[:-1] if name.rsplit(".", 1)[-1] in ("weight", "bias") else name.split(".")
    if "experts" in parts:
        return ".".join(parts[: parts.index("experts") + 1])
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    return ".".join([*parts[:-1], fused.get(parts[-1], parts[-1])]) if parts else name


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name} {list(spec.shape)} {spec.dtype}"


def _wire_key(spec: TensorSpec) -> tuple[list[tuple[int, str]], str]:
    """Numbers in names in numeric order, tensors of one leaf module side by side."""
    parts = leaf_module(spec.name).split(".")
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts], spec.name


def _checkpoint_files(folder: Path) -> Iterable[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightSyncError(f"{folder} holds no .safetensors file; save the model with save_pretrained")
    return files


def _shapes_of_file(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes from the header: 8 bytes length (little-endian), then JSON."""
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise WeightSyncError(f"{path} is not a safetensors file: its header claims {length} bytes")
            header = json.loads(stream.read(length))
    except (OSError, struct.error, ValueError) as error:
        raise WeightSyncError(f"the header of {path} cannot be read: {error}") from error
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _is_tied(folder: Path) -> bool:
    path = folder / "config.json"
    if not path.is_file():
        return False
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
