"""Running the samples of one `Generate` call, and the set of calls that are running."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterator

from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.draw import Draw, Outgoing, SampleDelta, SampleFailed
from asyppo_async.fleet.engine.protocol import (
    Engine,
    EngineDead,
    EngineFault,
    EngineRefused,
    SampleRequest,
)
from asyppo_async.fleet.outbox import Outbox
from asyppo_async.fleet.queue import AdmissionQueue, Ticket
from asyppo_async.fleet.update_state import UpdateState
from asyppo_async.rpc.codec import FailureKind, SampleFailure


class ReleaseGate:
    """Withholds what was sampled from weights that are on probation."""

    def __init__(self) -> None:
        self._verified_load = 0
        self._changed = asyncio.Event()

    async def wait(self, load: int) -> None:
        """Waits for: the verdict on this load. Unblocked by: `release`, or the end of the whole call."""
        while load > self._verified_load:
            await self._changed.wait()

    def release(self, load: int) -> None:
        self._verified_load = load
        self._changed.set()
        self._changed = asyncio.Event()


class _Attempt:
    """One hand-over of a sample to the engine."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.started = False
        self.recalled = False


class RolloutCall:
    """One call. `run` owns everything that it starts: leaving it aborts what the engine still runs."""

    def __init__(self, floor: "RolloutFloor", draw: Draw) -> None:
        self._floor = floor
        self._draw = draw
        self._outbox = Outbox(chunk_tokens=floor.chunk_tokens, chunk_s=floor.chunk_s)
        self._attempts: dict[int, _Attempt] = {}
        self._samples: dict[int, asyncio.Task[None]] = {}
        """Those that have not ended."""

    @property
    def request_id(self) -> str:
        return self._draw.request_id

    async def run(self, send: Callable[[list[Outgoing]], Awaitable[None]]) -> None:
        """Sample, and send what is released, in messages that the outbox cuts.

        Consumes: the engine's deltas. Produces: messages. Waits for: slots, tokens, verdicts, the client's reading.

        Raises:
            CallError: the queue is full, the engine refuses the request, or `end` was called.
        """
        fitting = [index for index in range(self._draw.num_samples) if self._draw.room_of(index) > 0]
        tickets = self._floor.queue.join(len(fitting))
        failure: CallError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, ticket in zip(fitting, tickets, strict=True):
                    self._samples[index] = tasks.create_task(self._sample(index, ticket))
                for index in set(range(self._draw.num_samples)).difference(fitting):
                    self._fail(index, "too_long", self._too_long(index))
                failure = await self._forward(send)
                for sample in self._samples.values():
                    sample.cancel()
        finally:
            self._outbox.close()
            for ticket in tickets:
                self._floor.queue.leave(ticket)
        if failure is not None:
            raise failure

    def cancel(self, indices: Collection[int]) -> int:
        """End samples that have not ended, all where none is named; returns how many that were."""
        ending = [index for index in self._samples if not indices or index in indices]
        for index in ending:
            self._samples.pop(index).cancel()
            self._fail(index, "cancelled", "cancelled by the client")
        return len(ending)

    def end(self, error: CallError) -> None:
        """Send what is there and end the call with this error."""
        self._outbox.put(error)

    def recall_unstarted(self) -> list[str]:
        """Take back the samples of which no token has come yet; returns their engine ids, to be aborted."""
        unstarted = [each for each in self._attempts.values() if not each.started and not each.recalled]
        for attempt in unstarted:
            attempt.recalled = True
        return [attempt.engine_id for attempt in unstarted]

    async def _forward(self, send: Callable[[list[Outgoing]], Awaitable[None]]) -> CallError | None:
        num_unfinished = self._draw.num_samples
        while num_unfinished > 0:
            items, failure = await self._outbox.take()
            if items:
                await send(items)
            num_unfinished -= sum(
                isinstance(item, SampleFailed) or item.delta.end is not None for item in items
            )
            if failure is not None:
                return failure
        return None

    def _fail(self, index: int, kind: FailureKind, message: str) -> None:
        failure = SampleFailure(kind=kind, message=message)
        self._outbox.put(SampleFailed(sample_index=index, failure=failure))

    def _too_long(self, index: int) -> str:
        num_begun = len(self._draw.begun.get(index, ()))
        begun = f" with {num_begun} tokens of its response" if num_begun else ""
        return (
            f"a prompt of {len(self._draw.prompt_token_ids)} tokens{begun} leaves no room for a response: both hold "
            f"at most {self._draw.max_model_len} tokens"
        )

    async def _sample(self, index: int, ticket: Ticket) -> None:
        try:
            while not await self._attempt(index, ticket):
                self._floor.queue.rejoin(ticket)
        except EngineRefused as error:
            self.end(CallError("INVALID_ARGUMENT", str(error)))
        except EngineFault as error:
            self._fail(index, "engine_fault", str(error))
        except EngineDead as error:
            self.end(CallError("UNAVAILABLE", str(error)))
        finally:
            self._attempts.pop(index, None)
            self._samples.pop(index, None)
            self._floor.queue.leave(ticket)

    async def _attempt(self, index: int, ticket: Ticket) -> bool:
        """Hand the sample to the engine once; False if it was recalled."""
        await self._floor.queue.acquire(ticket)
        attempt = _Attempt(self._floor.next_engine_id())
        self._attempts[index] = attempt
        request = SampleRequest(
            id=attempt.engine_id,
            prompt_token_ids=self._draw.prompt_of(index),
            sampling=self._draw.sampling_of(index),
            cache_salt=self._floor.state.salt,
            return_kept_tokens=self._draw.return_kept_tokens,
            return_routed_experts=self._draw.return_routed_experts,
        )
        newest = 0
        async with contextlib.aclosing(self._floor.engine.generate(request)) as deltas:
            async for delta in deltas:
                if attempt.recalled:
                    return False
                attempt.started = True
                self._floor.heard()
                if delta.end == "aborted":
                    raise EngineFault(f"request {attempt.engine_id} was aborted by the engine itself")
                if delta.runs:
                    await self._floor.gate.wait(delta.runs[-1].label.load)
                for version in (run.label.version for run in delta.runs):
                    if version < newest:
                        raise EngineFault(
                            f"weights of another run were loaded while it was sampled (version {version} after "
                            f"{newest}): ask for it again"
                        )
                    newest = version
                self._outbox.put(SampleDelta(sample_index=index, delta=delta))
        return True


