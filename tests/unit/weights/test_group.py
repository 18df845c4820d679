"""A broadcast of a group that ends at an awkward moment."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from asyppo_async.errors import WeightSyncError
from asyppo_async.weights.group import Broadcast


class EndsBetween:
    """An operation that ends just after the first wait for it has given up."""

    def __init__(self, failure: str = "") -> None:
        self._failure = failure
        self._num_waits = 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self._num_waits += 1
        if self._num_waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._failure:
            raise RuntimeError(self._failure)

    def is_completed(self) -> bool:
        return self._num_waits > 0


def broadcast_of(work: Any) -> Broadcast:
    nobody: Any = None
    now_s = time.monotonic()
    return Broadcast(nobody, work, torch.empty(1), None, "its bucket", now_s, now_s + 60)


def test_finish_when_the_operation_ends_just_after_a_wait_gave_up_then_it_is_no_failure() -> None:
    broadcast_of(EndsBetween()).finish()


def test_finish_when_the_operation_fails_just_after_a_wait_gave_up_then_its_own_words_come() -> None:
    with pytest.raises(WeightSyncError, match="Connection closed by peer"):
        broadcast_of(EndsBetween("Connection closed by peer")).finish()
