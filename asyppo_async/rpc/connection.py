"""One channel to one server: its stubs, who we say that we are, and how its failures read."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import grpc
import grpc.aio

from asyppo_async.errors import ContractBroken
from asyppo_async.rpc.channel import Options
from asyppo_async.rpc.security import ClientSecurity
from asyppo_async.rpc.status import error_of
from asyppo_async.rpc.v1 import fleet_pb2_grpc


class Connection:
    """`async with Connection(...)`; leaving ends every call that is under way."""

    def __init__(self, address: str, security: ClientSecurity, options: Options) -> None:
        self.address = address
        self.metadata = security.metadata
        self._credentials = security.credentials
        self._options = options
        self._channel: Any = None
        self.rollout: Any = None
        self.session: Any = None
        self.admin: Any = None

    async def __aenter__(self) -> Self:
        self._channel = (
            grpc.aio.insecure_channel(self.address, options=self._options)
            if self._credentials is None
            else grpc.aio.secure_channel(self.address, self._credentials, options=self._options)
        )
        self.rollout = fleet_pb2_grpc.RolloutStub(self._channel)  # type: ignore[no-untyped-call]
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
            raise ContractBroken(f"server {self.address}: {what}: breaks the contract: {error}") from error


def readable(message: Any) -> Any:
    """`message`; raise `ValueError` for None, which is what gRPC gives for bytes that are no message."""
    if message is None:
        raise ValueError("what came is no message of it")
    return message
