"""Reads the values of mapped tasks and generators in pages: lazy sequences are built on it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Connection, Select, and_, case, func, literal_column, select

from tidemill.core.tasks.instance import UNMAPPED
from tidemill.store.calls.task_calls import GetValuePage, ValuePage
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import map_item, task_instance, task_iteration, task_map, task_part, xcom
from tidemill.store.queries.dags.items.backlog import YIELDED, count_items
from tidemill.store.queries.dags.items.conf_lists import find_list
from tidemill.store.queries.dags.values.xcoms import find_read_run

_ITEM, _MAP, _TASK, _XCOM, _PART = map_item.c, task_map.c, task_instance.c, xcom.c, task_part.c
#: The limits of a page.
MAX_VALUES = 1_000
MAX_CHARACTERS = 8 << 20
#: Values are read in steps of this many, because each may have a megabyte, unless they are short on average.
_STEP, _SHORT = 50, 4_000
_NO_END = literal_column(str(1 << 62), BigInteger())


def get_value_page(connection: Connection, request: GetValuePage, context: CallContext) -> ValuePage:
    """Return a page of stored values; see `GetValuePage`."""
    run = find_read_run(connection, request.run, request.dag_id, request.run_id)
    if run is None:
        return ValuePage(0 if request.count else None, ())
    items = _find_items(connection, run.id, request)
    iteration = _find_iteration(connection, run.id, request) if items is None else None
    statement = (
        (_select_results(run.id, request) if iteration is None else _select_parts(iteration))
        if items is None
        else _select_items(*items, YIELDED if request.task_id else request.key)
    )
    values = _read_page(connection, statement, request)
    if not request.count:
        return ValuePage(None, values)
    if iteration is not None:
        total = connection.execute(_select_parts(iteration).with_only_columns(func.count()).order_by(None)).scalar_one()
    else:
        total = _count_results(connection, run.id, request) if items is None else items[1]
    return ValuePage(total, values)


def _find_items(connection: Connection, run: int, request: GetValuePage) -> tuple[int, int] | None:
    """Return the instance of a task that has items, and their number; None: the task is mapped, or has none."""
    if not request.task_id:
        owner = find_list(connection, run, request.key)
        return (0, 0) if owner is None else (owner, count_items(connection, owner, request.key))
    index = UNMAPPED if request.map_index is None else request.map_index
    mine = and_(_TASK.run == run, _TASK.task_id == request.task_id, _TASK.map_index == index)
    found = connection.execute(select(_TASK.id).where(mine)).scalar()
    if found is None or request.key != YIELDED:
        return None if request.map_index is None else (0, 0)
    number = count_items(connection, found, YIELDED)
    return (int(found), number) if number or request.map_index is not None else None


def _find_iteration(connection: Connection, run: int, request: GetValuePage) -> int | None:
    """Return the instance whose attempts run all elements of a task; None: each element has its own attempts."""
    if request.key != YIELDED or request.map_index is not None:
        return None
    only = and_(_TASK.run == run, _TASK.task_id == request.task_id, _TASK.map_index == 0)
    same = task_iteration.c.task == _TASK.id
    found = connection.execute(select(_TASK.id).join(task_iteration, same).where(only)).scalar()
    return None if found is None else int(found)


def _select_parts(task: int) -> Select[Any]:
    mine = and_(_PART.task == task, _PART.state == literal_column("'success'"), _PART.value.is_not(None))
    return select(_PART.number.label("position"), _PART.value.label("value")).where(mine).order_by(_PART.number)


def _select_items(task: int, number: int, key: str) -> Select[Any]:
    # A generator that was cleared still has items of its last time, beyond what it has yielded since.
    mine = and_(_ITEM.task == task, _ITEM.key == key, _ITEM.number < number)
    return select(_ITEM.number.label("position"), _ITEM.value.label("value")).where(mine).order_by(_ITEM.number)


def _select_results(run: int, request: GetValuePage) -> Select[Any]:
    stored = and_(_XCOM.task == _TASK.id, _XCOM.key == request.key)
    return (
        select(_TASK.map_index.label("position"), _XCOM.value.label("value"))
        .join(xcom, stored)
        .where(_are_results(run, request.task_id))
        .order_by(_TASK.map_index)
    )


def _are_results(run: int, task_id: str) -> Any:
    # After the map started over, it has not reached the elements from `created` on: they have results of its former
    # life. A map that follows another one has removed those when it opened; its indexes have gaps.
    end = case((and_(_MAP.made == 0, _MAP.sources.is_not(None)), _NO_END), else_=_MAP.created)
    known = select(end).where(and_(_MAP.run == run, _MAP.task_id == task_id)).scalar_subquery()
    elements = and_(_TASK.run == run, _TASK.task_id == task_id, _TASK.map_index >= 0, _TASK.map_index < known)
    return and_(elements, _TASK.state == literal_column("'success'"))


def _count_results(connection: Connection, run: int, request: GetValuePage) -> int:
    stored = and_(_XCOM.task == _TASK.id, _XCOM.key == request.key)
    statement = select(func.count()).select_from(task_instance).join(xcom, stored)
    return int(connection.execute(statement.where(_are_results(run, request.task_id))).scalar_one())


def _read_page(connection: Connection, statement: Select[Any], request: GetValuePage) -> tuple[tuple[int, str], ...]:
    limit = min(request.limit, MAX_VALUES)
    position = statement.selected_columns["position"]
    values: list[tuple[int, str]] = []
    characters, after, offset = 0, request.after, request.offset
    while len(values) < limit:
        # The first values tell whether they are short.
        is_short = values and characters < len(values) * _SHORT
        size = min(limit - len(values), MAX_VALUES if is_short else _STEP)
        found = connection.execute(statement.where(position > after).offset(offset).limit(size)).all()
        for number, value in found:
            if values and characters + len(value) > MAX_CHARACTERS:
                return tuple(values)
            values.append((number, value))
            characters += len(value)
        if len(found) < size:
            break
        after, offset = values[-1][0], 0
    return tuple(values)
