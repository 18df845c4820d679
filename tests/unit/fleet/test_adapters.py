"""A server whose versions are adapters: the same session, with another manifest. Scripted engine."""

from pathlib import Path

import pytest

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import FleetMismatch, RequestRejected
from asyppo_async.fleet.engine.scripted import Script
from asyppo_async.fleet.engine.vllm_options import adapter_arguments
from asyppo_async.weights.manifest import Manifest, TensorSpec
from tests.unit.fleet.test_weight_session import DEADLINE_S, nowhere, state_of

STEM = "base_model.model.model.layers.0.mlp.up_proj"
ADAPTER = Manifest(
    tensors=(
        TensorSpec(name=f"{STEM}.lora_A.weight", shape=(4, 32), dtype="float32"),
        TensorSpec(name=f"{STEM}.lora_B.weight", shape=(64, 4), dtype="float32"),
    )
)


async def test_adapter_when_published_then_it_is_a_version_as_any_other(serving, sender, draw) -> None:
    async with serving(Script(max_lora_rank=8)) as server:
        server.manifest = ADAPTER
        async with sender(server) as trainer:
            await trainer.publish(0)
            await trainer.publish(1)
        assert await state_of(server) == ("serving", "run", 1)
        (response,) = await server.client.collect(draw("run"), DEADLINE_S, lambda _: None)
        told = await server.client.checksums(DEADLINE_S)
    assert set(response.versions.per_token().tolist()) == {1}
    assert told is not None and list(told.tensors) == [spec.name for spec in ADAPTER.tensors]


async def test_session_when_the_kind_of_publication_is_not_the_servers_then_refused(serving) -> None:
    async with serving(Script(max_lora_rank=2)) as server:
        with pytest.raises(FleetMismatch, match=r"sender publishes whole weights, and .* --enable-lora"):
            await server.client.weights.open_session(nowhere(epoch=1), server.manifest, DEADLINE_S)
        with pytest.raises(FleetMismatch, match="ranks 1 to 2 are served"):
            await server.client.weights.open_session(nowhere(epoch=1), ADAPTER, DEADLINE_S)
        with pytest.raises(RequestRejected, match="use the way staged or folder"):
            await server.client.weights.open_session(nowhere(epoch=1, way="direct"), ADAPTER, DEADLINE_S)
    async with serving() as whole:
        with pytest.raises(
            FleetMismatch, match=r"takes whole weights: start it with --enable-lora .* or publish whole"
        ):
            await whole.client.weights.open_session(nowhere(epoch=1), ADAPTER, DEADLINE_S)


def test_rank_when_the_engine_has_no_room_for_it_then_refused_before_it_starts(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="ranks 1, 8, 16, 32, 64, 128, 256, 320, 512, got 12"):
        ServeConfig(model=Path("m"), enable_lora=True, max_lora_rank=12)
    assert adapter_arguments(ServeConfig(model=Path("m"))) == {}
    arguments = adapter_arguments(ServeConfig(model=model_folder, enable_lora=True, max_lora_rank=32))
    assert arguments.pop("lora_target_modules") == ["up_proj"]
    assert arguments == {"enable_lora": True, "max_lora_rank": 32, "max_loras": 2, "max_cpu_loras": 2}
