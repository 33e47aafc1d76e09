"""Describes the triggers of deferred tasks for display: their classes and arguments, with secrets masked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.redaction import is_secret, redact
from tidemill.core.errors import ConfigError
from tidemill.store.calls.asked_secrets import find_secrets
from tidemill.store.calls.call import Call
from tidemill.store.calls.instance_calls import DescribeTriggers, TriggerAbout
from tidemill.store.calls.task_calls import ConnectionRecord, GetConnection, GetVariable
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import connections, variable
from tidemill.store.tables import service_session, trigger, trigger_cursor

#: Longer arguments are truncated after masking.
MAX_ARGUMENTS = 2_000
_UNREADABLE = "they cannot be decrypted"


def describe_triggers(
    connection: Connection, request: DescribeTriggers, context: CallContext
) -> tuple[TriggerAbout, ...]:
    """Describe triggers; see `DescribeTriggers`."""
    statement = (
        select(
            *(trigger.c.id, trigger.c.classpath, trigger.c.kwargs, trigger.c.queue),
            *(service_session.c.host, service_session.c.pid),
        )
        .outerjoin(trigger_cursor, trigger_cursor.c.trigger_id == trigger.c.id)
        .outerjoin(service_session, service_session.c.id == trigger_cursor.c.session_id)
        .where(trigger.c.id.in_(request.triggers))
    )
    rows = connection.execute(statement).all()
    secrets = KnownSecrets(_list_secrets(connection, context)) if rows else KnownSecrets()
    return tuple(_describe(row, secrets, context) for row in rows)


def _list_secrets(connection: Connection, context: CallContext) -> Iterator[str]:
    """Yield all secrets that tasks can read, because trigger arguments may contain them."""
    stored: list[tuple[Call[Any], str]] = [
        (GetConnection(row.id), row.value) for row in connection.execute(select(connections.c.id, connections.c.value))
    ]
    # Searching the other variables would be expensive where there are thousands.
    stored += [
        (GetVariable(row.key), row.value)
        for row in connection.execute(select(variable.c.key, variable.c.value))
        if is_secret(row.key)
    ]
    for call, value in stored:
        try:
            text = context.cipher.decrypt(value)
        except ConfigError:
            continue  # no task can have read a value that cannot be decrypted
        is_connection = isinstance(call, GetConnection)
        yield from find_secrets(call, msgspec.json.decode(text, type=ConnectionRecord) if is_connection else text)


def _describe(row: Row[Any, Any, Any, Any, Any, Any], secrets: KnownSecrets, context: CallContext) -> TriggerAbout:
    holder = None if row.host is None else f"{row.host}, process {row.pid}"
    try:
        arguments = json.loads(context.cipher.decrypt(row.kwargs))
    except ConfigError:
        return TriggerAbout(row.id, row.classpath, _UNREADABLE, None, holder, row.queue)
    text, due_us = _format_arguments(arguments, secrets), _find_due(arguments)
    return TriggerAbout(row.id, row.classpath, text, due_us, holder, row.queue)


def _format_arguments(arguments: Any, secrets: KnownSecrets) -> str:
    masked = redact(arguments) if isinstance(arguments, dict) else {}
    text = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in masked.items())
    text = secrets.mask_known(text)
    return text if len(text) <= MAX_ARGUMENTS else f"{text[:MAX_ARGUMENTS]}..."


def _find_due(arguments: Any) -> int | None:
    """Return the time that a trigger waits for, in microseconds; None if it waits for something else."""
    moment = arguments.get("moment") if isinstance(arguments, dict) else None
    if not isinstance(moment, str):
        return None
    try:
        found = datetime.fromisoformat(moment)
    except ValueError:
        return None
    return None if found.tzinfo is None else round(found.timestamp() * 1e6)
