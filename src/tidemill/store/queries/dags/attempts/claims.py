"""The claims of workers: queued tasks and due callbacks, with everything that an attempt needs.

Invariants: only one service claims a task or callback; rows locked by another transaction are skipped. A claim stores
the number of its request, so that a repeated request gets the same attempts again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec
import structlog
from sqlalchemy import (
    BindParameter,
    ColumnElement,
    CompoundSelect,
    Connection,
    Row,
    Select,
    Text,
    and_,
    bindparam,
    false,
    literal_column,
    or_,
    select,
    text,
    union_all,
    update,
)

from tidemill.core.errors import ConfigError
from tidemill.core.tasks.attempt import Moved
from tidemill.core.tasks.inputs import Blocked, Claim, WentOn
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.task_row import BlockPhase
from tidemill.runtime.log.setup import throttle
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.worker_calls import ClaimedAttempt, ClaimedCallback, ResumeWith, WorkerTurn
from tidemill.store.context import CallContext
from tidemill.store.dag_plan import TaskPlan
from tidemill.store.dag_tables import IS_BLOCKED, dag, dag_file, dag_run, dag_version, task_callback, task_instance
from tidemill.store.queries.dags.items.backlog import lock_free
from tidemill.store.queries.dags.items.elements import find_elements, note_items
from tidemill.store.queries.dags.state.task_rows import COLUMNS, TaskEntry, load_plan
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.queries.dags.streams.claims import claim_streams, read_checkpoints
from tidemill.store.queries.dags.values.run_params import build_params
from tidemill.store.queries.triggers.cursors import IDS, SKIPPED, build_id_rows
from tidemill.store.statements import Statement

log = structlog.get_logger(__name__)

_TASK, _CALLBACK = task_instance.c, task_callback.c
#: The state of a run that made its callback due.
_RUN_STATES = {"on_success": "success", "on_failure": "failed"}
#: How often a claim retries to replace tasks that cannot be run.
_LOOKS = 20
#: The files that a worker lacks.
_MISSING = RowSet("missing", path=str)


class FoundClaims(NamedTuple):
    """The claims of a worker before its turn.

    Attributes:
        tasks: The tasks that this request claimed before.
        callbacks: The callbacks that it claimed before.
        gone: Tasks that are ending, and whose attempts the worker no longer holds, or whose claim it never received.
        blocked: Tasks that wait at their `yield`, or did so at the turn before.
        live: The attempts that the worker holds and still owns, as task and epoch.
        due: Whether there is a callback to run.
    """

    tasks: list[int]
    callbacks: list[int]
    gone: set[int]
    blocked: list[int]
    live: set[tuple[int, int]]
    due: bool


def claim_work(
    board: Board, turn: WorkerTurn, found: FoundClaims, unblocked: int, *, due: bool
) -> tuple[ClaimedAttempt, ...]:
    """Claim attempts and callbacks for a worker; a repeated request gets the same ones again and nothing else.

    Rows that other transactions have locked are skipped, so this may follow when maps are locked. `unblocked`: the
    number of attempts that may go on after their `yield`; they need places of the worker, too. `due`:
    whether callbacks may be due. The rows of the board are left to write.
    """
    callbacks = found.callbacks
    if found.tasks or callbacks:
        board.read(found.tasks)
        entries = [board.tasks[task] for task in found.tasks if task in board.tasks]
    else:
        capacity = turn.capacity - unblocked
        callbacks = _claim_callbacks(board.connection, turn, capacity) if due else []
        entries = _claim_tasks(board, turn, capacity - len(callbacks))
    return _build_attempts(board, entries, callbacks)


def find_claims(connection: Connection, turn: WorkerTurn) -> FoundClaims:
    """Return what this request claimed before, and the worker's tasks that have ended, wait or run."""
    held = {task for task, _ in turn.held}
    given = IDS.build_parameters(find_dialect(connection), build_id_rows(held))
    found = _claimed.fetch(connection, {"session": turn.session, "request": turn.request, **given})
    tasks, callbacks, ending, blocked = (
        [number for kind, number, _ in found if kind == wanted] for wanted in (0, 1, 2, 3)
    )
    live = {(number, epoch) for kind, number, epoch in found if kind == 4}
    due = any(kind == 5 for kind, _, _ in found)
    return FoundClaims(tasks, callbacks, set(ending) - held, blocked, live, due)


