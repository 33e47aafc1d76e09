"""The interface of reports, and what they are told about messages that left the pipeline: batches, column by column.

Invariant: what several reports need is computed once per batch, and without a call per message.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from tidemill.pipeline.handler.models import ExecutorTask, PrecomputedResult
from tidemill.pipeline.reports.columns import encode_words, pack_counts, pack_keys, pack_longs
from tidemill.pipeline.tasks.task_run import NOBODY, TaskRun
from tidemill.runtime.engine_tasks import EngineTasks
from tidemill.runtime.messages import SourceMessage
from tidemill.sources.base import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

ValueT = TypeVar("ValueT")


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
        known_runs: What is reported instead of the tasks of each message, where each has one, whose result was known,
            and nothing tells these tasks apart.
    """

    __slots__ = ("arranged_at", "known_runs", "number", "payloads", "payloads_each", "started_at")

    def __init__(self, number: int | None, started_at: int | None, arranged_at: int | None) -> None:
        """Start without payloads."""
        self.number = number
        self.started_at = started_at
        self.arranged_at = arranged_at
        self.payloads: dict[int, int] | None = None
        self.payloads_each = 0
        self.known_runs: Sequence[TaskRun] | None = None

    def count_payloads(self, offset: int, count: int) -> None:
        """Count what `transform` or `on_message_complete` returned for a message."""
        if self.payloads is None:
            self.payloads = {}
        self.payloads[offset] = self.payloads.get(offset, 0) + count


#: Of messages that were dead-lettered before they had any task.
NO_WINDOW = WindowTimes(None, None, None)


@functools.lru_cache(1_000)
def stand_for_known(payloads: int) -> Sequence[TaskRun]:
    """Return what is reported in place of a task with a known result whose hook returned this many payloads."""
    run = TaskRun(ExecutorTask("", precomputed=PrecomputedResult()), NOBODY, 0.0)
    run.attempts, run.payloads = 1, payloads
    return (run,)


#: Of a message that left the pipeline what a batch has of it, in the order of its columns.
FinishedRow = tuple[int, bytes | None, int, int, Sequence[TaskRun], int, str | None, SourceMessage | None]


