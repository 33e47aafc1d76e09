"""Measures how far generators are ahead of the maps over them, and lets those that wait go on.

Invariant: a generator does not wait for a map that waits for the generator's own end.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, Select, and_, bindparam, cast, func, literal_column, select, text

from tidemill.core.tasks.backlog import MAX_BACKLOG, Consumer, ItemBacklog, count_taken
from tidemill.core.tasks.chunks import count_chunks
from tidemill.core.tasks.inputs import Unblocked
from tidemill.core.tasks.structure import ChunkStructure, MapStructure
from tidemill.core.tasks.task_row import ENDED
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.context import CallContext
from tidemill.store.dag_plan import DagPlan, TaskPlan
from tidemill.store.dag_tables import (
    IS_BLOCKED,
    IS_LEFT_PART,
    dag_run,
    dag_version,
    map_item,
    task_instance,
    task_iteration,
    task_map,
    task_part,
)
from tidemill.store.queries.dags.items.stored_sources import StoredSources, read_sources
from tidemill.store.queries.dags.state.task_rows import COLUMNS, load_plan
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.queries.isolation import work_on_runs
from tidemill.store.queries.triggers.cursors import IDS, SKIPPED, build_id_rows
from tidemill.store.statements import Statement

#: The key of the items of a generator, which is the key of its XCom.
YIELDED = "return_value"
#: The end of the key of the note that says how many items a generator has yielded since it was cleared.
AGAIN = "\x1fagain"
#: The key of the ends of the chunks of a map; a param or an XCom has no such name.
CUT = "\x1fcut"
_ITEM, _TASK, _MAP = map_item.c, task_instance.c, task_map.c
_FED = RowSet("fed", task_id=str)
#: The number of waiting generators that a turn looks at; each costs about five statements.
MOST_SOURCES = 50
#: A prime: the remainders of ids are in another order for each seed.
_SPREAD = 10007
_ENDED = frozenset(state.value for state in ENDED)


class MeasuredParts(NamedTuple):
    """What the sources of a map with many items per element have given.

    Attributes:
        items: The number of items, or of combinations of them.
        parts: The number of chunks; without chunks, that of items.
        closed: Whether no further ones arrive.
    """

    items: int
    parts: int
    closed: bool


def measure_parts(
    connection: Connection, head: int, mapped: MapStructure, sources: StoredSources, *, closed: bool
) -> MeasuredParts:
    """Return what the sources of a map have given.

    Args:
        connection: A connection inside a transaction.
        head: The head of the map.
        mapped: How it is mapped.
        sources: Its sources.
        closed: Whether the map is closed, and has cut its last chunk.
    """
    place = next((place for place, factor in enumerate(mapped.factors) if factor.kind == "generator"), None)
    items = prod(length for number, length in enumerate(sources.factors) if number != place)
    if place is None:
        closed = True
    else:
        owner = sources.owners[sum(len(factor.leaves) for factor in mapped.factors[:place])]
        assert owner is not None
        # Its end is read first: what it yields before is counted.
        ((state,),) = _state.fetch(connection, {"of_source": owner[0]})
        items *= count_items(connection, owner[0], YIELDED)
        if mapped.chunk is None or mapped.chunk.max_wait_us is None:
            closed = state in _ENDED
    if mapped.chunk is None:
        return MeasuredParts(items, items, closed)
    if find_wait(mapped, mapped.chunk) is None:
        return MeasuredParts(items, count_chunks(items, mapped.chunk.max_items, closed=closed), closed)
    return MeasuredParts(items, count_items(connection, head, CUT), closed)


def measure_elements(connection: Connection, run: int, task_id: str, mapped: MapStructure) -> MeasuredParts:
    """Return what the sources of a mapped task have given; nothing before its map opens."""
    ((head, closed, text),) = _opened.fetch(connection, {"of_run": run, "of_task": task_id})
    sources = read_sources(text)
    if not sources.factors:
        return MeasuredParts(0, 0, closed=False)
    return measure_parts(connection, head, mapped, sources, closed=bool(closed))


@Statement
def _state(dialect: str) -> Select[Any]:
    return select(_TASK.state).where(_TASK.id == bindparam("of_source"))


class Consumers(NamedTuple):
    """The maps over a generator in one run.

    Attributes:
        maps: Their progress.
        max_items: The number of items that may be stored ahead of them.
        wants: Whether one of them still takes items.
    """

    maps: tuple[Consumer, ...]
    max_items: int
    wants: bool

    def measure(self, connection: Connection, task: int) -> ItemBacklog:
        """Return how far the generator is ahead. `task`: its instance."""
        yielded = count_items(connection, task, YIELDED)
        taken = count_taken(yielded, self.maps)
        if taken == yielded:
            return ItemBacklog()
        size = read_size(connection, task, YIELDED, yielded) - read_size(connection, task, YIELDED, taken)
        return ItemBacklog(yielded - taken, size)


def find_consumers(connection: Connection, plan: DagPlan, run: int, name: str) -> Consumers:
    """Return the maps over a generator, given by its name."""
    given = _FED.build_parameters(find_dialect(connection), [(fed,) for fed in plan.tasks[name].feeds])
    rows = _maps.fetch(connection, {"of_run": run, **given})
    maps = []
    for task_id, opened, closed, created, stop, sources, _, state, head in rows:
        mapped = plan.tasks[task_id].structure.mapped
        if mapped is not None and mapped.iterated:
            created = _count_seen(connection, run, task_id)
        if mapped is not None and mapped.chunk is not None:
            created = _count_chunked(connection, head, created, mapped)
        # A map whose sources run again takes no item before all its lists are there once more.
        is_open = bool(opened) and not read_sources(sources).stale
        maps.append(
            Consumer(
                created,
                _count_per_item(plan, task_id, name, sources),
                not is_open and _waits_for_end(plan, name, task_id),
                is_open,
                stop is not None or bool(closed) or state in _ENDED,
            )
        )
    most = min((row[6] or MAX_BACKLOG for row, one in zip(rows, maps, strict=True) if one.counts), default=MAX_BACKLOG)
    return Consumers(tuple(maps), most, any(row[4] is None and row[7] not in _ENDED for row in rows))


def _count_seen(connection: Connection, run: int, task_id: str) -> int:
    """Return how many elements an attempt that runs all of them has read."""
    rows = _seen.fetch(connection, {"of_run": run, "of_task": task_id})
    return int(rows[0][0]) if rows else 0


@Statement
def _seen(dialect: str) -> Select[Any]:
    mine = and_(_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task"))
    only = and_(mine, _TASK.map_index == literal_column("0"))
    return select(task_iteration.c.seen).join(task_instance, _TASK.id == task_iteration.c.task).where(only)


def _count_chunked(connection: Connection, head: int, chunks: int, mapped: MapStructure) -> int:
    """Return the number of items in the first chunks of a map and in the one that is filled after them."""
    assert mapped.chunk is not None
    return read_end(connection, head, mapped, chunks) + mapped.chunk.max_items


def read_end(connection: Connection, head: int, mapped: MapStructure, chunks: int) -> int:
    """Return the number of items in the first chunks of a map; the last one may have fewer."""
    assert mapped.chunk is not None
    if find_wait(mapped, mapped.chunk) is None or not chunks:
        return chunks * mapped.chunk.max_items
    ((end,),) = _end.fetch(connection, {"of_head": head, "of_key": CUT, "place": chunks - 1})
    return int(end)


def find_wait(mapped: MapStructure, chunk: ChunkStructure) -> int | None:
    """Return how long the items of a map wait for others; None: until a chunk is full, or there are no more items."""
    return chunk.max_wait_us if any(factor.kind == "generator" for factor in mapped.factors) else None


@Statement
def _end(dialect: str) -> Select[Any]:
    mine = and_(_ITEM.task == bindparam("of_head"), _ITEM.key == bindparam("of_key"))
    return select(_ITEM.value).where(and_(mine, _ITEM.number == bindparam("place")))


def _count_per_item(plan: DagPlan, task_id: str, generator: str, sources: str | None) -> int:
    """Return the number of elements that a map has for each item of a generator."""
    mapped = plan.tasks[task_id].structure.mapped
    if mapped is None or sources is None:
        return 1
    lengths = zip(mapped.factors, read_sources(sources).factors, strict=False)
    return prod(length for factor, length in lengths if (factor.kind, factor.task) != ("generator", generator))


def _waits_for_end(plan: DagPlan, generator: str, task_id: str) -> bool:
    """Return whether a map depends on the generator by another task, which waits for the generator's end.

    A mapped group opens once its tasks are decided, and so it depends on what they depend on.
    """
    others = [name for name in plan.tasks[generator].downstream if name != task_id]
    after = {*others, *plan.list_downstream(others)}
    return not after.isdisjoint((task_id, *plan.groups.get(task_id, ())))


@Statement
def _maps(dialect: str) -> Select[Any]:
    fed = and_(_MAP.run == bindparam("of_run"), _FED.build_match(dialect, "task_id", _MAP.task_id))
    columns = (_MAP.task_id, _MAP.opened, _MAP.closed, _MAP.created, _MAP.stop, _MAP.sources, _MAP.max_backlog)
    return select(*columns, _TASK.state, _MAP.task).join(task_instance, _TASK.id == _MAP.task).where(fed)


def count_items(connection: Connection, task: int, key: str) -> int:
    """Return the number of items of a source; of a generator that was cleared, those that it has yielded since."""
    return count_yielded(connection, task, key)[0]


def count_yielded(connection: Connection, task: int, key: str) -> tuple[int, bool]:
    """Return the number of items of a source, and whether it is a generator that was cleared and yields again."""
    ((since, stored),) = _count.fetch(connection, {"item_task": task, "item_key": key, "again_key": key + AGAIN})
    return (int(stored), False) if since is None else (int(since), True)


@Statement
def _count(dialect: str) -> Select[Any]:
    mine = and_(_ITEM.task == bindparam("item_task"), _ITEM.key == bindparam("item_key"))
    again = and_(_ITEM.task == bindparam("item_task"), _ITEM.key == bindparam("again_key"))
    since = select(cast(_ITEM.value, BigInteger)).where(again).scalar_subquery()
    return select(since, select(func.coalesce(func.max(_ITEM.number), -1) + 1).where(mine).scalar_subquery())


def read_sizes(connection: Connection, task: int, key: str, first: int, last: int) -> dict[int, int]:
    """Return the sizes of items with all items before each of them, from `first` to `last`."""
    given = {"item_task": task, "item_key": key, "first": first, "last": last}
    return dict(_sizes.fetch(connection, given))


@Statement
def _sizes(dialect: str) -> Select[Any]:
    # Not joined with a set of numbers: SQLite would read all items of the source.
    mine = and_(_ITEM.task == bindparam("item_task"), _ITEM.key == bindparam("item_key"))
    wanted = and_(mine, _ITEM.number >= bindparam("first"), _ITEM.number <= bindparam("last"))
    return select(_ITEM.number, _ITEM.size_up_to).where(wanted)


def read_size(connection: Connection, task: int, key: str, number: int) -> int:
    """Return the size of the first `number` items."""
    return 0 if number == 0 else read_sizes(connection, task, key, number - 1, number - 1)[number - 1]


def unblock_sources(connection: Connection, context: CallContext, by: str, skip: Collection[int] = ()) -> int:
    """Let generators that wait become candidates for slots, once little enough is stored ahead; return their number.

    Each turn looks at a part of them if there are many.
    """
    given: dict[str, Any] = {"seed": context.now_us % _SPREAD, "most": MOST_SOURCES}
    if skip:
        given |= SKIPPED.build_parameters(find_dialect(connection), build_id_rows(skip))
    rows = [_Waiting(*row) for row in _full.fetch(connection, given, bool(skip))]

    def unblock(sources: list[_Waiting]) -> int:
        ready = [one.id for one in sources if _may_go_on(connection, one, context.now_us)]
        if not ready:
            return 0
        board = Board(connection, context)
        free = lock_free.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(ready)))
        context.skipped = context.skipped or len(free) < len(ready)
        for entry in board.take(free):
            board.give(entry, Unblocked(entry.row.epoch), by)
        board.flush()
        return board.moved

    return work_on_runs(connection, context, [(one.run, one) for one in rows], unblock)


class _Waiting(NamedTuple):
    id: int
    run: int
    task_id: str


def has_room(connection: Connection, run: int, task: int, task_id: str) -> bool:
    """Return whether a generator that waits may go on.

    Args:
        connection: A connection inside a transaction.
        run: The run.
        task: The instance of the task.
        task_id: Its name.
    """
    consumers = find_consumers(connection, _load_plan(connection, run), run, task_id)
    return consumers.measure(connection, task).has_room(consumers.max_items)


def _may_go_on(connection: Connection, one: _Waiting, now_us: int) -> bool:
    """Return whether a generator that waits, or an attempt that waits for elements, may go on."""
    plan = _load_plan(connection, one.run).tasks[one.task_id]
    mapped = plan.structure.mapped
    if mapped is not None and mapped.iterated:
        return _has_elements(connection, one.run, one.id, plan, mapped, now_us)
    return has_room(connection, one.run, one.id, one.task_id)


def _load_plan(connection: Connection, run: int) -> DagPlan:
    ((version, digest),) = _version.fetch(connection, {"of_run": run})
    return load_plan(connection, version, digest)


def _has_elements(
    connection: Connection, run: int, task: int, plan: TaskPlan, mapped: MapStructure, now_us: int
) -> bool:
    """Return whether a source has given more elements than an attempt has read or has closed, or a retry is due."""
    found = measure_elements(connection, run, plan.structure.id, mapped)
    if found.closed or found.parts > _count_seen(connection, run, plan.structure.id):
        return True
    return bool(_due_part.fetch(connection, {"of_task": task, "since": now_us - plan.structure.retry_delay_us}))


@Statement
def _due_part(dialect: str) -> Select[Any]:
    mine = and_(task_part.c.task == bindparam("of_task"), text(IS_LEFT_PART))
    failed = and_(task_part.c.state == literal_column("'up_for_retry'"), task_part.c.ended_us <= bindparam("since"))
    return select(task_part.c.number).where(and_(mine, failed)).limit(literal_column("1"))


@Statement
def _opened(dialect: str) -> Select[Any]:
    mine = and_(_MAP.run == bindparam("of_run"), _MAP.task_id == bindparam("of_task"))
    return select(_MAP.task, _MAP.closed, _MAP.sources).where(mine)


@Statement
def _full(dialect: str, skips: bool) -> Select[Any]:
    full: list[Any] = [text(IS_BLOCKED), _TASK.block == literal_column("1")]
    if skips:
        full.append(_TASK.run.not_in(select(SKIPPED.build_source(dialect).c.id)))
    # In another order each time, so that those that cannot go on do not hide others.
    order = (_TASK.id * literal_column("7919") + bindparam("seed")) % literal_column(str(_SPREAD))
    statement = select(_TASK.id, _TASK.run, _TASK.task_id).where(and_(*full))
    return statement.order_by(order, _TASK.id).limit(bindparam("most"))


@Statement
def _version(dialect: str) -> Select[Any]:
    of_run = dag_run.c.id == bindparam("of_run")
    same = dag_version.c.id == dag_run.c.version_id
    return select(dag_version.c.id, dag_version.c.digest).join(dag_run, same).where(of_run)


@Statement
def lock_free(dialect: str) -> Select[Any]:
    """Build the statement that locks tasks; those that another transaction has locked wait for the next turn."""
    wanted = select(IDS.build_source(dialect).c.id)
    return select(*COLUMNS).where(_TASK.id.in_(wanted)).order_by(_TASK.id).with_for_update(skip_locked=True)
