"""Publishing a version: stage, commit, probe, verdict, on all servers of the fleet at once.

Before the commit a failure leaves the old version serving everywhere. After it a server withholds what it generates
until its verdict; a verdict that failed leaves it with nothing to serve until a complete version has passed.
"""

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from asyppo_async.config.sections import WeightsSection
from asyppo_async.errors import AsyppoError, FleetOverloaded, WeightSyncError
from asyppo_async.rpc.calls import CommitReport, ProbeReport, StageReport
from asyppo_async.rpc.member import Member
from asyppo_async.trainer.coordinator.membership import Fleet
from asyppo_async.trainer.coordinator.membership_state import Sending
from asyppo_async.trainer.coordinator.pace import Pace
from asyppo_async.trainer.coordinator.parties import all_parties, party_and_others
from asyppo_async.trainer.coordinator.probing import (
    LongTurns,
    ProbePlan,
    ServerGap,
    check_fresh,
    gaps_of,
    worst_of,
)
from asyppo_async.trainer.coordinator.publication import Publication, Timings, bound_from
from asyppo_async.trainer.coordinator.weight_session import (
    WeightSender,
    WeightSession,
    phase,
    weight_session,
)
from asyppo_async.trainer.worker.session_messages import SendResult
from asyppo_async.weights.manifest import Manifest

_log = logging.getLogger(__name__)