class Stretch(NamedTuple):
    """Neighbours in a batch that are of one partition and of one window."""

    place: TopicPartition
    window: WindowTimes
    size: int


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
    """Messages that left the pipeline, as parallel lists, more or less in that order.

    Attributes:
        stretches: The messages in order, divided into neighbours of one window.
        offsets: The offset of each message; at least one.
        keys: The key of each.
        record_at: The timestamp of each, in milliseconds, as it came.
        consumed_at: When each was fetched, in UTC microseconds since the epoch; 0: nobody noted it.
        runs: The tasks of each, or what stands for them.
        resolved_ns: When each left the pipeline, in UTC nanoseconds since the epoch.
        rejected: Why each was dead-lettered before it had any task; None if it was not.
        messages: The messages; empty unless a report needs them.
    """

    def __init__(
        self,
        stretches: Sequence[Stretch],
        offsets: Sequence[int],
        keys: Sequence[bytes | None],
        record_at: Sequence[int],
        consumed_at: Sequence[int],
        runs: Sequence[Sequence[TaskRun]],
        resolved_ns: Sequence[int],
        rejected: Sequence[str | None],
        messages: Sequence[SourceMessage] = (),
    ) -> None:
        """Take the columns."""
        self.stretches = stretches
        self.offsets = offsets
        self.keys = keys
        self.record_at = record_at
        self.consumed_at = consumed_at
        self.runs = runs
        self.resolved_ns = resolved_ns
        self.rejected = rejected
        self.messages = messages

    @classmethod
    def of_window(cls, place: TopicPartition, window: WindowTimes, rows: Sequence[FinishedRow]) -> FinishedBatch:
        """Return the batch of messages of one window, or of none and of one partition; at least one."""
        offsets, keys, record_at, consumed_at, runs, resolved_ns, rejected, messages = zip(*rows, strict=True)
        stretches = (Stretch(place, window, len(rows)),)
        kept = () if messages[0] is None else messages
        return cls(stretches, offsets, keys, record_at, consumed_at, runs, resolved_ns, rejected, kept)

    @classmethod
    def join(cls, pieces: Sequence[FinishedBatch]) -> FinishedBatch:
        """Return the messages of several batches as one; at least one."""
        if len(pieces) == 1:
            return pieces[0]
        chain = itertools.chain.from_iterable
        return cls(
            list(chain(piece.stretches for piece in pieces)),
            list(chain(piece.offsets for piece in pieces)),
            list(chain(piece.keys for piece in pieces)),
            list(chain(piece.record_at for piece in pieces)),
            list(chain(piece.consumed_at for piece in pieces)),
            list(chain(piece.runs for piece in pieces)),
            list(chain(piece.resolved_ns for piece in pieces)),
            list(chain(piece.rejected for piece in pieces)),
            list(chain(piece.messages for piece in pieces)),
        )

    def __len__(self) -> int:
        """Return how many messages there are."""
        return len(self.offsets)

    def spread(self, values: Iterable[ValueT]) -> list[ValueT]:
        """Return a value per message, given one per stretch."""
        spread: list[ValueT] = []
        for value, stretch in zip(values, self.stretches, strict=True):
            spread += [value] * stretch.size
        return spread

    @functools.cached_property
    def places(self) -> list[TopicPartition]:
        """The partition of each message."""
        return self.spread(stretch.place for stretch in self.stretches)

    @functools.cached_property
    def stand_in(self) -> TaskRun | None:
        """What stands for the one task of each message, if nothing tells these tasks apart."""
        first = self.runs[0]
        if not isinstance(first, tuple) or not first or self.runs[-1] is not first:
            return None
        return first[0] if self.runs.count(first) == len(self) else None

    @functools.cached_property
    def tasks(self) -> list[int]:
        """How many tasks each message had, replaced ones included."""
        if not self.has_runs:
            return [0] * len(self)
        return [1] * len(self) if self.stand_in or self.only_runs is not None else list(map(len, self.runs))

    @functools.cached_property
    def has_runs(self) -> bool:
        """Whether any message had a task."""
        return any(self.runs)

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
        return self.sum_up(operator.attrgetter("attempts"))

    def sum_up(self, read: Callable[[TaskRun], int]) -> list[int]:
        """Return the sum of a number over the tasks of each message."""
        if not self.has_runs:
            return [0] * len(self)
        if self.stand_in is not None:
            return [read(self.stand_in)] * len(self)
        if self.only_runs is not None:
            return list(map(read, self.only_runs))
        return [sum(map(read, runs)) for runs in self.runs]

    @functools.cached_property
    def failed(self) -> dict[int, TaskRun]:
        """The first task that failed for good, by the index of its message."""
        if not self.has_runs or self.stand_in is not None:
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
            offset=pack_longs(self.offsets),
            key=pack_keys(self.keys),
            record_at=pack_longs(self.record_at),
            resolved_ns=pack_longs(self.resolved_ns),
            status=encode_words(self.statuses),
            tasks=pack_counts(self.tasks),
            attempts=pack_counts(self.attempts),
        )

    def select(self, wanted: Sequence[bool]) -> FinishedBatch:
        """Return those messages of which this is true; at least one has to be."""
        return FinishedBatch(
            [Stretch(place, window, 1) for place, window, _ in itertools.compress(self.spread(self.stretches), wanted)],
            list(itertools.compress(self.offsets, wanted)),
            list(itertools.compress(self.keys, wanted)),
            list(itertools.compress(self.record_at, wanted)),
            list(itertools.compress(self.consumed_at, wanted)),
            list(itertools.compress(self.runs, wanted)),
            list(itertools.compress(self.resolved_ns, wanted)),
            list(itertools.compress(self.rejected, wanted)),
            list(itertools.compress(self.messages, wanted)),
        )

    def split(self) -> tuple[FinishedBatch, FinishedBatch]:
        """Return both halves of the messages, to find the one that a report cannot take."""
        half = len(self) // 2
        left = len(self) - half
        return self.select([True] * half + [False] * left), self.select([False] * half + [True] * left)


class Report(Protocol):
    """Where finished messages are reported; `history.HistoryWriter` is one.

    Attributes:
        tasks: Where its asyncio tasks run; set by the engine.
        needs_messages: Whether it reads messages and results of tasks; else a batch has no messages, and may have
            something that stands for tasks whose results were known.
    """

    tasks: EngineTasks
    needs_messages: bool

    def take(self, batch: FinishedBatch) -> None:
        """Take messages that left the pipeline; must be quick, must not raise, and keeps no reference to them."""

    async def close(self) -> None:
        """Write what is left."""
