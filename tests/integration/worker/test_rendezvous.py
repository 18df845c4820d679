"""Joining, being refused, being silent: a real hub and its socket, workers that are threads of this process."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import zmq

from asyppo_async.concurrency import beside
from asyppo_async.errors import ConfigError, WorkerError
from asyppo_async.trainer.worker.codec import encode
from asyppo_async.trainer.worker.control import Done, Failure, Hello, Refused, WorkerRole
from asyppo_async.trainer.worker.hub import Hub, Peer, open_hub
from asyppo_async.trainer.worker.link import Link
from asyppo_async.trainer.worker.messages import ActorForward, ActorForwardResult
from asyppo_async.trainer.worker.ranks import Ranks
from asyppo_async.trainer.worker.rendezvous import WantedGroup, gather_workers, refuse_latecomers
from asyppo_async.trainer.worker.session_messages import CloseSession
from asyppo_async.trainer.worker.wire import secure_worker
from asyppo_async.types import concatenate_sequences

TOKEN = "0123456789abcdef0123456789abcdef"
ACTOR = WantedGroup(role="actor", critic=None, num_ranks=1)
CRITICS = [WantedGroup(role="critic", critic=index, num_ranks=2) for index in range(2)]
FORWARD = ActorForward(
    sequences=concatenate_sequences([([1, 2], np.array([3, 4, 5], dtype=np.int32))]), temperature=1.0
)


def hello(role: WorkerRole, critic: int | None = None, pid: int = 7) -> Hello:
    return Hello(role=role, name="", host="127.0.0.1", pid=pid, devices=("cpu",), critic=critic)


@contextmanager
def worker(hub: Hub, greeting: Hello, token: str = TOKEN) -> Iterator[Link]:
    link = Link(hub.endpoint, token, greeting)
    link.start()
    try:
        yield link
    finally:
        link.close()


@contextmanager
def workers(hub: Hub, greetings: Sequence[Hello]) -> Iterator[list[Link]]:
    with ExitStack() as stack:
        yield [stack.enter_context(worker(hub, greeting)) for greeting in greetings]


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with open_hub("tcp://127.0.0.1:*", TOKEN, silent_after_s=4) as opened:
        yield opened


async def test_missing_worker_when_time_is_up_is_named_with_role_wanted_and_present(hub: Hub) -> None:
    with workers(hub, [hello("critic"), hello("critic", critic=1)]):
        started_s = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            await gather_workers(hub, [ACTOR, *CRITICS], timeout_s=1.0)
        assert time.monotonic() - started_s < 3
    assert "actor: wanted 1, present 0" in str(caught.value)
    assert "critic 0: wanted 2, present 1" in str(caught.value)
    assert "critic 1: wanted 2, present 1" in str(caught.value)


async def test_workers_that_name_their_critic_go_there_and_the_others_fill_up(hub: Hub) -> None:
    with workers(hub, [hello("critic", critic=1, pid=1), hello("critic", critic=1, pid=2)]):
        await asyncio.to_thread(time.sleep, 0.3)
        with workers(hub, [hello("critic", pid=3), hello("critic", pid=4), hello("actor", pid=5)]):
            gathered = await gather_workers(hub, [ACTOR, *CRITICS], timeout_s=10)
    assert [sorted(peer.hello.pid for peer in peers) for peers in gathered] == [[5], [3, 4], [1, 2]]


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (hello("actor"), "this run has all the actor ranks that it wants (1)"),
        (hello("critic", critic=5), "this run has no critic 5; it has 2, counted from 0"),
    ],
)
async def test_worker_without_a_place_is_told_so(hub: Hub, greeting: Hello, reason: str) -> None:
    with worker(hub, hello("actor")):
        first = await asyncio.wait_for(hub.joins.get(), 10)
        with worker(hub, greeting) as link:
            second = await asyncio.wait_for(hub.joins.get(), 10)
            for joined in (first, second):
                hub.joins.put_nowait(joined)
            with pytest.raises(WorkerError, match="critic 0: wanted 2, present 0"):
                await gather_workers(hub, [ACTOR, *CRITICS], timeout_s=0.5)
            assert (await asyncio.to_thread(link.receive)).message == Refused(reason=reason)


async def test_latecomer_is_told_that_the_groups_are_complete(hub: Hub) -> None:
    async with beside(refuse_latecomers(hub)):
        with worker(hub, hello("actor")) as link:
            refused = (await asyncio.to_thread(link.receive)).message
    assert refused == Refused(reason="the groups of this run are complete")


async def test_garbage_of_a_stranger_does_not_stop_the_others(hub: Hub) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        secure_worker(stranger, TOKEN)
        stranger.connect(hub.endpoint)
        stranger.send_multipart([b"\x80\x04garbage", b"\xff" * 100])
        stranger.send_multipart(encode(CloseSession()))
        stranger.send(b"")
        with worker(hub, hello("actor")):
            ((peer,),) = await gather_workers(hub, [ACTOR], timeout_s=10)
    assert peer.hello.role == "actor"
    await asyncio.to_thread(context.term)


async def actor_of(hub: Hub) -> tuple[Ranks, Peer]:
    ((peer,),) = await gather_workers(hub, [ACTOR], timeout_s=10)
    return Ranks("actor", [peer]), peer


async def test_request_is_acknowledged_and_answered_with_arrays(hub: Hub) -> None:
    with worker(hub, hello("actor")) as link:
        ranks, _ = await actor_of(hub)

        def answer() -> None:
            request = link.receive()
            assert isinstance(request.message, ActorForward)
            assert request.message.sequences.response_token_ids.tolist() == [3, 4, 5]
            numbers = np.array([-1, -2, -3], dtype=np.float32)
            link.reply(request, ActorForwardResult(logprobs=numbers, entropies=-numbers, compute_s=0.5))

        _, (reply,) = await asyncio.gather(asyncio.to_thread(answer), ranks.ask([FORWARD], 10))
    assert isinstance(reply, ActorForwardResult)
    assert reply.logprobs.tolist() == [-1, -2, -3]


async def test_requests_to_one_group_go_one_after_the_other(hub: Hub) -> None:
    with worker(hub, hello("actor")) as link:
        ranks, _ = await actor_of(hub)

        def answer_twice() -> None:
            first = link.receive()
            time.sleep(0.3)
            link.reply(first, Failure(kind="WeightSyncError", message="first", fatal=False))
            link.reply(link.receive(), Done())

        first, second, _ = await asyncio.gather(
            ranks.ask([FORWARD], 10),
            ranks.ask([CloseSession()], 10),
            asyncio.to_thread(answer_twice),
            return_exceptions=True,
        )
    assert isinstance(first, Exception) and "first" in str(first)
    assert second == [Done()]


async def test_deadline_that_passes_is_an_error_that_says_what_is_known_and_the_group_stays_failed(
    hub: Hub,
) -> None:
    with worker(hub, hello("actor")):
        ranks, _ = await actor_of(hub)
        with pytest.raises(
            WorkerError,
            match=r"actor rank 0 .* did not finish ActorForward within 0.5 s \(acknowledged, last heard 0\.",
        ):
            await ranks.ask([FORWARD], 0.5)
        with pytest.raises(WorkerError, match="did not finish"):
            await ranks.ask([FORWARD], 10)


async def test_own_words_of_a_rank_that_fails_arrive_at_once(hub: Hub) -> None:
    with worker(hub, hello("actor")) as link:
        ranks, _ = await actor_of(hub)

        def fail() -> None:
            link.reply(link.receive(), Failure(kind="IndexError", message="row 9 of 5", fatal=True))

        with pytest.raises(WorkerError, match=r"actor rank 0 .* failed: IndexError: row 9 of 5"):
            await asyncio.gather(asyncio.to_thread(fail), ranks.ask([FORWARD], 60))
        with pytest.raises(WorkerError, match="row 9 of 5"):
            await ranks.watch()


async def test_rank_without_a_connection_is_an_error_at_once(hub: Hub) -> None:
    with worker(hub, hello("actor")):
        ranks, _ = await actor_of(hub)
    await asyncio.to_thread(time.sleep, 0.5)  # for the end of the connection to be noticed
    with pytest.raises(WorkerError, match=r"actor rank 0 .* cannot be reached"):
        await ranks.ask([FORWARD], 60)


async def test_silent_rank_is_lost_in_the_configured_time_also_with_no_request(hub: Hub) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as silent:
        silent.linger = 0
        secure_worker(silent, TOKEN)
        silent.connect(hub.endpoint)
        silent.send_multipart(encode(hello("actor")))
        ranks, _ = await actor_of(hub)
        started_s = time.monotonic()
        with pytest.raises(WorkerError, match="was silent for 4 s"):
            await asyncio.wait_for(ranks.watch(), 10)
        assert 3 < time.monotonic() - started_s < 6
    await asyncio.to_thread(context.term)


async def test_rank_that_only_beats_is_not_lost_even_when_the_coordinator_itself_was_held_up(
    hub: Hub,
) -> None:
    with worker(hub, hello("actor")):
        ranks, _ = await actor_of(hub)
        time.sleep(5)  # noqa: ASYNC251  longer than a rank may be silent
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ranks.watch(), 2.5)


async def test_address_in_use_is_refused_by_name(hub: Hub) -> None:
    with pytest.raises(ConfigError, match=re.escape(hub.endpoint)):
        async with open_hub(hub.endpoint, TOKEN, silent_after_s=4):
            pass
