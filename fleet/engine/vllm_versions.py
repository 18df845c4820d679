"""Which weights sampled which tokens of one request: the one place that reads vLLM's private book-keeping.

vLLM's outputs carry version spans only when a request ends. In mid-stream the same list is held by its output
processor; it only grows, so a reference to it is enough. Every response's spans are compared with what was reported.
"""

from collections.abc import Sequence
from typing import Any

from asyppo_async.fleet.engine.protocol import EngineFault, LabelRun, WeightsLabel

Starts = Sequence[tuple[str, int]]
"""(label, index of the first token sampled under it)."""


def label_text(label: WeightsLabel) -> str:
    return f"{label.version}@{label.load}"


def parse_label(text: str) -> WeightsLabel:
    version, separator, load = text.partition("@")
    if not separator:
        raise EngineFault(f"the engine reports weights {text!r}, which this server never named")
    return WeightsLabel(version=int(version), load=int(load))


class VersionReader:
    """Follows one request; `external_id` is the id that `AsyncLLM.generate` was called with."""

    def __init__(self, output_processor: Any, external_id: str) -> None:
        self._output_processor = output_processor
        self._external_id = external_id
        self._starts: Starts | None = None
        self._reported: list[LabelRun] = []
        self._num_tokens = 0

    def take(self, num_tokens: int, final_spans: Sequence[Any] | None) -> tuple[LabelRun, ...]:
        """The runs of the next `num_tokens`; `final_spans` are vLLM's own, given with the last output.

        Raises:
            EngineFault: nothing is known of these tokens, or the final spans contradict what was reported.
        """
        if self._starts is None:
            self._starts = self._live_starts()
        starts = self._starts
        if final_spans is not None:
            starts = [(span.version, span.start) for span in final_spans]
        if starts is None:
            raise EngineFault(
                f"request {self._external_id}: vLLM holds no version spans; is this version tested?"
            )
        runs = runs_between(starts, self._num_tokens, self._num_tokens + num_tokens)
        self._num_tokens += num_tokens
        self._reported.extend(runs)
        if final_spans is not None:
            self._check(runs_between(starts, 0, self._num_tokens))
        return runs

    def _live_starts(self) -> Starts | None:
        internal_ids = self._output_processor.external_req_ids.get(self._external_id)
        if not internal_ids:
            return None  # finished already; the output carries the final spans
        starts: Starts = self._output_processor.request_states[internal_ids[0]].weight_version_starts
        return starts

    def _check(self, final: tuple[LabelRun, ...]) -> None:
        if join_runs(self._reported) != join_runs(final):
            raise EngineFault(
                f"request {self._external_id}: version spans {join_runs(final)} at its end, but "
                f"{join_runs(self._reported)} reported on the way"
            )


def runs_between(starts: Starts, begin: int, end: int) -> tuple[LabelRun, ...]:
    """The runs that cover tokens [begin, end).

    Raises:
        EngineFault: tokens before the first start.
    """
    if begin == end:
        return ()
    if not starts or starts[0][1] > begin:
        raise EngineFault(f"no weights are named for tokens {begin} to {end}: {list(starts)}")
    ends = [start for _, start in starts[1:]] + [end]
    runs = []
    for (text, start), stop in zip(starts, ends, strict=True):
        num_tokens = min(stop, end) - max(start, begin)
        if num_tokens > 0:
            runs.append(LabelRun(label=parse_label(text), num_tokens=num_tokens))
    return tuple(runs)


def join_runs(runs: Sequence[LabelRun]) -> list[LabelRun]:
    """Neighbours of one label as one run."""
    joined: list[LabelRun] = []
    for run in runs:
        if joined and joined[-1].label == run.label:
            joined[-1] = LabelRun(label=run.label, num_tokens=joined[-1].num_tokens + run.num_tokens)
        else:
            joined.append(run)
    return joined
