"""What a pipeline or a backfill is doing right now, in words: which step of its start or stop it waits for.

Steps are entered and left by any thread, and some overlap. Nothing is decided here.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

#: A step that takes longer than this says what it waits for.
LATE_SECONDS = 1.0


class Phase(enum.StrEnum):
    """How far a run is."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"


class RunState(msgspec.Struct, frozen=True):
    """One moment of a run.

    Attributes:
        phase: How far it is.
        seconds: How long it has been in this phase.
        run_seconds: How long the run has lasted.
        step: What it waits for, '' if for nothing.
        step_seconds: For how long.
        left_seconds: While draining: how long that may still take.
        work_seconds: How long engines could work, until now or the stop.
    """

    phase: Phase = Phase.STARTING
    seconds: float = 0.0
    run_seconds: float = 0.0
    step: str = ""
    step_seconds: float = 0.0
    left_seconds: float | None = None
    work_seconds: float = 0.0

    def describe_step(self) -> str:
        """Return what it waits for and for how long.

        Example:
            >>> RunState(step="Spark is starting", step_seconds=3.2).describe_step()
            'Spark is starting (3 s)'
        """
        return f"{self.step} ({self.step_seconds:.0f} s)" if self.step else ""


class _Step(msgspec.Struct):
    text: str
    late: str
    since: float


class RunStates:
    """Follows a run; any thread may call it.

    Args:
        clock: Seconds on a clock that never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the start."""
        self._clock = clock
        self._lock = threading.Lock()
        self._steps: list[_Step] = []
        self._began = self._since = clock()
        self._phase = Phase.STARTING
        self._drained_until: float | None = None
        self._worked_from: float | None = None
        self._worked_until: float | None = None

    def enter(self, phase: Phase, up_to_seconds: float | None = None) -> None:
        """Begin a phase; a drain that has begun keeps its deadline.

        Args:
            phase: The phase.
            up_to_seconds: How long a drain may take.
        """
        with self._lock:
            if phase is not self._phase:
                self._phase, self._since = phase, self._clock()
                self._drained_until = None if up_to_seconds is None else self._since + up_to_seconds
                if phase is Phase.RUNNING:
                    self._worked_from = self._since
                elif phase is Phase.STOPPING:
                    self._worked_until = self._since

    @contextlib.contextmanager
    def step(self, text: str, late: str = "", on_late: Callable[[], None] | None = None) -> Iterator[None]:
        """Wait for something while the block runs.

        Args:
            text: For what, as in "Spark is starting".
            late: What to say instead once it takes longer than `LATE_SECONDS`; such a step is shown before others.
            on_late: Called then, once, in another thread.
        """
        step = _Step(text, late, self._clock())
        with self._lock:
            self._steps.append(step)
        timer = threading.Timer(LATE_SECONDS, on_late) if on_late is not None else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            with self._lock:
                self._steps.remove(step)

    def now(self) -> RunState:
        """Return the moment."""
        with self._lock:
            now = self._clock()
            late = [step for step in self._steps if step.late and now - step.since >= LATE_SECONDS]
            step = next(iter(late or self._steps), None)
            return RunState(
                self._phase,
                now - self._since,
                now - self._began,
                "" if step is None else (step.late if late else step.text),
                0.0 if step is None else now - step.since,
                None if self._drained_until is None else max(0.0, self._drained_until - now),
                0.0 if self._worked_from is None else (self._worked_until or now) - self._worked_from,
            )
