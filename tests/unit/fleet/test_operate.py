"""What operators do, over real servers: look, watch, drain; and what the doctor finds."""

import asyncio
import io
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import FleetUnavailable, RequestRejected
from asyppo_async.fleet import checksums, operate
from asyppo_async.fleet.doctor import Finding, examine
from asyppo_async.fleet.engine.scripted import Script
from asyppo_async.fleet.traffic import Traffic
from asyppo_async.rpc import client as client_module
from asyppo_async.rpc.calls import ServedChecksums
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.security import OPEN, ClientSecurity
from tests.unit.fleet.test_cli import fleet

DEADLINE_S = 20.0
SLOW = Script(delta_delay_s=0.02)


def shown(view: object) -> str:
    file = io.StringIO()
    Console(file=file, width=80).print(view)
    return file.getvalue()


async def test_checksums_when_two_servers_serve_one_version_then_they_stand_side_by_side(
    serving, sender
) -> None:
    async with serving() as server:
        before = await checksums.ask([server.address], OPEN, 5.0)
        async with sender(server) as weights:
            report = await weights.stage(5)
            await weights.commit(5, report)
            await server.client.weights.verdict(1, 5, True, DEADLINE_S)
            answers = await checksums.ask([server.address, "127.0.0.1:1"], OPEN, 5.0)
    assert before == {server.address: None}
    assert "no publication has loaded what it serves" in shown(checksums.view(before))
    loaded = answers[server.address]
    assert isinstance(loaded, ServedChecksums)
    assert tuple(loaded.tensors.values()) == report.checksums and loaded.version == 5
    text = shown(checksums.view(answers))
    assert f"{report.checksums[0]:016x}" in text and "run/0 v5" in text and "server 127.0.0.1:1" in text
    assert json.loads(checksums.as_json(answers))[server.address]["tensors"] == loaded.tensors
    name = next(iter(loaded.tensors))
    other = replace(loaded, tensors=loaded.tensors | {name: 1})
    assert checksums.disagreements({"a": loaded, "b": loaded}) == []
    assert checksums.disagreements({"a": loaded, "b": other}) == [name]
    assert f"{name} !" in shown(checksums.view({"a": loaded, "b": other}))
    assert checksums.disagreements({"a": loaded, "b": replace(other, version=6)}) == [], (
        "other weights differ"
    )


async def test_status_tells_state_load_and_session_and_who_does_not_answer(serving, sender, draw) -> None:
    async with serving() as server:
        await server.client.collect(draw(num_samples=2, max_tokens=8), DEADLINE_S, lambda _: None)
        async with sender(server, epoch=3) as weights:
            await weights.publish(5)
            answers = await operate.status([server.address, "127.0.0.1:1"], OPEN, 5.0)
    info = answers[server.address]
    assert not isinstance(info, Exception)
    assert (info.state, info.served_version, info.run_id) == ("serving", 5, "run")
    assert (info.sent_tokens, info.session_epoch, info.session_world_size) == (16, 3, 2)
    assert info.sent_tokens_per_s > 0 and info.uptime_s > 0
    text = shown(operate.status_view(answers))
    assert max(map(len, text.splitlines())) <= 80
    assert "serving" in text and "run/0" in text and "no answer" in text and "refused" in text
    rows = json.loads(operate.status_json(answers))
    assert rows[server.address]["served_version"] == 5 and "127.0.0.1:1" in rows["127.0.0.1:1"]["error"]


async def test_watch_when_the_weights_change_then_tells_at_once(serving, sender) -> None:
    async with serving() as server, sender(server) as weights:
        infos = server.client.watch(interval_s=30)
        assert (await anext(infos)).served_version == 0
        async with asyncio.timeout(10):
            await weights.publish(1)
            async for info in infos:
                if info.served_version == 1 and info.state == "serving":
                    break
        await infos.aclose()


async def test_watch_when_the_server_ends_then_says_so(serving) -> None:
    async with serving() as server:
        infos = server.client.watch(interval_s=0.1)
        await anext(infos)
        server.stop.received.set()
        states = set()
        with pytest.raises(FleetUnavailable, match=server.address):
            async for info in infos:
                states.add(info.state)
        assert states <= {"serving", "draining"}


async def test_watch_when_the_server_is_silent_then_says_so_in_seconds() -> None:
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent, asyncio.timeout(15), FleetClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(FleetUnavailable, match=f"127.0.0.1:{port}"):
            await anext(client.watch(interval_s=0.1))


async def test_watch_when_this_process_was_held_up_then_the_server_is_not_taken_for_gone(
    serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "WATCH_S", 0.5)
    async with serving() as server:
        infos = server.client.watch(interval_s=0.2)
        await anext(infos)
        waiting = asyncio.create_task(anext(infos))
        await asyncio.sleep(0.05)
        time.sleep(1.5)  # noqa: ASYNC251  the loop itself is held up
        assert (await waiting).state == "serving"
        await infos.aclose()


