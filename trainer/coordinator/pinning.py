"""One version for the whole of an evaluation: a server stands aside for it, or publications wait a bounded time.

On a fleet of several, one member skips publications until the evaluation is done; the next publication brings it up
to date, as it would a joiner. Where that would leave nobody to train with, publications wait (design section 8).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from asyppo_async.errors import FleetUnavailable
from asyppo_async.rpc.member import Member
from asyppo_async.trainer.coordinator.generated import Generated, Generator
from asyppo_async.types import Prompt, SamplingParams


class Servers(Generator, Protocol):
    """The fleet, as an evaluation sees it."""

    async def generate_on(
        self,
        member: Member,
        prompt: Prompt,
        *,
        num_samples: int,
        sampling: SamplingParams,
        deadline_s: float,
        on_tokens: Callable[[int], None],
    ) -> Generated: ...

    async def is_there(self, member: Member) -> bool: ...

    async def set_aside(self) -> Member | None: ...

    def bring_back(self) -> None: ...


class Pin:
    """What an evaluation generates with, and what keeping its version cost."""

    def __init__(self, fleet: Servers, member: Member | None) -> None:
        self._fleet = fleet
        self.member = member
        """The one that stands aside; None: any current member."""
        self.held_s = 0.0
        """Time that publications waited."""
        self.skipped_publications = 0
        """Publications that the member missed."""
        self.trainer_wait_s = 0.0
        """Time that the training loop waited, for batches or for a held publication."""

    async def generate(
        self,
        prompt: Prompt,
        *,
        num_samples: int,
        sampling: SamplingParams,
        deadline_s: float,
        on_tokens: Callable[[int], None],
    ) -> Generated:
        """All responses of one prompt, from the member that stands aside, if there is one and it is not lost.

        Raises:
            FleetUnavailable: not all of them were finished by the deadline.
        """
        generated = None
        member = self.member
        if member is not None:
            try:
                generated = await self._fleet.generate_on(
                    member,
                    prompt,
                    num_samples=num_samples,
                    sampling=sampling,
                    deadline_s=deadline_s,
                    on_tokens=on_tokens,
                )
            except FleetUnavailable:
                if await self._fleet.is_there(member):
                    raise
                self.member = None  # the row will say if its responses are of several versions
        if generated is None:
            generated = await self._fleet.generate(
                prompt,
                num_samples=num_samples,
                sampling=sampling,
                deadline_s=deadline_s,
                on_tokens=on_tokens,
                on_server=lambda _: None,
            )
        if generated.missing:
            raise FleetUnavailable(
                f"server {generated.server}: samples {list(generated.missing)} of an evaluation were not finished "
                f"by the deadline {deadline_s:g} s; raise fleet.group_deadline_s"
            )
        return generated


class Pinning:
    """Between the evaluation, which wants its version to stay, and the loop, which wants to publish."""

    def __init__(self, fleet: Servers, hold_s: float) -> None:
        """Args:
        fleet: of the run.
        hold_s: longest wait of publications for one evaluation.
        """
        self._fleet = fleet
        self._hold_s = hold_s
        self._pin: Pin | None = None
        self._free = asyncio.Event()
        self._free.set()

    @asynccontextmanager
    async def beside_training(self) -> AsyncIterator[Pin]:
        """Within the block the version of the pin's member stays, or publications wait, at most `hold_s`."""
        self._pin = pin = Pin(self._fleet, await self._fleet.set_aside())
        if pin.member is None:
            self._free.clear()
        try:
            yield pin
        finally:
            self._pin = None
            self._fleet.bring_back()
            self._free.set()

    def on_whole_fleet(self) -> Pin:
        """For an evaluation during which nobody publishes."""
        return Pin(self._fleet, None)

    def note_wait(self, seconds: float) -> None:
        """The training loop waited for so long, for a batch."""
        if self._pin is not None:
            self._pin.trainer_wait_s += seconds

    async def before_publication(self) -> None:
        """Waits for: the evaluation on the only member, at most `hold_s`. Unblocked by: its end."""
        pin = self._pin
        if pin is None:
            return
        if pin.member is not None:
            pin.skipped_publications += 1
            return
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._hold_s):
                await self._free.wait()
        except TimeoutError:
            self._free.set()  # it had its time: responses that cross the version are made again
        held_s = time.monotonic() - started_s
        pin.held_s += held_s
        pin.trainer_wait_s += held_s
