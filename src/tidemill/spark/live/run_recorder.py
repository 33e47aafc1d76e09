"""Passes events of the link to the recording of a run: the records of engines, and their starts and ends.

Invariants: nothing here blocks the link or raises into it; records that cannot be decoded are confirmed, so that no
engine sends them again, and are counted and logged as lost.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

import msgspec
import structlog

from tidemill.core.supervision.pauses import Pause
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.recordable_text import classify_error, clean_error
from tidemill.recorder.format.schema import RowTable
from tidemill.runtime.link.engine import RECONNECT_SECONDS
from tidemill.runtime.link.frames import HelloFrame
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, StopReason
from tidemill.runtime.link.server import LinkEvents, LinkServer
from tidemill.runtime.log.setup import throttle
from tidemill.spark.progress import EngineStatus, PipelineProgress

if TYPE_CHECKING:
    from tidemill.recorder.writing.writer import RecordWriter

log = structlog.get_logger(__name__)

#: An engine whose link is closed counts as lost if it has not reconnected after this time.
LOST_SECONDS = RECONNECT_SECONDS + 1.0
_LOG_SECONDS = 60.0
_decode_events = msgspec.msgpack.Decoder(list[RecordedEvent]).decode


class EngineWitness(Protocol):
    """Receives the starts and ends of engines."""

    def tell(self, kind: EventKind, hello: HelloFrame, text: str = "", *, is_failure: bool = True) -> None:
        """Record an event of an engine."""

    def lose_engine(self, hello: HelloFrame, last: EngineProgress) -> None:
        """Record that an engine was lost, with the progress from its last beat."""


class RunRecorder:
    """Stores the records of engines; see `RecordSink`.

    Attributes:
        writer: The writer of the recording; set before a link is opened.
        server: Confirms stored records to engines; None while there is no link.
    """

    writer: RecordWriter

    def __init__(self) -> None:
        self.server: LinkServer | None = None
        self._watched: WatchedLink | None = None
        #: For each engine, the number of received rows and the number of its last frame.
        self._received: dict[str, tuple[int, int]] = {}

    def confirm(self, engine_id: str, seq: int) -> None:
        """Confirm to an engine that a frame is stored; callable from any thread."""
        if self.server is not None:
            self.server.confirm(engine_id, seq)

    def put_rows(self, engine_id: str, slot: int, seq: int, table: str, body: bytes, count: int) -> None:
        """Store rows of an engine."""
        rows, last = self._received.get(engine_id, (0, 0))
        if seq > last:  # otherwise it is a duplicate after a reconnect
            self._received[engine_id] = rows + count, seq
        try:
            known = RowTable(table)
        except ValueError as error:
            self._refuse(engine_id, slot, seq, error, rows=count)
        else:
            self.writer.put_rows(engine_id, slot, seq, known, body, count)

    def put_events(self, engine_id: str, slot: int, seq: int, body: bytes, count: int) -> None:
        """Store events of an engine."""
        try:
            events = _decode_events(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._refuse(engine_id, slot, seq, error, events=count)
        else:
            self.writer.put_events(engine_id, slot, seq, events)

    def _refuse(self, engine_id: str, slot: int, seq: int, error: Exception, *, rows: int = 0, events: int = 0) -> None:
        throttle(log, _LOG_SECONDS).error("cannot read the records of an engine", slot=slot, error=str(error))
        self.writer.lose(slot, f"cannot read the records of engine {slot}: {error}", rows=rows, events=events)
        self.confirm(engine_id, seq)

    def count_losses(self, progress: PipelineProgress) -> PipelineProgress:
        """Return the progress of a run, with records lost here counted as dropped by their engines."""
        lost = self.writer.statistics.lost_by_slot
        if lost:
            progress.engines = [_count_lost(engine, lost.get(engine.slot, 0)) for engine in progress.engines]
            progress.recorder_dropped += sum(lost.values())
        return progress

    def tell(self, kind: EventKind, hello: HelloFrame, text: str = "", *, is_failure: bool = True) -> None:
        """Record an event of an engine; failures are grouped by their class."""
        data: dict[str, str | int | float] = {
            "slot": hello.slot,
            "pid": hello.pid,
            "host": hello.host,
            "engine_id": hello.engine_id,
        }
        # after a clean end: the engine itself has counted the records that it could not send
        if kind is EventKind.ENGINE_ENDED:
            self._received.pop(hello.engine_id, None)
        error_class = classify_error(text) if text and is_failure else ""
        event = RecordedEvent(time.time_ns() // 1000, kind, text=clean_error(text), error_class=error_class, data=data)
        self.writer.add_event(event, hello.slot)

    def lose_engine(self, hello: HelloFrame, last: EngineProgress) -> None:
        """Record that an engine was lost, and count the rows that it had not sent.

        Rows recorded after its last beat, within the last quarter of a second, remain uncounted.

        Args:
            hello: The engine.
            last: The progress from its last beat.
        """
        self.tell(EventKind.ENGINE_LOST, hello)
        received, seq = self._received.get(hello.engine_id, (0, 0))
        missing = last.recorder_rows - received
        if missing > 0:
            self._received[hello.engine_id] = received + missing, seq  # in case it reconnects after all
            self.writer.lose(hello.slot, f"engine {hello.slot} ended before it had sent its records", rows=missing)

    def note_action(self, action: str, by: str) -> None:
        """Record an action of a user."""
        self.writer.add_event(RecordedEvent(time.time_ns() // 1000, EventKind.ACTION, text=action, data={"by": by}))

    def note_pause(self, topic: str, pause: Pause, begun: bool) -> None:
        """Record that a pause has begun or ended; called on the link's loop."""
        kind = EventKind.RESUMED
        data: dict[str, str | int | float] = {"by": pause.by}
        text = "all partitions" if pause.partition is None else ""
        if begun:
            kind = EventKind.PAUSED
            data |= {"seconds": round(pause.until - asyncio.get_running_loop().time(), 1)}
        at, where = time.time_ns() // 1000, None if pause.partition is None else topic
        event = RecordedEvent(at, kind, where, pause.partition, text=f"{text} on request".lstrip(), data=data)
        self.writer.add_event(event)

    def open_link(self, events: LinkEvents, *, bind_host: str) -> LinkServer:
        """Return a link that records what engines send, and when they start and end."""
        self._watched = WatchedLink(events, self)
        self.server = LinkServer(self._watched, bind_host=bind_host, records=self)
        return self.server

    def note_link_closed(self) -> None:
        """Record that the link is closed, so no engine can reconnect."""
        if self._watched is not None:
            self._watched.lose_missed()


