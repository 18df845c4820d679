"""The weights of the best evaluation so far, in the run folder."""

import asyncio
import json
import math
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from asyppo_async.config.sections import EvaluationSection
from asyppo_async.trainer.coordinator.evaluation import Evaluation

_EVALUATION = "evaluation.json"
"""File in `best/` that says of which evaluation it is."""

Save = Callable[[Path], Awaitable[None]]


class BestModel:
    """Saves before an evaluation and keeps what was saved if the evaluation is the best yet.

    Training goes on while an evaluation runs, so at its end the weights that it spoke about are gone.
    """

    def __init__(self, folder: Path, settings: EvaluationSection, save: Save) -> None:
        """Args:
        folder: of the run; the model becomes `folder/best`.
        settings: say what is compared, if anything.
        save: writes the actor's weights as they are.
        """
        self._best = folder / "best"
        self._candidate = folder / ".best.candidate"
        self._by = settings.keep_best_by
        self._save = save
        self._highest = -math.inf

    async def resume(self, evaluation_start: Evaluation | None, version: int) -> None:
        """Go on from a checkpoint of `version`: what is kept of a later one is of weights that were abandoned."""
        if self._by == "none":
            return
        await asyncio.to_thread(shutil.rmtree, self._candidate, True)
        if evaluation_start is not None:
            await self.after(evaluation_start)  # nothing to keep, but a bar to pass
        kept = await asyncio.to_thread(self._kept)
        if kept is not None and kept[0] <= version:
            self._highest = max(self._highest, kept[1])
        elif kept is not None:
            await asyncio.to_thread(shutil.rmtree, self._best, True)

    async def before(self) -> None:
        """Save the weights that are about to be evaluated."""
        if self._by != "none":
            await self._save(self._candidate)

    async def after(self, evaluation: Evaluation) -> bool:
        """Keep what `before` saved, or drop it; whether it is the best yet. Equal is not better."""
        if self._by == "none":
            return False
        value = float(getattr(evaluation, self._by))
        better = value > self._highest  # never true of NaN
        if better:
            self._highest = value
        if self._candidate.exists():
            if better:
                await asyncio.to_thread(self._keep, evaluation.version, value)
            else:
                await asyncio.to_thread(self._drop)
        return better

    def _kept(self) -> tuple[int, float] | None:
        """Version and value of what `best/` holds."""
        file = self._best / _EVALUATION
        if not file.exists():
            return None
        row = json.loads(file.read_text(encoding="utf-8"))
        return int(row["version"]), float(row["value"])

    def _keep(self, version: int, value: float) -> None:
        row = {"version": version, "by": self._by, "value": value}
        (self._candidate / _EVALUATION).write_text(json.dumps(row) + "\n", encoding="utf-8")
        shutil.rmtree(self._best, ignore_errors=True)
        self._candidate.rename(self._best)

    def _drop(self) -> None:
        shutil.rmtree(self._candidate)
