"""The progress of runs: unfinished runs first, then the last finished ones.

Invariants: unfinished runs are found by index, and tasks are counted only for the listed runs, so that a long history
costs nothing. Elements of mapped tasks are not read; the rows of their maps have their counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sqlalchemy import Connection, and_, func, literal_column, select, text, union_all

from tidemill.core.tasks.task_row import TaskState
from tidemill.store.calls.run_calls import RunProgress, RunRecord, WatchRuns
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import HOLDS_SLOTS, IS_DEFERRED, IS_UNMAPPED, dag_run, task_instance, task_map
from tidemill.store.queries.dags.runs.runs import IS_QUEUED, IS_RUNNING, RUNS, read_run

_RUN, _TASK, _MAP = dag_run.c, task_instance.c, task_map.c
_ENDED = frozenset(
    state.value for state in (TaskState.SUCCESS, TaskState.FAILED, TaskState.SKIPPED, TaskState.UPSTREAM_FAILED)
)
#: The unfinished runs with their states; two SELECTs, because each has an index of its own.
ACTIVE = union_all(
    select(_RUN.id, _RUN.state).where(IS_QUEUED), select(_RUN.id, _RUN.state).where(IS_RUNNING)
).subquery("active")


def watch_runs(connection: Connection, request: WatchRuns, context: CallContext) -> tuple[RunProgress, ...]:
    """Return the progress of runs; see `WatchRuns`."""
    active = select(ACTIVE.c.id).order_by(ACTIVE.c.state.desc(), ACTIVE.c.id.desc()).limit(request.limit)
    shown = list(connection.execute(active).scalars())
    latest = connection.execute(select(_RUN.id).order_by(_RUN.id.desc()).limit(request.limit)).scalars()
    shown = list(dict.fromkeys([*shown, *latest]))[: request.limit]
    if not shown:
        return ()
    runs = {row.id: read_run(row) for row in connection.execute(RUNS.where(_RUN.id.in_(shown)))}
    counts: dict[int, Counter[str]] = {number: Counter() for number in shown}
    unmapped = and_(_TASK.run.in_(shown), text(IS_UNMAPPED))
    statement = select(_TASK.run, _TASK.state, func.count()).where(unmapped).group_by(_TASK.run, _TASK.state)
    for number, state, count in connection.execute(statement):
        counts[number][state] = count
    elements = _count_elements(connection, shown)
    return tuple(_build(runs[number], counts[number], *elements[number]) for number in shown if number in runs)


def _count_elements(connection: Connection, runs: Sequence[int]) -> dict[int, tuple[int, int, int]]:
    """Return how many elements runs have, how many of them have ended, and how many run."""
    found = dict.fromkeys(runs, (0, 0, 0))
    ended = _MAP.success + _MAP.failed + _MAP.upstream_failed + _MAP.skipped
    sums = select(_MAP.run, func.sum(_MAP.arrived), func.sum(ended)).where(_MAP.run.in_(runs)).group_by(_MAP.run)
    maps = connection.execute(sums).all()
    if not maps:
        return found
    running: dict[int, int] = dict(connection.execute(_RUNNING_ELEMENTS).all())
    for run, total, done in maps:
        # A source that failed, and a map that is too long, count as one failed element more.
        found[run] = (int(total), min(int(total), int(done)), running.get(run, 0))
    return found


_ELEMENT = _TASK.map_index >= literal_column("0")
# The `+ 0` keeps SQLite from reading all tasks in the order of their runs.
_RUNNING_ELEMENTS = (
    select((_TASK.run + literal_column("0")).label("of_run"), func.count())
    .where(and_(text(HOLDS_SLOTS), _TASK.state != literal_column("'queued'"), _ELEMENT))
    .group_by(literal_column("of_run"))
)


def count_tasks(connection: Connection) -> dict[str, int]:
    """Return the number of tasks and elements of unfinished runs, by state."""
    unmapped = select(_TASK.state, func.count()).join(ACTIVE, ACTIVE.c.id == _TASK.run).where(text(IS_UNMAPPED))
    counts: Counter[str] = Counter(dict(connection.execute(unmapped.group_by(_TASK.state)).all()))
    summed = {name: func.sum(column) for name, column in _SUMMED.items()}
    sums = connection.execute(select(*summed.values()).join(ACTIVE, ACTIVE.c.id == _MAP.run)).one()
    counts.update({name: int(count) for name, count in zip(summed, sums, strict=True) if count})
    # Each of these states has an index of its own, which is short.
    for condition in (HOLDS_SLOTS, IS_DEFERRED, "state = 'scheduled'"):
        open_elements = select(_TASK.state, func.count()).where(and_(text(condition), _ELEMENT)).group_by(_TASK.state)
        counts.update(dict(connection.execute(open_elements).all()))
    return dict(counts)


_SUMMED = {
    TaskState.NONE.value: _MAP.waiting,
    TaskState.UP_FOR_RETRY.value: _MAP.retrying,
    TaskState.SUCCESS.value: _MAP.success,
    TaskState.FAILED.value: _MAP.failed,
    TaskState.UPSTREAM_FAILED.value: _MAP.upstream_failed,
    TaskState.SKIPPED.value: _MAP.skipped,
}


def _build(run: RunRecord, counts: Counter[str], total: int, done: int, running: int) -> RunProgress:
    """Return the progress of a run, whose elements `total`, `done` and `running` count."""
    total += counts.total()
    done += sum(counts[state] for state in _ENDED)
    running += sum(counts[state.value] for state in (TaskState.RUNNING, TaskState.ENDING))
    return RunProgress(run, total, done, running, total - done - running)
