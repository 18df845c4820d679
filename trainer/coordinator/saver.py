"""Saving the run: when, who writes what, and how many failures it stands."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from asyppo_async.config.checkpoint import CheckpointSection
from asyppo_async.errors import CheckpointError
from asyppo_async.metrics import Metrics
from asyppo_async.trainer.coordinator.checkpoint import CheckpointFolder
from asyppo_async.trainer.coordinator.cut import Cut, write_cut

_log = logging.getLogger(__name__)

_LAST_WORK_S = 120.0
"""A disk that takes longer hangs."""

T = TypeVar("T")


class StatefulGroup(Protocol):
    """A worker group, as a checkpoint sees it."""

    async def save(self, folder: Path) -> None:
        """Write this group's part below `folder`, as it is between two training steps."""
        ...


class Saver:
    """Writes checkpoints beside the run.

    Groups are asked between two steps, so what they write stands behind the same step as the cut. The trainer waits
    for them; checking and renaming, which take longest, go on beside the next steps. Generation never waits.
    """

    def __init__(
        self,
        *,
        settings: CheckpointSection,
        folder: CheckpointFolder,
        groups: Sequence[StatefulGroup],
        prompts_crc32: int,
        tally: Callable[[], str],
    ) -> None:
        """`tally`: what the summary has added up, as JSON; asked for in the same turn as the cut is written."""
        self._settings = settings
        self._folder = folder
        self._groups = tuple(groups)
        self._prompts_crc32 = prompts_crc32
        self._tally = tally
        self._last_s = time.monotonic()
        self._num_failures = 0
        self._metrics: Metrics = {}
        self.saved_version = -1
        """Of the newest checkpoint that this process has completed."""

    @property
    def at_end(self) -> bool:
        return self._settings.at_end

    def is_due(self, version: int) -> bool:
        """Whether a checkpoint is wanted behind that many steps."""
        every_steps, every_s = self._settings.every_steps, 60 * self._settings.every_minutes
        by_steps = every_steps > 0 and version % every_steps == 0
        return by_steps or (every_s > 0 and time.monotonic() - self._last_s >= every_s)

    async def write(self, cut: Cut) -> Path | None:
        """Have everybody write. None: it failed, and the run goes on.

        Raises:
            CheckpointError: It failed more often in a row than the budget allows.
            WorkerError: A group is lost.
        """
        started_s = self._last_s = time.monotonic()
        tally = self._tally()
        partial: Path | None = None
        try:
            partial = folder = await asyncio.to_thread(self._folder.begin)
            await _all_of(
                _to_its_end(lambda: write_cut(folder, cut, prompts_crc32=self._prompts_crc32, tally=tally)),
                *(group.save(folder) for group in self._groups),
            )
        except (OSError, CheckpointError) as error:
            await self._failed(cut.core.version, partial, error)
            return None
        self._metrics["checkpoint/write_s"] = time.monotonic() - started_s
        return partial

    async def commit(self, partial: Path, version: int) -> None:
        """Make it the newest checkpoint; raises as `write`."""
        started_s = time.monotonic()
        try:
            saved = await _to_its_end(lambda: self._folder.commit(partial, version))
        except OSError as error:
            await self._failed(version, partial, error)
            return
        self._num_failures = 0
        self.saved_version = version
        self._metrics["checkpoint/commit_s"] = time.monotonic() - started_s
        _log.info("checkpoint: version=%d, %s", version, saved.folder)

    def take_metrics(self) -> Metrics:
        """What was measured since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def _failed(self, version: int, partial: Path | None, error: Exception) -> None:
        self._num_failures += 1
        budget = self._settings.failure_budget
        words = f"the checkpoint of version {version} failed: {error}"
        if partial is not None:
            await asyncio.to_thread(self._folder.discard, partial)
        if self._num_failures > budget:
            raise CheckpointError(
                f"{words}; {self._num_failures} in a row (checkpoint.failure_budget = {budget}): make room in "
                f"{self._folder.folder}, then `asyppo-train resume`"
            ) from error
        _log.warning("%s; the run goes on, and could only be resumed from the one before", words)


async def _to_its_end(work: Callable[[], T]) -> T:
    """In a thread; where the run ends meanwhile, its end waits for it: the next life reads the same folder."""
    thread = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread], timeout=_LAST_WORK_S)
        raise


async def _all_of(*parts: Coroutine[object, object, None]) -> None:
    """Wait for all, also where one fails: a group that is left in the middle of a request is of no more use."""
    failures: list[OSError | CheckpointError] = []

    async def outcome(part: Coroutine[object, object, None]) -> None:
        try:
            await part
        except (OSError, CheckpointError) as error:
            failures.append(error)

    async with asyncio.TaskGroup() as tasks:
        for part in parts:
            tasks.create_task(outcome(part))
    if failures:
        raise failures[0]
