"""DeepSpeed's own checkpoint files, written without leaving a rank behind and read without running code."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

PARTITIONS = "partitions"
"""Folder of DeepSpeed's own files within a checkpoint: its tag."""


def outside_file(folder: Path, rank: int) -> Path:
    """Of what is not DeepSpeed's: parameters outside its engine, and where the schedule stands."""
    return folder / f"outside-{rank}.pt"


class PatientWriter(TorchCheckpointEngine):  # type: ignore[misc]
    """Remembers what it could not write instead of raising: the other ranks wait in a barrier after their own files.

    It leaves out DeepSpeed's settings, an object of its own, so that everything can be read without running code.
    """

    failure: str | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self.failure = f"{path} cannot be made: {error}"

    def save(self, state_dict: dict[str, object], path: str) -> None:
        try:
            torch.save({key: value for key, value in state_dict.items() if key != "ds_config"}, path)
        except (OSError, RuntimeError) as error:
            self.failure = f"{path} cannot be written: {error}"

    def load(self, path: str, map_location: torch.device | None = None) -> object:
        with torch.serialization.safe_globals(_own_classes_in(path)):
            return torch.load(path, map_location=map_location, weights_only=True)


def _own_classes_in(path: str) -> list[Callable[..., object] | tuple[Callable[..., object], str]]:
    """DeepSpeed's small classes (a stage, a loss scaler, places of tensors) that a file holds; others are refused."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    places = [name.rsplit(".", 1) for name in names if name.startswith("deepspeed.")]
    return [getattr(importlib.import_module(module), name) for module, name in places]


def use_patient_writer(engine: deepspeed.DeepSpeedEngine) -> PatientWriter:
    """Have the engine write through a `PatientWriter`."""
    writer = PatientWriter()
    engine.checkpoint_engine = writer
    # It copies scripts for other programs beside each checkpoint, and could fail on rank 0 alone.
    engine._copy_recovery_script = lambda folder: None
    return writer
