"""A task whose reward hangs, raises, fills the memory or ends its process, each for one response in sixteen."""

import os

from asyppo_async.tasks.arithmetic import ArithmeticTask
from asyppo_async.tasks.protocol import Task, TaskSpec
from asyppo_async.types import Prompt

BLOCK_BYTES = 2**26


class Cruel(ArithmeticTask):
    """Its prompts are sums."""

    def score(self, prompt: Prompt, text: str) -> float:
        number = os.urandom(1)[0] % 16
        if number == 0:
            while True:
                pass
        if number == 1:
            raise RuntimeError("a cruel reward")
        blocks: list[bytearray] = []
        while number == 2:
            blocks.append(bytearray(BLOCK_BYTES))
        if number == 3:
            os._exit(3)
        return super().score(prompt, text)


def cruel(spec: TaskSpec) -> Task:
    """What `custom:cruel_reward:cruel` is."""
    return Cruel.from_spec(spec)
