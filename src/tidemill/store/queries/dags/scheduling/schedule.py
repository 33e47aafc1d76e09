"""Creates the runs that are due by the schedules of DAGs.

Invariants: a DAG that has reached `max_active_runs` gets no further runs, so its backlog waits in the schedule and not
as rows. Each due time creates at most one run.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    and_,
    func,
    literal_column,
    select,
    update,
)

from tidemill.core.tasks.structure import ScheduleStructure
from tidemill.core.tasks.timetable import next_time
from tidemill.store.calls.call import CallRefusedError
from tidemill.store.calls.run_calls import CreateRun
from tidemill.store.context import CallContext
from tidemill.store.dag_plan import read_structure
from tidemill.store.dag_tables import dag, dag_run, dag_version
from tidemill.store.queries.dags.runs.runs import IS_QUEUED, IS_RUNNING
from tidemill.store.queries.dags.scheduling.new_runs import create_run
from tidemill.store.queries.isolation import work_on_dags

_DAG, _RUN = dag.c, dag_run.c


def compute_next(schedule: ScheduleStructure, last_us: int | None, known_us: int, now_us: int) -> dict[str, Any]:
    """Compute the schedule columns of a DAG.

    Args:
        schedule: The schedule.
        last_us: The last due time; None: the schedule was never due.
        known_us: The time since which the schedule is known and not paused.
        now_us: The current time.
    """
    next_us = next_time(schedule, last_us, known_us, now_us)
    return {"next_us": next_us, "last_us": last_us, "known_us": known_us}


def create_due_runs(connection: Connection, context: CallContext, limit: int, skip: Collection[int] = ()) -> int:
    """Create the due runs and return their number; `skip`: DAGs to skip."""
    due = and_(_is_scheduled(), _DAG.next_us <= context.now_us, *([_DAG.id.not_in(skip)] if skip else ()))
    statement = select(_DAG.id).where(due).order_by(_DAG.next_us).limit(limit)
    dags = list(connection.execute(statement.with_for_update(of=dag, skip_locked=True, key_share=True)).scalars())
    return work_on_dags(
        connection,
        context,
        sorted(dags),
        lambda numbers: sum(_create_due_run(connection, number, context) for number in numbers),
    )


def select_next_due(skip: Select[int] | None = None) -> ScalarSelect[int | None]:
    """Select the next due time of all DAGs; `skip`: DAGs to skip."""
    wanted = _is_scheduled() if skip is None else and_(_is_scheduled(), _DAG.id.not_in(skip))
    return select(func.min(_DAG.next_us)).where(wanted).scalar_subquery()


def _is_scheduled() -> ColumnElement[bool]:
    of_dag = _RUN.dag == _DAG.id
    queued, running = (
        select(func.count()).where(and_(of_dag, state)).correlate(dag).scalar_subquery()
        for state in (IS_QUEUED, IS_RUNNING)
    )
    runs = queued + running
    return and_(
        _DAG.next_us.is_not(None),
        _DAG.active == literal_column("1"),
        _DAG.paused == literal_column("0"),
        runs < _DAG.max_active_runs,
    )


def _create_due_run(connection: Connection, number: int, context: CallContext) -> bool:
    row = connection.execute(select(dag).where(_DAG.id == number).with_for_update(key_share=True)).one()
    text = connection.execute(select(dag_version.c.structure).where(dag_version.c.id == row.version_id)).scalar_one()
    schedule = read_structure(text).schedule
    # Compute the due time again: of several missed times, only the last one may be due.
    due_us = next_time(schedule, row.last_us, row.known_us, context.now_us)
    created = due_us is not None and due_us <= context.now_us
    last_us = due_us if created else row.last_us
    if created and due_us is not None:
        time = datetime.fromtimestamp(due_us / 1_000_000, UTC).isoformat()
        request = CreateRun(row.dag_id, f"scheduled__{time}", due_us, kind="scheduled", by="schedule")
        try:
            create_run(connection, request, context)
        except CallRefusedError:
            created = False  # a user has already created a run with this logical date
    values = compute_next(schedule, last_us, row.known_us, context.now_us)
    connection.execute(update(dag).where(_DAG.id == number).values(values))
    return created
