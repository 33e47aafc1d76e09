"""The store in PostgreSQL, over asyncpg, directly or through a transaction-mode pooler.

Invariants: a returned commit is on the server's disk (`synchronous_commit=on`, whatever the role's default). No attempt
takes longer than `attempt_seconds`. A transaction that loses a conflict (deadlock or serialization failure) is repeated
at once on its connection; a conflict is not an outage. After any other server failure the connection is dropped, and
idle connections are dropped before their next use, so that a restarted or replaced server is found. A transaction that
another task has in progress is never interrupted.

Behind a pooler, each transaction may run on a different server session. Settings are therefore local to each
transaction and sent in one message with its BEGIN, and statements are prepared only on connections that were found to
lead directly to the server. (Per transaction of 50 events, the settings cost 2 %, and preparing each time costs 17 %.)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import structlog
from sqlalchemy import Connection, event, func, select
from sqlalchemy.exc import DisconnectionError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from tidemill.config.redaction import redact_text
from tidemill.core.errors import ConfigError, InvariantError, RemoteError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.poolers import STATEMENT_MODE, is_statement_mode
from tidemill.store.calls.call import Call, CallRefusedError
from tidemill.store.calls.dispatch import answer_call
from tidemill.store.ciphers import Cipher
from tidemill.store.context import build_context
from tidemill.store.database import SchemaChange, StoreAwayError, build_remote_error, is_conflict
from tidemill.store.doorbell import Doorbell
from tidemill.store.engines.call_batches import build_failure
from tidemill.store.engines.postgres_doorbell import PostgresDoorbell
from tidemill.store.migrate import check_current, check_readable, check_unchanged, read_revision, upgrade
from tidemill.store.statements import NeedsIsolationError
from tidemill.store.tables import HEAD

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: The time limit of an attempt: a network may drop all packets silently.
ATTEMPT_SECONDS = 10.0
_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
#: How often calls check that the tables are those of this program.
CHECK_SECONDS = 5.0
#: One connection for writing events, one for reports and claims, one for reading.
_CONNECTIONS = 3
#: The number of statements that a connection keeps prepared; there are about two hundred.
_PREPARED = 200
#: The delay before repeating a transaction that lost a conflict; the other transaction has usually ended by then.
_CONFLICT_BACKOFF = Backoff(0.005, 0.2)
#: The server closes the connections of a host that has vanished within a minute; by default it takes two hours.
KEEPALIVE = {
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
#: Every statement here finds a few rows by key. The planner must not sort or hash the whole table for that, as it would
#: for a batch of hundreds of keys if its statistics date from when the table was small.
_PLANNING = {"enable_mergejoin": "off", "enable_hashjoin": "off", "plan_cache_mode": "force_custom_plan", "jit": "off"}
#: Turns repeat the same statements, and planning them takes a fifth of the time. A plan that is kept must not read the
#: whole of a table that was small when it was made. Lists are planned anew, for the states in their request.
#: A statement that joins given rows to a table therefore takes all columns of a key from them, or is an upsert, or has
#: a scalar subquery; a kept plan would otherwise read all rows of a run for each given row. `tests/store/test_plans.py`
#: checks this. A state that selects a partial index is written as a literal, not a parameter.
_KEPT_PLANS = {**_PLANNING, "plan_cache_mode": "force_generic_plan", "enable_seqscan": "off"}
_FAILURES = (
    SQLAlchemyError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    UnicodeError,
)


class PostgresDatabase:
    """An open PostgreSQL database; created by `open_postgres` and `open_postgres_reader`."""

    def __init__(
        self,
        url: str,
        *,
        read_only: bool,
        attempt_seconds: float = ATTEMPT_SECONDS,
        cipher: Cipher | None = None,
        listen_url: str = "",
    ) -> None:
        self._cipher = cipher or Cipher()
        self._doorbell = PostgresDoorbell(listen_url or url, KEEPALIVE)
        self._label = redact_text(url)
        self._attempt_seconds = attempt_seconds
        self._read_only = read_only
        # Increases with every failure; idle connections of an earlier epoch are not trusted.
        self._epoch = 0
        # The start of the current outage, by the monotonic clock; None: the last transaction succeeded.
        self._away_since: float | None = None
        # Whether the tables have had the right revision, and when that is to be checked again.
        self._prepared = False
        self._check_due = 0.0
        self._begin_read = _build_begin(read_only, attempt_seconds, _PLANNING)
        self._begin_write = _build_begin(read_only, attempt_seconds, _KEPT_PLANS)
        self._prepared_count = 0
        # PgBouncer rejects most startup settings, but accepts the application name.
        self._session_settings = {"application_name": "tidemill"}
        self._numbers = itertools.count(1)
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        self._engine = self._make_engine(url)
        event.listen(self._engine.sync_engine, "connect", self._note_connected)
        event.listen(self._engine.sync_engine, "checkout", self._check_epoch)
        # `_attempt` begins and ends transactions, not SQLAlchemy.
        self._transactions = self._engine.execution_options(isolation_level="AUTOCOMMIT")

    @property
    def label(self) -> str:
        """The URL without its password."""
        return self._label

    @property
    def exclusive(self) -> bool:
        """False: a server has many clients."""
        return False

    async def prepare(self, schema: SchemaChange = SchemaChange.UPGRADE) -> None:
        """Bring the tables up to date, or, if read-only, check their revision.

        Args:
            schema: What may be done to the tables.

        Raises:
            ConfigError: The tables have another revision, or the pooler does not support transactions.
            RemoteError: The database is unreachable.
        """
        try:
            direct = await self.read(_is_direct)
        except RemoteError as error:
            if is_statement_mode(error):
                raise ConfigError(f"the store {self._label} cannot be used: {STATEMENT_MODE}") from None
            raise
        if direct:
            self._prepared_count = _PREPARED
            self._session_settings |= KEEPALIVE
            self._epoch += 1  # replaces this connection by one that prepares statements
        if self._read_only:
            await self.read(lambda connection: check_readable(connection, self._label))
            self._prepared = True
            return
        found = await self.read(read_revision)
        if schema is SchemaChange.NONE or (schema is SchemaChange.CREATE and found is not None):
            check_current(found, self._label)
        elif found != HEAD:
            # No time limit: an upgrade may copy a large table while other processes wait for it. The planner settings
            # for batches of keys do not suit whole tables.
            await self._run(upgrade, _build_begin(False, self._attempt_seconds, {}), None)
        self._prepared, self._check_due = True, time.monotonic() + CHECK_SECONDS

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run work in a transaction; see `Database.write`."""
        if self._read_only:
            raise ConfigError(f"the store {self._label} is open for reading only")
        return await self._run(work, self._begin_write, self._attempt_seconds)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run work in a transaction; see `Database.read`."""
        return await self._run(work, self._begin_read, self._attempt_seconds)

    @property
    def doorbell(self) -> Doorbell:
        """The bells of all processes that use this database."""
        return self._doorbell

    async def call(self, request: Call[T]) -> T:
        """Answer a named call in a transaction of its own; see `Database.call`.

        Raises:
            ConfigError: Another process has changed the tables.
        """
        bells: set[Channel] = set()
        checks = self._prepared and time.monotonic() >= self._check_due

        def work(connection: Connection, isolates: bool = False) -> T:
            bells.clear()
            if checks:
                check_unchanged(connection, self._label)
            context = build_context(connection, self._cipher, isolates=isolates)
            result = answer_call(connection, request, context)
            bells.update(context.bells)
            return result

        run = self.read if request.reads else self.write
        try:
            try:
                result = await run(work)
            except NeedsIsolationError:
                result = await run(lambda connection: work(connection, isolates=True))
        except (CallRefusedError, RemoteError, ConfigError):
            raise
        except Exception as error:
            # Its tables may have changed.
            self._check_due = 0.0
            raise build_failure(self._label, request, error) from error
        if checks:
            self._check_due = time.monotonic() + CHECK_SECONDS
        self._doorbell.ring(bells)
        return result

    def find_loss(self) -> str | None:
        """Return None, because the server manages its files."""
        return None

    async def recover(self) -> Path:
        """Raise InvariantError; callers recover only after `find_loss` reported a loss."""
        raise InvariantError("a store in PostgreSQL has no file to lose")

    def publish(self, address: str) -> None:
        """Do nothing: other processes open the database themselves."""

    async def close(self) -> None:
        """Close all connections; do not wait for a server that does not answer."""
        await self._doorbell.close()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._engine.dispose()
        except TimeoutError:
            for connection in list(self._connections):
                connection.terminate()

    async def _run(self, work: Callable[[Connection], T], begin: str, limit_seconds: float | None) -> T:
        refused: BaseException | None = None
        conflicts = 0
        try:
            async with asyncio.timeout(limit_seconds):
                while True:
                    try:
                        result = await self._attempt(work, begin, limit_seconds)
                    except _FAILURES as error:
                        if not is_conflict(error):
                            raise
                        # If the time limit ends the retries, the conflict is reported, not the timeout.
                        refused = error
                    else:
                        self._note_back()
                        return result
                    conflicts += 1
                    throttle(log, 10.0).info("a transaction conflicted with another one; repeating it", times=conflicts)
                    await asyncio.sleep(_CONFLICT_BACKOFF.compute_delay(conflicts, random.getrandbits(JITTER_BITS)))
                    refused = None
        except TimeoutError as error:
            if refused is not None:
                self._epoch += 1
                raise build_remote_error(self._label, refused) from refused
            raise self._note_failure(f"the store {self._label} did not answer in time") from error
        except _FAILURES as error:
            failure = build_remote_error(self._label, error)
            if not failure.retryable:
                self._check_due = 0.0
                raise failure from error
            raise self._note_failure(str(failure)) from error

    def _note_failure(self, error: str) -> RemoteError:
        """Note that the server cannot be reached, log the start of an outage, and return the error."""
        self._epoch += 1
        if not self._prepared:
            return RemoteError(error)
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning("the store cannot be reached; everything waits for it", store=self._label, error=error)
        return StoreAwayError(error)

    def _note_back(self) -> None:
        """Log the end of an outage."""
        if self._away_since is not None:
            seconds = round(time.monotonic() - self._away_since, 1)
            self._away_since = None
            log.info("the store can be reached again", store=self._label, after_seconds=seconds)

    async def _attempt(self, work: Callable[[Connection], T], begin: str, limit_seconds: float | None) -> T:
        async with self._transactions.connect() as connection:
            driver: asyncpg.Connection = (await connection.get_raw_connection()).driver_connection
            try:
                if limit_seconds is not None and driver.get_server_version().major >= 17:
                    # The idle timeout does not apply between the messages of one statement.
                    begin = f"{begin}; SET LOCAL transaction_timeout = {round(limit_seconds * 1000)}"
                await driver.execute(begin)
                result = await connection.run_sync(work)
                await driver.execute("COMMIT")
            except BaseException as error:
                await self._give_up(connection, driver, error)
                raise
            return result

    async def _give_up(self, connection: AsyncConnection, driver: asyncpg.Connection, error: BaseException) -> None:
        """Roll back; drop the connection if it may be dead."""
        if isinstance(error, Exception) and not (
            isinstance(error, _FAILURES) and build_remote_error(self._label, error).retryable and not is_conflict(error)
        ):
            with contextlib.suppress(*_FAILURES):
                await driver.execute("ROLLBACK")
                return
        # Terminate instead of closing, because closing would wait for a server that may never answer.
        driver.terminate()
        await connection.invalidate()

    def _make_engine(self, url: str) -> AsyncEngine:
        async def connect() -> Any:
            # asyncpg parses the URL itself, so libpq's forms work: several hosts, sslmode, a service, a socket folder.
            return await asyncpg.connect(
                url, timeout=_CONNECT_SECONDS, statement_cache_size=0, server_settings=dict(self._session_settings)
            )

        def create() -> Any:
            return engine.sync_engine.dialect.dbapi.connect(  # type: ignore[union-attr]
                async_creator_fn=connect,
                prepared_statement_cache_size=self._prepared_count,
                # An unnamed statement is used at once and replaced by the next one.
                prepared_statement_name_func=self._name_statement if self._prepared_count else str,
            )

        engine = create_async_engine(
            "postgresql+asyncpg://",
            creator=create,
            pool_size=_CONNECTIONS,
            max_overflow=0,
            # `_attempt` ends every transaction.
            pool_reset_on_return=None,
        )
        return engine

    def _name_statement(self) -> str:
        """Name a statement, because asyncpg prepares one without a name again with each use."""
        return f"tidemill_{next(self._numbers)}"

    def _note_connected(self, adapted: Any, record: Any) -> None:
        record.info["epoch"] = self._epoch
        self._connections.add(adapted.driver_connection)

    def _check_epoch(self, adapted: Any, record: Any, proxy: Any) -> None:
        if record.info["epoch"] != self._epoch:
            adapted.driver_connection.terminate()
            raise DisconnectionError("another connection has failed since this one was used")


async def open_postgres(
    url: str,
    *,
    attempt_seconds: float = ATTEMPT_SECONDS,
    cipher: Cipher | None = None,
    schema: SchemaChange = SchemaChange.UPGRADE,
    listen_url: str = "",
) -> PostgresDatabase:
    """Open a database for writing and bring its tables up to date.

    Args:
        url: A URL that libpq and asyncpg accept: `postgresql://user:password@host:5432/name`.
        attempt_seconds: The time limit of a transaction.
        cipher: Encrypts the secrets in the database.
        schema: What may be done to the tables.
        listen_url: A URL that leads directly to the server, if the other one leads to a pooler; empty: the same.

    Raises:
        ConfigError: A newer tidemill has upgraded the database, or the pooler does not support transactions.
        RemoteError: The database is unreachable.
    """
    database = PostgresDatabase(
        url, read_only=False, attempt_seconds=attempt_seconds, cipher=cipher, listen_url=listen_url
    )
    return await _prepare(database, schema)


async def open_postgres_reader(url: str, cipher: Cipher | None = None) -> PostgresDatabase:
    """Open a database for reading.

    Raises:
        ConfigError: The database has no tidemill tables, or tables of another revision.
        RemoteError: The database is unreachable.
    """
    return await _prepare(PostgresDatabase(url, read_only=True, cipher=cipher))


async def _prepare(database: PostgresDatabase, schema: SchemaChange = SchemaChange.UPGRADE) -> PostgresDatabase:
    try:
        await database.prepare(schema)
    except BaseException:
        await database.close()
        raise
    return database


def _build_begin(read_only: bool, attempt_seconds: float, planning: Mapping[str, str]) -> str:
    settings = {
        "synchronous_commit": "on",
        # A hanging process must not keep the rows of its triggers locked for the host that takes over.
        "idle_in_transaction_session_timeout": str(round(attempt_seconds * 1000)),
        **planning,
    }
    access = "READ ONLY" if read_only else "READ WRITE"
    settings_local = [f"SET LOCAL {name} = {value}" for name, value in settings.items()]
    return "; ".join([f"BEGIN ISOLATION LEVEL READ COMMITTED {access}", *settings_local])


def _is_direct(connection: Connection) -> bool:
    """Return whether the backend's process id is the one sent at connection startup; a pooler sends another one."""
    expected = connection.connection.driver_connection.get_server_pid()  # type: ignore[union-attr]
    return bool(connection.execute(select(func.pg_backend_pid())).scalar() == expected)
