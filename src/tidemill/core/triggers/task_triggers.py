"""The triggers of deferred tasks in one triggerer: how many more it takes, which ones it stops, and what their ends
mean.

Theory of operation. A triggerer claims triggers while it has room. A claim is identified by the trigger's id and the
token of the claim: a trigger that was given up and claimed again counts as a different one. A trigger runs until its
first event is stored, which resumes its task in the store; the store also names triggers to stop before that.

Invariants:
1. No claim is started twice, however often the store repeats its answer, and no more are claimed than there is room.
2. A trigger is stopped at most once, and for the first reason; `on_kill` runs only if the reason is a user's request.
3. A task fails because of its trigger only if the trigger ended by itself without an event that is, or may be, stored.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

from tidemill.core.tasks.inputs import TriggerStopReason
from tidemill.core.triggers.event_plan import EventRefusal, EventRefused, StoreOutcome
from tidemill.core.triggers.lifecycle import CancelReason

#: The store's reason to stop a trigger that another triggerer has claimed.
HAND_OVER = "hand-over"

_REASONS = {
    TriggerStopReason.DONE.value: CancelReason.DONE,
    TriggerStopReason.FAILED.value: CancelReason.DONE,
    TriggerStopReason.TIMEOUT.value: CancelReason.TIMEOUT,
    TriggerStopReason.USER.value: CancelReason.USER,
}


class ClaimKey(NamedTuple):
    """Identifies a claim: the trigger's number in the store, and the token of the claim."""

    id: int
    token: int


class TaskEnd(enum.Enum):
    """The effect on the task when its trigger ends.

    RESUMED: its event is stored, and has resumed the task. FAILED: it fails its task. STOPPED: its task no longer waits
    for it. KILLED: the same, at a user's request, so `on_kill` runs. GIVEN_UP: it continues elsewhere, or later.
    """

    RESUMED = "resumed"
    FAILED = "failed"
    STOPPED = "stopped"
    KILLED = "killed"
    GIVEN_UP = "given-up"


def decide_end(reason: CancelReason | None, outcome: StoreOutcome | None) -> TaskEnd:
    """Return the effect on the task when its trigger ends.

    Args:
        reason: Why it was cancelled; None: it was not.
        outcome: The outcome of storing its event; None: it fired none, or the outcome is not known yet.

    Example:
        >>> decide_end(CancelReason.USER, None)
        <TaskEnd.KILLED: 'killed'>
    """
    if isinstance(outcome, EventRefused):
        if outcome.reason is not EventRefusal.CONTENT:
            return TaskEnd.GIVEN_UP
    elif outcome is not None:
        return TaskEnd.RESUMED
    match reason:
        case None:
            return TaskEnd.FAILED
        case CancelReason.USER:
            return TaskEnd.KILLED
        case CancelReason.HAND_OVER | CancelReason.SHUTDOWN:
            return TaskEnd.GIVEN_UP
        case _:
            return TaskEnd.STOPPED


def find_reason(said: str) -> CancelReason:
    """Return why a trigger is cancelled, given the store's reason to stop it.

    Args:
        said: A `TriggerStopReason`, or HAND_OVER. A newer store may give unknown reasons; they never mean a kill.
    """
    return _REASONS.get(said, CancelReason.HAND_OVER)


class TaskTriggers:
    """The claims of one triggerer.

    Args:
        capacity: The number of triggers it runs at once.

    Example:
        >>> triggers = TaskTriggers(2)
        >>> triggers.note_claimed([ClaimKey(7, 1), ClaimKey(7, 1)])
        [ClaimKey(id=7, token=1)]
        >>> triggers.room
        1
    """

    __slots__ = ("_held", "_last", "_stopped", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: set[ClaimKey] = set()
        self._stopped: set[ClaimKey] = set()
        # The claims in the store's last answer, which may be repeated after they have ended.
        self._last: set[ClaimKey] = set()

    @property
    def room(self) -> int:
        """The number of triggers that it can still take; a trigger that is still cleaning up occupies a slot."""
        return max(0, self.capacity - len(self._held))

    @property
    def count(self) -> int:
        """The number of triggers that run or clean up."""
        return len(self._held)

    @property
    def is_over(self) -> bool:
        """Whether it runs more triggers than its capacity: those of a stream that no triggerer could run."""
        return len(self._held) > self.capacity

    @property
    def is_idle(self) -> bool:
        """Whether no trigger runs or cleans up."""
        return not self._held

    @property
    def running(self) -> int:
        """The number of triggers that run and have not been asked to stop."""
        return len(self._held) - len(self._stopped)

    @property
    def held(self) -> list[ClaimKey]:
        """The triggers that run and have not been asked to stop, sorted."""
        return sorted(self._held - self._stopped)

    def note_claimed(self, claimed: Iterable[ClaimKey]) -> list[ClaimKey]:
        """Process the answer to a claim, and return the claims to start."""
        given = list(dict.fromkeys(claimed))
        started = [key for key in given if key not in self._held and key not in self._last]
        self._held.update(started)
        self._last = set(given)
        return started

    def note_stops(self, stops: Iterable[tuple[ClaimKey, str]]) -> list[tuple[ClaimKey, CancelReason]]:
        """Process the store's requests to stop, and return the triggers to cancel, with the reasons."""
        found = []
        for key, said in stops:
            if key in self._held and key not in self._stopped:
                self._stopped.add(key)
                found.append((key, find_reason(said)))
        return found

    def note_ended(self, key: ClaimKey) -> None:
        """Record that a trigger has ended and cleaned up."""
        self._held.discard(key)
        self._stopped.discard(key)
