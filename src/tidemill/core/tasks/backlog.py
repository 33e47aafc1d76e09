"""Decides how far a generator may run ahead of the elements that are created from what it yields.

A generator that is too far ahead waits at its `yield`, and goes on once less than half of the backlog is left, so that
it moves in long steps instead of stopping for every element.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: The number of items that may be stored ahead, unless a setting says otherwise, and their size in bytes.
MAX_BACKLOG, MAX_BACKLOG_BYTES = 10_000, 64 << 20


class ItemBacklog(NamedTuple):
    """The values of a generator from which some map has not created elements yet. `size`: their bytes."""

    items: int = 0
    size: int = 0

    def is_full(self, max_items: int = MAX_BACKLOG, max_size: int = MAX_BACKLOG_BYTES) -> bool:
        """Return whether the generator has to wait."""
        return self.items >= max_items or self.size >= max_size

    def has_room(self, max_items: int = MAX_BACKLOG, max_size: int = MAX_BACKLOG_BYTES) -> bool:
        """Return whether a generator that waits may go on."""
        return 2 * self.items < max_items and 2 * self.size < max_size


class Consumer(NamedTuple):
    """A map over a generator.

    Attributes:
        created: The number of its elements that exist.
        per_item: The number of elements that it has for each item.
        waits_for_end: Whether it opens only after a task that waits for the end of the generator.
        opened: Whether it has opened.
        ended: Whether it creates no further element.
    """

    created: int
    per_item: int = 1
    waits_for_end: bool = False
    opened: bool = True
    ended: bool = False

    @property
    def counts(self) -> bool:
        """Whether the generator waits for it; waiting for one that waits for its own end, it would wait forever."""
        return not self.ended and self.per_item > 0 and (self.opened or not self.waits_for_end)


def count_taken(yielded: int, consumers: Iterable[Consumer]) -> int:
    """Return the number of items from which all maps that count have created their elements.

    Example:
        >>> count_taken(10, [Consumer(4), Consumer(7, per_item=2)])
        3
        >>> count_taken(10, [])
        10
    """
    return min([yielded, *(one.created // one.per_item for one in consumers if one.counts)])
