"""A task in flight, and the interface of its owner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tidemill.pipeline.handler.models import ExecutorError, ExecutorResult, ExecutorTask

if TYPE_CHECKING:
    from tidemill.pipeline.tasks.process import ProcessOutcome


class InFlightGroup(Protocol):
    """Tasks that start, stop and are given up together."""

    @property
    def name(self) -> str:
        """The group's name, for logs."""

    @property
    def closed(self) -> bool:
        """Whether the group was given up: outcomes change nothing."""

    @property
    def leaving(self) -> bool:
        """Whether no more of its tasks start; running ones may finish."""

    @property
    def may_start(self) -> bool:
        """Whether its tasks may start now."""


class TaskOwner(Protocol):
    """The owner of a task, which receives its outcome."""

    @property
    def group(self) -> InFlightGroup:
        """The group that its tasks belong to."""

    @property
    def topic_partition(self) -> tuple[str, int]:
        """Topic and partition of its messages."""

    def find_task_offsets(self, flight: TaskInFlight) -> Sequence[int]:
        """Return the offsets of the messages of a task that has no final outcome yet."""

    def park(self, flight: TaskInFlight) -> None:
        """Take back a task that may not start; the owner submits it again when it may."""

    def succeeded(self, flight: TaskInFlight, result: ExecutorResult) -> None:
        """Handle the result of a task."""

    def failed(self, flight: TaskInFlight, error: ExecutorError) -> None:
        """Handle the failure of a task's latest attempt."""


class _Nobody:
    """The owner, and its group, of a task with a final outcome: further events of the task are ignored."""

    name = ""
    closed = True
    leaving = True
    may_start = False
    topic_partition = ("", -1)

    @property
    def group(self) -> InFlightGroup:
        return self

    def find_task_offsets(self, flight: TaskInFlight) -> Sequence[int]:
        return ()

    def park(self, flight: TaskInFlight) -> None:
        pass

    def succeeded(self, flight: TaskInFlight, result: ExecutorResult) -> None:
        pass

    def failed(self, flight: TaskInFlight, error: ExecutorError) -> None:
        pass


NOBODY = _Nobody()


class TaskInFlight:
    """One task, across all its attempts."""

    __slots__ = (
        "age",
        "attempts",
        "ended_at",
        "error",
        "failure",
        "generation",
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
        "timer",
        "waited_seconds",
    )

    def __init__(self, task: ExecutorTask, owner: TaskOwner, age: float) -> None:
        self.task = task
        self.owner: TaskOwner = owner
        self.age = age
        self.key: object = task.task_id
        #: The offset of its message if the task names exactly one; otherwise `find_offsets` asks its owner.
        self.named_offsets: Sequence[int] = ()
        self.attempts = 0
        #: When its last attempt ended, in microseconds since the epoch; 0: it was precomputed when its window was
        #: arranged.
        self.ended_at = 0
        #: How many payloads its hook returned.
        self.payloads = 0
        #: Its final failure in words, if it failed.
        self.failure: str | None = None
        #: When its latest attempt was queued, in monotonic seconds.
        self.queued_at = 0.0
        #: The length of the chain of tasks that it replaces.
        self.generation = 0
        self.result: ExecutorResult | None = None
        self.error: ExecutorError | None = None
        self.replaced = False
        #: Whether its result was precomputed, so that no process ran.
        self.is_known = False
        self.process: object | None = None
        self.timer: asyncio.TimerHandle | None = None
        #: The slot of its last attempt.
        self.slot: int | None = None
        #: The input size of its last attempt.
        self.input_bytes = 0
        #: The outcome of its last attempt, if it is stored until it is recorded; see `TaskPool.kept_below_seconds`.
        self.outcome: ProcessOutcome | None = None
        #: The time from queueing to end of its last attempt; set only if attempts are recorded.
        self.waited_seconds = 0.0

    @property
    def has_details(self) -> bool:
        """Whether rows of its attempts have more than numbers: arguments, labels or a parent."""
        task = self.task
        return bool(task.args or task.labels or task.parent_task_id is not None)

    def find_offsets(self) -> Sequence[int]:
        """Return the offsets of its messages while it has no final outcome."""
        return self.named_offsets if len(self.named_offsets) == 1 else self.owner.find_task_offsets(self)

    def leave_owner(self) -> None:
        """Drop the reference to the owner, because the task has ended; otherwise only the cyclic GC frees both."""
        self.owner = NOBODY
        self.key = None
