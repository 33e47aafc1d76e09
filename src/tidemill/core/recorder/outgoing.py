"""The recorded frames of an engine that its driver has not confirmed: which to send, to send again, and to drop.

Each addition becomes a numbered frame. It stays until the driver confirms that it is stored, or until there is no more
room for it. Invariants: frames leave in order; the number of unconfirmed bytes is limited, so that a slow writer is not
flooded; beyond the limits, the oldest frames that were never sent are dropped and their content is counted. A frame
that was sent may already be stored: it is sent again, never dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class OutgoingFrame:
    """A part of the recording.

    Attributes:
        seq: Its number; rises with every frame, from 1.
        table: The name of a table of rows, or `EVENTS`.
        body: The rows or events, encoded.
        count: The number of rows or events.
        was_sent: Whether it was sent, on this connection or an earlier one.
    """

    __slots__ = ("body", "count", "seq", "table", "was_sent")

    def __init__(self, seq: int, table: str, body: bytes, count: int) -> None:
        self.seq = seq
        self.table = table
        self.body = body
        self.count = count
        self.was_sent = False


#: The table of events; all others hold rows.
EVENTS = "events"


class OutgoingFrames:
    """The frames of one engine.

    Args:
        max_bytes: The maximum number of bytes that may wait.
        max_events: The maximum number of events that may wait.
        window_bytes: The number of unconfirmed bytes at which sending stops.

    Attributes:
        size_bytes: The number of bytes that wait.
        dropped: The number of rows and events that were dropped.
        dropped_rows: The number of rows that were dropped.

    Example:
        >>> frames = OutgoingFrames(100, 10, 100)
        >>> frames.add("messages", b"rows", 3)
        >>> frame = frames.take_next()
        >>> frame.seq, frame.body, frames.take_next()
        (1, b'rows', None)
        >>> frames.note_stored(1)
        >>> frames.is_empty
        True
    """

    def __init__(self, max_bytes: int, max_events: int, window_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_events = max_events
        self._window_bytes = window_bytes
        self._unsent: deque[OutgoingFrame] = deque()
        self._sent: dict[int, OutgoingFrame] = {}
        self._sent_bytes = 0
        self._events = 0
        self._seq = 0
        self.size_bytes = 0
        self.dropped = self.dropped_rows = 0

    @property
    def is_empty(self) -> bool:
        """Whether every frame is stored or was dropped."""
        return not self._unsent and not self._sent

    def add(self, table: str, body: bytes, count: int) -> None:
        """Add a frame; if there is no room, the oldest frames are dropped.

        Args:
            table: The name of a table of rows, or `EVENTS`.
            body: The rows or events, encoded.
            count: The number of rows or events.
        """
        self._seq += 1
        self._unsent.append(OutgoingFrame(self._seq, table, body, count))
        self.size_bytes += len(body)
        if table == EVENTS:
            self._events += count
        # Sent frames fit within the limits, so there is always an unsent one to drop: the new frame, if no other.
        while self.size_bytes > self._max_bytes:
            self._drop(self._unsent)
        while self._events > self._max_events:
            self._drop(frame for frame in self._unsent if frame.table == EVENTS)

    def take_next(self) -> OutgoingFrame | None:
        """Return the frame to send now, and mark it as sent; None if there is none, or the window is full."""
        if not self._unsent or self._sent_bytes >= self._window_bytes:
            return None
        frame = self._unsent.popleft()
        frame.was_sent = True
        self._sent[frame.seq] = frame
        self._sent_bytes += len(frame.body)
        return frame

    def note_stored(self, seq: int) -> None:
        """Forget a frame that the driver has stored; an unknown number changes nothing."""
        frame = self._sent.pop(seq, None)
        if frame is not None:
            self._sent_bytes -= len(frame.body)
        else:  # sent before the connection was lost, and waiting to be sent again
            frame = next((each for each in self._unsent if each.seq == seq and each.was_sent), None)
            if frame is None:
                return
            self._unsent.remove(frame)
        self._forget(frame)

    def note_disconnected(self) -> None:
        """Queue unconfirmed frames again, before the others, because the connection was lost."""
        self._unsent.extendleft(reversed(self._sent.values()))
        self._sent.clear()
        self._sent_bytes = 0

    def lose(self, count: int) -> None:
        """Count rows that cannot become a frame as dropped."""
        self.dropped += count
        self.dropped_rows += count

    def give_up(self) -> None:
        """Drop all remaining frames."""
        for frame in (*self._sent.values(), *self._unsent):
            self._give_up(frame)
        self._sent.clear()
        self._unsent.clear()
        self._sent_bytes = 0

    def _drop(self, frames: Iterable[OutgoingFrame]) -> None:
        """Drop the first of these frames that was never sent."""
        frame = next(each for each in frames if not each.was_sent)
        self._unsent.remove(frame)
        self._give_up(frame)

    def _give_up(self, frame: OutgoingFrame) -> None:
        self.dropped += frame.count
        if frame.table != EVENTS:
            self.dropped_rows += frame.count
        self._forget(frame)

    def _forget(self, frame: OutgoingFrame) -> None:
        self.size_bytes -= len(frame.body)
        if frame.table == EVENTS:
            self._events -= frame.count
