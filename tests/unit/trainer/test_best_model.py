"""The best model is what was saved before the best evaluation."""

from dataclasses import replace
from pathlib import Path

import pytest

from asyppo_async.config.sections import EvaluationSection
from asyppo_async.trainer.best_model import BestModel
from asyppo_async.trainer.coordinator.evaluation import Evaluation

ROW = Evaluation(
    version=0,
    oldest_version=0,
    prompts=1,
    samples=1,
    accuracy=0.0,
    accuracy_standard_error=0.0,
    pass_at={},
    pass_at_standard_error={},
    accuracy_by_task={},
    greedy_accuracy=0.0,
    mean_reward=0.0,
    mean_length_tokens=1.0,
    repeated_responses=0,
    failed_responses=0,
    server="",
    skipped_publications=0,
    held_s=0.0,
    trainer_wait_s=0.0,
    seconds=1.0,
)


async def evaluated(best: BestModel, accuracy: float) -> bool:
    await best.before()
    return await best.after(replace(ROW, accuracy=accuracy))


@pytest.mark.parametrize("by", ["accuracy", "none"])
async def test_best_model_is_that_of_the_highest_metric(tmp_path: Path, by: str) -> None:
    saves = 0

    async def save(folder: Path) -> None:
        nonlocal saves
        saves += 1
        folder.mkdir()
        (folder / "weights").write_text(str(saves))

    best = BestModel(tmp_path, EvaluationSection(keep_best_by=by), save)  # type: ignore[arg-type]
    await best.after(
        replace(ROW, accuracy=0.3)
    )  # before training: there is nothing to keep but a bar to pass
    results = [await evaluated(best, accuracy) for accuracy in (0.2, 0.5, float("nan"), 0.5, 0.9, 0.1)]
    if by == "none":
        assert saves == 0 and not any(results) and not list(tmp_path.iterdir())
        return
    assert results == [False, True, False, False, True, False]
    assert (tmp_path / "best" / "weights").read_text() == "5"
    assert [path.name for path in tmp_path.iterdir()] == ["best"], "no candidate is left"
