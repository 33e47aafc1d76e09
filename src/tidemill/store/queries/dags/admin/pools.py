"""Lists and changes pools, which limit the number of slots for tasks."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, and_, delete, func, literal_column, select, text
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.core.tasks.inputs import Channel
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.batches import find_dialect
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.setting_calls import DeletePool, ListPools, PoolRecord, SetPool
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import HOLDS_SLOTS, pool, task_instance
from tidemill.store.queries.checks import check_name, check_text

#: The pool of tasks that name no pool.
DEFAULT_POOL = "default_pool"

_TASK = task_instance.c


def list_pools(connection: Connection, request: ListPools, context: CallContext) -> tuple[PoolRecord, ...]:
    """Return all pools; see `ListPools`."""
    holding = text(HOLDS_SLOTS)
    used = _sum_slots(connection, holding)
    deferred = _sum_slots(connection, _TASK.state == TaskState.DEFERRED.value)
    waits = _TASK.state == TaskState.SCHEDULED.value
    counted = select(_TASK.pool, func.count()).where(waits).group_by(_TASK.pool)
    waiting: dict[str, int] = dict(connection.execute(counted).all())
    records = []
    for row in connection.execute(select(pool).order_by(pool.c.name)):
        count = used.get(row.name, 0) + (deferred.get(row.name, 0) if row.include_deferred else 0)
        kept = bool(row.include_deferred)
        records.append(PoolRecord(row.name, row.slots, row.description, kept, count, waiting.get(row.name, 0)))
    return tuple(records)


def _sum_slots(connection: Connection, state: Any) -> dict[str, int]:
    statement = select(_TASK.pool, func.sum(_TASK.pool_slots)).where(state).group_by(_TASK.pool)
    return {name: int(count) for name, count in connection.execute(statement)}


def set_pool(connection: Connection, request: SetPool, context: CallContext) -> None:
    """Create or change a pool; see `SetPool`."""
    check_name("pool", request.name)
    check_text("description", request.description or "")
    if not 0 <= request.slots < 1 << 31:
        raise CallRefusedError(RefusalKind.INVALID, f"a pool cannot have {request.slots} slots; give 0 or more")
    given: dict[str, Any] = {"slots": request.slots}
    if request.description is not None:
        given["description"] = request.description
    if request.include_deferred is not None:
        given["include_deferred"] = int(request.include_deferred)
    values = {"name": request.name, "description": "", "include_deferred": 0, **given}
    make: Any = postgresql.insert if find_dialect(connection) == "postgresql" else sqlite.insert
    connection.execute(make(pool).values(values).on_conflict_do_update(index_elements=["name"], set_=given))
    context.bells.add(Channel.SCHEDULER)


def delete_pool(connection: Connection, request: DeletePool, context: CallContext) -> bool:
    """Delete a pool; see `DeletePool`."""
    if request.name == DEFAULT_POOL:
        raise CallRefusedError(RefusalKind.INVALID, f"{DEFAULT_POOL} cannot be deleted; set its slots instead")
    waiting = and_(_TASK.pool == request.name, _TASK.state == literal_column("'scheduled'"))
    if connection.execute(select(_TASK.id).where(waiting).limit(1)).first() is not None:
        raise CallRefusedError(
            RefusalKind.CONFLICT,
            f"tasks wait for slots of pool {request.name!r}; let them finish, or cancel their runs",
        )
    return bool(connection.execute(delete(pool).where(pool.c.name == request.name)).rowcount)
