"""Loading a policy or a critic from a folder, and their hidden states.

Two traps of transformers are closed here: `use_cache` must be off and no attention mask may be given (with the default,
position ids that restart are not recognised and packed documents leak into each other), and the logits of models with a
soft cap, a scale or a bias are not `hidden @ weight`, so those are refused.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker.control import ComputeDtype

TORCH_DTYPES: Mapping[ComputeDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".index.json")
_HEAD_TOLERANCE: Mapping[ComputeDtype, float] = {"float32": 1e-3, "bfloat16": 5e-2, "float64": 1e-3}
"""Of the largest logit; rounding alone stays well below, a soft cap, scale or bias does not."""
_EXACT_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Norms of the form weight * x / rms(x); others (Gemma's 1 + weight) are not replaced."""


class Policy:
    """A causal language model, taken apart into backbone and head."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._backbone = _backbone_of(module)

    @property
    def head_weight(self) -> Tensor:
        """[V, H]; the embedding itself where the head is tied."""
        return cast(Tensor, self.module.get_output_embeddings().weight)  # type: ignore[operator]

    @property
    def vocab_size(self) -> int:
        return self.head_weight.shape[0]

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """[R, L] -> [R, L, H] after the final norm."""
        return _hidden_states(self._backbone, input_ids)


class Critic:
    """A backbone with a value head: V(s) = w . h, in float32 (float64 when the backbone is)."""

    def __init__(self, backbone: nn.Module, head: nn.Linear) -> None:
        self.module = nn.ModuleDict({"backbone": backbone, "value_head": head})
        self._backbone = backbone
        self._head = head

    @property
    def vocab_size(self) -> int:
        return int(self._backbone.get_input_embeddings().weight.shape[0])  # type: ignore[operator]

    def values(self, input_ids: Tensor, states: Tensor) -> Tensor:
        """Values at the flat positions `states` [N] of `input_ids` [R, L]."""
        hidden = _hidden_states(self._backbone, input_ids).flatten(0, 1)
        return cast(Tensor, self._head(hidden[states].to(self._head.weight.dtype)).squeeze(-1))


def load_policy(folder: Path, dtype: ComputeDtype) -> Policy:
    """The causal language model in `folder`.

    Raises:
        ConfigError: there is none, or one whose logits are more than hidden states times a weight.
    """
    module = _load(folder, dtype, AutoModelForCausalLM)
    policy = Policy(module)
    _check_head(policy, folder, _HEAD_TOLERANCE[dtype])
    return policy


def load_critic(folder: Path, dtype: ComputeDtype, seed: int) -> Critic:
    """The backbone in `folder` with a fresh value head: the same one for the same seed.

    w ~ N(0, (1 / (H + 1))^2), no bias, so that values start near 0 (`algorithms.md` 4.5).
    """
    backbone = _load(folder, dtype, AutoModel)
    hidden_size = int(backbone.get_input_embeddings().weight.shape[1])  # type: ignore[operator]
    return Critic(backbone, new_value_head(hidden_size, dtype, seed))


def new_value_head(hidden_size: int, dtype: ComputeDtype, seed: int) -> nn.Linear:
    """A head whose weight is drawn in float64, so that every dtype gets the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, hidden_size, generator=generator, dtype=torch.float64) / (hidden_size + 1)
    head_dtype = torch.float64 if dtype == "float64" else torch.float32
    head = nn.Linear(hidden_size, 1, bias=False, dtype=head_dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
    return head


def copy_companions(source: Path, target: Path) -> None:
    """Copy what belongs to a model beside its weights and config: tokenizer, chat template, generation settings."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def silence_transformers() -> None:
    """Only errors, no progress bars, and never a look at a hub."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not torch.cuda.is_available():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # transformers' saving imports deepspeed, which would guess
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _load(folder: Path, dtype: ComputeDtype, kind: type[AutoModel] | type[AutoModelForCausalLM]) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    try:
        module = kind.from_pretrained(
            folder,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation="sdpa",
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the model in {folder} cannot be loaded: {error}") from error
    if dtype == "float64":
        _make_norms_exact(module)
    # Not train(): dropout would make the policy differ from itself, and the first ratio from 1.
    return cast(nn.Module, module.eval())


def _backbone_of(module: nn.Module) -> nn.Module:
    return cast(nn.Module, getattr(module, str(module.base_model_prefix)))


def _hidden_states(backbone: nn.Module, input_ids: Tensor) -> Tensor:
    return cast(Tensor, backbone(input_ids=input_ids, use_cache=False).last_hidden_state)


@torch.no_grad()
def _check_head(policy: Policy, folder: Path, tolerance: float) -> None:
    """Compare with the model's own logits, on two rows of which one is padded."""
    longer = torch.tensor([[0, 1, 2, 1]]) % policy.vocab_size
    rows = torch.cat([longer, longer])
    rows[1, 2:] = 0
    logits = policy.hidden_states(rows) @ policy.head_weight.T
    for row, length in ((0, 4), (1, 2)):
        own = policy.module(input_ids=rows[row : row + 1, :length], use_cache=False).logits[0]
        gap = float((logits[row, :length].float() - own.float()).abs().max())
        if not gap <= tolerance * float(own.abs().max()):
            raise ConfigError(
                f"the model in {folder} cannot be trained here: its logits differ by {gap:.3g} from hidden states "
                "times the head's weight, right-padded without a mask"
            )


class _ExactRMSNorm(nn.Module):
    """transformers' norms compute in float32 whatever they are given; this one keeps float64."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self._epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self._epsilon)


def _make_norms_exact(module: nn.Module) -> None:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in _EXACT_NORMS:
                setattr(parent, name, _ExactRMSNorm(child.weight, child.variance_epsilon))  # type: ignore[arg-type]
