"""The progress of runs: unfinished runs first, then the last finished ones.

Invariants: unfinished runs are found by index, and tasks are counted only for the listed runs, so that a long history
costs nothing.
"""

from __future__ import annotations

from sqlalchemy import Connection, and_, func, select, text, union_all

from tidemill.core.tasks.task_row import TaskState
from tidemill.store.calls.people_calls import RunProgress, RunRecord, WatchRuns
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import IS_UNMAPPED, dag_run, task_instance
from tidemill.store.queries.dags.runs import IS_QUEUED, IS_RUNNING, RUNS, read_run

_RUN, _TASK = dag_run.c, task_instance.c
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
    counts: dict[int, dict[str, int]] = {number: {} for number in shown}
    # A mapped task counts as one task; its elements may be many.
    wanted = and_(_TASK.run.in_(shown), text(IS_UNMAPPED))
    statement = select(_TASK.run, _TASK.state, func.count()).where(wanted).group_by(_TASK.run, _TASK.state)
    for number, state, count in connection.execute(statement):
        counts[number][state] = count
    return tuple(_build(runs[number], counts[number]) for number in shown if number in runs)


def _build(run: RunRecord, counts: dict[str, int]) -> RunProgress:
    total = sum(counts.values())
    done = sum(count for state, count in counts.items() if state in _ENDED)
    running = sum(counts.get(state.value, 0) for state in (TaskState.RUNNING, TaskState.ENDING, TaskState.MAPPED))
    return RunProgress(run, total, done, running, total - done - running)
