"""Every panel of the Grafana dashboard shows something: a real engine, a real Prometheus, a minute of work."""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from asyppo_async.rpc.client import FleetClient
from tests.integration.fleet.conftest import call_of, sampling_of
from tests.integration.service.dashboard import queries

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the program prometheus"),
]
DEADLINE_S = 120.0
WORK_S = 75.0
"""More than the minute that the queries look back."""


@contextlib.contextmanager
def prometheus(folder: Path, metrics_port: int) -> Iterator[str]:
    """One that looks at the server every second; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    jobs = [{"job_name": "fleet", "static_configs": [{"targets": [f"127.0.0.1:{metrics_port}"]}]}]
    config = folder / "prometheus.yml"  # JSON is YAML
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command = ["prometheus", *flags, f"--web.listen-address={address}", "--log.level=error"]
    with subprocess.Popen(command) as process:
        try:
            yield address
        finally:
            process.terminate()


async def asked(address: str, expression: str) -> list[float]:
    """The values of one query now."""

    def read() -> list[float]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://{address}/api/v1/query?{query}", timeout=20) as answer:
            result = json.load(answer)["data"]["result"]
        return [float(series["value"][1]) for series in result]

    return await asyncio.to_thread(read)


@contextlib.asynccontextmanager
async def publishing_trainer(client, folder, open_trainer) -> AsyncIterator[object]:
    async with open_trainer(client, folder, "float32", run_id="panels") as trainer:
        await trainer.publish(0)
        yield trainer


@pytest.mark.timeout(400)
async def test_panels_when_a_server_has_worked_for_a_minute_then_each_query_has_numbers(
    start_server, make_model, open_trainer, tmp_path: Path
) -> None:
    folder = make_model(True, "float32")
    prompt = np.arange(2, 40, dtype=np.int32)
    with (
        start_server(folder, "--metrics-port", "0") as server,
        prometheus(tmp_path, server.metrics_port) as at,
    ):
        async with (
            FleetClient(server.address) as client,
            publishing_trainer(client, folder, open_trainer) as trainer,
        ):
            until_s, version = time.monotonic() + WORK_S, 0
            while time.monotonic() < until_s:
                call = call_of("panels", prompt, 8, sampling_of(60, (7,)))
                await client.collect(call, DEADLINE_S, lambda _: None)
                version += 1
                await trainer.publish(version)
            answers = {
                f"{title}: {expression}": await asked(at, expression) for title, expression in queries()
            }
    for query, values in answers.items():
        print(query, values)
        assert values and np.isfinite(values).all(), query
