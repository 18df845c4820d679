"""`asyppo-train reference-success RUN`: how hard the prompts were that a run chose, by fresh responses of one policy.

p_ref of a prompt is the share of right ones among 32 fresh responses of a reference policy, by default the one that the
run started from. A selection is worth its candidates if what it trains on lies more often in .2 < p_ref <= .8 than what
it was offered (S3AC, figure 6 b).
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from asyppo_async.algorithms.seeded import seeded_uniform
from asyppo_async.config.load import load_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.metrics import mean_of
from asyppo_async.trainer.durable import replace_file
from asyppo_async.trainer.material import open_material
from asyppo_async.trainer.parts import open_parts_once
from asyppo_async.trainer.run_folder import RunFolder
from asyppo_async.trainer.sampled import Sampling

FILE = "reference_success.json"
LOWEST, HIGHEST = 0.2, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A prompt that the run considered or trained on."""

    prompt_id: str
    step: int
    """Of its training; of a candidate the version at which it was considered."""
    estimate: float | None = None
    """p that the sampler expected of a candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty:
    """Of one set of draws, each as often as it was drawn."""

    draws: int
    middle_share: float | None
    """Of draws with .2 < p_ref <= .8; None of none."""
    mean: float | None
    """p_ref."""
    estimate_error: float | None
    """Mean distance of the sampler's p from p_ref; None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSuccess:
    policy: str
    samples: int
    """Of each prompt."""
    p_ref: dict[str, float]
    sets: dict[str, Difficulty]


def reference_config(folder: Path, policy: Path | None, overrides: Sequence[str]) -> TrainConfig:
    """The settings of a run without critics, with the reference policy in place of the actor.

    Raises:
        ConfigError: `folder` is no run folder.
    """
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is no run folder: it has no config.toml")
    model = [] if policy is None else [f"actor.model={policy}"]
    config = load_config(folder / "config.toml", [*model, *overrides])
    run = {"name": f"{config.run.name}-reference", "overwrite": True}
    return config.without_training_of_actor().model_copy(
        update={
            "run": config.run.model_copy(update=run),
            "critic": config.critic.model_copy(update={"count": 0, "each": ()}),
        }
    )


def read_draws(folder: Path) -> tuple[list[Draw], list[Draw]]:
    """What the run considered and what it trained on; a run whose sampler does not choose considered what it drew.

    Raises:
        ConfigError: It has trained on nothing yet.
    """
    fates = _rows(folder / "draws.jsonl")
    trained = [
        Draw(prompt_id=str(row["prompt"]), step=int(str(row["step"])))
        for row in fates
        if row["outcome"] == "trained"
    ]
    if not trained:
        raise ConfigError(f"run {folder} has trained on no prompt yet")
    candidates = [
        Draw(
            prompt_id=str(row["prompt"]),
            step=int(str(row["version"])),
            estimate=None if row["success_estimate"] is None else float(str(row["success_estimate"])),
        )
        for row in _rows(folder / "candidates.jsonl")
    ]
    return candidates or trained, trained


def chosen_prompts(considered: Sequence[Draw], trained: Sequence[Draw], num: int, seed: int) -> list[str]:
    """At most `num` of the prompts, by a hash: the same for the same run, blind to how often a prompt was drawn."""
    prompts = {draw.prompt_id for draw in (*considered, *trained)}
    return sorted(prompts, key=lambda prompt: seeded_uniform(seed, "reference", prompt))[:num]


async def measure(
    config: TrainConfig, folder: Path, *, samples: int, num_prompts: int, on_phase: Callable[[str], None]
) -> ReferenceSuccess:
    """Sample the reference policy and write RUN/reference_success.json.

    Raises:
        AsyppoError: As an evaluation.
    """
    considered, trained = read_draws(folder)
    material = await open_material(config)
    ids = chosen_prompts(considered, trained, num_prompts, config.run.seed)
    unknown = [prompt for prompt in ids if prompt not in material.train]
    if unknown:
        raise ConfigError(f"prompt {unknown[0]} of the run is not in its data any more: restore the data")
    async with open_parts_once(config, material, RunFolder.create(config), on_phase, on_phase) as parts:
        on_phase(f"{samples} responses to each of {len(ids)} prompts")
        sampling = Sampling(config, material, parts.fleet, parts.rewards)
        groups = await sampling.groups([material.train[prompt] for prompt in ids], samples)
    p_ref = {group.prompt.id: mean_of(one.reward >= 1 for one in group.trajectories) for group in groups}
    found = ReferenceSuccess(
        policy=str(config.actor.model), samples=samples, p_ref=p_ref, sets=sets_of(considered, trained, p_ref)
    )
    replace_file(folder / FILE, json.dumps(asdict(found), indent=2) + "\n")
    return found


def sets_of(
    considered: Sequence[Draw], trained: Sequence[Draw], p_ref: dict[str, float]
) -> dict[str, Difficulty]:
    """Of what was considered, of what was trained on, and of the latter at both ends of the run."""
    last = max(draw.step for draw in trained)
    return {
        "considered": difficulty_of(considered, p_ref),
        "trained": difficulty_of(trained, p_ref),
        "trained, first fifth": difficulty_of(
            [draw for draw in trained if draw.step < (last + 1) / 5], p_ref
        ),
        "trained, last fifth": difficulty_of(
            [draw for draw in trained if draw.step >= (last + 1) * 4 / 5], p_ref
        ),
    }


def difficulty_of(draws: Sequence[Draw], p_ref: dict[str, float]) -> Difficulty:
    """Of the draws whose prompts were measured."""
    measured = [(draw, p_ref[draw.prompt_id]) for draw in draws if draw.prompt_id in p_ref]
    return Difficulty(
        draws=len(measured),
        middle_share=_mean(LOWEST < p <= HIGHEST for _, p in measured),
        mean=_mean(p for _, p in measured),
        estimate_error=_mean(abs(draw.estimate - p) for draw, p in measured if draw.estimate is not None),
    )


def success_table(found: ReferenceSuccess) -> Table:
    """One row for each set of draws."""
    title = f"{found.samples} responses of {found.policy} to each of {len(found.p_ref)} prompts"
    table = Table(title=title, title_justify="left")
    table.add_column("draws")
    for column in ("number", ".2 < p_ref <= .8", "mean p_ref", "mean |p - p_ref|"):
        table.add_column(column, justify="right")
    for name, of in found.sets.items():
        shares = [of.middle_share, of.mean, of.estimate_error]
        cells = ["-" if value is None else f"{value:.1%}" for value in shares]
        table.add_row(name, str(of.draws), *cells)
    return table


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return mean_of(numbers) if numbers else None


def _rows(path: Path) -> list[dict[str, object]]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # a run may still be writing
    return [row for row in rows if not row.get("abandoned")]
