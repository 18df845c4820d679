"""Many servers as one: choice, failure, refusal, names that change. Real servers and gRPC, scripted engines."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from asyppo_async.errors import ConfigError, FleetOverloaded, FleetUnavailable, RequestRejected
from asyppo_async.fleet.engine.scripted import Script
from asyppo_async.rpc.dispatch import choose
from asyppo_async.rpc.names import addresses_of, addresses_within
from asyppo_async.rpc.pool import FleetPool
from asyppo_async.types import SamplingParams
from tests.integration.service.processes import scripted_server

ROOT = Path(__file__).parents[3]
SLOW = Script(delta_delay_s=0.03)


def sampling(max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=max_tokens, stop_token_ids=()
    )


async def ask(pool: FleetPool, num_samples: int = 2, deadline_s: float = 20.0, **more: object):
    values = {"sampling": sampling()} | more
    return await pool.generate([3, 4, 5], num_samples=num_samples, deadline_s=deadline_s, **values)


EXPECTED = ((12 + 7 * np.arange(40)) % 64).tolist()


def member(name: str, outstanding_tokens: int, **prompts: int) -> SimpleNamespace:
    return SimpleNamespace(address=name, outstanding_tokens=outstanding_tokens, prompts=Counter(prompts))


def test_choose_when_a_server_has_the_prompt_then_it_is_asked_unless_it_is_far_ahead(draw) -> None:
    call = draw(num_samples=2, max_tokens=50, prompt_id="p")
    idle, busy = member("idle", 0), member("busy", 100, p=1)
    assert choose([idle, busy], call) is busy, "100 ahead, and the call has 100"
    busy.outstanding_tokens = 101
    assert choose([idle, busy], call) is idle
    assert choose([idle, busy], draw(prompt_id=""), ["idle"]) is busy
    assert choose([idle], call, ["idle"]) is idle, "better than nobody"


async def test_pool_when_calls_overlap_then_they_are_spread_and_come_whole(serving) -> None:
    async with serving(SLOW) as first, serving(SLOW) as second:
        async with FleetPool([first.address, second.address]) as pool, asyncio.TaskGroup() as tasks:
            while len(pool.members) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            asked = [tasks.create_task(ask(pool)) for _ in range(6)]
        assert all(each.token_ids.tolist() == EXPECTED for task in asked for each in task.result())
        assert len(first.engine.prompts) == len(second.engine.prompts) == 6


@pytest.mark.report("P51")
@pytest.mark.parametrize("has_place", ["elsewhere", "later"])
async def test_pool_when_a_server_has_no_room_then_another_one_or_a_later_try_helps(
    serving, has_place: str
) -> None:
    small = {"max_num_seqs": 2, "probe_slots": 1, "max_queued_samples": 1}
    async with serving(SLOW, **small) as first, serving(Script()) as second:
        targets = [first.address] + [second.address] * (has_place == "elsewhere")
        async with FleetPool(targets) as pool, asyncio.TaskGroup() as tasks:
            while len(pool.members) < len(targets):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            asked = [tasks.create_task(ask(pool)) for _ in range(3)]
        assert all(len(task.result()) == 2 for task in asked)
        assert bool(second.engine.prompts) == (has_place == "elsewhere")
        assert pool.num_moves == 0, "a refusal is no failure"


async def test_server_when_it_has_no_room_then_it_says_when_to_come_back(serving, draw) -> None:
    async with (
        serving(SLOW, max_num_seqs=2, probe_slots=1, max_queued_samples=1) as server,
        server.client.generate(draw(num_samples=2, max_tokens=400), 20.0) as stream,
    ):
        await anext(stream)
        with pytest.raises(FleetOverloaded) as caught:
            await server.client.collect(draw(), 20.0, lambda _: None)
        assert caught.value.retry_after_s is not None and 0 < caught.value.retry_after_s < 10


@pytest.mark.report("P51")
async def test_pool_when_the_request_is_wrong_then_it_is_not_tried_again(serving) -> None:
    async with serving() as first, serving() as second:
        async with FleetPool([first.address, second.address]) as pool:
            with pytest.raises(RequestRejected, match="max_tokens is at least 1"):
                await ask(pool, sampling=sampling(0))
        assert pool.num_moves == 0 and not first.engine.seen + second.engine.seen


@pytest.mark.report("P51")
async def test_pool_when_a_server_ends_then_its_calls_go_on_elsewhere(serving, until) -> None:
    current: list[str] = []

    async def resolve(_: Sequence[str]) -> tuple[str, ...]:
        return tuple(current)

    async with (
        serving(SLOW, drain_grace_s=0.05) as first,
        serving(SLOW) as second,
        FleetPool(["dns:///fleet:1"], look_every_s=0.1, resolve=resolve) as pool,
        asyncio.TaskGroup() as tasks,
    ):
        counts: list[int] = []
        current.append(first.address)
        asked = tasks.create_task(ask(pool, on_tokens=counts.append))
        await until(lambda: bool(counts) and counts[-1] >= 16)
        current.append(second.address)
        await until(lambda: len(pool.members) == 2)
        first.stop.received.set()
        responses = await asked
        assert [len(each.token_ids) for each in responses] == [40] * 2
        assert all(each.token_ids[:4].tolist() == EXPECTED[:4] for each in responses)
        assert min(map(len, second.engine.prompts)) > 3, "it went on from what had arrived"
        assert pool.num_moves == 1


@pytest.mark.report("P71")
async def test_pool_when_a_server_freezes_then_its_calls_go_on_elsewhere_in_seconds(
    serving, model_folder: Path, tmp_path: Path
) -> None:
    """A real stopped process: no error comes from it, and its port still accepts connections."""
    async with (
        serving() as alive,
        scripted_server(model_folder, tmp_path / "frozen.json", 0.05) as (process, address),
        asyncio.timeout(40),
    ):
        current = [address]

        async def resolve(_: Sequence[str]) -> tuple[str, ...]:
            return tuple(current)

        async with (
            FleetPool(["dns:///f:1"], silence_s=0.5, look_every_s=0.1, resolve=resolve) as pool,
            asyncio.TaskGroup() as tasks,
        ):
            arrived = asyncio.Event()
            asked = tasks.create_task(ask(pool, on_tokens=lambda _: arrived.set()))
            await arrived.wait()
            current.append(alive.address)
            process.send_signal(signal.SIGSTOP)
            started_s = time.monotonic()
            responses = await asked
            assert [len(each.token_ids) for each in responses] == [40] * 2
            assert time.monotonic() - started_s < 9 and pool.num_moves == 1


async def test_pool_when_a_name_changes_then_new_calls_follow_and_running_ones_finish(serving, until) -> None:
    async with serving(SLOW) as first, serving(SLOW) as second:
        current = [first.address]

        async def resolve(_: Sequence[str]) -> tuple[str, ...]:
            return tuple(current)

        async with (
            FleetPool(["dns:///fleet:1"], look_every_s=0.1, resolve=resolve) as pool,
            asyncio.TaskGroup() as tasks,
        ):
            running = tasks.create_task(ask(pool))
            await until(lambda: len(first.engine.running_ids) == 2)
            current[:] = [second.address]
            await until(lambda: [each.address for each in pool.members] == [second.address])
            assert len(await ask(pool)) == 2 and len(second.engine.prompts) == 2
            assert [each.token_ids.tolist() for each in await running] == [EXPECTED] * 2
            assert len(first.engine.prompts) == 2 and pool.num_moves == 0


async def test_pool_when_nobody_is_there_then_says_whom_it_asked_and_what_came_back() -> None:
    async with FleetPool(["127.0.0.1:1"], look_every_s=0.1) as pool:
        with pytest.raises(FleetUnavailable, match=r"no server of 127\.0\.0\.1:1 takes work within 0\.5 s"):
            await ask(pool, deadline_s=0.5)
    with pytest.raises(ConfigError, match="a name and a port"):
        FleetPool(["dns:///fleet"])


async def test_addresses_when_a_name_is_resolved_then_each_address_is_one_target() -> None:
    assert "127.0.0.1:7" in await addresses_of(["dns:///localhost:7"])
    assert (await addresses_of(["a:1", "dns:///127.0.0.1:2"])) == ("a:1", "127.0.0.1:2")
    with pytest.raises(FleetUnavailable, match=r"no-such-host\.invalid:1 does not resolve"):
        await addresses_of(["dns:///no-such-host.invalid:1"])
    with pytest.raises(FleetUnavailable, match=r"does not resolve: .*, tried for 0\.1 s; correct the name"):
        await addresses_within(["dns:///no-such-host.invalid:1"], addresses_of, 0.1)


async def test_script_of_the_documentation_when_run_then_it_generates(serving, tmp_path: Path) -> None:
    text = (ROOT / "docs/fleet_client.md").read_text()
    script = re.search(r"```python\n(import asyncio\n.*?)```", text, re.DOTALL).group(1)
    path = tmp_path / "generate.py"
    path.write_text(script)
    async with serving() as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, path, server.address, stdout=subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    lines = output.decode().splitlines()
    assert len(lines) == 8 and all("length" in line for line in lines)
