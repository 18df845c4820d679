"""What stands between a trainer and a server: a wire that is cut or slow, and one that garbles what is generated.

Both run in a thread with an event loop of its own, so that a test may wait for processes meanwhile.
"""

import asyncio
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import grpc.aio

from asyppo_async.rpc.v1 import fleet_pb2

_ROLLOUT_STREAMS = ("WatchInfo", "Generate")


@contextmanager
def aborted(writer: asyncio.StreamWriter) -> Iterator[None]:
    """At the end the connection is gone, whatever was under way."""
    try:
        yield
    finally:
        writer.transport.abort()


class Wire:
    """A TCP proxy: `delay_s` holds every piece back, `is_cut` lets nothing through and resets what is open."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = host, int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self.port = 0
        self.delay_s = 0.0
        self.is_cut = False
        self.num_refused = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """As if somebody had pulled the plug: no byte more, also for those who come later."""
        self.is_cut = True
        self._loop.call_soon_threadsafe(self._reset)

    def mend(self) -> None:
        self.is_cut = False

    async def serve(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    def _reset(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            self.num_refused += 1
            writer.transport.abort()
            return
        with suppress(OSError), aborted(writer):
            there_reader, there_writer = await asyncio.open_connection(*self._target)
            self._writers |= {writer, there_writer}
            with aborted(there_writer):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._pump(reader, there_writer))
                    tasks.create_task(self._pump(there_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(2**16):
                await asyncio.sleep(self.delay_s)
                writer.write(piece)
                await writer.drain()
        writer.close()


@contextmanager
def wire_to(target: str) -> Iterator[Wire]:
    wire = Wire(target)
    with running(wire._loop, wire.serve) as server:
        yield wire
        wire._loop.call_soon_threadsafe(server.close)
        wire.cut()


class Garbler:
    """A gRPC proxy that hands everything on, but for one fault in every other stream of tokens."""

    FAULTS = ("nan", "twice", "short", "future", "noise")

    def __init__(self, target: str) -> None:
        self._target = target
        self._num_streams = 0
        self.port = 0
        self.done: Counter[str] = Counter()
        """Faults that were made."""

    async def serve(self) -> grpc.aio.Server:
        self._channel = grpc.aio.insecure_channel(self._target)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Handler(self._channel, self._garbled),))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server

    async def end(self, server: grpc.aio.Server) -> None:
        await server.stop(0)
        await self._channel.close()

    async def _garbled(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self._num_streams += 1
        number, odd = divmod(self._num_streams, 2)
        fault = self.FAULTS[number % len(self.FAULTS)] if odd else ""
        is_done = False
        async for data in stream:
            message = fleet_pb2.GenerateChunk.FromString(data)
            has_tokens = any(sample.token_ids for sample in message.samples)
            # To the end of the stream for versions of the future: falling back would be another fault.
            if not fault or not has_tokens or (is_done and fault != "future"):
                yield data
                continue
            for garbled in _with_fault(fault, message):
                yield garbled
            self.done[fault] += not is_done
            is_done = True


def _with_fault(fault: str, message: fleet_pb2.GenerateChunk) -> Sequence[bytes]:
    """The message as it arrives."""
    sample = next(sample for sample in message.samples if sample.token_ids)
    num_tokens = len(sample.token_ids) // 4
    if fault == "nan":
        sample.logprobs = struct.pack("<f", float("nan")) * num_tokens
    elif fault == "short":
        sample.logprobs = sample.logprobs[4:]
    elif fault == "future":
        for run in (run for sample in message.samples for run in sample.version_runs):
            run.version += 5
    elif fault == "noise":
        return [b"\xff\xfe\xfd" * 7]
    elif fault == "twice":
        # Of a finished sample; of others it would be too long in the end, or have versions out of order.
        sample.finish_reason = fleet_pb2.FINISH_REASON_LENGTH
        return [message.SerializeToString()] * 2
    return [message.SerializeToString()]


class _Handler(grpc.GenericRpcHandler):
    def __init__(
        self, channel: grpc.aio.Channel, garbled: Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]
    ) -> None:
        self._channel = channel
        self._garbled = garbled

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method
        name = method.rsplit("/", 1)[1]
        if name not in _ROLLOUT_STREAMS:

            async def unary(request: bytes, context: Any) -> bytes:
                try:
                    return await self._channel.unary_unary(method)(request, timeout=context.time_remaining())
                except grpc.aio.AioRpcError as error:
                    await context.abort(error.code(), error.details())
                    raise

            return grpc.unary_unary_rpc_method_handler(unary)

        async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
            call = self._channel.unary_stream(method)(request, timeout=context.time_remaining())
            try:
                async for data in self._garbled(call) if name == "Generate" else call:
                    yield data
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
            finally:
                call.cancel()

        return grpc.unary_stream_rpc_method_handler(stream)


@contextmanager
def garbling(target: str) -> Iterator[Garbler]:
    garbler, loop = Garbler(target), asyncio.new_event_loop()
    with running(loop, garbler.serve) as server:
        yield garbler
        asyncio.run_coroutine_threadsafe(garbler.end(server), loop).result(10)


@contextmanager
def running(loop: asyncio.AbstractEventLoop, start: Callable[[], Any]) -> Iterator[Any]:
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _end_tasks() -> None:
    """Leave no connection open that a later test would be told of."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.05)  # what is aborted is closed in the loop's next turns
