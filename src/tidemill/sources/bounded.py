"""A source that ends: a thread reads from a reader into buffers, from which the engine pulls.

Invariants: only the thread touches the reader, and it reads no further than the bounded buffers. A partition is
assigned when its first message arrives, and none is ever revoked. Commits only store the engine's progress, because
there is no group. `on_end` is called once, on the loop, when everything is read and buffered, unless `stop_fetching`
was called before.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import structlog

from tidemill.core.errors import InvariantError, describe_error
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sources.base import CommitStatus, Fatal, Records, SourceEvents, SourceStatistics, TopicPartition

log = structlog.get_logger(__name__)

#: The thread pauses while this many messages (or `max_bytes`) are buffered; it continues at a quarter of that.
BUFFER_MESSAGES = 4_000
#: How long the thread may take to end; a thread that waits for another process cannot be woken.
CLOSE_SECONDS = 10.0


class RecordReader(Protocol):
    """Reads messages for a bounded source, on its thread; only `gap` and `describe_wait` are read on the loop."""

    def open(self) -> None:
        """Connect."""

    def read(self) -> Sequence[SourceMessage] | None:
        """Return the next messages, possibly none at the moment; None at the end."""

    def close(self) -> None:
        """Disconnect."""

    @property
    def gap(self) -> int:
        """The number of messages that were deleted before they were read."""

    def describe_wait(self) -> str | None:
        """Return why no messages arrive, if the reader knows."""


class BoundedSource:
    """A `Source` over one reader.

    Args:
        reader: Reads the messages.
        max_bytes: The limit of the buffers together.
    """

    def __init__(self, reader: RecordReader, max_bytes: int) -> None:
        self._reader = reader
        self._max_bytes = max_bytes
        self._buffers: dict[TopicPartition, deque[SourceMessage]] = {}
        self._room = threading.Event()
        # Each counter has one writer: the thread or the loop.
        self._fetched = self._fetched_bytes = 0
        self._taken_bytes = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="tidemill-reader", daemon=True)
        self._closed = threading.Event()
        #: How many messages the engine has taken.
        self.taken = 0
        #: Whether everything was read.
        self.ended = False
        #: Called on the loop when `ended` is set.
        self.on_end: Callable[[], None] = _do_nothing
        #: The next offset of each partition that the engine has committed.
        self.committed: dict[TopicPartition, int] = {}

    # -- called by the engine, on the loop ---------------------------------------------------------------------

    def start(self, events: SourceEvents) -> None:
        """Start the thread, which opens the reader."""
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def pull(self, partition: TopicPartition, limit: int) -> list[SourceMessage]:
        """Take messages from the partition's buffer."""
        buffer = self._buffers.get(partition)
        if not buffer or self._stop:
            return []
        taken = [buffer.popleft() for _ in range(min(limit, len(buffer)))]
        self.taken += len(taken)
        self._taken_bytes += sum(message.size_bytes for message in taken)
        if not self._room.is_set() and self._has_room(0.25):
            self._room.set()
        return taken

    def buffered(self, partition: TopicPartition) -> int:
        """Return how many messages of the partition can be pulled."""
        return 0 if self._stop else len(self._buffers.get(partition, ()))

    def peek(self, partition: TopicPartition) -> SourceMessage | None:
        """Return the next message of the partition that can be pulled."""
        buffer = self._buffers.get(partition)
        return buffer[0] if buffer and not self._stop else None

    @property
    def is_empty(self) -> bool:
        """Whether everything was read and taken."""
        return self.ended and self.taken == self._fetched

    def commit(self, offsets: Mapping[TopicPartition, int], records: Records | None = None) -> None:
        """Store the engine's progress; records cannot be sent, because there are no transactions."""
        if records:
            raise InvariantError("a bounded run has no transactions")
        self.committed.update(offsets)
        self._loop.call_soon(self._events.on_committed, dict(offsets), CommitStatus.DONE)

    def stop_fetching(self) -> None:
        """Stop the thread, and return no more messages."""
        self._stop = True
        self._room.set()

    def statistics(self) -> SourceStatistics:
        """Return the gap; the driver of a bounded run tracks the remaining messages, so there is no lag here."""
        return SourceStatistics(self._reader.gap, {})

    def describe_wait(self) -> str | None:
        """Return why no messages arrive."""
        return self._reader.describe_wait()

    def describe_refusal(self) -> str | None:
        """Return None: the source is in no group."""
        return None

    async def close(self, *, leave: bool, seconds: float = CLOSE_SECONDS) -> None:
        """Stop the thread."""
        self.stop_fetching()
        if self._thread.is_alive() and not await asyncio.to_thread(self._closed.wait, seconds):
            log.warning("the reader did not stop in time; it stops when this process exits")

    def _has_room(self, share: float) -> bool:
        waiting = self._fetched - self.taken
        waiting_bytes = self._fetched_bytes - self._taken_bytes
        return waiting < BUFFER_MESSAGES * share and waiting_bytes < self._max_bytes * share

    def _arrived(self, messages: Sequence[SourceMessage]) -> None:
        new: list[TopicPartition] = []
        arrived: set[TopicPartition] = set()
        for message in messages:
            partition = (message.topic, message.partition)
            buffer = self._buffers.get(partition)
            if buffer is None:
                self._buffers[partition] = buffer = deque()
                new.append(partition)
            buffer.append(message)
            arrived.add(partition)
        if new:
            self._events.on_assigned(new)
        self._events.on_messages(arrived)

    def _read_out(self) -> None:
        self.ended = True
        self.on_end()

    # -- the thread -------------------------------------------------------------------------------------------

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self._stop = True  # the loop is closed

    def _run(self) -> None:
        try:
            self._reader.open()
            self._read()
        except Exception as error:
            log.exception("the reader failed")
            self._tell(self._events.on_fatal, Fatal.FAILED, f"the messages cannot be read: {describe_error(error)}")
        finally:
            self._reader.close()
            self._closed.set()

    def _read(self) -> None:
        while not self._stop:
            messages = self._reader.read()
            if messages is None:
                self._tell(self._read_out)
                return
            if messages:
                self._fetched += len(messages)
                self._fetched_bytes += sum(message.size_bytes for message in messages)
                self._tell(self._arrived, messages)
                self._wait_for_room()

    def _wait_for_room(self) -> None:
        while not self._has_room(1.0) and not self._stop:
            self._room.clear()
            if not self._has_room(0.25):
                self._room.wait(1.0)


def _do_nothing() -> None:
    pass
