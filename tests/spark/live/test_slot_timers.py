"""The timers of slots, without Spark: time is fed when it is due, and a beat costs no timer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tidemill.core.supervision import slot_events
from tidemill.core.supervision.slot import Slot
from tidemill.core.supervision.slot_limits import SlotLimits
from tidemill.spark.live.supervised_slot import SupervisedSlot
from tidemill.spark.live.supervisor import Supervisor


class Timer:
    """A timer of the scripted loop."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.cancelled = False

    def when(self) -> float:
        return self.at

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """A loop whose clock a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[Timer, Any, tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, function: Any, *arguments: Any) -> Timer:
        self.timers.append((Timer(at), function, arguments))
        return self.timers[-1][0]

    def fire(self) -> None:
        timer, function, arguments = self.timers[-1]
        assert not timer.cancelled
        self.now = timer.at
        function(*arguments)


class WatchedSlot(Slot):
    """Notes when it is told the time."""

    ticks: list[float]

    def feed(self, event: slot_events.Input, now: float) -> list[slot_events.Effect]:
        if isinstance(event, slot_events.Tick):
            self.ticks.append(now)
        return super().feed(event, now)


def start() -> tuple[Supervisor, Any, Loop]:
    """Return a supervisor with a slot whose engine is connected."""
    loop = Loop()
    live = Supervisor(SimpleNamespace(), "w", 1, lambda *_: None, lambda _: None, SlotLimits())  # type: ignore[arg-type, return-value]
    live._loop = loop  # type: ignore[assignment]
    live._apply = lambda slot, effect: None  # type: ignore[method-assign]
    slot: Any = SupervisedSlot(0, SlotLimits(), SimpleNamespace())  # type: ignore[arg-type]
    slot.machine = WatchedSlot(0, SlotLimits())
    slot.machine.ticks = []
    live.feed(slot, slot_events.StartSlot())
    live.feed(slot, slot_events.EngineConnected(1, 1))
    return live, slot, loop


def test_beats_leave_the_timer_that_is_there() -> None:
    live, slot, loop = start()
    before = len(loop.timers)
    for _ in range(10):
        loop.now += 0.05
        live.feed(slot, slot_events.Heartbeat(1))
    assert len(loop.timers) == before
    loop.fire()
    assert slot.machine.ticks == []  # it was heard since then
    assert slot.timer.when() == slot.machine.due


def test_an_engine_that_falls_silent_is_told_the_time_when_that_is_due() -> None:
    live, slot, loop = start()
    loop.now += 0.5
    live.feed(slot, slot_events.Heartbeat(1))
    loop.fire()
    due = slot.machine.due
    loop.fire()
    assert slot.machine.ticks == [due]
    while str(slot.machine.state) == "running" and loop.now < 200.0:
        loop.fire()
    assert 15.0 <= loop.now - 100.5 < 16.1
