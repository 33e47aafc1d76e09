"""The interface of reports, and their input: batches of messages that left the pipeline, column by column.

Invariant: values that several reports need are computed once per batch, and without a call per message.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tidemill.pipeline.handler.models import ExecutorTask
from tidemill.pipeline.reports.parts import COUNTS, LONGS, Part, pack_bytes, pack_words, spread, spread_words
from tidemill.pipeline.tasks.task_in_flight import NOBODY, TaskInFlight
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sources.base import TopicPartition


class HistoryStatus(enum.StrEnum):
    """How a message left the pipeline: without failures, with a failed task, or dead-lettered without tasks."""

    DONE = "done"
    FAILED = "failed"
    REJECTED = "rejected"


class WindowTimes:
    """Data that all messages of a window share; they are of one partition.

    Times are UTC microseconds since the epoch.

    Attributes:
        number: The window's number in its engine; None: the message was never in an arranged window.
        started_at: When `arrange` or `transform` was called.
        arranged_at: When that call returned.
        payloads: How many payloads `transform` and `on_message_complete` returned, by offset; None: none.
        payloads_each: How many payloads `transform` returned for each message, if that is the same for all; not
            included in `payloads`.
        known_runs: The stand-in for the tasks of each message, if each message has one task, all their results were
            precomputed, and they look the same in reports.
    """

    __slots__ = ("arranged_at", "known_runs", "number", "payloads", "payloads_each", "started_at")

    def __init__(self, number: int | None, started_at: int | None, arranged_at: int | None) -> None:
        self.number = number
        self.started_at = started_at
        self.arranged_at = arranged_at
        self.payloads: dict[int, int] | None = None
        self.payloads_each = 0
        self.known_runs: Sequence[TaskInFlight] | None = None

    def count_payloads(self, offset: int, count: int) -> None:
        """Add to the number of payloads returned for a message."""
        if self.payloads is None:
            self.payloads = {}
        self.payloads[offset] = self.payloads.get(offset, 0) + count


#: The window of messages that were dead-lettered before they had any task.
NO_WINDOW = WindowTimes(None, None, None)


@functools.lru_cache(1_000)
def stand_for(attempts: int, payloads: int, is_known: bool) -> tuple[TaskInFlight]:
    """Return a stand-in for a successful task in reports, so that the task itself can be released.

    Args:
        attempts: The number of its attempts.
        payloads: How many payloads its hook returned.
        is_known: Whether its result was precomputed.
    """
    flight = TaskInFlight(ExecutorTask(""), NOBODY, 0.0)
    flight.attempts, flight.payloads, flight.is_known = attempts, payloads, is_known
    return (flight,)


#: The data of one message in a batch, in the order of the batch's columns.
FinishedRow = tuple[int, bytes | None, int, int, Sequence[TaskInFlight], int, int, str | None, SourceMessage | None]


class SingleTasks(NamedTuple):
    """The tasks of messages that have one each, column by column.

    Attributes:
        flights: One or more tasks.
        attempts: The number of attempts of each.
        ended_at: When the last attempt of each ended; see `TaskInFlight.ended_at`.
    """

    flights: Sequence[TaskInFlight]
    attempts: Sequence[int]
    ended_at: Sequence[int]

    @classmethod
    def find(cls, flights_of: Sequence[Sequence[TaskInFlight]]) -> SingleTasks | None:
        """Return the tasks of messages; None: some messages have several tasks, or none."""
        try:
            flights = [flight for (flight,) in flights_of]
        except ValueError:
            return None
        return cls(flights, [flight.attempts for flight in flights], [flight.ended_at for flight in flights])

    def find_stand_in(self) -> tuple[TaskInFlight] | None:
        """Return the stand-in of all tasks if all succeeded and look the same in reports; see `stand_for`."""
        count, attempts, payloads = len(self.flights), self.attempts, [flight.payloads for flight in self.flights]
        if (
            attempts.count(attempts[0]) == count
            and payloads.count(payloads[0]) == count
            and not [1 for flight in self.flights if flight.error is not None or flight.is_known]
        ):
            return stand_for(attempts[0], payloads[0], False)
        return None


class Stretch(NamedTuple):
    """Neighbours in a batch that are of one partition and one window."""

    topic_partition: TopicPartition
    window: WindowTimes
    size: int


def find_end(flights: Sequence[TaskInFlight]) -> int:
    """Return when the last of a message's tasks ended; 0 if none ran."""
    return flights[0].ended_at if len(flights) == 1 else max([flight.ended_at for flight in flights], default=0)


