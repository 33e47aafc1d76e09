"""The data that attempts read and write besides their result: XComs, task state, variables, connections.

Invariants: every write for a task carries the epoch of its attempt and is refused if the epoch is stale. The values of
variables and connections are encrypted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, delete, select
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.core.tasks.task_row import TaskState
from tidemill.store.batches import find_dialect
from tidemill.store.calls.call import CallRefusedError, Listed, RefusalKind
from tidemill.store.calls.setting_calls import (
    ConnectionRow,
    DeleteConnection,
    ListConnections,
    ListVariables,
    SetConnection,
    VariableRecord,
)
from tidemill.store.calls.task_calls import (
    MAX_XCOM_BYTES,
    ClearTaskState,
    ConnectionRecord,
    DeleteTaskState,
    DeleteVariable,
    GetConnection,
    GetTaskState,
    GetVariable,
    PushXCom,
    SetTaskState,
    SetVariable,
)
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import connections, task_instance, task_state, variable
from tidemill.store.queries.checks import check_name, check_text
from tidemill.store.queries.dags.state.effects import write_xcoms
from tidemill.store.queries.dags.values.xcoms import check_xcom

_TASK, _STATE = task_instance.c, task_state.c


def check_attempt(connection: Connection, task: int, epoch: int) -> None:
    """Ensure that an attempt is running and that its task stays in this epoch until the transaction ends.

    Raises:
        CallRefusedError: The epoch is stale, or the attempt is not running.
    """
    statement = select(_TASK.state, _TASK.epoch).where(_TASK.id == task).with_for_update(key_share=True)
    row = connection.execute(statement).first()
    if row is None or row.epoch != epoch or row.state != TaskState.RUNNING.value:
        raise CallRefusedError(
            RefusalKind.FENCED, "this attempt no longer counts: its task has a newer epoch or has ended"
        )


def push_xcom(connection: Connection, request: PushXCom, context: CallContext) -> None:
    """Store an XCom; see `PushXCom`."""
    check_xcom(request.key, request.value)
    check_attempt(connection, request.task, request.epoch)
    write_xcoms(connection, [(request.task, request.key, request.value)], context.now_us)


def get_task_state(connection: Connection, request: GetTaskState, context: CallContext) -> str | None:
    """Return a value of the task state; see `GetTaskState`."""
    check_attempt(connection, request.task, request.epoch)
    wanted = and_(_STATE.task == request.task, _STATE.key == request.key)
    return connection.execute(select(_STATE.value).where(wanted)).scalar()


def set_task_state(connection: Connection, request: SetTaskState, context: CallContext) -> None:
    """Store a value of the task state; see `SetTaskState`."""
    _check_state(request.key, request.value)
    check_attempt(connection, request.task, request.epoch)
    write_task_state(connection, request.task, {request.key: request.value}, context.now_us)


def _check_state(key: str, value: str) -> None:
    check_text("key", key)
    if len(value) > MAX_XCOM_BYTES:
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"a value of the task state is longer than {MAX_XCOM_BYTES} bytes; store the path of a file instead",
        )


def find_state_fault(states: Iterable[tuple[str, str | None]]) -> str | None:
    """Return why values of the task state cannot be stored; None if they can."""
    try:
        for key, value in states:
            _check_state(key, value or "")
    except CallRefusedError as error:
        return str(error)
    return None


def write_task_state(
    connection: Connection, task: int, states: Mapping[str, str | None], now_us: int, *, clears: bool = False
) -> None:
    """Store values of the task state of an attempt that holds its task; None removes a value.

    Args:
        connection: A connection inside a transaction.
        task: The task.
        states: The encoded values.
        now_us: The time of the change.
        clears: Whether all other values are removed.
    """
    if clears:
        connection.execute(delete(task_state).where(_STATE.task == task))
    for key, value in states.items():
        if value is None:
            connection.execute(delete(task_state).where(and_(_STATE.task == task, _STATE.key == key)))
        else:
            values = {"task": task, "key": key, "value": value, "changed_us": now_us}
            _upsert(connection, task_state, ["task", "key"], values)


def delete_task_state(connection: Connection, request: DeleteTaskState, context: CallContext) -> bool:
    """Delete a value of the task state; see `DeleteTaskState`."""
    check_attempt(connection, request.task, request.epoch)
    wanted = and_(_STATE.task == request.task, _STATE.key == request.key)
    return bool(connection.execute(delete(task_state).where(wanted)).rowcount)


def clear_task_state(connection: Connection, request: ClearTaskState, context: CallContext) -> int:
    """Delete all values of the task state; see `ClearTaskState`."""
    check_attempt(connection, request.task, request.epoch)
    return connection.execute(delete(task_state).where(_STATE.task == request.task)).rowcount


def get_variable(connection: Connection, request: GetVariable, context: CallContext) -> str | None:
    """Return the value of a variable; see `GetVariable`."""
    found = connection.execute(select(variable.c.value).where(variable.c.key == request.key)).scalar()
    return None if found is None else context.cipher.decrypt(found)


def set_variable(connection: Connection, request: SetVariable, context: CallContext) -> None:
    """Store a variable; see `SetVariable`."""
    check_name("variable", request.key)
    check_text("value", request.value)
    check_text("description", request.description or "")
    values: dict[str, Any] = {
        "key": request.key,
        "value": context.cipher.encrypt(request.value),
        "description": request.description or "",
        "changed_us": context.now_us,
    }
    _upsert(connection, variable, ["key"], values, () if request.description is not None else ("description",))


def delete_variable(connection: Connection, request: DeleteVariable, context: CallContext) -> bool:
    """Delete a variable; see `DeleteVariable`."""
    return bool(connection.execute(delete(variable).where(variable.c.key == request.key)).rowcount)


def list_variables(connection: Connection, request: ListVariables, context: CallContext) -> Listed[VariableRecord]:
    """Return a page of variables; see `ListVariables`."""
    statement = select(variable).order_by(variable.c.key).limit(request.limit + 1)
    if request.after is not None:
        statement = statement.where(variable.c.key > request.after)
    rows = connection.execute(statement).all()
    records = tuple(
        VariableRecord(
            row.key,
            context.cipher.decrypt(row.value) if request.values else None,
            row.description,
            row.changed_us,
        )
        for row in rows[: request.limit]
    )
    return Listed(records, records[-1].key if len(rows) > request.limit else None)


def get_connection(connection: Connection, request: GetConnection, context: CallContext) -> ConnectionRecord | None:
    """Return a connection with its secrets; see `GetConnection`."""
    found = connection.execute(select(connections.c.value).where(connections.c.id == request.id)).scalar()
    return None if found is None else msgspec.json.decode(context.cipher.decrypt(found), type=ConnectionRecord)


def set_connection(connection: Connection, request: SetConnection, context: CallContext) -> None:
    """Store a connection; see `SetConnection`."""
    check_name("connection", request.id)
    fields = msgspec.structs.asdict(request)
    for name, value in fields.items():
        if isinstance(value, str):
            check_text(name, value)
    record = ConnectionRecord(**fields)
    shown = ("id", "kind", "host", "port", "schema", "login", "description")
    values = {name: fields[name] for name in shown}
    values |= {"value": context.cipher.encrypt(msgspec.json.encode(record).decode()), "changed_us": context.now_us}
    _upsert(connection, connections, ["id"], values)


def delete_connection(connection: Connection, request: DeleteConnection, context: CallContext) -> bool:
    """Delete a connection; see `DeleteConnection`."""
    return bool(connection.execute(delete(connections).where(connections.c.id == request.id)).rowcount)


def list_connections(connection: Connection, request: ListConnections, context: CallContext) -> Listed[ConnectionRow]:
    """Return a page of connections; see `ListConnections`."""
    columns = connections.c
    statement = select(connections).order_by(columns.id).limit(request.limit + 1)
    if request.after is not None:
        statement = statement.where(columns.id > request.after)
    rows = connection.execute(statement).all()
    records = tuple(
        ConnectionRow(row.id, row.kind, row.host, row.port, row.schema, row.login, row.description)
        for row in rows[: request.limit]
    )
    return Listed(records, records[-1].id if len(rows) > request.limit else None)


def _upsert(
    connection: Connection, table: Any, keys: list[str], values: dict[str, Any], kept: tuple[str, ...] = ()
) -> None:
    make: Any = postgresql.insert if find_dialect(connection) == "postgresql" else sqlite.insert
    new = {name: value for name, value in values.items() if name not in keys and name not in kept}
    connection.execute(make(table).values(values).on_conflict_do_update(index_elements=keys, set_=new))
