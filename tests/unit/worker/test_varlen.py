"""All packed documents in one kernel: what it is handed, and on a GPU that it attends as one for each document does."""

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from asyppo_async.trainer.worker.documents import attention_in_one, document_attention, let_pack
from asyppo_async.trainer.worker.model import load_policy
from asyppo_async.trainer.worker.varlen import attend, takes
from tests.unit.worker.learners import write_model

LENGTHS = (5, 1, 8)


def heads(device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value [1, A, T, D] of fourteen tokens; four heads and two of keys."""
    random = torch.Generator().manual_seed(3)
    tensors = [torch.randn(1, number, 14, 16, generator=random) for number in (4, 2, 2)]
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors]


def reference_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_query: int,
    max_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch's documents say of `varlen_attn`, which has no kernel for a CPU."""
    assert window_size == (-1, 0)
    assert query_ends.dtype == torch.int32 and torch.equal(query_ends, key_ends)
    ends = query_ends.tolist()
    pieces = []
    for start, end in pairwise(ends):
        assert end - start <= min(max_query, max_key)
        parts = [tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value)]
        pieces.append(
            scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=enable_gqa)[0]
        )
    return torch.cat([piece.transpose(0, 1) for piece in pieces])


def one_by_one(tensors: list[Tensor], scaling: float) -> Tensor:
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True  # type: ignore[assignment]
    arguments: dict[str, Any] = {"scaling": scaling, "document_lengths": LENGTHS}
    return document_attention(module, *tensors, None, **arguments)[0]


def gradients(tensors: list[Tensor], attended: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(attended.float().sin().sum(), tensors))


def test_documents_when_handed_to_one_kernel_attend_as_each_alone() -> None:
    tensors = heads()
    got = attend(*tensors, LENGTHS, scale=0.3, kernel=reference_kernel)
    expected = one_by_one(tensors, 0.3)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    for one, other in zip(gradients(tensors, got), gradients(tensors, expected), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_cpu_when_it_packs_has_one_attention_for_each_and_says_so(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not takes(heads(dtype=torch.bfloat16)[0])
    with caplog.at_level(logging.INFO):
        let_pack(load_policy(tiny_folder, "bfloat16").root)
    assert "one attention for each, on cpu in torch.bfloat16" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_gpu_when_it_packs_bfloat16_attends_in_one_kernel_as_in_one_for_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = heads("cuda", torch.bfloat16)
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True  # type: ignore[assignment]
    assert takes(tensors[0])
    got, _ = attention_in_one(module, *tensors, None, scaling=0.3, document_lengths=LENGTHS)
    expected = one_by_one(tensors, 0.3)
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
    for one, other in zip(gradients(tensors, got), gradients(tensors, expected), strict=True):
        torch.testing.assert_close(one, other, atol=5e-2, rtol=5e-2)

    policy = load_policy(write_model(tmp_path, head_dim=16), "bfloat16")
    policy.module.to("cuda")
    with caplog.at_level(logging.INFO):
        let_pack(policy.root)
    assert "all in one variable-length kernel" in caplog.text
