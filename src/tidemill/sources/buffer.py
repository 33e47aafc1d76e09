"""The buffers of fetched messages that were not pulled yet; each buffer belongs to one ownership of a partition."""

from __future__ import annotations

from collections import deque

from tidemill.runtime.kafka.source_message import SourceMessage, list_sizes
from tidemill.sources.base import TopicPartition


class Buffer:
    """The fetched messages of a partition. The thread appends, and the loop takes; each counter has one writer.

    Attributes:
        name: The partition as one text, for logs.
        messages: The messages, in order.
        fetched_bytes: The size of all messages that were appended; written by the thread.
        pulled_bytes: The size of all messages that were taken; written by the loop.
        expected: The next offset that the thread expects; negative: unknown.
        holes: Jumps that were not examined yet: the expected offset, and the actual one.
        paused: Whether the partition is paused at the consumer.
        member: The member id that the partition was assigned to; None: unknown.
        settled: The offset that the engine last wanted to commit.
        closed_at: When appending stopped because the topic was replaced; None: it was not.
    """

    __slots__ = (
        "closed_at",
        "expected",
        "fetched_bytes",
        "holes",
        "member",
        "messages",
        "name",
        "paused",
        "pulled_bytes",
        "settled",
    )

    def __init__(self, partition: TopicPartition, committed: int, member: bytes | None = None) -> None:
        """Create an empty buffer that starts at the committed offset (negative: there is none)."""
        self.name = f"{partition[0]}/{partition[1]}"
        self.messages: deque[SourceMessage] = deque()
        self.fetched_bytes = 0
        self.pulled_bytes = 0
        self.expected = self.settled = committed
        self.holes: list[tuple[int, int]] = []
        self.paused = False
        self.member = member
        self.closed_at: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether everything that was fetched was also pulled, and left the pipeline."""
        return not self.messages and self.settled >= self.expected

    @property
    def size_bytes(self) -> int:
        """The size of the buffered messages."""
        return self.fetched_bytes - self.pulled_bytes


class ToldBuffers(dict[TopicPartition, Buffer]):
    """The buffers of the partitions that the engine knows of; only the loop touches them."""

    def pull(self, partition: TopicPartition, limit: int) -> list[SourceMessage]:
        """Take messages from the partition's buffer."""
        buffer = self.get(partition)
        if buffer is None:
            return []
        messages = buffer.messages
        taken = [messages.popleft() for _ in range(min(limit, len(messages)))]
        buffer.pulled_bytes += sum(list_sizes(taken))
        return taken

    def count(self, partition: TopicPartition) -> int:
        """Return how many messages of the partition can be pulled."""
        buffer = self.get(partition)
        return len(buffer.messages) if buffer is not None else 0

    def peek(self, partition: TopicPartition) -> SourceMessage | None:
        """Return the next message of the partition that can be pulled."""
        buffer = self.get(partition)
        return buffer.messages[0] if buffer is not None and buffer.messages else None
