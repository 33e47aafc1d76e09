"""The tasks of runs for the command line and the web pages: lists, history, and numbers for metrics.

Invariants: lists read at most one page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Row,
    Select,
    Text,
    and_,
    bindparam,
    func,
    literal_column,
    select,
    text,
    true,
)

from tidemill.core.tasks.dependencies import TaskOutcome
from tidemill.core.tasks.expansion import find_count
from tidemill.core.tasks.instance import UNMAPPED, format_instance
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.calls.call import CallRefusedError, Listed, RefusalKind
from tidemill.store.calls.count_calls import CountStore, StoreCounts
from tidemill.store.calls.element_calls import ListElements
from tidemill.store.calls.instance_calls import (
    HistoryRecord,
    ListTasks,
    MapCounts,
    StreamAbout,
    TaskHistory,
    TaskRecord,
)
from tidemill.store.calls.log_calls import LogPartRecord, ReadLog
from tidemill.store.context import CallContext
from tidemill.store.dag_plan import DagPlan
from tidemill.store.dag_tables import (
    HOLDS_SLOTS,
    IS_BAD_ELEMENT,
    IS_DEFERRED,
    IS_LEFT_PART,
    IS_SKIPPED_ELEMENT,
    IS_UNMAPPED,
    dag_file,
    dag_run,
    dag_version,
    task_instance,
    task_journal,
    task_part,
)
from tidemill.store.queries.dags.items.backlog import measure_elements
from tidemill.store.queries.dags.runs.progress import ACTIVE, count_tasks
from tidemill.store.queries.dags.runs.runs import find_run
from tidemill.store.queries.dags.state.task_rows import compute_rank, is_resumed, load_plan
from tidemill.store.queries.dags.views.map_counts import read_counts, read_possible
from tidemill.store.queries.dags.views.stream_abouts import describe_streams
from tidemill.store.queries.dags.views.task_logs import find_last_try, read_log
from tidemill.store.tables import service_session, trigger

_TASK, _RUN, _JOURNAL, _PART = task_instance.c, dag_run.c, task_journal.c, task_part.c
_BAD = (TaskOutcome.FAILED, TaskOutcome.UPSTREAM_FAILED)
#: The conditions of the short indexes on tasks that have not ended, by state.
_OPEN = {
    TaskState.NONE: "task_instance.pending = 2",
    TaskState.SCHEDULED: "task_instance.state = 'scheduled'",
    TaskState.QUEUED: f"task_instance.{HOLDS_SLOTS}",
    TaskState.RUNNING: f"task_instance.{HOLDS_SLOTS}",
    TaskState.ENDING: f"task_instance.{HOLDS_SLOTS}",
    TaskState.DEFERRED: f"task_instance.{IS_DEFERRED}",
    TaskState.UP_FOR_RETRY: "task_instance.next_due_us IS NOT NULL",
}
#: How many elements that run in one attempt a page looks through.
_WINDOW, _WINDOWS = 1_000, 20
#: How many elements a page looks through for a state without an index.
_MAX_SCANNED = 100_000
_FAILED = IS_BAD_ELEMENT.replace("state", "task_instance.state")
#: The conditions of all indexes on elements by state.
_INDEXED: dict[str, str] = {
    **{state.value: condition for state, condition in _OPEN.items()},
    **dict.fromkeys(_BAD, _FAILED),
    TaskOutcome.SKIPPED: IS_SKIPPED_ELEMENT.replace("state", "task_instance.state"),
}


def list_tasks(connection: Connection, request: ListTasks, context: CallContext) -> Listed[TaskRecord]:
    """Return a page of the tasks of a run; see `ListTasks`."""
    run, plan = _find_plan(connection, request.dag_id, request.run_id)
    index, name = request.map_index, request.task_id
    if index is not None and index >= 0 and name in plan.tasks and plan.tasks[name].iterated:
        element = ListElements(request.dag_id, request.run_id, name, request.states, index, index)
        return _list_parts(connection, run, plan, element)
    # PostgreSQL sees no number in the subquery: it would take a run of many elements for one of many tasks, and read
    # the whole table.
    of_run = select(bindparam("of_run", run, BigInteger)).scalar_subquery() if index == UNMAPPED else run
    statement = _select_tasks(request.limit).where(_TASK.run == of_run)
    if request.states:
        statement = statement.where(_TASK.state.in_(request.states))
    if request.task_id is not None:
        statement = statement.where(_TASK.task_id == request.task_id)
    if request.map_index == UNMAPPED:
        statement = statement.where(text(IS_UNMAPPED))
    elif request.map_index is not None:
        statement = statement.where(_TASK.map_index == request.map_index)
    rows = _fetch_page(connection, statement, plan, request)
    found = rows[: request.limit]
    counts = read_counts(connection, run, plan)
    streams = describe_streams(connection, [row.id for row in found], context.now_us)
    labels = _read_unit_labels(connection, run, plan, found)
    records = tuple(
        _build_task(row, plan, request, counts.get(row.id), streams.get(row.id), labels.get(row.id)) for row in found
    )
    last = rows[request.limit - 1] if len(rows) > request.limit else None
    return Listed(records, None if last is None else f"{last.number}:{last.map_index}")


def list_elements(connection: Connection, request: ListElements, context: CallContext) -> Listed[TaskRecord]:
    """Return a page of the elements of a mapped task; see `ListElements`."""
    run, plan = _find_plan(connection, request.dag_id, request.run_id)
    if request.task_id not in plan.tasks:
        raise refuse_instance(request.dag_id, request.run_id, request.task_id, UNMAPPED)
    if plan.tasks[request.task_id].iterated:
        return _list_parts(connection, run, plan, request)
    states = _select_states(connection, run, request, is_group=plan.tasks[request.task_id].structure.is_group)
    if states is None:
        return Listed((), None)
    rows, after = _fetch_elements(connection, run, request, states)
    found = rows[: request.limit]
    streams = describe_streams(connection, [row.id for row in found], context.now_us)
    labels = _read_unit_labels(connection, run, plan, found)
    records = tuple(_build_task(row, plan, request, None, streams.get(row.id), labels.get(row.id)) for row in found)
    return Listed(records, str(records[-1].map_index) if len(rows) > request.limit else after)


def _read_unit_labels(connection: Connection, run: int, plan: DagPlan, rows: Sequence[Row[Any]]) -> dict[int, str]:
    """Return the labels of the elements of mapped groups among these rows: that of the task which started first."""
    units = {(row.task_id, row.map_index): row.id for row in rows if row.task_id in plan.groups and row.map_index >= 0}
    found: dict[int, str] = {}
    for group in {name for name, _ in units}:
        indexes = [index for name, index in units if name == group]
        mine = and_(_TASK.run == run, _TASK.task_id.in_(plan.groups[group]), _TASK.label.is_not(None))
        # Not all between them: those in a state that few have are far apart.
        mine = and_(mine, _TASK.map_index.in_(indexes))
        wanted = select(_TASK.map_index, _TASK.label).where(mine).order_by(_TASK.started_us, _TASK.number)
        for index, label in connection.execute(wanted):
            unit = units.get((group, index))
            if unit is not None:
                found.setdefault(unit, label)
    return found


def _list_parts(connection: Connection, run: int, plan: DagPlan, request: ListElements) -> Listed[TaskRecord]:
    """Return the elements of a task that runs all in one attempt; those without a result are in state `none`."""
    only = and_(_TASK.run == run, _TASK.task_id == request.task_id, _TASK.map_index == 0)
    own = connection.execute(_select_tasks(1).where(only)).first()
    if own is None:
        return Listed((), None)
    if request.states and TaskState.NONE not in request.states:
        rows, after = _fetch_parts(connection, own.id, request)
    else:
        rows, after = _fetch_all_parts(connection, run, plan, own.id, request)
    since_us = own.started_us or own.since_us
    record = msgspec.structs.replace(
        _build_task(own, plan, request),
        max_tries=plan.tasks[request.task_id].structure.retries + 1,
        due_us=None,
        label=None,
        worker=None,
    )
    records = tuple(
        msgspec.structs.replace(
            record,
            map_index=row.number,
            state=row.state,
            tries=row.tries,
            started_us=row.started_us,
            ended_us=row.ended_us,
            since_us=since_us if row.ended_us is None else row.ended_us,
            error=row.error,
        )
        for row in rows
    )
    return Listed(records, after)


class _Part(NamedTuple):
    """An element of a task that runs all of them in one attempt; by default, one without a result."""

    number: int
    state: str = TaskState.NONE.value
    tries: int = 0
    started_us: int | None = None
    ended_us: int | None = None
    error: str | None = None


def _select_parts(task: int, first: int, last: int | None, limit: int) -> Select[Any]:
    mine = [_PART.task == task, _PART.number >= first]
    if last is not None:
        mine.append(_PART.number <= last)
    columns = [_PART[name] for name in _Part._fields]  # without the values, which may be large
    return select(*columns).where(and_(*mine)).order_by(_PART.number).limit(limit)


def _fetch_parts(connection: Connection, task: int, request: ListElements) -> tuple[list[_Part], str | None]:
    """Return a page of the elements with a result in given states, and where the next page begins."""
    statement = _select_parts(task, _find_first(request), request.last, request.limit + 1)
    statement = statement.where(_PART.state.in_(request.states))
    if TaskOutcome.SUCCESS not in request.states:
        statement = statement.where(text(IS_LEFT_PART.replace("state", "task_part.state")))
    rows = [_Part._make(row) for row in connection.execute(statement)]
    found = rows[: request.limit]
    return found, str(found[-1].number) if len(rows) > request.limit else None


def _fetch_all_parts(
    connection: Connection, run: int, plan: DagPlan, task: int, request: ListElements
) -> tuple[list[_Part], str | None]:
    """Return a page of the elements that the sources have given, and where the next page begins.

    A page may be empty although others follow, if few elements are in the given states.
    """
    mapped = plan.tasks[request.task_id].structure.mapped
    assert mapped is not None
    end = measure_elements(connection, run, request.task_id, mapped).parts
    end = end if request.last is None else min(end, request.last + 1)
    first = _find_first(request)
    found: list[_Part] = []
    for _ in range(_WINDOWS):
        window = range(first, min(end, first + _WINDOW))
        rows = connection.execute(_select_parts(task, window.start, window.stop - 1, _WINDOW)) if window else ()
        known = {row.number: _Part._make(row) for row in rows}
        for number in window:
            part = known.get(number) or _Part(number)
            if request.states and part.state not in request.states:
                continue
            if len(found) >= request.limit:
                return found, str(found[-1].number)
            found.append(part)
        first = window.stop if window else first
        if first >= end:
            return found, None
    return found, str(first - 1)


def _find_first(request: ListElements) -> int:
    return max(0, request.first or 0, -1 if request.after is None else int(request.after) + 1)


def _fetch_elements(
    connection: Connection, run: int, request: ListElements, states: set[str]
) -> tuple[list[Row[Any]], str | None]:
    """Return the rows of a page of elements, and where the next page begins.

    Rows in states that few have are found by their indexes. Other rows are looked through, up to a limit: then the page
    may be empty although others follow. Otherwise a further row tells that there is a next page.
    """
    first = _find_first(request)
    page = _select_tasks(request.limit).where(_choose(run, request, first)).order_by(_TASK.map_index)
    if not states:
        return list(connection.execute(page)), None
    if not states <= _INDEXED.keys():
        end = first + _MAX_SCANNED
        rows = list(connection.execute(page.where(_TASK.state.in_(states), _TASK.map_index < end)))
        later = select(_TASK.id).where(_choose(run, request, end)).order_by(_TASK.map_index).limit(1)
        is_last = len(rows) > request.limit or connection.execute(later).first() is None
        return rows, None if is_last else str(end - 1)
    found: list[int] = []
    for condition in sorted({_INDEXED[state] for state in states}):
        mine = and_(_choose(run, request, first, by_state=condition in _OPEN.values()), _TASK.state.in_(states))
        chosen = select(_TASK.id).where(and_(mine, text(condition))).order_by(_TASK.map_index)
        found += connection.execute(chosen.limit(request.limit + 1)).scalars()
    # Joined after the choice: PostgreSQL expects few elements, and would read all sessions for each of many.
    every = connection.execute(_select_tasks(len(found)).where(_TASK.id.in_(found))).all() if found else []
    return sorted(every, key=lambda row: int(row.map_index)), None


def _choose(run: int, request: ListElements, first: int, *, by_state: bool = False) -> ColumnElement[bool]:
    """Return the condition for the elements from an index on; `by_state`: an index on states is to be read."""
    of_run: ColumnElement[int] = _TASK.run
    name: ColumnElement[str] = _TASK.task_id
    index: ColumnElement[int] = _TASK.map_index
    if by_state:
        # These expressions keep the databases from reading all elements by name.
        of_run, index = of_run + literal_column("0"), index + literal_column("0")
        name = name + literal_column("''", Text)
    last = true() if request.last is None else index <= request.last
    return and_(of_run == run, name == request.task_id, index >= first, last)


def _select_states(connection: Connection, run: int, request: ListElements, *, is_group: bool) -> set[str] | None:
    """Return the states among those asked for that elements may be in, as the counts of their map say.

    None: no element is in one of them. Without states in the request, the set is empty: all elements are asked for.
    """
    if not request.states:
        return set()
    # Only the elements of a group have tasks of their own.
    states = {state for state in request.states if is_group or state != TaskState.MAPPED}
    counts = read_possible(connection, run, request.task_id)
    if counts is not None:
        known = set(TaskState)
        states = {one for one in states if one not in known or counts.get(find_count(TaskState(one)) or one, 1)}
    return states or None


def _find_plan(connection: Connection, dag_id: str, run_id: str) -> tuple[int, DagPlan]:
    run = find_run(connection, dag_id, run_id)
    version = (
        select(dag_version.c.id, dag_version.c.digest)
        .join(dag_run, _RUN.version_id == dag_version.c.id)
        .where(_RUN.id == run)
    )
    return run, load_plan(connection, *connection.execute(version).one())


def _select_tasks(limit: int) -> Select[Any]:
    """Select tasks with their workers and triggers; the caller names the run."""
    waits = and_(trigger.c.task_id == _TASK.id, trigger.c.epoch == _TASK.epoch)
    return (
        select(task_instance, service_session.c.host, service_session.c.pid, trigger.c.id.label("trigger"))
        .outerjoin(service_session, service_session.c.id == _TASK.session_id)
        .outerjoin(trigger, waits)
        .limit(limit + 1)
    )


def _fetch_page(
    connection: Connection, statement: Select[Any], plan: DagPlan, request: ListTasks
) -> Sequence[Row[Any]]:
    """Return the rows of a page and one more; `after` is the number and the index of the last row before it."""
    # The index on names provides the order of the instances of one task; there may be many.
    of_one, of_all = statement.order_by(_TASK.map_index), statement.order_by(_TASK.number, _TASK.map_index)
    if request.after is None:
        return connection.execute(of_all if request.task_id is None else of_one).all()
    number, index = map(int, request.after.split(":"))
    rows: list[Row[Any]] = []
    if request.map_index is None and number < len(plan.structure.tasks):
        same = and_(_TASK.task_id == plan.structure.tasks[number].id, _TASK.map_index > index)
        rows += connection.execute(of_one.where(same))
    if len(rows) <= request.limit and request.task_id is None:
        later = of_all.where(_TASK.number > number).limit(request.limit + 1 - len(rows))
        rows += connection.execute(later)
    return rows


def _build_task(
    row: Row[Any],
    plan: DagPlan,
    request: ListTasks | ListElements,
    elements: MapCounts | None = None,
    stream: StreamAbout | None = None,
    label: str | None = None,
) -> TaskRecord:
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
        elements=elements,
        label=row.label or label,
        block=row.block,
        stream=stream,
    )


def find_task(connection: Connection, request: TaskHistory | ReadLog) -> int:
    """Return the id of a task.

    Raises:
        CallRefusedError: There is no such task.
    """
    run = find_run(connection, request.dag_id, request.run_id)
    wanted = and_(_TASK.run == run, _TASK.task_id == request.task_id, _TASK.map_index == request.map_index)
    found = connection.execute(select(_TASK.id).where(wanted)).scalar()
    if found is None and request.map_index > 0:
        # Elements that run in one attempt have the history and the log of that attempt.
        _, plan = _find_plan(connection, request.dag_id, request.run_id)
        task = plan.tasks.get(request.task_id)
        mapped = None if task is None else task.structure.mapped
        if mapped is not None and mapped.iterated:
            end = measure_elements(connection, run, request.task_id, mapped).parts
            only = and_(_TASK.run == run, _TASK.task_id == request.task_id, _TASK.map_index == 0)
            if request.map_index < end:
                found = connection.execute(select(_TASK.id).where(only)).scalar()
    if found is None:
        raise refuse_instance(request.dag_id, request.run_id, request.task_id, request.map_index)
    return int(found)


def refuse_instance(dag_id: str, run_id: str, task_id: str, map_index: int) -> CallRefusedError:
    """Return the refusal of a call that names a task instance which does not exist."""
    return CallRefusedError(
        RefusalKind.UNKNOWN,
        f"run {run_id!r} has no task {format_instance(task_id, map_index)!r}; list them with "
        f"`tidemill tasks states {dag_id} --run {run_id}`",
    )


def list_history(connection: Connection, request: TaskHistory, context: CallContext) -> Listed[HistoryRecord]:
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


def read_task_log(connection: Connection, request: ReadLog, context: CallContext) -> Listed[LogPartRecord]:
    """Return a page of the log of a try; see `ReadLog`."""
    task = find_task(connection, _find_log(connection, request))
    try_number = find_last_try(connection, task) if request.try_number is None else request.try_number
    return read_log(connection, task, try_number, request.after, request.limit)


def _find_log(connection: Connection, request: ReadLog) -> ReadLog:
    """Return the request for the log of the attempt if all elements of a mapped task run in one."""
    run, plan = _find_plan(connection, request.dag_id, request.run_id)
    task = plan.tasks.get(request.task_id)
    if request.map_index != UNMAPPED or task is None or not task.iterated:
        return request
    attempt = and_(_TASK.run == run, _TASK.task_id == request.task_id, _TASK.map_index == 0)
    has_one = connection.execute(select(_TASK.id).where(attempt)).first() is not None
    return msgspec.structs.replace(request, map_index=0) if has_one else request


def count_store(connection: Connection, request: CountStore, context: CallContext) -> StoreCounts:
    """Return the numbers for metrics; see `CountStore`."""
    tasks = count_tasks(connection)
    counted = select(ACTIVE.c.state, func.count()).group_by(ACTIVE.c.state)
    runs: dict[str, int] = dict(connection.execute(counted).all())
    broken = select(func.count()).where(and_(dag_file.c.present == 1, dag_file.c.error.is_not(None)))
    return StoreCounts(tasks, runs, int(connection.execute(broken).scalar_one()))
