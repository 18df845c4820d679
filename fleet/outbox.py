"""What a call has to send, held until it makes a message that is worth its cost, or has waited long enough.

A message costs both ends about what a thousand tokens in it cost, so tokens travel together; but nobody waits long for
those that are there, and a lost server loses little that was made.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.draw import Outgoing, SampleDelta
from asyppo_async.fleet.engine.protocol import Delta, LabelRun
from asyppo_async.rpc.per_token import joined_kept


class Outbox:
    """Of one call; all methods belong to one event loop."""

    def __init__(self, *, chunk_tokens: int, chunk_s: float) -> None:
        """Args:
        chunk_tokens: So many tokens of all samples together do not wait.
        chunk_s: Nothing waits longer than this.
        """
        self._chunk_tokens = chunk_tokens
        self._chunk_s = chunk_s
        self._items: list[Outgoing | CallError] = []
        self._num_tokens = 0
        self._is_first = True
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: Outgoing | CallError) -> None:
        """Ends and errors do not wait, nor do the first tokens of the call."""
        self._items.append(item)
        if not isinstance(item, SampleDelta) or item.delta.end is not None or self._is_first:
            self._due.set()
            return
        self._num_tokens += len(item.delta.token_ids)
        if self._num_tokens >= self._chunk_tokens:
            self._due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._chunk_s, self._due.set)

    async def take(self) -> tuple[list[Outgoing], CallError | None]:
        """What is due, one item for all tokens of a sample, and the error that ends the call, if there is one.

        Waits for: enough tokens, an end, or time. Unblocked by: `put`.
        """
        await self._due.wait()
        items, self._items = self._items, []
        self._num_tokens = 0
        self._is_first = False
        self._due.clear()
        self.close()
        error = next((item for item in items if isinstance(item, CallError)), None)
        return _merged([item for item in items if not isinstance(item, CallError)]), error

    def close(self) -> None:
        """Wait for no time any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _merged(items: list[Outgoing]) -> list[Outgoing]:
    """The deltas of each sample as one, in the place of its first; a failure stays behind what its sample had."""
    if len(items) == 1:
        return items
    deltas: dict[int, list[Delta]] = {}
    for item in items:
        if isinstance(item, SampleDelta):
            deltas.setdefault(item.sample_index, []).append(item.delta)
    failures = [item for item in items if not isinstance(item, SampleDelta)]
    return [SampleDelta(sample_index=index, delta=_joined(each)) for index, each in deltas.items()] + failures


def _joined(deltas: Sequence[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    runs: list[LabelRun] = []
    for run in (run for delta in deltas for run in delta.runs):
        if runs and runs[-1].label == run.label:
            runs[-1] = LabelRun(label=run.label, num_tokens=runs[-1].num_tokens + run.num_tokens)
        else:
            runs.append(run)
    return Delta(
        token_ids=np.concatenate([delta.token_ids for delta in deltas]),
        logprobs=np.concatenate([delta.logprobs for delta in deltas]),
        runs=tuple(runs),
        end=deltas[-1].end,
        kept=joined_kept([delta.kept for delta in deltas if len(delta.token_ids)]),
        routed_experts=deltas[-1].routed_experts,
    )
