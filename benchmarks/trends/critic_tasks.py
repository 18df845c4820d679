"""Tasks of the studies about critics: prompts of mixed difficulty, and one in which only long answers are right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyppo_async.types import Prompt
from benchmarks.trends.task import NUM_TOKENS, PROMPTS, reward

EOS = 1
LONG_TOKENS = 32
LEAST_LONG = 20
"""Tokens before the end that a right answer of the long task has at least."""
WANTED = (5, 5, 6, 7, 8, 9, 9, 10)
"""Of ten tokens, how many must be of the prompt's parity, by the prompt's second token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyTask:
    """Prompts of three tokens, a verdict, and how long a response may be."""

    name: str
    prompts: tuple[Prompt, ...]
    reward: Callable[[Prompt, Sequence[int]], float]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """None: every response has exactly `max_tokens`."""

    @property
    def has_fixed_length(self) -> bool:
        return not self.stop_token_ids


def mixed_reward(prompt: Prompt, token_ids: Sequence[int]) -> float:
    """Right if enough tokens are of the parity of the prompt's first token; how many, the second one says.

    An untrained policy is right six times in ten on the easiest prompts and once in a thousand on the hardest.
    """
    wanted = prompt.token_ids[0] % 2
    return 1.0 if sum(token % 2 == wanted for token in token_ids) >= WANTED[prompt.token_ids[1] - 2] else -1.0


def long_reward(prompt: Prompt, token_ids: Sequence[int]) -> float:
    """Right if at least `LEAST_LONG` tokens come before the end, six in ten of them of the prompt's parity."""
    content = [token for token in token_ids if token != EOS]
    wanted = prompt.token_ids[0] % 2
    share = sum(token % 2 == wanted for token in content) / max(1, len(content))
    return 1.0 if len(content) >= LEAST_LONG and share >= 0.6 else -1.0


PARITY = TinyTask(name="parity", prompts=PROMPTS, reward=reward, max_tokens=NUM_TOKENS)
MIXED = TinyTask(name="mixed", prompts=PROMPTS, reward=mixed_reward, max_tokens=NUM_TOKENS)
LONG = TinyTask(
    name="long", prompts=PROMPTS, reward=long_reward, max_tokens=LONG_TOKENS, stop_token_ids=(EOS,)
)
