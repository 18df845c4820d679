"""Publishing a version: stage, commit, probe, verdict, on all servers of the fleet at once.

Before the commit a failure leaves the old version serving everywhere. After it a server withholds what it generates
until its verdict; a verdict that failed leaves it with nothing to serve until a complete version has passed.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Literal, Protocol

from asyppo_async.config.sections import WeightsSection
from asyppo_async.errors import AsyppoError, FleetError, WeightSyncError, WorkerError
from asyppo_async.rpc.calls import SessionPlace, StageReport
from asyppo_async.trainer.coordinator.membership import Fleet, Member
from asyppo_async.trainer.coordinator.pace import Leg, Pace
from asyppo_async.trainer.coordinator.probing import ProbePlan, ServerGap, check_fresh, gaps_of
from asyppo_async.trainer.coordinator.publication import Publication, Timings, bound_from
from asyppo_async.trainer.coordinator.together import beside, together
from asyppo_async.trainer.worker.messages import ActorForward, ActorForwardResult, SendResult, SessionStore
from asyppo_async.weights.manifest import Manifest

_log = logging.getLogger(__name__)

NUM_ATTEMPTS = 2
"""A failed probe is followed by one complete repeat: all bytes again, then a verdict that is final."""
CLOSE_DEADLINE_S = 5.0
"""For each party of a session that is being left."""
_EPOCH = 1


class WeightSender(Protocol):
    """The actor group, as a publication sees it."""

    async def manifest(self) -> Manifest: ...

    async def open_session(
        self, *, host: str, epoch: int, world_size: int, backend: Literal["gloo", "nccl"], deadline_s: float
    ) -> SessionStore:
        """Start the store at rank 0; the others are told where it listens."""
        ...

    async def join_session(self, *, epoch: int, deadline_s: float) -> None:
        """Returns when all ranks of the session have met."""
        ...

    async def send_weights(self, version: int, deadline_s: float) -> SendResult: ...

    async def forward(self, request: ActorForward) -> ActorForwardResult: ...

    async def close_session(self) -> None: ...


@asynccontextmanager
async def open_publisher(
    *,
    sender: WeightSender,
    fleet: Fleet,
    settings: WeightsSection,
    plan: ProbePlan,
    host: str,
    version: int,
) -> AsyncIterator["Publisher"]:
    """Open the weight session and publish `version` to every server, whatever it serves.

    The gap of this first publication is the floor of engine against trainer: nothing was trained between the two.

    Args:
        sender: Has the weights.
        fleet: Every server takes part.
        settings: The section of the run.
        plan: What every publication is probed with.
        host: Address of actor rank 0 that the servers can reach.
        version: Of the weights as they are.

    Raises:
        WeightSyncError: a server has other tensors, did not join, or failed the first publication.
    """
    publisher = Publisher(sender, fleet, settings, plan, await sender.manifest())
    try:
        await publisher.join(host)
        publisher.first = await publisher.publish(version)
        _log.info(
            "first publication: gap %.2e nats, bound %.2e", publisher.first.mean_gap, publisher.first.bound
        )
        yield publisher
    finally:
        await publisher.leave()


class Publisher:
    """The weight session of a run; made by `open_publisher`."""

    def __init__(
        self,
        sender: WeightSender,
        fleet: Fleet,
        settings: WeightsSection,
        plan: ProbePlan,
        manifest: Manifest,
    ) -> None:
        self._sender = sender
        self._fleet = fleet
        self._settings = settings
        self._plan = plan
        self._manifest = manifest
        self._pace = Pace(settings.min_deadline_s, manifest.num_bytes)
        self.first: Publication | None = None
        """The one that found the floor."""

    async def publish(self, version: int) -> Publication:
        """Send the weights as they are, under the number `version`.

        Raises:
            WeightSyncError: names the server, the phase and the gap or the server's own words.
        """
        started_s = time.monotonic()
        for attempt in range(1, NUM_ATTEMPTS + 1):
            publication = await self._attempt(version, attempt)
            verdicts = [gap.mean <= publication.bound for gap in publication.servers]
            with _phase("verdict", version):
                await together(
                    [
                        member.client.verdict(_EPOCH, version, passed, self._settings.min_deadline_s)
                        for member, passed in zip(self._fleet.members, verdicts, strict=True)
                    ]
                )
            if all(verdicts):
                return publication.finished(time.monotonic() - started_s)
            words = _words(publication.servers[verdicts.index(False)], publication.bound)
            _log.warning("publication of version %d, attempt %d: %s", version, attempt, words)
        raise WeightSyncError(
            f"publication of version {version}: phase probe: {words}; a complete repeat did not change that"
        )

    async def set_version(self, version: int) -> None:
        """Tell every server the new number of unchanged weights; no byte is sent."""
        with _phase("set version", version):
            await together(
                [
                    member.client.set_version(_EPOCH, version, self._settings.min_deadline_s)
                    for member in self._fleet.members
                ]
            )

    async def _attempt(self, version: int, attempt: int) -> Publication:
        members = self._fleet.members
        times = _Clock(self._pace)
        with _phase("stage", version), times.leg("stage"):
            deadline_s = self._pace.deadline_s("stage")
            sent, staged = await beside(
                self._sender.send_weights(version, deadline_s),
                [member.client.stage(_EPOCH, version, deadline_s) for member in members],
            )
            for member, report in zip(members, staged, strict=True):
                self._check_bytes(member, sent, report)
        with _phase("commit", version), times.leg("commit"):
            deadline_s = self._pace.deadline_s("commit")
            kv_on_update = self._settings.kv_on_update
            fixed, commits = await beside(
                self._sender.forward(self._plan.fixed_request()),
                [
                    member.client.commit(_EPOCH, version, sent.checksums, kv_on_update, deadline_s)
                    for member in members
                ],
            )
        with _phase("probe", version), times.leg("probe"):
            deadline_s = self._pace.deadline_s("probe")
            plan = self._plan
            probes = await together(
                [
                    member.client.probe(_EPOCH, version, plan.fixed, plan.prompts, plan.sampling, deadline_s)
                    for member in members
                ]
            )
            for member, probe in zip(members, probes, strict=True):
                check_fresh(member.address, version, probe)
        started_s = time.monotonic()
        with _phase("score", version):
            sampled = await self._sender.forward(self._plan.sampled_request(probes))
        servers = gaps_of([member.address for member in members], probes, fixed, sampled)
        return Publication(
            version=version,
            num_bytes=sent.num_bytes,
            attempts=attempt,
            timings=Timings(
                stage_s=times.seconds["stage"],
                gather_s=sent.gather_s,
                wire_s=sent.wire_s,
                commit_s=times.seconds["commit"],
                pause_s=max(commit.pause_s for commit in commits),
                load_s=max(commit.load_s for commit in commits),
                resume_s=max(commit.resume_s for commit in commits),
                probe_s=times.seconds["probe"],
                score_s=time.monotonic() - started_s,
            ),
            total_s=0.0,
            servers=tuple(servers),
            bound=self._bound(servers),
        )

    def _bound(self, servers: Sequence[ServerGap]) -> float:
        if self._settings.probe_tolerance > 0:
            return self._settings.probe_tolerance
        if self.first is not None:
            return self.first.bound
        return bound_from(max(server.mean for server in servers), self._manifest.tensors[0].dtype)

    def _check_bytes(self, member: Member, sent: SendResult, staged: StageReport) -> None:
        if staged.checksums == sent.checksums:
            return
        pairs = zip(self._manifest.tensors, sent.checksums, staged.checksums, strict=False)
        names = [spec.name for spec, ours, theirs in pairs if ours != theirs]
        raise WeightSyncError(
            f"server {member.address} received other bytes than were sent: {len(names)} of "
            f"{len(self._manifest.tensors)} tensors differ, the first is {names[0] if names else 'missing'}"
        )

    async def join(self, host: str) -> None:
        """Open the process group between actor rank 0 and every server."""
        members, settings = self._fleet.members, self._settings
        deadline_s = settings.min_deadline_s
        world_size = len(members) + 1
        store = await self._sender.open_session(
            host=host, epoch=_EPOCH, world_size=world_size, backend=settings.backend, deadline_s=deadline_s
        )
        joining = [
            member.client.open_session(
                SessionPlace(
                    run_id=self._fleet.run.run_id,
                    incarnation=self._fleet.run.incarnation,
                    epoch=_EPOCH,
                    rank=rank,
                    world_size=world_size,
                    backend=settings.backend,
                    store_host=store.host,
                    store_port=store.port,
                    bucket_bytes=settings.bucket_bytes,
                    lease_s=settings.lease_s,
                ),
                self._manifest,
                deadline_s,
            )
            for rank, member in enumerate(members, start=1)
        ]
        with _phase("open", None):
            await beside(self._sender.join_session(epoch=_EPOCH, deadline_s=deadline_s), joining)

    async def leave(self) -> None:
        """Close the session at both ends, as far as they still answer."""
        closings: list[Callable[[], Coroutine[object, object, None]]] = [
            *(
                partial(member.client.close_session, _EPOCH, CLOSE_DEADLINE_S)
                for member in self._fleet.members
            ),
            self._sender.close_session,
        ]
        for close in closings:
            try:
                async with asyncio.timeout(CLOSE_DEADLINE_S):
                    await close()
            except (AsyppoError, TimeoutError) as error:
                _log.warning("the weight session was not closed cleanly: %s", error)


class _Clock:
    """Seconds of each leg of one attempt; a leg that succeeded sets the pace of later ones."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.seconds: dict[Leg, float] = {}

    @contextmanager
    def leg(self, leg: Leg) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        self.seconds[leg] = time.monotonic() - started_s
        self._pace.measured(leg, self.seconds[leg])


@contextmanager
def _phase(phase: str, version: int | None) -> Iterator[None]:
    """Say in the error what was being done."""
    try:
        yield
    except (FleetError, WorkerError, WeightSyncError) as error:
        what = "weight session" if version is None else f"publication of version {version}"
        raise WeightSyncError(f"{what}: phase {phase}: {error}") from error


def _words(gap: ServerGap, bound: float) -> str:
    return (
        f"server {gap.address}: engine and trainer differ by {gap.mean:.3g} nats on average (prefill "
        f"{gap.fixed.mean:.3g}, sampled {gap.sampled.mean:.3g}, worst token "
        f"{max(gap.fixed.max, gap.sampled.max):.3g}), the bound is {bound:.3g}"
    )
