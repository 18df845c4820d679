"""Planning: what a configuration would come to on given machines, and how GPUs are best divided."""

from collections.abc import Callable
from dataclasses import dataclass

from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.simulate.figures import Figures, figures_of, mean_length
from asyppo_async.trainer.coordinator.simulate.scenario import LengthPlan, Scenario, ServerPlan
from asyppo_async.trainer.coordinator.simulate.world import World

_FRACTIONS = (0.6, 0.75, 0.85, 0.93, 1.0, 1.07, 1.15, 1.3, 1.5)
"""Fleet sizes that are tried, over the size at which both sides take as long."""
_SAME = 1.01
"""Divisions whose steps differ by less are equally fast."""

OnStep = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Who gets which GPUs."""

    num_servers: int
    trainer_gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    division: Division
    figures: Figures


def division_of(config: TrainConfig) -> Division:
    """The one that the configuration names."""
    return Division(num_servers=config.simulate.num_servers, trainer_gpus=config.simulate.trainer_gpus)


def num_warm_up(config: TrainConfig) -> int:
    """Steps until staleness and queue are what they stay."""
    return config.staleness.max_staleness + 4


def num_steps(config: TrainConfig) -> int:
    """Steps of one prediction."""
    return num_warm_up(config) + config.simulate.steps


def scenario_of(config: TrainConfig, division: Division) -> Scenario:
    """The world of a configuration.

    Raises:
        ConfigError: the rates of `[simulate]` contradict each other.
    """
    assumed, staleness = config.simulate, config.staleness
    try:
        server = ServerPlan.from_rates(
            num_slots=config.fleet.max_num_seqs,
            alone_tokens_per_s=assumed.alone_tokens_per_s,
            full_tokens_per_s=assumed.full_tokens_per_s,
            prefill_tokens_per_s=assumed.prefill_tokens_per_s,
        )
    except ValueError as error:
        raise ConfigError(f"simulate.full_tokens_per_s does not fit fleet.max_num_seqs: {error}") from None
    settings = DecisionSettings(
        batch_size=config.batch.prompts,
        group_size=config.batch.group_size,
        num_critics=config.critic.count,
        max_staleness=staleness.max_staleness,
        on_stale=staleness.on_stale,
        lead=staleness.lead,
        max_attempts=staleness.max_attempts,
        max_concurrent_groups=staleness.max_concurrent_groups,
        max_replacements_per_step=staleness.max_replacements_per_step,
        num_steps=None,
    )
    return Scenario(
        seed=config.run.seed,
        settings=settings,
        num_prompts=sum(entry.num_train for entry in config.task.entries),
        num_epochs=None,
        least_acceptance=1.0,
        servers=(server,) * division.num_servers,
        lengths=_lengths(config),
        step_s=assumed.step_overhead_s,
        step_s_per_token=1 / (assumed.train_tokens_per_s * division.trainer_gpus),
        skipped_fraction=0.0,
        critic_ahead=config.algorithm.schedule == "critic_ahead",
        publication_s=assumed.publication_s,
        pause_s=assumed.pause_s,
        weights="staged",
        publication_blocks_trainer=True,
        kv_on_update=config.weights.kv_on_update,
        members_apart=False,
        failed_publication_fraction=0.0,
        filtered_fraction=assumed.filtered_share,
        failed_reward_fraction=assumed.failed_share,
        doomed_fraction=0.0,
        lost_fraction=0.0,
        duplicated_fraction=0.0,
        deadline_s=config.fleet.group_deadline_s,
        faults=(),
        checkpoint_every_steps=num_steps(config) + 1,
        restores_queue=True,
    )


def predict(config: TrainConfig, division: Division, on_step: OnStep | None = None) -> Prediction:
    """Simulate the configuration on this division.

    Raises:
        Stalled: no batch can be filled (every group filtered, or later than `fleet.group_deadline_s`).
    """
    world = World(scenario_of(config, division), debug=False)
    outcome = world.run(until_step=num_steps(config), on_step=on_step)
    return Prediction(division=division, figures=figures_of(outcome, num_warm_up=num_warm_up(config)))


def divisions(config: TrainConfig) -> list[Division]:
    """Divisions of the GPUs that are worth a simulation: around the one at which both sides take as long."""
    assumed = config.simulate
    total = assumed.num_servers * assumed.gpus_per_server + assumed.trainer_gpus
    most = (total - assumed.least_trainer_gpus) // assumed.gpus_per_server
    if most < 2:
        return []
    tokens = (
        config.batch.prompts * config.batch.group_size * mean_length(scenario_of(config, division_of(config)))
    )

    def slower_side_s(num_servers: int) -> float:
        division = _divided(config, num_servers, total)
        generation_s = tokens / (num_servers * assumed.full_tokens_per_s)
        return max(
            generation_s,
            assumed.step_overhead_s + tokens / (assumed.train_tokens_per_s * division.trainer_gpus),
        )

    balanced = min(range(1, most + 1), key=slower_side_s)
    sizes = {min(most, max(1, round(balanced * fraction))) for fraction in _FRACTIONS}
    return [_divided(config, size, total) for size in sorted(sizes)]


def best(predictions: list[Prediction]) -> Prediction:
    """The shortest step; of those as short, the one with the youngest data."""
    shortest = min(prediction.figures.step_s for prediction in predictions)
    fast = [prediction for prediction in predictions if prediction.figures.step_s <= _SAME * shortest]
    return min(fast, key=lambda prediction: prediction.figures.mean_staleness)


def advice(config: TrainConfig, prediction: Prediction) -> list[str]:
    """What limits this prediction, in sentences that name the setting."""
    figures, staleness = prediction.figures, config.staleness
    slots = prediction.division.num_servers * config.fleet.max_num_seqs
    wanted = slots // config.batch.group_size
    outstanding = (staleness.max_staleness + 1) * config.batch.prompts
    lines = []
    if staleness.max_concurrent_groups < min(wanted, outstanding):
        lines.append(
            f"staleness.max_concurrent_groups = {staleness.max_concurrent_groups} keeps the fleet from filling its "
            f"{slots} slots; {wanted} groups do"
        )
    if figures.wait_share > 0.1 and outstanding < wanted:
        lines.append(
            f"the bound lets {outstanding} groups run, the fleet has room for {wanted}: a larger max_staleness "
            "or batch.prompts would use it"
        )
    elif figures.wait_share > 0.1:
        lines.append(
            f"the trainer waits {figures.wait_share:.0%} of the time: "
            + (
                "for the longest responses, which are due; a larger max_staleness gives them time"
                if figures.fleet_tokens_share < 0.8
                else "generation is the slower side; more servers help"
            )
        )
    if figures.waste.get("deadline", 0.0) > 0.01:
        lines.append(
            f"fleet.group_deadline_s = {config.fleet.group_deadline_s:g} ends groups that are still generating: "
            f"{figures.waste['deadline']:.0%} of the tokens are lost to it"
        )
    if figures.publication_share > 0.1:
        lines.append(f"the trainer waits {figures.publication_share:.0%} of the time for publications")
    return lines


def _divided(config: TrainConfig, num_servers: int, total: int) -> Division:
    least = config.simulate.least_trainer_gpus
    left = total - num_servers * config.simulate.gpus_per_server
    return Division(num_servers=num_servers, trainer_gpus=max(least, left // least * least))


def _lengths(config: TrainConfig) -> LengthPlan:
    assumed, longest = config.simulate, config.sampling.max_tokens
    if assumed.median_tokens > longest:
        raise ConfigError(
            f"simulate.median_tokens = {assumed.median_tokens:g} exceeds sampling.max_tokens = {longest}"
        )
    return LengthPlan(
        median_tokens=assumed.median_tokens or max(1.0, longest / 2),
        prompt_sigma=assumed.prompt_sigma,
        member_sigma=assumed.member_sigma,
        max_tokens=longest,
        prompt_tokens=assumed.prompt_tokens,
    )
