"""Servers that ask to join a run: real gRPC both ways, real servers; scripted engines."""

import asyncio
from pathlib import Path

import pytest
import trustme

from asyppo_async.config.sections import FleetSection
from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import ConfigError, FleetMismatch, FleetUnavailable, RequestRejected
from asyppo_async.fleet.joining import advertised
from asyppo_async.rpc.joining import ask_to_join
from asyppo_async.rpc.security import OPEN, ClientSecurity, client_security
from asyppo_async.trainer.coordinator.connecting import connect
from asyppo_async.trainer.coordinator.joins import first_caller, open_joins
from asyppo_async.trainer.coordinator.publish import open_publisher
from tests.unit.coordinator.publish_fleet import RUN, SETTINGS, Sender, expected_of, plan, start, write_model

LISTEN = FleetSection(listen="127.0.0.1:0")


async def test_server_when_it_asks_then_it_gets_the_version_and_then_work(tmp_path: Path) -> None:
    """The first one makes the fleet of a run that names none; a later one joins at the next publication."""
    model = write_model(tmp_path / "model")
    sender = Sender(model, marked_by="version")
    async with open_joins(LISTEN, "run", OPEN) as joins, asyncio.TaskGroup() as tasks:
        assert joins is not None
        where = f"127.0.0.1:{joins.port}"
        first = await start(tasks, model, tmp_path / "ready-1", "version", join=where)
        address = await first_caller(joins, 5.0)
        assert address == first.address
        async with (
            connect([address], expected_of(model), RUN, 10.0, joins=joins, debug=True) as fleet,
            open_publisher(
                sender=sender, fleet=fleet, settings=SETTINGS, plan=plan(), host="127.0.0.1", version=0
            ) as publisher,
        ):
            second = await start(tasks, model, tmp_path / "ready-2", "version", join=where)
            async with asyncio.timeout(10):
                while len(fleet.members) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert [member.address for member in fleet.current] == [first.address], (
                "no work before it is served"
            )
            publication = await publisher.publish(1)
            assert [server.address for server in publication.servers] == [first.address, second.address]
            assert len(fleet.current) == 2
        for server in (first, second):
            server.stop.received.set()


async def test_server_when_it_does_not_fit_then_it_is_told_why(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    other = write_model(tmp_path / "other", rows=32)
    async with open_joins(LISTEN, "run", OPEN) as joins, asyncio.TaskGroup() as tasks:
        assert joins is not None
        ours = await start(tasks, model, tmp_path / "ready-1", "version")
        theirs = await start(tasks, other, tmp_path / "ready-2", "version")
        where = f"127.0.0.1:{joins.port}"
        async with connect([ours.address], expected_of(model), RUN, 10.0, joins=joins, debug=True):
            assert await ask_to_join(where, theirs.address, OPEN, 5.0) == "run"
            async with asyncio.timeout(10):
                while theirs.address not in joins.refused:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            with pytest.raises(FleetMismatch, match=r"does not fit the run: .*vocabulary"):
                await ask_to_join(where, theirs.address, OPEN, 5.0)
        for server in (ours, theirs):
            server.stop.received.set()


async def test_join_when_the_token_or_the_address_is_wrong_then_refused(tmp_path: Path) -> None:
    async with open_joins(LISTEN, "run", ClientSecurity(token="secret")) as joins:
        assert joins is not None
        where = f"127.0.0.1:{joins.port}"
        for wrong in (OPEN, ClientSecurity(token="other")):
            with pytest.raises(RequestRejected, match="not this run's"):
                await ask_to_join(where, "127.0.0.1:1", wrong, 5.0)
        right = ClientSecurity(token="secret")
        for address in ("0.0.0.0:50051", "[::]:50051", "host", ":1"):
            with pytest.raises(RequestRejected, match="says where it is reached"):
                await ask_to_join(where, address, right, 5.0)
        assert await ask_to_join(where, "127.0.0.1:1", right, 5.0) == "run"
        assert list(joins.callers) == ["127.0.0.1:1"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    authority, stranger = trustme.CA(), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    stranger.cert_pem.write_to_path(str(folder / "stranger.pem"))
    (folder / "token").write_text("secret\n")
    return folder


async def test_join_when_the_listener_has_tls_and_a_token_then_only_who_has_both_gets_in(
    tmp_path: Path, certificates: Path
) -> None:
    settings = FleetSection(
        listen="127.0.0.1:0",
        listen_tls_cert=certificates / "cert.pem",
        listen_tls_key=certificates / "key.pem",
    )
    token = certificates / "token"
    async with (
        open_joins(settings, "run", ClientSecurity(token="secret")) as joins,
        asyncio.TaskGroup() as tasks,
    ):
        assert joins is not None
        where = f"127.0.0.1:{joins.port}"
        for ca_file in (None, certificates / "stranger.pem"):
            with pytest.raises(FleetUnavailable):
                await ask_to_join(
                    where, "127.0.0.1:1", client_security(token_file=token, ca_file=ca_file), 2.0
                )
        trusting = client_security(ca_file=certificates / "authority.pem")
        with pytest.raises(RequestRejected, match="not this run's"):
            await ask_to_join(where, "127.0.0.1:1", trusting, 5.0)
        assert not joins.callers
        server = await start(
            tasks,
            write_model(tmp_path / "model"),
            tmp_path / "ready",
            "version",
            join=where,
            join_token_file=token,
            join_tls_ca=certificates / "authority.pem",
        )
        assert await first_caller(joins, 10.0) == server.address
        server.stop.received.set()


async def test_listen_when_strangers_could_join_then_refused() -> None:
    async with open_joins(FleetSection(), "run", OPEN) as joins:
        assert joins is None, "off by default"
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        async with open_joins(FleetSection(listen="0.0.0.0:0"), "run", OPEN):
            pass
    with pytest.raises(ConfigError, match="go together"):
        async with open_joins(
            FleetSection(listen="127.0.0.1:0", listen_tls_cert=Path("cert.pem")), "run", OPEN
        ):
            pass
    async with open_joins(LISTEN, "run", OPEN) as joins:
        assert joins is not None
        with pytest.raises(FleetUnavailable, match="no server asked to join within"):
            await first_caller(joins, 0.2)


@pytest.mark.report("P08")
@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({"join": "127.0.0.1:7"}, "127.0.0.1:50"),
        ({"join": "127.0.0.1:7", "host": "0.0.0.0", "insecure": True}, "127.0.0.1:50"),
        ({"join": "[::1]:7", "host": "::", "insecure": True}, "[::1]:50"),
        ({"join": "10.0.0.1:7", "advertise": "node7"}, "node7:50"),
        ({"join": "10.0.0.1:7", "advertise": "node7:81"}, "node7:81"),
    ],
)
def test_advertised_address_is_one_that_the_coordinator_can_call(
    settings: dict[str, object], address: str, tmp_path: Path
) -> None:
    assert advertised(ServeConfig.model_validate({"model": tmp_path, **settings}), 50) == address


@pytest.mark.report("P08")
def test_advertised_address_when_it_is_loopback_and_the_coordinator_elsewhere_then_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="cannot reach it"):
        advertised(ServeConfig(model=tmp_path, join="10.0.0.1:7"), 50)
