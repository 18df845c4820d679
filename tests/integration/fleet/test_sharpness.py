"""The probe against one wrong tensor, for every tensor of every family of models, over the real engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyppo_async.rpc.client import FleetClient
from tests.integration.fleet.conftest import MAX_MODEL_LEN, VOCAB_SIZE
from tests.integration.fleet.sharpness import bound_of, gaps_with_one_scaled

pytestmark = [pytest.mark.engine, pytest.mark.long]

Make = Callable[[dict[str, Any]], PreTrainedModel]
FAMILIES: dict[str, Make] = {
    "qwen3": lambda size: Qwen3ForCausalLM(Qwen3Config(**size, head_dim=32)),
    "llama": lambda size: LlamaForCausalLM(LlamaConfig(**size)),
    "qwen2": lambda size: Qwen2ForCausalLM(Qwen2Config(**size)),
}


def model_of(family: str, tied: bool, folder: Path) -> None:
    torch.manual_seed(0)
    size = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    model = FAMILIES[family](size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at zero, which no factor changes
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.report("P14")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_probe_when_any_one_tensor_is_wrong_then_it_fails(
    family: str, tied: bool, tmp_path: Path, start_server, open_trainer
) -> None:
    model_of(family, tied, tmp_path)
    with start_server(tmp_path, "--max-num-seqs", "8") as running:
        async with (
            FleetClient(running.address) as client,
            open_trainer(client, tmp_path, "float32", run_id="sharp") as trainer,
        ):
            bound = await bound_of(trainer)
            names = [spec.name for spec in trainer.manifest.tensors]
            gaps = {name: gap async for name, gap in gaps_with_one_scaled(trainer, names)}
    weakest = min(gaps, key=lambda name: gaps[name])
    print(f"{family} tied={tied}: bound {bound:.2e}, weakest of {len(gaps)} {weakest} {gaps[weakest]:.2e}")
    assert len(gaps) > 35 and ("bias" in " ".join(gaps)) == (family == "qwen2")
    assert [name for name, gap in gaps.items() if gap <= bound] == []
