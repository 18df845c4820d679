"""`asyppo-train eval`: a trained model on a run's held-out prompts, over an embedded or a given fleet."""

from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asyppo_async.config.load import load_config
from asyppo_async.config.sections import TrainConfig
from asyppo_async.errors import ConfigError
from asyppo_async.logs import set_up_logging
from asyppo_async.trainer.coordinator.evaluation import Evaluation, Evaluator
from asyppo_async.trainer.coordinator.pinning import Pinning
from asyppo_async.trainer.coordinator.waits import Waits
from asyppo_async.trainer.material import open_material
from asyppo_async.trainer.parts import open_parts_once
from asyppo_async.trainer.run_folder import RunFolder


def evaluation_config(target: Path, config: Path | None, best: bool, overrides: list[str]) -> TrainConfig:
    """The settings of an evaluation: those of the run, without critics, with the model in place of the initial one.

    Args:
        target: Folder of a run, or of a model in Hugging Face format.
        config: Settings to use with a model folder; a run has its own.
        best: Evaluate the run's best model instead of its last.
        overrides: `section.key=value`.

    Raises:
        ConfigError: `target` is neither, the run has no such model, or a model folder comes without settings.
    """
    is_run = (target / "config.toml").is_file()
    if not is_run and not (target / "config.json").is_file():
        raise ConfigError(f"{target} is neither a run folder (config.toml) nor a model folder (config.json)")
    if not is_run and config is None:
        raise ConfigError(
            f"{target} is a model: name the run settings to evaluate it with: --config CONFIG.toml"
        )
    model = target / ("best" if best else "model") if is_run else target
    if not model.is_dir():
        asked = (
            "evaluation.keep_best_by was not set, or nothing was evaluated" if best else "it has not ended"
        )
        raise ConfigError(f"run {target} has no {model.name}/ ({asked})")
    settings = load_config(config or target / "config.toml", [f"actor.model={model}", *overrides])
    name = f"{settings.run.name}-eval"
    return settings.without_training_of_actor().model_copy(
        update={
            "run": settings.run.model_copy(update={"name": name, "overwrite": True}),
            "critic": settings.critic.model_copy(update={"count": 0}),
        }
    )


async def run_evaluation(config: TrainConfig, log_level: str, console: Console) -> Evaluation:
    """Publish the model to the fleet and evaluate it on every held-out prompt."""
    material = await open_material(config)
    folder = RunFolder.create(config)
    set_up_logging(log_level, folder.logs / "trainer.log", console=not console.is_terminal)
    with console.status("evaluating") as status:
        async with open_parts_once(config, material, folder, status.update, console.print) as parts:
            status.update(f"evaluating on {len(material.heldout)} prompts")
            evaluator = Evaluator(
                prompts=material.heldout,
                rewards=parts.rewards,
                decode=material.decode,
                sampling=material.sampling,
                settings=config.evaluation,
                deadline_s=config.fleet.group_deadline_s,
                pinning=Pinning(parts.fleet, config.evaluation.hold_s),
                waits=Waits(),
            )
            evaluation = await evaluator.evaluate()
    folder.append_evaluation({"model": str(config.actor.model), **asdict(evaluation)})
    return evaluation


def evaluation_table(config: TrainConfig, evaluation: Evaluation) -> Table:
    """What a person reads of it."""
    table = Table(
        title=f"{config.actor.model}: {evaluation.samples} samples of {evaluation.prompts} prompts",
        title_justify="left",
    )
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("standard error", justify="right")
    error = evaluation.accuracy_standard_error
    table.add_row(f"avg@{config.evaluation.samples_per_prompt}", f"{evaluation.accuracy:.2%}", f"{error:.2%}")
    for k, value in evaluation.pass_at.items():
        table.add_row(f"pass@{k}", f"{value:.2%}", f"{evaluation.pass_at_standard_error[k]:.2%}")
    if config.evaluation.greedy:
        table.add_row("greedy", f"{evaluation.greedy_accuracy:.2%}", "")
    if len(evaluation.accuracy_by_task) > 1:
        for task, value in evaluation.accuracy_by_task.items():
            table.add_row(f"avg, {task}", f"{value:.2%}", "")
    return table
