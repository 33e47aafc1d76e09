"""The driver's recording of a bounded run: the run itself, its counts, and its failures.

Invariants: recording never fails the run, and never delays it by more than `OPEN_SECONDS` at its start and the writer's
`END_SECONDS` at its end; engines never wait for the disk, because their records are confirmed on receipt. If recording
is off, the recorder is not imported.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tidemill.config.redaction import redact, redact_text
from tidemill.config.settings import Settings
from tidemill.core.errors import describe_error
from tidemill.runtime.link.frames import HelloFrame
from tidemill.runtime.link.progress import EngineProgress
from tidemill.runtime.link.server import LinkEvents, LinkServer
from tidemill.spark.bounded.plan import BackfillPlan

if TYPE_CHECKING:
    from tidemill.recorder.format.events import EventKind
    from tidemill.recorder.writing.writer import RecordWriter
    from tidemill.spark.live.run_recorder import RunRecorder

log = structlog.get_logger(__name__)

#: How long to wait for the folder of recordings before running without one.
OPEN_SECONDS = 5.0
#: The writer itself reports a slow disk; this is added to its time.
_GRACE_SECONDS = 0.5

Facts = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The run as it is recorded, apart from its engines.

    Attributes:
        about: A description of the run.
        facts: Further facts, such as its positions, ranges and the folder of its outcomes.
        progress: Returns the sums over all engines; called on any thread.
        describe_end: Returns how the run ended, if it did not fail.
    """

    about: str
    facts: Facts
    progress: Callable[[], EngineProgress]
    describe_end: Callable[[], str]


def describe_backfill(
    plan: BackfillPlan,
    sizes: Sequence[int],
    outcomes: Path,
    progress: Callable[[], EngineProgress],
    describe_end: Callable[[], str],
) -> RecordedRun:
    """Return the recorded description of a backfill.

    Args:
        plan: The plan.
        sizes: The number of messages in each remaining range.
        outcomes: The folder of the outcomes.
        progress: See `RecordedRun`.
        describe_end: See `RecordedRun`.
    """
    facts: dict[str, str | int | float] = {"topic": plan.topic, "from": plan.start, "to": plan.end}
    facts |= {"outcomes": str(outcomes), "ranges": len(sizes), "offsets": sum(sizes)}
    about = f"backfill of {plan.topic} from {plan.start} to {plan.end}"
    return RecordedRun(about, facts, progress, describe_end)


class BoundedRecorder:
    """Stores the records of a bounded run's engines; see `RecordSink`.

    If an engine is lost, its part runs again, with the same failures, so unstored records of the lost engine are no
    loss.

    Args:
        recorder: The recorder of the run.
    """

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder
        self._server: LinkServer | None = None

    def open_link(self, events: LinkEvents, *, bind_host: str) -> LinkServer:
        """Return a link that records what engines send, and when they start and end."""
        from tidemill.spark.live.run_recorder import WatchedLink

        self._server = LinkServer(WatchedLink(events, self), bind_host=bind_host, records=self)
        return self._server

    def put_rows(self, engine_id: str, slot: int, seq: int, table: str, body: bytes, count: int) -> None:
        """Store rows of an engine."""
        self._recorder.put_rows(engine_id, slot, seq, table, body, count)
        self._confirm(engine_id, seq)

    def put_events(self, engine_id: str, slot: int, seq: int, body: bytes, count: int) -> None:
        """Store events of an engine."""
        self._recorder.put_events(engine_id, slot, seq, body, count)
        self._confirm(engine_id, seq)

    def _confirm(self, engine_id: str, seq: int) -> None:
        if self._server is not None:
            self._server.confirm(engine_id, seq)

    def tell(self, kind: EventKind, hello: HelloFrame, text: str = "", *, is_failure: bool = True) -> None:
        """Record an event of an engine; the slot is the number of its part."""
        self._recorder.tell(kind, hello, text, is_failure=is_failure)

    def lose_engine(self, hello: HelloFrame, last: EngineProgress) -> None:
        """Record that an engine was lost."""
        from tidemill.recorder.format.events import EventKind

        self._recorder.tell(EventKind.ENGINE_LOST, hello)


