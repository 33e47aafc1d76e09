"""Reads, locks and writes the rows of tasks and runs, in batches.

Invariants: runs are locked before their tasks, both by ascending id. Only `queries.dags.state.transition` writes rows.
Locks of runs leave their keys free, so that the callback of an element, which refers to its run, can be inserted
meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Select, SelectBase, Update, and_, bindparam, literal_column, select, union, update

from tidemill.core.errors import InvariantError, describe_error
from tidemill.core.tasks.expansion import find_count
from tidemill.core.tasks.instance import UNMAPPED, format_instance
from tidemill.core.tasks.task_row import BlockPhase, TaskBlock, TaskEnding, TaskResume, TaskRow, TaskState, TaskStream
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.dag_plan import Counts, DagPlan, PlanCache, TaskPlan, read_counts, write_counts
from tidemill.store.dag_tables import dag_run, dag_version, task_instance
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows
from tidemill.store.statements import Statement

#: Structures are immutable, so all databases of the process share one cache.
_PLANS = PlanCache()
#: The rank offset that puts resuming tasks before all others of their pool and queue.
_FIRST = 1 << 40
_STATES = {state.value: state for state in TaskState}
_ENDING = TaskState.ENDING.value
_NO_STREAM = (None, None, None)

_NAMED = RowSet("named", run=int, task_id=str, map_index=int)
#: The columns that nearly every transition changes, and those that few transitions change.
_MOVING = (
    "state", "epoch", "tries", "session_id", "deadline_us", "next_due_us", "pending", "since_us", "started_us",
    "ended_us", "claim_request", "items_digest",
)  # fmt: skip
_REST = (
    "tries_before", "max_tries", "lost", "due_us", "resume_method", "resume_kwargs", "resume_payload", "tallies",
    "skip_votes", "skips", "rank", "error", "ending_outcome", "block", "block_us", "stream_epoch", "stream_due_us",
    "stream_paused", "ending_triggerer",
)  # fmt: skip
_FIELDS = (*_MOVING, *_REST)
_TEXTS = {"state", "resume_method", "resume_kwargs", "resume_payload", "tallies", "skips", "error", "ending_outcome"}
_MOVED = RowSet("moved", id=int, **{name: str if name in _TEXTS else int for name in _MOVING})
_CHANGED = RowSet("changed", id=int, **{name: str if name in _TEXTS else int for name in _FIELDS})
_TALLIED = RowSet("tallied", id=int, tallies=str, pending=int, skip_votes=int)
_RUNS = RowSet(
    "runs", id=int, state=str, reason=str, stop=str, unfinished=int, started_us=int, ended_us=int, deadline_us=int
)
_TASK = task_instance.c
#: The columns read of a task, in the order that `TaskEntry` expects.
COLUMNS = [_TASK[name] for name in ("id", "run", "task_id", "map_index", *_FIELDS)]
_RUN_FIELDS = (
    "id", "dag", "state", "reason", "stop", "unfinished", "logical_us", "started_us", "ended_us", "deadline_us"
)  # fmt: skip

#: A row of `COLUMNS`.
TaskValues = Sequence[Any]
#: A task instance: run, task and map index.
InstanceKey = tuple[int, str, int]


class UnreadableStructureError(InvariantError):
    """The stored structure of a DAG is unreadable; its runs stay unchanged and do not block others."""


class RunEntry:
    """A run; only if its row is locked it may be changed."""

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

    def __init__(self, row: Sequence[Any], plan: DagPlan) -> None:
        self.plan = plan
        self.changed = False
        self.id: int
        self.dag: int
        self.state: str
        self.reason: str | None
        self.stop: str | None
        self.unfinished: int
        self.logical_us: int | None
        self.started_us: int | None
        self.ended_us: int | None
        self.deadline_us: int | None
        (
            self.id, self.dag, self.state, self.reason, self.stop, self.unfinished, self.logical_us, self.started_us,
            self.ended_us, self.deadline_us,
        ) = row  # fmt: skip


class TaskEntry:
    """A task whose row is locked.

    `changed`: its state has changed; `tallied`: only its tallies have changed.
    """

    __slots__ = (
        "changed",
        "claim_request",
        "counted",
        "counts",
        "ended_us",
        "error",
        "id",
        "is_counted",
        "items_digest",
        "map_index",
        "pending",
        "plan",
        "rest",
        "row",
        "run",
        "since_us",
        "skip_votes",
        "skips",
        "started_us",
        "tallied",
        "task_id",
        "window",
    )

    def __init__(self, row: TaskValues, run: RunEntry) -> None:
        """Build the state machine's row; the resume arguments stay encrypted."""
        (
            self.id, _, self.task_id, self.map_index,
            state, epoch, tries, session, deadline_us, _, pending, since_us, started_us, ended_us, claim_request,
            digest,
            tries_before, max_tries, lost, due_us, method, kwargs, payload, tallies, skip_votes, skips, _, error,
            ending_outcome, block, block_us, stream_epoch, stream_due_us, stream_paused, triggerer,
        ) = row  # fmt: skip
        self.run = run
        self.plan: TaskPlan = run.plan.tasks[self.task_id]
        resume = None if method is None else TaskResume(method, kwargs, payload)
        ending = TaskEnding(_STATES[ending_outcome or "none"], error, triggerer) if state == _ENDING else None
        policy = self.plan.head_policy if self.map_index == UNMAPPED else self.plan.policy
        self.row = TaskRow(
            policy, _STATES[state], epoch, tries, tries_before, max_tries, session, lost, deadline_us, due_us,
            resume, ending, None, TaskBlock(BlockPhase(block), block_us) if block else None,
            None if stream_epoch is None else TaskStream(stream_epoch, stream_due_us, bool(stream_paused)),
        )  # fmt: skip
        #: The count of the map that an element belongs to, as the map knows it.
        self.counted: str | None = None if self.map_index == UNMAPPED else find_count(self.row.state)
        #: Whether its map counts it; not while it is removed with a former life of the map.
        self.is_counted = True
        #: The window of a map in this transaction, if it is smaller than the map's own.
        self.window: int | None = None
        self.counts: Counts = read_counts(tallies)
        self.pending: int = pending
        self.skip_votes: int = skip_votes
        self.skips: str | None = skips
        self.since_us: int = since_us
        self.started_us: int | None = started_us
        self.ended_us: int | None = ended_us
        self.claim_request: int | None = claim_request
        #: The digest of the items with which the last attempt of an element started.
        self.items_digest: int | None = digest
        self.error: str | None = error
        self.changed = self.tallied = False
        #: The stored values of `_REST`.
        self.rest: tuple[int | str | None, ...] = tuple(row[16:])

    @property
    def name(self) -> str:
        """Its name for display."""
        return format_instance(self.task_id, self.map_index)

    @property
    def successors(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        """The successors whose tallies count its outcome; for an element those in its unit, if it is part of one."""
        return self.plan.successors if self.map_index == UNMAPPED else self.plan.inner

    @property
    def is_part(self) -> bool:
        """Whether it is a task in a unit of a mapped group."""
        return self.map_index != UNMAPPED and bool(self.plan.structure.mapped_group)

    @property
    def is_unit(self) -> bool:
        """Whether it is a unit of a mapped group."""
        return self.row.policy.is_unit

    def build_moved(self) -> tuple[int | str | None, ...]:
        """Return the id and the values of `_MOVING`."""
        row = self.row
        return (
            self.id, row.state.value, row.epoch, row.tries, row.session, row.deadline_us, row.next_due_us, self.pending,
            self.since_us, self.started_us, self.ended_us, self.claim_request, self.items_digest,
        )  # fmt: skip

    def build_rest(self) -> tuple[int | str | None, ...]:
        """Return the values of `_REST`."""
        row, resume = self.row, self.row.resume
        method, kwargs, payload = (None,) * 3 if resume is None else (resume.method, resume.kwargs, resume.payload)
        rank = compute_rank(self.plan.structure.priority, resume is not None)
        after = None if row.ending is None or row.ending.state is TaskState.NONE else row.ending.state.value
        phase, block_us = (0, None) if row.block is None else row.block
        return (
            row.tries_before, row.max_tries, row.lost, row.due_us, method, kwargs, payload, write_counts(self.counts),
            self.skip_votes, self.skips, rank, self.error, after, int(phase), block_us,
            *(_NO_STREAM if row.stream is None else (row.stream.epoch, row.stream.due_us, int(row.stream.paused))),
            None if row.ending is None else row.ending.triggerer,
        )  # fmt: skip


def compute_rank(priority: int, resumed: bool) -> int:
    """Return the sort key of waiting tasks, lowest first."""
    return -priority - (_FIRST if resumed else 0)


def is_resumed(rank: int) -> bool:
    """Return whether a rank belongs to a resuming task."""
    return rank < -(_FIRST >> 1)


Found = tuple[dict[int, RunEntry], dict[int, UnreadableStructureError]]


class Located(NamedTuple):
    """Where tasks are, before they are locked.

    Attributes:
        unmapped: The runs of tasks that are not elements of mapped tasks.
        runs: The runs of the elements, which were only read.
        units: The units of mapped groups that some of the tasks are part of, and their successors there.
    """

    unmapped: set[int]
    runs: Found
    units: set[InstanceKey]


def locate_tasks(connection: Connection, ids: Collection[int]) -> Located:
    """Find out which runs to lock before tasks, and which tasks together with them."""
    unmapped: set[int] = set()
    rows: dict[int, Sequence[Any]] = {}
    elements: list[tuple[int, str, int]] = []
    given = IDS.build_parameters(find_dialect(connection), build_id_rows(ids))
    for name, index, *row in _located.fetch(connection, given):
        run = row[2]
        if index == UNMAPPED:
            unmapped.add(run)
        else:
            rows[run] = row
            elements.append((run, name, index))
    found, unreadable = _build_runs(connection, rows.values())
    units = _find_units({run: entry.plan for run, entry in found.items()}, elements)
    return Located(unmapped, (found, unreadable), units)


@Statement
def _located(dialect: str) -> Select[Any]:
    wanted = select(IDS.build_source(dialect).c.id)
    run = [dag_version.c.id, dag_version.c.digest, *[dag_run.c[name] for name in _RUN_FIELDS]]
    return (
        select(_TASK.task_id, _TASK.map_index, *run)
        .join(dag_run, dag_run.c.id == _TASK.run)
        .join(dag_version, dag_version.c.id == dag_run.c.version_id)
        .where(_TASK.id.in_(wanted))
    )


def lock_runs(connection: Connection, ids: Collection[int]) -> Found:
    """Lock runs by ascending id until the transaction ends.

    Returns:
        The runs by id, and the errors of those whose structure is unreadable.
    """
    return _read_runs(connection, ids, _run_lock)


def read_runs(connection: Connection, ids: Collection[int]) -> Found:
    """Return the same as `lock_runs`, but without locks; these runs must not be written."""
    return _read_runs(connection, ids, _run_select)


def _read_runs(connection: Connection, ids: Collection[int], statement: Statement) -> Found:
    given = IDS.build_parameters(find_dialect(connection), build_id_rows(ids))
    return _build_runs(connection, statement.fetch(connection, given))


def _build_runs(connection: Connection, rows: Iterable[Sequence[Any]]) -> Found:
    found, unreadable = {}, {}
    for version_id, digest, *row in rows:
        try:
            found[row[0]] = RunEntry(row, load_plan(connection, version_id, digest))
        except UnreadableStructureError as error:
            unreadable[row[0]] = error
    return found, unreadable


def load_plan(connection: Connection, version_id: int, digest: str) -> DagPlan:
    """Return the plan of a version, reading the structure only if the plan is not cached.

    Raises:
        UnreadableStructureError: This version of tidemill does not know the structure.
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


@Statement
def _run_lock(dialect: str) -> Select[Any]:
    return _build_run_select(select(IDS.build_source(dialect).c.id)).with_for_update(of=dag_run, key_share=True)


@Statement
def _run_select(dialect: str) -> Select[Any]:
    return _build_run_select(select(IDS.build_source(dialect).c.id))


def _build_run_select(wanted: SelectBase) -> Select[Any]:
    return (
        select(dag_version.c.id, dag_version.c.digest, *[dag_run.c[name] for name in _RUN_FIELDS])
        .join(dag_version, dag_version.c.id == dag_run.c.version_id)
        .where(dag_run.c.id.in_(wanted))
        .order_by(dag_run.c.id)
    )


def lock_tasks(connection: Connection, ids: Collection[int]) -> list[TaskValues]:
    """Lock tasks by id until the transaction ends."""
    return _task_lock.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(ids)))


def lock_units(connection: Connection, ids: Collection[int], keys: Collection[InstanceKey]) -> list[TaskValues]:
    """Lock tasks, given by id or by name, in the order of their ids, until the transaction ends."""
    dialect = find_dialect(connection)
    given = IDS.build_parameters(dialect, build_id_rows(ids)) | _NAMED.build_parameters(dialect, sorted(keys))
    return _unit_lock.fetch(connection, given)


@Statement
def _unit_lock(dialect: str) -> Select[Any]:
    given = _NAMED.build_source(dialect)
    same = and_(_TASK.run == given.c.run, _TASK.task_id == given.c.task_id, _TASK.map_index == given.c.map_index)
    wanted = union(select(IDS.build_source(dialect).c.id), select(_TASK.id).join(given, same))
    return select(*COLUMNS).where(_TASK.id.in_(wanted)).order_by(_TASK.id).with_for_update()


def find_units(connection: Connection, ids: Collection[int]) -> set[InstanceKey]:
    """Return the units of mapped groups that some of the given tasks are part of, and their successors there."""
    plans: dict[int, DagPlan] = {}
    elements = []
    for run, name, index, version_id, digest in _elements.fetch(
        connection, IDS.build_parameters(find_dialect(connection), build_id_rows(ids))
    ):
        try:
            plans[run] = load_plan(connection, version_id, digest)
        except UnreadableStructureError:
            continue  # the run stays unchanged
        elements.append((run, name, index))
    return _find_units(plans, elements)


def _find_units(plans: Mapping[int, DagPlan], elements: Iterable[InstanceKey]) -> set[InstanceKey]:
    found: set[InstanceKey] = set()
    for run, name, index in elements:
        plan = plans.get(run)
        if plan is not None:
            # A task in a unit counts for its successors there, and for the unit.
            found.update((run, one, index) for one, _ in plan.tasks[name].inner)
    return found


@Statement
def _elements(dialect: str) -> Select[Any]:
    wanted = select(IDS.build_source(dialect).c.id)
    return (
        select(_TASK.run, _TASK.task_id, _TASK.map_index, dag_version.c.id, dag_version.c.digest)
        .join(dag_run, dag_run.c.id == _TASK.run)
        .join(dag_version, dag_version.c.id == dag_run.c.version_id)
        .where(and_(_TASK.id.in_(wanted), _TASK.map_index >= literal_column("0")))
    )


def read_tasks(connection: Connection, ids: Collection[int]) -> list[TaskValues]:
    """Return tasks without locking them; they must not be written."""
    return _task_select.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(ids)))


@Statement
def _task_lock(dialect: str) -> Select[Any]:
    return _build_task_select(dialect).with_for_update()


@Statement
def _task_select(dialect: str) -> Select[Any]:
    return _build_task_select(dialect)


def _build_task_select(dialect: str) -> Select[Any]:
    wanted = select(IDS.build_source(dialect).c.id)
    return select(*COLUMNS).where(_TASK.id.in_(wanted)).order_by(_TASK.id)


def lock_named(connection: Connection, keys: Iterable[InstanceKey]) -> list[TaskValues]:
    """Lock task instances in the order of their ids."""
    return _named_lock.fetch(connection, _NAMED.build_parameters(find_dialect(connection), keys))


@Statement
def _named_lock(dialect: str) -> Select[Any]:
    given = _NAMED.build_source(dialect)
    same = and_(_TASK.run == given.c.run, _TASK.task_id == given.c.task_id, _TASK.map_index == given.c.map_index)
    return select(*COLUMNS).join(given, same).order_by(_TASK.id).with_for_update(of=task_instance)


def find_pending(connection: Connection, runs: Collection[int], limit: int) -> dict[int, int]:
    """Return the map indexes of pending tasks of the given runs, by task."""
    given = IDS.build_parameters(find_dialect(connection), build_id_rows(runs))
    return dict(_pending.fetch(connection, {**given, "most": limit}))


@Statement
def _pending(dialect: str) -> Select[Any]:
    wanted = and_(_TASK.run.in_(select(IDS.build_source(dialect).c.id)), _TASK.pending == literal_column("1"))
    return select(_TASK.id, _TASK.map_index).where(wanted).order_by(_TASK.run, _TASK.id).limit(bindparam("most"))


def write_tasks(connection: Connection, entries: Iterable[TaskEntry]) -> None:
    """Write the changed tasks; most of them write only the columns of `_MOVING`."""
    moved, full, tallied = [], [], []
    for entry in entries:
        if entry.changed:
            rest, values = entry.build_rest(), entry.build_moved()
            if rest == entry.rest:
                moved.append(values)
            else:
                full.append(values + rest)
                entry.rest = rest
        elif entry.tallied:
            tallied.append((entry.id, write_counts(entry.counts), entry.pending, entry.skip_votes))
        entry.changed = entry.tallied = False
    dialect = find_dialect(connection)
    if moved:
        _moved_update.fetch(connection, _MOVED.build_parameters(dialect, moved))
    if full:
        _update.fetch(connection, _CHANGED.build_parameters(dialect, full))
    if tallied:
        _tally_update.fetch(connection, _TALLIED.build_parameters(dialect, tallied))


@Statement
def _moved_update(dialect: str) -> Update:
    given = _MOVED.build_source(dialect)
    return update(task_instance).where(_TASK.id == given.c.id).values({name: given.c[name] for name in _MOVING})


@Statement
def _update(dialect: str) -> Update:
    given = _CHANGED.build_source(dialect)
    return update(task_instance).where(_TASK.id == given.c.id).values({name: given.c[name] for name in _FIELDS})


@Statement
def _tally_update(dialect: str) -> Update:
    given = _TALLIED.build_source(dialect)
    names = ("tallies", "pending", "skip_votes")
    return update(task_instance).where(_TASK.id == given.c.id).values({name: given.c[name] for name in names})


def write_runs(connection: Connection, entries: Iterable[RunEntry], locked: Collection[int]) -> None:
    """Write the changed runs.

    Raises:
        InvariantError: A changed run is not locked, so another transaction may have changed it, too.
    """
    rows = []
    for run in entries:
        if run.changed:
            if run.id not in locked:
                raise InvariantError(f"run {run.id} was changed without being locked")
            times = (run.started_us, run.ended_us, run.deadline_us)
            rows.append((run.id, run.state, run.reason, run.stop, run.unfinished, *times))
        run.changed = False
    if rows:
        _run_update.fetch(connection, _RUNS.build_parameters(find_dialect(connection), rows))


@Statement
def _run_update(dialect: str) -> Update:
    given = _RUNS.build_source(dialect)
    names = ("state", "reason", "stop", "unfinished", "started_us", "ended_us", "deadline_us")
    return update(dag_run).where(dag_run.c.id == given.c.id).values({name: given.c[name] for name in names})
