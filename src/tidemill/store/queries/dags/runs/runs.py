"""Starts, cancels and reads runs of DAGs; `run_starts` chooses which queued runs start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    ScalarSelect,
    Select,
    and_,
    bindparam,
    false,
    literal_column,
    or_,
    select,
)

from tidemill.core.tasks.inputs import Channel
from tidemill.store.calls.call import CallRefusedError, Listed, RefusalKind
from tidemill.store.calls.run_calls import CancelRun, GetRun, ListRuns, RunRecord
from tidemill.store.calls.task_calls import GetEarlierRun
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import dag, dag_run, dag_version
from tidemill.store.queries.dags.state.map_rows import find_maps_of_runs
from tidemill.store.queries.dags.state.task_rows import RunEntry
from tidemill.store.queries.dags.state.tasks import close_board
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.statements import Statement

_ACTIVE = ("queued", "running")
_STATES = (*_ACTIVE, "success", "failed")
_RUN, _DAG = dag_run.c, dag.c
#: Literals, as in the indexes, so that SQLite recognises that the indexes apply.
IS_QUEUED, IS_RUNNING = _RUN.state == literal_column("'queued'"), _RUN.state == literal_column("'running'")
#: In the field order of `RunRecord`.
RUNS = (
    select(
        _RUN.id,
        _DAG.dag_id,
        *[_RUN[name] for name in ("run_id", "kind", "state", "reason")],
        dag_version.c.number,
        *[_RUN[name] for name in ("logical_us", "interval_start_us", "interval_end_us", "conf", "created_by")],
        *[_RUN[name] for name in ("created_us", "started_us", "ended_us")],
    )
    .join(dag, _DAG.id == _RUN.dag)
    .join(dag_version, dag_version.c.id == _RUN.version_id)
)


def start_runs(connection: Connection, runs: Sequence[int], context: CallContext) -> Board:
    """Start queued runs and decide their first tasks; a run that has been cancelled in the meantime stays as it is."""
    board = Board(connection, context)
    board.lock((), runs)
    beginning = [run for run in board.runs.values() if run.state == "queued" and run.reason is None]
    for run in beginning:
        begin_run(run, context.now_us)
    expanding = [run.id for run in beginning if run.plan.maps]
    board.add_pending()
    if expanding:
        board.maps.woken.update(find_maps_of_runs(connection, expanding))
    close_board(board)
    return board


def begin_run(run: RunEntry, now_us: int) -> None:
    """Set a run to running."""
    timeout_us = run.plan.structure.run_timeout_us
    run.state, run.started_us, run.ended_us, run.reason = "running", now_us, None, None
    run.deadline_us = None if timeout_us is None else now_us + timeout_us
    run.changed = True


def queue_run(run: RunEntry, context: CallContext) -> None:
    """Queue a finished run again; it starts once its DAG is not paused and has a free slot."""
    run.state, run.started_us, run.ended_us, run.reason, run.deadline_us = "queued", None, None, None, None
    run.changed = True
    context.bells.add(Channel.SCHEDULER)


def cancel_run(connection: Connection, request: CancelRun, context: CallContext) -> RunRecord:
    """Cancel a run; see `CancelRun`."""
    number = find_run(connection, request.dag_id, request.run_id)
    stop_runs(connection, [number], f"cancelled by {request.by}", "cancel", context)
    return get_run_by_number(connection, number)


def stop_runs(connection: Connection, runs: Sequence[int], reason: str, stop: str, context: CallContext) -> Board:
    """Stop the tasks of unfinished runs and make the runs fail for the given reason."""
    board = Board(connection, context)
    board.lock((), runs)
    for run in board.runs.values():
        if run.state in _ACTIVE:
            run.reason, run.stop, run.deadline_us, run.changed = reason, stop, None, True
    close_board(board)
    return board


def find_run(connection: Connection, dag_id: str, run_id: str) -> int:
    """Return the id of a run.

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


def get_earlier_run(connection: Connection, request: GetEarlierRun, context: CallContext) -> RunRecord | None:
    """Return the run before a given one; see `GetEarlierRun`."""
    own = select(_RUN.dag, _RUN.logical_us).where(_RUN.id == request.run).subquery()
    statement = RUNS.join(own, and_(_RUN.dag == own.c.dag, _RUN.logical_us < own.c.logical_us))
    if request.state is not None:
        statement = statement.where(_RUN.state == request.state)
    row = connection.execute(statement.order_by(_RUN.logical_us.desc()).limit(1)).first()
    return None if row is None else read_run(row)


def get_run_by_number(connection: Connection, number: int) -> RunRecord:
    """Return the record of a run."""
    return RunRecord(*_run_by_number.fetch(connection, {"run_number": number})[0])


@Statement
def _run_by_number(dialect: str) -> Select[Any]:
    return RUNS.where(_RUN.id == bindparam("run_number"))


def select_dag(dag_id: str) -> ScalarSelect[int]:
    """Select the id of a DAG as a scalar, so that a comparison with it reads the DAG's runs in index order."""
    return select(_DAG.id).where(_DAG.dag_id == dag_id).correlate(None).scalar_subquery()


def get_run(connection: Connection, request: GetRun, context: CallContext) -> RunRecord | None:
    """Return a run; see `GetRun`."""
    statement: Select[Any] = RUNS.where(_RUN.dag == select_dag(request.dag_id))
    if request.run_id is not None:
        statement = statement.where(_RUN.run_id == request.run_id)
    row = connection.execute(statement.order_by(_RUN.id.desc()).limit(1)).first()
    return None if row is None else read_run(row)


def list_runs(connection: Connection, request: ListRuns, context: CallContext) -> Listed[RunRecord]:
    """Return a page of runs; see `ListRuns`."""
    statement: Select[Any] = RUNS.order_by(_RUN.id.desc()).limit(request.limit + 1)
    if request.dag_id is not None:
        statement = statement.where(_RUN.dag == select_dag(request.dag_id))
    if request.states:
        # Literals, as in the indexes of runs by state.
        known = [state for state in _STATES if state in request.states]
        statement = statement.where(or_(false(), *[_RUN.state == literal_column(f"'{state}'") for state in known]))
    if request.after is not None:
        statement = statement.where(_RUN.id < int(request.after))
    rows = [read_run(row) for row in connection.execute(statement)]
    return Listed(tuple(rows[: request.limit]), str(rows[request.limit - 1].id) if len(rows) > request.limit else None)


def read_run(row: Sequence[Any]) -> RunRecord:
    """Build a record from a row of `RUNS`."""
    return RunRecord(*row)
