"""What was fetched of owned partitions and not pulled yet, during one ownership of each."""

from __future__ import annotations

from collections import deque

from tidemill.runtime.messages import SourceMessage, list_sizes
from tidemill.sources.base import TopicPartition


class Buffer:
    """The thread appends to `messages`, the loop takes from it; each counter has one writer.

    Attributes:
        name: The partition as one text, for logs.
        messages: In order.
        fetched_bytes: Of all that was appended; the thread's.
        pulled_bytes: Of all that was taken; the loop's.
        expected: The next offset that the thread expects; negative while it is not known.
        holes: Jumps that were not examined yet: the offset that was expected, and the one that came.
        paused: Whether the partition is paused at the consumer.
        member: The member id that the partition was assigned to; None: not known.
        settled: The offset that the engine last wanted to commit.
        closed_at: Since when nothing is appended, because the topic is gone; None: it is not.
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
        """Start empty, behind the committed offset (negative if there is none)."""
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
        """Whether everything that was fetched was pulled, and left the pipeline."""
        return not self.messages and self.settled >= self.expected

    @property
    def size_bytes(self) -> int:
        """How much waits."""
        return self.fetched_bytes - self.pulled_bytes


class ToldBuffers(dict[TopicPartition, Buffer]):
    """The buffers of those partitions that the engine knows of; only the loop touches them."""

    def pull(self, partition: TopicPartition, limit: int) -> list[SourceMessage]:
        """Take messages out of the partition's buffer."""
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
