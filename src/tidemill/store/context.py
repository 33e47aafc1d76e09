"""The context of a transaction that answers calls: time, cipher, and the side effects that follow the commit."""

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
    """The context of one transaction.

    Attributes:
        now_us: The database's time, in UTC microseconds since the epoch.
        cipher: Encrypts the secrets in the database.
        bells: The channels to ring after the commit.
        left: Whether tasks are left for the scheduler to decide.
        broken_runs: Runs that raised an error and were left unchanged.
        broken_dags: DAGs that raised an error and were left unchanged.
        skipped: Whether a scheduler has skipped rows that another transaction has locked.
    """

    now_us: int
    cipher: Cipher
    bells: set[Channel] = field(default_factory=set)
    left: bool = False
    broken_runs: set[int] = field(default_factory=set)
    broken_dags: set[int] = field(default_factory=set)
    skipped: bool = False


def read_now(connection: Connection) -> int:
    """Return the database's time in UTC microseconds since the epoch; for SQLite, the time of this machine."""
    if find_dialect(connection) == "postgresql":
        return int(execute_text(connection, _NOW)[0][0])
    return time.time_ns() // 1000


def build_context(connection: Connection, cipher: Cipher, bells: Collection[Channel] = ()) -> CallContext:
    """Return the context of a transaction that starts now."""
    return CallContext(read_now(connection), cipher, set(bells))
