"""Finds what attempts of elements of mapped tasks need: their items; and whether elements have run with these.

Theory of operation: an attempt that begins notes the digest of its items, in the transaction that reads them and locks
the element. A step that compares an element locks it too, so it sees the items that the attempt has, or the attempt
sees those that the step has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, and_, select

from tidemill.core.tasks.comparison import compute_digest, has_to_run_again
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.structure import MapStructure
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.dag_tables import task_map
from tidemill.store.queries.dags.items.items import find_changes, read_items
from tidemill.store.queries.dags.items.results import read_values
from tidemill.store.queries.dags.items.sources import locate_leaves
from tidemill.store.queries.dags.items.stored_sources import StoredSources, read_sources
from tidemill.store.queries.dags.state.task_rows import TaskEntry
from tidemill.store.statements import Statement

_MAP = task_map.c
_MAPS = RowSet("element_maps", run=int, task_id=str)


def find_elements(connection: Connection, entries: Sequence[TaskEntry]) -> dict[int, dict[str, Any]]:
    """Return the fields of `ClaimedAttempt` about the items of elements, by element; other tasks are left out."""
    elements = [entry for entry in entries if entry.map_index != UNMAPPED]
    names = sorted({(entry.run.id, entry.plan.mapped_group or entry.task_id) for entry in elements})
    if not names:
        return {}
    rows = _maps.fetch(connection, _MAPS.build_parameters(find_dialect(connection), names))
    maps = {
        (run, name): (read_sources(sources), arrived if closed else None)
        for run, name, sources, arrived, closed in rows
    }
    wanted: dict[int, list[tuple[int, str, int] | None]] = {}
    indexes: dict[int, tuple[int, ...]] = {}
    followed: dict[int, tuple[int, str, int, str]] = {}
    for entry in elements:
        name = entry.plan.mapped_group or entry.task_id
        mapped = entry.run.plan.tasks[name].structure.mapped
        sources, _ = maps.get((entry.run.id, name), (read_sources(None), None))
        if mapped is None:
            continue
        source = entry.plan.structure.follows
        if source is not None:
            followed[entry.id] = (entry.run.id, source, entry.map_index, mapped.factors[0].key)
            continue
        if not sources.factors:
            continue
        if mapped.chunk is not None or mapped.iterated:
            indexes[entry.id], wanted[entry.id] = (), []  # the attempt reads them
            continue
        indexes[entry.id] = locate_leaves(mapped, sources, entry.map_index)
        wanted[entry.id] = [
            None if owner is None or number < 0 else (*owner, number)
            for owner, number in zip(sources.owners, indexes[entry.id], strict=True)
        ]
    items = read_items(connection, {one for leaves in wanted.values() for one in leaves if one is not None})
    values = read_values(connection, set(followed.values()))
    of_followers: dict[int, dict[str, Any]] = {
        entry.id: {
            "elements": (values.get(followed[entry.id]),),
            "leaf_indexes": (entry.map_index,),
            "map_length": maps[entry.run.id, entry.task_id][1],
        }
        for entry in elements
        if entry.id in followed
    }
    return of_followers | {
        entry.id: {
            "elements": tuple(None if one is None else items.get(one) for one in wanted[entry.id]),
            "leaf_indexes": indexes[entry.id],
            "map_length": (
                None if entry.plan.iterated else maps[entry.run.id, entry.plan.mapped_group or entry.task_id][1]
            ),
        }
        for entry in elements
        if entry.id in wanted
    }


@Statement
def _maps(dialect: str) -> Select[Any]:
    given = _MAPS.build_source(dialect)
    same = and_(_MAP.run == given.c.run, _MAP.task_id == given.c.task_id)
    return select(_MAP.run, _MAP.task_id, _MAP.sources, _MAP.arrived, _MAP.closed).join(given, same)


def note_items(entries: Iterable[TaskEntry], found: Mapping[int, Mapping[str, Any]]) -> None:
    """Note the items with which attempts of elements begin. `found`: the answer of `find_elements`."""
    for entry in entries:
        fields = found.get(entry.id)
        if fields is None or entry.row.resume is not None or entry.plan.structure.follows is not None:
            continue
        items = fields["elements"]
        if any(item is not None for item in items):
            entry.items_digest = compute_digest(items, fields["leaf_indexes"])


def find_differing(
    connection: Connection, mapped: MapStructure, sources: StoredSources, elements: Mapping[int, Sequence[TaskEntry]]
) -> set[int]:
    """Return the indexes of the elements that have to run again with the items that they have now.

    Args:
        connection: A connection inside a transaction that has locked the elements.
        mapped: How the task, or the mapped group, is mapped.
        sources: Its sources.
        elements: By index, an element, or the unit of a group and its tasks, which run again together.
    """
    places = {index: locate_leaves(mapped, sources, index) for index in elements}
    wanted = {
        index: [
            None if owner is None or number < 0 else (*owner, number)
            for owner, number in zip(sources.owners, numbers, strict=True)
        ]
        for index, numbers in places.items()
    }
    items = read_items(connection, {one for leaves in wanted.values() for one in leaves if one is not None})
    unknown = {index for index, found in elements.items() if all(one.items_digest is None for one in found)}
    changes = find_changes(connection, {one for index in unknown for one in wanted[index] if one is not None})
    differing = set()
    for index, found in elements.items():
        digest = compute_digest([None if one is None else items.get(one) for one in wanted[index]], places[index])
        changed_us = max((changes.get(one, -1) for one in wanted[index] if one is not None), default=-1)
        for one in found:
            changed = index in unknown and changed_us >= one.since_us
            if has_to_run_again(one.row, one.items_digest, digest, changed=changed):
                differing.add(index)
    return differing
