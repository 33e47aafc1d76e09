"""The ledger: who has resolved what, in order, per lane; the one thing that decides what may be advanced.

A lane is a line of entries. An entry is opened with a bit mask of members and is resolved when every member
has resolved it. `ready` hands out, per lane, the whole contiguous resolved prefix as one batch; the caller
advances the source over it (a commit, an acknowledgement) and then calls `settle`, or `retry` when it failed.
`abandon` gives a lane up, whatever is outstanding.

Invariants:
1. An entry is in a batch only if every earlier entry of its lane is resolved.
2. Nothing is settled twice, and a lane's settled positions only rise.
3. Each member resolves an entry once; late, duplicate and unknown resolutions change nothing.
4. Members are frozen when the entry is opened.
5. An entry that nobody accepted is not clean.

Positions rise per ledger and are never used again: a redelivery is a new entry. Memory is O(outstanding).
`open`, `resolve` are O(1); `ready`, `take` and `settle` cost only what they return or drop.

Who counts its members in its own way brings its own kind of entry (`add`), changes `pending` itself and tells when
nothing is pending any more (`note_resolved`): to the ledger only "zero or not" matters. `core.streams.group` does so,
because a thousand subscribers make masks of a thousand bits.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
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
    """One item in a lane. Read it; only the ledger changes it.

    Attributes:
        position: Its number in the ledger; rises with every entry.
        item: What the caller put there.
        pending: The members that have not resolved it, as a bit mask.
        acked: The members that accepted it, as a bit mask; so are `failed` and `rejected`.
        failed: The members that failed on it.
        rejected: The members that refused it.
        line: The outstanding entries of its lane.
    """

    __slots__ = ("acked", "failed", "item", "line", "pending", "position", "rejected")

    line: LaneQueue[LaneT, ItemT]

    def __init__(self, position: int, item: ItemT, members: int) -> None:
        """Start without any resolution."""
        self.position = position
        self.item = item
        self.pending = members
        self.acked = 0
        self.failed = 0
        self.rejected = 0

    @property
    def lane(self) -> LaneT:
        """The lane it is in."""
        return self.line.lane

    @property
    def resolved(self) -> bool:
        """Whether no member is missing."""
        return not self.pending

    @property
    def clean(self) -> bool:
        """Whether it is resolved, somebody accepted it, and nobody failed on it or refused it."""
        return bool(self.acked) and not (self.pending or self.failed or self.rejected)

    def __repr__(self) -> str:
        """Show what matters while debugging."""
        state = f"pending={self.pending:#b}" if self.pending else "resolved"
        return f"<LedgerEntry {self.position} of {self.lane!r}: {self.item!r}, {state}>"


class Batch(Generic[LaneT, ItemT]):
    """The contiguous resolved prefix of a lane, on its way to the source.

    Attributes:
        entries: At least one entry, in order.
    """

    __slots__ = ("_line", "entries")

    def __init__(self, line: LaneQueue[LaneT, ItemT], entries: Sequence[LedgerEntry[LaneT, ItemT]]) -> None:
        """Take the entries as they are."""
        self._line = line
        self.entries = entries

    @property
    def lane(self) -> LaneT:
        """The lane it is the head of."""
        return self._line.lane


class LaneQueue(Generic[LaneT, ItemT]):
    """The outstanding entries of one lane, from its first entry until it is empty or abandoned."""

    __slots__ = ("abandoned", "entries", "in_flight", "lane")

    def __init__(self, lane: LaneT) -> None:
        self.lane = lane
        self.entries: deque[LedgerEntry[LaneT, ItemT]] = deque()
        self.in_flight: Batch[LaneT, ItemT] | None = None
        self.abandoned = False


Cut = Callable[[LaneT, Sequence[LedgerEntry[LaneT, ItemT]]], int]


class Ledger(Generic[LaneT, ItemT]):
    """Lanes of entries, and what of them may be advanced.

    Example:
        >>> ledger: Ledger[str, int] = Ledger()
        >>> first, second = ledger.open("a", 10), ledger.open("a", 11)
        >>> ledger.resolve(second)
        >>> ledger.ready()
        []
        >>> ledger.resolve(first)
        >>> [entry.item for entry in ledger.ready()[0].entries]
        [10, 11]
    """

    __slots__ = ("_position", "_ready", "lines", "total")

    def __init__(self) -> None:
        """Start without lanes."""
        #: The lanes that have entries. For those who `add` so often that the call matters, and write out its body.
        self.lines: dict[LaneT, LaneQueue[LaneT, ItemT]] = {}
        # Lanes with a resolved head and nothing in flight, in the order in which they became so.
        self._ready: dict[LaneT, LaneQueue[LaneT, ItemT]] = {}
        self._position = 0
        #: How many entries of all lanes are not settled; only the ledger changes it.
        self.total = 0

    def open(self, lane: LaneT, item: ItemT, members: int = 1) -> LedgerEntry[LaneT, ItemT]:
        """Append an entry to a lane.

        Args:
            lane: Where; a lane exists while it has entries.
            item: Anything the caller wants to find in the batch.
            members: Who must resolve it, as a bit mask; 0 means nobody: it is resolved at once.

        Raises:
            ValueError: `members` is negative.
        """
        if members < 0:
            raise ValueError(f"members must be a bit mask, not {members}")
        self._position = position = self._position + 1
        entry: LedgerEntry[LaneT, ItemT] = LedgerEntry(position, item, members)
        self.add(lane, entry)
        return entry

    def add(self, lane: LaneT, entry: LedgerEntry[LaneT, ItemT]) -> None:
        """Append an entry that the caller made; its positions are the caller's.

        Args:
            lane: Where; a lane exists while it has entries.
            entry: One that is in no ledger.

        Raises:
            TypeError: The lane is not hashable; nothing was changed.
        """
        line = entry.line = self.lines.get(lane) or self.start_line(lane)
        self.total += 1
        entries = line.entries
        entries.append(entry)
        if not entry.pending and entries[0] is entry:
            self._ready[lane] = line

    def start_line(self, lane: LaneT) -> LaneQueue[LaneT, ItemT]:
        """Begin a lane that has no entries; one must follow."""
        line = self.lines[lane] = LaneQueue(lane)
        return line

    def resolve(self, entry: LedgerEntry[LaneT, ItemT], outcome: EntryOutcome = _ACKED, member: int = 1) -> None:
        """Note how a member dealt with an entry.

        A second resolution by the same member, one by somebody who is no member, and any of an abandoned lane
        changes nothing.

        Args:
            entry: What `open` returned.
            outcome: How it went.
            member: The member's bit, or the bits of several.
        """
        line = entry.line
        new = entry.pending & member
        if not new or line.abandoned:
            return
        entry.pending -= new
        if outcome is _ACKED:
            entry.acked |= new
        elif outcome is _FAILED:
            entry.failed |= new
        else:
            entry.rejected |= new
        # With a batch in flight the head was resolved before, so this is not it.
        if not entry.pending and line.entries[0] is entry:
            self._ready[line.lane] = line

    def note_resolved(self, entry: LedgerEntry[LaneT, ItemT]) -> None:
        """Take notice that the caller brought `pending` of an entry to zero, which it may do once."""
        line = entry.line
        if not line.abandoned and line.entries[0] is entry:
            self._ready[line.lane] = line

    def ready(self, cut: Cut[LaneT, ItemT] | None = None) -> list[Batch[LaneT, ItemT]]:
        """Take the contiguous resolved prefix of every lane that has one and nothing in flight.

        Each batch is in flight from now until `settle`, `retry` or `abandon`.

        Args:
            cut: Says how many entries of a lane's prefix may go; what is left is offered again.
        """
        batches = []
        waiting = {}
        for line in self._ready.values():
            prefix = _prefix(line)
            if cut is not None:
                prefix = prefix[: cut(line.lane, prefix)]
            if prefix:
                line.in_flight = batch = Batch(line, prefix)
                batches.append(batch)
            else:
                waiting[line.lane] = line
        self._ready = waiting
        return batches

    def take(self) -> Batch[LaneT, ItemT] | None:
        """Take the contiguous resolved prefix of one lane, the one that has waited longest, as `ready` does of all."""
        for lane, line in self._ready.items():
            del self._ready[lane]
            line.in_flight = batch = Batch(line, _prefix(line))
            return batch
        return None

    def settle(self, batch: Batch[LaneT, ItemT]) -> None:
        """Drop the entries of a batch that was advanced; a batch that is not in flight changes nothing."""
        line = batch._line
        if line.in_flight is not batch:
            return
        line.in_flight = None
        entries = line.entries
        if len(entries) == len(batch.entries):
            entries.clear()
        else:
            for _ in batch.entries:
                entries.popleft()
        self.total -= len(batch.entries)
        if not entries:
            del self.lines[line.lane]
        elif not entries[0].pending:
            self._ready[line.lane] = line

    def retry(self, batch: Batch[LaneT, ItemT]) -> None:
        """Offer the entries of a batch that was not advanced again, with what has joined them since."""
        line = batch._line
        if line.in_flight is batch:
            line.in_flight = None
            self._ready[line.lane] = line

    def abandon(self, lane: LaneT) -> None:
        """Give a lane up: its entries are closed, its batch in flight counts no more."""
        line = self.lines.pop(lane, None)
        if line is None:
            return
        self._ready.pop(lane, None)
        self.total -= len(line.entries)
        line.abandoned = True
        line.in_flight = None
        line.entries.clear()

    def outstanding(self, lane: LaneT) -> int:
        """Return how many entries of a lane are not settled."""
        line = self.lines.get(lane)
        return 0 if line is None else len(line.entries)

    def head(self, lane: LaneT) -> LedgerEntry[LaneT, ItemT] | None:
        """Return the first entry of a lane that is not settled; unresolved, it is what the lane waits for."""
        line = self.lines.get(lane)
        return None if line is None else line.entries[0]

    def lanes(self) -> Iterator[LaneT]:
        """Yield the lanes that have entries."""
        return iter(self.lines)


def _prefix(line: LaneQueue[LaneT, ItemT]) -> Sequence[LedgerEntry[LaneT, ItemT]]:
    """Return the contiguous resolved entries at the head of a lane."""
    count = 0
    for entry in line.entries:
        if entry.pending:
            break
        count += 1
    return list(islice(line.entries, count))
