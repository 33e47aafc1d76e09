"""Which resident copy of a program gets which task, and when copies are started, retired and held back.

At most `limit` copies live at a time. A task goes to the copy that was used last, so that as few as possible are kept
warm; a copy is started only for a task that finds none idle. When no more may be started, a copy is sent up to `ahead`
tasks in addition to the one that it works on, and answers them in order. After `recycle_after` tasks a copy is retired.
A copy that ends before its first answer is a failed start: from then on one copy at a time is started, after a growing
delay, until one answers. What the end of a copy means for the task that it worked on is decided by the caller; the
tasks behind it go to other copies.

Invariants: a copy has at most `1 + ahead` tasks, and one before its first answer; never more than `limit` copies that
were not retired are alive; no task is forgotten: each is given to a copy, waits, or was withdrawn, in order of
submission; no task waits while a copy is idle; while a start is held back, a `WakeAt` has been returned.
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
    """How a copy ended."""

    DIED = "died"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Start(Generic[TaskT]):
    """Start this copy and give it the task."""

    copy: int
    task: TaskT


@dataclass(frozen=True, slots=True)
class Give(Generic[TaskT]):
    """Give the task to this copy, which is alive."""

    copy: int
    task: TaskT


@dataclass(frozen=True, slots=True)
class Retire:
    """Let this copy end by itself; it is not mentioned again."""

    copy: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `tick` at this time: tasks wait for a start that is held back."""

    at: float


Effect = Start[TaskT] | Give[TaskT] | Retire | WakeAt


class _Copy(Generic[TaskT]):
    __slots__ = ("answered", "era", "tasks")

    def __init__(self, era: int, task: TaskT) -> None:
        self.answered = 0
        #: The era in which it was started: an era ends with each failed start, and with the first answer after those.
        self.era = era
        #: Its tasks, beginning with the one that it works on.
        self.tasks = deque((task,))


class Residents(Generic[TaskT]):
    """The copies of one program.

    Args:
        limit: How many may live at a time, at least 1.
        recycle_after: Tasks after which a copy is retired; 0: never.
        backoff: The delays of starts after failed ones; used without jitter.
        ahead: How many tasks a copy may have in addition to the one that it works on.
    """

    __slots__ = (
        "_ahead",
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

    def __init__(self, limit: int, recycle_after: int, backoff: Backoff, ahead: int = 0) -> None:
        self._limit = limit
        self._recycle = recycle_after
        self._backoff = backoff
        self._ahead = ahead
        self._copies: dict[int, _Copy[TaskT]] = {}
        self._idle: list[int] = []
        self._waiting: deque[TaskT] = deque()
        self._next = 0
        self._era = 0
        self._failures = 0
        self._not_before = 0.0

    @property
    def alive(self) -> int:
        """How many copies are alive and not retired."""
        return len(self._copies)

    @property
    def waiting(self) -> int:
        """How many tasks wait for a copy."""
        return len(self._waiting)

    @property
    def failed_starts(self) -> int:
        """How many starts in a row have failed; 0 once a new copy answers."""
        return self._failures

    def submit(self, task: TaskT, now: float) -> Sequence[Effect[TaskT]]:
        """Add a task."""
        if self._idle:
            return (self._give(self._idle.pop(), task),)
        self._waiting.append(task)
        return self._place_tasks(now)

    def withdraw(self, task: TaskT) -> None:
        """Forget a task that waits; any other changes nothing."""
        if task in self._waiting:
            self._waiting.remove(task)

    def note_answer(self, copy: int, now: float) -> Sequence[Effect[TaskT]]:
        """Note that a copy answered the task that it worked on."""
        state = self._copies[copy]
        state.tasks.popleft()
        state.answered += 1
        if self._failures and state.answered == 1:
            self._failures = 0
            self._era += 1
        if self._recycle and state.answered >= self._recycle:
            del self._copies[copy]
            return (Retire(copy), *self._place_tasks(now))
        if not state.tasks:
            self._idle.append(copy)
        return self._place_tasks(now) if self._waiting else ()

    def note_ended(self, copy: int, ending: Ending, now: float) -> Sequence[Effect[TaskT]]:
        """Note that a copy is gone with the task that it worked on; one that is gone already changes nothing."""
        state = self._copies.get(copy)
        return () if state is None else self._end(copy, list(state.tasks)[1:], ending, now)

    def note_undelivered(self, copy: int, now: float) -> Sequence[Effect[TaskT]]:
        """Note that a copy was gone before it could be sent any of its tasks, at least one, which now go first."""
        return self._end(copy, list(self._copies[copy].tasks), Ending.DIED, now)

    def _end(self, copy: int, tasks: list[TaskT], ending: Ending, now: float) -> Sequence[Effect[TaskT]]:
        """Forget a copy that is gone; these tasks of it go to others."""
        state = self._copies[copy]
        self._waiting.extendleft(reversed(tasks))
        # Several copies that were started in one era and die are one failed start.
        if ending is Ending.DIED and not state.answered and state.era == self._era:
            self._era += 1
            self._failures += 1
            self._not_before = now + self._backoff.compute_bound(self._failures)
        return self.drop(copy, now)

    def drop(self, copy: int, now: float) -> Sequence[Effect[TaskT]]:
        """Forget a copy and every task that it has; one that is gone already changes nothing."""
        if self._copies.pop(copy, None) is None:
            return ()
        if copy in self._idle:
            self._idle.remove(copy)
        return self._place_tasks(now)

    def tick(self, now: float) -> Sequence[Effect[TaskT]]:
        """Check again whether a copy may be started."""
        return self._place_tasks(now)

    def _give(self, copy: int, task: TaskT) -> Give[TaskT]:
        self._copies[copy].tasks.append(task)
        return Give(copy, task)

    def _place_tasks(self, now: float) -> list[Effect[TaskT]]:
        """Find copies for the tasks that wait, the oldest first."""
        effects: list[Effect[TaskT]] = []
        while self._waiting:
            if self._idle:
                effects.append(self._give(self._idle.pop(), self._waiting.popleft()))
            elif self._may_start(now):
                copy, self._next = self._next, self._next + 1
                task = self._waiting.popleft()
                self._copies[copy] = _Copy(self._era, task)
                effects.append(Start(copy, task))
            elif (busy := self._find_busy()) is not None:
                effects.append(self._give(busy, self._waiting.popleft()))
            else:
                break
        if self._waiting and len(self._copies) < self._limit and not self._is_trying():
            effects.append(WakeAt(self._not_before))
        return effects

    def _may_start(self, now: float) -> bool:
        if len(self._copies) >= self._limit:
            return False
        return not self._failures or (now >= self._not_before and not self._is_trying())

    def _is_trying(self) -> bool:
        """Return whether a copy of this era is alive; its answer, or its end, decides about the next start."""
        return any(state.era == self._era for state in self._copies.values())

    def _find_busy(self) -> int | None:
        """Return the busy copy with the fewest tasks that may have one more, if there is one."""
        if not self._ahead:
            return None
        places = [
            (len(state.tasks), copy)
            for copy, state in self._copies.items()
            if state.answered
            and len(state.tasks) <= self._ahead
            and not (self._recycle and state.answered + len(state.tasks) >= self._recycle)
        ]
        return min(places)[1] if places else None
