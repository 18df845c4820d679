"""`asyppo-fleet serve` over the scripted engine, as a program: MODEL_DIR READY_FILE PORT [SECONDS_PER_DELTA].

Everything but the engine is the real server: gRPC, queue, weight session, probe, signals.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from asyppo_async.config.serve import ServeConfig
from asyppo_async.fleet.engine.scripted import Script, ScriptedEngine
from asyppo_async.fleet.serve import serve
from asyppo_async.fleet.stop import listening_for_signals
from asyppo_async.logs import set_up_logging

MAX_MODEL_LEN = 64


async def main(model: Path, ready: Path, port: int, delta_s: float) -> None:
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    config = ServeConfig(
        model=model,
        port=port,
        ready_file=ready,
        max_num_seqs=32,
        max_model_len=MAX_MODEL_LEN,
        drain_grace_s=0.5,
    )

    @asynccontextmanager
    async def open_engine(_: ServeConfig) -> AsyncIterator[ScriptedEngine]:
        yield ScriptedEngine(
            Script(
                vocab_size=vocab_size, max_model_len=MAX_MODEL_LEN, tokens_per_delta=2, delta_delay_s=delta_s
            )
        )

    with listening_for_signals() as stop:
        await serve(config, open_engine, stop)


if __name__ == "__main__":
    set_up_logging()
    model, ready, port, *rest = sys.argv[1:]
    asyncio.run(main(Path(model), Path(ready), int(port), float(rest[0]) if rest else 0.01))
