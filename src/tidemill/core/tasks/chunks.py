"""Decides where the items of a map with chunks are cut: each element of such a map gets a range of items, as a list.

Invariants: chunks follow each other without gaps, in the order of the items; a chunk has at least one item and at most
`max_items`. A chunk never changes once it is cut. The last one is cut when the source closes.
"""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """The chunks that are cut now.

    Attributes:
        ends: The number of items up to the end of each new chunk, in order.
        since_us: When the first item of the unfinished chunk was seen; None: there is no item.
        due_us: When the unfinished chunk is cut at the latest; None: there is none.
    """

    ends: tuple[int, ...] = ()
    since_us: int | None = None
    due_us: int | None = None


def count_chunks(total: int, max_items: int, *, closed: bool) -> int:
    """Return the number of chunks of items that arrive without a time limit.

    Args:
        total: The number of items.
        max_items: The size of a chunk.
        closed: Whether no further item arrives, so that the last chunk may have fewer items.

    Example:
        >>> count_chunks(7, 3, closed=False), count_chunks(7, 3, closed=True)
        (2, 3)
    """
    return -(-total // max_items) if closed else total // max_items


def locate_chunk(number: int, max_items: int, total: int) -> range:
    """Return the items of a chunk that arrived without a time limit.

    Example:
        >>> locate_chunk(2, 3, 7)
        range(6, 7)
    """
    return range(min(number * max_items, total), min((number + 1) * max_items, total))


def cut(
    total: int, end: int, max_items: int, max_wait_us: int, *, closed: bool, since_us: int | None, now_us: int
) -> Cut:
    """Return the chunks to cut: full ones, and the unfinished one if its first item has waited for long enough.

    Args:
        total: The number of items.
        end: The number of items in the chunks that are cut already.
        max_items: The size of a chunk.
        max_wait_us: How long the first item of a chunk waits for others.
        closed: Whether no further item arrives.
        since_us: When the first item beyond `end` was seen; None: there was none.
        now_us: The time.

    Example:
        >>> cut(7, 0, 3, 10, closed=False, since_us=None, now_us=5)
        Cut(ends=(3, 6), since_us=5, due_us=15)
        >>> cut(7, 6, 3, 10, closed=False, since_us=5, now_us=15)
        Cut(ends=(7,), since_us=None, due_us=None)
    """
    full = tuple(range(end + max_items, total + 1, max_items))
    rest = total - (full[-1] if full else end)
    if not rest:
        return Cut(full)
    since = now_us if full or since_us is None else since_us
    if closed or now_us >= since + max_wait_us:
        return Cut((*full, total))
    return Cut(full, since, since + max_wait_us)
