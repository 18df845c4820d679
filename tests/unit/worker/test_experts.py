"""Routing replay in the worker: any cutting of the batch uses the engine's experts, position by position."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from asyppo_async.errors import ConfigError, WorkerError
from asyppo_async.trainer.worker.codec import decode, encode
from asyppo_async.trainer.worker.experts import Experts, routers_of
from asyppo_async.trainer.worker.messages import ActorForward
from asyppo_async.trainer.worker.model import Policy
from asyppo_async.trainer.worker.packing import lay_out
from asyppo_async.trainer.worker.sharding import cut_actor_train, cut_batch, merge
from asyppo_async.types import Int16Array, TokenSequences
from tests.unit.worker.learners import (
    TINY_SIZES,
    actor_request,
    largest_difference,
    open_actor,
    write_mixture,
)
from tests.unit.worker.test_model import rows_of

NUM_EXPERTS, NUM_LAYERS = 8, 2
SIZES = {**TINY_SIZES, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def routed(sequences: TokenSequences) -> Int16Array:
    random = np.random.default_rng(2)
    num_inputs = int(lay_out(sequences).input_lengths.sum())
    order = random.random((num_inputs, NUM_LAYERS, NUM_EXPERTS)).argsort(-1)
    return order[..., :2].astype(np.int16)


@contextmanager
def forced(model: nn.Module, experts: Tensor) -> Iterator[None]:
    """Written again from the definition: the softmax of the chosen experts' logits among all, normalised."""
    handles = []
    for layer, router in enumerate(routers_of(model)):

        def choose(
            _: nn.Module, __: object, outputs: tuple[Tensor, ...], layer: int = layer
        ) -> tuple[Tensor, ...]:
            chosen = experts[:, layer]
            rows = [
                [float(logits[i].exp()) for i in row] for logits, row in zip(outputs[0], chosen, strict=True)
            ]
            gates = torch.tensor([[one / sum(row) for one in row] for row in rows], dtype=outputs[0].dtype)
            return outputs[0], gates, chosen

        handles.append(router.register_forward_hook(choose))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def forward_request(sequences: TokenSequences, routed: Int16Array | None) -> ActorForward:
    return ActorForward(sequences=sequences, temperature=0.8, routed_experts=routed)


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 4096])
def test_logprobs_with_replay_are_those_of_each_response_alone_on_its_experts(
    mixture: Path, sequences: TokenSequences, routed: Int16Array, micro_batch_tokens: int
) -> None:
    actor = open_actor(mixture, dtype="float32", micro_batch_tokens=micro_batch_tokens)
    got = actor.learner.forward(forward_request(sequences, routed)).logprobs
    expected, start = [], 0
    for ids, num_prompt in rows_of(sequences):
        fed = ids[:-1]
        experts = torch.from_numpy(routed[start : start + len(fed)].astype(np.int64))
        start += len(fed)
        with torch.no_grad(), forced(actor.module, experts):
            logs = (actor.module(fed[None], use_cache=False).logits[0] / 0.8).log_softmax(-1)
        expected += [float(logs[position - 1, ids[position]]) for position in range(num_prompt, len(ids))]
    np.testing.assert_allclose(got, expected, atol=2e-5)
    own = actor.learner.forward(forward_request(sequences, None)).logprobs
    assert float(np.abs(own - got).max()) > 0.05


def test_gradient_with_replay_is_the_same_over_any_number_of_ranks(
    mixture: Path, sequences: TokenSequences, routed: Int16Array
) -> None:
    request = actor_request(sequences, [9], routed_experts=routed)
    whole = open_actor(mixture, dtype="float32")
    whole.learner.train(request)
    summed: dict[str, Tensor] = {}
    for part in cut_actor_train(request, 3):
        rank = open_actor(mixture, dtype="float32", micro_batch_tokens=30)
        rank.learner.train(part)
        for name, gradient in rank.backend.gradients[0].items():
            summed[name] = summed.get(name, torch.zeros_like(gradient)) + gradient
    assert largest_difference(summed, whole.backend.gradients[0]) < 5e-6
    deaf = open_actor(mixture, dtype="float32")
    deaf.learner.train(replace(request, routed_experts=None))
    assert largest_difference(deaf.backend.gradients[0], whole.backend.gradients[0]) > 0.01


def test_policy_ratio_is_one_where_forward_and_training_replay_the_same_experts(
    mixture: Path, sequences: TokenSequences, routed: Int16Array
) -> None:
    actor = open_actor(mixture, dtype="float32")
    proximal = actor.learner.forward(forward_request(sequences, routed)).logprobs
    request = actor_request(sequences, [9], routed_experts=routed, proximal_logprobs=proximal)
    (step,) = actor.learner.train(request).steps
    assert (step.ratio_mean, step.ratio_max) == pytest.approx((1.0, 1.0), abs=1e-5)


def test_experts_when_cut_over_ranks_and_sent_stay_with_their_sequences(
    sequences: TokenSequences, routed: Int16Array
) -> None:
    inputs = lay_out(sequences).input_lengths
    numbered = np.repeat(np.arange(9), inputs).astype(np.int16)[:, None, None]
    shards = cut_batch(sequences, 2)
    for shard in shards:
        own = shard.select_routing(sequences, numbered)
        assert own is not None
        arrived = decode(encode(forward_request(shard.sequences, own))).message
        assert isinstance(arrived, ActorForward) and arrived.routed_experts is not None
        np.testing.assert_array_equal(
            arrived.routed_experts[:, 0, 0], np.repeat(shard.chosen, inputs[shard.chosen])
        )
    assert shards[0].select_routing(sequences, None) is None
    with pytest.raises(ValueError, match=f"must be .{int(inputs.sum())} positions"):
        forward_request(sequences, routed[:-1])
    results = [shard.tokens.astype(np.float32) for shard in shards]
    num_tokens = sequences.num_response_tokens
    np.testing.assert_array_equal(merge(shards, results, num_tokens), np.arange(num_tokens))


def test_replay_when_the_model_is_dense_is_refused_with_the_key(
    tiny_folder: Path, sequences: TokenSequences, routed: Int16Array
) -> None:
    actor = open_actor(tiny_folder)
    with pytest.raises(WorkerError, match="the actor has none"):
        actor.learner.forward(forward_request(sequences, routed))
    with pytest.raises(ConfigError, match=r"actor\.routing_replay .* no routers"):
        Experts(Policy(actor.module)).check()


def test_check_of_routers_takes_those_it_can_replay_and_refuses_others() -> None:
    torch.manual_seed(0)
    mixtral = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).eval()
    with torch.no_grad():
        for parameter in mixtral.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    Experts(Policy(mixtral)).check()
    Experts(Policy(GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4)).eval())).check()
    router = routers_of(mixtral)[1]
    with_sigmoid = router.register_forward_hook(
        lambda _, __, outputs: (outputs[0], outputs[0].gather(1, outputs[2]).sigmoid(), outputs[2])
    )
    with pytest.raises(ConfigError, match=r"actor\.routing_replay would change this model"):
        Experts(Policy(mixtral)).check()
    with_sigmoid.remove()
    router.register_forward_hook(lambda _, __, outputs: outputs[0])
    with pytest.raises(ConfigError, match="does not know the routers"):
        Experts(Policy(mixtral)).check()