def move_blocked(
    connection: Connection, turn: WorkerTurn, found: FoundClaims, context: CallContext
) -> tuple[tuple[int, int], ...]:
    """Note which attempts of a worker wait at their `yield`, and which have gone on; return those that may go on."""
    if not found.blocked and not turn.blocked:
        return ()
    given = IDS.build_parameters(find_dialect(connection), build_id_rows([task for task, _ in turn.blocked]))
    rows = _waiting.fetch(connection, {"session": turn.session, **given})
    waiting, held = set(turn.blocked), set(turn.held)
    unblocked = []
    changed: dict[int, Blocked | WentOn] = {}
    for task, epoch, block in rows:
        key = task, epoch
        if block == 0 and key in waiting:
            changed[task] = Blocked(epoch)
        elif block == BlockPhase.ADMITTED and key in waiting:
            unblocked.append(key)
        elif block == BlockPhase.ADMITTED and key in held:
            changed[task] = WentOn(epoch)
    if changed:
        board = Board(connection, context)
        # What another transaction has locked is done by a later turn.
        free = lock_free.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(changed)))
        for entry in board.take(free):
            board.give(entry, changed[entry.id], f"worker {turn.session}")
        board.flush()
    return tuple(unblocked)


@Statement
def _waiting(dialect: str) -> Select[Any]:
    mine = and_(_TASK.session_id == bindparam("session"), _TASK.state == literal_column("'running'"))
    listed = _TASK.id.in_(select(IDS.build_source(dialect).c.id))
    rows = select(_TASK.id, _TASK.epoch, _TASK.block)
    return rows.where(and_(mine, or_(_TASK.block > literal_column("0"), listed))).order_by(_TASK.id)


@Statement
def _claimed(dialect: str) -> CompoundSelect[Any]:
    session: BindParameter[int] = bindparam("session")
    request: BindParameter[int] = bindparam("request")
    mine = and_(_TASK.session_id == session, _TASK.claim_request == request, _TASK.state == literal_column("'running'"))
    ending = and_(_TASK.session_id == session, _TASK.state == literal_column("'ending'"))
    held = and_(_CALLBACK.session_id == session, _CALLBACK.claim_request == request)
    blocked = and_(_TASK.session_id == session, text(IS_BLOCKED))
    running = and_(_TASK.session_id == session, _TASK.state == literal_column("'running'"))
    listed = _TASK.id.in_(select(IDS.build_source(dialect).c.id))
    tasks = select(literal_column("0").label("kind"), _TASK.id.label("number"), _TASK.epoch).where(mine)
    callbacks = select(literal_column("1"), _CALLBACK.id, _CALLBACK.epoch).where(held)
    ended = select(literal_column("2"), _TASK.id, _TASK.epoch).where(ending)
    waiting = select(literal_column("3"), _TASK.id, _TASK.epoch).where(blocked)
    live = select(literal_column("4"), _TASK.id, _TASK.epoch).where(and_(listed, running))
    due = select(_CALLBACK.id, _CALLBACK.epoch).where(text("state = 'due'")).limit(literal_column("1")).subquery()
    callback = select(literal_column("5"), due.c.id, due.c.epoch)
    return union_all(tasks, callbacks, ended, waiting, live, callback).order_by("kind", "number")


def _claim_callbacks(connection: Connection, turn: WorkerTurn, capacity: int) -> list[int]:
    if capacity <= 0:
        return []
    given = _name_queues(turn.queues) | {"most": capacity} | _name_missing(connection, turn)
    found = [number for (number,) in _due_callbacks.fetch(connection, given, len(turn.queues), bool(turn.missing))]
    if found:
        new = {"state": "running", "session_id": turn.session, "claim_request": turn.request}
        connection.execute(update(task_callback).where(_CALLBACK.id.in_(found)).values(new))
    return found


@Statement
def _due_callbacks(dialect: str, queues: int, lacks: bool) -> Select[Any]:
    due = and_(text("state = 'due'"), _is_of_queues(_CALLBACK.queue, queues))
    if lacks:
        due = and_(due, _CALLBACK.run.not_in(select(dag_run.c.id).where(dag_run.c.dag.in_(_select_lacked(dialect)))))
    statement = select(_CALLBACK.id).where(due).order_by(_CALLBACK.id).limit(bindparam("most"))
    return statement.with_for_update(skip_locked=True)


def _claim_tasks(board: Board, turn: WorkerTurn, capacity: int) -> list[TaskEntry]:
    if capacity <= 0:
        return []
    claimed = []
    for entry in _take_queued(board, turn, capacity):
        claim = Claim(entry.row.epoch, turn.session, f"s{turn.session}-{turn.request}")
        if isinstance(board.give(entry, claim, f"worker {turn.session}"), Moved):
            entry.claim_request = turn.request
            claimed.append(entry)
    return claimed


