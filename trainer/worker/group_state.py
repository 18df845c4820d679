"""What one group keeps for a resume, as the coordinator sees it: saved, restored, and where it can be kept at all."""

import asyncio
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from asyppo_async.errors import CheckpointError
from asyppo_async.trainer.worker.control import RestoreState, SaveState, SeeFolder
from asyppo_async.trainer.worker.rank_state import NONCE_FILE
from asyppo_async.trainer.worker.ranks import Ranks


class GroupState:
    """Requests go to every rank, behind those that were made before: a state is that between two training steps."""

    def __init__(self, name: str, ranks: Ranks, request_timeout_s: float) -> None:
        """`name`: of the group's folder within a checkpoint."""
        self.name = name
        self._ranks = ranks
        self._request_timeout_s = request_timeout_s

    async def save(self, folder: Path) -> None:
        """Every rank writes its part below `folder`.

        Raises:
            CheckpointError: One of them could not; the group goes on.
        """
        requests = [SaveState(folder=str(folder / self.name))] * self._ranks.size
        await self._ranks.ask(requests, self._request_timeout_s)

    async def restore(self, folder: Path, *, average: bool = False) -> None:
        """Every rank becomes what it was; `average`: with the moving average in the place of the weights.

        Raises:
            CheckpointError: What is there is not of this group.
        """
        request = RestoreState(folder=str(folder / self.name), average=average)
        requests = [request] * self._ranks.size
        await self._ranks.ask(requests, self._request_timeout_s)

    async def see(self, folder: Path, nonce: str) -> None:
        """Have every rank read `nonce` below `folder` and write it back.

        Raises:
            CheckpointError: A rank sees another folder, or writes into another one.
        """
        own = folder / self.name
        own.mkdir(parents=True, exist_ok=True)
        (own / NONCE_FILE).write_text(nonce, encoding="utf-8")
        requests = [SeeFolder(folder=str(own), nonce=nonce)] * self._ranks.size
        await self._ranks.ask(requests, self._request_timeout_s)
        for rank, label in enumerate(self._ranks.labels):
            answer = own / f"rank-{rank}"
            if not answer.is_file() or answer.read_text(encoding="utf-8") != nonce:
                raise CheckpointError(f"what {label} writes into {own} does not arrive here")


async def check_folder_is_seen(folder: Path, states: Sequence[GroupState]) -> None:
    """Have every rank of all groups exchange a random number with this process through the folder of the run.

    Raises:
        CheckpointError: A rank does not see it, so checkpoints would be in pieces on several machines.
    """
    meeting, nonce = folder / ".seen", secrets.token_hex(8)
    try:
        for state in states:
            await state.see(meeting, nonce)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; put run.folder on a file system that every rank sees under the same path, or turn checkpoints "
            "off (checkpoint.every_minutes=0, every_steps=0, at_end=false)"
        ) from None
    finally:
        await asyncio.to_thread(shutil.rmtree, meeting, True)
