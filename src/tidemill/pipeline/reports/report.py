"""The interface of reports, and what they are told about messages that left the pipeline: batches, column by column.

Invariant: what several reports need is computed once per batch, and without a call per message.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tidemill.pipeline.reports.columns import encode_words, pack_counts, pack_keys, pack_longs
from tidemill.pipeline.tasks.task_run import TaskRun
from tidemill.runtime.engine_tasks import EngineTasks
from tidemill.runtime.messages import SourceMessage

if TYPE_CHECKING:
    import pyarrow as pa


class HistoryStatus(enum.StrEnum):
    """How a message left the pipeline: nothing failed; a task failed for good; it never became tasks."""

    DONE = "done"
    FAILED = "failed"
    REJECTED = "rejected"


class WindowTimes:
    """What is the same for all messages of a window, which are of one partition.

    Times are UTC microseconds since the epoch.

    Attributes:
        number: The window's number in its engine; None: the message never had a window that was arranged.
        started_at: When `arrange` or `transform` was called.
        arranged_at: When it had returned.
        payloads: How many payloads `transform` and `on_message_complete` returned, by offset; None: none.
        payloads_each: How many payloads `transform` returned for each message, where that is the same for all; these
            are not among `payloads`.
    """

    __slots__ = ("arranged_at", "number", "payloads", "payloads_each", "started_at")

    def __init__(self, number: int | None, started_at: int | None, arranged_at: int | None) -> None:
        """Start without payloads."""
        self.number = number
        self.started_at = started_at
        self.arranged_at = arranged_at
        self.payloads: dict[int, int] | None = None
        self.payloads_each = 0

    def count_payloads(self, offset: int, count: int) -> None:
        """Count what `transform` or `on_message_complete` returned for a message."""
        if self.payloads is None:
            self.payloads = {}
        self.payloads[offset] = self.payloads.get(offset, 0) + count


#: Of messages that were dead-lettered before they had any task.
NO_WINDOW = WindowTimes(None, None, None)

#: A message, its tasks, its window, when it left the pipeline (UTC, in nanoseconds), and why it was dead-lettered
#: before it had any task, if it was.
FinishedItem = tuple[SourceMessage, Sequence[TaskRun], WindowTimes, int, str | None]


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """Columns of a batch that several reports keep, as Arrow has them; `record_at` is in milliseconds, as it came."""

    offset: pa.Array
    key: pa.Array
    record_at: pa.Array
    resolved_ns: pa.Array
    status: pa.DictionaryArray
    tasks: pa.Array
    attempts: pa.Array


class FinishedBatch:
    """Messages that left the pipeline, in that order, as parallel lists.

    Attributes:
        messages: The messages; at least one.
        runs: The tasks of each.
        windows: The window of each.
        resolved_ns: When each left the pipeline, in UTC nanoseconds since the epoch.
        rejected: Why each was dead-lettered before it had any task; None if it was not.
    """

    def __init__(
        self,
        messages: Sequence[SourceMessage],
        runs: Sequence[Sequence[TaskRun]],
        windows: Sequence[WindowTimes],
        resolved_ns: Sequence[int],
        rejected: Sequence[str | None],
    ) -> None:
        """Take the columns."""
        self.messages = messages
        self.runs = runs
        self.windows = windows
        self.resolved_ns = resolved_ns
        self.rejected = rejected

    @classmethod
    def of(cls, items: Iterable[FinishedItem]) -> FinishedBatch:
        """Return the batch of messages that are given one by one; at least one."""
        return cls(*zip(*items, strict=True))

    def __len__(self) -> int:
        """Return how many messages there are."""
        return len(self.messages)

    @functools.cached_property
    def tasks(self) -> list[int]:
        """How many tasks each message had, replaced ones included."""
        if not self.has_runs:
            return [0] * len(self)
        return [1] * len(self) if self.only_runs is not None else [len(runs) for runs in self.runs]

    @functools.cached_property
    def has_runs(self) -> bool:
        """Whether any message had a task."""
        return self.runs.count(()) < len(self) and any(self.runs)

    @functools.cached_property
    def only_runs(self) -> Sequence[TaskRun] | None:
        """The one task of each message, if each has exactly one."""
        try:
            return [run for (run,) in self.runs]
        except ValueError:  # another number of tasks
            return None

    @functools.cached_property
    def attempts(self) -> list[int]:
        """How often the tasks of each message were tried, together."""
        if not self.has_runs:
            return [0] * len(self)
        if self.only_runs is not None:
            return [run.attempts for run in self.only_runs]
        return [sum(run.attempts for run in runs) for runs in self.runs]

    @functools.cached_property
    def failed(self) -> dict[int, TaskRun]:
        """The first task that failed for good, by the index of its message."""
        if not self.has_runs:
            return {}
        if self.only_runs is not None and [run.error for run in self.only_runs].count(None) == len(self):
            return {}
        found: dict[int, TaskRun] = {}
        for index, runs in enumerate(self.runs):
            for run in runs:
                if run.error is not None and not run.replaced:
                    found[index] = run
                    break
        return found

    @functools.cached_property
    def statuses(self) -> list[HistoryStatus]:
        """How each message left the pipeline."""
        statuses = [HistoryStatus.DONE] * len(self)
        for index in self.failed:
            statuses[index] = HistoryStatus.FAILED
        if self.rejected.count(None) < len(self):
            for index, reason in enumerate(self.rejected):
                if reason is not None:
                    statuses[index] = HistoryStatus.REJECTED
        return statuses

    @functools.cached_property
    def packed(self) -> PackedColumns:
        """What several reports keep, as Arrow columns."""
        return PackedColumns(
            offset=pack_longs([message.offset for message in self.messages]),
            key=pack_keys([message.key for message in self.messages]),
            record_at=pack_longs([message.timestamp for message in self.messages]),
            resolved_ns=pack_longs(self.resolved_ns),
            status=encode_words(self.statuses),
            tasks=pack_counts(self.tasks),
            attempts=pack_counts(self.attempts),
        )

    def select(self, wanted: Iterable[bool]) -> FinishedBatch:
        """Return those messages of which this is true; at least one has to be."""
        items = zip(self.messages, self.runs, self.windows, self.resolved_ns, self.rejected, strict=True)
        return FinishedBatch.of(itertools.compress(items, wanted))

    def split(self) -> tuple[FinishedBatch, FinishedBatch]:
        """Return both halves of the messages, to find the one that a report cannot take."""
        items = list(zip(self.messages, self.runs, self.windows, self.resolved_ns, self.rejected, strict=True))
        half = len(items) // 2
        return FinishedBatch.of(items[:half]), FinishedBatch.of(items[half:])


class Report(Protocol):
    """Where finished messages are reported; `history.HistoryWriter` is one.

    Attributes:
        tasks: Where its asyncio tasks run; set by the engine.
    """

    tasks: EngineTasks

    def take(self, batch: FinishedBatch) -> None:
        """Take messages that left the pipeline; must be quick, must not raise, and keeps no reference to them."""

    async def close(self) -> None:
        """Write what is left."""
