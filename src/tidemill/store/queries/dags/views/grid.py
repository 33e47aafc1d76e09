"""The states of the tasks of several runs, for the grid on the pages of DAGs and runs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Connection, Select, bindparam, select, text

from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.instance_calls import GridTask, ListGrid, MapCounts
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import IS_UNMAPPED, dag_run, dag_version, task_instance, task_map
from tidemill.store.queries.dags.state.task_rows import load_plan
from tidemill.store.queries.dags.views.map_counts import read_counts
from tidemill.store.statements import Statement

_TASK, _RUN = task_instance.c, dag_run.c
_RUNS = RowSet("grid_runs", id=int)


def list_grid(connection: Connection, request: ListGrid, context: CallContext) -> tuple[GridTask, ...]:
    """Return the states of the tasks of some runs; see `ListGrid`."""
    given = _RUNS.build_parameters(find_dialect(connection), [(run,) for run in sorted(set(request.runs))])
    rows = _states.fetch(connection, given | {"most": request.limit})
    counts: dict[int, MapCounts] = {}
    for run, version, digest in _mapped.fetch(connection, given):
        counts |= read_counts(connection, run, load_plan(connection, version, digest))
    return tuple(GridTask(run, task_id, state, counts.get(number)) for number, run, task_id, state in rows)


@Statement
def _states(dialect: str) -> Select[Any]:
    given = _RUNS.build_source(dialect)
    first = _TASK.number < bindparam("most", type_=BigInteger)
    return (
        select(_TASK.id, _TASK.run, _TASK.task_id, _TASK.state)
        .join(given, _TASK.run == given.c.id)
        .where(text(IS_UNMAPPED), first)
        .order_by(_TASK.run, _TASK.number)
    )


@Statement
def _mapped(dialect: str) -> Select[Any]:
    """Select those of the runs that have mapped tasks, with their versions."""
    given = _RUNS.build_source(dialect)
    return (
        select(_RUN.id, dag_version.c.id, dag_version.c.digest)
        .join(given, _RUN.id == given.c.id)
        .join(dag_version, dag_version.c.id == _RUN.version_id)
        .join(task_map, task_map.c.run == _RUN.id)
        .distinct()
    )
