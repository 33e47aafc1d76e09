"""Stores the results of elements that one attempt runs (`iterate`), and finds the elements that are left.

Invariants: all elements belong to one task instance, the only element of its map. A result is written under the epoch
of the attempt, and a success is never overwritten. The counts are those of the rows; they change with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from sqlalchemy import (
    Connection,
    Executable,
    Select,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.core.tasks.inputs import Channel
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.iteration_calls import GetParts, IterationPage, KeepParts, PartCounts, PartToRun
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import IS_BLOCKED, IS_LEFT_PART, task_instance, task_iteration, task_part
from tidemill.store.queries.dags.items.backlog import YIELDED, measure_parts
from tidemill.store.queries.dags.items.chunks import find_ranges
from tidemill.store.queries.dags.items.parts import MAX_ITEMS, find_sources, read_page
from tidemill.store.queries.dags.values.task_values import check_attempt
from tidemill.store.queries.dags.values.xcoms import find_fault
from tidemill.store.statements import Statement

_PART, _COUNT, _TASK = task_part.c, task_iteration.c, task_instance.c
_STATES = ("success", "failed", "skipped", "up_for_retry")
_KEPT = RowSet("kept_parts", number=int, state=str, tries=int, value=str, error=str, started_us=int)
_NUMBERS = RowSet("part_numbers", number=int)
#: How many elements one call looks through.
_WINDOW, _WINDOWS = 1_000, 20


def get_parts(connection: Connection, request: GetParts, context: CallContext) -> IterationPage:
    """Return elements that an attempt has to run; see `GetParts`."""
    one = find_sources(connection, request.task)
    if one is None:
        return IterationPage((), request.after, True)
    found = measure_parts(connection, one.head, one.mapped, one.sources, closed=one.closed)
    limit = min(request.limit, MAX_ITEMS)
    wanted: list[tuple[int, int]] = []
    after = request.after
    for _ in range(_WINDOWS):
        window = range(after + 1, min(after + 1 + _WINDOW, found.parts))
        if not window or len(wanted) >= limit:
            break
        known = _read_known(connection, request.task, window)
        for number in window:
            state, tries = known.get(number, ("up_for_retry", 0))
            after = number
            if state == "up_for_retry":
                wanted.append((number, tries))
                if len(wanted) >= limit:
                    break
    closed = found.closed and after + 1 >= found.parts
    if not wanted:
        return IterationPage((), after, closed)
    numbers = [number for number, _ in wanted]
    if one.mapped.chunk is None:
        items = read_page(connection, one, numbers)
        parts = tuple(
            PartToRun(number, tries, number, 1, (item,)) for (number, tries), item in zip(wanted, items, strict=False)
        )
    else:
        ranges = find_ranges(connection, one.head, one.mapped, found.items, numbers)
        page = read_page(connection, one, [item for number in numbers for item in ranges[number]][:MAX_ITEMS])
        by_number = {item.number: item for item in page}
        parts = tuple(
            PartToRun(
                number,
                tries,
                ranges[number].start,
                len(ranges[number]),
                tuple(by_number[item] for item in ranges[number] if item in by_number),
            )
            for number, tries in wanted
            if ranges[number].start in by_number
        )
    complete = len(parts) == len(wanted)
    return IterationPage(parts, after if complete else parts[-1].number, closed and complete)


def _read_known(connection: Connection, task: int, window: range) -> dict[int, tuple[str, int]]:
    given = {"of_task": task, "first": window.start, "last": window.stop - 1}
    return {number: (state, tries) for number, state, tries in _known.fetch(connection, given)}


@Statement
def _known(dialect: str) -> Select[Any]:
    there = and_(_PART.number >= bindparam("first"), _PART.number <= bindparam("last"))
    return select(_PART.number, _PART.state, _PART.tries).where(and_(_PART.task == bindparam("of_task"), there))


def keep_parts(connection: Connection, request: KeepParts, context: CallContext) -> PartCounts:
    """Store how elements ended; see `KeepParts`."""
    for part in request.parts:
        fault = find_fault([(YIELDED, part.value or ""), ("error", part.error or "")])
        if fault is not None or part.state not in _STATES:
            raise CallRefusedError(
                RefusalKind.INVALID, f"element {part.number} cannot be stored: {fault or part.state}"
            )
    check_attempt(connection, request.task, request.epoch)
    dialect = find_dialect(connection)
    last = {part.number: part for part in request.parts}
    known: dict[int, str] = {}
    if last:
        numbers = _NUMBERS.build_parameters(dialect, [(number,) for number in last])
        found = _states.fetch(connection, {**numbers, "of_task": request.task})
        known = {number: state for number, state in found if state is not None}
    new = [part for number, part in sorted(last.items()) if known.get(number) != "success"]
    changed = Counter(part.state for part in new)
    changed.subtract(known[part.number] for part in new if part.number in known)
    if new:
        rows = [(one.number, one.state, one.tries, one.value, one.error, one.started_us) for one in new]
        given = _KEPT.build_parameters(dialect, rows)
        _upsert.fetch(connection, {**given, "of_task": request.task, "now_us": context.now_us})
    values = {f"new_{state}": changed[state] for state in _STATES}
    values |= {"of_task": request.task, "seen": request.seen, "running": request.running, "now_us": context.now_us}
    ((success, failed, skipped),) = _count.fetch(connection, values)
    if _waiting_source.fetch(connection, {"of_task": request.task}):
        context.bells.add(Channel.SCHEDULER)
    first: tuple[int | None, str | None] = (None, None)
    if failed and not request.running:
        first = _first_failed.fetch(connection, {"of_task": request.task})[0]
    return PartCounts(success, failed, skipped, *first)


@Statement
def _states(dialect: str) -> Select[Any]:
    given = _NUMBERS.build_source(dialect)
    # With a join, PostgreSQL reads all elements of the task each time.
    mine = and_(_PART.task == bindparam("of_task"), _PART.number == given.c.number)
    state = select(_PART.state).where(mine).correlate(given).scalar_subquery()
    return select(given.c.number, state)


@Statement
def _upsert(dialect: str) -> Executable:
    given = _KEPT.build_source(dialect)
    names = ("number", "state", "tries", "value", "error", "started_us")
    mine = bindparam("of_task", type_=_PART.task.type), bindparam("now_us", type_=_PART.ended_us.type)
    rows = select(*mine, *[given.c[name] for name in names]).where(literal(1) == 1).order_by(given.c.position)
    statement = _insert(dialect)(task_part).from_select(["task", "ended_us", *names], rows)
    new = {name: statement.excluded[name] for name in (*names[1:], "ended_us")}
    return statement.on_conflict_do_update(index_elements=["task", "number"], set_=new)  # type: ignore[no-any-return]


@Statement
def _count(dialect: str) -> Executable:
    integer = _COUNT.seen.type
    values = {state: bindparam(f"new_{state}", type_=integer) for state in _STATES}
    now = bindparam("now_us", type_=integer)
    fixed = {
        "task": bindparam("of_task", type_=_COUNT.task.type),
        "seen": bindparam("seen", type_=integer),
        "running": bindparam("running", type_=integer),
        "began_us": now,
        "changed_us": now,
    }
    statement = _insert(dialect)(task_iteration).values(**fixed, **values)
    new: dict[str, Any] = {state: _COUNT[state] + statement.excluded[state] for state in _STATES}
    new |= {"running": statement.excluded.running, "changed_us": statement.excluded.changed_us}
    larger = statement.excluded.seen > _COUNT.seen
    new["seen"] = case((larger, statement.excluded.seen), else_=_COUNT.seen)
    statement = statement.on_conflict_do_update(index_elements=["task"], set_=new)
    return statement.returning(_COUNT.success, _COUNT.failed, _COUNT.skipped)  # type: ignore[no-any-return]


@Statement
def _waiting_source(dialect: str) -> Select[Any]:
    """Build the statement that finds a generator of the run that waits until enough of its items are taken."""
    run = select(_TASK.run).where(_TASK.id == bindparam("of_task")).scalar_subquery()
    # The `+ 0` keeps the databases from reading all tasks of the run.
    waits = and_(text(IS_BLOCKED), _TASK.run + literal_column("0") == run)
    return select(_TASK.id).where(waits).limit(literal_column("1"))


@Statement
def _first_failed(dialect: str) -> Select[Any]:
    failed = and_(_PART.task == bindparam("of_task"), _PART.state == literal_column("'failed'"), text(IS_LEFT_PART))
    return select(_PART.number, _PART.error).where(failed).order_by(_PART.number).limit(literal_column("1"))


def forget_parts(connection: Connection, tasks: Collection[int]) -> None:
    """Forget all results of elements that run in one attempt; given are their task instances."""
    for table in (task_part, task_iteration):
        connection.execute(delete(table).where(table.c.task.in_(sorted(tasks))))


def retry_parts(connection: Connection, task: int, numbers: tuple[int, int] | None = None, *, failed: bool) -> None:
    """Have elements run again.

    Args:
        connection: A connection inside a transaction that holds the task.
        task: The task instance.
        numbers: Only elements from one index to another.
        failed: Only elements that failed.
    """
    mine = _PART.task == task
    if failed:
        mine = and_(mine, _PART.state.in_(("failed", "up_for_retry")), text(IS_LEFT_PART))
    if numbers is not None:
        mine = and_(mine, _PART.number >= numbers[0], _PART.number <= numbers[1])
    connection.execute(update(task_part).where(mine).values(state="up_for_retry", tries=0, value=None))
    counted = select(_PART.state, func.count()).where(_PART.task == task).group_by(_PART.state)
    found: dict[str, int] = dict(connection.execute(counted).all())
    values = {state: found.get(state, 0) for state in _STATES}
    connection.execute(update(task_iteration).where(_COUNT.task == task).values(running=0, **values))


def _insert(dialect: str) -> Any:
    return postgresql.insert if dialect == "postgresql" else sqlite.insert