def _count_lost(engine: EngineStatus, lost: int) -> EngineStatus:
    if not lost:
        return engine
    past = engine.past or EngineProgress()
    past = msgspec.structs.replace(past, recorder_dropped=past.recorder_dropped + lost)
    return msgspec.structs.replace(engine, past=past)


class WatchedLink:
    """Forwards the events of a link and reports starts and ends of engines.

    An engine counts as started with its first beat, because a refused engine never sends one.

    Args:
        events: The receiver of the events.
        witness: Receives the starts and ends of engines.
    """

    def __init__(self, events: LinkEvents, witness: EngineWitness) -> None:
        self._events = events
        self._witness = witness
        self._new: dict[int, HelloFrame] = {}
        self._engines: dict[int, HelloFrame] = {}
        #: Engines whose link is closed, with the timer after which they count as lost.
        self._missed: dict[str, tuple[asyncio.TimerHandle, HelloFrame, EngineProgress]] = {}
        self._last: dict[int, EngineProgress] = {}

    def on_hello(self, link: int, hello: HelloFrame) -> None:
        """Store the engine's identity until its first beat."""
        self._new[link] = hello
        self._events.on_hello(link, hello)

    def on_beat(self, link: int, progress: EngineProgress) -> None:
        """Report a start at the first beat, and store the progress."""
        if self._new and (hello := self._new.pop(link, None)) is not None:
            self._engines[link] = hello
            missed = self._missed.pop(hello.engine_id, None)
            if missed is not None:
                missed[0].cancel()
            elif not hello.run_token:
                self._witness.tell(EventKind.ENGINE_STARTED, hello)
        self._last[link] = progress
        self._events.on_beat(link, progress)

    def on_ready(self, link: int) -> None:
        """Forward the event."""
        self._events.on_ready(link)

    def on_ended(self, link: int, summary: EngineSummary) -> None:
        """Report the end of the engine."""
        hello = self._engines.pop(link, None) or self._new.pop(link, None)
        if hello is not None:
            missed = self._missed.pop(hello.engine_id, None)
            if missed is not None:
                missed[0].cancel()
            text = summary.reason.value if summary.error is None else f"{summary.reason.value}: {summary.error}"
            is_failure = summary.reason is not StopReason.DRAINED
            self._witness.tell(EventKind.ENGINE_ENDED, hello, text, is_failure=is_failure)
        self._events.on_ended(link, summary)

    def on_closed(self, link: int) -> None:
        """Wait for the engine to reconnect."""
        self._new.pop(link, None)
        hello, last = self._engines.pop(link, None), self._last.pop(link, None)
        if hello is not None and last is not None:
            timer = asyncio.get_running_loop().call_later(LOST_SECONDS, self._lose, hello, last)
            self._missed[hello.engine_id] = timer, hello, last
        self._events.on_closed(link)

    def lose_missed(self) -> None:
        """Report all engines as lost that neither ended cleanly nor reconnected; call this when the link is closed."""
        for timer, hello, last in list(self._missed.values()):
            timer.cancel()
            self._lose(hello, last)
        for link, hello in list(self._engines.items()):
            del self._engines[link]
            self._lose(hello, self._last.pop(link))

    def _lose(self, hello: HelloFrame, last: EngineProgress) -> None:
        self._missed.pop(hello.engine_id, None)
        self._witness.lose_engine(hello, last)
