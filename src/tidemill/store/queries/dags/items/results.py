"""Reads and copies what the elements of mapped tasks returned: the items of maps over them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    Insert,
    Select,
    and_,
    bindparam,
    func,
    insert,
    literal,
    literal_column,
    select,
    union_all,
)

from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.dag_tables import map_item, task_instance, task_part, xcom
from tidemill.store.statements import Statement

_ITEM, _TASK, _PART, _XCOM = map_item.c, task_instance.c, task_part.c, xcom.c
_WANTED = RowSet("wanted_results", run=int, task_id=str, map_index=int, key=str)


def read_results(
    connection: Connection, run: int, task_id: str, key: str, indexes: Iterable[int], follower: str
) -> dict[int, tuple[str, bool]]:
    """Return the states in which a follower sees elements, and whether they have stored a value, by index.

    An element that has succeeded and skips the follower, as a branch does, is seen as skipped.
    """
    rows = [(run, task_id, index, key) for index in sorted(indexes)]
    if not rows:
        return {}
    given = _WANTED.build_parameters(find_dialect(connection), rows)
    found = {}
    for _, _, index, _, state, skips, stored in _results.fetch(connection, given, False):
        is_skipped = stored is not None and skips is not None and follower in json.loads(skips)
        found[index] = ("skipped" if is_skipped and state == "success" else state, stored is not None)
    return found


def read_values(
    connection: Connection, wanted: Collection[tuple[int, str, int, str]]
) -> dict[tuple[int, str, int, str], str]:
    """Return the XComs of elements that have succeeded, given as run, task, index and key."""
    if not wanted:
        return {}
    given = _WANTED.build_parameters(find_dialect(connection), sorted(wanted))
    return {
        (run, task, index, key): value
        for run, task, index, key, _, _, value in _results.fetch(connection, given, True)
        if value is not None
    }


@Statement
def _results(dialect: str, values: bool) -> Select[Any]:
    given = _WANTED.build_source(dialect)
    same = and_(_TASK.run == given.c.run, _TASK.task_id == given.c.task_id, _TASK.map_index == given.c.map_index)
    stored = and_(_XCOM.task == _TASK.id, _XCOM.key == given.c.key)
    columns = (given.c.run, given.c.task_id, given.c.map_index, given.c.key, _TASK.state, _TASK.skips)
    # With a join instead, a kept plan of PostgreSQL reads all XComs of each element.
    found = select(_XCOM.value if values else _XCOM.task).where(stored).scalar_subquery()
    return select(*columns, found).select_from(given).join(task_instance, same)


def copy_pairs(
    connection: Connection, parts: Sequence[Select[Any]], owners: Sequence[tuple[int, str]], *, fills: bool
) -> int:
    """Store the items of several sources as pairs with equal indexes, numbered without gaps; return their number.

    Args:
        connection: A connection inside a transaction.
        parts: By source, its items, as `select_results` and `items.select_items` return them.
        owners: By source, the task instance and the key to store its items under.
        fills: Whether a pair may lack items; these are not stored.
    """
    found = [
        select(literal_column(str(place)).label("part"), one.c.place, one.c.value)
        for place, one in enumerate(part.subquery() for part in parts)
    ]
    rows = union_all(*found).subquery()
    # Counted instead of joined: PostgreSQL would compare all items with each other.
    counted = select(rows, func.count().over(partition_by=rows.c.place).label("there")).subquery()
    least = 1 if fills else len(parts)
    pairs = select(counted).where(counted.c.there >= literal_column(str(least))).subquery()
    number = (func.dense_rank().over(order_by=pairs.c.place) - literal_column("1")).label("number")
    numbered = select(pairs.c.part, pairs.c.value, number).subquery()
    for place, (owner, key) in enumerate(owners):
        mine = literal(owner, _ITEM.task.type), literal(key, _ITEM.key.type)
        items = select(*mine, numbered.c.number, numbered.c.value).where(numbered.c.part == literal_column(str(place)))
        connection.execute(insert(map_item).from_select(["task", "key", "number", "value"], items))
    return int(connection.execute(select(func.count(pairs.c.place.distinct()))).scalar_one())


def select_results(run: int, task_id: str, key: str) -> Select[Any]:
    """Select what the elements of a map returned, by index."""
    stored = and_(_XCOM.task == _TASK.id, _XCOM.key == key)
    mine = and_(_TASK.run == run, _TASK.task_id == task_id, _TASK.map_index >= 0)
    rows = select(_TASK.map_index.label("place"), _XCOM.value).join(xcom, stored)
    return rows.where(and_(mine, _TASK.state == literal_column("'success'")))


def select_parts(run: int, task_id: str) -> Select[Any]:
    """Select what elements returned that ran in one attempt, by index."""
    only = and_(_TASK.run == run, _TASK.task_id == task_id, _TASK.map_index == literal_column("0"))
    done = and_(_PART.state == literal_column("'success'"), _PART.value.is_not(None))
    rows = select(_PART.number.label("place"), _PART.value).select_from(task_instance)
    return rows.join(task_part, _PART.task == _TASK.id).where(and_(only, done))


def copy_parts(connection: Connection, run: int, task_id: str, owner: int, owner_key: str) -> None:
    """Store the results of elements that ran in one attempt as items, numbered without gaps."""
    names = {"of_run": run, "of_task": task_id, "owner": owner, "owner_key": owner_key}
    _copy_parts.fetch(connection, names)


@Statement
def _copy_parts(dialect: str) -> Insert:
    mine = and_(_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task"))
    done = and_(_PART.state == literal_column("'success'"), _PART.value.is_not(None))
    rows = (
        select(
            bindparam("owner", type_=_ITEM.task.type).label("task"),
            bindparam("owner_key", type_=_ITEM.key.type).label("key"),
            (func.row_number().over(order_by=_PART.number) - literal_column("1")).label("number"),
            _PART.value,
        )
        .select_from(task_instance)
        .join(task_part, _PART.task == _TASK.id)
        .where(and_(mine, _TASK.map_index == literal_column("0"), done))
    )
    return insert(map_item).from_select(["task", "key", "number", "value"], rows)


def copy_results(connection: Connection, run: int, task_id: str, key: str, owner: int, owner_key: str) -> None:
    """Store what the elements of a map returned as items, numbered without gaps."""
    names = {"of_run": run, "of_task": task_id, "of_key": key, "owner": owner, "owner_key": owner_key}
    _copy.fetch(connection, names)


@Statement
def _copy(dialect: str) -> Insert:
    stored = and_(_XCOM.task == _TASK.id, _XCOM.key == bindparam("of_key"))
    mine = and_(_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task"), _TASK.map_index >= 0)
    rows = (
        select(
            bindparam("owner", type_=_ITEM.task.type).label("task"),
            bindparam("owner_key", type_=_ITEM.key.type).label("key"),
            (func.row_number().over(order_by=_TASK.map_index) - literal_column("1")).label("number"),
            _XCOM.value,
        )
        .select_from(task_instance)
        .join(xcom, stored)
        .where(and_(mine, _TASK.state == literal_column("'success'")))
    )
    return insert(map_item).from_select(["task", "key", "number", "value"], rows)
