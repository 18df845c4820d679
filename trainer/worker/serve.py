"""A rank's life: say hello, take the assigned place, load, answer until told to end."""

import logging
import os
import traceback

import torch

from asyppo_async.errors import AsyppoError, CheckpointError, TrainingDiverged, WeightSyncError, WorkerError
from asyppo_async.trainer.worker.codec import Envelope, expect
from asyppo_async.trainer.worker.control import (
    Assigned,
    Assignment,
    Failure,
    Hello,
    Load,
    Refused,
    Shutdown,
)
from asyppo_async.trainer.worker.link import Link
from asyppo_async.trainer.worker.rank import Rank, answer, open_rank
from asyppo_async.trainer.worker.session_messages import SessionStore
from asyppo_async.trainer.worker.world import World
from asyppo_async.weights.store import open_store

logger = logging.getLogger(__name__)


def serve(endpoint: str, token: str, hello: Hello, *, abandoned_after_s: float) -> None:
    """Returns when the coordinator says so.

    Raises:
        WorkerError: the run has no place for this worker.
        AsyppoError: as reported to the coordinator before.
    """
    link = Link(endpoint, token, hello, abandoned_after_s=abandoned_after_s)
    link.start()
    try:
        rank = _take_place(link, hello)
        while rank is not None:
            request = link.receive()
            if isinstance(request.message, Shutdown):
                break
            _answer(link, rank, request)
    finally:
        link.close()


def _take_place(link: Link, hello: Hello) -> Rank | None:
    """Assignment, store, world, model; None when the run ended before."""
    request = link.receive()
    try:
        if isinstance(request.message, Refused):
            raise WorkerError(f"the coordinator refused this worker: {request.message.reason}")
        if isinstance(request.message, Shutdown):
            return None
        assignment = expect(request.message, Assignment)
        settings = assignment.settings
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        store = None
        if assignment.rank == 0:
            store, port = open_store(hello.host, assignment.world_size, settings.collective_deadline_s)
            link.reply(request, Assigned(store=SessionStore(host=hello.host, port=port)))
        else:
            link.reply(request, Assigned(store=None))
        request = link.receive()
        if isinstance(request.message, Shutdown):
            return None
        address = expect(request.message, Load).store
        world = World.join(
            store or (address.host, address.port),
            rank=assignment.rank,
            size=assignment.world_size,
            host=hello.host,
            deadline_s=settings.collective_deadline_s,
        )
        rank = open_rank(settings, world, assignment.device)
    except Exception as error:
        link.reply(request, _failure(error, fatal=True))
        raise
    logger.info(
        "%s rank %d of %d is ready: %d parameters, %d threads",
        hello.role,
        world.rank,
        world.size,
        rank.loaded.num_parameters,
        torch.get_num_threads(),
    )
    link.reply(request, rank.loaded)
    return rank


def _answer(link: Link, rank: Rank, request: Envelope) -> None:
    try:
        reply = answer(rank, request.message)
    except (WeightSyncError, TrainingDiverged, CheckpointError) as error:
        logger.warning("%s: %s", type(request.message).__name__, error)
        link.reply(request, _failure(error, fatal=False))
    except Exception as error:
        # Whatever it was, this rank may have stopped in the middle of what its peers have finished.
        link.reply(request, _failure(error, fatal=True))
        raise
    else:
        link.reply(request, reply)


def _failure(error: Exception, *, fatal: bool) -> Failure:
    """The error with its own words; of one that is not ours, the last line of the traceback and where it was."""
    kind = type(error).__name__
    if isinstance(error, AsyppoError):
        return Failure(kind=kind, message=str(error), fatal=fatal)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return Failure(kind=kind, message=f"{error} ({where})", fatal=fatal)
