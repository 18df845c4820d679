"""One fleet server with a scripted engine as a process: `python scripted_server.py MODEL READY_FILE [DELAY_S]`."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from asyppo_async.config.serve import ServeConfig
from asyppo_async.fleet.engine.scripted import Script, ScriptedEngine
from asyppo_async.fleet.serve import serve
from asyppo_async.fleet.stop import StopSignal

DELAY_S = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0


@asynccontextmanager
async def opened(_: ServeConfig) -> AsyncIterator[ScriptedEngine]:
    yield ScriptedEngine(Script(vocab_size=64, max_model_len=512, delta_delay_s=DELAY_S))


async def main() -> None:
    config = ServeConfig(
        model=Path(sys.argv[1]), port=0, ready_file=Path(sys.argv[2]), max_num_seqs=16, chunk_s=0.05
    )
    await serve(config, opened, StopSignal())


if __name__ == "__main__":
    asyncio.run(main())
