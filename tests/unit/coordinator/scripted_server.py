"""One fleet server with a scripted engine in a process of its own: `python scripted_server.py MODEL READY_FILE`."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from asyppo_async.config.serve import ServeConfig
from asyppo_async.fleet.engine.scripted import Script, ScriptedEngine
from asyppo_async.fleet.serve import StopSignal, serve


@asynccontextmanager
async def opened(_: ServeConfig) -> AsyncIterator[ScriptedEngine]:
    yield ScriptedEngine(Script(vocab_size=64, max_model_len=512))


async def main() -> None:
    config = ServeConfig(model=Path(sys.argv[1]), port=0, ready_file=Path(sys.argv[2]), max_num_seqs=16)
    await serve(config, opened, StopSignal())


if __name__ == "__main__":
    asyncio.run(main())
