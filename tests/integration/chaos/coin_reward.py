"""A task that judges a response by a hash of its text: half of what an engine without sense says is right."""

import hashlib

from asyppo_async.tasks.arithmetic import ArithmeticTask
from asyppo_async.tasks.protocol import Task, TaskSpec
from asyppo_async.types import Prompt


class Coin(ArithmeticTask):
    """Its prompts are sums."""

    def score(self, prompt: Prompt, text: str) -> float:
        return 1.0 if hashlib.sha256(text.encode()).digest()[0] % 2 else -1.0


def coin(spec: TaskSpec) -> Task:
    """What `custom:coin_reward:coin` is."""
    return Coin.from_spec(spec)
