"""A server with a scripted engine as a process of its own: one that can be stopped."""

import asyncio
import json
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "unit/coordinator/scripted_server.py"
START_S = 60.0


@asynccontextmanager
async def scripted_server(
    model_folder: Path, ready: Path, delta_delay_s: float = 0.0
) -> AsyncIterator[tuple[Process, str]]:
    """The process and its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, PROGRAM, model_folder, ready, str(delta_delay_s), stderr=subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(START_S):
            while not ready.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield process, f"127.0.0.1:{json.loads(ready.read_text())['port']}"
    finally:
        process.kill()
        await process.wait()
