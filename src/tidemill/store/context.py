"""What the functions that answer calls are given besides the connection, and what they leave besides rows."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from sqlalchemy import Connection

from tidemill.core.tasks.inputs import Channel
from tidemill.store.batches import find_dialect
from tidemill.store.ciphers import Cipher
from tidemill.store.statements import execute_text

_NOW = "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"


@dataclass(slots=True)
class CallContext:
    """A transaction's surroundings.

    Attributes:
        now_us: The database's time, in UTC microseconds since the epoch.
        cipher: Encrypts what must not lie readable in the database.
        bells: Which services have work once the transaction is committed.
        left: Whether tasks were left to be decided by the scheduler.
        broken_runs: Runs that could not be worked on, and are left as they are.
        broken_dags: Likewise DAGs.
    """

    now_us: int
    cipher: Cipher
    bells: set[Channel] = field(default_factory=set)
    left: bool = False
    broken_runs: set[int] = field(default_factory=set)
    broken_dags: set[int] = field(default_factory=set)


def read_now(connection: Connection) -> int:
    """Return the database's time in UTC microseconds since the epoch; that of SQLite is that of this machine."""
    if find_dialect(connection) == "postgresql":
        return int(execute_text(connection, _NOW)[0][0])
    return time.time_ns() // 1000


def build_context(connection: Connection, cipher: Cipher, bells: Collection[Channel] = ()) -> CallContext:
    """Return the surroundings of a transaction that begins now."""
    return CallContext(read_now(connection), cipher, set(bells))
