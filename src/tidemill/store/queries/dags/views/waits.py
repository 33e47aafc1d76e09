"""Describes what scheduled tasks wait for: slots of pools, with those that hold them, and limits of their DAGs.

Reads only tasks that have not ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, func, select, text

from tidemill.core.tasks.admission import find_reached
from tidemill.core.tasks.instance import format_instance
from tidemill.store.batches import find_dialect
from tidemill.store.calls.instance_calls import AdmissionAbout, DescribeAdmission, PoolLine, SlotHolder, TaskLimit
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import HOLDS_SLOTS, IS_DEFERRED, dag, dag_run, pool, task_instance
from tidemill.store.queries.dags.attempts.admissions import count_active, read_limits
from tidemill.store.queries.dags.state.task_rows import is_resumed
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows

_TASK = task_instance.c
_HOLDERS = 5


def describe_admission(connection: Connection, request: DescribeAdmission, context: CallContext) -> AdmissionAbout:
    """Describe what tasks wait for; see `DescribeAdmission`."""
    dialect = find_dialect(connection)
    wanted = _TASK.id.in_(select(IDS.build_source(dialect).c.id))
    columns = (_TASK.id, _TASK.run, _TASK.dag, _TASK.task_id, _TASK.pool, _TASK.rank)
    given = IDS.build_parameters(dialect, build_id_rows(request.tasks))
    rows = connection.execute(select(*columns).where(and_(wanted, text("state = 'scheduled'"))), given).all()
    names = sorted({row.pool for row in rows})
    pools = connection.execute(select(pool.c.name, pool.c.include_deferred).where(pool.c.name.in_(names)))
    lines = tuple(_describe_line(connection, name, bool(deferred)) for name, deferred in sorted(pools))
    return AdmissionAbout(lines, tuple(_find_limits(connection, rows)))


def _find_limits(connection: Connection, rows: Sequence[Row[Any, Any, Any, Any, Any, Any]]) -> Iterator[TaskLimit]:
    limits, _ = read_limits(connection, {row.dag for row in rows})
    active = count_active(connection, limits)
    for row in rows:
        # A resumed task counts already.
        if row.dag in limits and not is_resumed(row.rank):
            for one in find_reached(row.dag, row.run, row.task_id, limits[row.dag], active):
                yield TaskLimit(row.id, one.name, one.limit, one.active)


def _describe_line(connection: Connection, name: str, include_deferred: bool) -> PoolLine:
    conditions = [HOLDS_SLOTS, IS_DEFERRED] if include_deferred else [HOLDS_SLOTS]
    holders: list[SlotHolder] = []
    used = 0
    for condition in conditions:
        found = connection.execute(_select_holders(name, condition)).all()
        holders += [SlotHolder(*row[:-1]) for row in found]
        used += found[0].used if found else 0
    holders.sort(key=lambda one: (-one.slots, one.dag_id, one.run_id, one.task_id))
    first = connection.execute(_select_first(name)).first()
    line = PoolLine(name, int(used), tuple(holders[:_HOLDERS]))
    if first is None:
        return line
    shown = f"{first.dag_id} {first.run_id} {format_instance(first.task_id, first.map_index)}"
    return PoolLine(name, line.used, line.holders, first.id, shown, first.pool_slots)


def _select_holders(name: str, condition: str) -> Select[Any]:
    """Select the tasks that hold most slots of a pool, and the number of slots that all tasks hold.

    Names are joined to those few rows only: a pool may be held by 100,000 tasks.
    """
    mine = and_(_TASK.pool == name, text(condition))
    slots = func.sum(_TASK.pool_slots)
    groups = (
        select(
            _TASK.dag,
            _TASK.run,
            _TASK.task_id,
            func.count().label("tasks"),
            slots.label("slots"),
            func.sum(slots).over().label("used"),
        )
        .where(mine)
        .group_by(_TASK.dag, _TASK.run, _TASK.task_id)
        .order_by(slots.desc(), _TASK.run, _TASK.task_id)
        .limit(_HOLDERS)
        .subquery()
    )
    held = groups.c
    return (
        select(dag.c.dag_id, dag_run.c.run_id, held.task_id, held.tasks, held.slots, held.used)
        .join(dag_run, dag_run.c.id == held.run)
        .join(dag, dag.c.id == held.dag)
    )


def _select_first(name: str) -> Select[Any]:
    """Select the task of a pool that comes next."""
    columns = (_TASK.id, dag.c.dag_id, dag_run.c.run_id, _TASK.task_id, _TASK.map_index, _TASK.pool_slots)
    return (
        select(*columns)
        .join(dag_run, dag_run.c.id == _TASK.run)
        .join(dag, dag.c.id == _TASK.dag)
        .where(and_(_TASK.pool == name, text("task_instance.state = 'scheduled'")))
        .order_by(_TASK.rank, _TASK.since_us, _TASK.id)
        .limit(1)
    )
