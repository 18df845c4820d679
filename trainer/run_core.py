"""The decision core of a run, from its settings and, where it is resumed, from its checkpoint."""

import time

from asyppo_async.config.sections import TrainConfig
from asyppo_async.rpc.codec import SampleTokens
from asyppo_async.trainer.coordinator.core import DecisionCore
from asyppo_async.trainer.coordinator.cut import Restored
from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.sampler import Sampler
from asyppo_async.types import Group


def open_core(config: TrainConfig, sampler: Sampler, restored: Restored | None) -> DecisionCore:
    """A new one, or one that goes on from a checkpoint."""
    settings, debug = decision_settings(config), config.run.debug
    if restored is None:
        return DecisionCore(settings=settings, sampler=sampler, debug=debug)
    return DecisionCore.from_state(
        restored.state.core,
        settings=settings,
        sampler=sampler,
        restored_draw_ids={*restored.begun, *(group.draw_id for group in restored.groups)},
        now_s=time.monotonic(),
        debug=debug,
    )


def queued_groups(core: DecisionCore, restored: Restored | None) -> list[Group]:
    """The groups that the core has kept: not those that other settings made it give back."""
    if restored is None:
        return []
    queued = {record.draw_id for record in core.live() if record.state == "queued"}
    return [group for group in restored.groups if group.draw_id in queued]


def begun_samples(core: DecisionCore, restored: Restored | None) -> dict[int, tuple[SampleTokens, ...]]:
    """By draw, what there is of the groups that the core has kept in flight."""
    if restored is None:
        return {}
    in_flight = {record.draw_id for record in core.live() if record.state == "in_flight"}
    return {draw_id: samples for draw_id, samples in restored.begun.items() if draw_id in in_flight}


def decision_settings(config: TrainConfig) -> DecisionSettings:
    """What the decision core reads of the configuration."""
    staleness = config.staleness
    return DecisionSettings(
        batch_size=config.batch.prompts,
        group_size=config.batch.group_size,
        num_critics=config.critic.count,
        max_staleness=staleness.max_staleness,
        on_stale=staleness.on_stale,
        lead=staleness.lead,
        max_attempts=staleness.max_attempts,
        max_concurrent_groups=staleness.max_concurrent_groups,
        max_replacements_per_step=staleness.max_replacements_per_step,
        num_steps=config.run.num_steps,
    )
