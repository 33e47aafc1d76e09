"""What the engine needs of a source, and what a source tells the engine.

A source only moves bytes: it fetches into a bounded buffer per partition, hands over what is pulled, and carries out
commits. It decides nothing about offsets. All methods of `SourceEvents` are called on the engine's loop.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tidemill.core.delivery.transaction import RecordVerdict
from tidemill.runtime.messages import SourceMessage

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
    """Return names for a log line, which must not grow with the topic."""
    names = [name_partition(partition) for partition in partitions[:most]]
    if len(partitions) > most:
        names.append(f"and {len(partitions) - most} more")
    return names


class Outgoing(msgspec.Struct, eq=False):
    """A record that goes out in one transaction with the offsets of its messages.

    The loop writes `isolated`, the source's thread the three fields about its failure, before it reports how the commit
    ended.

    Attributes:
        topic: Where to.
        key: Its key.
        value: Its value, None for a tombstone.
        owner: What it came from; opaque to a source.
        ref: What its owner knows it by; opaque to a source.
        isolated: It must not share a batch, so that a refusal concerns it alone.
        attempts: How often it was refused.
        error: Why the brokers refuse it, if the record itself is wrong.
        oversize: Whether that is its size, or the size of its batch.
        verdict: What becomes of it then, decided over all of its transaction.
        headers: In order.
        partition: -1: the one that the key chooses.
        timestamp: In milliseconds since the epoch; 0: when it is sent.
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
        """The bytes of key, value and headers together."""
        size = (len(self.key) if self.key else 0) + (len(self.value) if self.value else 0)
        return size + sum(len(name) + len(value or b"") for name, value in self.headers) if self.headers else size


Records = Mapping[TopicPartition, Sequence[Outgoing]]


class CommitStatus(enum.Enum):
    """How a commit ended."""

    DONE = "done"
    AGAIN = "again"
    FENCED = "fenced"


class Fatal(enum.Enum):
    """Why a source cannot continue."""

    FENCED = "fenced"
    FAILED = "failed"


class SourceStatistics(msgspec.Struct, frozen=True):
    """How far a source is behind, and what it missed.

    Attributes:
        gap: Messages that were deleted at the source before they were read.
        lag: The end of each partition minus what is committed of it, where that is known; another mapping whenever
            the source has looked again.
        errors: Errors that the client reported.
        recreated: How often a partition was read from its beginning because its topic had been created again.
    """

    gap: int
    lag: Mapping[TopicPartition, int]
    errors: int = 0
    recreated: int = 0


class SourceEvents(Protocol):
    """The engine, as a source sees it."""

    def on_messages(self, partitions: Collection[TopicPartition]) -> None:
        """These partitions have new messages to pull."""

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """These partitions are assigned, in addition to those already owned."""

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Finish the work of these partitions; return the offsets to commit before they are given up."""

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """These partitions belong to another member already: deliver nothing more for them."""

    def on_committed(self, offsets: Mapping[TopicPartition, int], status: CommitStatus) -> None:
        """A commit ended."""

    def on_fatal(self, fatal: Fatal, text: str) -> None:
        """The source has failed for good."""


class Source(Protocol):
    """Where messages come from."""

    def start(self, events: SourceEvents) -> None:
        """Connect and subscribe."""

    def pull(self, partition: TopicPartition, limit: int) -> list[SourceMessage]:
        """Take up to `limit` messages of a partition out of the buffer, in order."""

    def buffered(self, partition: TopicPartition) -> int:
        """How many messages of a partition wait in the buffer."""

    def peek(self, partition: TopicPartition) -> SourceMessage | None:
        """Return the next message of a partition in the buffer, without taking it; None: there is none."""

    def commit(self, offsets: Mapping[TopicPartition, int], records: Records | None = None) -> None:
        """Commit, with these records or not at all; `on_committed` reports the result."""

    def stop_fetching(self) -> None:
        """Fetch nothing more and forget what is buffered; commits still work."""

    def statistics(self) -> SourceStatistics:
        """Return how far it is behind, and what it missed."""
        ...

    def describe_stall(self) -> str | None:
        """Why no messages arrive, if the source knows."""

    def describe_refusal(self) -> str | None:
        """Why the engine may not read at all, and what to change; None: it may, or that is not known."""

    async def close(self, *, leave: bool, seconds: float = 30.0) -> None:
        """Disconnect within this time; with `leave`, give the partitions to others instead of keeping them reserved."""


class NotedSource(Source, Protocol):
    """A source that keeps a short text beside each committed offset, for the next reader of the partition."""

    def note(self, partition: TopicPartition, text: str) -> None:
        """Keep a text beside the offsets of a partition that are committed from now on; '' keeps none."""

    def noted(self, partition: TopicPartition) -> str:
        """Return the text that was beside the committed offset when the partition was assigned, '' without one."""
