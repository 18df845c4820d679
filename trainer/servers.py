"""The servers of a run over all its lives: given ones, or one on this machine that stays up while groups come back."""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from asyppo_async.config.sections import TrainConfig
from asyppo_async.trainer.coordinator.embedded_fleet import ChildServer, embedded_fleet
from asyppo_async.trainer.run_folder import RunFolder


class Servers:
    """Opens nothing until the addresses are asked for, so that the server starts beside the worker groups."""

    def __init__(self, config: TrainConfig, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._stack = AsyncExitStack()
        self._embedded: ChildServer | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def addresses(self) -> tuple[str, ...]:
        """Where they are; an embedded server that has ended, or never was, is started.

        Raises:
            FleetUnavailable: it ended, or was not ready in time; with the last lines of its log.
        """
        if self._config.fleet.servers:
            return self._config.fleet.servers
        if self._embedded is None or self._embedded.has_ended:
            await self._stack.aclose()
            self._embedded = await self._stack.enter_async_context(
                embedded_fleet(self._config, self._folder.logs)
            )
        return (self._embedded.address,)
