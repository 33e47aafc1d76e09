"""Reads the items of elements that have many: those of chunks, and of elements that run in one attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, and_, bindparam, select

from tidemill.core.tasks.structure import MapStructure
from tidemill.store.calls.task_calls import GetChunkItems, MapItem
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import dag_run, dag_version, task_instance, task_map
from tidemill.store.queries.dags.items.backlog import measure_parts
from tidemill.store.queries.dags.items.chunks import find_ranges
from tidemill.store.queries.dags.items.items import read_items
from tidemill.store.queries.dags.items.sources import locate_leaves
from tidemill.store.queries.dags.items.stored_sources import StoredSources, read_sources
from tidemill.store.queries.dags.state.task_rows import load_plan
from tidemill.store.statements import Statement

_MAP, _TASK = task_map.c, task_instance.c
#: The limits of a page. Items are read in steps, because each may have a megabyte, unless they are short on average.
MAX_ITEMS = 1_000
MAX_CHARACTERS = 8 << 20
_STEP, _SHORT = 50, 4_000


class ElementSources(NamedTuple):
    """What is known of an element and its map.

    Attributes:
        place: Its index.
        run: Its run.
        head: The head of the map.
        closed: Whether the map is closed.
        mapped: How the task is mapped.
        sources: The sources of the map.
    """

    place: int
    run: int
    head: int
    closed: bool
    mapped: MapStructure
    sources: StoredSources


def get_chunk_items(connection: Connection, request: GetChunkItems, context: CallContext) -> tuple[MapItem, ...]:
    """Return items of a chunk; see `GetChunkItems`."""
    one = find_sources(connection, request.task)
    if one is None or one.mapped.chunk is None:
        return ()
    number = one.place if request.part is None else request.part
    total = measure_parts(connection, one.head, one.mapped, one.sources, closed=one.closed).items
    numbers = find_ranges(connection, one.head, one.mapped, total, (number,)).get(number, range(0))
    left = numbers[max(0, request.after + 1 - numbers.start) :]
    return read_page(connection, one, left[: min(request.limit, MAX_ITEMS)])


def read_page(connection: Connection, one: ElementSources, numbers: Sequence[int]) -> tuple[MapItem, ...]:
    """Return the items with these numbers up to 8 MiB, at least one."""
    found: list[MapItem] = []
    characters = 0
    while len(found) < len(numbers):
        is_short = found and characters < len(found) * _SHORT
        for item in _read_step(connection, one, numbers[len(found) :][: MAX_ITEMS if is_short else _STEP]):
            size = sum(len(text) for text in item.elements if text is not None)
            if found and characters + size > MAX_CHARACTERS:
                return tuple(found)
            characters += size
            found.append(item)
    return tuple(found)


def _read_step(connection: Connection, one: ElementSources, numbers: Sequence[int]) -> list[MapItem]:
    places = [locate_leaves(one.mapped, one.sources, number) for number in numbers]
    wanted = [
        [
            None if owner is None or place < 0 else (*owner, place)
            for owner, place in zip(one.sources.owners, row, strict=True)
        ]
        for row in places
    ]
    texts = read_items(connection, {key for row in wanted for key in row if key is not None})
    return [
        MapItem(number, row, tuple(None if key is None else texts.get(key) for key in keys))
        for number, row, keys in zip(numbers, places, wanted, strict=True)
    ]


def find_sources(connection: Connection, task: int) -> ElementSources | None:
    """Return what is known of an element; None: its map has not found its sources."""
    rows = _element.fetch(connection, {"of_element": task})
    if not rows:
        return None
    name, index, run, head, closed, sources, version, digest = rows[0]
    mapped = load_plan(connection, version, digest).tasks[name].structure.mapped
    found = read_sources(sources)
    if mapped is None or not found.factors:
        return None
    return ElementSources(index, run, head, bool(closed), mapped, found)


@Statement
def _element(dialect: str) -> Select[Any]:
    same = and_(_MAP.run == _TASK.run, _MAP.task_id == _TASK.task_id)
    own = (_TASK.task_id, _TASK.map_index, _TASK.run, _MAP.task, _MAP.closed, _MAP.sources)
    version = select(dag_run.c.version_id).where(dag_run.c.id == _TASK.run).scalar_subquery()
    return (
        select(*own, dag_version.c.id, dag_version.c.digest)
        .join(task_map, same)
        .join(dag_version, dag_version.c.id == version)
        .where(_TASK.id == bindparam("of_element"))
    )
