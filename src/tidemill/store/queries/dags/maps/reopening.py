"""Opens maps again whose sources were cleared, and compares their elements with the items that the sources give now.

Theory of operation: a map whose source is cleared stays as it is, with all its elements. Once the source gives items
again, a step locks the next elements and compares them (`find_differing`): one whose items differ is ended and cleared,
so that it waits for the window like every cleared element. A step that clears any compares the same elements once
more, so that `compared` counts only elements that are settled. Elements beyond the new end are removed.

Invariant: a map is open until all its elements are compared, and those beyond its end have exited.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection

from tidemill.core.tasks.dependencies import TaskOutcome
from tidemill.core.tasks.expansion import Arrived, Look, MapInput, SourceAgain, SourceEnded, find_uncompared
from tidemill.core.tasks.structure import MapStructure
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.queries.dags.items.sources import look_at_sources, open_sources
from tidemill.store.queries.dags.items.stored_sources import read_sources, write_sources
from tidemill.store.queries.dags.state.map_rows import StoredMap
from tidemill.store.queries.dags.state.task_rows import TaskEntry

_FAILURES = (TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED)


def has_comparable_items(mapped: MapStructure | None) -> bool:
    """Whether the elements of a map can be compared with new items; those of chunks, loops and groups cannot."""
    if mapped is None or mapped.chunk is not None or mapped.iterated or mapped.loop is not None:
        return False
    return not any(leaf.kind == "group" for leaf in mapped.leaves)


def can_reopen(head: TaskEntry, stored: StoredMap) -> bool:
    """Whether a map stays as it is when one of its sources is cleared; otherwise it starts over."""
    structure = head.plan.structure
    if structure.follows is not None or not has_comparable_items(structure.mapped):
        return False
    return stored.row.opened and (head.row.state is TaskState.MAPPED or head.row.outcome is not None)


def begin_again(stored: StoredMap, failed: int) -> tuple[StoredMap, tuple[MapInput, ...]]:
    """Open a map again whose source was cleared; return it, and what it has to be fed.

    Args:
        stored: The map.
        failed: The number of its elements that failed with their upstream.
    """
    sources = msgspec.structs.replace(read_sources(stored.sources), stale=True)
    stored = stored._replace(sources=write_sources(sources), error=None, swept=False)
    return stored, (SourceAgain(failed),)


def look_again(
    connection: Connection, head: TaskEntry, stored: StoredMap, now_us: int
) -> tuple[StoredMap, tuple[MapInput, ...]]:
    """Return what a map has to be fed whose source runs again, and the map with its sources once they are known."""
    sources = read_sources(stored.sources)
    if sources.stale:
        opened = open_sources(connection, head, now_us, cuts=False)
        if opened is None:
            return stored, (Look(),)
        if opened.outcome is not None and not opened.sources.factors:
            # Until they are removed, and after a failure, the elements have the items of before.
            return stored._replace(error=opened.error or None), (SourceEnded(opened.outcome, 0),)
        sources, total, outcome = opened.sources, opened.arrived, opened.outcome
    else:
        total, outcome = look_at_sources(connection, head, sources)
    inputs: tuple[MapInput, ...] = (Arrived(total),)
    if outcome is not None:
        inputs += (SourceEnded(outcome, total),)
        # A source that failed may be marked as a success; then what it has given is compared.
        sources = msgspec.structs.replace(sources, stale=outcome in _FAILURES)
    return stored._replace(sources=write_sources(sources)), inputs


def find_marked_again(
    connection: Connection, head: TaskEntry, stored: StoredMap, now_us: int, failed: int
) -> tuple[StoredMap, tuple[MapInput, ...]] | None:
    """Return the same for a map whose source failed when it ran again, and was marked as a success since; None: not so.

    Args:
        connection: A connection inside a transaction.
        head: The head of the map.
        stored: The map.
        now_us: The database's time.
        failed: The number of its elements that failed with their upstream.
    """
    again, inputs = look_again(connection, head, stored, now_us)
    ends = [one.outcome for one in inputs if isinstance(one, SourceEnded)]
    if not ends or ends[0] in _FAILURES:
        return None
    return again._replace(error=None), (SourceAgain(failed), *inputs)


def find_next(connection: Connection, head: TaskEntry, stored: StoredMap) -> range:
    """Return the indexes of the elements that can be compared now."""
    row = stored.row
    if row.compared is None or (sources := read_sources(stored.sources)).stale:
        return range(0)
    total = row.arrived if row.closed else look_at_sources(connection, head, sources)[0]
    return find_uncompared(row, total)
