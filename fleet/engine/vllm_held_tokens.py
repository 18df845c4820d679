"""Tokens that vLLM holds for others to come are handed over after a time; vLLM itself would wait for them for ever."""

import asyncio
from typing import Any


class HeldTokens:
    """`run` must run beside the requests. vLLM's output processor belongs to the same event loop."""

    def __init__(self, output_processor: Any, longest_s: float) -> None:
        """`longest_s`: a token of a request that streams is held no longer than this."""
        self._output_processor = output_processor
        self._look_every_s = longest_s / 2
        self._sent: dict[str, int] = {}
        """By request: how many tokens had been handed over at the last look."""

    async def run(self) -> None:
        """Produces: outputs of requests that are too slow to fill one. Waits for: time."""
        while True:
            await asyncio.sleep(self._look_every_s)
            self.look()

    def look(self) -> None:
        """Hand over what is held of each request that has handed nothing over since the last look."""
        sent: dict[str, int] = {}
        for request_id, state in self._output_processor.request_states.items():
            # 0 also where nothing is streamed: of a request that is scored, or with an interval of 1.
            if not state.sent_tokens_offset:
                continue
            if self._sent.get(request_id) == state.sent_tokens_offset:
                self._hand_over(state)
            sent[request_id] = state.sent_tokens_offset
        self._sent = sent

    def _hand_over(self, state: Any) -> None:
        held = state.detokenizer.output_token_ids[state.sent_tokens_offset :]
        if not held:
            return
        state.sent_tokens_offset += len(held)
        # At an interval of 1 vLLM takes the tokens that it is given as they are.
        interval, state.stream_interval = state.stream_interval, 1
        try:
            state.queue.put(state.make_request_output(held, None, None, None))
        finally:
            state.stream_interval = interval
