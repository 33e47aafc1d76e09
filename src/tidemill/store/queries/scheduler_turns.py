"""A turn of the scheduler: everything that is to be done now, each step over a bounded number of rows.

Invariants: what is left over makes the turn say `more`; nothing is found by reading what has ended.

"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, and_, func, select

from tidemill.core.tasks.inputs import Due
from tidemill.store.calls import SchedulerAnswer, SchedulerTurn
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import dag_run, task_instance
from tidemill.store.queries.admissions import admit_tasks
from tidemill.store.queries.board import Board
from tidemill.store.queries.runs import start_waiting_runs, stop_runs
from tidemill.store.queries.schedule import create_due_runs, find_next_due
from tidemill.store.queries.services import check_service
from tidemill.store.queries.tasks import close_board, draw_bits, move_tasks

_RUN, _TASK = dag_run.c, task_instance.c
#: Runs that one turn creates, starts or stops.
_RUNS = 50


def take_scheduler_turn(connection: Connection, turn: SchedulerTurn, context: CallContext) -> SchedulerAnswer:
    """Do what is to be done now; see `SchedulerTurn`."""
    check_service(connection, turn.service)
    by = f"scheduler {turn.service}"
    created = create_due_runs(connection, context, _RUNS)
    started = start_waiting_runs(connection, context, _RUNS)
    overdue = _stop_overdue_runs(connection, context)
    stopped = _stop_runs(connection, context)
    decided = _decide_pending(connection, context, turn.limit)
    due = _feed_due(connection, context, turn.limit, by)
    admitted = admit_tasks(connection, context, by, turn.limit)
    full = max(created, started, overdue, stopped) >= _RUNS or max(decided, due) >= turn.limit
    more = full or admitted.more or _has_pending(connection)
    moved = decided + due + admitted.count
    next_due_us = _find_next_due(connection)
    return SchedulerAnswer(next_due_us, context.now_us, more, admitted.count, moved, created, overdue)


def _stop_overdue_runs(connection: Connection, context: CallContext) -> int:
    overdue = and_(_RUN.deadline_us.is_not(None), _RUN.state == "running", _RUN.deadline_us <= context.now_us)
    found = _find(connection, overdue, _RUNS)
    if found:
        stop_runs(connection, found, "it took longer than its dagrun_timeout", "timeout", context)
    return len(found)


def _stop_runs(connection: Connection, context: CallContext) -> int:
    """Go on with runs whose tasks are too many to be ended in one transaction."""
    found = _find(connection, _RUN.stop.is_not(None), 1)
    if found:
        board = Board(connection, context)
        board.lock((), found)
        close_board(board)
    return _RUNS if found else 0


def _find(connection: Connection, wanted: ColumnElement[bool], limit: int) -> Sequence[int]:
    return connection.execute(select(_RUN.id).where(wanted).order_by(_RUN.id).limit(limit)).scalars().all()


def _decide_pending(connection: Connection, context: CallContext, limit: int) -> int:
    statement = select(_TASK.id).join(dag_run, _RUN.id == _TASK.run).where(_is_pending())
    found = connection.execute(statement.order_by(_TASK.run, _TASK.id).limit(limit)).scalars().all()
    if found:
        board = Board(connection, context, limit=limit)
        board.lock(found)
        board.doubt(board.tasks[number] for number in found)
        close_board(board)
    return len(found)


def _is_pending() -> ColumnElement[bool]:
    return and_(_TASK.pending == 1, _RUN.state == "running")


def _has_pending(connection: Connection) -> bool:
    statement = select(_TASK.id).join(dag_run, _RUN.id == _TASK.run).where(_is_pending()).limit(1)
    return connection.execute(statement).first() is not None


def _feed_due(connection: Connection, context: CallContext, limit: int, by: str) -> int:
    due = and_(_TASK.next_due_us.is_not(None), _TASK.next_due_us <= context.now_us)
    statement = select(_TASK.id, _TASK.epoch).where(due).order_by(_TASK.next_due_us).limit(limit)
    found = connection.execute(statement).all()
    move_tasks(connection, [(task, Due(epoch, draw_bits())) for task, epoch in found], context, by)
    return len(found)


def _find_next_due(connection: Connection) -> int | None:
    tasks = connection.execute(select(func.min(_TASK.next_due_us)).where(_TASK.next_due_us.is_not(None))).scalar()
    open_runs = and_(_RUN.deadline_us.is_not(None), _RUN.state == "running")
    runs = connection.execute(select(func.min(_RUN.deadline_us)).where(open_runs)).scalar()
    times = [time for time in (tasks, runs, find_next_due(connection)) if time is not None]
    return min(times, default=None)
