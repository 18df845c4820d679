"""A bfloat16 engine whose head multiplies in float32, against a trainer that does so too, and one that does not.

In an ordinary model the bfloat16 layers below make most of the gap, and hide the head. Here they add nothing, so that
both sides give their heads the same hidden states.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from asyppo_async.rpc.client import FleetClient
from asyppo_async.trainer.worker.actor import Actor
from asyppo_async.trainer.worker.backend.plain import PlainBackend
from asyppo_async.trainer.worker.learning_rate import LearningRate
from asyppo_async.trainer.worker.messages import ActorForward
from asyppo_async.trainer.worker.model import load_policy
from asyppo_async.trainer.worker.packing import Cutting
from asyppo_async.trainer.worker.steps import Stepper
from asyppo_async.trainer.worker.world import World
from asyppo_async.types import Float32Array, Int32Array, Response, concatenate_sequences
from tests.integration.fleet.conftest import DEADLINE_S, VOCAB_SIZE, call_of, sampling_of

pytestmark = [pytest.mark.engine, pytest.mark.long]

NUM_SAMPLES, MAX_TOKENS = 16, 200


def trainer_logprobs(
    folder: Path, prompt: Int32Array, responses: list[Response], *, float32_head: bool
) -> Float32Array:
    """Of all response tokens, as the actor computes them."""
    policy, world = load_policy(folder, "bfloat16", float32_head=float32_head), World.alone()
    backend = PlainBackend(
        policy.module,
        policy.root,
        world=world,
        learning_rate=LearningRate(peak=1e-6, warmup_steps=0),
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    stepper = Stepper(backend, world, cutting=Cutting(budget_tokens=2048), non_finite_budget=0)
    sequences = concatenate_sequences([(prompt, response.token_ids) for response in responses])
    return Actor(policy, stepper).forward(ActorForward(sequences=sequences, temperature=1.0)).logprobs


def silence_layers(folder: Path) -> None:
    """What every layer adds becomes 0: the head sees normalised embeddings."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.report("P25")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
async def test_gap_when_both_heads_multiply_in_float32_then_it_is_that_of_float32(
    tied: bool, make_model, start_server, open_trainer
) -> None:
    folder = make_model(tied, "bfloat16")
    silence_layers(folder)
    prompt = np.random.default_rng(0).integers(2, VOCAB_SIZE, 9, dtype=np.int32)
    gaps: dict[tuple[bool, bool], float] = {}
    for engine_head in (False, True):
        options = ("--float32-head",) if engine_head else ()
        with start_server(folder, "--dtype", "bfloat16", "--max-num-seqs", "18", *options) as running:
            async with (
                FleetClient(running.address) as client,
                open_trainer(client, folder, "bfloat16", run_id="head") as trainer,
            ):
                assert (await client.info(DEADLINE_S)).float32_head == engine_head
                await trainer.publish(0)
                call = call_of("head", prompt, NUM_SAMPLES, sampling_of(MAX_TOKENS))
                responses = await client.collect(call, DEADLINE_S, lambda _: None)
        behaviour = np.concatenate([response.behaviour_logprobs for response in responses])
        for trainer_head in (False, True):
            own = trainer_logprobs(folder, prompt, list(responses), float32_head=trainer_head)
            gaps[engine_head, trainer_head] = float(np.abs(own - behaviour).mean())
    print(f"mean gaps, {'tied' if tied else 'untied'}, (engine, trainer) in float32: {gaps}")
    assert gaps[True, True] < 1e-6
    assert min(gaps[True, False], gaps[False, True]) > 20 * gaps[True, True]
