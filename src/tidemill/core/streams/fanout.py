"""One log, many readers: each published item is read by all of them, in order, each at its own pace.

The log is a chain of chunks. A reader is a position in a chunk; the interpreter frees chunks that all readers have
passed. Nothing is copied, trimmed or counted per reader, so publishing costs the same for any number of readers. A
reader takes items with `for item in reader.unread`, at the speed of a list; `load_more` continues with the next chunk.
Or it takes all available items at once (`take_all`), in a form that is prepared once per item for all readers.

Invariants:
1. A reader sees every item that was published between its joining and its leaving, in order, once.
2. A reader with more than `max_backlog` unread items is returned, once, by the `publish` that exceeded the limit; an
   `exempt` reader may leave any number unread.
3. Memory is O(items that the slowest reader has not read), plus one chunk.

An iterator over a list sees appended items until it has reached the end once; then it is exhausted for ever. So a chunk
that a reader has read to its end is closed, and the next item goes into a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from operator import length_hint
from typing import Any, Final, Generic, TypeVar

from tidemill.core.streams.lazy_min import LazyMin

ItemT = TypeVar("ItemT")
PreparedT = TypeVar("PreparedT")
ReaderT = TypeVar("ReaderT", bound="LogReader[Any]")

#: The number of items in a chunk. A slow reader keeps at most this many items alive that it has already read.
CHUNK: Final = 256


class _Chunk(Generic[ItemT]):
    """A segment of the log that starts at position `base`."""

    __slots__ = ("base", "items", "next", "prepared")

    def __init__(self, base: int) -> None:
        self.base = base
        self.items: list[ItemT] = []
        # The first of these items, as `take_all` returns them.
        self.prepared: list[Any] = []
        self.next: _Chunk[ItemT] | None = None


class LogReader(Generic[ItemT]):
    """A position in the log.

    Attributes:
        name: The name of the reader.
        unread: The items that can be taken at once; taking an item reads it.
        present: Whether it is a reader of the log, from `join` to `leave`.
        exempt: Whether it may leave any number of items unread.
        ahead: Items from `take_all` that still count as unread. The caller of `take_all` sets it; it must be empty
            before `load_more`.
    """

    __slots__ = ("_chunk", "_fresh", "ahead", "exempt", "name", "present", "unread")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.present = False
        self.exempt = False
        self.ahead: Sized = ()
        self._move_to(_Chunk(0))

    def _move_to(self, chunk: _Chunk[ItemT]) -> None:
        """Move to the start of a chunk."""
        self._chunk = chunk
        self._fresh = True
        self.unread: Iterator[ItemT] = iter(())

    @property
    def position(self) -> int:
        """The position of the next item to read."""
        chunk = self._chunk
        if self._fresh:
            return chunk.base
        return chunk.base + len(chunk.items) - length_hint(self.unread) - len(self.ahead)

    def take_all(self, prepare: Callable[[Sequence[ItemT]], Sequence[PreparedT]]) -> list[PreparedT]:
        """Take all of `unread`, at most `CHUNK` items; each counts as unread while it is in `ahead`.

        Args:
            prepare: Converts items to the form that all callers of this method take.
        """
        count = length_hint(self.unread)
        items, prepared = self._chunk.items, self._chunk.prepared
        if len(prepared) < len(items):
            prepared.extend(prepare(items[len(prepared) :]))
        # The iterator is not exhausted, so it still sees appended items.
        self.unread.__setstate__(len(items))  # type: ignore[attr-defined]
        return prepared[len(items) - count :]

    def yield_unread(self) -> Iterator[ItemT]:
        """Yield the unread items without reading them."""
        chunk: _Chunk[ItemT] | None = self._chunk
        start = self.position - self._chunk.base
        while chunk is not None:
            yield from chunk.items[start:]
            chunk = chunk.next
            start = 0


class Fanout(Generic[ItemT, ReaderT]):
    """The log and its readers.

    Args:
        max_backlog: The number of items that a reader may leave unread, at least 1.

    Example:
        >>> log = Fanout(max_backlog=2)
        >>> reader = LogReader("a")
        >>> log.join(reader)
        >>> log.publish("x"), log.load_more(reader), list(reader.unread)
        ([], True, ['x'])
    """

    __slots__ = ("_max_backlog", "_slowest", "_tail", "items", "room", "size")

    def __init__(self, max_backlog: int) -> None:
        if max_backlog < 1:
            raise ValueError(f"max_backlog must be at least 1, not {max_backlog}")
        self._max_backlog = max_backlog
        self._slowest: LazyMin[ReaderT, int] = LazyMin(_find_position)
        self._tail: _Chunk[ItemT] = _Chunk(0)
        #: The items of the last chunk, and how many more can be published before `find_late` has to be called. Public
        #: for callers that publish so often that they inline `publish`.
        self.items = self._tail.items
        self.room = 1
        #: The number of readers.
        self.size = 0

    @property
    def end(self) -> int:
        """The position of the next item to be published."""
        return self._tail.base + len(self.items)

    def join(self, reader: ReaderT) -> None:
        """Add a reader of the items published from now on."""
        self._close_chunk()
        reader._move_to(self._tail)
        reader.present = True
        self._slowest.add(reader)
        self.room = 1
        self.size += 1

    def follow(self, reader: LogReader[ItemT]) -> None:
        """Add a reader that is not counted and may be arbitrarily slow, for the items published from now on."""
        self._close_chunk()
        reader._move_to(self._tail)

    def leave(self, reader: ReaderT) -> None:
        """Remove a reader; it can read no more, and keeps nothing of the log alive."""
        self.size -= reader.present
        reader.present = False
        reader._move_to(_Chunk(reader.position))
        self._slowest.note_out()

    def freeze(self, reader: LogReader[ItemT]) -> None:
        """Stop a reader at its position; it gets nothing more to read."""
        reader._move_to(_Chunk(reader.position))

    def hand_over(self, reader: ReaderT, heir: ReaderT) -> None:
        """Replace a reader with `heir` at the same position. The heir is exempt until `end_exemption`."""
        heir._chunk, heir._fresh, heir.unread = reader._chunk, reader._fresh, reader.unread
        heir.present = heir.exempt = True
        self.size += 1
        reader._move_to(_Chunk(reader.position))
        self.leave(reader)

    def pause_readers(self) -> None:
        """Force every reader to call `load_more` before it reads items published from now on."""
        self._close_chunk()

    def skip_to_end(self, reader: LogReader[ItemT]) -> None:
        """Move a reader to the end of the log."""
        self._close_chunk()
        reader._move_to(self._tail)

    def end_exemption(self, reader: ReaderT) -> None:
        """Apply `max_backlog` to a reader that was exempt."""
        reader.exempt = False
        self._slowest.add(reader)
        self.room = 1

    def publish(self, item: ItemT) -> Sequence[ReaderT]:
        """Append an item.

        Returns:
            The readers that now have more than `max_backlog` unread items; the caller removes them.
        """
        self.items.append(item)
        self.room -= 1
        return () if self.room else self.find_late()

    def skip(self) -> None:
        """Use up a position without an item; only for a log without readers."""
        self._close_chunk()
        self._tail.base += 1

    def load_more(self, reader: LogReader[ItemT]) -> bool:
        """Refill `unread` of a reader that has taken all its items; return whether there were more."""
        chunk = reader._chunk
        if not reader._fresh:
            if chunk is self._tail:
                self._close_chunk()
            chunk = chunk.next or self._tail
            reader._move_to(chunk)
        if not chunk.items:
            return False
        reader._fresh = False
        reader.unread = iter(chunk.items)
        return True

    def _close_chunk(self) -> None:
        if self.items:
            self._tail.next = tail = _Chunk[ItemT](self.end)
            self._tail = tail
            self.items = tail.items

    def find_late(self) -> Sequence[ReaderT]:
        """Return the readers that are too far behind, as `publish` does, and set `room`."""
        if len(self.items) >= CHUNK:
            self._close_chunk()
        lowest = self.end - self._max_backlog
        late: list[ReaderT] = []
        while (bound := self._slowest.find_bound()) is not None and bound < lowest:
            # `find_top` makes the bound exact: either this reader is late, or the loop ends.
            reader = self._slowest.find_top()
            if reader is not None and reader.position < lowest:
                self._slowest.drop_top()
                late.append(reader)
        self.room = CHUNK - len(self.items)
        if bound is not None:
            self.room = min(self.room, bound - lowest + 1)
        return late


def _find_position(reader: LogReader[ItemT]) -> int | None:
    return reader.position if reader.present and not reader.exempt else None
