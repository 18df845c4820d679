"""Trajectories kept on disk for value pretraining, and the pretraining itself: `[pool]`, `[pretrain]`."""

from pathlib import Path

from pydantic import Field

from asyppo_async.config.base import Section, Share


class PoolSection(Section):
    """A trajectory pool: responses of policies from weak to strong, with their rewards."""

    save: bool = False
    """Add the responses of this run to the pool, of dropped and filtered groups too (`critic_trains_on = "kept"`: only
    those that train the actor)."""
    path: Path = Path("pool")
    """Folder of the pool."""
    policy_steps: int = Field(default=50, ge=1)
    """Versions of a run that count as one policy in the pool's coverage."""
    policies: tuple[Path, ...] = ()
    """Model folders that `asyppo-train pool collect` samples from, weak to strong."""
    prompts: int = Field(default=256, ge=1)
    """Prompts of each policy that `pool collect` samples; `batch.group_size` responses of each."""
    length_edges: tuple[int, ...] = ()
    """Upper ends of the length buckets but the last, in tokens, for coverage and balance; none: three, in powers of two
    below the longest response."""
    least_per_cell: int = Field(default=32, ge=1)
    """Fewer trajectories of one length bucket, verdict and policy than this count as missing coverage."""


class PretrainSection(Section):
    """Value pretraining; `asyppo-train pretrain-critics`. The critics' models and kinds are those of `[critic]`."""

    responses: int = Field(default=64, ge=1)
    """Responses of one optimizer step of each critic."""
    epochs: int = Field(default=2, ge=1)
    """Passes over a pool (S3AC: 2)."""
    balance: bool = False
    """Draw from the pool so that every length bucket, right and wrong, comes equally often, with replacement; false:
    every trajectory once an epoch."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Over a pool: where the cosine starts (S3AC)."""
    final_learning_rate: float = Field(default=5e-6, gt=0)
    """... and where it ends."""
    rise_share: Share = 0.03
    """Share of the steps over which the learning rate rises."""
    policy_learning_rate: float = Field(default=2e-6, gt=0)
    """Over a frozen policy: constant (VC-PPO)."""
    max_grad_norm: float = Field(default=10.0, gt=0)
    """S3AC: 10, for the head dominates the norm."""
    freeze_pool: bool = True
    """Over a pool, freeze attention, router and vision tower (S3AC); `critic.frozen` is frozen in any case."""
    heldout_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the prompts that no critic trains on; explained variance is measured there."""
    heldout_every_steps: int = Field(default=5, ge=1)
    """Explained variance is measured after the first and after every so many steps."""
    checkpoint_every_steps: int = Field(default=25, ge=1)
    """Steps after which the critics are kept as they are, for a resume and for comparison."""
    max_steps: int = Field(default=500, ge=1)
    """Over a frozen policy: the most training steps."""
    stop_rise: float = Field(default=0.01, gt=0)
    """Over a frozen policy: it ends when held-out explained variance has not risen by so much ..."""
    stop_steps: int = Field(default=20, ge=1)
    """... for so many steps."""
