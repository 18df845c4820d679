"""Attention over responses that are packed end to end, each of which sees itself alone. No padding, no dense mask.

transformers would recognise packed documents from position ids that restart, and mask a [T, T] matrix, but only without
a cache and without an attention mask; else it drops them without a word, and they read each other. Here their lengths
are handed to the attention itself: one kernel for all of them where there is one, else a causal attention for each.

Legend: `T` tokens of a micro-batch, `A` attention heads, `D` dimension of one.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.worker import varlen
from asyppo_async.trainer.worker.control import WorkerSettings
from asyppo_async.trainer.worker.model import hidden_states
from asyppo_async.trainer.worker.packing import Cutting

logger = logging.getLogger(__name__)

_NAME = "asyppo_documents"
_IN_ONE = "asyppo_documents_in_one"
_PROBE_LENGTHS = (5, 3)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of the largest hidden state; a leak moves them by their own size."""


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    document_lengths: Sequence[int] = (),
    **settings: Any,
) -> tuple[Tensor, None]:
    """[1, A, T, D] each -> [1, T, A, D]; without lengths the causal attention of ordinary rows."""
    attend: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
    if not document_lengths:
        return attend(module, query, key, value, attention_mask, **settings)
    lengths = list(document_lengths)
    documents = zip(
        torch.split(query, lengths, 2),
        torch.split(key, lengths, 2),
        torch.split(value, lengths, 2),
        strict=True,
    )
    return torch.cat([attend(module, *document, None, **settings)[0] for document in documents], 1), None


def attention_in_one(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    document_lengths: Sequence[int] = (),
    **settings: Any,
) -> tuple[Tensor, None]:
    """As `document_attention`, all documents in one kernel."""
    if not document_lengths or not varlen.takes(query) or settings.get("dropout"):
        settings["document_lengths"] = document_lengths
        return document_attention(module, query, key, value, attention_mask, **settings)
    scale = settings.get("scaling")
    return varlen.attend(query, key, value, tuple(document_lengths), scale=scale), None


def cutting_of(settings: WorkerSettings, *roots: nn.Module) -> Cutting:
    """How a rank cuts its requests; the models that see them are prepared for it.

    Raises:
        ConfigError: packing is asked for, and one of them cannot be packed.
    """
    padded = Cutting(budget_tokens=settings.micro_batch_tokens)
    if settings.packing == "padded":
        return padded
    try:
        for root in roots:
            let_pack(root)
    except ConfigError as error:
        if settings.packing == "packed":
            raise ConfigError(
                f"{settings.role}.packing = 'packed': {error}; use 'auto' or 'padded'"
            ) from error
        logger.info("micro-batches are padded: %s", error)
        return padded
    return replace(padded, packed=True)


def let_pack(root: nn.Module) -> None:
    """Let a model take packed documents from now on; two of them are compared with each alone.

    Raises:
        ConfigError: documents would see each other, or something else of the model's would be lost.
    """
    model = next(part for part in root.modules() if isinstance(part, PreTrainedModel))
    if not _attends_to_everything(model):
        raise ConfigError(
            f"{type(model).__name__} has layers that do not attend to all tokens before; it cannot be packed"
        )
    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, document_attention)
    AttentionInterface.register(_IN_ONE, attention_in_one)
    gap = _in_one_kernel(model)
    if gap is None:
        model.set_attn_implementation(_NAME)
        gap = _gap(_backbone(model))
    if not gap < _TOLERANCE[next(model.parameters()).dtype]:
        model.set_attn_implementation(before)
        raise ConfigError(
            f"{type(model).__name__} cannot be packed: hidden states of two packed documents differ from those of "
            f"each alone by {gap:.2g} of the largest"
        )


def _in_one_kernel(model: PreTrainedModel) -> float | None:
    """The gap, if the weights are of a kind that a kernel over all documents takes on this device, else None."""
    weight = next(model.parameters())
    if weight.device.type != "cuda" or weight.dtype not in (torch.bfloat16, torch.float16):
        logger.info("packed responses: one attention for each, on %s in %s", weight.device.type, weight.dtype)
        return None
    model.set_attn_implementation(_IN_ONE)
    try:
        gap = _gap(_backbone(model))
    except RuntimeError as error:  # an older GPU than flash attention knows
        logger.info("packed responses: one attention for each, the kernel for all says %s", error)
        return None
    logger.info("packed responses: all in one variable-length kernel (flash attention)")
    return gap


def _attends_to_everything(model: PreTrainedModel) -> bool:
    kinds = getattr(model.config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return getattr(model.config, "sliding_window", None) is None


def _backbone(model: PreTrainedModel) -> nn.Module:
    backbone: nn.Module = getattr(model, model.base_model_prefix, model)
    return backbone


@torch.no_grad()
def _gap(backbone: nn.Module) -> float:
    """Largest difference between two documents packed and each alone, over the largest hidden state."""
    weight: Tensor = backbone.get_input_embeddings().weight  # type: ignore[operator]
    ids = torch.arange(sum(_PROBE_LENGTHS), device=weight.device)[None] % len(weight)
    try:
        packed = hidden_states(backbone, ids, _PROBE_LENGTHS)
    except TypeError as error:
        raise ConfigError(
            f"{type(backbone).__name__} does not hand lengths to its attention: {error}"
        ) from error
    alone = torch.cat(
        [hidden_states(backbone, document) for document in torch.split(ids, list(_PROBE_LENGTHS), 1)], 1
    )
    return float((packed - alone).abs().max() / alone.abs().max())