class RolloutFloor:
    """All calls that are running, over one engine."""

    def __init__(
        self,
        *,
        engine: Engine,
        queue: AdmissionQueue,
        state: UpdateState,
        gate: ReleaseGate,
        max_calls: int,
        chunk_tokens: int,
        chunk_s: float,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        """`heard`: called whenever the engine delivers a token; `chunk_tokens`, `chunk_s`: see `Outbox`."""
        self.engine = engine
        self.queue = queue
        self.state = state
        self.gate = gate
        self.heard = heard
        self.chunk_tokens = chunk_tokens
        self.chunk_s = chunk_s
        self._max_calls = max_calls
        self._calls: set[RolloutCall] = set()
        self._engine_ids = itertools.count()
        self._empty = asyncio.Event()
        self._empty.set()

    def next_engine_id(self) -> str:
        return f"sample-{next(self._engine_ids)}"

    @contextlib.contextmanager
    def call(self, draw: Draw) -> Iterator[RolloutCall]:
        """A place among the calls; raise RESOURCE_EXHAUSTED where there is none."""
        if len(self._calls) >= self._max_calls:
            raise CallError(
                "RESOURCE_EXHAUSTED",
                f"{self._max_calls} calls are running; try again later, or ask another server",
            )
        call = RolloutCall(self, draw)
        self._calls.add(call)
        self._empty.clear()
        try:
            yield call
        finally:
            self._calls.remove(call)
            if not self._calls:
                self._empty.set()

    def cancel(self, request_id: str, indices: Collection[int]) -> int:
        """End samples of the calls of this id; raise NOT_FOUND where there is none."""
        calls = [call for call in self._calls if request_id and call.request_id == request_id]
        if not calls:
            raise CallError("NOT_FOUND", f"no call {request_id!r} runs here")
        return sum(call.cancel(indices) for call in calls)

    def end_all(self, error: CallError) -> None:
        for call in self._calls:
            call.end(error)

    async def recall_unstarted(self) -> None:
        """What has not begun begins again under the weights of its new hand-over, with no KV of older ones."""
        engine_ids = [engine_id for call in self._calls for engine_id in call.recall_unstarted()]
        if engine_ids:
            await self.engine.abort(engine_ids)

    async def wait_empty(self) -> None:
        await self._empty.wait()
