"""Collects the data of messages that left the pipeline, and passes it to all reports in batches.

The data is read when a message leaves, while it is still in the CPU caches, and so that its memory is free for the next
messages. Invariants: data waits at most `MAX_SECONDS`. Its amount is limited to `MAX_MESSAGES` and, because tasks hold
their input and output, to `MAX_BYTES`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from tidemill.pipeline.reports.report import (
    NO_WINDOW,
    FinishedBatch,
    FinishedRow,
    Report,
    SingleTasks,
    WindowTimes,
    find_end,
    stand_for,
)
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.log.setup import throttle
from tidemill.sources.base import TopicPartition

log = structlog.get_logger(__name__)

MAX_MESSAGES = 1_000
MAX_SECONDS = 0.25
MAX_BYTES = 4 * 1024 * 1024
_LOG_SECONDS = 60.0


class FinishedMessages:
    """The messages that left the pipeline since the last batch.

    Args:
        reports: The reports that receive every batch.

    Attributes:
        on_leaving: Called with the partition and the tasks of messages that leave together, before the tasks are
            released; with a sequence per message, or with all tasks if each message has one. Must not raise.
        count: How many messages there are.
        size_bytes: How much memory they hold.
    """

    __slots__ = ("_keeps", "_reports", "_singles", "_timer", "_together", "count", "on_leaving", "size_bytes")

    def __init__(self, reports: Sequence[Report]) -> None:
        self._reports = reports
        self._keeps = any(report.needs_messages for report in reports)
        self._timer: asyncio.TimerHandle | None = None
        self.on_leaving: Callable[[TopicPartition, Sequence[Sequence[TaskInFlight]] | SingleTasks], None] | None = None
        self._start()

    def _start(self) -> None:
        #: Groups of messages of one window that left together.
        self._together = FinishedBatch()
        #: Messages that left individually, by window; messages without a window, by partition.
        self._singles: dict[WindowTimes | TopicPartition, tuple[TopicPartition, WindowTimes, list[FinishedRow]]] = {}
        self.count = 0
        self.size_bytes = 0

    def add(
        self,
        topic_partition: TopicPartition,
        message: SourceMessage,
        size_bytes: int,
        flights: Sequence[TaskInFlight] = (),
        window: WindowTimes = NO_WINDOW,
        rejected: str | None = None,
    ) -> None:
        """Add a message that leaves the pipeline now.

        Args:
            topic_partition: Its partition.
            message: The message.
            size_bytes: The size of its key and value.
            flights: Its tasks.
            window: Its window.
            rejected: Why it was dead-lettered before it had any task, if it was.
        """
        key = message.key
        if self.on_leaving is not None and flights:
            self.on_leaving(topic_partition, (flights,))
        if len(flights) == 1 and not self._keeps and (flight := flights[0]).error is None:
            # Inlined from `_stand_for_all`: most messages are like this, and a call would cost more than its work.
            ended_at = flight.ended_at
            flights = stand_for(flight.attempts, flight.payloads, flight.is_known)
            if key:
                self.size_bytes += len(key)
        else:
            ended_at = find_end(flights)
            self.size_bytes += size_bytes + _measure_outputs(flights)
        found = self._singles.get(window)
        if found is None:
            found = self._singles.setdefault(
                topic_partition if window is NO_WINDOW else window, (topic_partition, window, [])
            )
        found[2].append(
            (
                message.offset,
                key,
                message.timestamp,
                message.consumed_at,
                flights,
                ended_at,
                time.time_ns(),
                rejected,
                message if self._keeps else None,
            )
        )
        self.count += 1
        if self._timer is None or self.count >= MAX_MESSAGES or self.size_bytes >= MAX_BYTES:
            self._added()

    def add_all(
        self,
        topic_partition: TopicPartition,
        messages: Sequence[SourceMessage],
        sizes: Sequence[int],
        flights: Sequence[Sequence[TaskInFlight]],
        window: WindowTimes,
    ) -> None:
        """Add messages of a window that leave now, each with its size and its tasks; see `add`."""
        now, start = time.time_ns(), 0
        while start < len(messages):
            end = min(len(messages), start + MAX_MESSAGES - self.count)
            self._add_together(topic_partition, messages[start:end], sizes[start:end], flights[start:end], window, now)
            start = end
            self._added()

    def _add_together(
        self,
        topic_partition: TopicPartition,
        messages: Sequence[SourceMessage],
        sizes: Sequence[int],
        flights: Sequence[Sequence[TaskInFlight]],
        window: WindowTimes,
        now: int,
    ) -> None:
        offsets, keys = [message.offset for message in messages], [message.key for message in messages]
        if self._keeps:
            self.size_bytes += sum(sizes) + sum(map(_measure_outputs, flights))
        else:
            self.size_bytes += sum(map(len, filter(None, keys)))
        ended_at: Sequence[int]
        if window.known_runs is not None:
            ended_at = [0] * len(messages)
            flights = flights if self._keeps else [window.known_runs] * len(messages)
        else:
            singles = SingleTasks.find(flights)
            if self.on_leaving is not None:
                self.on_leaving(topic_partition, flights if singles is None else singles)
            ended_at = list(map(find_end, flights)) if singles is None else singles.ended_at
            if not self._keeps:
                alike = None if singles is None else singles.find_stand_in()
                flights = self._stand_for_all(flights, sizes) if alike is None else [alike] * len(messages)
        self._together.add_window(topic_partition, messages, offsets, keys, flights, ended_at, window, now)
        if self._keeps:
            self._together.messages += messages
        self.count += len(messages)

    def _stand_for_all(
        self, flights: Sequence[Sequence[TaskInFlight]], sizes: Sequence[int]
    ) -> list[Sequence[TaskInFlight]]:
        """Return the tasks of each message, or their stand-ins."""
        kept: list[Sequence[TaskInFlight]] = []
        for each, size_bytes in zip(flights, sizes, strict=True):
            if len(each) == 1 and (flight := each[0]).error is None:
                kept.append(stand_for(flight.attempts, flight.payloads, flight.is_known))
            else:
                # Failed tasks often hold their message's value.
                self.size_bytes += size_bytes + _measure_outputs(each)
                kept.append(each)
        return kept

    def _added(self) -> None:
        if self.count >= MAX_MESSAGES or self.size_bytes >= MAX_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MAX_SECONDS, self.flush)

    def flush(self) -> None:
        """Pass the collected messages to the reports."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.count:
            self.size_bytes = 0
            return
        batch = self._together
        if self._singles:
            batch = FinishedBatch()
            for rows in self._singles.values():
                batch.add_rows(*rows)
            batch.extend(self._together)
        self._start()
        for report in self._reports:
            try:
                report.take(batch)
            except Exception:  # a report's failure must not affect messages
                throttle(log, _LOG_SECONDS).error(
                    "finished messages cannot be reported", messages=len(batch), exc_info=True
                )

    async def close(self) -> None:
        """Pass on the last batch, and close all reports."""
        self.flush()
        ends = await asyncio.gather(*(report.close() for report in self._reports), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end


def _measure_outputs(flights: Sequence[TaskInFlight]) -> int:
    """Return the size of the tasks' output."""
    results = [flight.result for flight in flights if flight.result is not None]
    return sum([len(result.stdout_bytes) + len(result.stderr) for result in results])
