"""A rank as `asyppo-train worker` starts it, whose rank 0 waits a second before each bucket that it sends."""

import sys
import time

import torch

from asyppo_async.trainer.worker.main import main
from asyppo_async.weights.group import Broadcast, WeightGroup

PAUSE_S = 1.0
_begin = WeightGroup.begin_broadcast


def begin_late(group: WeightGroup, tensor: torch.Tensor, what: str, deadline_s: float) -> Broadcast:
    time.sleep(PAUSE_S)
    return _begin(group, tensor, what, deadline_s)


if __name__ == "__main__":
    WeightGroup.begin_broadcast = begin_late  # type: ignore[method-assign]
    sys.exit(main())