def _take_queued(board: Board, turn: WorkerTurn, capacity: int) -> list[TaskEntry]:
    """Take queued tasks, skipping those that cannot be run now."""
    skip: list[int] = []
    for _ in range(_LOOKS):
        given = _name_queues(turn.queues) | {"most": capacity} | _name_missing(board.connection, turn)
        if skip:
            given |= SKIPPED.build_parameters(find_dialect(board.connection), build_id_rows(skip))
        rows = _queued.fetch(board.connection, given, len(turn.queues), bool(skip), bool(turn.missing))
        board.take(rows)
        found = [row[0] for row in rows]
        unfit = [task for task in found if task not in board.tasks or not _is_readable(board, board.tasks[task])]
        if not unfit:
            break
        skip += unfit
    return [board.tasks[task] for task in found if task not in skip]


def _is_readable(board: Board, entry: TaskEntry) -> bool:
    """Return whether the resume arguments of a task can be decrypted; if not, the task waits for their key."""
    try:
        if entry.row.resume is not None:
            board.context.cipher.decrypt(entry.row.resume.kwargs)
    except ConfigError as error:
        about = {"dag": entry.plan.structure.id, "task": entry.name, "run": entry.run.id}
        throttle(log, 60.0, about=entry.id).error(
            "cannot decrypt the arguments of a task; it waits", error=str(error), **about
        )
        return False
    return True


def _name_queues(queues: Sequence[str]) -> dict[str, Any]:
    return {f"queue_{number}": queue for number, queue in enumerate(queues)}


def _name_missing(connection: Connection, turn: WorkerTurn) -> dict[str, Any]:
    if not turn.missing:
        return {}
    return _MISSING.build_parameters(find_dialect(connection), [(path,) for path in turn.missing])


def _select_lacked(dialect: str) -> Select[int]:
    """Select the DAGs whose files the worker lacks."""
    lacked = dag_file.c.path.in_(select(_MISSING.build_source(dialect).c.path))
    return select(dag.c.id).join(dag_file, dag_file.c.id == dag.c.file_id).where(lacked)


def _is_of_queues(queue: ColumnElement[str], count: int) -> ColumnElement[bool]:
    # Each queue is compared with `=`, not `IN`, so that the index also provides the order.
    return or_(false(), *[queue == bindparam(f"queue_{number}", type_=Text()) for number in range(count)])


@Statement
def _queued(dialect: str, queues: int, skips: bool, lacks: bool) -> Select[Any]:
    queued = and_(text("state = 'queued'"), _is_of_queues(_TASK.queue, queues))
    if skips:
        queued = and_(queued, _TASK.id.not_in(select(SKIPPED.build_source(dialect).c.id)))
    if lacks:
        queued = and_(queued, _TASK.dag.not_in(_select_lacked(dialect)))
    order = (_TASK.rank, _TASK.since_us, _TASK.id)
    statement = select(*COLUMNS).where(queued).order_by(*order).limit(bindparam("most"))
    return statement.with_for_update(skip_locked=True)


def _build_attempts(board: Board, entries: Sequence[TaskEntry], callbacks: Sequence[int]) -> tuple[ClaimedAttempt, ...]:
    """Build the claimed attempts, in the order of the claims: tasks, then callbacks."""
    found = _fetch_callbacks(board.connection, callbacks)
    board.read({row.task for row in found if row.task is not None} - board.tasks.keys())
    runs = _fetch_runs(board.connection, {*(row.run for row in found), *(entry.run.id for entry in entries)})
    attempts = [_build_attempt(entry, runs[entry.run.id], board.context) for entry in entries]
    told = list(entries)
    for row in found:
        entry = None if row.task is None else board.tasks[row.task]
        attempts.append(_build_callback(row, entry, runs[row.run]))
        if entry is not None:
            told.append(entry)
    items = find_elements(board.connection, told)
    note_items(entries, items)
    changes: dict[int, dict[str, Any]] = {task: dict(new) for task, new in items.items()}
    for task, stream in claim_streams(board.connection, entries).items():
        changes.setdefault(task, {})["stream"] = stream
    for task, checkpoint in read_checkpoints(board.connection, entries).items():
        changes.setdefault(task, {})["checkpoint"] = checkpoint
    if not changes:
        return tuple(attempts)
    return tuple(msgspec.structs.replace(one, **changes[one.task]) if one.task in changes else one for one in attempts)


