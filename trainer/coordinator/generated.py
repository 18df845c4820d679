"""What the fleet makes of one prompt, and the fleet as those see it who want responses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyppo_async.rpc.calls import ResponseParts
from asyppo_async.rpc.codec import SampleFailure
from asyppo_async.types import Prompt, Response, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The whole responses of one prompt, by sample index, and the server that made them."""

    responses: tuple[Response, ...]
    server: str
    missing: tuple[int, ...] = ()
    """Sample indices that failed or were not finished by the deadline; `responses` are those of the others."""
    failures: Mapping[int, SampleFailure] = field(default_factory=dict)
    """Why some of `missing` failed; the others met the deadline."""

    @property
    def indices(self) -> list[int]:
        """The sample index of each response."""
        asked_for = len(self.responses) + len(self.missing)
        return [index for index in range(asked_for) if index not in self.missing]


def generated_of(
    samples: Sequence[Response | None], server: str, failures: Mapping[int, SampleFailure] | None = None
) -> Generated:
    """From one entry per sample, None for an unfinished one."""
    return Generated(
        responses=tuple(response for response in samples if response is not None),
        server=server,
        missing=tuple(index for index, response in enumerate(samples) if response is None),
        failures=failures or {},
    )


class Generator(Protocol):
    """The fleet, as a rollout sees it."""

    async def generate(
        self,
        prompt: Prompt,
        *,
        num_samples: int,
        sampling: SamplingParams,
        deadline_s: float,
        on_tokens: Callable[[int], None],
        on_server: Callable[[str], None],
        parts: ResponseParts | None = None,
    ) -> Generated:
        """What is finished by the deadline.

        `on_server` is called with the server that is asked; `on_tokens` with the tokens of all samples so far,
        whenever some arrive. `parts`: what there is of them already, and where what arrives is put; None: nothing is.
        """
        ...
