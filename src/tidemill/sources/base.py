"""The interfaces between the engine and its source.

A source only moves bytes: it fetches into a bounded buffer per partition, returns messages that are pulled, and carries
out commits. It makes no decisions about offsets. All methods of `SourceEvents` are called on the engine's loop.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tidemill.core.delivery.transaction import RecordVerdict
from tidemill.runtime.kafka.source_message import SourceMessage

TopicPartition = tuple[str, int]

#: How many partitions a log line names.
MAX_NAMES = 20


def name_partition(partition: TopicPartition) -> str:
    """Return a partition as one text.

    Example:
        >>> name_partition(("orders", 3))
        'orders/3'
    """
    return f"{partition[0]}/{partition[1]}"


def name_partitions(partitions: Sequence[TopicPartition], most: int = MAX_NAMES) -> list[str]:
    """Return names for a log line, limited so that the line does not grow with the topic."""
    names = [name_partition(partition) for partition in partitions[:most]]
    if len(partitions) > most:
        names.append(f"and {len(partitions) - most} more")
    return names


class Outgoing(msgspec.Struct, eq=False):
    """A record that is sent in one transaction with the offsets of its messages.

    The loop writes `isolated`. The source's thread writes `error`, `oversize` and `verdict` before it reports the
    result of the commit.

    Attributes:
        topic: The topic to send it to.
        key: Its key.
        value: Its value; None for a tombstone.
        owner: The sink or dead letters that staged it; opaque to a source.
        ref: The owner's own reference to it; opaque to a source.
        isolated: Whether it must not share a batch, so that a refusal concerns it alone.
        attempts: How often it was refused.
        error: Why the brokers refuse it, if the record itself is wrong.
        oversize: Whether it was refused for its size, or for the size of its batch.
        verdict: What happens to a refused record; decided over the whole transaction.
        headers: Its headers, in order.
        partition: The partition to send it to; -1: chosen by the key.
        timestamp: In milliseconds since the epoch; 0: the time of sending.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    owner: Any = None
    ref: Any = None
    isolated: bool = False
    attempts: int = 0
    error: str | None = None
    oversize: bool = False
    verdict: RecordVerdict | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    partition: int = -1
    timestamp: int = 0

    @property
    def size_bytes(self) -> int:
        """The size of key, value and headers together."""
        size = (len(self.key) if self.key else 0) + (len(self.value) if self.value else 0)
        return size + sum(len(name) + len(value or b"") for name, value in self.headers) if self.headers else size


Records = Mapping[TopicPartition, Sequence[Outgoing]]


class CommitStatus(enum.Enum):
    """The result of a commit."""

    DONE = "done"
    AGAIN = "again"
    FENCED = "fenced"


class Fatal(enum.Enum):
    """Why a source cannot continue."""

    FENCED = "fenced"
    FAILED = "failed"


class SourceStatistics(msgspec.Struct, frozen=True):
    """The lag of a source, and the messages that it missed.

    Attributes:
        gap: Messages that were deleted at the source before they were read.
        lag: The end of each partition minus its committed offset, if both are known; a new mapping after each update.
        errors: Errors that the client reported.
        recreated: How often a partition was read from its beginning because its topic had been recreated.
    """

    gap: int
    lag: Mapping[TopicPartition, int]
    errors: int = 0
    recreated: int = 0


class SourceEvents(Protocol):
    """The engine, from the view of its source."""

    def on_messages(self, partitions: Collection[TopicPartition]) -> None:
        """Handle new messages of these partitions."""

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Handle the assignment of partitions, in addition to those already owned."""

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Finish the work of these partitions; return the offsets to commit before they are given up."""

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Handle partitions that already belong to another member: deliver nothing more for them."""

    def on_committed(self, offsets: Mapping[TopicPartition, int], status: CommitStatus) -> None:
        """Handle the result of a commit."""

    def on_fatal(self, fatal: Fatal, text: str) -> None:
        """Handle the final failure of the source."""


class Source(Protocol):
    """The source of an engine's messages."""

    def start(self, events: SourceEvents) -> None:
        """Connect and subscribe."""

    def pull(self, partition: TopicPartition, limit: int) -> list[SourceMessage]:
        """Take up to `limit` messages of a partition from the buffer, in order."""

    def buffered(self, partition: TopicPartition) -> int:
        """Return how many messages of a partition are in the buffer."""

    def peek(self, partition: TopicPartition) -> SourceMessage | None:
        """Return the next message of a partition in the buffer without taking it; None: there is none."""

    def commit(self, offsets: Mapping[TopicPartition, int], records: Records | None = None) -> None:
        """Commit the offsets and send the records atomically; `on_committed` reports the result."""

    def stop_fetching(self) -> None:
        """Fetch nothing more and drop the buffers; commits still work."""

    def statistics(self) -> SourceStatistics:
        """Return the lag, and the counts of missed messages."""
        ...

    def describe_wait(self) -> str | None:
        """Return why no messages arrive, if the source knows."""

    def describe_refusal(self) -> str | None:
        """Return why the engine may not read at all, and what to change; None: it may, or the reason is unknown."""

    async def close(self, *, leave: bool, seconds: float = 30.0) -> None:
        """Disconnect within `seconds`; with `leave`, release the partitions instead of keeping them reserved."""


class NotedSource(Source, Protocol):
    """A source that stores a short text with each committed offset, for the next reader of the partition."""

    def note(self, partition: TopicPartition, text: str) -> None:
        """Store a text with all further committed offsets of a partition; '' stores none."""

    def noted(self, partition: TopicPartition) -> str:
        """Return the text stored with the committed offset when the partition was assigned; '' if there is none."""
