"""The tasks of runs for the command line and the web pages: lists, history, logs, clear, mark.

Invariants: lists read at most one page. Changes by users go through the state machine like all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, and_, func, select

from tidemill.core.tasks.attempt import Moved
from tidemill.core.tasks.dependencies import TaskOutcome
from tidemill.core.tasks.inputs import Clear, Mark
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.calls.all_calls import (
    ClearTasks,
    HistoryRecord,
    ListTasks,
    ListXComs,
    LogPartRecord,
    MarkTasks,
    ReadLog,
    StoreCounts,
    TaskHistory,
    TaskRecord,
    XComRecord,
)
from tidemill.store.calls.call import CallRefusedError, Listed, RefusalKind
from tidemill.store.context import CallContext
from tidemill.store.dag_plan import DagPlan
from tidemill.store.dag_tables import dag_file, dag_run, dag_version, task_instance, task_journal
from tidemill.store.queries.dags.progress import ACTIVE
from tidemill.store.queries.dags.runs import find_run, queue_run
from tidemill.store.queries.dags.task_logs import find_last_try, read_log
from tidemill.store.queries.dags.task_rows import RunEntry, compute_rank, is_resumed, load_plan
from tidemill.store.queries.dags.tasks import close_board, end_run
from tidemill.store.queries.dags.transition import Board
from tidemill.store.queries.dags.xcoms import list_xcoms
from tidemill.store.tables import service_session, trigger

_TASK, _RUN, _JOURNAL = task_instance.c, dag_run.c, task_journal.c
_BAD = (TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED)


def list_tasks(connection: Connection, request: ListTasks) -> Listed[TaskRecord]:
    """Return a page of the tasks of a run; see `ListTasks`."""
    run = find_run(connection, request.dag_id, request.run_id)
    version = (
        select(dag_version.c.id, dag_version.c.digest)
        .join(dag_run, _RUN.version_id == dag_version.c.id)
        .where(_RUN.id == run)
    )
    plan = load_plan(connection, *connection.execute(version).one())
    waits = and_(trigger.c.task_id == _TASK.id, trigger.c.epoch == _TASK.epoch)
    statement = (
        select(task_instance, service_session.c.host, service_session.c.pid, trigger.c.id.label("trigger"))
        .outerjoin(service_session, service_session.c.id == _TASK.session_id)
        .outerjoin(trigger, waits)
        .where(_TASK.run == run)
        .order_by(_TASK.number, _TASK.map_index)
        .limit(request.limit + 1)
    )
    if request.states:
        statement = statement.where(_TASK.state.in_(request.states))
    if request.after is not None:
        statement = statement.where(_TASK.number > int(request.after))
    rows = connection.execute(statement).all()
    records = tuple(_build_task(row, plan, request) for row in rows[: request.limit])
    return Listed(records, str(rows[request.limit - 1].number) if len(rows) > request.limit else None)


def _build_task(row: Row[Any], plan: DagPlan, request: ListTasks) -> TaskRecord:
    return TaskRecord(
        id=row.id,
        run=row.run,
        dag_id=request.dag_id,
        run_id=request.run_id,
        task_id=row.task_id,
        map_index=row.map_index,
        state=row.state,
        epoch=row.epoch,
        tries=row.tries,
        max_tries=row.max_tries,
        operator=plan.tasks[row.task_id].structure.operator,
        queue=row.queue,
        pool=row.pool,
        pool_slots=row.pool_slots,
        priority=compute_rank(0, is_resumed(row.rank)) - row.rank,
        since_us=row.since_us,
        started_us=row.started_us,
        ended_us=row.ended_us,
        due_us=row.next_due_us,
        worker=None if row.host is None else f"{row.host}, process {row.pid}",
        trigger=row.trigger,
        error=row.error,
    )


def find_task(connection: Connection, request: TaskHistory | ReadLog) -> int:
    """Return the id of a task.

    Raises:
        CallRefusedError: There is no such task.
    """
    run = find_run(connection, request.dag_id, request.run_id)
    wanted = and_(_TASK.run == run, _TASK.task_id == request.task_id, _TASK.map_index == request.map_index)
    found = connection.execute(select(_TASK.id).where(wanted)).scalar()
    if found is None:
        raise CallRefusedError(
            RefusalKind.UNKNOWN,
            f"run {request.run_id!r} has no task {request.task_id!r}; list them with "
            f"`tidemill tasks states {request.dag_id} {request.run_id}`",
        )
    return int(found)


def list_history(connection: Connection, request: TaskHistory) -> Listed[HistoryRecord]:
    """Return a page of the state changes of a task; see `TaskHistory`."""
    wanted = [_JOURNAL.task == find_task(connection, request)]
    if request.after is not None:
        wanted.append(_JOURNAL.epoch > int(request.after))
    statement = select(task_journal).where(and_(*wanted)).order_by(_JOURNAL.epoch).limit(request.limit + 1)
    rows = [
        HistoryRecord(row.epoch, row.before, row.after, row.given, row.at_us, row.said_by, row.detail)
        for row in connection.execute(statement)
    ]
    more = len(rows) > request.limit
    return Listed(tuple(rows[: request.limit]), str(rows[request.limit - 1].epoch) if more else None)


def read_task_log(connection: Connection, request: ReadLog) -> Listed[LogPartRecord]:
    """Return a page of the log of a try; see `ReadLog`."""
    task = find_task(connection, request)
    try_number = find_last_try(connection, task) if request.try_number is None else request.try_number
    return read_log(connection, task, try_number, request.after, request.limit)


def list_task_xcoms(connection: Connection, request: ListXComs) -> Listed[XComRecord]:
    """Return a page of the XComs of a run; see `ListXComs`."""
    run = find_run(connection, request.dag_id, request.run_id)
    return list_xcoms(connection, run, request.task_id, request.after, request.limit)


def clear_tasks(connection: Connection, request: ClearTasks, context: CallContext) -> tuple[str, ...]:
    """Reset tasks so that they run again; see `ClearTasks`."""
    board, run = _lock_run(connection, request.dag_id, request.run_id, context)
    names = _select_names(run, request.task_ids)
    if request.downstream:
        names = sorted({*names, *run.plan.list_downstream(names)})
    board.load((run.id, name, UNMAPPED) for name in names)
    entries = [entry for name in names if (entry := board.find(run.id, name)) is not None]
    if request.failed:
        entries = [entry for entry in entries if entry.row.outcome in _BAD]
    entries = [entry for entry in entries if entry.row.state is not TaskState.NONE]
    if request.dry_run:
        return tuple(entry.task_id for entry in entries)
    triggerers = board.find_triggerers(entries)
    cleared = [
        entry.task_id
        for entry in entries
        if isinstance(board.give(entry, Clear(triggerer=triggerers.get(entry.id)), request.by), Moved)
    ]
    if cleared and run.state in ("success", "failed"):
        queue_run(run, context)
    close_board(board)
    return tuple(cleared)


def mark_tasks(connection: Connection, request: MarkTasks, context: CallContext) -> tuple[str, ...]:
    """Set the outcome of tasks; see `MarkTasks`."""
    board, run = _lock_run(connection, request.dag_id, request.run_id, context)
    names = _select_names(run, request.task_ids)
    board.load((run.id, name, UNMAPPED) for name in names)
    outcome = TaskOutcome(request.state)
    entries = [entry for name in names if (entry := board.find(run.id, name)) is not None]
    triggerers = board.find_triggerers(entries)
    marked = [
        entry.task_id
        for entry in entries
        if isinstance(board.give(entry, Mark(outcome, triggerer=triggerers.get(entry.id)), request.by), Moved)
    ]
    if outcome is TaskOutcome.SUCCESS:
        _clear_followers(board, run, marked, request.by, context)
    ended = run.state in ("success", "failed")
    close_board(board)
    if marked and ended and run.state in ("success", "failed"):
        run.reason = None
        end_run(board, run)
        board.flush()
    return tuple(marked)


def _clear_followers(board: Board, run: RunEntry, marked: list[str], by: str, context: CallContext) -> None:
    """Clear the tasks that failed only because of upstream tasks that now count as successes."""
    names = run.plan.list_downstream(marked)
    board.load((run.id, name, UNMAPPED) for name in names)
    followers = [entry for name in names if (entry := board.find(run.id, name)) is not None]
    for entry in followers:
        if entry.row.outcome is TaskOutcome.UPSTREAM_FAILED:
            board.give(entry, Clear(), by)
            if run.state in ("success", "failed"):
                queue_run(run, context)


def _lock_run(connection: Connection, dag_id: str, run_id: str, context: CallContext) -> tuple[Board, RunEntry]:
    number = find_run(connection, dag_id, run_id)
    board = Board(connection, context)
    board.lock((), [number])
    return board, board.runs[number]


def _select_names(run: RunEntry, names: Iterable[str]) -> list[str]:
    wanted = list(names) or list(run.plan.tasks)
    unknown = [name for name in wanted if name not in run.plan.tasks]
    if unknown:
        raise CallRefusedError(
            RefusalKind.UNKNOWN,
            f"DAG {run.plan.structure.id!r} has no task {unknown[0]!r}; it has: {', '.join(list(run.plan.tasks)[:20])}",
        )
    return sorted(set(wanted))


def count_store(connection: Connection) -> StoreCounts:
    """Return the numbers for metrics; see `CountStore`."""
    open_tasks = select(_TASK.state, func.count()).join(ACTIVE, ACTIVE.c.id == _TASK.run).group_by(_TASK.state)
    tasks: dict[str, int] = dict(connection.execute(open_tasks).all())
    counted = select(ACTIVE.c.state, func.count()).group_by(ACTIVE.c.state)
    runs: dict[str, int] = dict(connection.execute(counted).all())
    broken = select(func.count()).where(and_(dag_file.c.present == 1, dag_file.c.error.is_not(None)))
    return StoreCounts(tasks, runs, int(connection.execute(broken).scalar_one()))
