"""The engine's side of the flight recorder: collects rows and events, and packs them into frames for the link.

Rows are sent every `MAX_AGE_SECONDS`, or sooner when there are many. Invariants: no method waits, or raises into the
pipeline. Rows that cannot be packed are counted as dropped. The settings limit the size of the backlog.
"""

from __future__ import annotations

import asyncio
import functools
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import structlog

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.core.errors import describe_error
from tidemill.core.recorder.commit_times import CommitTimes
from tidemill.core.recorder.outgoing import EVENTS, OutgoingFrames
from tidemill.core.recorder.pause_watch import PauseWatch
from tidemill.pipeline.commits import Commits
from tidemill.pipeline.handler.models import ExecutorError
from tidemill.pipeline.recording.choice import EVERYTHING, RecordChoice
from tidemill.pipeline.recording.event_log import EngineEventLog
from tidemill.pipeline.recording.message_rows import MessageRows, TakenRows
from tidemill.pipeline.recording.task_rows import TakenTaskRows, TaskRows
from tidemill.pipeline.recording.texts import describe_failure
from tidemill.pipeline.reports.collector import FinishedMessages
from tidemill.pipeline.reports.report import FinishedBatch
from tidemill.pipeline.services import Services
from tidemill.pipeline.tasks.pool import TaskPool
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.recorder.format.events import EventKind
from tidemill.recorder.format.schema import MAX_BODY_BYTES, RowTable, encode_rows
from tidemill.runtime.link.progress import SinkStats
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sources.base import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

log = structlog.get_logger(__name__)

#: Rows are sent at this age, in this number, or when they hold this much output, whichever comes first.
MAX_AGE_SECONDS = 1.0
MAX_ROWS = 20_000
MAX_HELD_BYTES = 4 * 1024 * 1024
#: More rows than this are packed on a thread; a row takes about a microsecond.
MAX_ROWS_ON_LOOP = 2_000
#: Rows with more output than this are packed on a thread, too, because output is searched for secrets.
MAX_OUTPUT_ON_LOOP = 16 * 1024
#: Rows are held at least this long, because most messages are committed by then.
COMMIT_SECONDS = 0.3
#: References to windows that no longer exist are removed with each beat, and whenever there are this many.
MIN_WINDOWS = 10_000
#: The limit of unconfirmed bytes in flight to the driver.
WINDOW_BYTES = 4 * MAX_BODY_BYTES
#: A body with a single row that is larger is dropped.
MAX_ROW_BYTES = 1024 * 1024
#: A partition that backpressure holds back for this long is recorded as paused.
PAUSED_SECONDS = 2.0
_LOG_SECONDS = 60.0


class RecordedWindow(Protocol):
    """The interface of a window whose messages are in the pipeline; implemented by `WindowInFlight`."""

    topic_partition: TopicPartition
    flights_of: list[list[TaskInFlight]]


