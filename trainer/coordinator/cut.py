"""The coordinator at one instant between two steps, and as a folder of a checkpoint.

`Cut` is taken within one turn of the event loop, in which a step has ended and nothing else happens: only references
and quick copies. Everything slow (JSON, arrays, disk) is done from it in a thread, while the run goes on.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from asyppo_async.algorithms.confidence import CalibrationError
from asyppo_async.algorithms.trust_masks import EntropyTracker
from asyppo_async.errors import CheckpointError, ConfigError
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.trainer.coordinator.begun_groups import BegunGroup, read_begun, write_begun
from asyppo_async.trainer.coordinator.decisions import CoreState
from asyppo_async.trainer.coordinator.kept_groups import read_groups, write_groups
from asyppo_async.trainer.coordinator.memory import StepMemory
from asyppo_async.trainer.coordinator.prompt_table import PromptTable, PromptTableState
from asyppo_async.trainer.coordinator.selection import SelectionState
from asyppo_async.types import Group, Prompt, SamplingParams

_STATE_FILE = "run.json"
_GROUPS_FILE = "groups.npz"
_BEGUN_FILE = "begun.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What the coordinator knows when `core.version` steps have ended."""

    core: CoreState
    groups: tuple[Group, ...]
    """Finished, and in no step yet."""
    begun: tuple[BegunGroup, ...]
    """In flight, as far as something has arrived."""
    sampling: SamplingParams
    """Of what is begun."""
    memory: StepMemory
    table: PromptTable
    """A copy."""
    selection: Callable[[], SelectionState] | None
    """Makes the state of a selecting sampler as it was; None: prompts go by epochs."""
    lost_members: Mapping[str, int]
    clock_s: float
    """Monotonic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """`Cut` without arrays, JSON-able."""

    __pydantic_config__: ClassVar = ConfigDict(ser_json_inf_nan="constants")

    core: CoreState
    table: PromptTableState
    selection: SelectionState | None
    lost_members: dict[str, int]
    calibration: list[list[float]] | None
    """[M, K] of `StepMemory`."""
    entropy: EntropyTracker | None
    clock_s: float
    prompts_crc32: int
    """Of the ids of the training prompts in their order."""
    tally: str
    """What the summary had added up, as JSON of its own."""
    sampling: SamplingParams | None = None
    """Of what was begun; None: of a run that did not keep it."""

    @property
    def memory(self) -> StepMemory:
        errors = None if self.calibration is None else torch.tensor(self.calibration, dtype=torch.float64)
        return StepMemory(
            calibration=None if errors is None else CalibrationError(errors=errors), entropy=self.entropy
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a resumed coordinator starts from."""

    folder: Path
    """The checkpoint; the groups find their part in it."""
    state: RunState
    """Times are those of the present clock."""
    groups: tuple[Group, ...]
    begun: Mapping[int, tuple[SampleTokens, ...]]
    """By draw."""


def crc32_of(prompts: Mapping[str, Prompt]) -> int:
    """Tells one data set from another: a cursor means nothing in another order."""
    return zlib.crc32("\n".join(prompts).encode())


def write_cut(folder: Path, cut: Cut, *, prompts_crc32: int, tally: str) -> None:
    """Write the coordinator's part of a checkpoint."""
    calibration = cut.memory.calibration
    state = RunState(
        core=cut.core,
        table=cut.table.state(),
        selection=None if cut.selection is None else cut.selection(),
        lost_members=dict(cut.lost_members),
        calibration=None if calibration is None else calibration.errors.tolist(),
        entropy=cut.memory.entropy,
        clock_s=cut.clock_s,
        prompts_crc32=prompts_crc32,
        tally=tally,
        sampling=cut.sampling,
    )
    (folder / _STATE_FILE).write_bytes(TypeAdapter(RunState).dump_json(state))
    write_groups(folder / _GROUPS_FILE, cut.groups)
    write_begun(folder / _BEGUN_FILE, cut.begun)


def read_cut(folder: Path, prompts: Mapping[str, Prompt], sampling: SamplingParams, now_s: float) -> Restored:
    """What `write_cut` wrote.

    Args:
        folder: Of the checkpoint, verified.
        prompts: The training prompts by id.
        sampling: What was begun under other parameters does not go on.
        now_s: Monotonic; how long the run was away counts for nothing.

    Raises:
        CheckpointError: It cannot be understood.
        ConfigError: The training prompts are not those of the run.
    """
    path = folder / _STATE_FILE
    try:
        state = TypeAdapter(RunState).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path} is no state of a run: {error}") from error
    if state.prompts_crc32 != crc32_of(prompts):
        raise ConfigError(
            f"the {len(prompts)} training prompts are not those, or not in the order, that the run has used so far: "
            "restore the data and the settings of its tasks"
        )
    later_s = now_s - state.clock_s
    records = tuple(
        replace(record, admitted_s=record.admitted_s + later_s, finished_s=record.finished_s + later_s)
        for record in state.core.records
    )
    groups = read_groups(folder / _GROUPS_FILE, prompts, later_s)
    return Restored(
        folder=folder,
        state=replace(state, core=replace(state.core, records=records), clock_s=now_s),
        groups=tuple(groups),
        begun=read_begun(folder / _BEGUN_FILE) if state.sampling == sampling else {},
    )
