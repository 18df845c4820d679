"""The critics' section: how many there are, what each starts from, and what it learns."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from asyppo_async.config.base import Section
from asyppo_async.config.learner import LearnerSection

CriticPartName = Literal["attention", "router", "vision", "embeddings", "backbone"]


class OneCritic(Section):
    """In what one critic differs from the others; None: in nothing."""

    model: Path | None = None
    """Folder of the model that it starts from, of any size and shape; the tokenizer must be the actor's."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Its highest."""
    head_learning_rate: float | None = Field(default=None, gt=0)
    """Of its value head."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Of its matrices."""
    head_std: float | None = Field(default=None, ge=0)
    """Standard deviation that its fresh value head is drawn with."""
    frozen: tuple[CriticPartName, ...] | None = None
    """Parts of its backbone that do not train."""
    lora_rank: int | None = Field(default=None, ge=0)
    """Of its adapters; 0: its weights train."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """Of its adapters."""
    lora_targets: tuple[str, ...] | None = None
    """Its linear layers that get one."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """GPUs of its ranks."""


class CriticSection(LearnerSection):
    count: int = Field(default=2, ge=0)
    """Mini-critics M; each trains on its own share of every group's responses. 0: a method without critics."""
    model: Path | None = None
    """Folder of the model that every critic starts from, with the value head if it has one; or a folder of `critic-0`,
    `critic-1`, ..., as value pretraining and a run leave them. The tokenizer must be the actor's."""
    each: tuple[OneCritic, ...] = ()
    """An uneven ensemble: `[[critic.each]]` for every critic in turn, with what is its own. Empty: all are alike."""
    learning_rate: float = Field(default=1e-5, gt=0)
    head_learning_rate: float | None = Field(default=None, gt=0)
    """Of the value head, on the same schedule in proportion; none: `learning_rate`."""
    weight_decay: float = Field(default=0.01, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Training steps at the start in which only the critics train: the actor stays what it was, to the bit."""
    frozen: tuple[CriticPartName, ...] = ()
    """Parts of the backbone that do not train, and get no adapter; a router and a vision tower may be named where there
    is none."""
    head_std: float = Field(default=0.0, ge=0)
    """Standard deviation that a fresh value head is drawn with; 0: 1 / (H + 1) of H hidden units (S3AC)."""
    value_clip: float | None = Field(default=None, gt=0)
    """Half width of the clipped value loss; none: plain squared error."""
    data: Literal["group_split", "random_split", "shared"] = "group_split"
    """How responses are dealt to the critics (AsyPPO: disjoint shares of every group)."""
    small_groups: Literal["rotate", "all"] = "rotate"
    """A group with fewer responses than critics: they take turns, or all critics see all of it."""
    half_loss: bool = True
    """The value loss is 1/2 (V - G)^2; false: without the half, as AsyPPO's equation."""

    def of(self, index: int) -> "CriticSection":
        """As one critic of the ensemble reads it."""
        if not self.each:
            return self
        own = {name: value for name, value in self.each[index] if value is not None}
        return self.model_copy(update=own | {"each": ()})

    def without_own_models(self) -> "CriticSection":
        """Every critic starts from `model` again."""
        each = tuple(own.model_copy(update={"model": None}) for own in self.each)
        return self.model_copy(update={"each": each})
