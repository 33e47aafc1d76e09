"""Tasks that depend on the previous run: `depends_on_past` and `wait_for_downstream`.

The previous run is the one with the latest earlier logical date; a run without a logical date has none. Its row is
locked while its tasks are read. The transaction that ends one of these tasks marks the waiting tasks of the next run
(`mark_pending`), and the scheduler decides them again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Connection, FromClause, Select, and_, bindparam, literal_column, select, update

from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.dag_tables import dag_run, task_instance
from tidemill.store.queries.dags.state.task_rows import InstanceKey, RunEntry, TaskEntry
from tidemill.store.statements import Statement

_KEYS = RowSet("past_keys", run=int, task_id=str, map_index=int)
_DONE = (TaskState.SUCCESS.value, TaskState.SKIPPED.value)
_RUN, _TASK = dag_run.c, task_instance.c


def is_past_done(connection: Connection, entry: TaskEntry) -> bool | None:
    """Return whether the previous run allows a task to run; None: another transaction has locked that run."""
    structure = entry.plan.structure
    if not (structure.depends_on_past or structure.wait_for_downstream):
        return True
    before = _find_before(connection, entry.run)
    if before is None:
        return True
    # So that we either see a task that is ending there, or its transaction sees this run. It does not wait: that
    # transaction may wait for the task that is decided here.
    if not _lock_before.fetch(connection, {"before": before}):
        return None
    keys = [(before, entry.task_id, entry.map_index)]
    if structure.wait_for_downstream:
        keys += [(before, name, UNMAPPED) for name in entry.plan.downstream]
    return not _unfinished.fetch(connection, _KEYS.build_parameters(find_dialect(connection), keys))


@Statement
def _unfinished(dialect: str) -> Select[Any]:
    given = _KEYS.build_source(dialect)
    unfinished = _TASK.state.not_in([literal_column(f"'{state}'") for state in _DONE])
    return select(_TASK.id).join(given, _is_same(given)).where(unfinished).limit(literal_column("1"))


def _is_same(given: FromClause) -> ColumnElement[bool]:
    return and_(_TASK.run == given.c.run, _TASK.task_id == given.c.task_id, _TASK.map_index == given.c.map_index)


def _find_before(connection: Connection, run: RunEntry) -> int | None:
    if run.logical_us is None:
        return None
    earlier = and_(_RUN.dag == run.dag, _RUN.logical_us < run.logical_us)
    found = connection.execute(select(_RUN.id).where(earlier).order_by(_RUN.logical_us.desc()).limit(1)).scalar()
    return None if found is None else int(found)


@Statement
def _lock_before(dialect: str) -> Select[Any]:
    return select(_RUN.id).where(_RUN.id == bindparam("before")).with_for_update(read=True, skip_locked=True)


def find_next_tasks(connection: Connection, entry: TaskEntry) -> list[InstanceKey]:
    """Return the task instances of the next run that may have waited for this one."""
    run, structure = entry.run, entry.plan.structure
    names = [(entry.task_id, entry.map_index)] if structure.depends_on_past or structure.wait_for_downstream else []
    if entry.map_index == UNMAPPED:
        before = [name for name in structure.upstream if run.plan.tasks[name].structure.wait_for_downstream]
        names += [(name, UNMAPPED) for name in before]
    if not names or run.logical_us is None:
        return []
    later = and_(_RUN.dag == run.dag, _RUN.logical_us > run.logical_us)
    found = connection.execute(select(_RUN.id).where(later).order_by(_RUN.logical_us).limit(1)).scalar()
    return [] if found is None else [(int(found), name, map_index) for name, map_index in names]


def mark_pending(connection: Connection, keys: Collection[InstanceKey]) -> None:
    """Mark task instances of other runs for the scheduler to decide again."""
    if not keys:
        return
    dialect = find_dialect(connection)
    waiting = and_(_is_same(_KEYS.build_source(dialect)), _TASK.state == TaskState.NONE.value)
    connection.execute(update(task_instance).where(waiting).values(pending=1), _KEYS.build_parameters(dialect, keys))
