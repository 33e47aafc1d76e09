"""A turn of the scheduler: everything that is to be done now, each step over a bounded number of rows.

Invariants: one statement finds out which steps have something to do, from indexes that have nothing else in them; what
is left over makes the turn say `more`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, bindparam, exists, func, literal_column, select

from tidemill.core.tasks.inputs import Due
from tidemill.store.calls import SchedulerAnswer, SchedulerTurn
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import dag_run, task_instance
from tidemill.store.queries.admissions import Admitted, admit_tasks
from tidemill.store.queries.board import Board
from tidemill.store.queries.runs import IS_QUEUED, IS_RUNNING, start_waiting_runs, stop_runs
from tidemill.store.queries.schedule import create_due_runs, select_next_due
from tidemill.store.queries.services import check_service
from tidemill.store.queries.tasks import close_board, draw_bits, move_tasks

_RUN, _TASK = dag_run.c, task_instance.c
#: Runs that one turn creates, starts or stops.
_RUNS = 50
_PENDING = and_(_TASK.pending == literal_column("1"), IS_RUNNING)
_OPEN = and_(_RUN.deadline_us.is_not(None), IS_RUNNING)


def take_scheduler_turn(connection: Connection, turn: SchedulerTurn, context: CallContext) -> SchedulerAnswer:
    """Do what is to be done now; see `SchedulerTurn`."""
    check_service(connection, turn.service)
    by = f"scheduler {turn.service}"
    work = _find_work(connection)
    now_us = context.now_us
    created = create_due_runs(connection, context, _RUNS) if _is_due(work.dags_us, now_us) else 0
    started = start_waiting_runs(connection, context, _RUNS) if work.queued or created else 0
    overdue = _stop_overdue_runs(connection, context) if _is_due(work.runs_us, now_us) else 0
    stopped = _stop_runs(connection, context) if work.stops else 0
    decided = _decide_pending(connection, context, turn.limit) if work.pending else 0
    due = _feed_due(connection, context, turn.limit, by) if _is_due(work.tasks_us, now_us) else 0
    changed = created + started + overdue + stopped + decided + due
    admitted = admit_tasks(connection, context, by, turn.limit) if work.scheduled or changed else Admitted()
    full = max(created, started, overdue, stopped) >= _RUNS or max(decided, due) >= turn.limit
    if changed or admitted.count:
        work = _find_work(connection)
    times = [time for time in (work.dags_us, work.runs_us, work.tasks_us) if time is not None]
    return SchedulerAnswer(
        min(times, default=None),
        now_us,
        full or admitted.more or context.left or bool(work.pending) or any(time <= now_us for time in times),
        admitted.count,
        decided + due + admitted.count,
        created,
        overdue,
    )


def _is_due(time_us: int | None, now_us: int) -> bool:
    return time_us is not None and time_us <= now_us


def _find_work(connection: Connection) -> Row[Any]:
    return connection.execute(_build_work()).one()


@cache
def _build_work() -> Select[Any]:
    """Return the statement that says which steps have something to do now, or when they will."""
    runs = select(func.min(_RUN.deadline_us)).where(_OPEN).scalar_subquery()
    tasks = select(func.min(_TASK.next_due_us)).where(_TASK.next_due_us.is_not(None)).scalar_subquery()
    pending = exists(select(_TASK.id).join(dag_run, _RUN.id == _TASK.run).where(_PENDING))
    return select(
        select_next_due().label("dags_us"),
        runs.label("runs_us"),
        tasks.label("tasks_us"),
        exists().where(IS_QUEUED).label("queued"),
        exists().where(_RUN.stop.is_not(None)).label("stops"),
        pending.label("pending"),
        exists().where(_TASK.state == literal_column("'scheduled'")).label("scheduled"),
    )


def _stop_overdue_runs(connection: Connection, context: CallContext) -> int:
    found = _find(connection, and_(_OPEN, _RUN.deadline_us <= context.now_us), _RUNS)
    if found:
        stop_runs(connection, found, "it took longer than its dagrun_timeout", "timeout", context)
    return len(found)


def _stop_runs(connection: Connection, context: CallContext) -> int:
    """Go on with a run whose tasks are too many to be ended in one transaction."""
    found = _find(connection, _RUN.stop.is_not(None), 1)
    if found:
        board = Board(connection, context)
        board.lock((), found)
        close_board(board)
    return _RUNS if found else 0


def _find(connection: Connection, wanted: ColumnElement[bool], limit: int) -> Sequence[int]:
    return connection.execute(select(_RUN.id).where(wanted).order_by(_RUN.id).limit(limit)).scalars().all()


def _decide_pending(connection: Connection, context: CallContext, limit: int) -> int:
    statement = select(_TASK.id).join(dag_run, _RUN.id == _TASK.run).where(_PENDING)
    found = connection.execute(statement.order_by(_TASK.run, _TASK.id).limit(limit)).scalars().all()
    if found:
        board = Board(connection, context, limit=limit)
        board.lock(found)
        board.doubt(board.tasks[number] for number in found)
        close_board(board)
    return len(found)


def _feed_due(connection: Connection, context: CallContext, limit: int, by: str) -> int:
    found = connection.execute(_build_due(), {"now": context.now_us, "most": limit}).all()
    move_tasks(connection, [(task, Due(epoch, draw_bits())) for task, epoch in found], context, by)
    return len(found)


@cache
def _build_due() -> Select[Any]:
    due = and_(_TASK.next_due_us.is_not(None), _TASK.next_due_us <= bindparam("now"))
    return select(_TASK.id, _TASK.epoch).where(due).order_by(_TASK.next_due_us).limit(bindparam("most"))
