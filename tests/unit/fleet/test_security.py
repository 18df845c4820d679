"""Tokens with roles, TLS and mutual TLS, over real sockets; nothing is let through by default beyond loopback."""

import logging
from pathlib import Path

import pytest
import trustme

from asyppo_async.config.serve import ServeConfig
from asyppo_async.errors import ConfigError, FleetUnavailable, RequestRejected
from asyppo_async.fleet.security import ROLES, tokens_of
from asyppo_async.rpc.client import FleetClient
from asyppo_async.rpc.security import ClientSecurity, client_security

DEADLINE_S = 20.0
SECRET = "correct-horse-battery"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# of the trainer\n{SECRET}\nonly-rollouts generate\nonly-weights weights , admin\n")
    return path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    authority, stranger = trustme.CA(), trustme.CA()
    for name, owner in (("server", authority), ("client", authority), ("other", stranger)):
        certificate = owner.issue_cert("127.0.0.1", "localhost")
        certificate.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
        certificate.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    stranger.cert_pem.write_to_path(str(folder / "stranger.pem"))
    return folder


async def test_token_when_it_has_every_role_then_all_is_served(serving, sender, draw, token_file) -> None:
    security = ClientSecurity(token=SECRET)
    async with (
        serving(token_file=token_file, security=security) as server,
        sender(server) as weights,
    ):
        await weights.publish(0)
        (response,) = await server.client.collect(
            draw(run_id="run", num_samples=1, max_tokens=4), DEADLINE_S, lambda _: None
        )
        assert len(response.token_ids) == 4


@pytest.mark.report("P82")
@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, "asks for a token"),
        ("wrong", "not one of this server's"),
        (SECRET + "x", "not one of"),
        ("", "asks"),
    ],
)
async def test_token_when_missing_or_wrong_then_refused_and_never_logged(
    serving, draw, token_file, caplog: pytest.LogCaptureFixture, token: str | None, words: str
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(token_file=token_file, security=ClientSecurity(token=token)) as server:
        with pytest.raises(RequestRejected, match=words):
            await server.client.info(DEADLINE_S)
        with pytest.raises(RequestRejected, match=words):
            await server.client.collect(draw(), DEADLINE_S, lambda _: None)
        assert server.engine.seen == [], "nothing reached the engine"
    assert SECRET not in caplog.text


@pytest.mark.report("P82")
async def test_token_when_it_lacks_the_role_then_the_call_is_refused(serving, draw, token_file) -> None:
    async with serving(token_file=token_file, security=ClientSecurity(token="only-rollouts")) as server:
        await server.client.info(DEADLINE_S)
        await server.client.collect(draw(max_tokens=2), DEADLINE_S, lambda _: None)
        with pytest.raises(RequestRejected, match="CloseSession needs a token with the role 'weights'"):
            await server.client.weights.close_session(1, DEADLINE_S)
        async with FleetClient(server.address, security=ClientSecurity(token="only-weights")) as client:
            with pytest.raises(RequestRejected, match="Generate needs a token with the role 'generate'"):
                await client.collect(draw(), DEADLINE_S, lambda _: None)


async def test_tls_when_the_authority_is_known_then_served_and_otherwise_not(
    serving, draw, certificates: Path
) -> None:
    files = {"tls_cert": certificates / "server.pem", "tls_key": certificates / "server.key"}
    known = client_security(ca_file=certificates / "authority.pem")
    async with serving(security=known, **files) as server:
        await server.client.collect(draw(max_tokens=2), DEADLINE_S, lambda _: None)
        for wrong in (client_security(ca_file=certificates / "stranger.pem"), ClientSecurity()):
            async with FleetClient(server.address, security=wrong) as client:
                with pytest.raises(FleetUnavailable):
                    await client.info(3.0)


async def test_mutual_tls_when_the_client_has_no_certificate_of_the_authority_then_refused(
    serving, draw, certificates: Path
) -> None:
    authority = certificates / "authority.pem"
    files = {"tls_cert": certificates / "server.pem", "tls_key": certificates / "server.key"}

    def of(name: str) -> ClientSecurity:
        own = {"certificate_file": certificates / f"{name}.pem", "key_file": certificates / f"{name}.key"}
        return client_security(ca_file=authority, **own)

    async with serving(security=of("client"), tls_client_ca=authority, **files) as server:
        await server.client.collect(draw(max_tokens=2), DEADLINE_S, lambda _: None)
        for wrong in (client_security(ca_file=authority), of("other")):
            async with FleetClient(server.address, security=wrong) as client:
                with pytest.raises(FleetUnavailable):
                    await client.info(3.0)


def test_tokens_when_the_file_is_wrong_then_the_line_is_named(tmp_path: Path, token_file: Path) -> None:
    config = ServeConfig(model=Path("m"), token_file=token_file)
    roles = [sorted(token.roles) for token in tokens_of(config, {})]
    assert roles == [sorted(ROLES), ["generate"], ["admin", "weights"]]
    token_file.write_text("abc generate,root\n")
    with pytest.raises(ConfigError, match="token 1: 'root' is no role"):
        tokens_of(config, {})
    token_file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no token"):
        tokens_of(config, {})
    with pytest.raises(ConfigError, match="cannot read the token file"):
        tokens_of(ServeConfig(model=Path("m"), token_file=tmp_path / "none"), {})
    (token,) = tokens_of(ServeConfig(model=Path("m")), {"ASYPPO_FLEET_TOKEN": SECRET})
    assert token.secret == SECRET.encode() and SECRET not in repr(token)


def test_client_security_when_files_are_wrong_then_named(
    tmp_path: Path, token_file: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYPPO_FLEET_TOKEN", SECRET)
    security = client_security()
    assert security.token == SECRET and SECRET not in repr(security)
    with pytest.raises(ConfigError, match="one token on one line, got 3"):
        client_security(token_file=token_file)
    with pytest.raises(ConfigError, match="go together"):
        client_security(ca_file=certificates / "authority.pem", key_file=certificates / "client.key")
    with pytest.raises(ConfigError, match="is no PEM file"):
        client_security(ca_file=token_file)
    with pytest.raises(ConfigError, match="cannot read"):
        client_security(ca_file=tmp_path / "none")
