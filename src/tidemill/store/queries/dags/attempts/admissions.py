"""Admits scheduled tasks to the slots of their pools.

Invariants: free slots are counted from the rows that hold slots, while the pool's row is locked, and after it the rows
of DAGs with limits. Pools, DAGs and tasks locked by another transaction are skipped until the next turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import (
    CompoundSelect,
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
    tuple_,
    union_all,
)

from tidemill.core.tasks.admission import Active, ActiveLimits, Candidate, admit
from tidemill.core.tasks.inputs import Admit
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import (
    HOLDS_SLOTS,
    IS_BLOCKED,
    IS_DEFERRED,
    IS_RESUMED,
    dag,
    dag_version,
    pool,
    task_instance,
)
from tidemill.store.queries.dags.attempts.starts import build_starts, starts_in_trigger
from tidemill.store.queries.dags.state.task_rows import (
    COLUMNS,
    TaskValues,
    UnreadableStructureError,
    compute_rank,
    is_resumed,
    load_plan,
)
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.queries.isolation import work_on_runs
from tidemill.store.queries.triggers.cursors import IDS, SKIPPED, build_id_rows
from tidemill.store.statements import Statement

_TASK = task_instance.c
_SCHEDULED = TaskState.SCHEDULED.value
#: The conditions of tasks that count towards limits.
ACTIVE = (HOLDS_SLOTS, IS_DEFERRED, IS_RESUMED)
_LIMITED = RowSet("limited", dag=int, task_id=str)
#: The maximum number of candidate pages per pool and turn; tasks that wait for limits may hide others behind them.
_PAGES = 20


class _Pool(NamedTuple):
    name: str
    slots: int
    include_deferred: int


class _Waiting(NamedTuple):
    """A task that waits for slots; `values`: the row that `Board.take` expects."""

    id: int
    run: int
    dag: int
    pool_slots: int
    rank: int
    since_us: int
    values: TaskValues
    returns: bool = False


@dataclass(slots=True)
class Admitted:
    """The result of admitting tasks: how many got slots, and whether more candidates are left."""

    count: int = 0
    more: bool = False


def admit_tasks(
    connection: Connection, context: CallContext, by: str, limit: int, skip: Collection[int] = ()
) -> Admitted:
    """Admit tasks in all pools.

    Args:
        connection: A connection inside a transaction that has locked no tasks.
        context: The transaction's context.
        by: The sender, for the journal.
        limit: The maximum number of tasks to admit per pool.
        skip: Runs whose tasks are skipped.
    """
    done = Admitted()
    waited = [name for (name,) in _waited_pools.fetch(connection)]
    locked = [_Pool(*one) for name in waited for one in _pool_lock.fetch(connection, {"pool": name})]
    # Tasks that have become ready since another scheduler looked at a pool wait for a later turn.
    context.skipped = context.skipped or len(locked) < len(waited)
    for one in locked:
        _admit_pool(connection, context, by, limit, one, done, skip)
    return done


def _admit_pool(
    connection: Connection,
    context: CallContext,
    by: str,
    limit: int,
    one: _Pool,
    done: Admitted,
    skip: Collection[int],
) -> None:
    used, before = _count_slots(connection, one), done.count

    def admit_some(rows: list[_Waiting]) -> int:
        nonlocal used
        slots, admitted = _admit_page(connection, context, by, one, used, rows)
        used += slots
        return admitted

    after: _Waiting | None = None
    for _ in range(_PAGES):
        free = one.slots - used
        if free <= 0:
            return
        size = min(max(free, 32), limit)
        returning = _fetch_returning(connection, one.name, limit, skip) if after is None else []
        rows = _fetch_candidates(connection, one.name, after, size, skip)
        candidates = [(row.run, row) for row in (*returning, *rows)]
        done.count += work_on_runs(connection, context, candidates, admit_some)
        if len(rows) < size:
            return
        after = rows[-1]
        if done.count >= limit:
            break
    # If nothing was admitted, an immediate retry would admit nothing either; a task's end or a new limit rings the
    # bell.
    done.more = done.more or done.count > before


def _count_slots(connection: Connection, one: _Pool) -> int:
    used = _slots.fetch(connection, {"pool": one.name})[0][0]
    if one.include_deferred:
        used += _deferred_slots.fetch(connection, {"pool": one.name})[0][0]
    return int(used)


@Statement
def _waited_pools(dialect: str) -> Select[Any]:
    waiting = exists().where(and_(_TASK.pool == pool.c.name, _TASK.state == literal_column("'scheduled'")))
    returning = exists().where(and_(_TASK.pool == pool.c.name, text(IS_BLOCKED), _TASK.block == literal_column("2")))
    return select(pool.c.name).where(or_(waiting, returning)).order_by(pool.c.name)


@Statement
def _pool_lock(dialect: str) -> Select[Any]:
    found = select(pool.c.name, pool.c.slots, pool.c.include_deferred).where(pool.c.name == bindparam("pool"))
    return found.with_for_update(skip_locked=True)


@Statement
def _slots(dialect: str) -> Select[Any]:
    holds = and_(_TASK.pool == bindparam("pool"), text(HOLDS_SLOTS))
    return select(func.coalesce(func.sum(_TASK.pool_slots), 0)).where(holds)


@Statement
def _deferred_slots(dialect: str) -> Select[Any]:
    holds = and_(_TASK.pool == bindparam("pool"), text(IS_DEFERRED))
    return select(func.coalesce(func.sum(_TASK.pool_slots), 0)).where(holds)


def _fetch_candidates(
    connection: Connection, name: str, after: _Waiting | None, size: int, skip: Collection[int]
) -> list[_Waiting]:
    key = {"rank": -(1 << 62), "since": 0, "id": 0}
    if after is not None:
        key = {"rank": after.rank, "since": after.since_us, "id": after.id}
    skipped = SKIPPED.build_parameters(find_dialect(connection), build_id_rows(skip)) if skip else {}
    rows = _candidates.fetch(connection, {"pool": name, "size": size, **key, **skipped}, bool(skip))
    return [_Waiting._make((*row[:6], row[6:], False)) for row in rows]


@Statement
def _candidates(dialect: str, skips: bool) -> Select[Any]:
    order = (_TASK.rank, _TASK.since_us, _TASK.id)
    later = tuple_(*order) > tuple_(bindparam("rank"), bindparam("since"), bindparam("id"))
    passed = [_TASK.run.not_in(select(SKIPPED.build_source(dialect).c.id))] if skips else []
    return (
        select(_TASK.id, _TASK.run, _TASK.dag, _TASK.pool_slots, _TASK.rank, _TASK.since_us, *COLUMNS)
        .where(and_(_TASK.pool == bindparam("pool"), text("state = 'scheduled'"), later, *passed))
        .order_by(*order)
        .limit(bindparam("size"))
        .with_for_update(skip_locked=True)
    )


def _fetch_returning(connection: Connection, name: str, size: int, skip: Collection[int]) -> list[_Waiting]:
    """Return the running attempts that need slots to go on after their `yield`."""
    skipped = SKIPPED.build_parameters(find_dialect(connection), build_id_rows(skip)) if skip else {}
    rows = _returning.fetch(connection, {"pool": name, "size": size, **skipped}, bool(skip))
    return [_Waiting._make((*row[:6], row[6:], True)) for row in rows]


@Statement
def _returning(dialect: str, skips: bool) -> Select[Any]:
    passed = [_TASK.run.not_in(select(SKIPPED.build_source(dialect).c.id))] if skips else []
    ready = and_(_TASK.pool == bindparam("pool"), text(IS_BLOCKED), _TASK.block == literal_column("2"), *passed)
    return (
        select(_TASK.id, _TASK.run, _TASK.dag, _TASK.pool_slots, _TASK.rank, _TASK.block_us, *COLUMNS)
        .where(ready)
        .order_by(_TASK.block_us, _TASK.id)
        .limit(bindparam("size"))
        .with_for_update(skip_locked=True)
    )


def _admit_page(
    connection: Connection, context: CallContext, by: str, one: _Pool, used: int, rows: list[_Waiting]
) -> tuple[int, int]:
    """Admit tasks of one page; return the number of slots that they hold from now on, and of tasks.

    A task that starts in a trigger is admitted like others, but holds slots only if the pool counts deferred tasks.
    """
    rows, limits, starting = _find_limits(connection, context, rows)
    active = count_active(connection, limits)
    board = Board(connection, context)
    if starting and not one.include_deferred:
        board.take(row.values for row in rows)
    candidates = [
        Candidate(
            row.id,
            row.dag,
            row.run,
            row.values[2],
            row.pool_slots,
            is_resumed(row.rank) and not row.returns,
            compute_rank(0, is_resumed(row.rank)) - row.rank,
            row.since_us,
            row.returns,
            row.id in board.tasks and starts_in_trigger(board.tasks[row.id]),
        )
        for row in rows
    ]
    admission = admit(candidates, one.slots, used, limits, active)
    by_number = {row.id: row for row in rows}
    entries = board.take(by_number[number].values for number in admission.admitted)
    starts = build_starts(connection, entries, context)
    for entry in entries:
        board.give(entry, Admit(entry.row.epoch, starts.get(entry.id)), by)
    board.flush()
    holding = [entry.id for entry in entries if entry.row.holds_slots(bool(one.include_deferred))]
    return sum(by_number[number].pool_slots for number in holding), len(entries)


def _find_limits(
    connection: Connection, context: CallContext, rows: list[_Waiting]
) -> tuple[list[_Waiting], dict[int, ActiveLimits], bool]:
    """Lock the DAGs that have limits; return the tasks without those of DAGs that are locked elsewhere, and the limits.

    The limits are those of the newest versions. The last value is whether tasks of these versions start in triggers.
    """
    found, starting = read_limits(connection, {row.dag for row in rows})
    if not found:
        return rows, found, starting
    statement = select(dag.c.id).where(dag.c.id.in_(sorted(found))).order_by(dag.c.id)
    locked = set(connection.execute(statement.with_for_update(skip_locked=True, key_share=True)).scalars())
    if len(locked) == len(found):
        return rows, found, starting
    context.skipped = True
    left = [row for row in rows if row.dag not in found or row.dag in locked]
    return left, {one: found[one] for one in locked}, starting


def read_limits(connection: Connection, dags: Collection[int]) -> tuple[dict[int, ActiveLimits], bool]:
    """Return the limits of the newest versions of DAGs, and whether tasks of these versions start in triggers."""
    found: dict[int, ActiveLimits] = {}
    starting = False
    if not dags:
        return found, starting
    given = IDS.build_parameters(find_dialect(connection), build_id_rows(dags))
    for number, version_id, digest in _versions.fetch(connection, given):
        try:
            plan = load_plan(connection, version_id, digest)
        except UnreadableStructureError:
            continue  # its runs stay unchanged
        limits, starting = plan.limits, starting or plan.starts
        if limits is not None:
            found[number] = limits
    return found, starting


@Statement
def _versions(dialect: str) -> Select[Any]:
    return (
        select(dag.c.id, dag.c.version_id, dag_version.c.digest)
        .join(dag_version, dag_version.c.id == dag.c.version_id)
        .where(dag.c.id.in_(select(IDS.build_source(dialect).c.id)))
    )


def count_active(connection: Connection, limits: Mapping[int, ActiveLimits]) -> Active:
    """Count the tasks that hold slots, are deferred, or wait to resume, as far as the limits need the counts."""
    per_dag, per_task, per_run = Counter[int](), Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    whole = [number for number, one in limits.items() if one.per_dag is not None]
    single = [
        (number, name)
        for number, one in sorted(limits.items())
        if one.per_dag is None
        for name in sorted({*one.per_task, *one.per_task_and_run})
    ]
    dialect = find_dialect(connection)
    found: list[tuple[int, int, str]] = []
    if whole:
        found += _active_of_dags.fetch(connection, IDS.build_parameters(dialect, build_id_rows(whole)))
    if single:
        found += _active_of_tasks.fetch(connection, _LIMITED.build_parameters(dialect, single))
    for number, run, task in found:
        per_dag[number] += 1
        per_task[number, task] += 1
        per_run[run, task] += 1
    return Active(per_dag, per_task, per_run)


@Statement
def _active_of_dags(dialect: str) -> CompoundSelect[Any]:
    mine = _TASK.dag.in_(select(IDS.build_source(dialect).c.id))
    return union_all(*[select(_TASK.dag, _TASK.run, _TASK.task_id).where(and_(mine, text(one))) for one in ACTIVE])


@Statement
def _active_of_tasks(dialect: str) -> CompoundSelect[Any]:
    given = _LIMITED.build_source(dialect)
    same = and_(_TASK.dag == given.c.dag, _TASK.task_id == given.c.task_id)
    names = (_TASK.dag, _TASK.run, _TASK.task_id)
    return union_all(*[select(*names).join(given, same).where(text(one)) for one in ACTIVE])


def find_unknown_pools(connection: Connection) -> list[str]:
    """Return the names of pools that tasks wait for but that do not exist."""
    waiting = select(_TASK.pool).where(_TASK.state == _SCHEDULED).distinct().subquery()
    known = exists().where(pool.c.name == waiting.c.pool)
    return list(connection.execute(select(waiting.c.pool).where(~known).order_by(waiting.c.pool)).scalars())
