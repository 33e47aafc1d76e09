"""The single writer of a recording: a thread that takes rows and events from a queue and writes them to disk or memory.

Invariants:
- Methods for other threads never wait for the disk and never raise.
- Rows that cannot be written are counted, logged and confirmed, and do not stop the writer.
- Batches that an engine sends twice are stored once.
- Leaving the context takes `end_seconds` at most.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec
import structlog

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.core.recorder.repeats import KnownFrames
from tidemill.core.recorder.sealing import SealPolicy
from tidemill.recorder.format.events import RecordedEvent
from tidemill.recorder.format.events_database import EventsDatabase
from tidemill.recorder.format.frames import FrameInfo
from tidemill.recorder.format.schema import RowTable, decode_rows
from tidemill.recorder.kept_memory import use_system_memory
from tidemill.recorder.writing.disk_recording import DiskRecording
from tidemill.recorder.writing.memory_recording import MemoryRecording
from tidemill.recorder.writing.sampling import ProcessSampler, Sample, sample_progress
from tidemill.runtime.link.progress import EngineProgress
from tidemill.runtime.log.setup import throttle

if TYPE_CHECKING:
    import pyarrow as pa

log = structlog.get_logger(__name__)

#: The size of the queue in front of a slow disk; further rows are dropped.
MAX_QUEUE_BYTES = 64 * 1024 * 1024
#: The assumed size of an event.
_EVENT_BYTES = 500
#: The maximum number of batches written at once.
_MAX_BATCHES = 256
#: The maximum number of bytes written at once; decoded, they may take ten times as much.
_MAX_TAKEN_BYTES = 1024 * 1024
#: The interval of the writer's ticks.
_TICK_SECONDS = 0.5
LOG_SECONDS = 60.0
END_SECONDS = 1.5


class RecordingTarget(Protocol):
    """The target of a writer: `DiskRecording` or `MemoryRecording`; methods may raise `OSError` and `sqlite3.Error`."""

    database: EventsDatabase

    @property
    def location(self) -> str: ...
    def seal_leftovers(self) -> None: ...
    def seal_full(self) -> None: ...
    def append(self, table: RowTable, frames: Sequence[tuple[FrameInfo, bytes, pa.RecordBatch]]) -> None: ...
    def add_events(self, events: Sequence[RecordedEvent]) -> None: ...
    def tick(self) -> None: ...
    def close(self) -> None: ...


class RecorderStatistics(msgspec.Struct):
    """A writer's statistics.

    Attributes:
        location: The folder, or "memory".
        rows: Rows stored.
        events: Events stored.
        lost_rows: Rows that could not be stored.
        lost_events: Events that could not be stored.
        lost_by_slot: Rows and events that could not be stored, by the slot of their engine.
        problem: The reason for the latest loss; '' if there was none.
    """

    location: str = ""
    rows: int = 0
    events: int = 0
    lost_rows: int = 0
    lost_events: int = 0
    lost_by_slot: dict[int, int] = {}
    problem: str = ""

    @property
    def lost(self) -> int:
        """Rows and events that could not be stored."""
        return self.lost_rows + self.lost_events


class _Rows(msgspec.Struct, frozen=True):
    info: FrameInfo
    body: bytes
    count: int

    @property
    def size(self) -> int:
        return len(self.body)


class _Events(msgspec.Struct, frozen=True):
    engine_id: str
    slot: int
    seq: int
    events: Sequence[RecordedEvent]

    @property
    def size(self) -> int:
        return _EVENT_BYTES * len(self.events)


def _confirm_nothing(engine_id: str, seq: int) -> None:
    pass


class RecordWriter:
    """Writes a worker's recording.

    Args:
        settings: The section `debug`.
        group: The consumer group.
        worker: The worker's name.
        stored: Called on the writer's thread with the engine's id and the number of each batch that was stored or
            dropped.
        read_progress: Returns the sums over all engines; called once a second on the writer's thread.
        config: The configuration with secrets masked.
        policy: The limits at which segments are sealed.
        sample: Replaces `read_progress` where there are no engines.
        folder: The name of the folder below `db_dir`; '': derived from the group and the worker.
        end_seconds: How long shutdown may take; None: `END_SECONDS`.
        bounded: Whether this is a bounded run, which records failures only.

    Example:
        >>> with RecordWriter(settings, "orders", "host-1", stored=link.confirm) as writer:  # doctest: +SKIP
        ...     writer.put_rows(engine_id, 0, 1, RowTable.MESSAGES, body)
    """

    def __init__(
        self,
        settings: DebugSettings,
        group: str,
        worker: str,
        *,
        stored: Callable[[str, int], None] = _confirm_nothing,
        read_progress: Callable[[], EngineProgress | None] | None = None,
        config: dict[str, Any] | None = None,
        policy: SealPolicy | None = None,
        sample: Sample | None = None,
        folder: str = "",
        end_seconds: float | None = None,
        bounded: bool = False,
    ) -> None:
        self._bounded = bounded
        self._folder = folder
        self._end_seconds = END_SECONDS if end_seconds is None else end_seconds
        self._settings = settings
        self._group, self._worker = group, worker
        self._stored = stored
        self._config = config
        self._policy = policy
        self._queue: queue.SimpleQueue[_Rows | _Events | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._known = KnownFrames()
        self._sampler = ProcessSampler(settings, sample if read_progress is None else sample_progress(read_progress))
        self._thread: threading.Thread | None = None
        #: The losses last logged, and whether a loss occurred since the last successful write.
        self._said_lost, self._is_losing = 0, False
        self._log_lost_at = self._log_recovery_at = 0.0
        self.statistics = RecorderStatistics()
        self.recording: RecordingTarget | None = None

    def __enter__(self) -> Self:
        """Open the recording and start the thread; if the folder cannot be written, record to memory.

        Raises:
            sqlite3.Error: SQLite cannot create the database, not even in memory.
            OSError: The folder of a bounded run cannot be written.
        """
        recording = self.recording = self._open_recording()
        self.statistics.location = recording.location
        self._thread = threading.Thread(target=self._run, args=(recording,), name="tidemill-recorder", daemon=True)
        self._thread.start()
        return self

    def _open_recording(self) -> RecordingTarget:
        problem = None
        if self._settings.db_dir:
            try:
                folder = Path(self._settings.db_dir).expanduser()
                return DiskRecording(
                    folder, self._group, self._worker, self._settings, self._policy, self._folder, bounded=self._bounded
                )
            except (OSError, sqlite3.Error, RuntimeError) as error:  # RuntimeError: the user has no home folder
                if self._bounded:  # a memory recording would vanish with the run
                    raise
                problem = str(error)
        recording = MemoryRecording(self._group, self._worker, self._settings, self._policy)
        if problem is not None:
            log.warning(
                "the recording cannot be written; the newest 64 MiB are kept in memory",
                path=self._settings.db_dir,
                error=problem,
                advice="set debug.db_dir to a folder that this user can write to",
            )
        return recording

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write and seal what is queued, but wait for a slow disk no longer than `end_seconds`."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(self._end_seconds)
            if self._thread.is_alive():
                log.warning("the disk is too slow; the end of the recording is lost", path=self.statistics.location)
        if self.statistics.lost > self._said_lost:
            self._log_lost("recorded rows are lost")

    def put_rows(self, engine_id: str, slot: int, seq: int, table: RowTable, body: bytes, count: int = 1) -> None:
        """Queue a batch of rows (`schema.encode_rows`); returns at once.

        Args:
            engine_id: The id of the engine that sent it.
            slot: The engine's slot.
            seq: The number of the batch. Rows and events of an engine share one ascending sequence.
            table: The table of the rows.
            body: The encoded batch.
            count: The number of rows, counted as lost if the batch cannot be read or stored.
        """
        self._put(_Rows(FrameInfo(engine_id, slot, seq, table), body, count))

    def put_events(self, engine_id: str, slot: int, seq: int, events: Sequence[RecordedEvent]) -> None:
        """Queue events of an engine; returns at once. See `put_rows`."""
        self._put(_Events(engine_id, slot, seq, events))

    def add_event(self, event: RecordedEvent, slot: int = 0) -> None:
        """Queue an event of the driver, which may concern the engine of a slot; returns at once."""
        self.add_events((event,), slot)

    def add_events(self, events: Sequence[RecordedEvent], slot: int = 0) -> None:
        """Queue events of this process; returns at once."""
        self._put(_Events("", slot, 0, events))

    def _put(self, item: _Rows | _Events) -> None:
        with self._lock:
            full = self._queued_bytes + item.size > MAX_QUEUE_BYTES
            if not full:
                self._queued_bytes += item.size
        if not full:
            self._queue.put(item)
        elif isinstance(item, _Rows):
            self.lose(item.info.engine, "the disk is too slow", rows=item.count)
            self._confirm(item.info.engine_id, item.info.seq)
        else:
            self.lose(item.slot, "the disk is too slow", events=len(item.events))
            self._confirm(item.engine_id, item.seq)

    def _run(self, recording: RecordingTarget) -> None:
        try:
            self._guard(use_system_memory)
            self._guard(recording.seal_leftovers)
            self._guard(lambda: self._sampler.begin(recording.database, self._config))
            ended = False
            while not ended:
                items, ended = self._take()
                self._store(recording, items)
                self._guard(recording.tick)
                self._guard(lambda: self._sampler.tick(recording.database))
            self._guard(lambda: self._sampler.end(recording.database))
        finally:
            self._guard(recording.close)

    def _guard(self, action: Callable[[], None]) -> None:
        """Do something that may fail at the disk without any loss of rows."""
        try:
            action()
        except (OSError, sqlite3.Error) as error:
            throttle(log, LOG_SECONDS).warning(
                "the recording cannot be written now; retrying", path=self.statistics.location, error=str(error)
            )
        except Exception:  # a bug must not stop the recording of later rows
            throttle(log, LOG_SECONDS).error(
                "the recorder failed; this is a bug in tidemill", path=self.statistics.location, exc_info=True
            )

    def _take(self) -> tuple[list[_Rows | _Events], bool]:
        """Return the queued items, waiting briefly for the first, and whether they were the last."""
        items: list[_Rows | _Events] = []
        size = 0
        ended = False
        try:
            item = self._queue.get(timeout=_TICK_SECONDS)
            while item is not None:
                items.append(item)
                size += item.size
                if len(items) >= _MAX_BATCHES or size >= _MAX_TAKEN_BYTES:
                    break
                item = self._queue.get_nowait()
            ended = item is None
        except queue.Empty:
            pass
        with self._lock:
            self._queued_bytes -= size
        return items, ended

    def _store(self, recording: RecordingTarget, items: Sequence[_Rows | _Events]) -> None:
        events: list[_Events] = []
        for item in items:
            if isinstance(item, _Rows):
                if self._known.is_new(item.info.engine_id, item.info.seq):
                    self._store_rows(recording, item)
                self._confirm(item.info.engine_id, item.info.seq)
                self._guard(recording.seal_full)
            elif not item.engine_id or self._known.is_new(item.engine_id, item.seq):
                events.append(item)
        if events and self._settings.store_events:
            self._add_events(recording, events)
        # Lost events are confirmed, too: the engine must not send them again.
        for item in items:
            if isinstance(item, _Events):
                self._confirm(item.engine_id, item.seq)

    def _store_rows(self, recording: RecordingTarget, item: _Rows) -> None:
        """Store one batch. Batches are decoded one at a time, and full segments are sealed before the next."""
        info, table = item.info, item.info.table
        try:
            batch = decode_rows(table, item.body)
        except Exception as error:
            self.lose(info.engine, f"a batch of engine {info.engine} cannot be read: {error}", rows=item.count)
            return
        if not len(batch):
            return
        try:
            recording.append(table, [(info, item.body, batch)])
            self.statistics.rows += len(batch)
            self._note_stored()
        except Exception as error:
            self.lose(info.engine, str(error), rows=len(batch))

    def _add_events(self, recording: RecordingTarget, items: Sequence[_Events]) -> None:
        events = [event for item in items for event in item.events]
        try:
            recording.add_events(events)
            self.statistics.events += len(events)
        except Exception as error:
            for item in items:
                self.lose(item.slot, str(error), events=len(item.events))

    def lose(self, slot: int, why: str, *, rows: int = 0, events: int = 0) -> None:
        """Count rows or events as lost, and log the loss; callable from any thread.

        Args:
            slot: The slot of the engine that sent them.
            why: The reason.
            rows: The number of rows.
            events: The number of events.
        """
        counts = self.statistics
        with self._lock:
            counts.lost_rows += rows
            counts.lost_events += events
            counts.lost_by_slot = counts.lost_by_slot | {slot: counts.lost_by_slot.get(slot, 0) + rows + events}
            counts.problem = why
            self._is_losing = True
        now = time.monotonic()
        if now >= self._log_lost_at:
            self._log_lost_at = now + LOG_SECONDS
            self._log_lost("recorded rows are lost")

    def _note_stored(self) -> None:
        """Log that recording works again, with the losses until now."""
        if not self._is_losing:
            return
        self._is_losing = False
        now = time.monotonic()
        if self.statistics.lost > self._said_lost and now >= self._log_recovery_at:
            self._log_recovery_at = now + LOG_SECONDS
            self._log_lost("rows are recorded again; earlier ones were lost")

    def _log_lost(self, text: str) -> None:
        counts = self.statistics
        self._said_lost = counts.lost
        log.error(text, path=counts.location, error=counts.problem, rows=counts.lost_rows, events=counts.lost_events)

    def _confirm(self, engine_id: str, seq: int) -> None:
        if not engine_id:
            return
        try:
            self._stored(engine_id, seq)
        except Exception:  # an engine that has exited needs no answer
            throttle(log, LOG_SECONDS).error("cannot confirm a recorded batch to its engine", exc_info=True)
