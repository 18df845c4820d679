"""Staleness rules side by side in one simulated world of 1,000 GPUs; the tables of docs/pipeline.md.

    python benchmarks/pipeline_rules.py [--world balanced|trainer|generation] [--steps 60] [--processes 1] [--json FILE]

Simulated, not measured: figures about rules, in a world whose assumptions are printed. No GPU is used.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from asyppo_async.trainer.coordinator.decisions import DecisionSettings
from asyppo_async.trainer.coordinator.simulate.figures import Figures, figures_of
from asyppo_async.trainer.coordinator.simulate.rival_rule import RivalRule
from asyppo_async.trainer.coordinator.simulate.rival_rules import (
    AReaLRule,
    PipelineRingRule,
    PipelineRule,
    PrimeRule,
    VerlAsyncRule,
    VerlV1Rule,
)
from asyppo_async.trainer.coordinator.simulate.scenario import LengthPlan, Scenario, ServerPlan, sampler_of
from asyppo_async.trainer.coordinator.simulate.world import World

GPUS_PER_SERVER = 4
NUM_GPUS = 1000
NUM_SLOTS = 64
GROUP_SIZE = 16
BATCH_SIZE = 256
TRAINED_TOKENS_PER_S_PER_GPU = 900.0
FLEET_GPUS = {"balanced": 540, "trainer": 720, "generation": 400}
"""By world: where the time goes is decided by how the GPUs are divided."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    max_staleness: int
    on_stale: str = "wait"
    lead: str = "saturated"
    rule: Callable[..., RivalRule] | None = None
    recompute: bool = False
    """Whether the project aborts requests at an update and reads their tokens again."""
    is_colocated: bool = False
    """All GPUs generate, then all train."""


def cases(etas: list[int], rival_etas: list[int]) -> list[Case]:
    found = [
        Case(name="synchronous, all GPUs take turns", max_staleness=0, is_colocated=True),
        Case(name="synchronous, divided GPUs", max_staleness=0),
    ]
    found += [
        Case(name=f"ours, {policy}, {lead}", max_staleness=eta, on_stale=policy, lead=lead)
        for eta in etas
        for policy in ("wait", "mask", "drop")
        for lead in ("saturated", "auto")
    ]
    for eta in rival_etas:
        found += [
            Case(name="AReaL", max_staleness=eta, rule=AReaLRule, recompute=True),
            Case(name="prime-rl", max_staleness=eta, rule=PrimeRule),
            Case(name="verl fully_async", max_staleness=eta, rule=VerlAsyncRule, recompute=True),
            Case(name="verl V1, wait", max_staleness=eta, rule=VerlV1Rule, recompute=True),
            Case(name="verl V1, drop", max_staleness=eta, on_stale="drop", rule=VerlV1Rule, recompute=True),
            Case(name="PipelineRL, max_lag", max_staleness=eta, rule=PipelineRule),
        ]
    return [*found, Case(name="PipelineRL, ring buffer", max_staleness=0, rule=PipelineRingRule)]


def scenario_of(case: Case, world: str, seed: int) -> Scenario:
    fleet_gpus = NUM_GPUS if case.is_colocated else FLEET_GPUS[world]
    trainer_gpus = NUM_GPUS if case.is_colocated else NUM_GPUS - fleet_gpus
    plan = ServerPlan.from_rates(
        num_slots=NUM_SLOTS,
        alone_tokens_per_s=60.0,
        full_tokens_per_s=2600.0,
        prefill_tokens_per_s=40_000.0,
    )
    num_servers = fleet_gpus // GPUS_PER_SERVER
    settings = DecisionSettings(
        batch_size=BATCH_SIZE,
        group_size=GROUP_SIZE,
        num_critics=2,
        max_staleness=case.max_staleness,
        on_stale=case.on_stale,  # type: ignore[arg-type]
        lead=case.lead,  # type: ignore[arg-type]
        max_attempts=3,
        # More than the slots hold: a group occupies fewer and fewer of them until its longest member ends.
        max_concurrent_groups=int(1.6 * num_servers * NUM_SLOTS / GROUP_SIZE),
        max_replacements_per_step=1_000_000,
        num_steps=None,
    )
    return Scenario(
        seed=seed,
        settings=settings,
        num_prompts=100_000,
        num_epochs=None,
        least_acceptance=1.0,
        servers=(plan,) * num_servers,
        lengths=LengthPlan(
            median_tokens=4000, prompt_sigma=0.8, member_sigma=0.4, max_tokens=32_768, prompt_tokens=400
        ),
        step_s=5.0,
        step_s_per_token=1 / (TRAINED_TOKENS_PER_S_PER_GPU * trainer_gpus),
        skipped_fraction=0.0,
        critic_ahead=False,
        publication_s=6.0,
        pause_s=2.0,
        weights="staged",
        publication_blocks_trainer=True,
        kv_on_update="recompute" if case.recompute else "keep",
        members_apart=False,
        failed_publication_fraction=0.0,
        filtered_fraction=0.0,
        failed_reward_fraction=0.0,
        doomed_fraction=0.0,
        lost_fraction=0.0,
        duplicated_fraction=0.0,
        deadline_s=1e9,
        faults=(),
        checkpoint_every_steps=1_000_000,
        restores_queue=True,
    )


def simulate(case: Case, world: str, steps: int, seed: int) -> Figures:
    scenario = scenario_of(case, world, seed)
    rule = None if case.rule is None else case.rule(settings=scenario.settings, sampler=sampler_of(scenario))
    num_warm_up = max(8, case.max_staleness + 8)
    outcome = World(scenario, debug=False, rule=rule).run(until_step=num_warm_up + steps)
    return figures_of(outcome, num_warm_up=num_warm_up)


def row_of(case: Case, figures: Figures) -> str:
    eta = "-" if case.rule is PipelineRingRule else str(case.max_staleness)
    return (
        f"| {case.name} | {eta} | {figures.step_s:.0f} | {figures.trained_tokens_per_s / 1e3:.0f} "
        f"| {figures.trainer_share:.0%} | {figures.fleet_tokens_share:.0%} | {figures.worst_staleness} "
        f"| {figures.mean_staleness:.2f} | {figures.waste_share:.1%} | {figures.length_ratio:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", choices=sorted(FLEET_GPUS), default="balanced")
    parser.add_argument("--steps", type=int, default=40, help="steps after the warm-up")
    parser.add_argument("--etas", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rival-etas", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", default="", help="rules whose name contains this")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    arguments = parser.parse_args()
    table = [case for case in cases(arguments.etas, arguments.rival_etas) if arguments.only in case.name]
    print(
        "| rule | eta | s/step | 1000 tokens/s trained | trainer busy | fleet speed | worst staleness "
        "| mean staleness | tokens wasted | length trained / issued |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    with ProcessPoolExecutor(max_workers=arguments.processes) as pool:
        futures = [
            pool.submit(simulate, case, arguments.world, arguments.steps, arguments.seed) for case in table
        ]
        for case, future in zip(table, futures, strict=True):
            figures = future.result()
            print(row_of(case, figures), flush=True)
            rows.append({**asdict(replace(case, rule=None)), "world": arguments.world, **asdict(figures)})
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