@contextlib.contextmanager
def record_bounded_run(settings: Settings, worker: str, run: RecordedRun) -> Iterator[BoundedRecorder | None]:
    """Record a run during the block; yield the sink for the link's rows and events, or None if nothing is recorded.

    Without a folder nothing is recorded, because the memory of a bounded run is gone when its process ends.

    Args:
        settings: The settings of the run.
        worker: The worker name of its engines.
        run: The description of the run.
    """
    if not settings.debug.enabled or not settings.debug.db_dir:
        yield None
        return
    keeper = _Keeper(settings, worker, run)
    recorder = keeper.open()
    problem = ""
    try:
        yield recorder
    except BaseException as error:
        problem = describe_error(error) if isinstance(error, Exception) else type(error).__name__
        raise
    finally:
        keeper.close(problem)


class _Keeper:
    """Holds a recording open on a thread of its own, so that a slow disk delays nothing else."""

    def __init__(self, settings: Settings, worker: str, run: RecordedRun) -> None:
        self._settings = settings
        self._worker = worker
        self._run = run
        self._opened: queue.SimpleQueue[BoundedRecorder | None] = queue.SimpleQueue()
        self._problem: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_open = False
        self._thread = threading.Thread(target=self._keep, name="tidemill-run-recorder", daemon=True)

    def open(self) -> BoundedRecorder | None:
        """Return the recorder; log a warning and return None if there is none."""
        self._thread.start()
        try:
            recorder = self._opened.get(timeout=OPEN_SECONDS)
        except queue.Empty:
            log.warning(
                "the run is not recorded: the folder of recordings does not respond; check debug.db_dir",
                path=self._settings.debug.db_dir,
                waited_seconds=OPEN_SECONDS,
            )
            return None
        self._is_open = recorder is not None
        return recorder

    def close(self, problem: str) -> None:
        """Record the end of the run.

        Args:
            problem: The error of the run; '' if it did not fail.
        """
        from tidemill.recorder.writing import writer

        self._problem.put(problem)
        if self._is_open:
            self._thread.join(writer.END_SECONDS + _GRACE_SECONDS)

    def _keep(self) -> None:
        try:
            self._record()
        except Exception as error:  # whatever fails here, the run continues
            log.warning(
                "the run is not recorded",
                path=self._settings.debug.db_dir,
                error=describe_error(error),
                advice="set debug.db_dir to a folder that this user can write to, or debug.enabled to false",
            )
            self._opened.put(None)

    def _record(self) -> None:
        from tidemill.recorder.format.events import EventKind
        from tidemill.recorder.writing.writer import RecordWriter
        from tidemill.recorder.writing.writer_start import start_writing
        from tidemill.spark.live.run_recorder import RunRecorder

        settings, run, recorder = self._settings, self._run, RunRecorder()
        writer = recorder.writer = RecordWriter(
            settings.debug,
            settings.kafka.consumer_group,
            self._worker,
            read_progress=run.progress,
            config=redact(settings.model_dump(mode="json")),
            bounded=True,
        )
        with start_writing(writer) as can_write:
            if can_write:
                _tell(writer, EventKind.RUN_STARTED, run.about, run.facts)
            self._opened.put(BoundedRecorder(recorder) if can_write else None)
            problem = self._problem.get()
            if can_write:
                text = f"failed: {problem}" if problem else run.describe_end()
                _tell(writer, EventKind.RUN_ENDED, text, _count(run.progress()), is_failure=bool(problem))


def _count(done: EngineProgress) -> Facts:
    counts = ("consumed", "messages_done", "tasks_done", "tasks_failed", "dead_lettered", "skipped", "gap")
    return {name: getattr(done, name) for name in counts}


def _tell(writer: RecordWriter, kind: EventKind, text: str, facts: Facts, *, is_failure: bool = False) -> None:
    from tidemill.recorder.format.events import RecordedEvent
    from tidemill.recorder.format.recordable_text import classify_error, clean_error

    error_class = classify_error(text) if is_failure else ""
    data = {name: redact_text(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
    at = time.time_ns() // 1000
    writer.add_event(RecordedEvent(at, kind, text=clean_error(text), error_class=error_class, data=data))


def watch_end(wait: Callable[[], object], close: Callable[[], object]) -> None:
    """Call `close` on a thread of its own once `wait` has returned."""

    def watch() -> None:
        with contextlib.suppress(Exception):
            wait()
        close()

    threading.Thread(target=watch, name="tidemill-run-end", daemon=True).start()
