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
from asyppo_async.errors import WeightSyncError
from asyppo_async.rpc.calls import CommitReport, ProbeReport, StageReport
from asyppo_async.trainer.coordinator.membership import Fleet, Member
from asyppo_async.trainer.coordinator.pace import Pace
from asyppo_async.trainer.coordinator.probing import ProbePlan, ServerGap, check_fresh, gaps_of
from asyppo_async.trainer.coordinator.publication import Publication, Timings, bound_from
from asyppo_async.trainer.coordinator.together import beside, together
from asyppo_async.trainer.coordinator.weight_session import EPOCH, WeightSender, phase, weight_session
from asyppo_async.trainer.worker.messages import SendResult
from asyppo_async.weights.manifest import Manifest

_log = logging.getLogger(__name__)

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
    manifest = await sender.manifest()
    async with weight_session(sender, fleet, settings, manifest, host):
        publisher = Publisher(sender, fleet, settings, plan, manifest)
        publisher.first = first = await publisher.publish(version)
        _log.info("first publication: gap %.2e nats, bound %.2e", first.mean_gap, first.bound)
        yield publisher


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
            with phase("verdict", version):
                await together(
                    [
                        member.client.verdict(EPOCH, version, passed, self._settings.min_deadline_s)
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
        with phase("set version", version):
            await together(
                [
                    member.client.set_version(EPOCH, version, self._settings.min_deadline_s)
                    for member in self._fleet.members
                ]
            )

    async def _attempt(self, version: int, attempt: int) -> Publication:
        members = self._fleet.members
        started_s = time.monotonic()
        sent = await self._stage(version)
        staged_s = time.monotonic()
        with phase("commit", version):
            # The actor scores what it can while the servers load; theirs is what holds tokens back.
            fixed, loads = await beside(
                self._sender.forward(self._plan.fixed_request()),
                [self._load(member, version, sent) for member in members],
            )
        loaded_s = time.monotonic()
        probes = [load.probe for load in loads]
        with phase("score", version):
            sampled = await self._sender.forward(self._plan.sampled_request(probes))
        servers = gaps_of([member.address for member in members], probes, fixed, sampled)
        return Publication(
            version=version,
            num_bytes=sent.num_bytes,
            attempts=attempt,
            timings=Timings(
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

    async def _stage(self, version: int) -> SendResult:
        """All bytes to all servers, while they generate."""
        members = self._fleet.members
        with phase("stage", version), self._pace.timed("stage"):
            deadline_s = self._pace.deadline_s("stage")
            sent, staged = await beside(
                self._sender.send_weights(version, deadline_s),
                [member.client.stage(EPOCH, version, deadline_s) for member in members],
            )
            for member, report in zip(members, staged, strict=True):
                self._check_bytes(member, sent, report)
        return sent

    async def _load(self, member: Member, version: int, sent: SendResult) -> "_Load":
        """One server's commit and probe."""
        client, plan, pace = member.client, self._plan, self._pace
        started_s = time.monotonic()
        with phase("commit", version), pace.timed("commit"):
            commit = await client.commit(
                EPOCH, version, sent.checksums, self._settings.kv_on_update, pace.deadline_s("commit")
            )
        committed_s = time.monotonic()
        with phase("probe", version), pace.timed("probe"):
            probe = await client.probe(
                EPOCH, version, plan.fixed, plan.prompts, plan.sampling, pace.deadline_s("probe")
            )
            check_fresh(member.address, version, probe)
        return _Load(
            commit=commit,
            commit_s=committed_s - started_s,
            probe=probe,
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
        raise WeightSyncError(
            f"server {member.address} received other bytes than were sent: {len(names)} of "
            f"{len(self._manifest.tensors)} tensors differ, the first is {names[0] if names else 'missing'}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    commit: CommitReport
    commit_s: float
    probe: ProbeReport
    probe_s: float


def _words(gap: ServerGap, bound: float) -> str:
    return (
        f"server {gap.address}: engine and trainer differ by {gap.mean:.3g} nats on average (prefill "
        f"{gap.fixed.mean:.3g}, sampled {gap.sampled.mean:.3g}, worst token "
        f"{max(gap.fixed.max, gap.sampled.max):.3g}), the bound is {bound:.3g}"
    )
