"""Tasks that depend on the previous run: `depends_on_past` and `wait_for_downstream`.

The previous run is the one with the latest earlier logical date; a run without a logical date has none. Its row is
locked while its tasks are read. The transaction that ends one of these tasks marks the waiting tasks of the next run
(`mark_pending`), and the scheduler decides them again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Select, and_, or_, select, update

from tidemill.core.tasks.task_row import TaskState
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.dag_tables import dag_run, task_instance
from tidemill.store.queries.dags.task_rows import RunEntry, TaskEntry

_NAMES = RowSet("past_names", run=int, task_id=str)
_DONE = (TaskState.SUCCESS.value, TaskState.SKIPPED.value)
_RUN, _TASK = dag_run.c, task_instance.c


def is_past_done(connection: Connection, entry: TaskEntry) -> bool:
    """Return whether the previous run allows a task to run."""
    structure = entry.plan.structure
    if not (structure.depends_on_past or structure.wait_for_downstream):
        return True
    names = [entry.task_id]
    if structure.wait_for_downstream:
        names += [name for name, kinds in entry.plan.successors if 0 in kinds]
    before = _find_before(connection, entry.run)
    if before is None:
        return True
    statement = select(_TASK.id).where(and_(_TASK.run == before, _TASK.task_id.in_(names), _TASK.state.not_in(_DONE)))
    return connection.execute(statement.limit(1)).first() is None


def _find_before(connection: Connection, run: RunEntry) -> int | None:
    if run.logical_us is None:
        return None
    earlier = and_(_RUN.dag == run.dag, _RUN.logical_us < run.logical_us)
    statement: Select[Any] = select(_RUN.id).where(earlier).order_by(_RUN.logical_us.desc()).limit(1)
    # Lock the run, so that we either see a task that is ending there, or its transaction sees this run.
    statement = statement.with_for_update(read=True)
    found = connection.execute(statement).scalar()
    return None if found is None else int(found)


def find_next_tasks(connection: Connection, entry: TaskEntry) -> list[tuple[int, str]]:
    """Return the tasks of the next run that may have waited for this one, as run and name."""
    run, structure = entry.run, entry.plan.structure
    names = [entry.task_id] if structure.depends_on_past or structure.wait_for_downstream else []
    names += [name for name in structure.upstream if run.plan.tasks[name].structure.wait_for_downstream]
    if not names or run.logical_us is None:
        return []
    later = and_(_RUN.dag == run.dag, _RUN.logical_us > run.logical_us)
    found = connection.execute(select(_RUN.id).where(later).order_by(_RUN.logical_us).limit(1)).scalar()
    return [] if found is None else [(int(found), name) for name in names]


def mark_pending(connection: Connection, names: Collection[tuple[int, str]]) -> None:
    """Mark tasks of other runs, given as run and name, for the scheduler to decide again."""
    if not names:
        return
    dialect = find_dialect(connection)
    given = _NAMES.build_source(dialect)
    same = or_(and_(_TASK.run == given.c.run, _TASK.task_id == given.c.task_id))
    waiting = and_(same, _TASK.state == TaskState.NONE.value)
    connection.execute(update(task_instance).where(waiting).values(pending=1), _NAMES.build_parameters(dialect, names))
