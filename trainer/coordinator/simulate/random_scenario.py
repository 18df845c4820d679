"""A scenario from a seed: every size, policy and fault that the decision core has to live with."""

import random

from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.simulate.scenario import Fault, LengthPlan, Scenario, ServerPlan


def random_scenario(
    seed: int, *, settings: DecisionSettings | None = None, has_faults: bool = True, has_losses: bool = True
) -> Scenario:
    """`settings` replaces the drawn ones. `has_faults`: servers and coordinator may fail; `has_losses`: draws may."""
    rng, own = random.Random(f"scenario:{seed}"), random.Random(f"more:{seed}")
    chosen = settings or _settings(rng)
    step_s = rng.choice([1.0, 10.0, 30.0])
    median_tokens = rng.choice([20, 100, 400])
    num_servers = rng.randint(1, 4)
    slots = [rng.choice([1, 2, 8, 32]) for _ in range(num_servers)]
    # Seconds in which the fleet would generate one batch, and from it the speed of a token.
    batch_s = step_s * rng.choice([0.1, 0.7, 1.0, 3.0])
    token_s = batch_s / (max(1.0, chosen.batch_size * chosen.group_size / sum(slots)) * median_tokens)
    horizon_s = 2 * (chosen.num_steps or 12) * max(step_s, batch_s)
    servers = tuple(
        ServerPlan(
            num_slots=num_slots,
            base_s=token_s * rng.choice([0.5, 1.0, 1.0]),
            per_sequence_s=token_s * rng.choice([0.0, 0.05]),
            prefill_s_per_token=token_s * rng.choice([0.0, 0.02]),
            joins_s=0.0 if index == 0 or rng.random() < 0.7 else rng.uniform(0, horizon_s / 2),
        )
        for index, num_slots in enumerate(slots)
    )
    losses = rng.random() < 0.5 and has_losses
    return Scenario(
        seed=seed,
        settings=chosen,
        num_prompts=rng.choice([7, 50, 1000]),
        num_epochs=None,
        least_acceptance=own.choice([1.0, 1.0, 0.1]) if has_losses else 1.0,
        servers=servers,
        lengths=LengthPlan(
            median_tokens=median_tokens,
            prompt_sigma=rng.choice([0.0, 0.5, 2.0]),
            member_sigma=rng.choice([0.0, 0.3]),
            max_tokens=8000,
            prompt_tokens=rng.choice([0, 50]),
        ),
        step_s=step_s,
        step_s_per_token=rng.choice([0.0, 1e-4]) * step_s,
        skipped_fraction=rng.choice([0.0, 0.0, 0.3]),
        critic_ahead=chosen.max_staleness >= 1 and rng.random() < 0.3,
        publication_s=step_s * rng.choice([0.01, 0.2, 1.5]),
        pause_s=step_s * rng.choice([0.0, 0.05]),
        weights="direct" if own.random() < 0.3 else "staged",
        publication_blocks_trainer=rng.random() < 0.5,
        kv_on_update=rng.choice(["keep", "recompute"]),
        members_apart=rng.random() < 0.5,
        failed_publication_fraction=rng.choice([0.0, 0.2]),
        filtered_fraction=rng.choice([0.0, 0.3, 0.6]) if losses else 0.0,
        failed_reward_fraction=rng.choice([0.0, 0.05, 0.2]) if losses else 0.0,
        doomed_fraction=rng.choice([0.0, 0.1]) if losses else 0.0,
        lost_fraction=rng.choice([0.0, 0.05]) if losses else 0.0,
        duplicated_fraction=rng.choice([0.0, 0.5]),
        deadline_s=horizon_s * (rng.choice([0.5, 2.0]) if losses else 100.0),
        faults=_faults(rng, own, num_servers, horizon_s) if has_faults else (),
        checkpoint_every_steps=rng.choice([1, 1, 2, 5]),
        restores_queue=rng.random() < 0.5,
    )


def _settings(rng: random.Random) -> DecisionSettings:
    batch_size = rng.choice([1, 2, 3, 4, 8])
    return DecisionSettings(
        batch_size=batch_size,
        group_size=rng.choice([1, 2, 4]),
        num_critics=rng.choice([0, 1, 2]),
        max_staleness=rng.choice([0, 1, 1, 2, 2, 4, 16]),
        on_stale=rng.choice(["wait", "wait", "mask", "drop"]),
        lead=rng.choice(["saturated", "auto"]),
        max_attempts=rng.choice([1, 3, 8]),
        max_concurrent_groups=rng.choice([1, 2, batch_size, 1000]),
        max_replacements_per_step=10_000,
        num_steps=rng.choice([5, 12, 20]),
    )


def _faults(rng: random.Random, own: random.Random, num_servers: int, horizon_s: float) -> tuple[Fault, ...]:
    failures = [
        Fault(
            kind=rng.choice(["crash", "freeze", "slow", "kill_coordinator"]),
            at_s=rng.uniform(0, horizon_s),
            duration_s=rng.uniform(0, horizon_s / 4),
            server=rng.randrange(num_servers),
        )
        for _ in range(rng.choice([0, 1, 2, 4, 8]))
    ]
    evaluations = [
        Fault(
            kind="pin",
            at_s=own.uniform(0, horizon_s),
            duration_s=own.uniform(0, horizon_s / 4),
            server=own.randrange(num_servers),
        )
        for _ in range(own.choice([0, 0, 1, 4]))
    ]
    return (*failures, *evaluations)
