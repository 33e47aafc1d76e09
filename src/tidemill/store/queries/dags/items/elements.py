"""Finds what attempts of elements of mapped tasks need: their items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Select, and_, select

from tidemill.core.tasks.instance import UNMAPPED
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.dag_tables import task_map
from tidemill.store.queries.dags.items.items import read_items
from tidemill.store.queries.dags.items.results import read_values
from tidemill.store.queries.dags.items.sources import locate_leaves
from tidemill.store.queries.dags.items.stored_sources import read_sources
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
