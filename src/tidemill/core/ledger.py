"""The ledger records which members have resolved which entries, per lane, and alone decides how far a lane may advance.

A lane is a queue of entries. An entry is opened with a bit mask of members and is resolved when every member has
resolved it. `take_all` returns, per lane, the whole contiguous resolved prefix as one batch; the caller advances the
source past it (a commit, an acknowledgement) and then calls `settle`, or `retry` if that failed. `abandon` drops a lane
with all its outstanding entries.

Invariants:
1. An entry is in a batch only if every earlier entry of its lane is resolved.
2. Nothing is settled twice, and a lane's settled positions only rise.
3. Each member resolves an entry once; late, duplicate and unknown resolutions change nothing.
4. Members are frozen when the entry is opened.
5. An entry that no member accepted is not clean.

Positions rise per ledger and are never reused: a redelivery is a new entry. Memory is O(outstanding). `open` and
`resolve` are O(1); `take_all`, `take` and `settle` cost only what they return or drop.

A caller that counts members differently adds its own kind of entry (`add`), changes `pending` itself and reports when
it becomes zero (`note_resolved`): to the ledger only "zero or not" matters. `core.streams.group` does this, because a
thousand subscribers would need masks of a thousand bits.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterable, KeysView, Sequence
from itertools import islice
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)
ItemT = TypeVar("ItemT")


class EntryOutcome(enum.Enum):
    """How a member resolved an entry."""

    ACKED = "acked"
    FAILED = "failed"
    REJECTED = "rejected"


_ACKED = EntryOutcome.ACKED
_FAILED = EntryOutcome.FAILED


class LedgerEntry(Generic[LaneT, ItemT]):
    """An item in a lane. Only the ledger changes it.

    Attributes:
        position: Its number in the ledger; rises with every entry.
        item: The caller's item.
        pending: The members that have not resolved it, as a bit mask.
        acked: The members that accepted it, as a bit mask; so are `failed` and `rejected`.
        failed: The members that failed on it.
        rejected: The members that refused it.
        queue: The outstanding entries of its lane.
    """

    __slots__ = ("acked", "failed", "item", "pending", "position", "queue", "rejected")

    queue: LaneQueue[LaneT, ItemT]

    def __init__(self, position: int, item: ItemT, members: int) -> None:
        self.position = position
        self.item = item
        self.pending = members
        self.acked = 0
        self.failed = 0
        self.rejected = 0

    @property
    def lane(self) -> LaneT:
        return self.queue.lane

    @property
    def resolved(self) -> bool:
        """Whether every member has resolved the entry."""
        return not self.pending

    @property
    def clean(self) -> bool:
        """Whether the entry is resolved, at least one member accepted it, and none failed on it or refused it."""
        return bool(self.acked) and not (self.pending or self.failed or self.rejected)

    def __repr__(self) -> str:
        state = f"pending={self.pending:#b}" if self.pending else "resolved"
        return f"<LedgerEntry {self.position} of {self.lane!r}: {self.item!r}, {state}>"


class LedgerBatch(Generic[LaneT, ItemT]):
    """The contiguous resolved prefix of a lane, while the source is being advanced past it.

    Attributes:
        entries: At least one entry, in order.
    """

    __slots__ = ("_queue", "entries")

    def __init__(self, queue: LaneQueue[LaneT, ItemT], entries: Sequence[LedgerEntry[LaneT, ItemT]]) -> None:
        self._queue = queue
        self.entries = entries

    @property
    def lane(self) -> LaneT:
        return self._queue.lane


class LaneQueue(Generic[LaneT, ItemT]):
    """The outstanding entries of one lane, from its first entry until it is empty or abandoned."""

    __slots__ = ("abandoned", "entries", "in_flight", "lane")

    def __init__(self, lane: LaneT) -> None:
        self.lane = lane
        self.entries: deque[LedgerEntry[LaneT, ItemT]] = deque()
        self.in_flight: LedgerBatch[LaneT, ItemT] | None = None
        self.abandoned = False


Cut = Callable[[LaneT, Sequence[LedgerEntry[LaneT, ItemT]]], int]


class Ledger(Generic[LaneT, ItemT]):
    """Lanes of entries, and how far each may be advanced.

    Example:
        >>> ledger: Ledger[str, int] = Ledger()
        >>> first, second = ledger.open("a", 10), ledger.open("a", 11)
        >>> ledger.resolve(second)
        >>> ledger.take_all()
        []
        >>> ledger.resolve(first)
        >>> [entry.item for entry in ledger.take_all()[0].entries]
        [10, 11]
    """

    __slots__ = ("_position", "_ready", "queues", "total")

    def __init__(self) -> None:
        #: The lanes that have entries. Public for callers that `add` so often that they inline its body.
        self.queues: dict[LaneT, LaneQueue[LaneT, ItemT]] = {}
        # Lanes with a resolved head and nothing in flight, in the order in which they became ready.
        self._ready: dict[LaneT, LaneQueue[LaneT, ItemT]] = {}
        self._position = 0
        #: The number of entries of all lanes that are not settled. Only callers that inline `add` may change it.
        self.total = 0

    def open(self, lane: LaneT, item: ItemT, members: int = 1) -> LedgerEntry[LaneT, ItemT]:
        """Append an entry to a lane.

        Args:
            lane: The lane; it exists while it has entries.
            item: The caller's item, which is returned in the batch.
            members: The members that must resolve it, as a bit mask; with 0 it is resolved at once.

        Raises:
            ValueError: `members` is negative.
        """
        if members < 0:
            raise ValueError(f"members must be a bit mask, not {members}")
        self._position = position = self._position + 1
        entry: LedgerEntry[LaneT, ItemT] = LedgerEntry(position, item, members)
        self.add(lane, entry)
        return entry

    def open_all(self, lane: LaneT, items: Sequence[ItemT]) -> list[LedgerEntry[LaneT, ItemT]]:
        """Append one entry per item, each with one member, as `open` does."""
        if not items:
            return []
        queue = self.queues.get(lane) or self.start_lane(lane)
        first = self._position + 1
        entries: list[LedgerEntry[LaneT, ItemT]] = [LedgerEntry(first + n, item, 1) for n, item in enumerate(items)]
        for entry in entries:
            entry.queue = queue
        queue.entries += entries
        self._position += len(entries)
        self.total += len(entries)
        return entries

    def add(self, lane: LaneT, entry: LedgerEntry[LaneT, ItemT]) -> None:
        """Append an entry that the caller has created, with a position of the caller's choice.

        Args:
            lane: The lane; it exists while it has entries.
            entry: An entry that is not in a ledger.

        Raises:
            TypeError: The lane is not hashable; nothing was changed.
        """
        queue = entry.queue = self.queues.get(lane) or self.start_lane(lane)
        self.total += 1
        entries = queue.entries
        entries.append(entry)
        if not entry.pending and entries[0] is entry:
            self._ready[lane] = queue

    def start_lane(self, lane: LaneT) -> LaneQueue[LaneT, ItemT]:
        """Create a lane without entries; the caller must append one."""
        queue = self.queues[lane] = LaneQueue(lane)
        return queue

    def resolve(self, entry: LedgerEntry[LaneT, ItemT], outcome: EntryOutcome = _ACKED, member: int = 1) -> None:
        """Record how a member resolved an entry.

        A second resolution by the same member, one by a non-member, and any in an abandoned lane change nothing.

        Args:
            entry: A result of `open`.
            outcome: How the member resolved it.
            member: The member's bit, or the bits of several.
        """
        queue = entry.queue
        new = entry.pending & member
        if not new or queue.abandoned:
            return
        entry.pending -= new
        if outcome is _ACKED:
            entry.acked |= new
        elif outcome is _FAILED:
            entry.failed |= new
        else:
            entry.rejected |= new
        # While a batch is in flight, the head is already resolved, so this entry is not the head.
        if not entry.pending and queue.entries[0] is entry:
            self._ready[queue.lane] = queue

    def accept_all(self, entries: Iterable[LedgerEntry[LaneT, ItemT]]) -> None:
        """Record that the first member accepted entries, as `resolve` does."""
        for entry in entries:
            queue = entry.queue
            if not entry.pending & 1 or queue.abandoned:
                continue
            entry.pending -= 1
            entry.acked |= 1
            if not entry.pending and queue.entries[0] is entry:
                self._ready[queue.lane] = queue

    def note_resolved(self, entry: LedgerEntry[LaneT, ItemT]) -> None:
        """Record that the caller has lowered `pending` of an entry to zero, which it may do once."""
        queue = entry.queue
        if not queue.abandoned and queue.entries[0] is entry:
            self._ready[queue.lane] = queue

    def take_all(self, cut: Cut[LaneT, ItemT] | None = None) -> list[LedgerBatch[LaneT, ItemT]]:
        """Take the contiguous resolved prefix of every lane that has one and nothing in flight.

        Each batch is in flight from now until `settle`, `retry` or `abandon`.

        Args:
            cut: Returns how many entries of a lane's prefix to take; the others are offered again.
        """
        batches = []
        waiting = {}
        for queue in self._ready.values():
            prefix = _find_prefix(queue)
            if cut is not None:
                prefix = prefix[: cut(queue.lane, prefix)]
            if prefix:
                queue.in_flight = batch = LedgerBatch(queue, prefix)
                batches.append(batch)
            else:
                waiting[queue.lane] = queue
        self._ready = waiting
        return batches

    def take(self) -> LedgerBatch[LaneT, ItemT] | None:
        """Take the contiguous resolved prefix of the lane that has waited longest, as `take_all` does for all lanes."""
        for lane, queue in self._ready.items():
            del self._ready[lane]
            queue.in_flight = batch = LedgerBatch(queue, _find_prefix(queue))
            return batch
        return None

    def settle(self, batch: LedgerBatch[LaneT, ItemT]) -> None:
        """Drop the entries of a batch that was advanced; a batch that is not in flight changes nothing."""
        queue = batch._queue
        if queue.in_flight is not batch:
            return
        queue.in_flight = None
        entries = queue.entries
        if len(entries) == len(batch.entries):
            entries.clear()
        else:
            for _ in batch.entries:
                entries.popleft()
        self.total -= len(batch.entries)
        if not entries:
            del self.queues[queue.lane]
        elif not entries[0].pending:
            self._ready[queue.lane] = queue

    def retry(self, batch: LedgerBatch[LaneT, ItemT]) -> None:
        """Offer the entries of a failed batch again, together with entries resolved since."""
        queue = batch._queue
        if queue.in_flight is batch:
            queue.in_flight = None
            self._ready[queue.lane] = queue

    def abandon(self, lane: LaneT) -> None:
        """Give a lane up: drop its entries and ignore its batch in flight."""
        queue = self.queues.pop(lane, None)
        if queue is None:
            return
        self._ready.pop(lane, None)
        self.total -= len(queue.entries)
        queue.abandoned = True
        queue.in_flight = None
        queue.entries.clear()

    def count_outstanding(self, lane: LaneT) -> int:
        """Return the number of entries of a lane that are not settled."""
        queue = self.queues.get(lane)
        return 0 if queue is None else len(queue.entries)

    def find_head(self, lane: LaneT) -> LedgerEntry[LaneT, ItemT] | None:
        """Return the first entry of a lane that is not settled; if it is unresolved, the lane waits for it."""
        queue = self.queues.get(lane)
        return None if queue is None else queue.entries[0]

    @property
    def lanes(self) -> KeysView[LaneT]:
        """The lanes that have entries."""
        return self.queues.keys()


def _find_prefix(queue: LaneQueue[LaneT, ItemT]) -> Sequence[LedgerEntry[LaneT, ItemT]]:
    """Return the contiguous resolved entries at the head of a lane."""
    count = 0
    for entry in queue.entries:
        if entry.pending:
            break
        count += 1
    return list(islice(queue.entries, count))
