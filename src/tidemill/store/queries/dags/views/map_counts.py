"""Reads the counts of mapped tasks."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Select,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    select,
    text,
)

from tidemill.core.tasks.structure import MapStructure
from tidemill.store.calls.instance_calls import MapCounts
from tidemill.store.dag_plan import DagPlan
from tidemill.store.dag_tables import HOLDS_SLOTS, task_instance, task_iteration, task_map
from tidemill.store.queries.dags.items.backlog import measure_parts
from tidemill.store.queries.dags.items.stored_sources import read_sources
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
        mapped = plan.tasks[task_id].structure.mapped
        if mapped is not None and mapped.iterated:
            found[task] = _count_parts(connection, run, task, task_id, mapped)
            continue
        runs = unfinished if plan.tasks[task_id].structure.is_group else running.get(task_id, 0)
        success, failed, upstream_failed, skipped, stop, retrying = counts
        ended = success, failed, upstream_failed, skipped
        found[task] = MapCounts(arrived, bool(closed), created, unfinished, runs, *ended, stop, retrying)
    return found


def _count_parts(connection: Connection, run: int, head: int, task_id: str, mapped: MapStructure) -> MapCounts:
    """Return the counts of elements that run in one attempt."""
    given = {"of_run": run, "of_task": task_id}
    ((closed, stop, sources),) = _iterated.fetch(connection, given)
    found = read_sources(sources)
    total, ended = 0, bool(closed)
    if found.factors:
        measured = measure_parts(connection, head, mapped, found, closed=bool(closed))
        total, ended = measured.parts, measured.closed
    rows = _parts.fetch(connection, given)
    seen, running, success, failed, skipped, retrying = rows[0] if rows else (0,) * 6
    done = success + failed + skipped
    return MapCounts(
        arrived=total,
        closed=ended,
        created=min(max(seen, done + retrying), total),
        unfinished=max(min(running + retrying, total - done), 0),
        running=running,
        success=success,
        failed=failed,
        upstream_failed=0,
        skipped=skipped,
        stop=stop,
        retrying=retrying,
        iterated=True,
    )


@Statement
def _iterated(dialect: str) -> Select[Any]:
    mine = and_(_MAP.run == bindparam("of_run"), _MAP.task_id == bindparam("of_task"))
    return select(_MAP.closed, _MAP.stop, _MAP.sources).where(mine)


@Statement
def _parts(dialect: str) -> Select[Any]:
    names = ("seen", "running", "success", "failed", "skipped", "up_for_retry")
    only = and_(
        _TASK.run == bindparam("of_run"),
        _TASK.task_id == bindparam("of_task"),
        _TASK.map_index == literal_column("0"),
    )
    columns: list[Any] = [task_iteration.c[name] for name in names]
    # An attempt that has been lost or ended says no more how many it runs.
    is_running = _TASK.state == literal_column("'running'")
    columns[1] = case((is_running, task_iteration.c.running), else_=literal_column("0"))
    return select(*columns).join(task_instance, _TASK.id == task_iteration.c.task).where(only)


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
    """Return by count of `MapRow` how many elements there are at most; None: the map has rows of a former life, too.

    `removed`: how many there are of those.
    """
    rows = _possible.fetch(connection, {"of_run": run, "of_task": task_id})
    if not rows:
        return None
    created, made, has_sources, *counts = rows[0]
    # A map that follows another one has no `made`; it removes its former elements when it finds its sources.
    if made > created or not (made or has_sources):
        return None
    possible = dict(zip(_COUNTS, counts, strict=True))
    # All its rows are elements; those beyond the end of a source that ran again are removed.
    return possible | {"removed": max(0, created - sum(counts))} if made else possible


@Statement
def _possible(dialect: str) -> Select[Any]:
    mine = and_(_MAP.run == bindparam("of_run"), _MAP.task_id == bindparam("of_task"))
    return select(_MAP.created, _MAP.made, _MAP.sources.is_not(None), *[_MAP[name] for name in _COUNTS]).where(mine)
