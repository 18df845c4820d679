"""Settings, reports and the checkpoint of the decision core."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.draws import DrawRecord, News, TokenUse, Totals
from asyppo_async.trainer.coordinator.order import ChosenDraw

Lead = Literal["saturated", "auto"]
OnStale = Literal["wait", "mask", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionSettings:
    """What the decision core is told by the configuration."""

    batch_size: int
    """Groups of one training step."""
    group_size: int
    """Responses of one group."""
    num_critics: int
    max_staleness: int
    on_stale: OnStale
    lead: Lead
    max_attempts: int
    """Attempts per draw; after the last one has failed the draw is dropped."""
    max_concurrent_groups: int
    """Groups in flight at once, over the whole fleet."""
    max_replacements_per_step: int
    """Draws that may be filtered or dropped between two batches before the run ends with an error."""
    num_steps: int | None
    """Last step of the run, as a count; None: as long as the sampler has prompts."""

    def __post_init__(self) -> None:
        least = {
            "batch_size": 1,
            "group_size": 1,
            "num_critics": 0,
            "max_staleness": 0,
            "max_attempts": 1,
            "max_concurrent_groups": 1,
            "max_replacements_per_step": 1,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1 or absent, got {self.num_steps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did with its batch, and what else ended since the step before."""

    step: int
    draws: tuple[ChosenDraw, ...]
    use: TokenUse
    waited_s: float
    step_s: float
    """From `begin_step` to `end_step`."""
    lead_limit: int
    news: News


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreState:
    """A checkpoint of the decision core, JSON-able."""

    version: int
    batch_size: int
    max_staleness: int
    records: tuple[DrawRecord, ...]
    totals: Totals
    lead_limit: int
    max_staleness_seen: int

    def going_on(self, settings: DecisionSettings, restored_draw_ids: Collection[int]) -> set[int]:
        """The draws that are still where they were: all that was restored of the queue, and what was restored of the
        groups in flight, as many as may be, unless their step is past.

        None where the queue was filled under another order rule.
        """
        if not self.has_rule_of(settings):
            return set()
        restored = [record for record in self.records if record.draw_id in restored_draw_ids]
        in_flight = [
            record.draw_id
            for record in restored
            if record.state == "in_flight"
            and record.admission_version + settings.max_staleness >= self.version
        ]
        queued = [record.draw_id for record in restored if record.state != "in_flight"]
        return {*queued, *in_flight[: settings.max_concurrent_groups]}

    def has_rule_of(self, settings: DecisionSettings) -> bool:
        """Whether the queue was filled under the same order rule."""
        return (self.batch_size, self.max_staleness) == (settings.batch_size, settings.max_staleness)

    def to_json(self) -> str:
        return TypeAdapter(CoreState).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "CoreState":
        return TypeAdapter(CoreState).validate_json(text)
