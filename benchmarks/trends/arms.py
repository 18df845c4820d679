"""The methods that each tiny-model study puts side by side, as presets with overrides."""

from dataclasses import dataclass

from asyppo_async.config.load import config_from_tree
from asyppo_async.config.sections import TrainConfig
from benchmarks.trends.critic_tasks import PARITY, TinyTask
from benchmarks.trends.learning import BFLOAT16, FLOAT8_WEIGHTS, FLOAT32, Engine
from benchmarks.trends.task import NUM_TOKENS

SIZES = (
    "batch.prompts=8",
    "batch.group_size=8",
    "actor.model=a",
    "critic.model=c",
    "actor.learning_rate=2e-3",
    "actor.learning_rate_warmup_steps=0",
    "actor.mini_batches=2",
    "critic.learning_rate=4e-3",
    "critic.learning_rate_warmup_steps=0",
    "critic.mini_batches=2",
    f"sampling.max_tokens={NUM_TOKENS}",
)
ACTOR_SIZE, MINI_CRITIC_SIZE = 32, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One method of a study."""

    name: str
    against: str
    """The arm that it is compared with, seed by seed; its own name: none."""
    preset: str
    overrides: tuple[str, ...] = ()
    lag: int = 0
    critic_size: int = MINI_CRITIC_SIZE
    engine: Engine = FLOAT32
    task: TinyTask = PARITY
    pretrain_steps: int = 0
    """Training steps before the first one in which only the critics learn, from the frozen policy, Monte Carlo."""

    def config(self, seed: int) -> TrainConfig:
        bound = f"staleness.max_staleness={self.lag}"
        longest = f"sampling.max_tokens={self.task.max_tokens}"
        overrides = [*SIZES, bound, longest, f"run.seed={seed}", *self.overrides]
        return config_from_tree({"preset": self.preset}, overrides)

    @property
    def spec(self) -> str:
        """Everything but the seed that makes a run what it is; a stored run of another spec does not count."""
        sizes = (*SIZES, f"lag={self.lag}", f"critic={self.critic_size}", f"engine={self.engine.name}")
        if self.task is not PARITY:
            sizes = (*sizes, f"task={self.task.name}")
        if self.pretrain_steps:
            sizes = (*sizes, f"pretrain={self.pretrain_steps}")
        return " ".join((self.preset, *self.overrides, *sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Several arms, equal steps and tokens."""

    arms: tuple[Arm, ...]
    num_steps: int
    least_seeds: int = 5
    """That are stored of every arm."""


NO_MASKS = ("algorithm.advantage_mask_share=0", "algorithm.entropy_filter_share=0")
NO_FILTER = ("algorithm.entropy_filter_share=0",)
UTD = ("actor.epochs=4",)
NO_ENTROPY = ("algorithm.entropy_coefficient=0",)
COUPLED = ("algorithm.loss_reference=behaviour", "algorithm.mismatch=none")
MIS = ('algorithm.sequence_gates=[{kind="max_log_ratio", high=5.0}]',)


def ladder_arms() -> tuple[Arm, ...]:
    random_mask = "algorithm.advantage_mask_by=random"
    return (
        Arm(name="one small critic", against="one small critic", preset="ppo_asymmetric", overrides=UTD),
        Arm(
            name="shared ensemble",
            against="one small critic",
            preset="asyppo",
            overrides=(*NO_MASKS, *NO_ENTROPY, "critic.data=shared"),
        ),
        Arm(
            name="group split",
            against="shared ensemble",
            preset="asyppo",
            overrides=(*NO_MASKS, *NO_ENTROPY),
        ),
        Arm(
            name="+ advantage mask",
            against="group split",
            preset="asyppo",
            overrides=(*NO_FILTER, *NO_ENTROPY),
        ),
        Arm(
            name="+ random mask",
            against="+ advantage mask",
            preset="asyppo",
            overrides=(*NO_FILTER, *NO_ENTROPY, random_mask),
        ),
        Arm(name="+ mask, entropy bonus", against="+ advantage mask", preset="asyppo", overrides=NO_FILTER),
        Arm(name="+ mask, entropy filter", against="+ mask, entropy bonus", preset="asyppo"),
        Arm(name="GRPO", against="+ mask, entropy filter", preset="grpo", overrides=UTD),
        Arm(
            name="symmetric PPO",
            against="+ mask, entropy filter",
            preset="ppo",
            overrides=UTD,
            critic_size=ACTOR_SIZE,
        ),
    )


def staleness_arms() -> tuple[Arm, ...]:
    return tuple(
        Arm(
            name=f"{name}, lag {lag}",
            against=f"decoupled, lag {lag}",
            preset="areal",
            overrides=overrides,
            lag=lag,
        )
        for lag in (0, 4, 16)
        for name, overrides in (("decoupled", ()), ("coupled", COUPLED))
    )


def mismatch_arms() -> tuple[Arm, ...]:
    """GRPO whose responses come from an engine that computes otherwise than the trainer does."""
    corrections = (
        ("no correction", ("algorithm.mismatch=none",)),
        ("IcePoP weight", ("algorithm.mismatch=icepop",)),
        ("IcePoP mask + MIS", ("algorithm.mismatch=icepop_mask", *MIS)),
    )
    exact = Arm(
        name="float32",
        against="float32",
        preset="grpo",
        overrides=("algorithm.mismatch=none",),
    )
    return (
        exact,
        *(
            Arm(
                name=f"{engine.name}: {name}",
                against="float32" if name == "no correction" else f"{engine.name}: no correction",
                preset="grpo",
                overrides=overrides,
                engine=engine,
            )
            for engine in (BFLOAT16, FLOAT8_WEIGHTS)
            for name, overrides in corrections
        ),
    )


def lambda_arms() -> tuple[Arm, ...]:
    return tuple(
        Arm(
            name=f"lambda {value}",
            against="lambda 1.0",
            preset="vcppo",
            overrides=(f"algorithm.lambda_actor={value}",),
        )
        for value in ("1.0", "0.99", "0.95", "0.8", "adaptive")
    )
