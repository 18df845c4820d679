"""What became of each `Generate` call: counted, and one log line with the ids of both sides."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asyppo_async.fleet.call_error import CallError
from asyppo_async.fleet.draw import Draw, Outgoing, SampleDelta
from asyppo_async.fleet.metrics import FleetMetrics
from asyppo_async.rpc.v1 import fleet_pb2

_log = logging.getLogger(__name__)


class CallRecord:
    """One call under way."""

    def __init__(self, metrics: FleetMetrics) -> None:
        self.began_s = time.monotonic()
        self.first_s: float | None = None
        self.last_s = self.began_s
        self.num_tokens = 0
        self.ends: Counter[str] = Counter()
        self._metrics = metrics

    def admitted(self, draw: Draw) -> None:
        """It has a place in the queue."""
        self._metrics.prompt_tokens.inc(len(draw.prompt_token_ids))

    def sent(self, items: Sequence[Outgoing]) -> int:
        """These went out; returns their tokens."""
        deltas = [item.delta for item in items if isinstance(item, SampleDelta)]
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        self.last_s = time.monotonic()
        if num_tokens and self.first_s is None:
            self.first_s = self.last_s
            self._metrics.first_token_s.observe(self.first_s - self.began_s)
        self.num_tokens += num_tokens
        self._metrics.tokens.inc(num_tokens)
        ended: list[str] = [delta.end for delta in deltas if delta.end is not None]
        ended += [item.failure.kind for item in items if not isinstance(item, SampleDelta)]
        for end in ended:
            self.ends[end] += 1
            self._metrics.samples.labels(end).inc()
        return num_tokens


class CallRecorder:
    """Of one server. With `log_calls` the line of a call is seen at the usual level, else at DEBUG."""

    def __init__(self, metrics: FleetMetrics, *, log_calls: bool) -> None:
        self._metrics = metrics
        self._level = logging.INFO if log_calls else logging.DEBUG

    @contextmanager
    def recording(self, request: fleet_pb2.GenerateRequest) -> Iterator[CallRecord]:
        """The life of one call, refused ones included."""
        record = CallRecord(self._metrics)
        outcome = "error"
        try:
            yield record
            outcome = "ok"
        except CallError as error:
            outcome = error.status.lower()
            raise
        except asyncio.CancelledError:
            outcome = "client_gone"
            raise
        except ValueError:
            outcome = "invalid_argument"
            raise
        finally:
            self._end(record, request, outcome)

    def _end(self, record: CallRecord, request: fleet_pb2.GenerateRequest, outcome: str) -> None:
        whole_s = time.monotonic() - record.began_s
        self._metrics.calls.labels(outcome).inc()
        self._metrics.call_s.observe(whole_s)
        per_sample = record.num_tokens / max(1, request.num_samples)
        if record.first_s is not None and per_sample > 1:
            self._metrics.token_s.observe((record.last_s - record.first_s) / (per_sample - 1))
        if not _log.isEnabledFor(self._level):
            return
        fields = {
            "request_id": request.request_id,
            "prompt_id": request.prompt_id,
            "run_id": request.run_id,
            "num_samples": request.num_samples,
            "num_tokens": record.num_tokens,
            "ends": dict(record.ends),
            "first_token_s": None if record.first_s is None else round(record.first_s - record.began_s, 4),
            "whole_s": round(whole_s, 4),
            "outcome": outcome,
        }
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        _log.log(self._level, "Generate %s", words, extra={"fields": fields})
