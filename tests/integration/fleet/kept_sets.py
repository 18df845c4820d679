"""What top-k and top-p keep, said by three: the engine, a transformers model, and the trainer's own actor."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from asyppo_async.algorithms.logprobs import KeptSet, kept_tokens
from asyppo_async.config.load import config_from_tree
from asyppo_async.rpc.calls import GenerateCall
from asyppo_async.rpc.client import FleetClient
from asyppo_async.trainer.worker.messages import ActorForward
from asyppo_async.types import (
    BoolArray,
    Float32Array,
    Int32Array,
    Response,
    SamplingParams,
    concatenate_sequences,
)
from tests.integration.fleet.conftest import Reference
from tests.unit.worker.learners import open_actor

EDGE = 1e-5
"""Nearer to top_p than this, rounding decides whether a token is kept."""


def sampling_of_preset(preset: str, max_tokens: int) -> SamplingParams:
    own = config_from_tree({"preset": preset, "actor": {"model": "a"}, "critic": {"model": "c"}}).sampling
    assert own.kept_tokens
    return SamplingParams(
        temperature=own.temperature,
        top_p=own.top_p,
        top_k=own.top_k,
        min_tokens=0,
        max_tokens=max_tokens,
        stop_token_ids=(),
    )


def sets_of_reference(
    reference: Reference, prompt: Int32Array, response: Response, sampling: SamplingParams
) -> tuple[list[frozenset[int]], Float32Array, BoolArray]:
    """Of each position: the kept set, the sampled token's log-prob within it, and whether no rounding decided it."""
    ids = torch.from_numpy(np.concatenate([prompt, response.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits = reference.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    z = logits / sampling.temperature
    kept = kept_tokens(z, KeptSet(top_k=sampling.top_k, top_p=sampling.top_p))
    within_top_k = torch.where(z >= z.topk(sampling.top_k).values[:, -1:], z, -torch.inf)
    mass = within_top_k.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    is_clear = ((mass - sampling.top_p).abs() > EDGE).all(-1)
    scores = z.masked_fill(~kept, -torch.inf).log_softmax(-1)
    scored = scores.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return [frozenset(row.nonzero()[:, 0].tolist()) for row in kept], scored.numpy(), is_clear.numpy()


async def sets_of_engine(
    client: FleetClient, call: GenerateCall, response: Response, deadline_s: float
) -> list[frozenset[int]]:
    """What the engine would keep at each position of a response with the weights that it has now."""

    async def at(position: int) -> frozenset[int]:
        prefix = np.concatenate([call.prompt_token_ids, response.token_ids[:position]])
        one = replace(
            call,
            prompt_token_ids=prefix,
            num_samples=1,
            return_kept_tokens=True,
            sampling=replace(call.sampling, max_tokens=1),
        )
        (answer,) = await client.collect(one, deadline_s, lambda _: None)
        assert answer.kept is not None
        return answer.kept.sets()[0]

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(at(position)) for position in range(len(response.token_ids))]
    return [task.result() for task in asked]


def outside_of_actor(
    folder: Path,
    reference: Reference,
    prompt: Int32Array,
    responses: Sequence[Response],
    sampling: SamplingParams,
) -> BoolArray:
    """[sum T] tokens that the trainer's actor, with the reference's weights, finds outside its own set."""
    actor = open_actor(folder, dtype="float32")
    actor.module.load_state_dict(reference.model.state_dict())
    result = actor.learner.forward(
        ActorForward(
            sequences=concatenate_sequences([(prompt, response.token_ids) for response in responses]),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
    )
    return np.isneginf(result.logprobs)
