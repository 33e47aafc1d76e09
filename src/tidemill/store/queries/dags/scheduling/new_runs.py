"""Creates runs of DAGs.

Invariants: a run and its tasks are created together. The active runs of a DAG are counted while the DAG's row is
locked.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    Connection,
    Executable,
    Insert,
    Select,
    and_,
    bindparam,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    true,
)

from tidemill.core.tasks.dependencies import Readiness, decide
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.run_calls import CreateRun, RunRecord
from tidemill.store.context import CallContext
from tidemill.store.dag_plan import NO_COUNTS, DagPlan, TaskPlan
from tidemill.store.dag_tables import dag, dag_run, dag_version, task_instance, task_map
from tidemill.store.queries.dags.items.conf_lists import take_lists
from tidemill.store.queries.dags.runs.runs import IS_QUEUED, IS_RUNNING, RUNS, read_run, start_runs
from tidemill.store.queries.dags.state.task_rows import compute_rank, load_plan
from tidemill.store.queries.dags.values.run_params import check_params, find_lists, find_misspelt, read_conf
from tidemill.store.statements import Statement

_RUN, _DAG = dag_run.c, dag.c
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
_MAPPED = RowSet("mapped", task_id=str)
_CONSTANT = {
    "map_index": UNMAPPED,
    "state": TaskState.NONE.value,
    "epoch": 0,
    "tries": 0,
    "tries_before": 0,
    "lost": 0,
    "tallies": "",
    "skip_votes": 0,
}
#: The columns of a new run.
_NEW_RUN = (
    "dag", "version_id", "run_id", "kind", "state", "unfinished", "conf", "created_by", "request", "logical_us",
    "interval_start_us", "interval_end_us", "created_us",
)  # fmt: skip
#: The same limit as for DAG ids.
_MAX_NAME = 250
_OF_DAG = _RUN.dag == bindparam("dag_number")


class LockedDag(NamedTuple):
    """A DAG whose row is locked; `digest`: the digest of its newest structure."""

    id: int
    version_id: int
    number: int
    digest: str
    active: int
    paused: int
    max_active_runs: int


def create_run(connection: Connection, request: CreateRun, context: CallContext) -> RunRecord:
    """Create a run with its tasks and start it if the limit allows; see `CreateRun`."""
    found = lock_dag(connection, request.dag_id)
    if request.request:
        known = connection.execute(RUNS.where(and_(_RUN.dag == found.id, _RUN.request == request.request))).first()
        if known is not None:
            plan = load_plan(connection, found.version_id, found.digest)
            return msgspec.structs.replace(read_run(known), warnings=find_misspelt(plan, read_conf(request.conf)))
    if not found.active:
        raise CallRefusedError(
            RefusalKind.UNKNOWN,
            f"DAG {request.dag_id!r} is not active: its file no longer defines it; restore the file",
        )
    conf = read_conf(request.conf)
    run_id = _choose_run_id(connection, found.id, request, context.now_us)
    plan = load_plan(connection, found.version_id, found.digest)
    if request.kind != "scheduled":  # a scheduled run has only default values, which match; there is no user to warn
        check_params(plan, conf)
    starts = not found.paused and _has_room(connection, found)
    interval = (
        request.logical_us if request.interval_start_us is None else request.interval_start_us,
        request.logical_us if request.interval_end_us is None else request.interval_end_us,
    )
    number = _insert_run(connection, found, request, run_id, interval, plan, context.now_us)
    _insert_tasks(connection, number, found.id, plan, context.now_us)
    lists = find_lists(conf)
    if lists or request.stage:
        take_lists(connection, number, plan, lists, request.stage)
    run = start_runs(connection, [number], context).runs[number] if starts else None
    return RunRecord(
        number,
        request.dag_id,
        run_id,
        request.kind,
        "queued" if run is None else run.state,
        None if run is None else run.reason,
        found.number,
        request.logical_us,
        *interval,
        request.conf,
        request.by,
        context.now_us,
        None if run is None else run.started_us,
        None if run is None else run.ended_us,
        find_misspelt(plan, conf),
    )


def lock_dag(connection: Connection, dag_id: str) -> LockedDag:
    """Lock the row of a DAG and return it.

    Raises:
        CallRefusedError: There is no such DAG.
    """
    rows = _dag_lock.fetch(connection, {"dag_name": dag_id})
    if not rows:
        raise CallRefusedError(RefusalKind.UNKNOWN, f"there is no DAG {dag_id!r}; list them with `tidemill dags list`")
    return LockedDag(*rows[0])


@Statement
def _dag_lock(dialect: str) -> Select[Any]:
    of_version = (dag_version.c.number, dag_version.c.digest)
    return (
        select(_DAG.id, _DAG.version_id, *of_version, _DAG.active, _DAG.paused, _DAG.max_active_runs)
        .join(dag_version, dag_version.c.id == _DAG.version_id)
        .where(_DAG.dag_id == bindparam("dag_name"))
        .with_for_update(of=dag, key_share=True)
    )


def _choose_run_id(connection: Connection, number: int, request: CreateRun, now_us: int) -> str:
    """Return the name of the new run.

    Raises:
        CallRefusedError: The name is invalid, or another run has this name or logical date.
    """
    given = request.run_id or ""
    if given in (".", "..") or "/" in given or given.startswith("-"):
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"the id of a run {given[:_MAX_NAME]!r} must not be '.' or '..', contain '/' or start with '-', because it "
            "is part of URLs and commands; choose another one",
        )
    if len(given) > _MAX_NAME or not given.isprintable():
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"the id of a run {given[:_MAX_NAME]!r} must have at most {_MAX_NAME} characters and no line breaks or "
            "other control characters; choose another one",
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
        # Another run has the generated name; the next microsecond gives another name.
        time_us += 1


def _find_twin(connection: Connection, number: int, name: str, logical_us: int | None) -> str | None:
    given = {"dag_number": number, "name": name, "logical": logical_us}
    found = _twins.fetch(connection, given)
    return str(found[0][0]) if found else None


@Statement
def _twins(dialect: str) -> Select[Any]:
    same = or_(_RUN.run_id == bindparam("name"), _RUN.logical_us == bindparam("logical", type_=BigInteger()))
    return select(_RUN.run_id).where(and_(_OF_DAG, same))


def _has_room(connection: Connection, found: LockedDag) -> bool:
    ((queued, running),) = _active_runs.fetch(connection, {"dag_number": found.id})
    return not queued and running < found.max_active_runs


@Statement
def _active_runs(dialect: str) -> Select[Any]:
    running = select(func.count()).where(and_(_OF_DAG, IS_RUNNING)).scalar_subquery()
    return select(exists().where(and_(_OF_DAG, IS_QUEUED)), running)


def _insert_run(
    connection: Connection,
    found: LockedDag,
    request: CreateRun,
    run_id: str,
    interval: tuple[int | None, int | None],
    plan: DagPlan,
    now_us: int,
) -> int:
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
        "interval_start_us": interval[0],
        "interval_end_us": interval[1],
        "created_us": now_us,
    }
    return int(_run_insert.fetch(connection, values)[0][0])


@Statement
def _run_insert(dialect: str) -> Executable:
    values = {name: bindparam(name, type_=_RUN[name].type) for name in _NEW_RUN}
    return insert(dag_run).values(values).returning(_RUN.id)


def _insert_tasks(connection: Connection, run: int, number: int, plan: DagPlan, now_us: int) -> None:
    rows = [(run, number, *_build_task(one), now_us) for one in plan.tasks.values()]
    if rows:
        _task_insert.fetch(connection, _NEW.build_parameters(find_dialect(connection), rows))
    if plan.maps:
        names = _MAPPED.build_parameters(find_dialect(connection), [(name,) for name in plan.maps])
        _map_insert.fetch(connection, {**names, "of_run": run})


def _build_task(plan: TaskPlan) -> tuple[int | str, ...]:
    one = plan.structure
    # Tasks without upstream are decided when the run starts, all others when their upstream ends.
    pending = int(decide(plan.rule, plan.build_upstream(NO_COUNTS)) is not Readiness.WAIT)
    rank = compute_rank(one.priority, resumed=False)
    # The elements of a mapped task take slots, not the task itself.
    slots = one.pool_slots if one.mapped is None else 0
    return (one.id, plan.number, one.queue, one.pool, slots, one.retries + 1, pending, rank)


@Statement
def _task_insert(dialect: str) -> Insert:
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


@Statement
def _map_insert(dialect: str) -> Insert:
    columns = task_instance.c
    mapped = _MAPPED.build_match(dialect, "task_id", columns.task_id)
    heads = and_(columns.run == bindparam("of_run"), mapped, columns.map_index == UNMAPPED)
    rows = select(columns.id, columns.run, columns.task_id).where(heads)
    return insert(task_map).from_select(["task", "run", "task_id"], rows)
