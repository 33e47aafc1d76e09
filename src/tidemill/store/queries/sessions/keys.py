"""The check value: services with a wrong key find out when they start, not when a task reads a secret."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.store.batches import find_dialect
from tidemill.store.calls.service_calls import CheckKey
from tidemill.store.context import CallContext
from tidemill.store.tables import key_check

_TEXT = "tidemill"


def check_key(connection: Connection, request: CheckKey, context: CallContext) -> None:
    """Decrypt the check value, and encrypt it with the first key; see `CheckKey`.

    Raises:
        ConfigError: No key decrypts it.
    """
    stored = connection.execute(select(key_check.c.value).with_for_update()).scalar()
    if stored is not None:
        context.cipher.decrypt(stored)
    make: Any = postgresql.insert if find_dialect(connection) == "postgresql" else sqlite.insert
    new = {"value": context.cipher.encrypt(_TEXT)}
    connection.execute(make(key_check).values(id=1, **new).on_conflict_do_update(index_elements=["id"], set_=new))
