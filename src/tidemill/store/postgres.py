"""The store in PostgreSQL, over asyncpg.

Invariants: a commit is on the server's disk when it returns (`synchronous_commit=on`, whatever the role's default
says); no attempt takes longer than `attempt_seconds`; after a failure every connection is made anew, so that a server
that was restarted or replaced is found again.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import asyncpg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tidemill.config.redaction import redact_text
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.store.database import as_remote_error
from tidemill.store.migrate import check_readable, upgrade

T = TypeVar("T")

#: An attempt that takes longer is given up: the network may swallow everything without a word.
ATTEMPT_SECONDS = 10.0
_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
#: One writes, the others read.
_CONNECTIONS = 3
#: Every statement here finds some rows by their keys. The planner must not sort or hash the whole table for that,
#: which it would do for a batch of hundreds in a table that it last looked at when it was small.
_PLANNING = {"enable_mergejoin": "off", "enable_hashjoin": "off", "plan_cache_mode": "force_custom_plan", "jit": "off"}
_FAILURES = (SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError)


class PostgresDatabase:
    """A PostgreSQL database that is open; made by `open_postgres` and `open_postgres_reader`."""

    def __init__(self, url: str, *, read_only: bool, attempt_seconds: float = ATTEMPT_SECONDS) -> None:
        """Prepare; nothing is connected yet."""
        self._label = redact_text(url)
        self._attempt_seconds = attempt_seconds
        self._read_only = read_only
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        self._engine = _engine(url, read_only, self._connections.add)

    @property
    def label(self) -> str:
        """The address, without its password."""
        return self._label

    @property
    def exclusive(self) -> bool:
        """False: a server is for many."""
        return False

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run work in a transaction; see `Database.write`."""
        if self._read_only:
            raise ConfigError(f"the store {self._label} is open for reading only")
        return await self._run(work)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run work in a transaction; see `Database.read`."""
        return await self._run(work)

    async def close(self) -> None:
        """Close all connections; a server that does not answer is not waited for."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._engine.dispose()
        except TimeoutError:
            await self._start_anew()

    async def _run(self, work: Callable[[Connection], T]) -> T:
        try:
            async with asyncio.timeout(self._attempt_seconds), self._engine.begin() as connection:
                return await connection.run_sync(work)
        except TimeoutError as error:
            await self._start_anew()
            raise RemoteError(f"the store {self._label} did not answer in time") from error
        except _FAILURES as error:
            failure = as_remote_error(self._label, error)
            if failure.retryable:
                await self._start_anew()
            raise failure from error

    async def _start_anew(self) -> None:
        """Drop every connection: the others most likely lead to nowhere too."""
        for connection in list(self._connections):
            # Not closed: that would wait for a server that may never answer.
            connection.terminate()
        await self._engine.dispose()


async def open_postgres(url: str, *, attempt_seconds: float = ATTEMPT_SECONDS) -> PostgresDatabase:
    """Open a database for writing, and bring its tables up to date.

    Args:
        url: As libpq and asyncpg know it: `postgresql://user:password@host:5432/name`.
        attempt_seconds: How long one transaction may take.

    Raises:
        ConfigError: A newer tidemill has upgraded it.
        RemoteError: It cannot be reached.
    """
    return await _opened(PostgresDatabase(url, read_only=False, attempt_seconds=attempt_seconds))


async def open_postgres_reader(url: str) -> PostgresDatabase:
    """Open a database to look at it only.

    Raises:
        ConfigError: It has no tables of ours, or those of another version.
        RemoteError: It cannot be reached.
    """
    return await _opened(PostgresDatabase(url, read_only=True))


async def _opened(database: PostgresDatabase) -> PostgresDatabase:
    try:
        if database._read_only:
            await database.read(lambda connection: check_readable(connection, database.label))
        else:
            await database.write(upgrade)
    except BaseException:
        await database.close()
        raise
    return database


def _engine(url: str, read_only: bool, made: Callable[[Any], None]) -> AsyncEngine:
    session = {
        "application_name": "tidemill",
        # Given at the start of a session this wins over the defaults of the server, the database and the role.
        "synchronous_commit": "on",
        "default_transaction_read_only": "on" if read_only else "off",
        **_PLANNING,
    }

    async def connect() -> Any:
        # asyncpg reads the address itself: libpq's forms (several hosts, sslmode, a service, a socket's folder) work.
        connection = await asyncpg.connect(url, timeout=_CONNECT_SECONDS, server_settings=session)
        made(connection)
        return connection

    return create_async_engine(
        "postgresql+asyncpg://",
        async_creator=connect,
        pool_size=_CONNECTIONS,
        max_overflow=0,
        # Every transaction here is ended by whoever began it.
        pool_reset_on_return=None,
    )
