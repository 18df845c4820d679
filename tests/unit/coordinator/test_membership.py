import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from asyppo_async.errors import ConfigError, FleetMismatch, FleetUnavailable
from asyppo_async.trainer.coordinator.connecting import connect
from asyppo_async.types import Prompt
from tests.unit.coordinator.publish_fleet import RUN, SAMPLING, expected_of, fleet_of, servers, write_model

PROMPT = Prompt(id="p", task="t", text="", token_ids=(5, 6), answer="")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


async def test_connect_when_nobody_is_there_then_one_line_names_the_address(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    started_s = time.monotonic()
    with pytest.raises(
        FleetUnavailable,
        match=rf"^fleet server {address} was not ready within 1 s .*asyppo-fleet serve.*--fleet$",
    ) as caught:
        async with connect([address], expected_of(write_model(tmp_path / "model")), RUN, 1.0, debug=True):
            pytest.fail("there is no server")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started_s < 3


async def test_connect_when_the_server_comes_later_then_it_is_waited_for(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    async with servers(model, tmp_path) as started, asyncio.TaskGroup() as tasks:
        port, late = int(started[0].address.rsplit(":", 1)[1]), free_port()

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    sink.write(data)
                sink.close()

            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(pump(reader, back))
                pumps.create_task(pump(there, writer))

        async def come_up() -> None:
            await asyncio.sleep(0.7)
            relays.append(await asyncio.start_server(forward, "127.0.0.1", late))

        relays: list[asyncio.Server] = []
        coming = tasks.create_task(come_up())
        async with connect([f"127.0.0.1:{late}"], expected_of(model), RUN, 20.0, debug=True) as fleet:
            assert fleet.members[0].info.server_id
        await coming
        relays[0].close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 65}, r"vocabulary size is 65 there, 64 here"),
        ({"rows": 65}, r"model architecture is \w{16} there, \w{16} here"),
        ({"vocabulary": ("a", "c")}, r"tokenizer is \w{16} there, \w{16} here$"),
    ],
)
async def test_connect_when_the_server_has_another_model_then_both_sides_are_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    theirs = write_model(tmp_path / "theirs", **changes)
    ours = write_model(tmp_path / "ours")
    async with servers(theirs, tmp_path) as started:
        with pytest.raises(
            FleetMismatch, match=rf"server {started[0].address} \(--model {theirs}\).*{message}"
        ):
            async with connect([started[0].address], expected_of(ours), RUN, 10.0, debug=True):
                pytest.fail("it does not fit")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "type of the weights is float32 there, bfloat16 here"),
        ({"longest_tokens": 513}, "it takes 512 tokens of prompt and response, the run needs 513"),
    ],
)
async def test_connect_when_the_run_needs_something_else_then_it_says_what(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model = write_model(tmp_path / "model")
    async with servers(model, tmp_path) as started:
        with pytest.raises(FleetMismatch, match=message):
            async with connect([started[0].address], expected_of(model, **changes), RUN, 10.0, debug=True):
                pytest.fail("it does not fit")


async def test_connect_when_an_address_comes_twice_or_none_then_it_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"fleet\.servers: a:1 comes twice"):
        async with connect(["a:1", "b:1", "a:1"], expected_of(model), RUN, 1.0, debug=True):
            pytest.fail("it comes twice")
    with pytest.raises(ConfigError, match="no server is named"):
        async with connect([], expected_of(model), RUN, 1.0, debug=True):
            pytest.fail("there is none")
    async with servers(model, tmp_path) as started:
        port = started[0].address.rsplit(":", 1)[1]
        with pytest.raises(FleetMismatch, match=r"127\.0\.0\.1:\d+ and localhost:\d+ are the same server"):
            async with connect(
                [f"127.0.0.1:{port}", f"localhost:{port}"], expected_of(model), RUN, 5.0, debug=True
            ):
                pytest.fail("they are one")


async def test_generate_when_servers_are_busy_then_the_least_loaded_is_asked(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    async with fleet_of(model, tmp_path, count=2) as (fleet, _):
        assert fleet.address_of_this_host() == "127.0.0.1"
        first, second = fleet.members
        with pytest.raises(FleetUnavailable, match="publish before generating"):
            await fleet.generate(
                PROMPT,
                num_samples=2,
                sampling=SAMPLING,
                deadline_s=5.0,
                on_tokens=lambda _: None,
                on_server=lambda _: None,
            )
        async with fleet.sending(0) as sending:
            fleet.state.completed(sending)
        assert fleet.least_loaded() is first
        first.outstanding_tokens = 5
        assert fleet.least_loaded() is second
        second.outstanding_tokens = 6
        assert fleet.least_loaded() is first
        # The servers know better: no version of this run is served yet.
        with pytest.raises(FleetMismatch, match="publish before generating"):
            await fleet.generate(
                PROMPT,
                num_samples=2,
                sampling=SAMPLING,
                deadline_s=5.0,
                on_tokens=lambda _: None,
                on_server=lambda _: None,
            )
        assert (first.outstanding_tokens, second.outstanding_tokens) == (5, 6)
