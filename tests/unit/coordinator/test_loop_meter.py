"""What is measured around a step: idleness of the fleet, and how long weights wait until they are used."""

from types import SimpleNamespace
from typing import Any

import pytest

from asyppo_async.trainer.coordinator import loop_meter
from asyppo_async.trainer.coordinator.loop_meter import IdleClock, LoopMeter
from asyppo_async.trainer.coordinator.waits import LoopLag
from asyppo_async.types import VersionRuns


class Clock:
    """Stands in for the module's time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loop_meter, "time", clock)
    return clock


def test_idle_clock_counts_only_what_nothing_covers(clock: Clock) -> None:
    idle = IdleClock()
    clock.now_s += 2
    with idle.busy():
        clock.now_s += 4
        with idle.busy():
            clock.now_s += 8
        clock.now_s += 16
    clock.now_s += 32
    assert idle.take() == 2 + 32
    with idle.busy():
        clock.now_s += 64
        assert idle.take() == 0
    clock.now_s += 128
    assert idle.take() == 128


def a_batch(*versions: list[int]) -> Any:
    responses = [SimpleNamespace(versions=VersionRuns.of(own)) for own in versions]
    trajectories = [SimpleNamespace(response=response) for response in responses]
    return SimpleNamespace(groups=[SimpleNamespace(trajectories=trajectories)])


def first_use_s(meter: LoopMeter) -> float | None:
    counts = SimpleNamespace(queued=0, in_flight=0)
    meter._core = SimpleNamespace(counts=lambda: counts, token_counts=lambda: None)  # type: ignore[assignment]
    report, trace = SimpleNamespace(draws=[], lead_limit=0), SimpleNamespace(seconds=lambda _: 0.0)
    return meter.row(report, None, 1.0, 0.0, trace).get("staleness/push_to_first_use_s")  # type: ignore[arg-type]


def test_first_use_of_weights_is_when_a_batch_first_holds_their_tokens(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_meter, "ledger_metrics", lambda counts, tokens: {})
    meter = LoopMeter(core=None, lag=LoopLag())  # type: ignore[arg-type]
    meter.pushed(1)
    clock.now_s += 10
    meter.pushed(2)
    clock.now_s += 5
    meter.begins(a_batch([0, 0], [0, 1]))
    assert first_use_s(meter) == 15 and first_use_s(meter) is None
    clock.now_s += 1
    meter.begins(a_batch([1, 1], [1, 1]))
    assert first_use_s(meter) is None, "not the first"
    meter.pushed(3)
    clock.now_s += 2
    meter.begins(a_batch([2, 3]))
    assert first_use_s(meter) == ((5 + 1 + 2) + 2) / 2
    meter.pushed(4)
    meter.pushed(5)
    meter.begins(a_batch([5, 5]))
    meter.begins(a_batch([4, 4]))
    assert first_use_s(meter) == 0.0, "4 came after 5 and is not waited for"
