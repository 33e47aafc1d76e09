"""Group commit: which items are written together, when, and what waits while the database is unreachable.

Theory of operation. Items are added one by one and leave in batches, one batch at a time. A batch leaves when its
oldest item has waited for the linger time, never because of its size; while it is being written, the next one fills. A
batch that could not be written stays the same batch and is retried with backoff for as long as it takes: an outage
fails nothing. A batch whose content the database refuses is halved until the bad item is alone.

Invariants:
- Every item leaves in order, and either is in exactly one batch that is committed, or is returned as refused.
- At most one batch is in flight; nothing overtakes a batch that is retried.
- While the database is idle, an item is due within the linger time of its arrival.
- `standing` is DOWN from the first failure, or from a write that takes too long, until the database answers.

The shell calls `take` at `due` and after each answer, and reports the answer to each batch.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from tidemill.core.errors import InvariantError
from tidemill.core.retry import Backoff

T = TypeVar("T")


class ProducerStanding(enum.Enum):
    """Whether producers may continue.

    OPEN: continue. FULL: too many items wait, so pull no more; deadlines keep running. DOWN: the database is
    unreachable, so pull no more and stop the clock of deadlines.
    """

    OPEN = "open"
    FULL = "full"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class CommitLimits:
    """The limits of batches and of waiting items.

    Attributes:
        linger_seconds: How long the oldest item waits for others; half of the 20 ms within which it should be stored.
        max_batch_count: The maximum number of items per transaction; a backlog takes several.
        max_batch_bytes: The maximum size of a transaction, except for a single item that is larger.
        high_count: The number of pending items from which on the standing is FULL.
        low_count: The number of pending items down to which it stays FULL.
        high_bytes: Like `high_count`, in bytes; the low mark is half of it.
        outage_seconds: A write that takes longer counts as an outage until it is answered.
        backoff: The delays between attempts.
    """

    linger_seconds: float = 0.01
    max_batch_count: int = 5_000
    max_batch_bytes: int = 8 * 1024 * 1024
    high_count: int = 20_000
    low_count: int = 10_000
    high_bytes: int = 64 * 1024 * 1024
    outage_seconds: float = 1.0
    backoff: Backoff = Backoff(0.1, 2.0)  # noqa: RUF009 - a frozen value


@dataclass(frozen=True, slots=True, eq=False)
class GroupCommitBatch(Generic[T]):
    """The items that one transaction writes; the same object in each attempt.

    Attributes:
        items: Each item with its size in bytes, in order of arrival; never empty.
        size_bytes: The total size of the items.
    """

    items: list[tuple[T, int]]
    size_bytes: int


class GroupCommit(Generic[T]):
    """The items that one process has to write.

    Args:
        limits: When to write, and how much at once.

    Example:
        >>> commits = GroupCommit[str](CommitLimits(linger_seconds=0.01))
        >>> commits.add("event", 5, now=0.0)
        >>> commits.take(now=0.005), commits.due
        (None, 0.01)
        >>> [item for item, _ in commits.take(now=0.01).items]
        ['event']
    """

    __slots__ = (
        "_draining",
        "_failures",
        "_full",
        "_in_flight",
        "_in_flight_since",
        "_is_overdue",
        "_limits",
        "_not_before",
        "_retries",
        "_size_bytes",
        "_total",
        "_waiting",
    )

    def __init__(self, limits: CommitLimits) -> None:
        self._limits = limits
        self._waiting: deque[tuple[T, int, float]] = deque()
        self._retries: deque[GroupCommitBatch[T]] = deque()
        self._in_flight: GroupCommitBatch[T] | None = None
        self._in_flight_since = 0.0
        self._is_overdue = False
        self._failures = 0
        self._not_before = 0.0
        self._full = False
        self._draining = False
        self._total = 0
        self._size_bytes = 0

    @property
    def pending(self) -> int:
        """The number of items that are neither committed nor refused."""
        return self._total

    @property
    def pending_bytes(self) -> int:
        """The total size of the pending items."""
        return self._size_bytes

    @property
    def standing(self) -> ProducerStanding:
        """Whether producers may continue."""
        if self._failures or self._is_overdue:
            return ProducerStanding.DOWN
        return ProducerStanding.FULL if self._full else ProducerStanding.OPEN

    @property
    def due(self) -> float | None:
        """The time of the next call to `take`; None: only after an item is added or a batch is answered."""
        if self._in_flight is not None:
            return None if self._is_overdue else self._in_flight_since + self._limits.outage_seconds
        if self._retries:
            return self._not_before
        if not self._waiting:
            return None
        arrived = self._waiting[0][2]
        return arrived if self._draining else arrived + self._limits.linger_seconds

    def add(self, item: T, size_bytes: int, now: float) -> None:
        self._waiting.append((item, size_bytes, now))
        self._total += 1
        self._size_bytes += size_bytes
        if self._total >= self._limits.high_count or self._size_bytes >= self._limits.high_bytes:
            self._full = True

    def drain(self) -> None:
        """Stop lingering, because the process is about to end."""
        self._draining = True

    def take(self, now: float) -> GroupCommitBatch[T] | None:
        """Return the batch to write now, which is then in flight; None if there is none."""
        due = self.due
        if due is None or now < due:
            return None
        if self._in_flight is not None:
            self._is_overdue = True
            return None
        self._in_flight = self._retries.popleft() if self._retries else self._cut_batch()
        self._in_flight_since = now
        return self._in_flight

    def note_committed(self) -> None:
        """Record that the batch in flight is stored durably."""
        batch = self._end_flight()
        self._failures = 0
        self._forget(batch)

    def note_unreachable(self, now: float, bits: int) -> None:
        """Retry the batch in flight, which was not, or may not have been, written.

        Args:
            now: The current time.
            bits: 32 random bits for the backoff.
        """
        batch = self._end_flight()
        self._failures += 1
        self._not_before = now + self._limits.backoff.compute_delay(self._failures, bits)
        self._retries.appendleft(batch)

    def note_refused(self, now: float) -> GroupCommitBatch[T] | None:
        """Halve the batch in flight, or give it up, because the database refuses its content.

        Returns:
            The batch if it has a single item, which is given up; None if its halves will be tried.
        """
        batch = self._end_flight()
        # The database answered, so it is reachable.
        self._failures = 0
        self._not_before = now
        if len(batch.items) == 1:
            self._forget(batch)
            return batch
        middle = len(batch.items) // 2
        for half in (batch.items[middle:], batch.items[:middle]):
            self._retries.appendleft(GroupCommitBatch(half, sum(size for _, size in half)))
        return None

    def _end_flight(self) -> GroupCommitBatch[T]:
        if self._in_flight is None:
            raise InvariantError("an answer arrived for a batch, but no batch is in flight")
        batch, self._in_flight = self._in_flight, None
        self._is_overdue = False
        return batch

    def _forget(self, batch: GroupCommitBatch[T]) -> None:
        self._total -= len(batch.items)
        self._size_bytes -= batch.size_bytes
        if self._total <= self._limits.low_count and self._size_bytes <= self._limits.high_bytes // 2:
            self._full = False

    def _cut_batch(self) -> GroupCommitBatch[T]:
        waiting, limits = self._waiting, self._limits
        items: list[tuple[T, int]] = []
        total_bytes = 0
        while waiting and len(items) < limits.max_batch_count:
            item, size_bytes, _ = waiting[0]
            if items and total_bytes + size_bytes > limits.max_batch_bytes:
                break
            waiting.popleft()
            items.append((item, size_bytes))
            total_bytes += size_bytes
        return GroupCommitBatch(items, total_bytes)
