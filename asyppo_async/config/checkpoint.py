"""When a run saves itself, so that `asyppo-train resume` can go on from there."""

from pydantic import Field

from asyppo_async.config.base import Section


class CheckpointSection(Section):
    every_steps: int = Field(default=0, ge=0)
    """Save after every so many training steps; 0: not by steps."""
    every_minutes: float = Field(default=15, ge=0)
    """Save after the first step that ends so long after the last checkpoint; 0: not by time."""
    at_end: bool = True
    """Save when a signal ends the run, and after its last step."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints that are kept; older ones are deleted. With 1 there is none to fall back to."""
    failure_budget: int = Field(default=3, ge=0)
    """Checkpoints in a row that may fail (disk full) before the run ends; training goes on meanwhile."""

    @property
    def is_on(self) -> bool:
        """Whether the run saves itself at all."""
        return self.every_steps > 0 or self.every_minutes > 0 or self.at_end
