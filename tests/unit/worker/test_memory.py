"""What a step keeps and computes again: the same gradient, fewer bytes, and never all logits at once."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyppo_async.trainer.worker.memory import ActivationCount, forget_peak, peak_bytes
from asyppo_async.types import TokenSequences
from tests.unit.worker.learners import (
    VOCABULARY,
    actor_request,
    critic_request,
    largest_difference,
    open_actor,
    open_critic,
    write_mixture,
)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gradients_with_recomputed_layers_are_the_same_and_fewer_bytes_wait(
    tiny_folder: Path, sequences: TokenSequences, role: str
) -> None:
    kept, again = (
        open_actor(tiny_folder, micro_batch_tokens=40, recompute=recompute)
        if role == "actor"
        else open_critic(tiny_folder, micro_batch_tokens=40, recompute=recompute)
        for recompute in (False, True)
    )
    request: Any = actor_request(sequences, [5, 4]) if role == "actor" else critic_request(sequences, [5, 4])
    plain, thrifty = kept.learner.train(request), again.learner.train(request)
    assert max(map(largest_difference, again.backend.gradients, kept.backend.gradients)) < 1e-12
    assert 0 < thrifty.activation_bytes < plain.activation_bytes / 2


def test_recomputed_layers_use_the_experts_of_the_engine_again(
    tmp_path: Path, sequences: TokenSequences
) -> None:
    folder = write_mixture(tmp_path)
    num_inputs = int((sequences.prompt_lengths + sequences.response_lengths - 1).sum())
    random = np.random.default_rng(4)
    chosen = random.permuted(np.tile(np.arange(8, dtype=np.int16), (num_inputs, 2, 1)), axis=2)[..., :2]
    request = actor_request(sequences, [9], routed_experts=np.ascontiguousarray(chosen))
    gradients = []
    for recompute in (False, True):
        actor = open_actor(folder, dtype="float32", recompute=recompute)
        actor.learner.train(request)
        gradients += actor.backend.gradients
    assert largest_difference(*gradients) < 5e-6
    own = open_actor(folder, dtype="float32")
    own.learner.train(actor_request(sequences, [9]))
    assert largest_difference(own.backend.gradients[0], gradients[0]) > 1e-3


class Largest(TorchDispatchMode):
    """Most rows of any tensor whose last dimension is the vocabulary."""

    rows = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return made


@pytest.mark.report("P59")
def test_logits_of_more_than_a_chunk_of_tokens_never_exist(
    tiny_folder: Path, sequences: TokenSequences
) -> None:
    whole, cut = open_actor(tiny_folder), open_actor(tiny_folder)
    cut.learner._chunk_tokens = 3
    request = actor_request(sequences, [9])
    seen = []
    for actor in (whole, cut):
        with Largest() as largest:
            actor.learner.train(request)
        seen.append(largest.rows)
    read = int(((request.policy_weights != 0) | (request.entropy_weights != 0)).sum())
    # The head's weight, transposed for a product, has 16 rows of the vocabulary's width.
    assert seen == [read, 16] and read > 40
    assert largest_difference(cut.backend.gradients[0], whole.backend.gradients[0]) < 1e-12


@pytest.mark.report("P59")
def test_critic_has_no_parameter_over_the_vocabulary_but_its_embedding(tiny_folder: Path) -> None:
    critic = open_critic(tiny_folder)
    wide = [name for name, weight in critic.module.named_parameters() if VOCABULARY in weight.shape]
    assert wide == ["backbone.embed_tokens.weight"]


def test_activations_are_counted_once_without_weights() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    count = ActivationCount()
    with count.counting():
        kept = (torch.ones(8, 4) @ weight).exp()
        loss = (kept * kept).sum()
    # The input (8 x 4 floats) and the exponentials (8 x 4), which two operations keep.
    assert count.num_bytes == 2 * 8 * 4 * 4
    loss.backward()
    assert weight.grad is not None and float(weight.grad[0, 0]) == pytest.approx(2 * 8 * np.exp(8), rel=1e-5)


def test_peak_is_of_the_step_not_of_the_process() -> None:
    device = torch.device("cpu")
    forget_peak(device)
    block = torch.ones(2**26)  # 256 MiB
    high = peak_bytes(device)
    del block
    forget_peak(device)
    assert peak_bytes(device) < high - 2**27
