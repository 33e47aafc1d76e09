"""Lists the encrypted values of a store, which would be lost without the key."""

from __future__ import annotations

from sqlalchemy import Column, ColumnElement, Connection, func, select

from tidemill.core.wording import format_count
from tidemill.store.ciphers import ENCRYPTED
from tidemill.store.dag_tables import connections, task_instance, variable

_MAX_NAMED = 5


def list_encrypted(connection: Connection) -> list[str]:
    """Describe the encrypted values for an error message. Reads whole tables, but only runs when a key is missing."""
    found = []
    for noun, name, value in (
        ("variable", variable.c.key, variable.c.value),
        ("connection", connections.c.id, connections.c.value),
    ):
        names = connection.scalars(select(name).where(_is_encrypted(value)).order_by(name)).all()
        if names:
            more = ", ..." if len(names) > _MAX_NAMED else ""
            found.append(f"{format_count(len(names), noun)} ({', '.join(names[:_MAX_NAMED])}{more})")
    is_deferred = _is_encrypted(task_instance.c.resume_kwargs)
    deferred = connection.scalar(select(func.count()).select_from(task_instance).where(is_deferred))
    return [*found, format_count(deferred, "deferred task")] if deferred else found


def _is_encrypted(column: Column[str]) -> ColumnElement[bool]:
    return column.startswith(ENCRYPTED)
