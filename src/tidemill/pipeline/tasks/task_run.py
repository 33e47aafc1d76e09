"""A task on its way through the pool, and what it runs for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tidemill.pipeline.handler.models import ExecutorError, ExecutorResult, ExecutorTask

if TYPE_CHECKING:
    from tidemill.pipeline.tasks.process import ProcessOutcome


class TaskGroup(Protocol):
    """Tasks that start, stop and are given up together."""

    @property
    def name(self) -> str:
        """Its name, for logs."""

    @property
    def closed(self) -> bool:
        """Whether its outcomes no longer matter."""

    @property
    def leaving(self) -> bool:
        """Whether no more of its tasks start; running ones may finish."""

    @property
    def may_start(self) -> bool:
        """Whether its tasks may start now."""


class TaskOwner(Protocol):
    """What a task runs for."""

    @property
    def group(self) -> TaskGroup:
        """The group that its tasks belong to."""

    @property
    def place(self) -> tuple[str, int]:
        """Topic and partition of its messages."""

    def find_task_offsets(self, run: TaskRun) -> Sequence[int]:
        """Return the offsets of the messages of a task that is not terminal."""

    def park(self, run: TaskRun) -> None:
        """Take back a task that may not start; the owner submits it again when it may."""

    def succeeded(self, run: TaskRun, result: ExecutorResult) -> None:
        """Take the result of a task."""

    def failed(self, run: TaskRun, error: ExecutorError) -> None:
        """Take the failure of a task's latest try."""


class _Nobody:
    """The owner of a task that is terminal, and the group of it: whatever else becomes of the task does not matter."""

    name = ""
    closed = True
    leaving = True
    may_start = False
    place = ("", -1)

    @property
    def group(self) -> TaskGroup:
        return self

    def find_task_offsets(self, run: TaskRun) -> Sequence[int]:
        return ()

    def park(self, run: TaskRun) -> None:
        pass

    def succeeded(self, run: TaskRun, result: ExecutorResult) -> None:
        pass

    def failed(self, run: TaskRun, error: ExecutorError) -> None:
        pass


NOBODY = _Nobody()


class Given(NamedTuple):
    """What a task had when its last try began; a hook may change the task while it runs, and afterwards."""

    args: Sequence[str]
    labels: Mapping[str, str]
    parent_task_id: str | None


class TaskRun:
    """One task, over all its tries."""

    __slots__ = (
        "age",
        "attempts",
        "ended_at",
        "error",
        "failure",
        "generation",
        "given",
        "input_bytes",
        "is_known",
        "key",
        "named_offsets",
        "outcome",
        "owner",
        "payloads",
        "process",
        "queued_at",
        "replaced",
        "result",
        "slot",
        "task",
        "task_id",
        "timer",
        "waited_seconds",
    )

    def __init__(self, task: ExecutorTask, owner: TaskOwner, age: float) -> None:
        """Start without a try."""
        self.task = task
        self.owner: TaskOwner = owner
        self.age = age
        #: As it was when its window was arranged: a hook may change the task, or use it again.
        self.task_id = task.task_id
        self.key: object = task.task_id
        #: The offset of its message where the task names one, and is for that one; else `find_offsets` asks its owner.
        self.named_offsets: Sequence[int] = ()
        self.attempts = 0
        #: When its last try ended, in microseconds since the epoch; 0: it was known when its window was arranged.
        self.ended_at = 0
        #: How many payloads its hook returned.
        self.payloads = 0
        #: How it failed for good, in words, if it did.
        self.failure: str | None = None
        #: When its latest attempt was queued; seconds, monotonic.
        self.queued_at = 0.0
        #: How many tasks it replaces, each of which replaced the one before.
        self.generation = 0
        self.result: ExecutorResult | None = None
        self.error: ExecutorError | None = None
        self.replaced = False
        #: Whether its result was known, so that no process ran.
        self.is_known = False
        #: None if it had no arguments, no labels and no parent; or if tries are not recorded.
        self.given: Given | None = None
        self.process: object | None = None
        self.timer: asyncio.TimerHandle | None = None
        #: Its place in the pool in its last try.
        self.slot: int | None = None
        #: How much its last try was given to read.
        self.input_bytes = 0
        #: How its last try ended, if that is kept until it is recorded; see `TaskPool.kept_below_seconds`.
        self.outcome: ProcessOutcome | None = None
        #: How long before its end its last try was queued; known only if tries are recorded.
        self.waited_seconds = 0.0

    def find_offsets(self) -> Sequence[int]:
        """Return the offsets of its messages while it is not terminal."""
        return self.named_offsets if len(self.named_offsets) == 1 else self.owner.find_task_offsets(self)

    def leave_owner(self) -> None:
        """Forget the owner, now that the task is terminal: both would be freed by a search for cycles only."""
        self.owner = NOBODY
        self.key = None