class EngineRecorder:
    """Records one engine; used on the engine's loop.

    Args:
        settings: The section `debug`.
        clock: A monotonic clock, in seconds.
        choice: The scope of the recording.

    Attributes:
        frames: The frames to send to the driver.
        events: The events; any thread may add to it.
        commits: When messages were committed.
        tasks: Runs packing on threads; an engine sets its own.
        note_attempt: Records an attempt of a task that has just ended.
    """

    needs_messages = False

    def __init__(
        self,
        settings: DebugSettings,
        clock: Callable[[], float] = time.monotonic,
        choice: RecordChoice = EVERYTHING,
    ) -> None:
        self._choice = choice
        #: Messages with a dead letter that have not left the pipeline yet.
        self._lettered: set[tuple[str, int, int]] = set()
        self._clock = clock
        self._stores_events = settings.store_events
        self.frames = OutgoingFrames(settings.max_buffer_bytes, settings.max_buffer, WINDOW_BYTES)
        self.events = EngineEventLog(clock, choice.kinds)
        self.commits: CommitTimes[TopicPartition] = CommitTimes()
        self.tasks = EngineTasks()
        self._packing: dict[RowTable, asyncio.Task[None]] = {}
        self._messages = MessageRows(self.commits)
        self._tasks = TaskRows(
            settings,
            clock,
            successes=choice.successes,
            on_due=self._look_at_tasks,
            on_lost=self._lose_task,
        )
        self.note_attempt = self._tasks.add
        self._tasks_since: float | None = None
        #: Message rows so far, plus task rows that could not be made.
        self._rows = 0
        self._finished: FinishedMessages | None = None
        self._rows_per_body = dict.fromkeys(RowTable, MAX_ROWS)
        self._pauses = PauseWatch(PAUSED_SECONDS)
        self._sinks: dict[str, tuple[int, int, int]] = {}
        #: Windows with tasks that existed at the last check, and those added since.
        self._windows: dict[TopicPartition, list[weakref.ref[RecordedWindow]]] = {}
        self._noted = 0
        self._most_windows = MIN_WINDOWS

    def attach(self, pool: TaskPool, finished: FinishedMessages, commits: Commits, services: Services) -> None:
        """Subscribe to the engine's parts."""
        pool.on_attempt, pool.kept_below_seconds = self.note_attempt, self._tasks.kept_below_seconds
        finished.on_leaving = self._tasks.add_kept
        if self._choice is EVERYTHING:
            self._finished = finished
        if self._choice.successes:  # otherwise no row needs commit times
            commits.on_committed = self.note_committed
        services.on_block = self.note_block
        services.periodic.on_run = self.note_periodic_run

    @property
    def rows(self) -> int:
        """The number of rows that were made, or are about to be, and not dropped."""
        pending = self._finished.count if self._finished is not None else 0
        return self._rows + pending + self._tasks.count - self.frames.dropped_rows

    @property
    def dropped(self) -> int:
        """The number of rows and events that were dropped."""
        return self.frames.dropped

    # -- records ----------------------------------------------------------------------------------------------

    def take(self, batch: FinishedBatch) -> None:
        """Record messages that left the pipeline."""
        now, chosen = self._clock(), self._choose(batch)
        if chosen is None:
            return
        self._rows += len(chosen)
        try:
            self._messages.add(chosen, now)
        except Exception as error:
            self._lose(len(chosen), error)
        if self._messages.size >= 4 * MAX_ROWS:  # no thread was free for a long time
            self._pack_messages(now, at_once=True)
        elif self._messages.size >= MAX_ROWS:
            self._pack_messages(now - COMMIT_SECONDS)

    def _choose(self, batch: FinishedBatch) -> FinishedBatch | None:
        """Return the messages of the batch that are in scope; None if none are."""
        if self._choice is EVERYTHING:
            return batch
        lettered = self._lettered
        topic_partitions = [
            (*topic_partition, offset)
            for topic_partition, offset in zip(batch.topic_partitions, batch.offsets, strict=True)
        ]
        wanted = [
            status in self._choice.statuses or topic_partition in lettered
            for status, topic_partition in zip(batch.statuses, topic_partitions, strict=True)
        ]
        lettered.difference_update(topic_partitions)
        return batch.select(wanted) if any(wanted) else None

    def note_window(self, window: RecordedWindow) -> None:
        """Remember a window whose tasks start; only a weak reference is held."""
        if not self._choice.successes:
            return
        if self._noted >= self._most_windows:
            self._forget_gone()
            self._most_windows = max(MIN_WINDOWS, 2 * self._noted)
        self._windows.setdefault(window.topic_partition, []).append(weakref.ref(window))
        self._noted += 1

    def _forget_gone(self) -> None:
        """Forget windows that no longer exist."""
        alive = {
            topic_partition: [each for each in noted if each() is not None]
            for topic_partition, noted in self._windows.items()
        }
        self._windows = {topic_partition: noted for topic_partition, noted in alive.items() if noted}
        self._noted = sum(map(len, self._windows.values()))

    def note_kept(self, topic_partition: TopicPartition | None = None) -> None:
        """Record successful tasks whose messages are still in the pipeline because of other tasks.

        Args:
            topic_partition: A closed partition, whose windows are then forgotten; None: all partitions.
        """
        if topic_partition is None:
            self._forget_gone()
            noted = [each for some in self._windows.values() for each in some]
        else:
            noted = self._windows.pop(topic_partition, [])
            self._noted -= len(noted)
        for reference in noted:
            window = reference()
            if window is not None:
                self._tasks.add_kept(window.topic_partition, window.flights_of)

    def note_letter(self, topic_partitions: Iterable[tuple[str, int, int]]) -> None:
        """Record messages with a dead letter, by topic, partition and offset."""
        if self._choice is not EVERYTHING:
            self._lettered.update(topic_partitions)

    def note_committed(self, partition: TopicPartition, offset: int) -> None:
        self.commits.note(partition, offset, time.time_ns() // 1000)

    def note_known(self, flight: TaskInFlight, exit_code: int, output_bytes: int) -> None:
        """Record a task with a precomputed result; called only for tasks with labels or a nonzero exit code."""
        self._tasks.add_known(flight, exit_code, output_bytes)

    def _look_at_tasks(self) -> None:
        if self._tasks_since is None:
            self._tasks_since = self._clock()
        size, held = self._tasks.size, self._tasks.held_bytes
        if size >= MAX_ROWS or held >= MAX_HELD_BYTES:
            # Pack on the loop if no thread was free for a long time.
            self._pack_tasks(at_once=size >= 4 * MAX_ROWS or held >= 4 * MAX_HELD_BYTES)

    def note_failure(
        self,
        kind: Literal["task_failed", "task_retry", "task_replaced"],
        flight: TaskInFlight,
        error: ExecutorError,
        **data: str | int | float,
    ) -> None:
        """Record the consequence of a failed attempt; the task has not ended yet."""
        offsets = flight.find_offsets()
        self.events.add(
            EventKind(kind),
            flight.failure or describe_failure(error),
            partition=flight.owner.topic_partition,
            offset=offsets[0] if offsets else None,
            task_id=flight.task.task_id,
            data={"attempt": flight.attempts, "kind": error.kind.value, **data},
        )

    def note_partitions(
        self, kind: Literal["assigned", "revoked"], partitions: Sequence[TopicPartition], why: str
    ) -> None:
        """Record that partitions were assigned or revoked."""
        for partition in partitions:
            self.events.add(EventKind(kind), why, partition=partition)

    def note_stall(self, partition: TopicPartition, offset: int | None, why: str) -> None:
        """Record a stalled partition."""
        self.events.add(EventKind.PARTITION_STALLED, why, partition=partition, offset=offset)

    def note_block(self, hook: str | None, task: str | None, seconds: float) -> None:
        """Record that the event loop was blocked; on any thread."""
        what = {"hook": hook} if hook is not None else {"task": task} if task is not None else {}
        self.events.add(EventKind.LOOP_BLOCK, data={**what, "seconds": round(seconds, 3)})

    def note_periodic_run(self, hook: str, seconds: float, error: str | None) -> None:
        """Record a run of a periodic hook."""
        if error is None and not self._choice.successes:
            return
        self.events.add(EventKind.PERIODIC_RUN, error or "", data={"hook": hook, "seconds": round(seconds, 6)})

    def look(self, sinks: Mapping[str, SinkStats], paused: Collection[str]) -> None:
        """Pack rows that are due, and record changes since the last call.

        Args:
            sinks: The statistics of each sink.
            paused: The names of the partitions that backpressure holds back.
        """
        now = self._clock()
        begun, over = self._pauses.look(now, paused)
        for kind, names in ((EventKind.PAUSED, begun), (EventKind.RESUMED, over)):
            for name in names:
                topic, _, number = name.rpartition("/")
                self.events.add(kind, partition=(topic, int(number)))
        self._compare_sinks(sinks)
        self._pack_events()
        self.note_kept()
        if self._messages.find_age(now) >= MAX_AGE_SECONDS + COMMIT_SECONDS:
            self._pack_messages(now - COMMIT_SECONDS)
        if self._tasks_since is not None and now - self._tasks_since >= MAX_AGE_SECONDS:
            self._pack_tasks()

    def _compare_sinks(self, sinks: Mapping[str, SinkStats]) -> None:
        for section, stats in sinks.items():
            errors, refused, skipped = self._sinks.get(section, (0, 0, 0))
            if stats.error_count > errors:
                data: dict[str, str | int | float] = {
                    "count": stats.error_count - errors,
                    "payloads": stats.refused - refused,
                }
                self.events.add(EventKind.SINK_ERROR, stats.last_error or "", sink=section, data=data)
            if stats.skipped > skipped:
                text, data = stats.last_error or "", {"count": stats.skipped - skipped}
                self.events.add(EventKind.SINK_SKIPPED, text, sink=section, data=data)
            self._sinks[section] = (stats.error_count, stats.refused, stats.skipped)

    async def close(self) -> None:
        """Pack everything for the link to send. If this is cancelled, rows still being packed on threads are lost."""
        try:
            self.note_kept()
            await self._wait_for_threads()
            self._pack_messages(self._clock())
            self._pack_tasks()
            await self._wait_for_threads()
        finally:
            for packing in self._packing.values():
                self.tasks.cancel(packing)
            self._pack_messages(self._clock(), at_once=True)
            self._pack_tasks(at_once=True)
            self._pack_events(last=True)

    async def _wait_for_threads(self) -> None:
        if self._packing:
            await asyncio.wait(self._packing.values())  # unlike `gather`, `wait` cancels none of them

    # -- frames -----------------------------------------------------------------------------------------------

    def _pack_events(self, *, last: bool = False) -> None:
        for body, count in self.events.take(last=last):
            if self._stores_events:
                self._send(EVENTS, body, count)

    def _pack_messages(self, until: float, *, at_once: bool = False) -> None:
        if at_once or RowTable.MESSAGES not in self._packing:
            self._pack(RowTable.MESSAGES, self._messages.take(until), at_once=at_once)

    def _pack_tasks(self, *, at_once: bool = False) -> None:
        if at_once or RowTable.TASKS not in self._packing:
            self._tasks_since = None
            taken = self._tasks.take()
            if at_once and taken is not None and taken.output_bytes > MAX_OUTPUT_ON_LOOP:
                throttle(log, _LOG_SECONDS).warning(
                    "the output of tasks is not recorded: there was no time to mask secrets in it",
                    tasks=taken.size,
                    bytes=taken.output_bytes,
                )
                taken.drop_output()
            self._pack(RowTable.TASKS, taken, at_once=at_once, output_bytes=taken.output_bytes if taken else 0)

    def _pack(
        self, table: RowTable, taken: TakenRows | TakenTaskRows | None, *, at_once: bool, output_bytes: int = 0
    ) -> None:
        """Pack rows: few of them here, many on a thread, unless `at_once`."""
        if taken is None:
            return
        if not at_once and (taken.size > MAX_ROWS_ON_LOOP or output_bytes > MAX_OUTPUT_ON_LOOP):
            packing = self.tasks.run(f"the packing of {table}", self._pack_on_thread(table, taken))
            packing.add_done_callback(functools.partial(self._count_cancelled, taken.size))
            self._packing[table] = packing
            return
        try:
            self._add(table, self._encode(table, taken.join()))
        except Exception as error:
            self._lose(taken.size, error)

    async def _pack_on_thread(self, table: RowTable, taken: TakenRows | TakenTaskRows) -> None:
        try:
            self._add(table, await asyncio.to_thread(lambda: self._encode(table, taken.join())))
        except Exception as error:
            self._lose(taken.size, error)
        finally:
            self._packing.pop(table, None)

    def _count_cancelled(self, count: int, packing: asyncio.Task[None]) -> None:
        if packing.cancelled():
            self._lose(count, TimeoutError("the engine stopped before they were packed"))

    def _add(self, table: RowTable, bodies: Sequence[tuple[bytes, int]]) -> None:
        for body, count in bodies:
            if len(body) > MAX_ROW_BYTES:
                self._lose(count, ValueError(f"a row of {len(body)} bytes"))
            else:
                self._send(table, body, count)

    def _send(self, table: str, body: bytes, count: int) -> None:
        """Queue a body for the link; log if others were dropped to make room for it."""
        before = self.frames.dropped
        self.frames.add(table, body, count)
        if self.frames.dropped > before:
            throttle(log, _LOG_SECONDS).error(
                "rows and events are lost: the driver stores them more slowly than they arrive",
                dropped=self.frames.dropped,
                advice="raise debug.max_buffer_bytes or debug.max_buffer, or put debug.db_dir on a faster disk",
            )

    def _encode(self, table: RowTable, rows: pa.RecordBatch) -> list[tuple[bytes, int]]:
        """Return bodies of limited size with their number of rows, which is estimated from earlier bodies."""
        bodies: list[tuple[bytes, int]] = []
        start, end = 0, rows.num_rows
        while start < end:
            count = min(self._rows_per_body[table], end - start)
            body = encode_rows(rows.slice(start, count))
            fits = max(1, int(count * 0.9 * MAX_BODY_BYTES / len(body)))
            if len(body) > MAX_BODY_BYTES and count > 1:
                self._rows_per_body[table] = min(fits, count - 1)
                continue
            self._rows_per_body[table] = min(fits, MAX_ROWS)
            bodies.append((body, count))
            start += count
        return bodies

    def _lose_task(self, error: Exception) -> None:
        self._rows += 1
        self._lose(1, error)

    def _lose(self, count: int, error: Exception) -> None:
        self.frames.lose(count)
        throttle(log, _LOG_SECONDS).error(
            "rows cannot be recorded and are lost", rows=count, error=describe_error(error), exc_info=error
        )
