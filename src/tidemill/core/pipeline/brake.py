"""The failure brake stops the intake when too many messages fail, and holds failures instead of dead-lettering them.

A broken deployment fails every message; dead-lettering all of them would empty the topic. The brake therefore examines
the last `WINDOW` finished messages once there are at least `LEAST`. If the share of failures exceeds the limit, the
brake is *on*. While it is on, every failure is held as a *case*: work to be run again, or written as a dead letter.
Every `TRIAL_SECONDS` the next held message is tried by running all its cases again. If it fails again, it goes to the
end of the queue. If it succeeds, the brake is off, the count is reset and every other case is run again. If nothing is
held (because its partitions were given up, say), one new message is taken as the trial. A user may release the brake:
the held cases are then dead-lettered, and the count is reset.

Invariants: each case is finally run again, written, or abandoned with its partition, and only one of these per failure;
nothing is written while the brake is on; nothing is held while it is off; while it is on, a next trial is due. Each
step is O(1) plus its result; memory is O(held).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)
CaseT = TypeVar("CaseT")

#: The number of finished messages that are examined, at most and at least.
WINDOW = 200
LEAST = 50
#: The interval between trials while the brake is on.
TRIAL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class On:
    """Take no new messages."""


@dataclass(frozen=True, slots=True)
class Off:
    """Take messages again."""


@dataclass(frozen=True, slots=True)
class TakeOne:
    """Take one new message and report it with `note_taken`: it is the next trial."""


@dataclass(frozen=True, slots=True)
class HoldCase(Generic[CaseT]):
    """Keep this case, neither written nor run, until `Again` or `Write` names it."""

    case: CaseT


@dataclass(frozen=True, slots=True)
class Again(Generic[CaseT]):
    """Run this held case again."""

    case: CaseT


@dataclass(frozen=True, slots=True)
class Write(Generic[CaseT]):
    """Write the dead letter of this case."""

    case: CaseT


Effect = On | Off | TakeOne | HoldCase[CaseT] | Again[CaseT] | Write[CaseT]


@dataclass(frozen=True, slots=True)
class BrakeReason:
    """Why the brake is on.

    Attributes:
        failed: The number of examined messages that failed.
        of: The number of examined messages.
        cause: The most frequent cause.
        times: The number of failures with that cause.
        last: The text of the last failure.
        held: The number of messages that are held.
    """

    failed: int
    of: int
    cause: str
    times: int
    last: str
    held: int


class Brake(Generic[LaneT, CaseT]):
    """The failure brake of one engine. A message is identified by its lane and its number in the lane.

    Args:
        max_ratio: The share of failed messages beyond which the brake is on.

    Example:
        >>> brake: Brake[str, int] = Brake(0.5)
        >>> for n in range(49):
        ...     assert brake.note_failure(("lane", n), "no disk", n) == [Write(n)]
        ...     assert brake.note_finished(("lane", n), "exit code 1", 0.0) == []
        >>> brake.note_finished(("lane", 49), "exit code 1", 0.0)
        [On()]
        >>> brake.note_failure(("lane", 50), "no disk", 50)
        [HoldCase(case=50)]
        >>> brake.tick(30.0)
        [Again(case=50)]
        >>> brake.note_finished(("lane", 50), None, 31.0)
        [Off()]
    """

    __slots__ = ("_causes", "_due", "_failed", "_held", "_last", "_max_ratio", "_trials")

    def __init__(self, max_ratio: float) -> None:
        self._max_ratio = max_ratio
        #: Why each of the last messages failed; None: it succeeded.
        self._causes: deque[str | None] = deque(maxlen=WINDOW)
        self._failed = 0
        self._last = ""
        self._due: float | None = None
        self._held: dict[tuple[LaneT, int], list[CaseT]] = {}
        self._trials: set[tuple[LaneT, int]] = set()

    @property
    def is_on(self) -> bool:
        """Whether the brake is on, so that no new messages are taken."""
        return self._due is not None

    @property
    def due(self) -> float | None:
        """The time of the next call to `tick`; None while the brake is off."""
        return self._due

    @property
    def held(self) -> int:
        """The number of messages that are held."""
        return len(self._held)

    def summarize(self) -> BrakeReason:
        """Return a summary of the failures; O(`WINDOW`)."""
        causes = Counter(cause for cause in self._causes if cause is not None)
        ((cause, times),) = causes.most_common(1) or [("", 0)]
        return BrakeReason(self._failed, len(self._causes), cause, times, self._last, len(self._held))

    def note_failure(self, message: tuple[LaneT, int], text: str, case: CaseT) -> Sequence[Effect[CaseT]]:
        """Process a failure that would be dead-lettered.

        Args:
            message: The message, or the first of several.
            text: The error.
            case: The work to run again or to write; opaque.
        """
        self._last = text
        if self._due is None:
            return [Write(case)]
        self._trials.discard(message)
        self._held.setdefault(message, []).append(case)
        return [HoldCase(case)]

    def note_finished(self, message: tuple[LaneT, int], cause: str | None, now: float) -> Sequence[Effect[CaseT]]:
        """Count a finished message; a trial that succeeded turns the brake off.

        Args:
            message: The message.
            cause: A short reason that is the same for equal failures; None: the message succeeded.
            now: The current time.
        """
        if self._due is not None:
            return self.note_success(message) if cause is None else []
        self._count(cause)
        return self._judge(now)

    def note_window_failure(self, count: int, cause: str, now: float) -> Sequence[Effect[CaseT]]:
        """Turn the last `count` successes into failures, since their window's hook failed after they were counted."""
        causes = self._causes
        for index in range(len(causes) - 1, -1, -1):
            if not count:
                break
            if causes[index] is None:
                causes[index] = cause
                self._failed += 1
                count -= 1
        return self._judge(now) if self._due is None else []

    def note_success(self, message: tuple[LaneT, int]) -> Sequence[Effect[CaseT]]:
        """Turn the brake off if this message was a trial, without counting it."""
        if message not in self._trials:
            return []
        return [Off(), *(Again(case) for case in self._turn_off())]

    def note_taken(self, message: tuple[LaneT, int]) -> None:
        """Make the message that was taken because of `TakeOne` a trial."""
        self._trials.add(message)

    def tick(self, now: float) -> Sequence[Effect[CaseT]]:
        """Try the next message if a trial is due."""
        if self._due is None or now < self._due:
            return []
        self._due = now + TRIAL_SECONDS
        message = next(iter(self._held), None)
        if message is None:
            return [TakeOne()]
        self._trials.add(message)
        return [Again(case) for case in self._held.pop(message)]

    def release(self) -> Sequence[Effect[CaseT]]:
        """Turn the brake off at a user's request; held cases become dead letters."""
        if self._due is None:
            return []
        return [Off(), *(Write(case) for case in self._turn_off())]

    def abandon(self, lane: LaneT) -> None:
        """Forget the held cases of a lane."""
        for message in [message for message in self._held if message[0] == lane]:
            del self._held[message]
        self._trials = {message for message in self._trials if message[0] != lane}

    def _judge(self, now: float) -> Sequence[Effect[CaseT]]:
        if len(self._causes) < LEAST or self._failed <= self._max_ratio * len(self._causes):
            return []
        self._due = now + TRIAL_SECONDS
        return [On()]

    def _count(self, cause: str | None) -> None:
        if len(self._causes) == WINDOW and self._causes[0] is not None:
            self._failed -= 1
        self._causes.append(cause)
        if cause is not None:
            self._failed += 1

    def _turn_off(self) -> list[CaseT]:
        """Reset the brake and return the held cases."""
        self._due = None
        self._causes.clear()
        self._failed = 0
        self._trials.clear()
        held, self._held = self._held, {}
        return [case for cases in held.values() for case in cases]
