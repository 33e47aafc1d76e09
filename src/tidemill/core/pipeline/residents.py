"""Assigns tasks to the resident copies of a program, and starts and retires copies.

At most `limit` copies live at a time. A task goes to the copy that was used last, so that as few as possible are kept
warm; a copy is started only for a task that finds no idle copy. When no more may be started, a copy is sent up to
`ahead` tasks in addition to its current one, and answers them in order. After `recycle_after` tasks a copy is retired.
A copy that ends before its first answer is a failed start. From then on one copy at a time is started, after a growing
delay, until one answers. When a copy ends, the caller decides the fate of its current task; its other tasks go to other
copies.

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


class CopyEnding(enum.Enum):
    """The way a copy ended."""

    DIED = "died"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class StartCopy(Generic[TaskT]):
    """Start this copy and give it the task."""

    copy: int
    task: TaskT


@dataclass(frozen=True, slots=True)
class Give(Generic[TaskT]):
    """Give the task to this copy, which is alive."""

    copy: int
    task: TaskT


@dataclass(frozen=True, slots=True)
class RetireCopy:
    """Let this copy end by itself; no later effect names it."""

    copy: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `tick` at this time: tasks wait for a start that is held back."""

    at: float


Effect = StartCopy[TaskT] | Give[TaskT] | RetireCopy | WakeAt


class _Copy(Generic[TaskT]):
    __slots__ = ("answered", "era", "tasks")

    def __init__(self, era: int, task: TaskT) -> None:
        self.answered = 0
        #: The era in which the copy was started. An era ends with each failed start, and with the first answer after
        #: one.
        self.era = era
        #: Its tasks, beginning with the current one.
        self.tasks = deque((task,))


class Residents(Generic[TaskT]):
    """The copies of one program.

    Args:
        limit: The maximum number of copies that are alive, at least 1.
        recycle_after: The number of tasks after which a copy is retired; 0: never.
        backoff: The delays before starts that follow failed ones; used without jitter.
        ahead: The number of tasks that a copy may have in addition to its current one.
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
        """The number of copies that are alive and not retired."""
        return len(self._copies)

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for a copy."""
        return len(self._waiting)

    @property
    def failed_starts(self) -> int:
        """The number of consecutive failed starts; 0 once a new copy answers."""
        return self._failures

    def submit(self, task: TaskT, now: float) -> Sequence[Effect[TaskT]]:
        if self._idle:
            return (self._give(self._idle.pop(), task),)
        self._waiting.append(task)
        return self._assign_tasks(now)

    def withdraw(self, task: TaskT) -> None:
        """Forget a waiting task; any other task changes nothing."""
        if task in self._waiting:
            self._waiting.remove(task)

    def note_answer(self, copy: int, now: float) -> Sequence[Effect[TaskT]]:
        """Process a copy's answer to its current task."""
        state = self._copies[copy]
        state.tasks.popleft()
        state.answered += 1
        if self._failures and state.answered == 1:
            self._failures = 0
            self._era += 1
        if self._recycle and state.answered >= self._recycle:
            del self._copies[copy]
            return (RetireCopy(copy), *self._assign_tasks(now))
        if not state.tasks:
            self._idle.append(copy)
        return self._assign_tasks(now) if self._waiting else ()

    def note_ended(self, copy: int, ending: CopyEnding, now: float) -> Sequence[Effect[TaskT]]:
        """Process the end of a copy, which takes its current task with it; a copy that is already forgotten changes
        nothing.
        """
        state = self._copies.get(copy)
        return () if state is None else self._end(copy, list(state.tasks)[1:], ending, now)

    def note_undelivered(self, copy: int, now: float) -> Sequence[Effect[TaskT]]:
        """Process the end of a copy that died before it could be sent any of its tasks (at least one); these go first
        now.
        """
        return self._end(copy, list(self._copies[copy].tasks), CopyEnding.DIED, now)

    def _end(self, copy: int, tasks: list[TaskT], ending: CopyEnding, now: float) -> Sequence[Effect[TaskT]]:
        """Forget a copy that has ended and give these tasks of it to others."""
        state = self._copies[copy]
        self._waiting.extendleft(reversed(tasks))
        # If several copies that were started in one era die, they count as one failed start.
        if ending is CopyEnding.DIED and not state.answered and state.era == self._era:
            self._era += 1
            self._failures += 1
            self._not_before = now + self._backoff.compute_bound(self._failures)
        return self.drop(copy, now)

    def drop(self, copy: int, now: float) -> Sequence[Effect[TaskT]]:
        """Forget a copy and all its tasks; a copy that is already forgotten changes nothing."""
        if self._copies.pop(copy, None) is None:
            return ()
        if copy in self._idle:
            self._idle.remove(copy)
        return self._assign_tasks(now)

    def tick(self, now: float) -> Sequence[Effect[TaskT]]:
        """Retry a start that was held back."""
        return self._assign_tasks(now)

    def _give(self, copy: int, task: TaskT) -> Give[TaskT]:
        self._copies[copy].tasks.append(task)
        return Give(copy, task)

    def _assign_tasks(self, now: float) -> list[Effect[TaskT]]:
        """Assign waiting tasks to copies, the oldest first."""
        effects: list[Effect[TaskT]] = []
        while self._waiting:
            if self._idle:
                effects.append(self._give(self._idle.pop(), self._waiting.popleft()))
            elif self._may_start(now):
                copy, self._next = self._next, self._next + 1
                task = self._waiting.popleft()
                self._copies[copy] = _Copy(self._era, task)
                effects.append(StartCopy(copy, task))
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
        """Return whether a copy of this era is alive; its first answer or its end decides about the next start."""
        return any(state.era == self._era for state in self._copies.values())

    def _find_busy(self) -> int | None:
        """Return the busy copy with the fewest tasks that may get another one, or None."""
        if not self._ahead:
            return None
        candidates = [
            (len(state.tasks), copy)
            for copy, state in self._copies.items()
            if state.answered
            and len(state.tasks) <= self._ahead
            and not (self._recycle and state.answered + len(state.tasks) >= self._recycle)
        ]
        return min(candidates)[1] if candidates else None