def build_plain_attempts(connection: Connection, entries: Sequence[TaskEntry]) -> dict[int, ClaimedAttempt]:
    """Return the run and the task of each entry as an attempt gets them, without its items."""
    runs = _fetch_runs(connection, {entry.run.id for entry in entries})
    return {entry.id: _build(entry, runs[entry.run.id], entry.row.deadline_us, None, None) for entry in entries}


def _fetch_callbacks(connection: Connection, callbacks: Sequence[int]) -> Sequence[Row[Any]]:
    if not callbacks:
        return []
    return connection.execute(select(task_callback).where(_CALLBACK.id.in_(callbacks)).order_by(_CALLBACK.id)).all()


class _RunValues(NamedTuple):
    dag_id: str
    path: str
    digest: str
    id: int
    run_id: str
    kind: str
    conf: str
    logical_us: int | None
    interval_start_us: int | None
    interval_end_us: int | None
    created_us: int
    started_us: int | None
    state: str
    ended_us: int | None


class _Run(NamedTuple):
    row: _RunValues
    params: str


def _fetch_runs(connection: Connection, numbers: Collection[int]) -> dict[int, _Run]:
    if not numbers:
        return {}
    given = IDS.build_parameters(find_dialect(connection), build_id_rows(numbers))
    rows = [(version, digest, _RunValues(*row)) for version, digest, *row in _run_rows.fetch(connection, given)]
    return {
        row.id: _Run(row, build_params(load_plan(connection, version, digest), row.conf))
        for version, digest, row in rows
    }


@Statement
def _run_rows(dialect: str) -> Select[Any]:
    names = [name for name in _RunValues._fields if name not in ("dag_id", "path", "digest")]
    of_file = (dag_file.c.path, dag_file.c.digest)
    return (
        select(dag_version.c.id, dag_version.c.digest, dag.c.dag_id, *of_file, *[dag_run.c[one] for one in names])
        .join(dag, dag.c.id == dag_run.c.dag)
        .join(dag_file, dag_file.c.id == dag.c.file_id)
        .join(dag_version, dag_version.c.id == dag_run.c.version_id)
        .where(dag_run.c.id.in_(select(IDS.build_source(dialect).c.id)))
    )


def _build_attempt(entry: TaskEntry, run: _Run, context: CallContext) -> ClaimedAttempt:
    resume, resumed = entry.row.resume, None
    if resume is not None:
        resumed = ResumeWith(resume.method, context.cipher.decrypt(resume.kwargs), resume.payload or "null")
    limits = [entry.row.deadline_us, None if entry.row.stream is None else entry.row.stream.due_us]
    deadline_us = min((limit for limit in limits if limit is not None), default=None)
    return _build(entry, run, deadline_us, resumed, None)


def _build_callback(row: Row[Any], entry: TaskEntry | None, run: _Run) -> ClaimedAttempt:
    state, ended_us = run.row.state, run.row.ended_us
    if row.task is None:  # the run may be active again by now
        state, ended_us = _RUN_STATES.get(row.name, state), row.created_us
    callback = ClaimedCallback(row.id, row.name, row.cause, row.created_us, state, ended_us, row.started_us, row.origin)
    return _build(entry, run, None, None, callback, row)


def _build(
    entry: TaskEntry | None,
    run: _Run,
    deadline_us: int | None,
    resume: ResumeWith | None,
    callback: ClaimedCallback | None,
    row: Row[Any] | None = None,
) -> ClaimedAttempt:
    plan: TaskPlan | None = None if entry is None else entry.plan
    found = run.row
    return ClaimedAttempt(
        task=0 if entry is None else entry.id,
        epoch=row.epoch if row is not None else entry.row.epoch if entry is not None else 0,
        run=found.id,
        dag_id=found.dag_id,
        run_id=found.run_id,
        task_id="" if entry is None else entry.task_id,
        map_index=UNMAPPED if entry is None else entry.map_index,
        try_number=0 if entry is None else entry.row.tries,
        max_tries=0 if entry is None else entry.row.max_tries,
        file=found.path,
        queue=row.queue if row is not None else "" if plan is None else plan.structure.queue,
        operator="" if plan is None else plan.structure.operator,
        run_kind=found.kind,
        run_started_us=found.started_us if found.started_us is not None else found.created_us,
        logical_us=found.logical_us,
        interval_start_us=found.interval_start_us,
        interval_end_us=found.interval_end_us,
        conf=found.conf,
        params=run.params,
        deadline_us=deadline_us,
        resume=resume,
        callback=callback,
        digest=found.digest,
    )
