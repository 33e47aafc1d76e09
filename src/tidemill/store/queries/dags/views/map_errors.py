"""Groups the failed elements of a mapped task by error.

Invariant: a statement reads at most as many elements as the caller asks for, by the index of failed elements, and of
each error only its end.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select, and_, bindparam, func, literal_column, select, text

from tidemill.store.calls.element_calls import ElementFailureCount, ElementFailures, GroupElementFailures
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import IS_BAD_ELEMENT, IS_LEFT_PART, task_instance, task_part
from tidemill.store.queries.dags.runs.runs import find_run
from tidemill.store.statements import Statement

_TASK, _PART = task_instance.c, task_part.c
#: The number of characters of an error that are read; its last line is at its end.
_END_CHARS = 400


def group_failures(connection: Connection, request: GroupElementFailures, context: CallContext) -> ElementFailures:
    """Group failed elements by error; see `GroupElementFailures`."""
    run = find_run(connection, request.dag_id, request.run_id)
    given = {"of_run": run, "of_task": request.task_id, "most": request.limit + 1}
    rows = _failures.fetch(connection, given)
    if [index for index, _, _ in rows] == [0]:
        # One attempt may have run all elements.
        rows = _failed_parts.fetch(connection, given) or rows
    found: dict[str, list[int]] = {}
    for index, state, error in rows[: request.limit]:
        found.setdefault(_find_last_line(state, error), []).append(index)
    groups = [ElementFailureCount(error, len(indexes), indexes[0]) for error, indexes in found.items()]
    groups.sort(key=lambda group: (-group.elements, group.first))
    return ElementFailures(tuple(groups), min(len(rows), request.limit), len(rows) > request.limit)


def _find_last_line(state: str, error: str | None) -> str:
    lines = (error or "").rstrip().rsplit("\n", 1)
    return lines[-1].strip() or state


@Statement
def _failures(dialect: str) -> Select[Any]:
    end = func.right(_TASK.error, _END_CHARS) if dialect == "postgresql" else func.substr(_TASK.error, -_END_CHARS)
    mine = and_(_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task"), text(IS_BAD_ELEMENT))
    rows = select(_TASK.map_index, _TASK.state, end).where(mine)
    return rows.order_by(_TASK.map_index).limit(bindparam("most"))


@Statement
def _failed_parts(dialect: str) -> Select[Any]:
    mine = and_(_TASK.run == bindparam("of_run"), _TASK.task_id == bindparam("of_task"))
    only = and_(mine, _TASK.map_index == literal_column("0"))
    failed = and_(_PART.state == literal_column("'failed'"), text(IS_LEFT_PART.replace("state", "task_part.state")))
    rows = select(_PART.number, _PART.state, _PART.error).join(task_instance, _TASK.id == _PART.task)
    return rows.where(and_(only, failed)).order_by(_PART.number).limit(bindparam("most"))
