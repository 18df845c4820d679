"""Generation without an engine: plain torch on a tiny model, with the behaviour log-probs of what was sampled from."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from asyppo_async.algorithms.logprobs import KeptSet, kept_tokens
from asyppo_async.algorithms.routing import PackedRouting, routing_replay
from asyppo_async.trainer.worker.experts import routers_of
from asyppo_async.trainer.worker.model import Policy
from asyppo_async.types import FinishReason, Int16Array, Prompt, Response, SamplingParams, VersionRuns

RoutingScript = Callable[[torch.Tensor], torch.Tensor]
"""Token ids [R, L] to experts [R, L, layers, experts per token]; what it says of a position never changes later."""


@dataclass(slots=True)
class TinySampler:
    """Samples all responses of some prompts side by side; prompts must be of one length."""

    policy: Policy
    sampling: SamplingParams
    generator: torch.Generator
    fixed_length: bool = False
    """A response ends, finished, with its last allowed token: every run of a study gets the same number of tokens."""
    script: RoutingScript | None = None
    """Experts that a mixture uses instead of its routers' choice; they are returned with the response."""

    @torch.inference_mode()
    def sample(self, prompts: Sequence[Prompt], *, num_samples: int, version: int) -> list[list[Response]]:
        """`num_samples` responses of each prompt, every token by weights of `version`."""
        rows = [prompt.token_ids for prompt in prompts for _ in range(num_samples)]
        ids = torch.tensor(rows)
        num_prompt = ids.shape[1]
        logprobs = torch.zeros(len(rows), 0)
        running = torch.ones(len(rows), dtype=torch.bool)
        lengths = torch.zeros(len(rows), dtype=torch.int64)
        stops = torch.tensor(self.sampling.stop_token_ids)
        for _ in range(self.sampling.max_tokens):
            log_pi = self._distribution(ids)
            token = torch.multinomial(log_pi.exp(), 1, generator=self.generator)
            ids = torch.cat([ids, token], dim=1)
            logprobs = torch.cat([logprobs, log_pi.gather(1, token)], dim=1)
            lengths += running
            running &= ~torch.isin(token.squeeze(1), stops)
            if not bool(running.any()):
                break
        responses = [
            _response(
                ids[row, num_prompt:],
                logprobs[row],
                int(lengths[row]),
                "length" if bool(running[row]) and not self.fixed_length else "stop",
                version,
                self._experts_of(ids[row, : num_prompt + int(lengths[row]) - 1]),
            )
            for row in range(len(rows))
        ]
        return [responses[start : start + num_samples] for start in range(0, len(rows), num_samples)]

    def _experts_of(self, fed: torch.Tensor) -> Int16Array | None:
        return None if self.script is None else self.script(fed[None])[0].numpy().astype(np.int16)

    def _distribution(self, ids: torch.Tensor) -> torch.Tensor:
        """[R, V] log-probs of the next token, as top-k and top-p leave them."""
        routing = nullcontext()
        if self.script is not None:
            experts = self.script(ids).flatten(0, 1)
            everywhere = torch.ones(len(experts), dtype=torch.bool)
            routing = routing_replay(
                routers_of(self.policy.module),
                PackedRouting(experts=experts, replayed=everywhere),
                normalise=True,
            )
        with routing:
            hidden = self.policy.hidden_states(ids)[:, -1]
        z = (hidden @ self.policy.head_weight.T).float() / self.sampling.temperature
        kept = kept_tokens(z, KeptSet(top_k=self.sampling.top_k, top_p=self.sampling.top_p))
        return z.masked_fill(~kept, -torch.inf).log_softmax(-1)


def _response(
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    length: int,
    reason: FinishReason,
    version: int,
    routed_experts: Int16Array | None,
) -> Response:
    return Response(
        token_ids=tokens[:length].numpy().astype(np.int32),
        behaviour_logprobs=logprobs[:length].numpy().astype(np.float32),
        versions=VersionRuns(((version, length),)),
        finish_reason=reason,
        routed_experts=routed_experts,
    )
