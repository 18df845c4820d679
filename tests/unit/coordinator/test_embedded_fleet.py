"""The child server, with small programs in the place of `asyppo-fleet serve`."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from asyppo_async.errors import FleetUnavailable
from asyppo_async.trainer.coordinator.embedded_fleet import child_server

SERVER = """
import json, os, signal, sys, time
assert sys.argv[1] == "--ready-file"
print("starting", flush=True)
with open(sys.argv[2], "w") as ready:
    ready.write(json.dumps({"host": "127.0.0.1", "port": 1234, "pid": os.getpid()}) + "\\n")
print("pid", os.getpid(), flush=True)
"""
WAITS = "time.sleep(60)\n"


def command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def pid_in(log: Path) -> int:
    return int(log.read_text().rsplit("pid ", 1)[1].split()[0])


async def wait_until_gone(pid: int, deadline_s: float) -> bool:
    deadline_at_s = time.monotonic() + deadline_s
    while is_running(pid) and time.monotonic() < deadline_at_s:  # noqa: ASYNC110  not our child
        await asyncio.sleep(0.05)
    return not is_running(pid)


async def test_child_server_when_ready_then_its_address_comes_and_it_ends_with_the_block(
    tmp_path: Path,
) -> None:
    log = tmp_path / "logs" / "fleet.log"
    async with child_server(command(SERVER + WAITS), log, 20.0) as server:
        assert server.address == "127.0.0.1:1234" and not server.has_ended
        await asyncio.sleep(0.2)
        pid = pid_in(log)
        assert is_running(pid)
        assert os.getsid(pid) == pid  # a Ctrl-C in the terminal does not reach it
    assert not is_running(pid)


async def test_child_server_when_it_fails_at_start_then_its_last_words_are_in_the_error(
    tmp_path: Path,
) -> None:
    log = tmp_path / "fleet.log"
    log.write_text("of an earlier run\n")
    started_s = time.monotonic()
    with pytest.raises(
        FleetUnavailable, match=r"ended \(exit code 3\) .*: first \| error: no such model$"
    ) as caught:
        async with child_server(
            command("import sys; print('first'); print('error: no such model'); sys.exit(3)"), log, 20.0
        ):
            pass
    assert "earlier" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started_s < 5


async def test_child_server_when_it_is_killed_at_start_then_the_signal_is_named(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(FleetUnavailable, match=r"ended \(SIGKILL\).*nothing was written"):
        async with child_server(command(program), tmp_path / "fleet.log", 20.0):
            pass


async def test_child_server_when_it_is_never_ready_then_it_is_ended_at_the_deadline(tmp_path: Path) -> None:
    log = tmp_path / "fleet.log"
    program = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(FleetUnavailable, match=r"not ready within 1 s; the end of .*: pid \d+"):
        async with child_server(command(program), log, 1.0):
            pass
    assert not is_running(pid_in(log))


async def test_child_server_when_its_parent_is_killed_then_it_dies(tmp_path: Path) -> None:
    log = tmp_path / "fleet.log"
    parent = f"""
import asyncio, os, signal
from pathlib import Path
from asyppo_async.trainer.coordinator.embedded_fleet import child_server

async def main():
    async with child_server({command(SERVER + WAITS)!r}, Path({str(log)!r}), 20.0):
        await asyncio.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent)
    assert await asyncio.wait_for(process.wait(), 30) == -signal.SIGKILL
    assert await wait_until_gone(pid_in(log), 3.0)


async def test_child_server_when_the_run_is_cancelled_while_it_starts_then_it_ends(tmp_path: Path) -> None:
    log = tmp_path / "fleet.log"
    program = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"

    async def start() -> None:
        async with child_server(command(program), log, 20.0):
            pytest.fail("it is never ready")

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(start())
        while not (log.exists() and "pid" in log.read_text()):  # noqa: ASYNC110  its only sign of life
            await asyncio.sleep(0.05)
        task.cancel()
    assert not is_running(pid_in(log))


async def test_child_server_when_it_ends_in_mid_run_then_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with child_server(command(SERVER + "sys.exit('out of memory')"), tmp_path / "fleet.log", 20.0):
        await asyncio.sleep(0.5)
    assert "ended by itself (exit code 1)" in caplog.text
    assert "out of memory" in caplog.text
