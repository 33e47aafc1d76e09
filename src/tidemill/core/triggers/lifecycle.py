"""What follows when a trigger ends: whether it runs again, after what pause, and what is written down of it.

Pure: the shell tells how a run ended, and how long it took; randomness comes in as bits.

Invariants:
1. Who was cancelled does not run again by itself; only a timeout counts as a failure, and is treated as one.
2. A run that ended without having fired anything has failed, unless it is restarted always and took an event.
3. A run that took an event from a shared stream and finished begins again at once: it cannot spin, for it waits for
   the next one. Any other restart has a pause, which is not shorter than the first bound of the backoff, grows while
   runs end soon, and starts over after a long run.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tidemill.core.retry import JITTER_BITS, Backoff

#: After this long a run counts as one that worked, and the pauses start over.
HEALTHY_SECONDS = 60.0
#: The bounds of the pauses before restarts.
BACKOFF = Backoff(1.0, 30.0)


class Restart(enum.StrEnum):
    """When a trigger that has ended runs again."""

    ALWAYS = "always"
    ON_FAILURE = "on-failure"
    NEVER = "never"


class CancelReason(enum.StrEnum):
    """Why a trigger is cancelled.

    USER: it was removed, or replaced by another one. TIMEOUT: it failed its shared stream and did not end. HAND_OVER:
    another host has claimed it. SHUTDOWN: its host stops. DONE: who waited for it needs no more of it.
    """

    USER = "user"
    TIMEOUT = "timeout"
    HAND_OVER = "hand-over"
    SHUTDOWN = "shutdown"
    DONE = "done"


class Ending(enum.Enum):
    """How a run came to its end, when nobody cancelled it."""

    RETURNED = "returned"
    RAISED = "raised"


class EndVerdict(enum.Enum):
    """What a trigger is now."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Next:
    """What follows.

    Attributes:
        verdict: What the trigger is now.
        pause_seconds: How long until it runs again; None: it does not.
        anew: Whether it begins from what it was given, or goes on with what it had been made of.
    """

    verdict: EndVerdict
    pause_seconds: float | None = None
    anew: bool = False


class TriggerLife:
    """The runs of one trigger.

    Args:
        restart: When it runs again.
        backoff: The bounds of the pauses before it does.
    """

    __slots__ = ("_backoff", "_failures", "restart")

    def __init__(self, restart: Restart, backoff: Backoff = BACKOFF) -> None:
        """Begin with no run."""
        self.restart = restart
        self._backoff = backoff
        self._failures = 0

    def ended(self, ending: Ending, events: int, seconds: float, bits: int, taken: int = 0) -> Next:
        """Decide what follows a run that nobody cancelled.

        Args:
            ending: How it ended.
            events: How many it has fired.
            seconds: How long it took.
            bits: 32 random bits.
            taken: How many events it has taken from a shared stream.
        """
        if ending is Ending.RETURNED and taken and self.restart is Restart.ALWAYS:
            self._failures = 0
            return Next(EndVerdict.FINISHED, 0.0, anew=True)
        if seconds >= HEALTHY_SECONDS:
            self._failures = 0
        failed = ending is Ending.RAISED or not events
        if not failed:
            # One that finishes at once, for ever, must not spin either.
            pause = self._pause(bits) if self.restart is Restart.ALWAYS else None
            return Next(EndVerdict.FINISHED, pause, anew=True)
        pause = None if self.restart is Restart.NEVER else self._pause(bits)
        return Next(EndVerdict.FAILED, pause)

    def cancelled(self, reason: CancelReason, bits: int) -> Next:
        """Decide what follows a run that was cancelled."""
        if reason is CancelReason.TIMEOUT:
            return Next(EndVerdict.FAILED, None if self.restart is Restart.NEVER else self._pause(bits))
        return Next(EndVerdict.FINISHED if reason is CancelReason.DONE else EndVerdict.CANCELLED)

    def _pause(self, bits: int) -> float:
        self._failures += 1
        bound = self._backoff.bound(self._failures)
        # Between half of the bound and the bound, and never below the first one.
        return max(self._backoff.bound(1), bound * (0.5 + 0.5 * bits / (1 << JITTER_BITS)))
