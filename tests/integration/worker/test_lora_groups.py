"""Real groups with adapters: they publish and save whole weights or adapters, and new processes go on from them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyppo_async.config.critic import CriticSection
from asyppo_async.config.learner import PublishedLora, TrainingBackend, ZeroStage
from asyppo_async.config.sections import ActorSection
from asyppo_async.errors import CheckpointError
from asyppo_async.trainer.worker.clients import ActorGroup, CriticGroup
from asyppo_async.trainer.worker.group import open_groups
from asyppo_async.trainer.worker.messages import ActorForward, CriticForward
from asyppo_async.types import TokenSequences
from asyppo_async.weights.adapter import read_adapter
from tests.integration.worker.conftest import TIMES
from tests.integration.worker.test_groups import receive
from tests.unit.worker.learners import actor_request, critic_request

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

BUCKET_BYTES = 512
"""Several buckets also where adapters travel alone."""


@asynccontextmanager
async def opened(
    model: Path,
    folder: Path,
    backend: TrainingBackend,
    stage: ZeroStage,
    *,
    publish: PublishedLora = "merged",
    lora_rank: int = 2,
) -> AsyncIterator[tuple[ActorGroup, CriticGroup]]:
    how = {
        "model": model,
        "backend": backend,
        "zero_stage": stage,
        "zero_whole_below": 0,
        "num_ranks": 2,
        "num_threads": 1,
        "learning_rate": 1e-2,
        "lora_rank": lora_rank,
        "lora_alpha": 6,
    }
    async with open_groups(
        actor=ActorSection.model_validate({**how, "reference": "initial"}),
        critic=CriticSection.model_validate({**how, "count": 1, "num_ranks": 1}),
        seed=1,
        bucket_bytes=BUCKET_BYTES,
        folder=folder,
        times=replace(TIMES, join_timeout_s=240, request_timeout_s=120, silent_after_s=60),
        publish=publish,
    ) as (actor, (critic,)):
        yield actor, critic


async def train(groups: tuple[ActorGroup, CriticGroup], sequences: TokenSequences) -> None:
    await groups[0].train(actor_request(sequences, [5, 4]))
    await groups[1].train(critic_request(sequences, [5, 4]))


async def outputs(groups: tuple[ActorGroup, CriticGroup], sequences: TokenSequences) -> list[np.ndarray]:
    scored = await groups[0].forward(ActorForward(sequences=sequences, temperature=1.0))
    return [scored.logprobs, (await groups[1].forward(CriticForward(sequences=sequences))).values]


@pytest.mark.parametrize(
    ("backend", "stage"), [("plain", 2), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]
)
async def test_groups_with_adapters_when_saved_and_restored_then_they_train_on_and_publish_what_they_save(
    tiny_folder: Path,
    sequences: TokenSequences,
    tmp_path: Path,
    backend: TrainingBackend,
    stage: ZeroStage,
) -> None:
    base = load_file(tiny_folder / "model.safetensors")
    scored = ActorForward(sequences=sequences, temperature=1.0, with_reference=True)
    async with opened(tiny_folder, tmp_path / "first", backend, stage) as groups:
        at_first = await groups[0].forward(scored)
        await train(groups, sequences)
        later = await groups[0].forward(scored)
        np.testing.assert_array_equal(at_first.reference_logprobs, at_first.logprobs)
        np.testing.assert_array_equal(later.reference_logprobs, at_first.logprobs)
        assert np.abs(later.logprobs - at_first.logprobs).max() > 1e-3
        states = [groups[0].state, groups[1].state]
        for state in states:
            await state.save(tmp_path / "saved")
        size = sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*.safetensors"))
        before = await outputs(groups, sequences)
        received = await receive(groups[0], epoch=3, bucket_bytes=BUCKET_BYTES)
        await groups[0].save(tmp_path / "whole")
        await groups[0].save(tmp_path / "adapter", adapter=True)
        await groups[1].save(tmp_path / "critic")
        await groups[1].save(tmp_path / "critic-adapter", adapter=True)
        await train(groups, sequences)
        expected = await outputs(groups, sequences)
    assert size > 0
    whole = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "whole").named_parameters())
    assert received.keys() == whole.keys()
    for name, weight in whole.items():
        assert torch.equal(received[name], weight.detach()), name
        assert torch.equal(weight.detach(), base[name]) == ("_proj" not in name), name
    adapter = dict(read_adapter(tmp_path / "adapter", "float32").tensors)
    for name, tensor in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            summed = tensor + adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
            torch.testing.assert_close(received[name], summed, atol=1e-6, rtol=0)
    assert (tmp_path / "critic-adapter" / "value_head.safetensors").is_file()

    async with opened(tiny_folder, tmp_path / "second", backend, stage, publish="adapter") as groups:
        for state in (groups[0].state, groups[1].state):
            await state.restore(tmp_path / "saved")
        for one, other in zip(before, await outputs(groups, sequences), strict=True):
            np.testing.assert_array_equal(other, one)
        alone = await receive(groups[0], epoch=4, bucket_bytes=BUCKET_BYTES)
        assert alone.keys() == adapter.keys()
        for name, tensor in adapter.items():
            assert torch.equal(alone[name], tensor), name
        await train(groups, sequences)
        for one, other in zip(expected, await outputs(groups, sequences), strict=True):
            np.testing.assert_array_equal(other, one)

    async with opened(tmp_path / "whole", tmp_path / "third", backend, stage) as groups:
        with pytest.raises(CheckpointError, match="adapters for other weights"):
            await groups[0].state.restore(tmp_path / "saved")
