"""Cuts the messages of one partition into windows by count, bytes and time.

Invariants: every item is in exactly one window, in order; windows are never empty and are numbered from 0 without gaps;
a window holds at most `max_count` items and `max_bytes`, except that a larger item has a window of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Window(Generic[T]):
    """A closed window.

    Attributes:
        number: The number of the window within its partition.
        items: Its items, in order; never empty.
        size_bytes: The total size of the items.
    """

    number: int
    items: list[T]
    size_bytes: int


class Windowing(Generic[T]):
    """The open window of one partition.

    Args:
        max_count: A window with this many items is closed.
        max_bytes: A window is closed before it exceeds this size.
        linger_seconds: How long a window stays open after its first item; 0: until no more items are waiting.
    """

    __slots__ = ("_due", "_items", "_linger_seconds", "_max_bytes", "_max_count", "_number", "_size_bytes")

    def __init__(self, max_count: int, max_bytes: int, linger_seconds: float) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._linger_seconds = linger_seconds
        self._items: list[T] = []
        self._size_bytes = 0
        self._number = 0
        self._due: float | None = None

    @property
    def items(self) -> Sequence[T]:
        """The items of the open window."""
        return self._items

    @property
    def due(self) -> float | None:
        """The time at which `expire` closes the open window; None without an open window or a time limit."""
        return self._due

    def add(self, item: T, size_bytes: int, now: float) -> Window[T] | None:
        """Add an item; return the window that this closes, if any.

        An item that does not fit closes the window before it. If the item also fills the next window, that one is due
        at once: the next `add`, `close_idle` or `expire` closes it.
        """
        closed = None
        if self._items and self._size_bytes + size_bytes > self._max_bytes:
            closed = self._close()
        if not self._items and self._linger_seconds > 0:
            self._due = now + self._linger_seconds
        self._items.append(item)
        self._size_bytes += size_bytes
        if len(self._items) >= self._max_count or self._size_bytes >= self._max_bytes:
            if closed is None:
                return self._close()
            if self._linger_seconds > 0:
                self._due = now
        return closed

    def add_all(self, items: Sequence[T], sizes: Sequence[int], now: float) -> list[Window[T]]:
        """Add items, each with its size in bytes; return all windows that `add` would close."""
        closed: list[Window[T]] = []
        total = sum(sizes)
        if self._size_bytes + total >= self._max_bytes:
            for item, size_bytes in zip(items, sizes, strict=True):
                if (window := self.add(item, size_bytes, now)) is not None:
                    closed.append(window)
            return closed
        done = 0
        while done < len(items):
            if not self._items and self._linger_seconds > 0:
                self._due = now + self._linger_seconds
            until = min(len(items), done + self._max_count - len(self._items))
            self._items += items[done:until]
            self._size_bytes += sum(sizes[done:until])
            if len(self._items) >= self._max_count:
                closed.append(self._close())
            done = until
        return closed

    def close_idle(self, now: float) -> Window[T] | None:
        """Close and return the open window now that no more items are waiting, unless it has to linger."""
        return self.expire(now) if self._linger_seconds > 0 else self.flush()

    def expire(self, now: float) -> Window[T] | None:
        """Close and return the open window if its time is over."""
        return self._close() if self._due is not None and now >= self._due else None

    def flush(self) -> Window[T] | None:
        """Close and return the open window, if any."""
        return self._close() if self._items else None

    def _close(self) -> Window[T]:
        window = Window(self._number, self._items, self._size_bytes)
        self._number += 1
        self._items = []
        self._size_bytes = 0
        self._due = None
        return window
