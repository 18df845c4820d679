"""What one `Generate` call asks for, sample by sample, and what goes out for it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from asyppo_async.fleet.engine.protocol import Delta
from asyppo_async.rpc.codec import SampleFailure
from asyppo_async.types import Int32Array, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDelta:
    sample_index: int
    delta: Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What one call asks for."""

    prompt_token_ids: Int32Array
    num_samples: int
    sampling: SamplingParams
    begun: Mapping[int, Int32Array]
    """By sample: tokens that it goes on from."""
    max_model_len: int
    """Of the engine: prompt and response together."""
    request_id: str = ""
    prompt_id: str = ""
    return_kept_tokens: bool = False
    return_routed_experts: bool = False

    @property
    def clipped_max_tokens(self) -> int:
        """For how many tokens there is room, where that is less than was asked for; else 0."""
        room = self.max_model_len - len(self.prompt_token_ids)
        return room if 0 < room < self.sampling.max_tokens else 0

    def room_of(self, index: int) -> int:
        """How many more tokens a sample can have."""
        return self.max_model_len - len(self.prompt_token_ids) - len(self.begun.get(index, ()))

    def prompt_of(self, index: int) -> Int32Array:
        """What the engine reads for a sample: the prompt, and what there is of the response."""
        begun = self.begun.get(index)
        return self.prompt_token_ids if begun is None else np.concatenate([self.prompt_token_ids, begun])

    def sampling_of(self, index: int) -> SamplingParams:
        """For what is left of a sample."""
        num_begun = len(self.begun.get(index, ()))
        max_tokens = min(self.sampling.max_tokens - num_begun, self.room_of(index))
        min_tokens = max(0, self.sampling.min_tokens - num_begun)
        return replace(self.sampling, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailed:
    """The end of a sample that is not finished; the other samples of its call go on."""

    sample_index: int
    failure: SampleFailure


Outgoing = SampleDelta | SampleFailed
