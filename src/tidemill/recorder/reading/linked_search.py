"""Finds messages by their tasks or errors (links), page by page and each message once.

Messages are ordered by their newest matching task or error, and among those of the same one by their resolution.

Invariants: a page never has more rows than requested; its cursor continues exactly after its last row; a message with
several links is found by the first of them only, on whichever page that was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from tidemill.core.recorder.cursor import Key
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.reading import event_search
from tidemill.recorder.reading.queries import EventQuery
from tidemill.recorder.reading.row_filter import KEY_KINDS, RowCriteria
from tidemill.recorder.reading.row_search import FoundRow
from tidemill.recorder.reading.segment_store import SegmentStore

Position: TypeAlias = tuple[str, int, int]
Kinds: TypeAlias = tuple[type[int] | type[str], ...]

#: A page reads at most this many batches of links; then it ends early, with a cursor.
_MAX_BATCHES = 10
#: The expected average number of rows per message, as some messages are reprocessed.
_ROWS_PER_MESSAGE = 4


class LinkedRow(msgspec.Struct, frozen=True):
    """A task or an error: its sort key, and the messages it belongs to."""

    key: Key
    positions: list[Position]


class Links(msgspec.Struct, frozen=True):
    """A source of links.

    Attributes:
        kinds: The types of their sort keys.
        find: Returns the next links after a sort key in order, up to a limit.
        find_earlier: Returns the messages that have a link at or before a sort key.
    """

    kinds: Kinds
    find: Callable[[Key | None, int], Sequence[LinkedRow]]
    find_earlier: Callable[[frozenset[Position], Key], set[Position]]


#: Returns the rows of messages at some positions in order, after a sort key if one is given, up to a limit.
FindRows: TypeAlias = Callable[[frozenset[Position], Key | None, int], list[FoundRow]]
#: Searches rows by criteria, up to a limit; returns the named columns, or all.
SearchRows: TypeAlias = Callable[[RowCriteria, int, Sequence[str] | None], list[FoundRow]]
_NO_LIMIT = 2**31


def link_tasks(criteria: RowCriteria, search: SearchRows) -> Links:
    """Return tasks as links to their messages.

    Args:
        criteria: Selects the tasks.
        search: Searches rows of tasks.
    """
    names = ["topic", "partition", "offsets"]

    def find(after: Key | None, limit: int) -> list[LinkedRow]:
        found = search(msgspec.structs.replace(criteria, after=after), limit, names)
        return [LinkedRow(each.key, _list_positions(each)) for each in found]

    def find_earlier(positions: frozenset[Position], until: Key) -> set[Position]:
        at = -int(until[0])
        since = at or None  # tasks without a time come last, so there is no lower bound
        here = msgspec.structs.replace(criteria, positions=positions, since_us=since)
        found = search(here, _NO_LIMIT, names)
        return {position for each in found if each.key <= until for position in _list_positions(each)}

    return Links(KEY_KINDS[RowTable.TASKS], find, find_earlier)


def link_events(stores: Sequence[SegmentStore], query: EventQuery, problems: list[str]) -> Links:
    """Return events as links to their messages.

    Args:
        stores: The stores to search.
        query: Selects the events.
        problems: Receives descriptions of data that cannot be read.
    """

    def find(after: Key | None, limit: int) -> list[LinkedRow]:
        return [
            LinkedRow(found.key, [_find_event_position(found)] if found.row.event.offset is not None else [])
            for found in event_search.search_events(stores, query, after, limit, problems)
        ]

    def find_earlier(positions: frozenset[Position], until: Key) -> set[Position]:
        return event_search.find_positions(stores, query, positions, until, problems)

    return Links(event_search.KEY_KINDS, find, find_earlier)


def make_first_key(kinds: Kinds) -> Key:
    """Return a sort key that precedes all others."""
    return (-(2**63 - 1), *("" if kind is str else 0 for kind in kinds[1:]))


def list_cursor_kinds(links: Links) -> Kinds:
    """Return the types of a cursor's values: the key of the last completed link, and the key of the last row."""
    return (*links.kinds, *KEY_KINDS[RowTable.MESSAGES])


def find_linked(
    links: Links, find_rows: FindRows, cursor: Key | None, limit: int
) -> tuple[list[FoundRow], Key | None, list[Key]]:
    """Return the rows of a page, the cursor of the next page (None if there is none), and a cursor after each row.

    Args:
        links: The source of links to messages.
        find_rows: Finds the rows of messages.
        cursor: The start of the page.
        limit: The maximum number of rows.
    """
    first = make_first_key(links.kinds)
    first_row = make_first_key(KEY_KINDS[RowTable.MESSAGES])
    # `over`: the last link whose rows have all been returned. `last`: the last returned row of the link after it.
    over, last = first, first_row
    if cursor is not None:
        over, last = cursor[: len(links.kinds)], cursor[len(links.kinds) :]
    rows: list[FoundRow] = []
    keys: list[Key] = []
    for _ in range(_MAX_BATCHES):
        batch = links.find(None if over == first else over, limit + 1)
        groups = _group(links, list(batch[:limit]), None if over == first else over)
        has_more = len(batch) > limit
        found = _find_batch(groups, find_rows, last, limit)
        has_more |= len(found) < len(groups)
        for (key, _), mine in zip(groups, found, strict=False):
            room = limit - len(rows)
            rows += mine[:room]
            keys += [(*over, *row.key) for row in mine[:room]]
            if len(mine) > room:
                return rows, (keys[-1] if room else (*over, *last)), keys
            over, last = key, first_row
        if not has_more:
            return rows, None, keys
        # the page is full; the next one may be empty, because finding out would need another search
        if len(rows) == limit:
            break
    return rows, (*over, *last), keys


def _group(links: Links, batch: Sequence[LinkedRow], over: Key | None) -> list[tuple[Key, frozenset[Position]]]:
    """Return for each link the messages that no earlier link leads to."""
    positions = frozenset(position for link in batch for position in link.positions)
    seen = links.find_earlier(positions, over) if over is not None and positions else set[Position]()
    groups = []
    for link in batch:
        groups.append((link.key, frozenset(link.positions) - seen))
        seen.update(link.positions)
    return groups


def _find_batch(
    groups: Sequence[tuple[Key, frozenset[Position]]], find_rows: FindRows, last: Key, limit: int
) -> list[list[FoundRow]]:
    """Return the rows of the first groups, as many groups as one search can cover; those of the first group only after
    `last`.
    """
    count = len(groups)
    while count > 1:
        positions = frozenset[Position]().union(*(own for _, own in groups[:count]))
        most = _ROWS_PER_MESSAGE * len(positions) + 1
        found = find_rows(positions, None, most) if positions else []
        if len(found) < most:
            break
        count = (count + 1) // 2  # some messages were reprocessed very often, so search fewer groups
    else:
        return [find_rows(own, last, limit + 1) if own else [] for _, own in groups[:1]]
    told = [[row for row in found if _find_position(row) in own] for _, own in groups[:count]]
    return [[row for row in told[0] if row.key > last], *told[1:]]


def _find_position(found: FoundRow) -> Position:
    row = found.row
    return row["topic"], row["partition"], row["offset"]


def _list_positions(found: FoundRow) -> list[Position]:
    row = found.row
    return [(row["topic"], row["partition"], offset) for offset in row["offsets"] or ()]


def _find_event_position(found: event_search.FoundEvent) -> Position:
    event = found.row.event
    return event.topic or "", event.partition or 0, event.offset or 0
