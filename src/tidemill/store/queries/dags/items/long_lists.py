"""Stores lists that are larger than an XCom, in parts, as the items of the tasks that are mapped over them.

The XCom of such a list is a mark with its length; `GetValuePage` reads the values.
"""

from __future__ import annotations

from sqlalchemy import Connection

from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.task_calls import StoreListPart
from tidemill.store.context import CallContext
from tidemill.store.queries.dags.items.backlog import count_items
from tidemill.store.queries.dags.items.items import cut_items, put_items
from tidemill.store.queries.dags.values.task_values import check_attempt
from tidemill.store.queries.dags.values.xcoms import find_fault


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
    put_items(connection, request.task, request.key, request.first, request.values, context.now_us)
    end = request.first + len(request.values)
    if end >= request.total:
        cut_items(connection, request.task, request.key, request.total)
