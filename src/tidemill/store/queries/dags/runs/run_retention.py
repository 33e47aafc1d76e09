"""Removes old finished runs with all their data, and the DAG versions that no run uses.

Invariants: retention never removes an unfinished run, the last runs of a DAG, or a run that a task of a later run may
still depend on (`depends_on_past`). Each transaction locks one run and removes a bounded number of its rows. The data
of many tasks is removed page by page, so that the cost of a transaction does not grow with the number of elements. The
rows of the run and its tasks are removed last, in one transaction, so a visible run always has all its tasks. A run
that is cleared in the meantime stays.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, Table, and_, delete, exists, func, select, tuple_

from tidemill.store.dag_tables import (
    dag,
    dag_run,
    dag_version,
    map_identity,
    map_item,
    task_callback,
    task_instance,
    task_iteration,
    task_journal,
    task_log,
    task_map,
    task_part,
    task_state,
    xcom,
)
from tidemill.store.queries.dags.runs.progress import ACTIVE
from tidemill.store.tables import (
    trigger,
    trigger_cursor,
    trigger_death,
    trigger_event,
    trigger_identity,
    trigger_stream,
)

#: The number of runs examined per transaction.
PAGE = 500
#: The number of tasks whose data is removed together, in a run that has more.
TASKS = 500
#: The maximum number of DAG versions removed per transaction.
VERSIONS = 100
_ENDED = ("success", "failed")
_RUN, _TASK, _VERSION = dag_run.c, task_instance.c, dag_version.c
#: The tables with data of tasks and the rows to remove per transaction: a log part may be 64 KiB, an XCom or an item of
#: a mapped task 1 MiB.
_OF_TASKS = (
    (task_log, 200),
    (xcom, 50),
    (map_item, 50),
    (map_identity, 1_000),
    (task_state, 50),
    (task_part, 50),
    (task_iteration, 1_000),
    (task_journal, 2_000),
)
_OF_TRIGGERS = (
    (trigger_stream, 1_000),
    (trigger_event, 1_000),
    (trigger_identity, 1_000),
    (trigger_death, 1_000),
    (trigger_cursor, 1_000),
)


class RunRemoval(enum.Enum):
    """The result of a transaction. PART: the run has more rows; DONE: it was removed; KEPT: it must not be removed."""

    PART = "part"
    DONE = "done"
    KEPT = "kept"


#: A task instance of a run: task and map index.
TaskName = tuple[str, int]


class RemovedPart(NamedTuple):
    """The result of `remove_part`. `after`: the task after which the next transaction goes on; None: at the first."""

    removal: RunRemoval
    after: TaskName | None = None


class SeenRun(NamedTuple):
    """An examined run. `dag`: its DAG; `old`: whether it ended before the given time."""

    run: int
    dag: int
    old: bool


class RunRetentionPage(NamedTuple):
    """A page of examined runs.

    Attributes:
        seen: The runs, in the order of their creation.
        next: The run after which the next page starts; None: all later runs are too young.
    """

    seen: list[SeenRun]
    next: int | None


def count_runs(connection: Connection) -> dict[int, int]:
    """Return the number of runs per DAG."""
    return dict(connection.execute(select(_RUN.dag, func.count()).group_by(_RUN.dag)).all())


def find_guarded(connection: Connection) -> set[int]:
    """Return the runs that unfinished runs may depend on: per DAG, the run before its first unfinished one."""
    first = (
        select(_RUN.dag, func.min(_RUN.logical_us).label("logical_us"))
        .where(and_(_RUN.id.in_(select(ACTIVE.c.id)), _RUN.logical_us.is_not(None)))
        .group_by(_RUN.dag)
        .subquery()
    )
    before = (
        select(first.c.dag, func.max(_RUN.logical_us).label("logical_us"))
        .join(dag_run, and_(_RUN.dag == first.c.dag, _RUN.logical_us < first.c.logical_us))
        .group_by(first.c.dag)
        .subquery()
    )
    same = and_(_RUN.dag == before.c.dag, _RUN.logical_us == before.c.logical_us)
    return set(connection.execute(select(_RUN.id).join(before, same)).scalars())


def look_at_runs(connection: Connection, before_us: int, after: int, limit: int = PAGE) -> RunRetentionPage:
    """Examine the runs that were created before a time, oldest first.

    Args:
        connection: A connection inside a transaction.
        before_us: The time, in UTC microseconds since the epoch.
        after: `RunRetentionPage.next` of the previous page; 0 for the first page.
        limit: The maximum number of runs.
    """
    columns = select(_RUN.id, _RUN.dag, _RUN.state, _RUN.ended_us, _RUN.created_us)
    rows = connection.execute(columns.where(_RUN.id > after).order_by(_RUN.id).limit(limit)).all()
    seen = [SeenRun(row.id, row.dag, _is_old(row, before_us)) for row in rows if row.created_us < before_us]
    return RunRetentionPage(seen, rows[-1].id if len(seen) == limit else None)


def _is_old(row: Any, before_us: int) -> bool:
    return row.state in _ENDED and row.ended_us is not None and row.ended_us < before_us


def remove_part(connection: Connection, run: int, before_us: int, after: TaskName | None = None) -> RemovedPart:
    """Remove a bounded part of a run and finally the run itself; call it until the run is removed.

    Args:
        connection: A connection inside a transaction.
        run: The run.
        before_us: Remove it only if it ended before this time, in UTC microseconds since the epoch.
        after: `RemovedPart.after` of the previous transaction.
    """
    statement = select(_RUN.state, _RUN.ended_us).where(_RUN.id == run).with_for_update(skip_locked=True)
    row = connection.execute(statement).first()
    busy = exists().where(and_(task_callback.c.run == run, task_callback.c.state.in_(("due", "kill", "running"))))
    if row is None or not _is_old(row, before_us) or connection.execute(select(busy)).scalar():
        return RemovedPart(RunRemoval.KEPT)
    page = _fetch_page(connection, run, after)
    if len(page) == TASKS or (page and after is not None):
        left = _remove_data(connection, [number for number, *_ in page])
        return RemovedPart(RunRemoval.PART, after if left else page[-1][1:])
    # The last look finds what was stored meanwhile for tasks of earlier pages.
    if _remove_data(connection, select(_TASK.id).where(_TASK.run == run)):
        return RemovedPart(RunRemoval.PART, after)
    connection.execute(delete(trigger).where(trigger.c.task_id.in_(select(_TASK.id).where(_TASK.run == run))))
    connection.execute(delete(task_callback).where(task_callback.c.run == run))
    connection.execute(delete(task_map).where(task_map.c.run == run))
    connection.execute(delete(task_instance).where(_TASK.run == run))
    connection.execute(delete(dag_run).where(_RUN.id == run))
    return RemovedPart(RunRemoval.DONE)


def _fetch_page(connection: Connection, run: int, after: TaskName | None) -> list[tuple[int, str, int]]:
    """Return the next tasks of a run, as id, task and map index."""
    mine = _TASK.run == run
    if after is not None:
        mine = and_(mine, tuple_(_TASK.task_id, _TASK.map_index) > tuple_(*after))
    statement = select(_TASK.id, _TASK.task_id, _TASK.map_index).where(mine)
    rows = connection.execute(statement.order_by(_TASK.task_id, _TASK.map_index).limit(TASKS))
    return [(number, task_id, map_index) for number, task_id, map_index in rows]


def _remove_data(connection: Connection, tasks: Select[tuple[int]] | list[int]) -> bool:
    """Remove data of tasks; return whether there may be more."""
    return any(_remove_rows(connection, table, limit, condition) for table, limit, condition in _list_parts(tasks))


def _list_parts(tasks: Select[tuple[int]] | list[int]) -> Iterator[tuple[Table, int, Any]]:
    for table, limit in _OF_TASKS:
        yield table, limit, table.c.task.in_(tasks)
    triggers = select(trigger.c.id).where(trigger.c.task_id.in_(tasks))
    for table, limit in _OF_TRIGGERS:
        yield table, limit, table.c.trigger_id.in_(triggers)


def _remove_rows(connection: Connection, table: Table, limit: int, condition: Any) -> bool:
    """Remove rows; return whether there may be more."""
    keys = list(table.primary_key.columns)
    some = select(*keys).where(condition).limit(limit)
    removed = connection.execute(delete(table).where(tuple_(*keys).in_(some))).rowcount
    return removed >= limit


def remove_callback_logs(connection: Connection, before_us: int) -> bool:
    """Remove old log parts of callbacks of whole runs; return whether there may be more."""
    return _remove_rows(connection, task_log, 200, and_(task_log.c.task == 0, task_log.c.first_us < before_us))


def remove_versions(connection: Connection, before_us: int) -> int:
    """Remove old DAG versions that are not current and that no run uses; return their number."""
    current = select(dag.c.version_id)
    old = select(_VERSION.id).where(and_(_VERSION.created_us < before_us, _VERSION.id.not_in(current)))
    # Collects the used versions in one pass over all runs, because no index covers the version.
    unused = old.where(_VERSION.id.not_in(select(_RUN.version_id).distinct())).limit(VERSIONS)
    found = list(connection.execute(unused).scalars())
    if found:
        connection.execute(delete(dag_version).where(_VERSION.id.in_(found)))
    return len(found)