NUM_FLOOR_PROBES = 3
"""Of the first publication: what is sampled differs, and the largest gap of three is the floor."""
NUM_ATTEMPTS = 2
"""A failed probe is followed by one complete repeat: all bytes again, then a verdict that is final."""


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
    """Open a weight session and publish `version` to every server, whatever it serves.

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
    manifest = await sender.manifest()
    async with weight_session(sender, fleet.run, settings, manifest, host) as session:
        publisher = Publisher(session, sender, fleet, settings, plan, manifest)
        publisher.first = first = await publisher.publish(version)
        _log.info("first publication: gap %.2e nats, bound %.2e", first.mean_gap, first.bound)
        yield publisher


class Publisher:
    """The weight session of a run; made by `open_publisher`."""

    def __init__(
        self,
        session: WeightSession,
        sender: WeightSender,
        fleet: Fleet,
        settings: WeightsSection,
        plan: ProbePlan,
        manifest: Manifest,
    ) -> None:
        self._session = session
        self._sender = sender
        self._fleet = fleet
        self._settings = settings
        self._plan = plan
        self._manifest = manifest
        self._pace = Pace(settings.min_deadline_s, manifest.num_bytes)
        self.first: Publication | None = None
        """The one that found the floor."""
        self._long_turns = LongTurns(settings.probe_long_every)

    async def publish(self, version: int) -> Publication:
        """Send the weights as they are, under the number `version`, to every member that takes part.

        Where a member is lost on the way, or fails by itself, the version is sent again at once to the others. The
        first publication waits for a server that is within a load, as long as a commit may take.

        Raises:
            WeightSyncError: names the server, the phase and the gap or the server's own words.
        """
        left_out: set[str] = set()
        loaded_by_s = time.monotonic() + self._pace.deadline_s("commit")
        while True:
            async with self._fleet.sending(version) as sending:
                try:
                    return await self._send(sending)
                except AsyppoError as error:
                    if self._is_in_a_load(error) and time.monotonic() < loaded_by_s:
                        _log.warning("%s; version %d waits for it", error, version)
                        continue
                    # A round without a loss, or with nobody left, would fail again.
                    all_there = await self._fleet.are_there(sending.names)
                    if all_there and not self._leave_out(error.server, left_out):
                        raise
                    if not self._fleet.state.taking_part:
                        raise
                    _log.warning("%s; version %d is sent again to the others", error, version)

    async def set_version(self, version: int) -> Publication | None:
        """Tell the new number of unchanged weights; no byte is sent, except where a member has older ones."""
        async with self._fleet.renumbering(version) as members:
            with phase("set version", version):
                await all_parties(
                    [
                        member.client.weights.set_version(
                            self._session.epoch, version, self._settings.min_deadline_s
                        )
                        for member in members
                    ]
                )
        return None if members else await self.publish(version)

    def _is_in_a_load(self, error: AsyppoError) -> bool:
        """A trainer that died left a server in the middle of a commit. Later in a run such a server can do without."""
        return self.first is None and isinstance(error.__cause__, FleetOverloaded)

    def _leave_out(self, server: str | None, left_out: set[str]) -> bool:
        """Do without a server that is there and failed; it may come back as a joiner, not within this publication."""
        if server is None or server in left_out or self._settings.on_failed_server == "fail":
            return False
        left_out.add(server)
        return self._fleet.leave_out(server)

    async def _send(self, sending: Sending) -> Publication:
        started_s = time.monotonic()
        version, members = sending.version, self._fleet.named(sending.names)
        await self._session.meet(members, sending.epoch)
        self._fleet.state.met(sending)
        met_s = time.monotonic()
        for attempt in range(1, NUM_ATTEMPTS + 1):
            publication = await self._attempt(sending, attempt, met_s - started_s)
            verdicts = [gap.mean <= publication.bound for gap in publication.servers]
            with phase("verdict", version):
                await all_parties(
                    [
                        member.client.weights.verdict(
                            self._session.epoch, version, passed, self._settings.min_deadline_s
                        )
                        for member, passed in zip(members, verdicts, strict=True)
                    ]
                )
            if all(verdicts):
                self._fleet.state.completed(sending)
                self._long_turns.passed(sending.epoch)
                return publication.finished(time.monotonic() - started_s)
            words = publication.servers[verdicts.index(False)].words(publication.bound)
            _log.warning("publication of version %d, attempt %d: %s", version, attempt, words)
        failure = WeightSyncError(
            f"publication of version {version}: phase probe: {words}; a complete repeat did not change that"
        )
        if any(verdicts):  # else what they have in common is the trainer
            failure.server = members[verdicts.index(False)].address
        raise failure

    async def _attempt(self, sending: Sending, attempt: int, session_s: float) -> Publication:
        version, members, plan = sending.version, self._session.members, self._plan
        with_long = self._long_turns.is_due(sending.epoch)
        started_s = time.monotonic()
        if self._settings.way == "direct":
            self._fleet.state.loading(sending)
        sent = await self._stage(version, complete=attempt > 1)
        staged_s = time.monotonic()
        self._fleet.state.loading(sending)
        with phase("commit", version):
            # The actor scores what it can while the servers load; theirs is what holds tokens back.
            fixed, loads = await party_and_others(
                self._sender.forward(plan.fixed_request(with_long=with_long)),
                [self._load(member, version, sent, with_long) for member in members],
            )
        loaded_s = time.monotonic()
        probes = [probe for load in loads for probe in load.probes]
        with phase("score", version):
            sampled = await self._sender.forward(plan.sampled_request(probes))
        names = [member.address for member, load in zip(members, loads, strict=True) for _ in load.probes]
        servers = worst_of(gaps_of(names, probes, fixed, sampled, len(plan.fixed)))
        return Publication(
            version=version,
            num_bytes=sent.num_bytes,
            full_bytes=self._manifest.num_bytes,
            attempts=attempt,
            timings=Timings(
                session_s=session_s,
                stage_s=staged_s - started_s,
                gather_s=sent.gather_s,
                wire_s=sent.wire_s,
                commit_s=max(load.commit_s for load in loads),
                pause_s=max(load.commit.pause_s for load in loads),
                load_s=max(load.commit.load_s for load in loads),
                resume_s=max(load.commit.resume_s for load in loads),
                probe_s=max(load.probe_s for load in loads),
                score_s=time.monotonic() - loaded_s,
            ),
            total_s=0.0,
            servers=tuple(servers),
            bound=self._bound(servers),
        )

    async def _stage(self, version: int, *, complete: bool) -> SendResult:
        """What the way sends, to all servers."""
        with phase("stage", version):
            async with (
                self._sender.on_device()
            ):  # the servers' time runs from here, a wait for a turn does not count
                with self._pace.timed("stage"):
                    sent, staged = await self._session.deliver(
                        version, self._pace.deadline_s("stage"), complete=complete
                    )
            if self._settings.way != "direct":  # its workers compare at the commit
                for member, report in zip(self._session.members, staged, strict=True):
                    self._check_bytes(member, sent, report)
        return sent

    async def _load(self, member: Member, version: int, sent: SendResult, with_long: bool) -> "_Load":
        """One server's commit and probe."""
        client, plan, pace, epoch = member.client, self._plan, self._pace, self._session.epoch
        started_s = time.monotonic()
        with phase("commit", version), pace.timed("commit"):
            commit = await client.weights.commit(
                epoch, version, sent.checksums, self._settings.kv_on_update, pace.deadline_s("commit")
            )
        committed_s = time.monotonic()
        probes = []
        for index in range(NUM_FLOOR_PROBES if self.first is None else 1):
            fixed = plan.scored(
                with_long=with_long and index == 0
            )  # the prefill of the same tokens is the same
            with phase("probe", version), pace.timed("probe"):
                probe = await client.weights.probe(
                    epoch, version, fixed, plan.prompts, plan.sampling, pace.deadline_s("probe")
                )
                check_fresh(member.address, version, probe)
            probes.append(probe)
        return _Load(
            commit=commit,
            commit_s=committed_s - started_s,
            probes=tuple(probes),
            probe_s=time.monotonic() - committed_s,
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
        failure = WeightSyncError(
            f"server {member.address} received other bytes than were sent: {len(names)} of "
            f"{len(self._manifest.tensors)} tensors differ, the first is {names[0] if names else 'missing'}"
        )
        failure.server = member.address
        raise failure


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    commit: CommitReport
    commit_s: float
    probes: tuple[ProbeReport, ...]
    probe_s: float
    """Of all of them."""
