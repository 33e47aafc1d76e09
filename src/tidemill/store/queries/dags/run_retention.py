"""Removes runs that ended long ago, with all that belongs to them, and the versions of DAGs that no run needs.

Invariants: a run that has not ended is never touched, nor the last ones of each DAG, nor one that a task of a later run
may still wait for (`depends_on_past`); a transaction removes a bounded number of rows, of one run, whose row it has
locked. The row of a run and those of its tasks go last, in one transaction, so that a run that can be seen has all its
tasks; one that is cleared meanwhile stays.
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
    task_callback,
    task_instance,
    task_journal,
    task_log,
    task_state,
    xcom,
)
from tidemill.store.queries.dags.progress import ACTIVE
from tidemill.store.tables import trigger, trigger_cursor, trigger_event, trigger_identity

#: How many runs are looked at in one transaction.
PAGE = 500
#: How many versions of DAGs one transaction removes.
VERSIONS = 100
_ENDED = ("success", "failed")
_RUN, _TASK, _VERSION = dag_run.c, task_instance.c, dag_version.c
#: What tasks leave, with how many rows of it one transaction removes: a part of a log may have 64 KiB, an XCom 1 MiB.
_OF_TASKS = ((task_log, 200), (xcom, 50), (task_state, 50), (task_journal, 2_000))
_OF_TRIGGERS = ((trigger_event, 1_000), (trigger_identity, 1_000), (trigger_cursor, 1_000))


class Removal(enum.Enum):
    """What a transaction has done. PART: there is more of the run; DONE: it is gone; KEPT: it may not be removed."""

    PART = "part"
    DONE = "done"
    KEPT = "kept"


class Seen(NamedTuple):
    """A run that was looked at. `dag`: its DAG; `old`: whether it ended before the time."""

    run: int
    dag: int
    old: bool


class Page(NamedTuple):
    """What a look at some runs has found.

    Attributes:
        seen: The runs, in the order in which they were created.
        next: The number of the run to go on after; None: all that follow are younger.
    """

    seen: list[Seen]
    next: int | None


def count_runs(connection: Connection) -> dict[int, int]:
    """Return how many runs each DAG has."""
    return dict(connection.execute(select(_RUN.dag, func.count()).group_by(_RUN.dag)).all())


def find_guarded(connection: Connection) -> set[int]:
    """Return the runs that one which has not ended may look back to: in each DAG the one before the first of those."""
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


def look_at_runs(connection: Connection, before_us: int, after: int, limit: int = PAGE) -> Page:
    """Look at the runs that were created before a time, oldest first.

    Args:
        connection: In a transaction.
        before_us: The time, in UTC microseconds since the epoch.
        after: `Page.next` of the page before; 0: there was none.
        limit: How many runs are looked at.
    """
    columns = select(_RUN.id, _RUN.dag, _RUN.state, _RUN.ended_us, _RUN.created_us)
    rows = connection.execute(columns.where(_RUN.id > after).order_by(_RUN.id).limit(limit)).all()
    seen = [Seen(row.id, row.dag, _is_old(row, before_us)) for row in rows if row.created_us < before_us]
    return Page(seen, rows[-1].id if len(seen) == limit else None)


def _is_old(row: Any, before_us: int) -> bool:
    return row.state in _ENDED and row.ended_us is not None and row.ended_us < before_us


def remove_part(connection: Connection, run: int, before_us: int) -> Removal:
    """Remove a bounded part of a run, at last the run itself; to be called until it is gone.

    Args:
        connection: In a transaction.
        run: The run.
        before_us: Only if it ended before this time, in UTC microseconds since the epoch.
    """
    statement = select(_RUN.state, _RUN.ended_us).where(_RUN.id == run).with_for_update(skip_locked=True)
    row = connection.execute(statement).first()
    busy = exists().where(and_(task_callback.c.run == run, task_callback.c.state.in_(("due", "running"))))
    if row is None or not _is_old(row, before_us) or connection.execute(select(busy)).scalar():
        return Removal.KEPT
    if any(_remove_rows(connection, table, limit, condition) for table, limit, condition in _list_parts(run)):
        return Removal.PART
    connection.execute(delete(trigger).where(trigger.c.task_id.in_(_select_tasks(run))))
    connection.execute(delete(task_callback).where(task_callback.c.run == run))
    connection.execute(delete(task_instance).where(_TASK.run == run))
    connection.execute(delete(dag_run).where(_RUN.id == run))
    return Removal.DONE


def _select_tasks(run: int) -> Select[tuple[int]]:
    return select(_TASK.id).where(_TASK.run == run)


def _list_parts(run: int) -> Iterator[tuple[Table, int, Any]]:
    tasks = _select_tasks(run)
    for table, limit in _OF_TASKS:
        yield table, limit, table.c.task.in_(tasks)
    triggers = select(trigger.c.id).where(trigger.c.task_id.in_(tasks))
    for table, limit in _OF_TRIGGERS:
        yield table, limit, table.c.trigger_id.in_(triggers)


def _remove_rows(connection: Connection, table: Table, limit: int, condition: Any) -> bool:
    """Remove rows, and return whether there may be more."""
    keys = list(table.primary_key.columns)
    some = select(*keys).where(condition).limit(limit)
    removed = connection.execute(delete(table).where(tuple_(*keys).in_(some))).rowcount
    return removed >= limit


def remove_callback_logs(connection: Connection, before_us: int) -> bool:
    """Remove what callbacks of runs as a whole wrote before a time; return whether there may be more."""
    return _remove_rows(connection, task_log, 200, and_(task_log.c.task == 0, task_log.c.first_us < before_us))


def remove_versions(connection: Connection, before_us: int) -> int:
    """Remove versions of DAGs from before a time that are not the last ones, and that no run has; return how many."""
    current = select(dag.c.version_id)
    old = select(_VERSION.id).where(and_(_VERSION.created_us < before_us, _VERSION.id.not_in(current)))
    # All that runs have, in one pass: there is no index by version.
    unused = old.where(_VERSION.id.not_in(select(_RUN.version_id).distinct())).limit(VERSIONS)
    found = list(connection.execute(unused).scalars())
    if found:
        connection.execute(delete(dag_version).where(_VERSION.id.in_(found)))
    return len(found)
