"""Three more engines: a mixture of experts, a model that is cut over two workers, and one with two replicas; each is
updated and probed.

What an update does to experts is proven in every run of the tests by `test_packed_experts.py`, without an engine.
"""

import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyppo_async.rpc.client import FleetClient
from asyppo_async.trainer.worker.names import CheckpointNames
from asyppo_async.weights.manifest import leaf_module, manifest_of_checkpoint
from tests.integration.fleet.conftest import (
    HOSTILE_GENERATION_CONFIG,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    call_of,
    sampling_of,
)
from tests.integration.fleet.test_models_and_endings import FLOORS, check_updates

pytestmark = pytest.mark.engine

NUM_LAYERS, NUM_EXPERTS = 3, 8


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with eight experts in each layer, of which a token uses two."""
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.1,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(HOSTILE_GENERATION_CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.long
async def test_mixture_of_experts_takes_every_experts_weights_as_its_checkpoint_names_them(
    mixture: Path, start_server, open_trainer
) -> None:
    manifest = manifest_of_checkpoint(mixture, "float32")
    assert (
        len([spec for spec in manifest.tensors if ".experts." in spec.name]) == NUM_LAYERS * NUM_EXPERTS * 3
    )
    with start_server(mixture, "--max-num-seqs", "8") as running:
        async with FleetClient(running.address) as client:
            # Buckets of 20 kB: each layer's 786 kB of experts arrive in many.
            await check_updates(client, mixture, "float32", open_trainer)
            async with open_trainer(client, mixture, "float32", run_id="one", epoch=2) as trainer:
                tokens = np.arange(3, 140, dtype=np.int32)
                before = trainer.reference.logprobs(tokens)
                swap_two_experts(trainer.reference.model)
                # Had the engine put one expert's weights in the place of another's, this is what would be seen.
                assert np.abs(trainer.reference.logprobs(tokens) - before).mean() > 5 * FLOORS["float32"]
                scored, sampled = await trainer.publish(0)
                assert scored.mean < FLOORS["float32"] and sampled.mean < FLOORS["float32"]


@torch.no_grad()
def swap_two_experts(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if leaf_module(name).endswith(".experts"):
            parameter[[0, 5]] = parameter[[5, 0]]


@pytest.mark.long
async def test_two_workers_of_one_server_take_their_shards_of_every_tensor(
    make_model, start_server, open_trainer
) -> None:
    folder = make_model(True, "float32")
    with start_server(folder, "--max-num-seqs", "8", "--tensor-parallel-size", "2") as running:
        async with FleetClient(running.address) as client:
            info = await client.info(30)
            assert info.num_workers == 2
            await check_updates(client, folder, "float32", open_trainer)


@pytest.mark.long
@pytest.mark.report("P78")
async def test_two_replicas_of_one_server_sample_and_are_updated_in_every_way(
    make_model, start_server, open_trainer
) -> None:
    folder = make_model(True, "float32")
    options = ("--max-num-seqs", "8", "--data-parallel-size", "2", "--metrics-port", "0")
    prompt = np.arange(3, 20, dtype=np.int32)
    with start_server(folder, *options) as running:
        async with FleetClient(running.address) as client:
            info = await client.info(30)
            assert (info.num_workers, info.max_num_seqs) == (2, 16)
            await check_updates(client, folder, "float32", open_trainer)
            async with open_trainer(
                client, folder, "float32", run_id="ranks", way="direct", num_workers=2
            ) as trainer:
                await trainer.publish(0)
                trainer.reference.perturb(7)
                scored, sampled = await trainer.publish(1)
                assert max(scored.mean, sampled.mean) < FLOORS["float32"]
                call = call_of("ranks", prompt, 12, sampling_of(100))
                responses = await client.collect(call, 120, lambda _: None)
                assert len({tuple(response.token_ids.tolist()) for response in responses}) == 12
                for response in responses:
                    theirs = trainer.reference.response_logprobs(prompt, response)
                    np.testing.assert_allclose(response.behaviour_logprobs, theirs, atol=1e-5)
        made = tokens_by_replica(running.metrics_port)
        assert len(made) == 2 and min(made) >= 600, made


def tokens_by_replica(metrics_port: int) -> list[float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return [
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:generation_tokens_total{")
    ]


def test_names_of_the_mixture_are_those_that_a_publication_sends(mixture: Path) -> None:
    names = CheckpointNames(Qwen3MoeForCausalLM.from_pretrained(mixture))
    assert names.shapes == {
        spec.name: spec.shape for spec in manifest_of_checkpoint(mixture, "float32").tensors
    }
