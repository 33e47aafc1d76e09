"""Measures how far generators are ahead of the maps over them, and lets those that wait go on.

Invariant: a generator does not wait for a map that waits for the generator's own end.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, Select, and_, bindparam, cast, func, literal_column, select, text

from tidemill.core.tasks.backlog import MAX_BACKLOG, Consumer, ItemBacklog, count_taken
from tidemill.core.tasks.inputs import Unblocked
from tidemill.core.tasks.task_row import ENDED
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.context import CallContext
from tidemill.store.dag_plan import DagPlan
from tidemill.store.dag_tables import IS_BLOCKED, dag_run, dag_version, map_item, task_instance, task_map
from tidemill.store.queries.dags.stored_sources import read_sources
from tidemill.store.queries.dags.task_rows import COLUMNS, load_plan
from tidemill.store.queries.dags.transition import Board
from tidemill.store.queries.isolation import work_on_runs
from tidemill.store.queries.triggers.cursors import IDS, SKIPPED, build_id_rows
from tidemill.store.statements import Statement

#: The key of the items of a generator, which is the key of its XCom.
YIELDED = "return_value"
#: The end of the key of the note that says how many items a generator has yielded since it was cleared.
AGAIN = "\x1fagain"
_ITEM, _TASK, _MAP = map_item.c, task_instance.c, task_map.c
_FED = RowSet("fed", task_id=str)
_ENDED = frozenset(state.value for state in ENDED)


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
    for task_id, opened, closed, created, stop, sources, _, state in rows:
        maps.append(
            Consumer(
                created,
                _count_per_item(plan, task_id, name, sources),
                not opened and _waits_for_end(plan, name, task_id),
                bool(opened),
                stop is not None or bool(closed) or state in _ENDED,
            )
        )
    most = min((row[6] or MAX_BACKLOG for row, one in zip(rows, maps, strict=True) if one.counts), default=MAX_BACKLOG)
    return Consumers(tuple(maps), most, any(row[4] is None and row[7] not in _ENDED for row in rows))


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
    given = _FED.build_source(dialect)
    same = and_(_MAP.run == bindparam("of_run"), _MAP.task_id == given.c.task_id)
    columns = (_MAP.task_id, _MAP.opened, _MAP.closed, _MAP.created, _MAP.stop, _MAP.sources, _MAP.max_backlog)
    return select(*columns, _TASK.state).join(given, same).join(task_instance, _TASK.id == _MAP.task)


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
    """Let generators that wait become candidates for slots, once little enough is stored ahead; return their number."""
    given = SKIPPED.build_parameters(find_dialect(connection), build_id_rows(skip)) if skip else {}
    rows = [_Waiting(*row) for row in _full.fetch(connection, given, bool(skip))]

    def unblock(sources: list[_Waiting]) -> int:
        ready = [one.id for one in sources if has_room(connection, one.run, one.id, one.task_id)]
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
    """Return whether a generator that waits may go on. `task`: its instance; `task_id`: its name."""
    ((version, digest),) = _version.fetch(connection, {"of_run": run})
    consumers = find_consumers(connection, load_plan(connection, version, digest), run, task_id)
    return consumers.measure(connection, task).has_room(consumers.max_items)


@Statement
def _full(dialect: str, skips: bool) -> Select[Any]:
    full: list[Any] = [text(IS_BLOCKED), _TASK.block == literal_column("1")]
    if skips:
        full.append(_TASK.run.not_in(select(SKIPPED.build_source(dialect).c.id)))
    # In the order of their index: by the id alone, SQLite would read all tasks.
    return select(_TASK.id, _TASK.run, _TASK.task_id).where(and_(*full)).order_by(_TASK.pool, _TASK.block, _TASK.id)


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
