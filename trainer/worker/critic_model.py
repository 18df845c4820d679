"""A critic as a module: a backbone and a value head, loaded from a folder and saved to one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel

from asyppo_async.config.critic import CriticPartName
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.critic_folder import HEAD_FILE
from asyppo_async.trainer.worker.control import ComputeDtype
from asyppo_async.trainer.worker.model import hidden_states, load_model

BACKBONE = "backbone."
"""What names of parameters of the backbone begin with."""
VALUE_HEAD = "value_head"
"""Name of the head among a critic's modules."""
HEAD_WEIGHT = f"{VALUE_HEAD}.weight"
"""Its parameter."""
_HEAD_KEY = "weight"
_PART_NAMES: Mapping[CriticPartName, tuple[str, ...]] = {
    "attention": (".self_attn.", ".attention.", ".attn."),
    "router": (".mlp.gate.", ".router.", ".block_sparse_moe.gate."),
    "vision": ("visual.", "vision_tower.", "vision_model."),
    "embeddings": ("embed_tokens.", "wte."),
    "backbone": ("",),
}
"""What names of parameters of a part hold."""
_MAY_BE_ABSENT = ("router", "vision")


def save_head(weight: Tensor, folder: Path) -> None:
    """A value head's weight [1, H] as `load_critic` finds it beside a backbone."""
    save_file({_HEAD_KEY: weight.contiguous()}, folder / HEAD_FILE)


class CriticModule(nn.ModuleDict):
    """Backbone and value head under one roof, for an optimizer and for saving."""

    def __init__(self, backbone: nn.Module, head: nn.Linear) -> None:
        super().__init__({"backbone": backbone, VALUE_HEAD: head})

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """The backbone in Hugging Face format, the head beside it; `state_dict`: instead of the module's own."""
        tensors = self.state_dict() if state_dict is None else state_dict
        inner = {
            name.removeprefix(BACKBONE): value for name, value in tensors.items() if name.startswith(BACKBONE)
        }
        self["backbone"].save_pretrained(folder, state_dict=inner)  # type: ignore[operator]
        save_head(tensors[HEAD_WEIGHT], folder)


class Critic:
    """A backbone with a value head: V(s) = w . h, in float32 (float64 when the backbone is)."""

    def __init__(self, backbone: nn.Module, head: nn.Linear) -> None:
        self.module = CriticModule(backbone, head)
        self.root = backbone
        """What a training engine runs; the head stays outside, in its own type."""
        self.vocab_size = int(backbone.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self._run = backbone
        self._head = head

    def run_in(self, engine: nn.Module) -> None:
        """Run through the engine that has taken the weights over."""
        self._run = engine

    def values(self, input_ids: Tensor, states: Tensor, documents: tuple[int, ...] = ()) -> Tensor:
        """Values at the flat positions `states` [N] of `input_ids` [R, L]."""
        hidden = hidden_states(self._run, input_ids, documents).flatten(0, 1)
        return cast(Tensor, self._head(hidden[states].to(self._head.weight.dtype)).squeeze(-1))


def load_critic(
    folder: Path,
    dtype: ComputeDtype,
    seed: int,
    *,
    head_std: float = 0.0,
    frozen: Sequence[CriticPartName] = (),
) -> Critic:
    """The backbone in `folder` with the value head that lies there, or a fresh one: the same for the same seed.

    Args:
        folder: Hugging Face format.
        dtype: Of the backbone.
        seed: Of a fresh head.
        head_std: Of a fresh head; 0: 1 / (H + 1), so that values start near 0 (`algorithms.md` 4.5).
        frozen: Parts of the backbone that do not train.

    Raises:
        ConfigError: No such model, a head of another size, or a part to freeze that the model does not have.
    """
    backbone = load_model(folder, dtype, AutoModel)
    hidden_size = int(backbone.get_input_embeddings().weight.shape[1])  # type: ignore[operator]
    head = new_value_head(hidden_size, dtype, seed, std=head_std)
    if (folder / HEAD_FILE).is_file():
        _load_head(head, folder)
    for part in frozen:
        _freeze(backbone, part, folder)
    return Critic(backbone, head)


def new_value_head(hidden_size: int, dtype: ComputeDtype, seed: int, *, std: float = 0.0) -> nn.Linear:
    """A head without bias, w ~ N(0, std^2), drawn in float64, so that every dtype gets the same numbers.

    `std` 0: 1 / (H + 1).
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, hidden_size, generator=generator, dtype=torch.float64)
    weight *= std or 1 / (hidden_size + 1)
    head_dtype = torch.float64 if dtype == "float64" else torch.float32
    head = nn.Linear(hidden_size, 1, bias=False, dtype=head_dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
    return head


@torch.no_grad()
def _load_head(head: nn.Linear, folder: Path) -> None:
    try:
        weight = load_file(folder / HEAD_FILE)[_HEAD_KEY]
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"{folder / HEAD_FILE} is no value head: {error}") from error
    if weight.shape != head.weight.shape:
        raise ConfigError(
            f"{folder / HEAD_FILE} is of shape {list(weight.shape)}, and the backbone beside it needs "
            f"{list(head.weight.shape)}: they are not of one critic"
        )
    head.weight.copy_(weight)


def _freeze(backbone: nn.Module, part: CriticPartName, folder: Path) -> None:
    chosen = [
        weight
        for name, weight in backbone.named_parameters()
        if any(piece in f".{name}" or name.startswith(piece) for piece in _PART_NAMES[part])
    ]
    if not chosen and part not in _MAY_BE_ABSENT:
        raise ConfigError(f"critic.frozen names {part!r}, and no parameter of {folder} is of that part")
    for weight in chosen:
        weight.requires_grad_(False)
