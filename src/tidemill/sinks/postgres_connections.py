"""The connections of a PostgreSQL sink: to the server itself, or through a pooler such as PgBouncer.

Behind a pooler the next transaction may run in another server session, and messages outside a transaction are spread
over sessions: a statement that one client prepared may then be executed for another client. Invariants: the pool that
`open_pool` returns prevents this. Either each of its connections leads to the server itself, or everything that takes
more than one message is sent in a transaction, and no statement has a name. Behind a pooler no session is ever reset,
because the session may belong to any client.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import asyncpg

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.poolers import STATEMENT_MODE, is_statement_mode

#: How long opening a connection may take.
CONNECT_SECONDS = 10.0
#: Longer statements are not cached as prepared statements; only rows with very many columns have them.
MAX_PREPARED_BYTES = 64 * 1024

_Method = Callable[..., Awaitable[Any]]


def _wrap(method: _Method) -> _Method:
    """Wrap a method of a connection so that it opens a transaction if there is none."""

    @functools.wraps(method)
    async def call(self: PooledConnection, *args: Any, **options: Any) -> Any:
        if self.is_in_transaction():
            return await method(self, *args, **options)
        async with self.transaction():
            return await method(self, *args, **options)

    return call


class PooledConnection(asyncpg.Connection):  # type: ignore[misc]
    """A connection through a pooler.

    Its prepared statements have no name; the session that executes a statement parses it again.
    """

    fetch = _wrap(asyncpg.Connection.fetch)
    fetchval = _wrap(asyncpg.Connection.fetchval)
    fetchrow = _wrap(asyncpg.Connection.fetchrow)
    fetchmany = _wrap(asyncpg.Connection.fetchmany)
    executemany = _wrap(asyncpg.Connection.executemany)
    copy_from_query = _wrap(asyncpg.Connection.copy_from_query)
    copy_records_to_table = _wrap(asyncpg.Connection.copy_records_to_table)
    set_type_codec = _wrap(asyncpg.Connection.set_type_codec)
    reset_type_codec = _wrap(asyncpg.Connection.reset_type_codec)
    set_builtin_type_codec = _wrap(asyncpg.Connection.set_builtin_type_codec)
    _prepare_in_transaction = _wrap(asyncpg.Connection.prepare)
    _execute_in_transaction = _wrap(asyncpg.Connection.execute)

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> Any:
        """Execute statements. Without arguments they are one message and need no transaction; some, such as VACUUM,
        forbid one.
        """
        method = self._execute_in_transaction if args else super().execute
        return await method(query, *args, timeout=timeout)

    async def prepare(self, query: str, *, name: str | None = None, **options: Any) -> Any:
        """Prepare a statement without a name."""
        if name:
            _refuse(f"a prepared statement with a name ({name})", "leave the name out")
        return await self._prepare_in_transaction(query, **options)

    def cursor(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse, because the statement of this cursor would have a name."""
        _refuse("cursor", "use (await connection.prepare(query)).cursor() in a transaction")

    async def add_listener(self, channel: str, callback: Any) -> NoReturn:
        """Refuse, because no notification would arrive."""
        _refuse("add_listener", "open a connection to the server itself")


async def open_pool(
    dsn: str, *, min_size: int, max_size: int, prepare: Callable[[Any], Awaitable[None]]
) -> tuple[asyncpg.Pool, bool]:
    """Open a pool; return it, and whether a pooler stands in front of the server.

    Args:
        dsn: The server or the pooler.
        min_size: How many connections to open now.
        max_size: The maximum number of connections.
        prepare: Called with each new connection.

    Raises:
        ConfigError: The pooler runs in statement mode, which has no transactions.
        OSError: The server does not answer.
        asyncpg.PostgresError: The server or the pooler refuses the connection.
    """

    async def prepare_direct(connection: asyncpg.Connection) -> None:
        async with _first_transaction(connection):
            await _check_direct(connection)
            await prepare(connection)

    async def prepare_pooled(connection: asyncpg.Connection) -> None:
        async with _first_transaction(connection):
            await prepare(connection)

    async def keep_session(connection: asyncpg.Connection) -> None:
        """Replace the pool's reset, which must not run behind a pooler."""

    sizes = {"min_size": min_size, "max_size": max_size, "timeout": CONNECT_SECONDS}
    try:
        # The same few statements recur.
        kept = {"max_cacheable_statement_size": MAX_PREPARED_BYTES}
        return await _open(asyncpg.create_pool(dsn, **sizes, **kept, init=prepare_direct)), False
    except PoolerFoundError:
        pooled = {"connection_class": PooledConnection, "statement_cache_size": 0, "reset": keep_session}
        return await _open(asyncpg.create_pool(dsn, **sizes, **pooled, init=prepare_pooled)), True


class PoolerFoundError(RemoteError):
    """A connection that should lead to the server leads to a pooler."""


async def _open(pool: asyncpg.Pool) -> asyncpg.Pool:
    try:
        return await pool
    except BaseException:
        pool.terminate()
        raise


@contextlib.asynccontextmanager
async def _first_transaction(connection: asyncpg.Connection) -> AsyncIterator[None]:
    """Terminate a new connection that does not answer; otherwise the pool would wait for it forever."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await connection.execute("BEGIN")
            yield
            await connection.execute("COMMIT")
    except BaseException as error:
        # Terminated, not rolled back or closed: both would wait for the server.
        connection.terminate()
        if is_statement_mode(error):
            raise ConfigError(STATEMENT_MODE) from None
        raise


async def _check_direct(connection: asyncpg.Connection) -> None:
    """Compare the session's process id with the one sent at connection start: a pooler sends its own."""
    statement = await connection.prepare("SELECT pg_backend_pid()", name="")
    if await statement.fetchval() != connection.get_server_pid():
        raise PoolerFoundError("the server is now behind a pooler; restart this pipeline")


def _refuse(what: str, advice: str) -> NoReturn:
    raise asyncpg.InterfaceError(f"{what} cannot be used behind a pooler; {advice}")
