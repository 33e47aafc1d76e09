"""The records of engines on the link: the engine's sender, and the interface of their store.

Invariants: a frame is sent only while little else waits, so that no heartbeat is late. Frames that the driver did not
confirm are sent again after a reconnect, under the same number. Nothing here waits for the other side except `finish`,
which has a time limit.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from tidemill.core.recorder.outgoing import EVENTS, OutgoingFrames
from tidemill.runtime.link.frames import EventsFrame, RowsFrame, send_frame
from tidemill.runtime.loop.deadline import Deadline

#: No frame is sent while more than this waits in the connection's buffer, because a heartbeat would wait behind it.
MAX_WAITING_BYTES = 64 * 1024
#: How often an ending engine checks whether a lost connection is back.
_LOOK_SECONDS = 0.05


class RecordSink(Protocol):
    """Stores the records of engines; called on the link's loop.

    Each call returns at once and never raises. `LinkServer.confirm` is called for each frame once it is processed. A
    frame that arrives twice has the same engine and number.
    """

    def put_rows(self, engine_id: str, slot: int, seq: int, table: str, body: bytes, count: int) -> None:
        """Accept `count` rows of a table."""

    def put_events(self, engine_id: str, slot: int, seq: int, body: bytes, count: int) -> None:
        """Accept `count` events."""


class RecordSender:
    """Sends the frames of one engine; use it on one loop only.

    Args:
        frames: The frames.
    """

    def __init__(self, frames: OutgoingFrames) -> None:
        self._frames = frames
        self._writer: asyncio.StreamWriter | None = None
        self._stored = asyncio.Event()

    def reconnect(self, writer: asyncio.StreamWriter | None) -> None:
        """Continue on a new connection; frames that were not confirmed on the previous one are sent first."""
        self._frames.note_disconnected()
        self._writer = writer

    def send(self) -> None:
        """Send the frames that may be sent now."""
        writer = self._writer
        if writer is None:
            return
        while not writer.is_closing() and writer.transport.get_write_buffer_size() < MAX_WAITING_BYTES:
            frame = self._frames.take_next()
            if frame is None:
                return
            if frame.table == EVENTS:
                send_frame(writer, EventsFrame(frame.seq, frame.body, frame.count))
            else:
                send_frame(writer, RowsFrame(frame.seq, frame.table, frame.body, frame.count))

    def note_stored(self, seq: int) -> None:
        """Process a confirmation."""
        self._frames.note_stored(seq)
        self._stored.set()
        self.send()

    async def finish(self, seconds: float) -> int:
        """Send the remaining frames, and wait up to `seconds` for their confirmation.

        Returns:
            How many rows and events were lost since the engine started.
        """
        deadline = Deadline(seconds)
        while not self._frames.is_empty and deadline.left_seconds > 0:
            self.send()
            self._stored.clear()
            try:
                async with deadline.limit(_LOOK_SECONDS):
                    await self._stored.wait()
            except TimeoutError:
                pass
        self._frames.give_up()
        return self._frames.dropped
