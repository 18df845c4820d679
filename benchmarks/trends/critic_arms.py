"""The arms of the studies about critics: value pretraining, DAPS, single rollout, orthogonal parts of a critic."""

from benchmarks.trends.arms import Arm
from benchmarks.trends.critic_tasks import LONG, MIXED

LEARN_ALIKE = ("critic.learning_rate=4e-3", "critic.max_grad_norm=10")
SCORED = "algorithm.truncated=scored"
"""An answer that ends with its last allowed token may be right."""
PRETRAIN_STEPS = 30
OBJECTIVE = (
    "algorithm.loss=cispo",
    "algorithm.clip_low=0.2",
    "algorithm.clip_high=0.28",
    "algorithm.mismatch=icepop_mask",
    'algorithm.sequence_gates=[{kind="max_log_ratio", high=5.0}]',
    "algorithm.aggregation=token-mean",
    "actor.mini_batches=2",
)
"""S3AC's, for all three methods of single rollout."""
SINGLE = ("batch.prompts=64", "batch.group_size=1")
SHORT_RAMP = ("selection.uniform_steps=5", "selection.ramp_steps=10", "selection.group_filter=off")
"""A run of a hundred steps has no room for the paper's 40 + 80."""


def pretraining_arms() -> tuple[Arm, ...]:
    """VC-PPO: what fails and what cures, where longer answers are right."""

    def arm(name: str, preset: str, pretrain_steps: int = 0) -> Arm:
        return Arm(
            name=name,
            against="lambda .95 for both",
            preset=preset,
            overrides=(*LEARN_ALIKE, SCORED),
            task=LONG,
            pretrain_steps=pretrain_steps,
        )

    return (
        arm("lambda .95 for both", "ppo_95"),
        arm("+ decoupled", "vcppo"),
        arm("+ pretraining", "ppo_95", PRETRAIN_STEPS),
        arm("both (VC-PPO)", "vcppo", PRETRAIN_STEPS),
    )


def daps_arms() -> tuple[Arm, ...]:
    """Prompts of mixed difficulty; groups without a difference are counted and stay in the batch."""

    def arm(name: str, *overrides: str) -> Arm:
        base = (*LEARN_ALIKE, "actor.mini_batches=2", "critic.mini_batches=2", *SHORT_RAMP)
        return Arm(name=name, against="uniform", preset="s3ac", overrides=(*base, *overrides), task=MIXED)

    return (
        arm("uniform", "selection.prompts=epochs"),
        arm("DAPS"),
        arm("DAPS, a_min .3", "selection.minimum_acceptance=0.3"),
    )


def single_arms() -> tuple[Arm, ...]:
    """One response a prompt, a long run, one objective for all."""

    def arm(name: str, preset: str, *overrides: str) -> Arm:
        return Arm(
            name=name,
            against="S3AC, single",
            preset=preset,
            overrides=(*SINGLE, *OBJECTIVE, *overrides),
            task=MIXED,
        )

    critic = (*LEARN_ALIKE, "critic.mini_batches=2", *SHORT_RAMP)
    uniform = "selection.prompts=epochs"
    return (
        arm("S3AC, single", "s3ac_single", *critic),
        arm("S3AC without DAPS", "s3ac_single", *critic, uniform),
        arm("REINFORCE++", "reinforce_pp"),
        arm("FlashREINFORCE", "flash_reinforce"),
    )


def orthogonal_arms() -> tuple[Arm, ...]:
    """What of a critic helps: its opinion of the prompt, its opinion along the response, or both; and three losses."""

    def arm(name: str, *overrides: str) -> Arm:
        return Arm(
            name=name,
            against="both",
            preset="s3ac_single",
            overrides=(
                *SINGLE, *OBJECTIVE, *LEARN_ALIKE, "critic.mini_batches=2", *SHORT_RAMP, "selection.prompts=epochs",
                *overrides,
            ),
            task=MIXED,
        )  # fmt: skip

    return (
        arm("both"),
        arm("prompt only", "algorithm.critic_use=prompt"),
        arm("token only", "algorithm.critic_use=token"),
        arm("both, PPO clip", "algorithm.loss=ppo"),
        arm("both, DIS", "algorithm.loss=dis"),
    )
