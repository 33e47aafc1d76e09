"""The scheduler turn: all scheduling work that is due, with each step limited to a bounded number of rows.

Invariants: one statement determines which steps have work, from partial indexes that contain nothing else. If rows are
left over, the answer sets `more`. Schedulers share the work: each one locks the runs, DAGs and pools that it works on,
and skips those that another transaction has locked, so a slow scheduler delays nothing else. A run or DAG that raises
in a step is logged and left unchanged; the turn continues with the others.

On PostgreSQL, workers that report elements wait for the rows of maps that a turn has locked, and no later step may wait
for tasks that they hold. So a turn there either expands maps, or does everything else and locks maps last. A turn that
expands maps waits for elements that workers hold, so it admits no tasks: other schedulers need the pools. A turn does
not look for more work after it has done some (`again`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Select,
    and_,
    bindparam,
    exists,
    func,
    literal_column,
    or_,
    select,
    text,
)

from tidemill.core.tasks.inputs import Due
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.service_calls import SchedulerAnswer, SchedulerTurn
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import IS_BLOCKED, dag_run, task_instance, task_map
from tidemill.store.queries.dags.attempts.admissions import Admitted, admit_tasks
from tidemill.store.queries.dags.files.file_differences import build_overdue, fail_unserved
from tidemill.store.queries.dags.items.backlog import unblock_sources
from tidemill.store.queries.dags.maps.turns import expand_maps
from tidemill.store.queries.dags.runs.runs import IS_QUEUED, IS_RUNNING, stop_runs
from tidemill.store.queries.dags.scheduling.run_starts import start_waiting_runs
from tidemill.store.queries.dags.scheduling.schedule import create_due_runs, select_next_due
from tidemill.store.queries.dags.state.tasks import close_board, draw_bits, move_tasks, tell_maps
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.queries.dags.streams.marks import has_marked, release_streams, resume_streams
from tidemill.store.queries.isolation import work_on_runs
from tidemill.store.queries.sessions.services import check_session
from tidemill.store.queries.triggers.cursors import SKIPPED, build_id_rows
from tidemill.store.statements import Statement

_RUN, _TASK = dag_run.c, task_instance.c
#: The maximum number of runs that one turn creates, starts or stops.
_RUNS = 50
_SKIPPED_DAGS = RowSet("skipped_dags", id=int)
_PENDING = and_(_TASK.pending == literal_column("1"), IS_RUNNING)
_IS_MARKED_MAP = task_map.c.pending == literal_column("1")
_OPEN = and_(_RUN.deadline_us.is_not(None), IS_RUNNING)


def take_scheduler_turn(connection: Connection, turn: SchedulerTurn, context: CallContext) -> SchedulerAnswer:
    """Do the scheduling work that is due; see `SchedulerTurn`."""
    check_session(connection, turn.session, context)
    by = f"scheduler {turn.session}"
    work = _find_work(connection, turn, context)
    now_us = context.now_us
    cuts = _is_due(work.maps_us, now_us)
    if cuts:
        work = work._replace(maps=True)
    skip = turn.skip_runs
    # A SQLite file has one writer, so nothing is locked.
    shared = find_dialect(connection) == "postgresql"
    if shared:
        context.untold = []
    # A failed element may have stopped its run when its map was expanded; what has not started must not be admitted.
    stopped = _stop_runs(connection, context, skip) if shared and work.stops else 0
    if shared and not stopped and _is_turn_of_maps(work, now_us):
        context.untold = None
        if expand_maps(connection, context, skip, turn.map_limits, due=cuts):
            return _end_turn_of_maps(context, work)
        context.untold = []  # their runs are locked
    created = create_due_runs(connection, context, _RUNS, turn.skip_dags) if _is_due(work.dags_us, now_us) else 0
    # Decide tasks before starting runs, so that runs whose tasks cannot start are known.
    decided = _decide_pending(connection, context, turn.limit, skip) if work.pending else 0
    started = start_waiting_runs(connection, context, _RUNS, skip) if work.queued or created else 0
    overdue = _stop_overdue_runs(connection, context, skip) if _is_due(work.runs_us, now_us) else 0
    due = _feed_due(connection, context, turn.limit, by, skip) if _is_due(work.tasks_us, now_us) else 0
    failed = fail_unserved(connection, context, by, turn.missing_file_us, turn.limit, skip) if work.unserved else 0
    marked = not shared and (work.maps or decided or started or due or failed)
    expanded = expand_maps(connection, context, skip, turn.map_limits, due=cuts) if marked else 0
    if not shared and (work.stops or expanded):
        stopped = _stop_runs(connection, context, skip)
    # After the maps, which make room for the tasks that feed them. No step that waits for tasks may follow: attempts
    # that hold tasks wait for the marks that these ones lock.
    released = release_streams(connection, context, skip) if work.held else 0
    resumed = resume_streams(connection, context, by, turn.limit, skip) if work.streams or released else 0
    unblocked = unblock_sources(connection, context, by, skip) if work.blocked else 0
    changed = created + started + overdue + stopped + decided + due + failed + resumed + expanded + unblocked
    admitted = admit_tasks(connection, context, by, turn.limit, skip) if work.scheduled or changed else Admitted()
    full = (
        max(created, started, overdue, stopped, expanded) >= _RUNS or max(decided, due, failed, resumed) >= turn.limit
    )
    moved = bool(changed or admitted.count)
    tell_maps(connection, context)
    if (not shared and moved) or context.broken_runs or context.broken_dags:
        work = _find_work(connection, turn, context)
    # The end of a map may have ended a run, after the step that starts runs.
    left = context.left or (not shared and ((work.maps and moved) or bool(expanded and work.queued)))
    skipped = shared and (context.skipped or work.pending or work.stops or work.maps or work.streams)
    # Due work that failed is retried in the next turn, not at once.
    is_due = not shared and moved and any(_is_due(time, now_us) for time in work.times)
    return SchedulerAnswer(
        min(work.times, default=None),
        now_us,
        full or admitted.more or left or is_due,
        admitted.count,
        decided + due + failed + admitted.count,
        created,
        overdue,
        tuple(sorted(context.broken_runs)),
        tuple(sorted(context.broken_dags)),
        skipped,
        again=shared and (moved or work.maps),
    )


def _is_turn_of_maps(work: _Work, now_us: int) -> bool:
    """Whether a turn expands maps, and does nothing else that locks tasks; with other work, every second one does."""
    others = work.queued or work.pending or work.scheduled or work.blocked or work.streams or work.held
    others = others or work.unserved or any(_is_due(time, now_us) for time in work.times)
    return work.maps and not (others and now_us & 1)


def _end_turn_of_maps(context: CallContext, work: _Work) -> SchedulerAnswer:
    return SchedulerAnswer(
        min(work.times, default=None),
        context.now_us,
        True,  # new elements are admitted at once
        broken_runs=tuple(sorted(context.broken_runs)),
        skipped=context.skipped,
        again=True,
    )


def _is_due(time_us: int | None, now_us: int) -> bool:
    return time_us is not None and time_us <= now_us


class _Work(NamedTuple):
    """The next due times, and flags for the kinds of work that exist."""

    dags_us: int | None
    runs_us: int | None
    tasks_us: int | None
    maps_us: int | None
    queued: bool
    stops: bool
    pending: bool
    scheduled: bool
    maps: bool
    blocked: bool
    streams: bool
    held: bool
    unserved: bool

    @property
    def times(self) -> list[int]:
        """The next due times."""
        return [time for time in (self.dags_us, self.runs_us, self.tasks_us, self.maps_us) if time is not None]


def _find_work(connection: Connection, turn: SchedulerTurn, context: CallContext) -> _Work:
    """Find the work to do, except for runs and DAGs that failed."""
    runs, dags = {*turn.skip_runs, *context.broken_runs}, {*turn.skip_dags, *context.broken_dags}
    given: dict[str, Any] = {"missing_us": context.now_us - turn.missing_file_us}
    if runs or dags:
        dialect = find_dialect(connection)
        given |= SKIPPED.build_parameters(dialect, build_id_rows(runs))
        given |= _SKIPPED_DAGS.build_parameters(dialect, build_id_rows(dags))
    return _Work(*_work.fetch(connection, given, bool(runs or dags))[0])


@Statement
def _work(dialect: str, skips: bool) -> Select[Any]:
    """Build the statement that returns which steps have work now, or when they will."""
    skipped_runs = select(SKIPPED.build_source(dialect).c.id)
    skipped_dags = select(_SKIPPED_DAGS.build_source(dialect).c.id)
    of_runs = [_RUN.id.not_in(skipped_runs)] if skips else []
    of_tasks = [_TASK.run.not_in(skipped_runs)] if skips else []
    of_maps = [task_map.c.run.not_in(skipped_runs)] if skips else []
    runs = select(func.min(_RUN.deadline_us)).where(and_(_OPEN, *of_runs)).scalar_subquery()
    tasks = select(func.min(_TASK.next_due_us)).where(and_(_TASK.next_due_us.is_not(None), *of_tasks))
    pending = exists(select(_TASK.id).join(dag_run, _RUN.id == _TASK.run).where(and_(_PENDING, *of_tasks)))
    scheduled = exists().where(and_(_TASK.state == literal_column("'scheduled'"), *of_tasks))
    blocked = select(_TASK.id).where(and_(text(IS_BLOCKED), *of_tasks))
    returning = exists(blocked.where(_TASK.block == literal_column("2")))
    return select(
        select_next_due(skipped_dags if skips else None).label("dags_us"),
        runs.label("runs_us"),
        tasks.scalar_subquery().label("tasks_us"),
        select(func.min(task_map.c.due_us)).where(and_(task_map.c.due_us.is_not(None), *of_maps)).scalar_subquery(),
        exists().where(and_(IS_QUEUED, *of_runs)).label("queued"),
        exists().where(and_(_RUN.stop.is_not(None), *of_runs)).label("stops"),
        pending.label("pending"),
        or_(scheduled, returning).label("scheduled"),
        exists().where(and_(_IS_MARKED_MAP, *of_maps)).label("maps"),
        exists(blocked.where(_TASK.block == literal_column("1"))).label("blocked"),
        has_marked("1", of_tasks).label("streams"),
        has_marked("2", of_tasks).label("held"),
        build_overdue().label("unserved"),
    )


def _stop_overdue_runs(connection: Connection, context: CallContext, skip: Collection[int]) -> int:
    wanted = and_(_OPEN, _RUN.deadline_us <= context.now_us, *([_RUN.id.not_in(skip)] if skip else ()))
    statement = (
        select(_RUN.id).where(wanted).order_by(_RUN.id).limit(_RUNS).with_for_update(skip_locked=True, key_share=True)
    )
    # A run is its own work item.
    found = [(number, number) for number in connection.execute(statement).scalars()]
    reason = "it exceeded its dagrun_timeout"
    return work_on_runs(
        connection, context, found, lambda runs: len(stop_runs(connection, runs, reason, "timeout", context).runs)
    )


def _stop_runs(connection: Connection, context: CallContext, skip: Collection[int]) -> int:
    """Continue stopping a run that has too many tasks to stop in one transaction."""

    def stop(runs: list[int]) -> int:
        board = Board(connection, context)
        board.lock((), runs)
        close_board(board)
        return _RUNS if board.runs else 0

    given = SKIPPED.build_parameters(find_dialect(connection), build_id_rows(skip)) if skip else {}
    found = [(run, run) for (run,) in _stopping.fetch(connection, given, bool(skip))]
    return work_on_runs(connection, context, found, stop)


@Statement
def _stopping(dialect: str, skips: bool) -> Select[Any]:
    # Compiled: turns that expand maps look for such a run.
    skipped = [_RUN.id.not_in(select(SKIPPED.build_source(dialect).c.id))] if skips else []
    statement = select(_RUN.id).where(and_(_RUN.stop.is_not(None), *skipped)).order_by(_RUN.id)
    return statement.limit(literal_column("1")).with_for_update(skip_locked=True, key_share=True)


def _decide_pending(connection: Connection, context: CallContext, limit: int, skip: Collection[int]) -> int:
    wanted = and_(_PENDING, *([_TASK.run.not_in(skip)] if skip else ()))
    statement = select(_TASK.run, _TASK.id).join(dag_run, _RUN.id == _TASK.run).where(wanted)
    statement = (
        statement.order_by(_TASK.run, _TASK.id)
        .limit(limit)
        .with_for_update(of=dag_run, skip_locked=True, key_share=True)
    )
    found = connection.execute(statement).all()

    def decide(tasks: list[int]) -> int:
        board = Board(connection, context, limit=limit)
        board.lock(tasks)
        board.doubt(board.tasks.values())
        close_board(board)
        return len(board.tasks)

    return work_on_runs(connection, context, [(row.run, row.id) for row in found], decide)


def _feed_due(connection: Connection, context: CallContext, limit: int, by: str, skip: Collection[int]) -> int:
    given: dict[str, Any] = {"now": context.now_us, "most": limit}
    if skip:
        given |= SKIPPED.build_parameters(find_dialect(connection), build_id_rows(skip))
    found = _due.fetch(connection, given, bool(skip))

    def feed(tasks: list[tuple[int, Due]]) -> int:
        return sum(answer is not None for answer in move_tasks(connection, tasks, context, by))

    tasks = [(run, (task, Due(epoch, draw_bits()))) for run, task, epoch in found]
    return work_on_runs(connection, context, tasks, feed)


@Statement
def _due(dialect: str, skips: bool) -> Select[Any]:
    due = and_(_TASK.next_due_us.is_not(None), _TASK.next_due_us <= bindparam("now"))
    if skips:
        due = and_(due, _TASK.run.not_in(select(SKIPPED.build_source(dialect).c.id)))
    statement = select(_TASK.run, _TASK.id, _TASK.epoch).join(dag_run, _RUN.id == _TASK.run).where(due)
    statement = statement.order_by(_TASK.next_due_us).limit(bindparam("most"))
    return statement.with_for_update(of=dag_run, skip_locked=True, key_share=True)
