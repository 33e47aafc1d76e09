"""The queues of maps that follow other maps element by element: the indexes of elements that have ended.

A queue is the rows of `map_item` under the head of the follower: one for each element of the other map that has ended
and that the follower has not looked at yet. It is the follower's backlog; see `maps.follow`.

Invariants: an index says only that the element has ended at some time. Rows of queues are locked after elements and
before maps; an element that ends locks its row even if it is there already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Delete,
    Executable,
    Select,
    Text,
    and_,
    bindparam,
    delete,
    exists,
    func,
    literal,
    literal_column,
    or_,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.core.tasks.task_row import STATES
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.dag_tables import map_item, task_instance, task_map, xcom
from tidemill.store.statements import Statement

#: The key of the rows of a queue.
QUEUE = "ended"
_ITEM, _TASK, _MAP, _XCOM = map_item.c, task_instance.c, task_map.c, xcom.c
_ENDED = tuple(sorted(state.value for state in STATES.values()))
_PASSED = RowSet("passed", run=int, task_id=str, number=int)
_NUMBERS = RowSet("numbers", number=int)
_MINE = and_(_ITEM.task == bindparam("follower"), _ITEM.key == literal_column(f"'{QUEUE}'"))


def read_queue(connection: Connection, head: int, limit: int) -> list[int]:
    """Return the lowest indexes in the queue of a follower, without locking them."""
    return [number for (number,) in _queue.fetch(connection, {"follower": head, "most": limit})]


@Statement
def _queue(dialect: str) -> Select[Any]:
    return select(_ITEM.number).where(_MINE).order_by(_ITEM.number).limit(bindparam("most"))


def count_queue(connection: Connection, head: int, run: int, source: str, key: str) -> int:
    """Return how many elements a follower would have for the indexes in its queue.

    Args:
        connection: A connection inside a transaction.
        head: The head of the follower.
        run: The run.
        source: The task that it follows.
        key: The key of the XComs that are its items.
    """
    given = {"follower": head, "of_run": run, "of_task": source, "of_key": key}
    ((number,),) = _count.fetch(connection, given)
    return int(number)


@Statement
def _count(dialect: str) -> Select[Any]:
    mine = and_(_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task"))
    stored = and_(_XCOM.task == _TASK.id, _XCOM.key == bindparam("of_key"))
    ended: list[Any] = [literal_column(f"'{state}'") for state in _ENDED if state != "success"]
    appears = or_(_TASK.state.in_(ended), and_(_TASK.state == literal_column("'success'"), exists().where(stored)))
    same = and_(mine, _TASK.map_index == _ITEM.number)
    statement = select(func.count()).select_from(map_item).join(task_instance, same)
    return statement.where(and_(_MINE, appears))


def lock_queue(connection: Connection, head: int, numbers: Sequence[int]) -> list[int]:
    """Lock indexes in the queue of a follower, except those that another transaction is adding; return them."""
    given = _NUMBERS.build_parameters(find_dialect(connection), [(number,) for number in numbers])
    return [number for (number,) in _lock.fetch(connection, {**given, "follower": head})]


@Statement
def _lock(dialect: str) -> Select[Any]:
    # With a join instead, both databases read the whole queue.
    statement = select(_ITEM.number).where(and_(_MINE, _NUMBERS.build_match(dialect, "number", _ITEM.number)))
    return statement.order_by(_ITEM.number).with_for_update(of=map_item, skip_locked=True)


def remove_queued(connection: Connection, head: int, numbers: Sequence[int]) -> None:
    """Remove locked indexes from the queue of a follower."""
    if not numbers:
        return
    given = _NUMBERS.build_parameters(find_dialect(connection), [(number,) for number in numbers])
    _remove.fetch(connection, {**given, "follower": head})


@Statement
def _remove(dialect: str) -> Delete:
    return delete(map_item).where(and_(_MINE, _NUMBERS.build_match(dialect, "number", _ITEM.number)))


def pass_on(connection: Connection, ended: Iterable[tuple[int, str, int]]) -> None:
    """Add indexes to the queues of followers; given are run and follower, and the index of an element that ended."""
    given = _PASSED.build_parameters(find_dialect(connection), sorted(ended))
    _pass_on.fetch(connection, given)


@Statement
def _pass_on(dialect: str) -> Executable:
    given = _PASSED.build_source(dialect)
    same = and_(_MAP.run == given.c.run, _MAP.task_id == given.c.task_id)
    rows = select(_MAP.task, *_build_constants(), given.c.number).join(given, same).where(literal(1) == 1)
    statement = _insert(dialect)(map_item).from_select(["task", "key", "value", "number"], rows)
    # A conflict changes nothing, but locks the row.
    new = {"value": statement.excluded.value}
    return statement.on_conflict_do_update(index_elements=["task", "key", "number"], set_=new)  # type: ignore[no-any-return]


def queue_all(connection: Connection, head: int, run: int, source: str, end: int) -> None:
    """Add all elements of a mapped task below an index that have ended to the queue of a follower."""
    given = {"of_run": run, "of_task": source, "end": end, "follower": head}
    _queue_all.fetch(connection, given)


@Statement
def _queue_all(dialect: str) -> Executable:
    mine = and_(_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task"))
    ended = _TASK.state.in_([literal_column(f"'{state}'") for state in _ENDED])
    there = and_(_TASK.map_index >= 0, _TASK.map_index < bindparam("end", type_=BigInteger()))
    rows = select(
        bindparam("follower", type_=_ITEM.task.type).label("task"), *_build_constants(), _TASK.map_index
    ).where(and_(mine, there, ended))
    statement = _insert(dialect)(map_item).from_select(["task", "key", "value", "number"], rows)
    return statement.on_conflict_do_nothing()  # type: ignore[no-any-return]


def _build_constants() -> tuple[Any, Any]:
    return literal(QUEUE, Text()).label("key"), literal("", Text()).label("value")


def _insert(dialect: str) -> Any:
    return postgresql.insert if dialect == "postgresql" else sqlite.insert
