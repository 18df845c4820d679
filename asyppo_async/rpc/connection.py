"""One channel to one server: its stubs, who we say that we are, and how its failures read."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from asyppo_async.errors import ContractBroken
from asyppo_async.rpc.channel import Options
from asyppo_async.rpc.security import ClientSecurity
from asyppo_async.rpc.status import error_of
from asyppo_async.rpc.v1 import fleet_pb2, fleet_pb2_grpc

_UNREADABLE = "what came is no message of it"


class Connection:
    """`async with Connection(...)`; leaving ends every call that is under way."""

    def __init__(self, address: str, security: ClientSecurity, options: Options) -> None:
        self.address = address
        self.metadata = security.metadata
        self._credentials = security.credentials
        self._options = options
        self._channel: Any = None
        self.rollout: Any = None
        self.generate: Any = None
        """The stub of `Rollout.Generate` that leaves its answers as bytes, to be parsed by `chunk_of`."""
        self.session: Any = None
        self.admin: Any = None

    async def __aenter__(self) -> Self:
        self._channel = (
            grpc.aio.insecure_channel(self.address, options=self._options)
            if self._credentials is None
            else grpc.aio.secure_channel(self.address, self._credentials, options=self._options)
        )
        self.rollout = fleet_pb2_grpc.RolloutStub(self._channel)  # type: ignore[no-untyped-call]
        generate = fleet_pb2.DESCRIPTOR.services_by_name["Rollout"].methods_by_name["Generate"]
        self.generate = self._channel.unary_stream(
            f"/{generate.containing_service.full_name}/{generate.name}",
            request_serializer=fleet_pb2.GenerateRequest.SerializeToString,
        )
        self.session = fleet_pb2_grpc.WeightSessionStub(self._channel)  # type: ignore[no-untyped-call]
        self.admin = fleet_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def call(
        self, what: str, method: Callable[..., Awaitable[Any]], request: object, deadline_s: float
    ) -> Any:
        """The answer of one unary call, or an error of ours that names the server and the call."""
        try:
            answer = await method(request, timeout=deadline_s, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise error_of(self.address, what, error, deadline_s) from error
        with self.checking(what):
            return readable(answer)

    @contextmanager
    def checking(self, what: str) -> Iterator[None]:
        """A `ValueError` of the block becomes an error that says that this server breaks the contract."""
        try:
            yield
        except ValueError as error:
            raise self.broken(what, error) from error

    def broken(self, what: str, error: ValueError) -> ContractBroken:
        """As `checking` raises it."""
        return ContractBroken(f"server {self.address}: {what}: breaks the contract: {error}")


def chunk_of(data: bytes) -> fleet_pb2.GenerateChunk:
    """Raise `ValueError` for bytes that are no message."""
    try:
        return fleet_pb2.GenerateChunk.FromString(data)
    except DecodeError as error:
        raise ValueError(_UNREADABLE) from error


def readable(message: Any) -> Any:
    """`message`; raise `ValueError` for None, which is what gRPC gives for bytes that are no message."""
    if message is None:
        raise ValueError(_UNREADABLE)
    return message
