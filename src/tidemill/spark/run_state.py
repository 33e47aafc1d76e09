"""The current activity of a pipeline or a backfill, in words: its phase, and the step of its startup or shutdown in
progress.

Any thread may enter and leave steps, and steps may overlap. Nothing is decided here.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

#: A step that takes longer than this also says what it waits for.
LATE_SECONDS = 1.0


class RunPhase(enum.StrEnum):
    """The phase of a run."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"


class RunState(msgspec.Struct, frozen=True):
    """The state of a run at one moment.

    Attributes:
        phase: The phase of the run.
        seconds: The time in this phase.
        run_seconds: The time since the start of the run.
        step: What the run is waiting for; '' if nothing.
        step_seconds: The time it has waited for that.
        left_seconds: While draining: the time left for the drain.
        work_seconds: How long engines could work, until now or until the shutdown.
    """

    phase: RunPhase = RunPhase.STARTING
    seconds: float = 0.0
    run_seconds: float = 0.0
    step: str = ""
    step_seconds: float = 0.0
    left_seconds: float | None = None
    work_seconds: float = 0.0

    def describe_step(self) -> str:
        """Return what the run is waiting for, and for how long.

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
    """Tracks the state of a run; any thread may call it.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._steps: list[_Step] = []
        self._began = self._since = clock()
        self._phase = RunPhase.STARTING
        self._drained_until: float | None = None
        self._worked_from: float | None = None
        self._worked_until: float | None = None

    def enter(self, phase: RunPhase, up_to_seconds: float | None = None) -> None:
        """Enter a phase; entering the drain again keeps its deadline.

        Args:
            phase: The phase.
            up_to_seconds: How long a drain may take.
        """
        with self._lock:
            if phase is not self._phase:
                self._phase, self._since = phase, self._clock()
                self._drained_until = None if up_to_seconds is None else self._since + up_to_seconds
                if phase is RunPhase.RUNNING:
                    self._worked_from = self._since
                elif phase is RunPhase.STOPPING:
                    self._worked_until = self._since

    @contextlib.contextmanager
    def step(self, text: str, late: str = "", on_late: Callable[[], None] | None = None) -> Iterator[None]:
        """Show a step while the block runs.

        Args:
            text: The step, as in "Spark is starting".
            late: The text to show instead after `LATE_SECONDS`; such a step is shown before others.
            on_late: Called once after that time, in another thread.
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
        """Return the current state."""
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
