"""Which resident copy of a program gets which task, when copies are started, recycled, and held back.

At most `limit` copies live at a time. A task goes to the copy that was used last, so that as few as possible are kept
warm; a copy is started only for a task that finds none idle. When no more may be started, up to `ahead` tasks are sent
to a copy behind the one that it works on: those it answers in order. After `recycle_after` tasks a copy is retired. A
copy that ends before its first answer is a failed start: from then on one copy at a time is tried, after a wait that
grows, until one answers. What the end of a copy means for the task that it worked on is not decided here; those behind
it go to others.

Invariants: a copy has at most `1 + ahead` tasks, and before its first answer one; never more than `limit` copies are
alive that were not retired; no task is forgotten: each is given to a copy, waits, or was withdrawn, in order of
submission; none waits beside an idle copy; while a start is held back, the shell was told when to look again.
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


class _Copy(Generic[TaskT]):
    __slots__ = ("answered", "era", "tasks")

    def __init__(self, era: int, task: TaskT) -> None:
        self.answered = 0
        #: In which era it was started: one ends with each failed start, and with the answer that ends them.
        self.era = era
        #: What it has, the one that it works on first.
        self.tasks = deque((task,))


class Residents(Generic[TaskT]):
    """The copies of one program.

    Args:
        limit: How many may live at a time, at least 1.
        recycle_after: Tasks after which a copy is retired; 0: never.
        backoff: How long a start waits after failed ones; its bounds are taken as they are.
        ahead: Tasks that a copy may have behind the one that it works on.
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
        """Start without copies."""
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
            return (self._given(self._idle.pop(), task),)
        self._waiting.append(task)
        return self._placed(now)

    def withdraw(self, task: TaskT) -> None:
        """Forget a task that waits; one that a copy has, or nobody, changes nothing."""
        if task in self._waiting:
            self._waiting.remove(task)

    def answered(self, copy: int, now: float) -> Sequence[Effect[TaskT]]:
        """Note that a copy answered the task that it worked on."""
        state = self._copies[copy]
        state.tasks.popleft()
        state.answered += 1
        if self._failures and state.answered == 1:
            self._failures = 0
            self._era += 1
        if self._recycle and state.answered >= self._recycle:
            del self._copies[copy]
            return (Retire(copy), *self._placed(now))
        if not state.tasks:
            self._idle.append(copy)
        return self._placed(now) if self._waiting else ()

    def ended(self, copy: int, ending: Ending, now: float) -> Sequence[Effect[TaskT]]:
        """Note that a copy is gone with the task that it worked on; one that is gone already changes nothing."""
        state = self._copies.get(copy)
        if state is None:
            return ()
        tasks = list(state.tasks)[1:]
        self._waiting.extendleft(reversed(tasks))
        # Several that were started together and die together are one failed start.
        if ending is Ending.DIED and not state.answered and state.era == self._era:
            self._era += 1
            self._failures += 1
            self._not_before = now + self._backoff.bound(self._failures)
        return self.dropped(copy, now)

    def unseen(self, copy: int, now: float) -> Sequence[Effect[TaskT]]:
        """Note that a copy was found gone before it could take its only task, which goes first now."""
        self._waiting.appendleft(self._copies[copy].tasks[0])
        return self.ended(copy, Ending.DIED, now)

    def dropped(self, copy: int, now: float) -> Sequence[Effect[TaskT]]:
        """Forget a copy and every task that it has; one that is gone already changes nothing."""
        if self._copies.pop(copy, None) is None:
            return ()
        if copy in self._idle:
            self._idle.remove(copy)
        return self._placed(now)

    def tick(self, now: float) -> Sequence[Effect[TaskT]]:
        """Look again whether a copy may be started."""
        return self._placed(now)

    def _given(self, copy: int, task: TaskT) -> Give[TaskT]:
        self._copies[copy].tasks.append(task)
        return Give(copy, task)

    def _placed(self, now: float) -> list[Effect[TaskT]]:
        """Find places for the tasks that wait, the oldest first."""
        effects: list[Effect[TaskT]] = []
        while self._waiting:
            if self._idle:
                effects.append(self._given(self._idle.pop(), self._waiting.popleft()))
            elif self._may_start(now):
                copy, self._next = self._next, self._next + 1
                task = self._waiting.popleft()
                self._copies[copy] = _Copy(self._era, task)
                effects.append(Start(copy, task))
            elif (place := self._place_behind()) is not None:
                effects.append(self._given(place, self._waiting.popleft()))
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
        """Whether a copy is being tried: its answer or its end comes, and then the next start is decided."""
        return any(state.era == self._era for state in self._copies.values())

    def _place_behind(self) -> int | None:
        """Return the copy with the fewest tasks that may have one more, if there is one."""
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
