"""Stores lists that are larger than an XCom, in parts, as the items of the tasks that are mapped over them.

The XCom of such a list is a mark with its length; `GetValuePage` reads the values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Update, and_, bindparam, delete, update

from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.task_calls import StoreListPart
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import map_item
from tidemill.store.queries.dags.map_backlog import count_items
from tidemill.store.queries.dags.map_items import add_items, read_range
from tidemill.store.queries.dags.task_values import check_attempt
from tidemill.store.queries.dags.xcoms import find_fault
from tidemill.store.statements import Statement

_ITEM = map_item.c
_CHANGED = RowSet("changed_items", number=int, value=str)
#: What `dags.long_lists` writes.
_MARK = re.compile(r'\{"\$tidemill":"items","value":(\d+)\}')


def read_mark(text: str | None) -> int | None:
    """Return the length of a list that was stored in parts; None: the XCom has the value itself."""
    found = None if text is None else _MARK.fullmatch(text)
    return None if found is None else int(found[1])


def store_list_part(connection: Connection, request: StoreListPart, context: CallContext) -> None:
    """Store a part of a list; see `StoreListPart`."""
    for number, value in enumerate(request.values, request.first):
        fault = find_fault([(request.key, value)])
        if fault is not None:
            raise CallRefusedError(RefusalKind.INVALID, f"item {number} of the list cannot be stored: {fault}")
    check_attempt(connection, request.task, request.epoch)
    stored = count_items(connection, request.task, request.key)
    if request.first > stored:
        raise CallRefusedError(
            RefusalKind.INVALID, f"item {request.first} of the list follows item {stored - 1}: items are missing"
        )
    put_items(connection, request.task, request.key, request.first, request.values)
    end = request.first + len(request.values)
    if end >= request.total:
        cut_items(connection, request.task, request.key, request.total)


def put_items(connection: Connection, task: int, key: str, first: int, values: Sequence[str]) -> None:
    """Store items of a source from `first` on, in place of those that it has there; equal ones are left alone."""
    known = read_range(connection, task, key, first, len(values))
    changed = [
        (number, value)
        for number, (value, stored) in enumerate(zip(values, known, strict=False), first)
        if value != stored
    ]
    if changed:
        given = _CHANGED.build_parameters(find_dialect(connection), changed)
        _overwrite.fetch(connection, {**given, "item_task": task, "item_key": key})
    if len(values) > len(known):
        add_items(connection, task, key, first + len(known), values[len(known) :])


@Statement
def _overwrite(dialect: str) -> Update:
    given = _CHANGED.build_source(dialect)
    mine = and_(_ITEM.task == bindparam("item_task"), _ITEM.key == bindparam("item_key"))
    return update(map_item).where(and_(mine, _ITEM.number == given.c.number)).values(value=given.c.value)


def cut_items(connection: Connection, task: int, key: str, end: int) -> None:
    """Remove the items of a source from `end` on."""
    mine: list[Any] = [_ITEM.task == task, _ITEM.key == key, _ITEM.number >= end]
    connection.execute(delete(map_item).where(and_(*mine)))
