"""The context of a transaction that answers calls: time, cipher, and the side effects that follow the commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.store_clock import STORE_CLOCK, read_elapsed_us
from tidemill.store.batches import find_dialect
from tidemill.store.ciphers import Cipher
from tidemill.store.statements import CLOCK, execute_text

_NOW = f"SELECT {CLOCK}"


@dataclass(slots=True)
class CallContext:
    """The context of one transaction.

    Attributes:
        clock: Reads the time when it is needed first (`now_us`).
        cipher: Encrypts the secrets in the database.
        bells: The channels to ring after the commit.
        left: Whether tasks are left for the scheduler to decide.
        broken_runs: Runs that raised an error and were left unchanged.
        broken_dags: DAGs that raised an error and were left unchanged.
        skipped: Whether a scheduler has skipped rows that another transaction has locked.
        untold: The boards whose maps are told at the end what has become of their elements; None: at once.
        isolates: Whether a step that fails is rolled back alone, by a savepoint, instead of the whole transaction.
    """

    clock: Callable[[], int]
    cipher: Cipher
    bells: set[Channel] = field(default_factory=set)
    left: bool = False
    broken_runs: set[int] = field(default_factory=set)
    broken_dags: set[int] = field(default_factory=set)
    skipped: bool = False
    untold: list[Any] | None = None
    isolates: bool = True
    _now_us: int | None = None

    @property
    def now_us(self) -> int:
        """The database's time, in UTC microseconds since the epoch; the same in the whole transaction."""
        if self._now_us is None:
            self._now_us = self.clock()
        return self._now_us

    def note_now(self, now_us: int) -> None:
        """Set the time, which another statement has read."""
        if self._now_us is None:
            self._now_us = now_us


def read_now(connection: Connection) -> int:
    """Return the database's time in UTC microseconds since the epoch; for SQLite, the time of this machine."""
    if find_dialect(connection) == "postgresql":
        asked_us = read_elapsed_us()
        now_us = int(execute_text(connection, _NOW)[0][0])
        STORE_CLOCK.note(now_us, asked_us)
        return now_us
    return time.time_ns() // 1000


def build_context(connection: Connection, cipher: Cipher, *, isolates: bool = True) -> CallContext:
    """Return the context of a transaction."""
    return CallContext(lambda: read_now(connection), cipher, isolates=isolates)
