"""What a run is doing, from moment to moment."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from tidemill.spark import run_state
from tidemill.spark.foreground import WAIT_SECONDS, take
from tidemill.spark.run_state import RunPhase, RunStates


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_says_what_is_waited_for_and_for_how_long() -> None:
    clock = Clock()
    states = RunStates(clock)
    with states.step("Spark is starting"):
        clock.now += 3.2
        assert states.now().describe_step() == "Spark is starting (3 s)"
    assert states.now().describe_step() == ""
    assert states.now().phase is RunPhase.STARTING


def test_of_several_steps_the_one_that_is_late_is_shown() -> None:
    clock = Clock()
    states = RunStates(clock)
    with states.step("Spark is starting"), states.step("connecting to b", "no broker at b yet"):
        assert states.now().step == "Spark is starting"
        clock.now += 1.0
        assert states.now().describe_step() == "no broker at b yet (1 s)"


def test_a_late_step_calls_back_once_and_a_quick_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "LATE_SECONDS", 0.01)
    late = threading.Event()
    states = RunStates()
    with states.step("a", on_late=late.set):
        assert late.wait(60)
    monkeypatch.setattr(run_state, "LATE_SECONDS", 60.0)
    quick = threading.Event()
    with states.step("a", on_late=quick.set):
        pass
    assert not quick.is_set()


def test_a_drain_has_a_deadline_that_a_second_request_does_not_move() -> None:
    clock = Clock()
    states = RunStates(clock)
    states.enter(RunPhase.RUNNING)
    clock.now += 10
    states.enter(RunPhase.DRAINING, 30.0)
    clock.now += 5
    states.enter(RunPhase.DRAINING, 30.0)
    now = states.now()
    assert (now.phase, now.seconds, now.left_seconds) == (RunPhase.DRAINING, 5.0, 25.0)
    clock.now += 100
    assert states.now().left_seconds == 0.0


def test_the_time_of_work_is_that_between_start_and_stop() -> None:
    clock = Clock()
    states = RunStates(clock)
    clock.now += 7
    assert states.now().work_seconds == 0.0
    states.enter(RunPhase.RUNNING)
    clock.now += 10
    assert states.now().work_seconds == 10.0
    states.enter(RunPhase.DRAINING, 30.0)
    clock.now += 1
    states.enter(RunPhase.STOPPING)
    clock.now += 5
    assert (states.now().work_seconds, states.now().run_seconds) == (11.0, 23.0)


def test_no_wait_for_a_word_is_long_because_a_signal_just_before_it_does_not_end_it() -> None:
    class Words(queue.SimpleQueue):  # type: ignore[type-arg]
        """One whose word is put there by a signal handler that runs only after a wait."""

        waits: list[float] = []

        def get(self, block: bool = True, timeout: float | None = None) -> str:
            assert timeout is not None
            self.waits.append(timeout)
            if len(self.waits) < 3:
                raise queue.Empty
            return "word"

    assert take(Words()) == "word"
    assert Words.waits == [WAIT_SECONDS] * 3
    with pytest.raises(queue.Empty):
        take(queue.SimpleQueue(), time.monotonic() + 0.01)
