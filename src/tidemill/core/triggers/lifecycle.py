"""Decides what follows when a trigger ends: whether it runs again, after which pause, and which state is recorded.

Pure: the shell reports how a run ended and how long it took; randomness comes in as bits.

Invariants:
1. A trigger that was cancelled does not run again by itself, except after a timeout, which counts as a failure.
2. A run that ended without firing has failed, unless the trigger always restarts and took an event. A run that other
   triggers disturbed is repeated, whatever the trigger's restart policy.
3. A run that took an event from a shared stream and finished restarts at once: it cannot spin, because it waits for
   the next event. Any other restart follows a pause. The pause is not shorter than the first bound of the backoff,
   grows while runs are short, and is reset by a long run.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tidemill.core.retry import JITTER_BITS, Backoff

#: A run of this length counts as healthy and resets the pauses.
HEALTHY_SECONDS = 60.0
#: The bounds of the pauses before restarts.
BACKOFF = Backoff(1.0, 30.0)


class Restart(enum.StrEnum):
    """The restart policy of a trigger."""

    ALWAYS = "always"
    ON_FAILURE = "on-failure"
    NEVER = "never"


class CancelReason(enum.StrEnum):
    """Why a trigger is cancelled.

    USER: a user removed or replaced it. TIMEOUT: it failed its shared stream and did not end. HAND_OVER: another host
    has claimed it. SHUTDOWN: its host stops. DONE: it is no longer needed.
    """

    USER = "user"
    TIMEOUT = "timeout"
    HAND_OVER = "hand-over"
    SHUTDOWN = "shutdown"
    DONE = "done"


class TriggerEnding(enum.Enum):
    """How a run that was not cancelled ended. DISTURBED: another trigger cancelled an operation that it awaited."""

    RETURNED = "returned"
    RAISED = "raised"
    DISTURBED = "disturbed"


class EndVerdict(enum.Enum):
    """The state of a trigger after a run."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Next:
    """The step that follows a run.

    Attributes:
        verdict: The state of the trigger.
        pause_seconds: The pause before it runs again; None: it does not.
        from_start: Whether it is created as listed, instead of from the result of `serialize()`.
    """

    verdict: EndVerdict
    pause_seconds: float | None = None
    from_start: bool = False


class TriggerLife:
    """The runs of one trigger.

    Args:
        restart: When it runs again.
        backoff: The bounds of the pauses before restarts.
    """

    __slots__ = ("_backoff", "_failures", "restart")

    def __init__(self, restart: Restart, backoff: Backoff = BACKOFF) -> None:
        self.restart = restart
        self._backoff = backoff
        self._failures = 0

    def decide_ended(self, ending: TriggerEnding, events: int, seconds: float, bits: int, taken: int = 0) -> Next:
        """Decide what follows a run that was not cancelled.

        Args:
            ending: How the run ended.
            events: The number of events it fired.
            seconds: How long it took.
            bits: 32 random bits.
            taken: The number of events it took from a shared stream.
        """
        if ending is TriggerEnding.RETURNED and taken and self.restart is Restart.ALWAYS:
            self._failures = 0
            return Next(EndVerdict.FINISHED, 0.0, from_start=True)
        if seconds >= HEALTHY_SECONDS:
            self._failures = 0
        if ending is TriggerEnding.DISTURBED:
            return Next(EndVerdict.FAILED, self._compute_pause(bits))
        failed = ending is TriggerEnding.RAISED or not events
        if not failed:
            # Even a trigger that finishes successfully at once, each time, must not spin.
            pause = self._compute_pause(bits) if self.restart is Restart.ALWAYS else None
            return Next(EndVerdict.FINISHED, pause, from_start=True)
        pause = None if self.restart is Restart.NEVER else self._compute_pause(bits)
        return Next(EndVerdict.FAILED, pause)

    def decide_cancelled(self, reason: CancelReason, bits: int) -> Next:
        """Decide what follows a run that was cancelled."""
        if reason is CancelReason.TIMEOUT:
            return Next(EndVerdict.FAILED, None if self.restart is Restart.NEVER else self._compute_pause(bits))
        return Next(EndVerdict.FINISHED if reason is CancelReason.DONE else EndVerdict.CANCELLED)

    def _compute_pause(self, bits: int) -> float:
        self._failures += 1
        bound = self._backoff.compute_bound(self._failures)
        # Between half of the bound and the bound, and never below the first bound.
        return max(self._backoff.compute_bound(1), bound * (0.5 + 0.5 * bits / (1 << JITTER_BITS)))
