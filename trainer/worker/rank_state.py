"""What a rank keeps for a resume beside its engine's own: random state, and how often a step was not finite; and how it
makes room for another group on its device."""

import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from asyppo_async.errors import CheckpointError
from asyppo_async.trainer.worker.away import Away, release_device
from asyppo_async.trainer.worker.backend.protocol import Backend
from asyppo_async.trainer.worker.control import SeeFolder
from asyppo_async.trainer.worker.steps import Stepper
from asyppo_async.trainer.worker.world import World

logger = logging.getLogger(__name__)

NONCE_FILE = "nonce"


class RankState:
    """Saves and restores one rank; all ranks of a group write into one folder, and no rank waits for another."""

    def __init__(
        self,
        backend: Backend,
        stepper: Stepper,
        world: World,
        after_restore: Callable[[], None] = lambda: None,
        *,
        base_checksum: str = "",
        beside: nn.Module | None = None,
    ) -> None:
        """Args:
        backend: saves what trains.
        stepper: counts steps that were not finite.
        world: of the rank.
        after_restore: for what follows from the weights; every rank calls it.
        base_checksum: of weights that do not train and are not saved; adapters belong to exactly these.
        beside: a model that does not train, and so has no state to save.
        """
        self._after_restore = after_restore
        self._base_checksum = base_checksum
        self._backend = backend
        self._beside = beside
        self._away = Away()
        self._stepper = stepper
        self._rank = world.rank
        self._num_ranks = world.size

    def save(self, folder: Path) -> None:
        """Raises:
        CheckpointError: This rank could not write; training may go on.
        """
        try:
            self._save_own(folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"rank {self._rank} cannot write into {folder}: {error}") from error
        self._backend.save_state(folder)

    def restore(self, folder: Path, *, average: bool = False) -> None:
        """Of a group of any number of ranks; one that is new goes on with the random state that it has.

        `average`: the moving average in the place of the weights.

        Raises:
            CheckpointError: The files are not those of this group.
        """
        self._check_base(folder)
        self._backend.load_state(folder, average=average)
        self._restore_own(folder)
        self._after_restore()

    def _check_base(self, folder: Path) -> None:
        if self._numbers_of_first(folder).get("base_checksum", "") != self._base_checksum:
            raise CheckpointError(
                f"{folder} holds adapters for other weights than those that are loaded: the model's folder has changed "
                "since, or lora_rank was set or taken away; resume with the model and settings of the run"
            )

    def _numbers_of_first(self, folder: Path) -> dict[str, Any]:
        try:
            numbers: dict[str, Any] = json.loads(self._numbers(folder, 0).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"rank {self._rank} finds no state in {folder}: {error}") from error
        return numbers

    def _restore_own(self, folder: Path) -> None:
        numbers = self._numbers_of_first(folder)
        try:
            # What is counted is decided together, so it is the same at all ranks.
            self._stepper.num_non_finite = int(numbers["num_non_finite"])
            if self._rank >= int(numbers["num_ranks"]):
                return
            numbers = json.loads(self._numbers(folder, self._rank).read_text(encoding="utf-8"))
            states = load_file(self._random(folder))
            version, internal, gauss = numbers["python"]
            random.setstate((version, tuple(internal), gauss))
            np.random.set_state({**numbers["numpy"], "state": _numpy_keys(numbers["numpy"]["state"])})
            torch.set_rng_state(states.pop("cpu"))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(
                f"rank {self._rank} finds no state of its own in {folder}: {error}"
            ) from error
        for name, state in states.items():
            # Fewer devices may be here than there were.
            if int(name.removeprefix("cuda:")) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, name)

    def to_host(self, *, weights: bool) -> None:
        """Leave the device to another group; the model beside it moves with the weights."""
        started_s = time.monotonic()
        self._backend.to_host(weights=weights)
        if weights and self._beside is not None:
            self._away.send([*self._beside.parameters(), *self._beside.buffers()])
        logger.debug("moved to host memory in %.2f s", release_device() - started_s)

    def to_device(self) -> None:
        """Come back to it."""
        started_s = time.monotonic()
        self._backend.to_device()
        self._away.bring_back()
        logger.debug("moved to the device in %.2f s", release_device() - started_s)

    def see(self, request: SeeFolder) -> None:
        """Prove that this rank sees the coordinator's folder, and that the coordinator sees what it writes there.

        Raises:
            CheckpointError: It does not; says where.
        """
        folder = Path(request.folder)
        try:
            nonce = (folder / NONCE_FILE).read_text(encoding="utf-8")
            (folder / f"rank-{self._rank}").write_text(nonce, encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                f"rank {self._rank} cannot use {folder}: {error.strerror or error}"
            ) from error
        if nonce != request.nonce:
            raise CheckpointError(
                f"rank {self._rank} has another folder at {folder}: it holds the nonce of another run"
            )

    def _save_own(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        states = {"cpu": torch.get_rng_state()}
        for index in range(torch.cuda.device_count()):
            states[f"cuda:{index}"] = torch.cuda.get_rng_state(index)
        save_file(states, self._random(folder))
        numpy_state = np.random.get_state(legacy=False)
        assert isinstance(numpy_state, dict)
        keys = numpy_state["state"]
        numbers = {
            "num_ranks": self._num_ranks,
            "num_non_finite": self._stepper.num_non_finite,
            "base_checksum": self._base_checksum,
            "python": random.getstate(),
            "numpy": {**numpy_state, "state": {**keys, "key": keys["key"].tolist()}},
        }
        self._numbers(folder, self._rank).write_text(json.dumps(numbers), encoding="utf-8")

    def _random(self, folder: Path) -> Path:
        return folder / f"random-{self._rank}.safetensors"

    def _numbers(self, folder: Path, rank: int) -> Path:
        return folder / f"rank-{rank}.json"


def _numpy_keys(state: dict[str, object]) -> dict[str, object]:
    return {**state, "key": np.array(state["key"], dtype=np.uint32)}
