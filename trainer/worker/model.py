"""Loading a policy from a folder, and hidden states of policies and critics.

Two traps of transformers are closed here: `use_cache` must be off and no attention mask may be given (with the default,
position ids that restart are not recognised and packed documents leak into each other), and the logits of models with a
soft cap, a scale or a bias are not `hidden @ weight`, so those are refused.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from asyppo_async.algorithms.logprobs import KeptSet, TokenDistribution, token_logprobs_and_entropy
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


class _Scores(nn.Module):
    """The policy and its head as one forward, so that an engine which gathers weights sees every use of them."""

    def __init__(self, model: nn.Module, *, float32_head: bool) -> None:
        super().__init__()
        self.model = model
        self._float32_head = float32_head

    def forward(
        self, input_ids: Tensor, states: Tensor, token_ids: Tensor, scoring: "Scoring"
    ) -> tuple[Tensor, ...]:
        hidden = hidden_states(_backbone_of(self.model), input_ids, scoring.documents).flatten(0, 1)
        distribution = token_logprobs_and_entropy(
            hidden[states],
            _head_weight_of(self.model),
            token_ids,
            temperature=scoring.temperature,
            chunk_tokens=scoring.chunk_tokens,
            float32_head=self._float32_head,
            kept_set=scoring.kept_set,
        )
        return (
            distribution.logprobs,
            distribution.entropies,
            distribution.squared_probabilities,
            distribution.inside,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How log-probs are computed from hidden states; see `token_logprobs_and_entropy`."""

    temperature: float
    chunk_tokens: int
    kept_set: KeptSet | None = None
    documents: tuple[int, ...] = ()
    """Lengths of what is packed end to end in one row; see `MicroBatch.documents`."""


class Policy:
    """A causal language model, taken apart into backbone and head."""

    def __init__(self, module: nn.Module, *, float32_head: bool = False) -> None:
        """`float32_head`: multiply with the head in float32, although weights and states are of lower precision."""
        self.module = module
        self.float32_head = float32_head
        self.root = _Scores(module, float32_head=float32_head)
        """What a training engine runs."""
        self.vocab_size = self.head_weight.shape[0]
        self._run: nn.Module = self.root

    @property
    def head_weight(self) -> Tensor:
        """[V, H]; the embedding itself where the head is tied."""
        return _head_weight_of(self.module)

    def run_in(self, engine: nn.Module) -> None:
        """Run through the engine that has taken the weights over."""
        self._run = engine

    def distribution(
        self, input_ids: Tensor, states: Tensor, token_ids: Tensor, scoring: Scoring
    ) -> TokenDistribution:
        """Of the tokens [N] that follow the flat positions `states` [N] of `input_ids` [R, L]."""
        logprobs, entropies, squares, inside = self._run(input_ids, states, token_ids, scoring)
        return TokenDistribution(
            logprobs=logprobs, entropies=entropies, squared_probabilities=squares, inside=inside
        )

    def hidden_states(self, input_ids: Tensor, documents: tuple[int, ...] = ()) -> Tensor:
        """[R, L] -> [R, L, H] after the final norm; of a model that no engine has taken over."""
        return hidden_states(_backbone_of(self.module), input_ids, documents)


def load_policy(folder: Path, dtype: ComputeDtype, *, float32_head: bool = False) -> Policy:
    """The causal language model in `folder`; `float32_head`: see `Policy`.

    Raises:
        ConfigError: there is none, or one whose logits are more than hidden states times a weight.
    """
    module = load_model(folder, dtype, AutoModelForCausalLM)
    policy = Policy(module, float32_head=float32_head)
    _check_head(policy, folder, _HEAD_TOLERANCE[dtype])
    return policy


def recompute_layers(root: nn.Module) -> None:
    """Keep only the inputs of each layer of a model for the backward, which computes the layer again.

    Raises:
        ConfigError: the model has no such layers.
    """
    model = next(part for part in root.modules() if isinstance(part, PreTrainedModel))
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"recompute does not know the layers of {type(model).__name__}; set it to false")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        # Of the layer alone, which looks at it before it computes again; what it holds stays in evaluation.
        layer.training = True


def copy_companions(source: Path, target: Path, *, without: str = "") -> None:
    """Copy what belongs to a model beside its weights and config: tokenizer, chat template, generation settings.

    `without`: a file that stays behind, whatever it is.
    """
    for file in sorted(source.iterdir()):
        if not file.is_file() or file.name.endswith(_WEIGHT_SUFFIXES) or file.name == without:
            continue
        if not (target / file.name).exists():
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


def load_model(
    folder: Path, dtype: ComputeDtype, kind: type[AutoModel] | type[AutoModelForCausalLM]
) -> nn.Module:
    """A model of transformers, in evaluation mode.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    try:
        module, found = kind.from_pretrained(
            folder,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the model in {folder} cannot be loaded: {error}") from error
    # What is not there would be drawn at random, with no more than a warning.
    wrong = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    if wrong:
        raise ConfigError(
            f"the weights in {folder} are not those of its config.json: {len(wrong)} are missing or of another shape, "
            f"{wrong[0]} for one"
        )
    if dtype == "float64":
        _make_norms_exact(module)
    # Not train(): dropout would make the policy differ from itself, and the first ratio from 1.
    return cast(nn.Module, module.eval())


def _head_weight_of(module: nn.Module) -> Tensor:
    return cast(Tensor, module.get_output_embeddings().weight)  # type: ignore[operator]


def _backbone_of(module: nn.Module) -> nn.Module:
    return cast(nn.Module, getattr(module, str(module.base_model_prefix)))


def hidden_states(backbone: nn.Module, input_ids: Tensor, documents: tuple[int, ...] = ()) -> Tensor:
    """[R, L] -> [R, L, H] of a backbone; `documents` are lengths of what is packed end to end in one row."""
    if not documents:
        return cast(Tensor, backbone(input_ids=input_ids, use_cache=False).last_hidden_state)
    positions = torch.cat([torch.arange(length, device=input_ids.device) for length in documents])
    outputs = backbone(
        input_ids=input_ids, position_ids=positions[None], use_cache=False, document_lengths=documents
    )
    return cast(Tensor, outputs.last_hidden_state)


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
