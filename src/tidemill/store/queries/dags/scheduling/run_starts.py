"""Starts queued runs, which wait because of `max_active_runs`.

Invariants: the active runs of a DAG are counted while the DAG's row is locked. Older runs start first. An active run
that cannot progress until an earlier run has ended yields its slot to that run (`core.tasks.run_starts`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, exists, func, literal_column, or_, select, union

from tidemill.core.tasks.run_starts import StartCandidate, find_yielding, plan_starts
from tidemill.core.tasks.task_row import STATES, TaskState
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import dag, dag_run, task_instance, task_map
from tidemill.store.queries.dags.runs.runs import IS_QUEUED, IS_RUNNING, queue_run, start_runs
from tidemill.store.queries.dags.scheduling.fair_order import PRIME, order_fairly
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.queries.isolation import work_on_runs

_RUN, _DAG, _TASK = dag_run.c, dag.c, task_instance.c
#: The states of tasks that change only through other tasks, unless they are pending.
_RESTING = tuple(state.value for state in (TaskState.NONE, TaskState.MAPPED, TaskState.REMOVED, *STATES.values()))


def start_waiting_runs(connection: Connection, context: CallContext, limit: int, skip: Collection[int] = ()) -> int:
    """Start the oldest queued runs of each DAG, up to its limit of active runs; return their number.

    Args:
        connection: A connection inside a transaction.
        context: The transaction's context.
        limit: The maximum number of DAGs, and of started runs per DAG.
        skip: Runs to skip.
    """
    passed = [_RUN.id.not_in(skip)] if skip else []
    runs: list[int] = []
    for number in _find_dags(connection, context, limit):
        found = connection.execute(
            select(dag).where(_DAG.id == number).with_for_update(skip_locked=True, key_share=True)
        ).first()
        if found is None:
            context.skipped = True
            continue
        runs += _choose_runs(connection, context, found, limit, passed)
    given = [(number, number) for number in runs]
    return work_on_runs(connection, context, given, lambda numbers: len(start_runs(connection, numbers, context).runs))


def _find_dags(connection: Connection, context: CallContext, limit: int) -> list[int]:
    """Return the DAGs whose queued runs have a free slot, or may get the slot of a later run."""
    waiting = select(_RUN.dag).where(and_(IS_QUEUED, _RUN.reason.is_(None))).distinct().subquery()
    running = select(func.count()).where(and_(_RUN.dag == _DAG.id, IS_RUNNING)).scalar_subquery()
    room = or_(running < _DAG.max_active_runs, and_(_DAG.by_past == 1, _has_earlier_run()))
    statement = select(_DAG.id).join(waiting, waiting.c.dag == _DAG.id).where(and_(_DAG.paused == 0, room))
    order = order_fairly(_DAG.id, context.now_us % PRIME)
    return sorted(connection.execute(statement.order_by(order).limit(limit)).scalars())


def _has_earlier_run() -> ColumnElement[bool]:
    """Build the condition that an earlier run of a DAG is queued while a later one is active."""
    waits, runs = dag_run.alias("waits"), dag_run.alias("runs")
    # The `+ 0` keeps SQLite from searching the dates of all runs, most of which have ended.
    logical_us = waits.c.logical_us + 0
    first = or_(logical_us.is_(None), logical_us < runs.c.logical_us)
    states = and_(waits.c.state == literal_column("'queued'"), runs.c.state == literal_column("'running'"))
    same = and_(waits.c.dag == _DAG.id, runs.c.dag == _DAG.id, runs.c.logical_us.is_not(None))
    return exists(select(waits.c.id).where(and_(same, states, first)))


def _choose_runs(
    connection: Connection, context: CallContext, found: Row[Any], limit: int, passed: Sequence[ColumnElement[bool]]
) -> Sequence[int]:
    """Return the runs of a DAG to start, after other runs have yielded their slots."""
    active = _fetch_candidates(connection, and_(_RUN.dag == found.id, IS_RUNNING), limit=None)
    room = max(0, found.max_active_runs - len(active))
    # A queued run with a reason is being cancelled.
    waits = and_(_RUN.dag == found.id, IS_QUEUED, _RUN.reason.is_(None), *passed)
    latest_us = max((one.logical_us for one in active if one.logical_us is not None), default=None)
    if room:
        waiting = _fetch_candidates(connection, waits, min(room, limit))
    elif found.by_past and latest_us is not None:
        waiting = _fetch_candidates(connection, and_(waits, _goes_before(latest_us)), limit)
    else:
        return ()
    yielding = [] if room else find_yielding(waiting, active)
    board = Board(connection, context)
    board.lock((), [one.number for one in yielding])
    # A run may have ended before it was locked.
    running = [run.id for run in board.runs.values() if run.state == "running"]
    plan = plan_starts(waiting, active, _find_idle(connection, running), found.max_active_runs)
    for number in plan.wait:
        queue_run(board.runs[number], context)
    board.flush()
    return plan.begin


def _goes_before(logical_us: int) -> ColumnElement[bool]:
    return or_(_RUN.logical_us.is_(None), _RUN.logical_us < logical_us)


def _fetch_candidates(connection: Connection, wanted: ColumnElement[bool], limit: int | None) -> list[StartCandidate]:
    statement = select(_RUN.id, _RUN.logical_us).where(wanted).order_by(_RUN.id).limit(limit)
    return [StartCandidate(*row) for row in connection.execute(statement)]


def _find_idle(connection: Connection, runs: Collection[int]) -> set[int]:
    """Return the locked runs that have no active and no pending task, and no map that the scheduler has to look at."""
    if not runs:
        return set()
    busy = and_(_TASK.run.in_(sorted(runs)), or_(_TASK.state.not_in(_RESTING), _TASK.pending > 0))
    marked = and_(task_map.c.run.in_(sorted(runs)), task_map.c.pending == 1)
    found = union(select(_TASK.run).where(busy), select(task_map.c.run).where(marked))
    return set(runs) - set(connection.execute(found).scalars())
