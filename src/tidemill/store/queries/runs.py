"""Runs of DAGs: create, start, cancel, and read them.

Invariants: the tasks of a run are created with it; how many runs of a DAG are active is counted under the lock of the
DAG's row; older runs start first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Insert,
    Row,
    Select,
    and_,
    bindparam,
    exists,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    true,
)

from tidemill.core.tasks.attempt import TaskState
from tidemill.core.tasks.dependencies import Readiness, decide
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.call import CallRefusedError, Listed, RefusalKind
from tidemill.store.calls import CancelRun, CreateRun, GetEarlierRun, GetRun, ListRuns, RunRecord
from tidemill.store.context import CallContext
from tidemill.store.dag_plan import DagPlan, TaskPlan
from tidemill.store.dag_tables import dag, dag_run, dag_version, task_instance
from tidemill.store.queries.board import Board
from tidemill.store.queries.isolation import work_on_runs
from tidemill.store.queries.run_params import check_params, read_conf
from tidemill.store.queries.task_rows import RunEntry, compute_rank, load_plan
from tidemill.store.queries.tasks import close_board

_NEW = RowSet(
    "new_tasks",
    run=int,
    dag=int,
    task_id=str,
    number=int,
    queue=str,
    pool=str,
    pool_slots=int,
    max_tries=int,
    pending=int,
    rank=int,
    since_us=int,
)
_CONSTANT = {
    "map_index": -1,
    "state": TaskState.NONE.value,
    "epoch": 0,
    "tries": 0,
    "tries_before": 0,
    "lost": 0,
    "tallies": "",
    "skip_votes": 0,
}
#: As for the ids of DAGs.
_MAX_NAME = 250
_ACTIVE = ("queued", "running")
_RUN, _DAG = dag_run.c, dag.c
_LOCK_DAG = (
    select(dag, dag_version.c.digest)
    .join(dag_version, dag_version.c.id == _DAG.version_id)
    .where(_DAG.dag_id == bindparam("dag_name"))
    .with_for_update(of=dag)
)
_TWINS = select(_RUN.run_id).where(
    and_(
        _RUN.dag == bindparam("dag_number"),
        or_(_RUN.run_id == bindparam("name"), _RUN.logical_us == bindparam("logical", type_=BigInteger())),
    )
)
#: Written as the indexes are, so that SQLite sees that they fit.
IS_QUEUED, IS_RUNNING = _RUN.state == literal_column("'queued'"), _RUN.state == literal_column("'running'")
_OF_DAG = _RUN.dag == bindparam("dag_number")
_ACTIVE_RUNS = select(
    exists().where(and_(_OF_DAG, IS_QUEUED)).label("queued"),
    select(func.count()).where(and_(_OF_DAG, IS_RUNNING)).scalar_subquery().label("running"),
)
_NEW_RUN = insert(dag_run).returning(_RUN.id)
RUNS = (
    select(dag_run, _DAG.dag_id, dag_version.c.number)
    .join(dag, _DAG.id == _RUN.dag)
    .join(dag_version, dag_version.c.id == _RUN.version_id)
)


_RUN_BY_NUMBER = RUNS.where(_RUN.id == bindparam("run_number"))


def create_run(connection: Connection, request: CreateRun, context: CallContext) -> RunRecord:
    """Create a run with its tasks, and start it if there is room; see `CreateRun`."""
    found = lock_dag(connection, request.dag_id)
    if request.request:
        known = connection.execute(RUNS.where(and_(_RUN.dag == found.id, _RUN.request == request.request))).first()
        if known is not None:
            return read_run(known)
    if not found.active:
        raise CallRefusedError(
            RefusalKind.UNKNOWN,
            f"DAG {request.dag_id!r} is not active: its file no longer defines it; restore the file",
        )
    conf = read_conf(request.conf)
    run_id = _choose_run_id(connection, found.id, request, context.now_us)
    plan = load_plan(connection, found.version_id, found.digest)
    if request.kind != "scheduled":  # nobody would be told; its values are the defaults, which match
        check_params(plan, conf)
    starts = not found.paused and _has_room(connection, found)
    number = _insert_run(connection, found, request, run_id, plan, context.now_us)
    _insert_tasks(connection, number, found.id, plan, context.now_us)
    if starts:
        start_runs(connection, [number], context)
    return get_run_by_number(connection, number)


def lock_dag(connection: Connection, dag_id: str) -> Row[Any]:
    """Lock the row of a DAG, and return it.

    Raises:
        CallRefusedError: There is no such DAG.
    """
    row = connection.execute(_LOCK_DAG, {"dag_name": dag_id}).first()
    if row is None:
        raise CallRefusedError(RefusalKind.UNKNOWN, f"there is no DAG {dag_id!r}; list them with `tidemill dags list`")
    return row


def _choose_run_id(connection: Connection, number: int, request: CreateRun, now_us: int) -> str:
    """Return the name of the new run.

    Raises:
        CallRefusedError: There is a run of this name, or with this logical date; or it is not a name.
    """
    given = request.run_id or ""
    if given in (".", "..") or "/" in given or given.startswith("-"):
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"the id of a run {given[:_MAX_NAME]!r} must not be '.' or '..', nor have a '/', nor begin with '-': it is "
            "a part of addresses and commands; choose another one",
        )
    if len(given) > _MAX_NAME or not given.isprintable():
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"the id of a run {given[:_MAX_NAME]!r} must have at most {_MAX_NAME} characters, and neither line breaks"
            " nor other control characters; choose another one",
        )
    time_us = now_us if request.logical_us is None else request.logical_us
    while True:
        time = datetime.fromtimestamp(time_us / 1_000_000, UTC).isoformat()
        name = request.run_id or f"{request.kind}__{time}"
        twin = _find_twin(connection, number, name, request.logical_us)
        if twin is None:
            return name
        if request.run_id is not None or request.logical_us is not None:
            what = f"a run {name!r}" if twin == name else f"a run with this logical date, {twin!r}"
            raise CallRefusedError(RefusalKind.CONFLICT, f"DAG {request.dag_id!r} already has {what}")
        time_us += 1


def _find_twin(connection: Connection, number: int, name: str, logical_us: int | None) -> str | None:
    given = {"dag_number": number, "name": name, "logical": logical_us}
    found = connection.execute(_TWINS, given).scalar()
    return None if found is None else str(found)


def _has_room(connection: Connection, found: Row[Any]) -> bool:
    active = connection.execute(_ACTIVE_RUNS, {"dag_number": found.id}).one()
    return not active.queued and active.running < found.max_active_runs


def _insert_run(
    connection: Connection, found: Row[Any], request: CreateRun, run_id: str, plan: DagPlan, now_us: int
) -> int:
    interval_us = request.logical_us
    values = {
        "dag": found.id,
        "version_id": found.version_id,
        "run_id": run_id,
        "kind": request.kind,
        "state": "queued",
        "unfinished": len(plan.tasks),
        "conf": request.conf,
        "created_by": request.by,
        "request": request.request or None,
        "logical_us": request.logical_us,
        "interval_start_us": interval_us if request.interval_start_us is None else request.interval_start_us,
        "interval_end_us": interval_us if request.interval_end_us is None else request.interval_end_us,
        "created_us": now_us,
    }
    return int(connection.execute(_NEW_RUN, values).scalar_one())


def _insert_tasks(connection: Connection, run: int, number: int, plan: DagPlan, now_us: int) -> None:
    rows = [(run, number, *_build_task(one), now_us) for one in plan.tasks.values()]
    if rows:
        dialect = find_dialect(connection)
        connection.execute(_build_task_insert(dialect), _NEW.build_parameters(dialect, rows))


def _build_task(plan: TaskPlan) -> tuple[int | str, ...]:
    one = plan.structure
    # What waits for nothing is decided when the run starts; everything else when its upstream says something.
    pending = int(decide(plan.rule, plan.build_upstream((0, 0, 0, 0))) is not Readiness.WAIT)
    rank = compute_rank(one.priority, resumed=False)
    return (one.id, plan.number, one.queue, one.pool, one.pool_slots, one.retries + 1, pending, rank)


@cache
def _build_task_insert(dialect: str) -> Insert:
    given = _NEW.build_source(dialect)
    copied = [
        "run",
        "dag",
        "task_id",
        "number",
        "queue",
        "pool",
        "pool_slots",
        "max_tries",
        "pending",
        "rank",
        "since_us",
    ]
    constant = [literal(value).label(name) for name, value in _CONSTANT.items()]
    values = select(*[given.c[name] for name in copied], *constant).where(true()).order_by(given.c.position)
    return insert(task_instance).from_select([*copied, *_CONSTANT], values)


def start_runs(connection: Connection, runs: Sequence[int], context: CallContext) -> Board:
    """Start runs that wait, and decide their first tasks."""
    board = Board(connection, context)
    board.lock((), runs)
    for run in board.runs.values():
        begin_run(run, context.now_us)
    board.add_pending()
    close_board(board)
    return board


def begin_run(run: RunEntry, now_us: int) -> None:
    """Let a run begin, or go on."""
    timeout_us = run.plan.structure.run_timeout_us
    run.state, run.started_us, run.ended_us, run.reason = "running", now_us, None, None
    run.deadline_us = None if timeout_us is None else now_us + timeout_us
    run.changed = True


def start_waiting_runs(connection: Connection, context: CallContext, limit: int, skip: Collection[int] = ()) -> int:
    """Start the oldest runs that wait, of each DAG as many as may be active; return how many.

    Args:
        connection: In a transaction.
        context: The time, and what the transaction leaves besides rows.
        limit: How many DAGs it looks at, and how many runs of each it starts.
        skip: Runs that are passed over.
    """
    passed = [_RUN.id.not_in(skip)] if skip else []
    runs: list[int] = []
    for number in _find_dags_with_room(connection, limit):
        found = connection.execute(select(dag).where(_DAG.id == number).with_for_update()).one()
        running = and_(_RUN.dag == number, IS_RUNNING)
        room = found.max_active_runs - connection.execute(select(func.count()).where(running)).scalar_one()
        waiting = select(_RUN.id).where(and_(_RUN.dag == number, IS_QUEUED, *passed)).order_by(_RUN.id)
        runs += connection.execute(waiting.limit(min(max(room, 0), limit))).scalars().all()
    given = [(number, number) for number in runs]
    return work_on_runs(connection, context, given, lambda numbers: len(start_runs(connection, numbers, context).runs))


def _find_dags_with_room(connection: Connection, limit: int) -> list[int]:
    waiting = select(_RUN.dag).where(IS_QUEUED).distinct().subquery()
    running = select(func.count()).where(and_(_RUN.dag == _DAG.id, IS_RUNNING)).scalar_subquery()
    statement = (
        select(_DAG.id)
        .join(waiting, waiting.c.dag == _DAG.id)
        .where(and_(_DAG.paused == 0, running < _DAG.max_active_runs))
    )
    return list(connection.execute(statement.order_by(_DAG.id).limit(limit)).scalars())


def cancel_run(connection: Connection, request: CancelRun, context: CallContext) -> RunRecord:
    """Cancel a run; see `CancelRun`."""
    number = find_run(connection, request.dag_id, request.run_id)
    stop_runs(connection, [number], f"cancelled by {request.by}", "cancel", context)
    return get_run_by_number(connection, number)


def stop_runs(connection: Connection, runs: Sequence[int], reason: str, stop: str, context: CallContext) -> Board:
    """End the tasks of runs that have not ended; they fail for this reason."""
    board = Board(connection, context)
    board.lock((), runs)
    for run in board.runs.values():
        if run.state in _ACTIVE:
            run.reason, run.stop, run.deadline_us, run.changed = reason, stop, None, True
    close_board(board)
    return board


def find_run(connection: Connection, dag_id: str, run_id: str) -> int:
    """Return the number of a run.

    Raises:
        CallRefusedError: There is no such run.
    """
    statement = select(_RUN.id).join(dag, _DAG.id == _RUN.dag)
    found = connection.execute(statement.where(and_(_DAG.dag_id == dag_id, _RUN.run_id == run_id))).scalar()
    if found is None:
        raise CallRefusedError(
            RefusalKind.UNKNOWN, f"DAG {dag_id!r} has no run {run_id!r}; list them with `tidemill runs list {dag_id}`"
        )
    return int(found)


def get_earlier_run(connection: Connection, request: GetEarlierRun) -> RunRecord | None:
    """Return the run before another one; see `GetEarlierRun`."""
    own = select(_RUN.dag, _RUN.logical_us).where(_RUN.id == request.run).subquery()
    statement = RUNS.join(own, and_(_RUN.dag == own.c.dag, _RUN.logical_us < own.c.logical_us))
    if request.state is not None:
        statement = statement.where(_RUN.state == request.state)
    row = connection.execute(statement.order_by(_RUN.logical_us.desc()).limit(1)).first()
    return None if row is None else read_run(row)


def get_run_by_number(connection: Connection, number: int) -> RunRecord:
    """Return a run."""
    return read_run(connection.execute(_RUN_BY_NUMBER, {"run_number": number}).one())


def get_run(connection: Connection, request: GetRun) -> RunRecord | None:
    """Return a run; see `GetRun`."""
    statement: Select[Any] = RUNS.where(_DAG.dag_id == request.dag_id)
    if request.run_id is not None:
        statement = statement.where(_RUN.run_id == request.run_id)
    row = connection.execute(statement.order_by(_RUN.id.desc()).limit(1)).first()
    return None if row is None else read_run(row)


def list_runs(connection: Connection, request: ListRuns) -> Listed[RunRecord]:
    """Return a page of runs; see `ListRuns`."""
    statement: Select[Any] = RUNS.order_by(_RUN.id.desc()).limit(request.limit + 1)
    if request.dag_id is not None:
        statement = statement.where(_DAG.dag_id == request.dag_id)
    if request.states:
        statement = statement.where(_RUN.state.in_(request.states))
    if request.after is not None:
        statement = statement.where(_RUN.id < int(request.after))
    rows = [read_run(row) for row in connection.execute(statement)]
    return Listed(tuple(rows[: request.limit]), str(rows[request.limit - 1].id) if len(rows) > request.limit else None)


def read_run(row: Row[Any]) -> RunRecord:
    """Build the record of a row of `RUNS`."""
    return RunRecord(
        row.id,
        row.dag_id,
        row.run_id,
        row.kind,
        row.state,
        row.reason,
        row.number,
        row.logical_us,
        row.interval_start_us,
        row.interval_end_us,
        row.conf,
        row.created_by,
        row.created_us,
        row.started_us,
        row.ended_us,
    )
