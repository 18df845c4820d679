"""The calls of a weight session, to one server, in the order in which a publication makes them.

Each has a deadline as long as its work may take, minutes with a large model; a server that is stopped or cut off
meanwhile is noticed by its silence, in seconds.
"""

from collections.abc import Sequence
from typing import Any

from asyppo_async.rpc.calls import (
    CommitReport,
    KvOnUpdate,
    ProbeReport,
    SessionPlace,
    StageReport,
    probe_report_of,
)
from asyppo_async.rpc.connection import Connection
from asyppo_async.rpc.pulse import Pulse
from asyppo_async.rpc.requests import open_session_request, probe_request, stage_request
from asyppo_async.rpc.v1 import fleet_pb2
from asyppo_async.types import Int32Array, SamplingParams
from asyppo_async.weights.manifest import Manifest

ANSWER_S = 2.0
"""A server that has been told a deadline has this time beyond it to say what it was waiting for."""


class WeightCalls:
    def __init__(self, connection: Connection, pulse: Pulse) -> None:
        self._connection = connection
        self._pulse = pulse

    async def open_session(self, place: SessionPlace, manifest: Manifest, deadline_s: float) -> int:
        """Join the process group and compare the manifests; returns when all ranks have met.

        Returns:
            The version of this run that the server holds in host memory, for a delta; -1: none.
        """
        request = open_session_request(place, manifest, deadline_s)
        message = await self._call("OpenSession", request, deadline_s + ANSWER_S)
        return int(message.held_version)

    async def stage(
        self,
        epoch: int,
        version: int,
        deadline_s: float,
        *,
        base_version: int = -1,
        kv_on_update: KvOnUpdate = "keep",
    ) -> StageReport:
        """Receive one version; returns when all of it is there.

        A delta may come against `base_version`; -1: all bytes are sent. The direct way pauses here already, and reads
        `kv_on_update`.
        """
        request = stage_request(epoch, version, deadline_s, base_version, kv_on_update)
        message = await self._call("Stage", request, deadline_s + ANSWER_S)
        return StageReport(
            checksums=tuple(message.checksums), num_bytes=message.num_bytes, receive_s=message.receive_s
        )

    async def commit(
        self, epoch: int, version: int, checksums: Sequence[int], kv_on_update: KvOnUpdate, deadline_s: float
    ) -> CommitReport:
        """Pause, load, resume on probation."""
        request = fleet_pb2.CommitRequest(
            epoch=epoch, version=version, checksums=checksums, kv_on_update=kv_on_update
        )
        message = await self._call("Commit", request, deadline_s)
        return CommitReport(pause_s=message.pause_s, load_s=message.load_s, resume_s=message.resume_s)

    async def probe(
        self,
        epoch: int,
        version: int,
        fixed: Sequence[Int32Array],
        prompts: Sequence[Int32Array],
        sampling: SamplingParams,
        deadline_s: float,
    ) -> ProbeReport:
        """Score the fixed sequences and continue the prompts with the weights on probation."""
        request = probe_request(epoch, version, fixed, prompts, sampling, deadline_s)
        message = await self._call("Probe", request, deadline_s + ANSWER_S)
        with self._connection.checking("Probe"):
            return probe_report_of(message, fixed, len(prompts))

    async def verdict(self, epoch: int, version: int, passed: bool, deadline_s: float) -> None:
        """End the probation."""
        request = fleet_pb2.VerdictRequest(epoch=epoch, version=version, passed=passed)
        await self._call("Verdict", request, deadline_s)

    async def set_version(self, epoch: int, version: int, deadline_s: float) -> None:
        """Give the served weights a new number."""
        request = fleet_pb2.SetVersionRequest(epoch=epoch, version=version)
        await self._call("SetVersion", request, deadline_s)

    async def close_session(self, epoch: int, deadline_s: float) -> None:
        """Leave the process group; the served weights stay."""
        request = fleet_pb2.CloseSessionRequest(epoch=epoch)
        await self._call("CloseSession", request, deadline_s)

    async def _call(self, name: str, request: object, deadline_s: float) -> Any:
        method = getattr(self._connection.session, name)

        async def watched(request: object, **options: Any) -> Any:
            return await self._pulse.answer(name, method(request, **options))

        return await self._connection.call(name, watched, request, deadline_s)
