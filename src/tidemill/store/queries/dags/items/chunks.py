"""Cuts the items of maps with chunks, and finds the items of a chunk.

Invariants: chunks without a time limit follow from the number of items. The ends of the others are stored with the head
of their map when the map counts them, and stay until the map begins anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import Connection

from tidemill.core.tasks.chunks import count_chunks, cut, locate_chunk
from tidemill.core.tasks.structure import MapStructure
from tidemill.store.queries.dags.items.backlog import CUT, count_items, find_wait, read_end
from tidemill.store.queries.dags.items.items import add_items, read_range, remove_items
from tidemill.store.queries.dags.items.stored_sources import StoredSources


class CutItems(msgspec.Struct, frozen=True):
    """The chunks of a map.

    Attributes:
        sources: The sources of the map.
        chunks: The number of chunks.
        due_us: When the unfinished chunk is cut at the latest; None: there is none.
    """

    sources: StoredSources
    chunks: int
    due_us: int | None = None


def cut_items(
    connection: Connection,
    head: int,
    mapped: MapStructure,
    sources: StoredSources,
    total: int,
    *,
    closed: bool,
    begins: bool,
    now_us: int,
) -> CutItems:
    """Cut the items that have arrived.

    Args:
        connection: A connection inside a transaction that holds the map.
        head: The head of the map.
        mapped: How it is mapped.
        sources: Its sources.
        total: The number of items.
        closed: Whether no further item arrives.
        begins: Whether the map opens now.
        now_us: The time.
    """
    chunk = mapped.chunk
    if chunk is None:
        return CutItems(sources, total)
    wait_us = find_wait(mapped, chunk)
    if wait_us is None:
        return CutItems(sources, count_chunks(total, chunk.max_items, closed=closed))
    if begins:
        remove_items(connection, [head], CUT)
    number = count_items(connection, head, CUT)
    end = read_end(connection, head, mapped, number)
    found = cut(total, end, chunk.max_items, wait_us, closed=closed, since_us=sources.since_us, now_us=now_us)
    if found.ends:
        add_items(connection, head, CUT, number, [str(one) for one in found.ends])
    return CutItems(msgspec.structs.replace(sources, since_us=found.since_us), number + len(found.ends), found.due_us)


def find_ranges(
    connection: Connection, head: int, mapped: MapStructure, total: int, chunks: Collection[int]
) -> dict[int, range]:
    """Return the items of chunks, by chunk. `total`: the number of items that have arrived."""
    assert mapped.chunk is not None
    if not chunks:
        return {}
    if find_wait(mapped, mapped.chunk) is None:
        return {one: locate_chunk(one, mapped.chunk.max_items, total) for one in chunks}
    first, last = min(chunks), max(chunks)
    ends = _read_ends(connection, head, first, last + 1)
    return {one: range(ends[one - first], ends[one - first + 1]) for one in chunks if one - first + 1 < len(ends)}


def _read_ends(connection: Connection, head: int, first: int, last: int) -> Sequence[int]:
    """Return the numbers of items before chunks, from `first` to `last`, as far as the chunks before them exist."""
    before = [0] if first == 0 else []
    start = max(first - 1, 0)
    return before + [int(text) for text in read_range(connection, head, CUT, start, last - start)]
