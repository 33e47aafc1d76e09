"""Which resident copy of a program gets which task, when copies are started, recycled, and held back.

At most `limit` copies live at a time. A task goes to the copy that was used last, so that as few as possible are kept
warm; a copy is started only for a task that finds none idle. After `recycle_after` tasks a copy is retired. A copy
that ends before its first answer is a failed start: from then on one copy at a time is tried, after a wait that grows,
until one answers. What a task's end means for the task is not decided here.

Invariants: a copy has at most one task; never more than `limit` copies are alive that were not retired; no task is
forgotten: each is given to a copy, waits, or was withdrawn, in order of submission; while a start is held back, the
shell was told when to look again.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tidemill.core.retry import Backoff

TaskT = TypeVar("TaskT")


class Ending(enum.Enum):
    """How a copy came to its end."""

    DIED = "died"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Start(Generic[TaskT]):
    """Start this copy and give it the task."""

    copy: int
    task: TaskT


@dataclass(frozen=True, slots=True)
class Give(Generic[TaskT]):
    """Give the task to this copy, which lives."""

    copy: int
    task: TaskT


@dataclass(frozen=True, slots=True)
class Retire:
    """Let this copy end by itself; it is not spoken of again."""

    copy: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `tick` at this time: tasks wait for a start that is held back."""

    at: float


Effect = Start[TaskT] | Give[TaskT] | Retire | WakeAt


class _Copy:
    __slots__ = ("answered", "era")

    def __init__(self, era: int) -> None:
        self.answered = 0
        #: In which era it was started: one ends with each failed start, and with the answer that ends them.
        self.era = era


class Residents(Generic[TaskT]):
    """The copies of one program.

    Args:
        limit: How many may live at a time, at least 1.
        recycle_after: Tasks after which a copy is retired; 0: never.
        backoff: How long a start waits after failed ones; its bounds are taken as they are.
    """

    __slots__ = (
        "_backoff",
        "_copies",
        "_era",
        "_failures",
        "_idle",
        "_limit",
        "_next",
        "_not_before",
        "_recycle",
        "_waiting",
    )

    def __init__(self, limit: int, recycle_after: int, backoff: Backoff) -> None:
        """Start without copies."""
        self._limit = limit
        self._recycle = recycle_after
        self._backoff = backoff
        self._copies: dict[int, _Copy] = {}
        self._idle: list[int] = []
        self._waiting: deque[TaskT] = deque()
        self._next = 0
        self._era = 0
        self._failures = 0
        self._not_before = 0.0

    @property
    def alive(self) -> int:
        """How many copies live that were not retired."""
        return len(self._copies)

    @property
    def waiting(self) -> int:
        """How many tasks wait for a copy."""
        return len(self._waiting)

    @property
    def failed_starts(self) -> int:
        """How many starts in a row have failed; 0 as soon as a new copy answers."""
        return self._failures

    def submit(self, task: TaskT, now: float) -> Sequence[Effect[TaskT]]:
        """Take a task."""
        if self._idle:
            return (Give(self._idle.pop(), task),)
        self._waiting.append(task)
        return self._started(now)

    def withdraw(self, task: TaskT) -> None:
        """Forget a task that waits; one that a copy has, or nobody, changes nothing."""
        if task in self._waiting:
            self._waiting.remove(task)

    def answered(self, copy: int, now: float) -> Sequence[Effect[TaskT]]:
        """Note that a copy answered its task."""
        state = self._copies[copy]
        state.answered += 1
        recovered = self._failures > 0 and state.answered == 1
        if recovered:
            self._failures = 0
            self._era += 1
        if self._recycle and state.answered >= self._recycle:
            del self._copies[copy]
            return (Retire(copy), *self._started(now))
        if not self._waiting:
            self._idle.append(copy)
            return ()
        given = Give(copy, self._waiting.popleft())
        # With as many copies as there may be, which is the rule while tasks wait, there is nothing to start.
        return (given, *self._started(now)) if recovered else (given,)

    def ended(self, copy: int, ending: Ending, now: float) -> Sequence[Effect[TaskT]]:
        """Note that a copy is gone; one that was retired, or is gone already, changes nothing."""
        state = self._copies.pop(copy, None)
        if state is None:
            return ()
        if copy in self._idle:
            self._idle.remove(copy)
        # Several that were started together and die together are one failed start.
        if ending is Ending.DIED and not state.answered and state.era == self._era:
            self._era += 1
            self._failures += 1
            self._not_before = now + self._backoff.bound(self._failures)
        return self._started(now)

    def unseen(self, copy: int, task: TaskT, now: float) -> Sequence[Effect[TaskT]]:
        """Note that a copy was found gone before it could take its task, which goes first now."""
        self._waiting.appendleft(task)
        return self.ended(copy, Ending.DIED, now)

    def tick(self, now: float) -> Sequence[Effect[TaskT]]:
        """Look again whether a copy may be started."""
        return self._started(now)

    def _started(self, now: float) -> list[Effect[TaskT]]:
        effects: list[Effect[TaskT]] = []
        while self._waiting and len(self._copies) < self._limit:
            if self._failures:
                if any(state.era == self._era for state in self._copies.values()):
                    break  # one is being tried; its answer or its end comes
                if now < self._not_before:
                    effects.append(WakeAt(self._not_before))
                    break
            copy, self._next = self._next, self._next + 1
            self._copies[copy] = _Copy(self._era)
            effects.append(Start(copy, self._waiting.popleft()))
        return effects
