"""From a task's name to the task."""

import importlib
from collections.abc import Callable
from typing import cast

from asyppo_async.config.task import DATA
from asyppo_async.errors import TaskError
from asyppo_async.tasks import reasoning
from asyppo_async.tasks.arithmetic import ArithmeticTask
from asyppo_async.tasks.data import AnswersTask, DataTask
from asyppo_async.tasks.params import nearest
from asyppo_async.tasks.protocol import Task, TaskSpec
from asyppo_async.tasks.reasoning import ReasoningGymTask

ANSWERS = "answers"
"""Scores the right answers of `data`; no task that a user names."""

_CUSTOM = "custom:"


def create_task(spec: TaskSpec, *, scoring: bool = False) -> Task:
    """The task of a spec; equal specs give equal tasks in every process.

    `custom:MODULE:CLASS` calls `CLASS(spec)` of an importable module of the user.

    Args:
        spec: What the user says about the task.
        scoring: This process scores responses: a user's reward function is loaded, and the verifier's libraries.

    Raises:
        TaskError: the name or a param is unknown; the message names what is near.
    """
    if spec.name == "arithmetic":
        return ArithmeticTask.from_spec(spec)
    if spec.name.startswith(reasoning.PREFIX):
        return ReasoningGymTask.from_spec(spec)
    if spec.name == DATA:
        return DataTask.from_spec(spec, scoring=scoring)
    if spec.name == ANSWERS:
        return AnswersTask(spec=spec)
    if spec.name.startswith(_CUSTOM):
        return _custom_task(spec)
    raise TaskError(
        f"there is no task {spec.name!r}; "
        + nearest(spec.name, ("arithmetic", DATA, "reasoning_gym:NAME", "custom:MODULE:CLASS"))
    )


def _custom_task(spec: TaskSpec) -> Task:
    module_name, _, attribute = spec.name.removeprefix(_CUSTOM).partition(":")
    try:
        module = importlib.import_module(module_name)
        factory = cast(Callable[[TaskSpec], Task], getattr(module, attribute))
    except (ImportError, ValueError, AttributeError) as error:
        raise TaskError(
            f"task {spec.name!r} cannot be loaded: {error}; "
            "it must be custom:MODULE:CLASS with a module on PYTHONPATH"
        ) from error
    return factory(spec)
