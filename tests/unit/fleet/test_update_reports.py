"""What an update must not do to the calls beside it: silence them, or lose their way out."""

import asyncio
import re
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from asyppo_async.errors import ConfigError
from asyppo_async.fleet.engine.scripted import Script
from asyppo_async.fleet.engine.vllm_options import TESTED_VERSION, check_version

DEADLINE_S = 20.0
ROOT = Path(__file__).parents[3]


@pytest.mark.report("P06")
async def test_health_and_info_when_a_load_is_under_way_then_they_answer_within_a_second(
    serving, sender
) -> None:
    async with serving(Script(load_s=1.0)) as server, sender(server) as trainer:
        report = await trainer.stage(1)
        async with asyncio.TaskGroup() as tasks, grpc.aio.insecure_channel(server.address) as channel:
            committing = tasks.create_task(trainer.commit(1, report))
            await asyncio.sleep(0.2)
            async with asyncio.timeout(1.0):
                info = await server.client.info(1.0)
                health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert info.state == "updating" and health.status == health_pb2.HealthCheckResponse.SERVING
            assert not committing.done()


@pytest.mark.report("P44")
async def test_cancel_when_the_engine_is_paused_then_it_waits_and_the_others_go_on(
    serving, sender, draw, until
) -> None:
    async with serving(Script(delta_delay_s=0.02, load_s=0.5)) as server, sender(server) as trainer:
        await trainer.publish(1)
        report = await trainer.stage(2)
        async with asyncio.TaskGroup() as tasks:
            async with server.client.generate(draw("run", max_tokens=400), DEADLINE_S) as leaving:
                await anext(leaving)
                staying = tasks.create_task(
                    server.client.collect(draw("run", max_tokens=60), DEADLINE_S, lambda _: None)
                )
                await until(lambda: len(server.engine.running_ids) == 2)
                committing = tasks.create_task(trainer.commit(2, report))
                await until(lambda: "load 2" in server.engine.seen)
            await committing
            await until(lambda: len(server.engine.running_ids) <= 1)  # the other one may be done
            await server.client.weights.verdict(1, 2, True, DEADLINE_S)
        (response,) = staying.result()
        assert len(response.token_ids) == 60
        order = [what for what in server.engine.seen if what in ("verify", "pause keep", "load 2", "resume")]
        assert order[-4:] == ["verify", "pause keep", "load 2", "resume"]


@pytest.mark.report("P12")
def test_start_when_vllm_is_of_an_untested_version_then_refused() -> None:
    check_version(f"{TESTED_VERSION}.0")
    for other in ("0.31.9", "0.33.0", "1.0.0", "0.320.1"):
        with pytest.raises(ConfigError, match=f"vLLM {re.escape(other)} is installed and this server"):
            check_version(other)


@pytest.mark.report("P17")
def test_sources_never_put_an_engine_to_sleep() -> None:
    """What a sleep throws away a reload of weights does not bring back (rotary tables), and no error says so."""
    sources = [path for path in (ROOT / "fleet").rglob("*.py")]
    assert len(sources) > 30
    words = ("enable_sleep_mode", ".wake_up(", "llm.sleep(")
    assert [path.name for path in sources if any(word in path.read_text() for word in words)] == []
