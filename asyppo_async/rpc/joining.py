"""A server's question to a run's coordinator, and the coordinator's ear for it: `Membership.Join`."""

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from asyppo_async.errors import ConfigError
from asyppo_async.rpc.channel import client_options, server_options
from asyppo_async.rpc.security import AUTHORIZATION, BEARER, ClientSecurity, read_pem
from asyppo_async.rpc.status import error_of
from asyppo_async.rpc.v1 import membership_pb2, membership_pb2_grpc

_WILDCARDS = ("0.0.0.0", "[::]", "::", "")


async def ask_to_join(coordinator: str, address: str, security: ClientSecurity, deadline_s: float) -> str:
    """Tell the coordinator that a server is at `address`; the id of its run.

    Raises:
        FleetUnavailable: nobody answers there.
        FleetMismatch: the coordinator has met the server, and it does not fit.
        RequestRejected: the token or the address is wrong.
    """
    options = client_options()
    channel = (
        grpc.aio.insecure_channel(coordinator, options=options)
        if security.credentials is None
        else grpc.aio.secure_channel(coordinator, security.credentials, options=options)
    )
    async with channel:
        stub: Any = membership_pb2_grpc.MembershipStub(channel)  # type: ignore[no-untyped-call]
        request = membership_pb2.JoinRequest(address=address)
        try:
            answer = await stub.Join(request, timeout=deadline_s, metadata=security.metadata)
        except grpc.aio.AioRpcError as error:
            raise error_of(coordinator, "Join", error, deadline_s) from error
    return str(answer.run_id)


class JoinServicer(membership_pb2_grpc.MembershipServicer):
    """Notes who asks. Whoever brings servers into the run reads `callers` and writes `refused`."""

    def __init__(self, run_id: str, token: str | None) -> None:
        """`token`: that callers have to show; None: none."""
        self._run_id = run_id
        self._token = token
        self.callers: dict[str, None] = {}
        """Addresses, in the order in which they asked first."""
        self.refused: dict[str, str] = {}
        """By address: why a server that was met does not fit."""
        self.port = 0
        """Where this listens."""

    async def Join(self, request: membership_pb2.JoinRequest, context: Any) -> membership_pb2.JoinResponse:
        if self._token is not None and not self._knows(context):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the token is not this run's; name it with --join-token-file"
            )
        host, _, port = request.address.rpartition(":")
        if host in _WILDCARDS or not port.isdigit():
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a server that joins says where it is reached, HOST:PORT, got {request.address!r}",
            )
        if request.address in self.refused:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refused[request.address])
        self.callers[request.address] = None
        return membership_pb2.JoinResponse(run_id=self._run_id)

    def _knows(self, context: Any) -> bool:
        sent = [
            str(value) for key, value in context.invocation_metadata() or () if key.lower() == AUTHORIZATION
        ]
        expected = (BEARER + (self._token or "")).encode()
        return any(hmac.compare_digest(value.encode(), expected) for value in sent)


def server_tls(certificate_file: Path | None, key_file: Path | None) -> grpc.ServerCredentials | None:
    """From files; None: no encryption.

    Raises:
        ConfigError: a file cannot be read, or only one of the two is given.
    """
    if (certificate_file is None) != (key_file is None):
        raise ConfigError("fleet.listen_tls_cert and fleet.listen_tls_key go together; name both or neither")
    if certificate_file is None or key_file is None:
        return None
    return grpc.ssl_server_credentials([(read_pem(key_file), read_pem(certificate_file))])


@asynccontextmanager
async def listening_for_joins(
    where: str, servicer: JoinServicer, credentials: grpc.ServerCredentials | None
) -> AsyncIterator[int]:
    """Serve `Membership` at `where` (host:port; port 0: a free one) for the time of the block; the port.

    Raises:
        ConfigError: the address cannot be bound.
    """
    server = grpc.aio.server(options=server_options())
    membership_pb2_grpc.add_MembershipServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    try:
        port = (
            server.add_insecure_port(where)
            if credentials is None
            else server.add_secure_port(where, credentials)
        )
    except RuntimeError as error:
        raise ConfigError(f"fleet.listen: cannot listen on {where}: {error}") from error
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)
