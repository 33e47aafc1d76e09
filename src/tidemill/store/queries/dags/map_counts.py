"""Reads the counts of mapped tasks."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Connection, Select, and_, bindparam, func, literal_column, select, text

from tidemill.store.calls.instance_calls import MapCounts
from tidemill.store.dag_plan import DagPlan
from tidemill.store.dag_tables import HOLDS_SLOTS, task_instance, task_map
from tidemill.store.statements import Statement

_TASK, _MAP = task_instance.c, task_map.c
_COUNTS = ("waiting", "unfinished", "retrying", "success", "failed", "upstream_failed", "skipped")


def read_counts(connection: Connection, run: int, plan: DagPlan) -> dict[int, MapCounts]:
    """Return the counts of the mapped tasks of a run, by the task; unfinished elements of a mapped group run."""
    rows = _maps.fetch(connection, {"of_run": run})
    if not rows:
        return {}
    running: dict[str, int] = dict(_running.fetch(connection, {"of_run": run}))
    found = {}
    for task, task_id, arrived, closed, created, unfinished, *counts in rows:
        runs = unfinished if plan.tasks[task_id].structure.is_group else running.get(task_id, 0)
        success, failed, upstream_failed, skipped, stop, retrying = counts
        ended = success, failed, upstream_failed, skipped
        found[task] = MapCounts(arrived, bool(closed), created, unfinished, runs, *ended, stop, retrying)
    return found


@Statement
def _maps(dialect: str) -> Select[Any]:
    unfinished = _MAP.waiting + _MAP.unfinished + _MAP.retrying
    before = (_MAP.task, _MAP.task_id, _MAP.arrived, _MAP.closed, _MAP.created, unfinished)
    ended = (_MAP.success, _MAP.failed, _MAP.upstream_failed, _MAP.skipped)
    return select(*before, *ended, _MAP.stop, _MAP.retrying).where(_MAP.run == bindparam("of_run"))


@Statement
def _running(dialect: str) -> Select[Any]:
    # The index of tasks that hold slots is short; the `+ 0` keeps the databases from reading all elements instead.
    mine = and_(_TASK.run + literal_column("0") == bindparam("of_run", type_=BigInteger()), text(HOLDS_SLOTS))
    runs = and_(_TASK.state != literal_column("'queued'"), _TASK.map_index >= literal_column("0"))
    return select(_TASK.task_id, func.count()).where(and_(mine, runs)).group_by(_TASK.task_id)


def read_possible(connection: Connection, run: int, task_id: str) -> dict[str, int] | None:
    """Return by count of `MapRow` how many elements there are at most; None: the map has rows of a former life, too."""
    rows = _possible.fetch(connection, {"of_run": run, "of_task": task_id})
    if not rows:
        return None
    created, made, has_sources, *counts = rows[0]
    # A map that follows another one has no `made`; it removes its former elements when it finds its sources.
    counts_all = made <= created and (made or has_sources)
    return dict(zip(_COUNTS, counts, strict=True)) if counts_all else None


@Statement
def _possible(dialect: str) -> Select[Any]:
    mine = and_(_MAP.run == bindparam("of_run"), _MAP.task_id == bindparam("of_task"))
    return select(_MAP.created, _MAP.made, _MAP.sources.is_not(None), *[_MAP[name] for name in _COUNTS]).where(mine)