async def test_watch_when_the_interval_is_wrong_then_refused(serving) -> None:
    async with serving() as server:
        with pytest.raises(RequestRejected, match="interval_s"):
            await anext(server.client.watch(interval_s=0.0))


async def test_drain_when_a_call_runs_then_it_finishes_and_the_server_goes(serving, draw, until) -> None:
    file = io.StringIO()
    async with serving(SLOW, drain_grace_s=0.1) as server, asyncio.TaskGroup() as tasks:
        collecting = tasks.create_task(
            server.client.collect(draw(num_samples=2, max_tokens=40), DEADLINE_S, lambda _: None)
        )
        await until(lambda: bool(server.engine.running_ids))
        failures = await operate.drain(
            [server.address], OPEN, grace_s=15, deadline_s=20, console=Console(file=file, width=80)
        )
        assert failures == [] and [len(each.token_ids) for each in collecting.result()] == [40, 40]
        await asyncio.wait_for(server.task, 5)
    assert "draining, 2 samples under way" in file.getvalue() and "gone" in file.getvalue()


async def test_drain_when_nobody_is_there_or_the_role_is_missing_then_told(serving, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("abc generate,weights\n")
    user = ClientSecurity(token="abc")
    async with serving(token_file=tokens, security=user) as server:
        failures = await operate.drain(
            [server.address, "127.0.0.1:1"],
            user,
            grace_s=None,
            deadline_s=3,
            console=Console(file=io.StringIO()),
        )
        assert "Drain needs a token with the role 'admin'" in str(failures[0])
        assert "127.0.0.1:1" in str(failures[1])
        assert (await server.client.info(DEADLINE_S)).state == "serving"
        async with FleetClient(server.address, security=user) as client:
            with pytest.raises(RequestRejected):
                await client.drain(None, DEADLINE_S)


def test_status_command_when_nobody_answers_then_exit_code_1_and_no_traceback() -> None:
    done = fleet("status", "127.0.0.1:1", "--json", "--timeout-s", "1")
    assert done.returncode == 1 and "error" in json.loads(done.stdout)["127.0.0.1:1"]
    done = fleet("status", "127.0.0.1:1", "--tls-cert", "no-such-file")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_traffic_when_time_passes_then_the_rate_is_of_the_last_ten_seconds() -> None:
    traffic = Traffic(now_s=100.0)
    for step in range(8):
        traffic.note(50, 100.0 + step / 2)
    assert traffic.tokens_per_s(104.0) == pytest.approx(400 / 4)
    assert traffic.tokens_per_s(112.0) == pytest.approx(200 / 10), "what was sent before second 102 is out"
    assert traffic.tokens_per_s(200.0) == 0 and traffic.num_tokens == 400


def levels(findings: list[Finding], words: str) -> list[str]:
    return [finding.level for finding in findings if words in finding.what]


def test_doctor_when_all_is_well_then_no_error(model_folder: Path) -> None:
    findings = examine(ServeConfig(model=model_folder, port=0, kv_cache_gib=0.01))
    assert not [finding for finding in findings if finding.level == "error"]
    assert levels(findings, "no authentication") == ["note"]


@pytest.mark.report("P80")
def test_doctor_when_something_is_wrong_then_each_has_advice(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth77")
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\necho no devices >&2\nexit 9\n")
    nvidia_smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    findings = examine(ServeConfig(model=model_folder, host="192.0.2.1", port=0, max_model_len=9999))
    for words in (
        "VLLM_PLUGINS='other'",
        "nvidia-smi fails",
        "NCCL_SOCKET_IFNAME=eth77 names no interface",
        "cannot listen on 192.0.2.1",
        "9999 exceeds the 512",
    ):
        assert levels(findings, words) == ["error"], words
    assert levels(findings, "http_proxy") == ["note"]
    assert all(finding.advice for finding in findings if finding.level in ("error", "warning"))
    absent = examine(ServeConfig(model=tmp_path / "absent", port=0))
    assert levels(absent, "model folder") == ["error"]


@pytest.mark.report("P80")
def test_doctor_when_a_container_has_its_usual_shared_memory_then_says_how_to_get_more(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"/dev/shm": 64 * 2**20}  # what a container gets unless it is told otherwise
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free[str(path)]))
    (finding,) = [
        each for each in examine(ServeConfig(model=model_folder, port=0)) if "/dev/shm" in each.what
    ]
    assert (finding.level, finding.what) == ("error", "/dev/shm has 0.1 GiB free")
    assert "--shm-size 8g" in finding.advice
