"""Reads, locks and writes the rows of tasks and runs, in batches.

Invariants: rows of runs are locked before those of their tasks, both by ascending id. Only `queries.board` writes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, Select, Update, and_, bindparam, literal_column, select, update

from tidemill.core.errors import InvariantError, describe_error
from tidemill.core.tasks.attempt import Resume, TaskRow, TaskState
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.dag_plan import Counts, DagPlan, PlanCache, TaskPlan, read_counts, write_counts
from tidemill.store.dag_tables import dag_run, dag_version, task_instance
from tidemill.store.queries.cursors import IDS, build_id_rows

#: Structures do not change: one cache for all databases of the process.
_PLANS = PlanCache()
#: A task that resumes comes before all others of its pool and queue.
_FIRST = 1 << 40

_NAMED = RowSet("named", run=int, task_id=str)
# fmt: off
_FIELDS = (
    "state", "epoch", "tries", "tries_before", "max_tries", "session_id", "lost", "deadline_us", "due_us",
    "next_due_us", "resume_method", "resume_kwargs", "resume_payload", "tallies", "pending", "skip_votes",
    "skips", "rank", "since_us", "started_us", "ended_us", "claim_request", "error",
)
# fmt: on
_TEXTS = {"state", "resume_method", "resume_kwargs", "resume_payload", "tallies", "skips", "error"}
_CHANGED = RowSet("changed", id=int, **{name: str if name in _TEXTS else int for name in _FIELDS})
_TALLIED = RowSet("tallied", id=int, tallies=str, pending=int, skip_votes=int)
_RUNS = RowSet(
    "runs", id=int, state=str, reason=str, stop=str, unfinished=int, started_us=int, ended_us=int, deadline_us=int
)
_TASK = task_instance.c
COLUMNS = [_TASK[name] for name in ("id", "run", "dag", "task_id", "map_index", *_FIELDS)]


class UnreadableStructureError(InvariantError):
    """The structure of a DAG in the store cannot be read: its runs are left as they are, and keep nothing up."""


class RunEntry:
    """A run whose row is locked."""

    __slots__ = (
        "changed",
        "dag",
        "deadline_us",
        "ended_us",
        "id",
        "logical_us",
        "plan",
        "reason",
        "started_us",
        "state",
        "stop",
        "unfinished",
    )

    def __init__(self, row: Row[Any], plan: DagPlan) -> None:
        """Keep what may change."""
        self.plan = plan
        self.changed = False
        self.id: int = row.id
        self.dag: int = row.dag
        self.state: str = row.state
        self.reason: str | None = row.reason
        self.stop: str | None = row.stop
        self.unfinished: int = row.unfinished
        self.logical_us: int | None = row.logical_us
        self.started_us: int | None = row.started_us
        self.ended_us: int | None = row.ended_us
        self.deadline_us: int | None = row.deadline_us


class TaskEntry:
    """A task whose row is locked.

    `changed`: its state has changed; `tallied`: only what it knows of others.
    """

    __slots__ = (
        "changed",
        "claim_request",
        "counts",
        "ended_us",
        "error",
        "id",
        "pending",
        "plan",
        "row",
        "run",
        "since_us",
        "skip_votes",
        "skips",
        "started_us",
        "tallied",
        "task_id",
    )

    def __init__(self, row: Row[Any], run: RunEntry) -> None:
        """Build what the machine takes."""
        plan: TaskPlan = run.plan.tasks[row.task_id]
        self.id: int = row.id
        self.run = run
        self.task_id: str = row.task_id
        self.plan = plan
        self.row = read_task_row(row, plan)
        self.counts: Counts = read_counts(row.tallies)
        self.pending: int = row.pending
        self.skip_votes: int = row.skip_votes
        self.skips: str | None = row.skips
        self.since_us: int = row.since_us
        self.started_us: int | None = row.started_us
        self.ended_us: int | None = row.ended_us
        self.claim_request: int | None = row.claim_request
        self.error: str | None = row.error
        self.changed = self.tallied = False


def read_task_row(row: Row[Any], plan: TaskPlan) -> TaskRow:
    """Return a stored task as the machine takes it; the arguments with which it resumes stay encrypted."""
    resume = None
    if row.resume_method is not None:
        resume = Resume(row.resume_method, row.resume_kwargs, row.resume_payload)
    return TaskRow(
        plan.policy,
        TaskState(row.state),
        row.epoch,
        row.tries,
        row.tries_before,
        row.max_tries,
        row.session_id,
        row.lost,
        row.deadline_us,
        row.due_us,
        resume,
    )


def compute_rank(priority: int, resumed: bool) -> int:
    """Return the number by which tasks that wait are sorted, lowest first."""
    return -priority - (_FIRST if resumed else 0)


def is_resumed(rank: int) -> bool:
    """Return whether a rank is that of a task that resumes."""
    return rank < -(_FIRST >> 1)


Found = tuple[dict[int, RunEntry], dict[int, UnreadableStructureError]]


def lock_runs(connection: Connection, ids: Collection[int]) -> Found:
    """Lock runs until the transaction ends; return them by id, and what is wrong with those that cannot be read."""
    return _read_runs(connection, ids, _build_run_lock(find_dialect(connection)))


def read_runs(connection: Connection, ids: Collection[int]) -> Found:
    """Return what `lock_runs` does without locking anything: the runs may not be written."""
    return _read_runs(connection, ids, _build_run_select(find_dialect(connection)))


def _read_runs(connection: Connection, ids: Collection[int], statement: Select[Any]) -> Found:
    parameters = IDS.build_parameters(find_dialect(connection), build_id_rows(ids))
    found, unreadable = {}, {}
    for row in connection.execute(statement, parameters).all():
        try:
            found[row.id] = RunEntry(row, load_plan(connection, row.version_id, row.digest))
        except UnreadableStructureError as error:
            unreadable[row.id] = error
    return found, unreadable


def load_plan(connection: Connection, version_id: int, digest: str) -> DagPlan:
    """Return the plan of a version, which is read only if it is not kept.

    Raises:
        UnreadableStructureError: The structure is not one that this version of tidemill knows.
    """

    def load() -> str:
        statement = select(dag_version.c.structure).where(dag_version.c.id == version_id)
        return str(connection.execute(statement).scalar_one())

    try:
        return _PLANS.find(digest, load)
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise UnreadableStructureError(
            f"the structure of a DAG cannot be read (version {version_id} in the store); use the version of tidemill "
            f"that stored it: {describe_error(error)}"
        ) from error


@cache
def _build_run_lock(dialect: str) -> Select[Any]:
    return _build_run_select(dialect).with_for_update(of=dag_run)


@cache
def _build_run_select(dialect: str) -> Select[Any]:
    return (
        select(dag_run, dag_version.c.digest)
        .join(dag_version, dag_version.c.id == dag_run.c.version_id)
        .where(dag_run.c.id.in_(select(IDS.build_source(dialect).c.id)))
        .order_by(dag_run.c.id)
    )


def find_runs_of(connection: Connection, tasks: Collection[int]) -> list[int]:
    """Return the runs that tasks belong to."""
    dialect = find_dialect(connection)
    found = connection.execute(_build_runs_of(dialect), IDS.build_parameters(dialect, build_id_rows(tasks)))
    return [run for (run,) in found]


@cache
def _build_runs_of(dialect: str) -> Select[Any]:
    return select(_TASK.run).where(_TASK.id.in_(select(IDS.build_source(dialect).c.id))).distinct()


def lock_tasks(connection: Connection, ids: Collection[int]) -> list[Row[Any]]:
    """Lock tasks by id until the transaction ends."""
    dialect = find_dialect(connection)
    return list(connection.execute(_build_task_lock(dialect), IDS.build_parameters(dialect, build_id_rows(ids))))


def read_tasks(connection: Connection, ids: Collection[int]) -> list[Row[Any]]:
    """Return tasks without locking them: they may not be written."""
    dialect = find_dialect(connection)
    return list(connection.execute(_build_task_select(dialect), IDS.build_parameters(dialect, build_id_rows(ids))))


@cache
def _build_task_lock(dialect: str) -> Select[Any]:
    return _build_task_select(dialect).with_for_update()


@cache
def _build_task_select(dialect: str) -> Select[Any]:
    wanted = select(IDS.build_source(dialect).c.id)
    return select(*COLUMNS).where(_TASK.id.in_(wanted)).order_by(_TASK.id)


def lock_named(connection: Connection, names: Iterable[tuple[int, str]]) -> list[Row[Any]]:
    """Lock tasks by run and name, in the order of their ids."""
    dialect = find_dialect(connection)
    return list(connection.execute(_build_named_lock(dialect), _NAMED.build_parameters(dialect, names)))


@cache
def _build_named_lock(dialect: str) -> Select[Any]:
    given = _NAMED.build_source(dialect)
    same = and_(_TASK.run == given.c.run, _TASK.task_id == given.c.task_id)
    return select(*COLUMNS).join(given, same).order_by(_TASK.id).with_for_update(of=task_instance)


def lock_pending(connection: Connection, runs: Collection[int], limit: int) -> list[Row[Any]]:
    """Lock tasks of these runs that are still to be decided."""
    dialect = find_dialect(connection)
    given = IDS.build_parameters(dialect, build_id_rows(runs))
    return list(connection.execute(_build_pending_lock(dialect), {**given, "most": limit}))


@cache
def _build_pending_lock(dialect: str) -> Select[Any]:
    wanted = and_(_TASK.run.in_(select(IDS.build_source(dialect).c.id)), _TASK.pending == literal_column("1"))
    return select(*COLUMNS).where(wanted).order_by(_TASK.run, _TASK.id).limit(bindparam("most")).with_for_update()


def build_values(entry: TaskEntry) -> tuple[int | str | None, ...]:
    """Return what is stored of a task, in the order of `FIELDS`."""
    row, resume = entry.row, entry.row.resume
    return (
        row.state.value,
        row.epoch,
        row.tries,
        row.tries_before,
        row.max_tries,
        row.session,
        row.lost,
        row.deadline_us,
        row.due_us,
        row.next_due_us,
        None if resume is None else resume.method,
        None if resume is None else resume.kwargs,
        None if resume is None else resume.payload,
        write_counts(entry.counts),
        entry.pending,
        entry.skip_votes,
        entry.skips,
        compute_rank(entry.plan.structure.priority, resume is not None),
        entry.since_us,
        entry.started_us,
        entry.ended_us,
        entry.claim_request,
        entry.error,
    )


def write_tasks(connection: Connection, entries: Iterable[TaskEntry]) -> None:
    """Write the tasks that have changed."""
    dialect = find_dialect(connection)
    full, tallied = [], []
    for entry in entries:
        if entry.changed:
            full.append((entry.id, *build_values(entry)))
        elif entry.tallied:
            tallied.append((entry.id, write_counts(entry.counts), entry.pending, entry.skip_votes))
        entry.changed = entry.tallied = False
    if full:
        connection.execute(_build_update(dialect), _CHANGED.build_parameters(dialect, full))
    if tallied:
        connection.execute(_build_tally_update(dialect), _TALLIED.build_parameters(dialect, tallied))


@cache
def _build_update(dialect: str) -> Update:
    given = _CHANGED.build_source(dialect)
    return update(task_instance).where(_TASK.id == given.c.id).values({name: given.c[name] for name in _FIELDS})


@cache
def _build_tally_update(dialect: str) -> Update:
    given = _TALLIED.build_source(dialect)
    names = ("tallies", "pending", "skip_votes")
    return update(task_instance).where(_TASK.id == given.c.id).values({name: given.c[name] for name in names})


def write_runs(connection: Connection, entries: Iterable[RunEntry]) -> None:
    """Write the runs that have changed."""
    rows = []
    for run in entries:
        if run.changed:
            times = (run.started_us, run.ended_us, run.deadline_us)
            rows.append((run.id, run.state, run.reason, run.stop, run.unfinished, *times))
        run.changed = False
    if rows:
        dialect = find_dialect(connection)
        connection.execute(_build_run_update(dialect), _RUNS.build_parameters(dialect, rows))


@cache
def _build_run_update(dialect: str) -> Update:
    given = _RUNS.build_source(dialect)
    names = ("state", "reason", "stop", "unfinished", "started_us", "ended_us", "deadline_us")
    return update(dag_run).where(dag_run.c.id == given.c.id).values({name: given.c[name] for name in names})
