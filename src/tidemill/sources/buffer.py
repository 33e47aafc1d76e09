"""What was fetched of one owned partition and not pulled yet, during one ownership of the partition."""

from __future__ import annotations

from collections import deque

from tidemill.runtime.messages import SourceMessage
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
    """

    __slots__ = ("expected", "fetched_bytes", "holes", "member", "messages", "name", "paused", "pulled_bytes")

    def __init__(self, partition: TopicPartition, committed: int, member: bytes | None = None) -> None:
        """Start empty, behind the committed offset (negative if there is none)."""
        self.name = f"{partition[0]}/{partition[1]}"
        self.messages: deque[SourceMessage] = deque()
        self.fetched_bytes = 0
        self.pulled_bytes = 0
        self.expected = committed
        self.holes: list[tuple[int, int]] = []
        self.paused = False
        self.member = member

    @property
    def size_bytes(self) -> int:
        """How much waits."""
        return self.fetched_bytes - self.pulled_bytes