class FinishedBatch:
    """Messages that left the pipeline, as parallel lists, roughly in that order.

    Attributes:
        stretches: The messages in order, grouped into neighbours of one window.
        offsets: The offset of each of the one or more messages.
        keys: The key of each.
        record_at: The original timestamp of each, in milliseconds.
        consumed_at: When each was fetched, in UTC microseconds since the epoch; 0: unknown.
        flights: The tasks of each, or their stand-ins.
        ended_at: When the last task of each ended, in UTC microseconds since the epoch; 0: all were precomputed, or
            none.
        resolved_ns: When each left the pipeline, in UTC nanoseconds since the epoch.
        rejected: Why each was dead-lettered before it had any task; None if it was not.
        messages: The messages; empty unless a report needs them.
    """

    def __init__(self) -> None:
        """Create an empty batch; add rows before reading anything."""
        self.stretches: list[Stretch] = []
        self.offsets: list[int] = []
        self.keys: list[bytes | None] = []
        self.record_at: list[int] = []
        self.consumed_at: list[int] = []
        self.flights: list[Sequence[TaskInFlight]] = []
        self.ended_at: list[int] = []
        self.resolved_ns: list[int] = []
        self.rejected: list[str | None] = []
        self.messages: list[SourceMessage] = []

    def add_rows(self, topic_partition: TopicPartition, window: WindowTimes, rows: Sequence[FinishedRow]) -> None:
        """Add one or more messages of one window, or of one partition without a window."""
        offsets, keys, record_at, consumed_at, flights, ended_at, *more = zip(*rows, strict=True)
        resolved_ns, rejected, messages = more
        self.stretches.append(Stretch(topic_partition, window, len(rows)))
        self.offsets += offsets
        self.keys += keys
        self.record_at += record_at
        self.consumed_at += consumed_at
        self.flights += flights
        self.ended_at += ended_at
        self.resolved_ns += resolved_ns
        self.rejected += rejected
        if messages[0] is not None:
            self.messages += messages

    def add_window(
        self,
        topic_partition: TopicPartition,
        messages: Sequence[SourceMessage],
        offsets: Sequence[int],
        keys: Sequence[bytes | None],
        flights: Sequence[Sequence[TaskInFlight]],
        ended_at: Sequence[int],
        window: WindowTimes,
        now: int,
    ) -> None:
        """Add messages of one window that leave the pipeline together, at least one; no reference to them is held.

        Args:
            topic_partition: Their partition.
            messages: The messages.
            offsets: Their offsets.
            keys: Their keys.
            flights: The tasks of each, or their stand-ins.
            ended_at: When the last task of each ended; see `find_end`.
            window: Their window.
            now: The current time, in UTC nanoseconds since the epoch.
        """
        count = len(messages)
        self.stretches.append(Stretch(topic_partition, window, count))
        self.offsets += offsets
        self.keys += keys
        self.record_at += [message.timestamp for message in messages]
        self.consumed_at += [message.consumed_at for message in messages]
        self.flights += flights
        self.ended_at += ended_at
        self.resolved_ns += [now] * count
        self.rejected += [None] * count

    def extend(self, other: FinishedBatch) -> None:
        """Add the messages of another batch."""
        self.stretches += other.stretches
        self.offsets += other.offsets
        self.keys += other.keys
        self.record_at += other.record_at
        self.consumed_at += other.consumed_at
        self.flights += other.flights
        self.ended_at += other.ended_at
        self.resolved_ns += other.resolved_ns
        self.rejected += other.rejected
        self.messages += other.messages

    def __len__(self) -> int:
        return len(self.offsets)

    @functools.cached_property
    def topic_partitions(self) -> list[TopicPartition]:
        """The partition of each message."""
        return list(spread([stretch.topic_partition for stretch in self.stretches], self.sizes))

    @functools.cached_property
    def stand_in(self) -> TaskInFlight | None:
        """The stand-in of all tasks, if each message has one task and they look the same."""
        first = self.flights[0]
        if not isinstance(first, tuple) or not first or self.flights[-1] is not first:
            return None
        return first[0] if self.flights.count(first) == len(self) else None

    @functools.cached_property
    def tasks(self) -> list[int]:
        """The number of tasks of each message, including replaced ones."""
        if not self.has_runs:
            return [0] * len(self)
        return [1] * len(self) if self.stand_in or self.only_flights is not None else list(map(len, self.flights))

    @functools.cached_property
    def has_runs(self) -> bool:
        """Whether any message had a task."""
        return any(self.flights)

    @functools.cached_property
    def only_flights(self) -> Sequence[TaskInFlight] | None:
        """The task of each message, if each has exactly one; otherwise None."""
        try:
            return [flight for (flight,) in self.flights]
        except ValueError:  # a message has another number of tasks
            return None

    @functools.cached_property
    def attempts(self) -> list[int]:
        """The number of attempts of each message's tasks together."""
        return self.sum_up(operator.attrgetter("attempts"))

    def sum_up(self, read: Callable[[TaskInFlight], int]) -> list[int]:
        """Return the sum of a number over the tasks of each message."""
        if not self.has_runs:
            return [0] * len(self)
        if self.stand_in is not None:
            return [read(self.stand_in)] * len(self)
        if self.only_flights is not None:
            return list(map(read, self.only_flights))
        return [sum(map(read, flights)) for flights in self.flights]

    @functools.cached_property
    def failed(self) -> dict[int, TaskInFlight]:
        """The first task that failed for good, by the index of its message."""
        if not self.has_runs or self.stand_in is not None:
            return {}
        if self.only_flights is not None and [flight.error for flight in self.only_flights].count(None) == len(self):
            return {}
        found: dict[int, TaskInFlight] = {}
        for index, flights in enumerate(self.flights):
            for flight in flights:
                if flight.error is not None and not flight.replaced:
                    found[index] = flight
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
    def sizes(self) -> list[int]:
        """The number of messages in each stretch."""
        return [stretch.size for stretch in self.stretches]

    @functools.cached_property
    def parts(self) -> dict[str, Part]:
        """Column parts by name that several reports use.

        `record_at` is in milliseconds, `resolved_at` in nanoseconds.
        """
        return {
            "topic": spread_words([stretch.topic_partition[0] for stretch in self.stretches], self.sizes),
            "partition": COUNTS.spread([stretch.topic_partition[1] for stretch in self.stretches], self.sizes),
            "offset": LONGS.pack(self.offsets),
            "key": pack_bytes(self.keys),
            "record_at": LONGS.pack(self.record_at),
            "resolved_at": LONGS.pack(self.resolved_ns),
            "status": pack_words(self.statuses),
            "tasks": COUNTS.pack(self.tasks),
            "attempts": COUNTS.pack(self.attempts),
        }

    def select(self, wanted: Sequence[bool]) -> FinishedBatch:
        """Return the messages for which `wanted` is true; at least one must be."""
        found, choose = FinishedBatch(), itertools.compress
        neighbours = choose(spread(self.stretches, self.sizes), wanted)
        found.stretches = [Stretch(topic_partition, window, 1) for topic_partition, window, _ in neighbours]
        found.offsets = list(choose(self.offsets, wanted))
        found.keys = list(choose(self.keys, wanted))
        found.record_at = list(choose(self.record_at, wanted))
        found.consumed_at = list(choose(self.consumed_at, wanted))
        found.flights = list(choose(self.flights, wanted))
        found.ended_at = list(choose(self.ended_at, wanted))
        found.resolved_ns = list(choose(self.resolved_ns, wanted))
        found.rejected = list(choose(self.rejected, wanted))
        found.messages = list(choose(self.messages, wanted))
        return found


class Report(Protocol):
    """Receives finished messages; implemented by `history.HistoryWriter`, for example.

    Attributes:
        tasks: Runs its asyncio tasks; set by the engine.
        needs_messages: Whether it reads messages and the results of tasks; otherwise a batch has no messages, and may
            contain stand-ins for successful tasks.
    """

    tasks: EngineTasks
    needs_messages: bool

    def take(self, batch: FinishedBatch) -> None:
        """Report messages that left the pipeline; must be quick, must not raise, and must hold no reference to them."""

    async def close(self) -> None:
        """Write the remaining data."""
