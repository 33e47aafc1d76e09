"""PostgreSQL as a sink: batches rows into as few statements as their shapes allow, in one transaction per batch.

Invariants: payloads are written in order. A confirmed payload is committed. A batch that fails leaves nothing behind
and is repeated in ever smaller parts, until the faulty row is alone and can be named. `core.delivery.sql_plan` decides
which rows share a statement.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import asyncpg
import structlog

from tidemill.config.redaction import find_url_secrets, mask_secrets, redact_text
from tidemill.config.sections.sink_settings import PostgresSinkSettings
from tidemill.core.delivery.sql_plan import Row, RowOperation, Shape
from tidemill.core.errors import ConfigError, RemoteError, describe_error
from tidemill.core.wording import shorten
from tidemill.runtime.poolers import is_wrong_login
from tidemill.sinks.base import CHECK, Answers, Encoded, Refusal, Sink, close_within, to_mapping
from tidemill.sinks.payloads import PostgresPayload
from tidemill.sinks.postgres_codecs import JsonCodec, set_codecs, writing_payloads
from tidemill.sinks.postgres_connections import CONNECT_SECONDS, PoolerFoundError, open_pool
from tidemill.sinks.postgres_values import convert_values, make_row_key, name_row
from tidemill.sinks.postgres_writing import (
    MAX_KNOWN_SHAPES,
    FailedError,
    Writer,
    is_outdated,
    is_passing,
    may_be_outdated,
)

log = structlog.get_logger(__name__)

#: The operations of payloads; statements of the configuration have a field of their own.
_OPERATIONS = tuple(operation for operation in RowOperation if operation is not RowOperation.STATEMENT)
#: How long the pool's connections may take to close; a handler may still hold some.
CLOSE_SECONDS = 5.0
#: SQLSTATEs that concern all rows of a statement alike. Exceptions are row level security (42501), and a type without
#: an order (42883), which only updates of several rows need.
_STATEMENT_CLASSES = frozenset({"42", "3F"})
_ROW_STATES = frozenset({"42501", "42883"})
#: The detail of these errors contains every value of the row, in the server's language: not null, check, and the
#: options of views.
_ROW_IN_DETAIL = frozenset({"23502", "23514", "44000"})


class PostgresSink(Sink):
    """One `sinks.postgres.<name>`.

    Args:
        name: The instance's name.
        settings: The instance's section.
    """

    type: ClassVar[str] = "postgres"
    max_batch_count = 1_000
    max_batch_bytes = 4 * 1024 * 1024

    def __init__(self, name: str, settings: PostgresSinkSettings) -> None:
        super().__init__(name)
        self._settings = settings
        self._secrets = find_url_secrets(settings.dsn)
        # Shapes that were checked; a full cache is cleared.
        self._shapes: dict[Hashable, tuple[Shape, tuple[str, ...]]] = {}
        self._json = JsonCodec(self.to_json)
        self._writer = Writer(self.max_batch_count, self._json, pooled=False)
        self._statements = {
            name: (Shape(RowOperation.STATEMENT, name, tuple(each.parameters), sql=each.sql), tuple(sorted(each.key)))
            for name, each in settings.statements.items()
        }
        #: For `on_ready`; None before `connect` and after `close`.
        self.pool: asyncpg.Pool | None = None

    async def connect(self) -> None:
        """Open the pool.

        Raises:
            ConfigError: The DSN is wrong, or the server does not know the user or the database.
            RemoteError: The server does not answer.
        """
        where = redact_text(self._settings.dsn)
        try:
            sizes = {"min_size": self._settings.pool_min, "max_size": self._settings.pool_max}
            prepare = functools.partial(set_codecs, json=self._json)
            pool, pooled = await open_pool(self._settings.dsn, **sizes, prepare=prepare)
            async with contextlib.AsyncExitStack() as stack:
                stack.callback(pool.terminate)
                async with pool.acquire(timeout=CONNECT_SECONDS) as connection:
                    await connection.execute("SELECT 1")
                    await self._check_statements(connection)
                stack.pop_all()
        except ConfigError as error:
            raise ConfigError(f"{self.section}: {where}: {error}") from None
        except (ValueError, asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
            raise ConfigError(f"{self.section}: {where}: {self._describe(error)}; correct dsn") from None
        except asyncpg.ProtocolViolationError as error:
            text = f"{self.section}: {where}: {self._describe(error)}"
            if is_wrong_login(error):
                raise ConfigError(f"{text}; correct dsn") from None
            raise RemoteError(f"{text}; {CHECK} dsn") from None
        except TimeoutError:
            raise RemoteError(f"{self.section}: {where}: no answer within {CONNECT_SECONDS:g} s; {CHECK} dsn") from None
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise RemoteError(f"{self.section}: {where}: {self._describe(error)}; {CHECK} dsn") from None
        self.pool = pool
        self._writer = Writer(self.max_batch_count, self._json, pooled=pooled)

    async def _check_statements(self, connection: asyncpg.Connection) -> None:
        """Let the server check the statements of the configuration; their tables may be created later.

        Raises:
            ConfigError: A statement is wrong whatever tables exist.
        """
        for name, (shape, _) in self._statements.items():
            section = f"{self.section}.statements.{name}"
            try:
                async with connection.transaction():
                    count = len((await connection.prepare(shape.sql)).get_parameters())
            except asyncpg.PostgresSyntaxError as error:
                raise ConfigError(f"{section}: {self._describe(error)}; correct sql") from None
            except asyncpg.PostgresError as error:
                if is_passing(error):
                    raise
                log.warning("a statement cannot be executed yet", statement=section, error=self._describe(error))
                continue
            if count != len(shape.columns):
                raise ConfigError(
                    f"{section}: sql has {count} parameters ($1, $2, ...), but parameters names {len(shape.columns)}; "
                    "name each parameter"
                )

    def _describe(self, error: BaseException) -> str:
        text = describe_error(error)
        if isinstance(error, asyncpg.PostgresError):
            # The error's own text ends with the detail.
            detail = error.detail if error.detail and error.sqlstate not in _ROW_IN_DETAIL else ""
            text = f"{type(error).__name__}: {error.args[0]}{f' ({detail})' if detail else ''}"
        # The server may repeat a whole value. The text is cut before and after masking: the first limit bounds the
        # work, the second is far below it, so a secret that the first one cuts is never shown.
        return shorten(mask_secrets(text[:10_000], self._secrets), 2_000)

    # -- payloads -----------------------------------------------------------------------------------------------

    def encode(self, payload: PostgresPayload) -> Encoded:
        """Return the row.

        Raises:
            TypeError: `data` is not a mapping, or has a value that PostgreSQL cannot represent.
            ValueError: A name is not an identifier, or the fields of the payload do not fit together.
        """
        if payload.statement:
            return self._encode_statement(payload)
        data = payload.data if type(payload.data) is dict else self._read_columns(payload)
        where, conflict = payload.where, payload.conflict
        if not isinstance(conflict, str):
            conflict = _read_conflict(payload)
        looked_for: tuple[str, ...] = ()
        if where:
            if not isinstance(where, Mapping):
                raise TypeError(f"where must be a mapping of columns to values, not {type(where).__name__}")
            looked_for = tuple(name for name, value in where.items() if value is not None)
        known = (payload.op, payload.table, conflict, tuple(data), looked_for, tuple(where) if where else ())
        try:
            found = self._shapes.get(known)
        except TypeError:
            raise TypeError(f"op and table must be strings, not {_name_types(payload.op, payload.table)}") from None
        if found is None:
            found = self._check_shape(known, data)
        shape, identity = found
        given = [*data.values(), *(where[name] for name in looked_for)] if where else data.values()
        values, size, nested = convert_values(shape.table, (*shape.columns, *shape.where), given)
        key = make_row_key(shape.table, identity, where or data)
        return Encoded(key, Row(shape, tuple(values), key, nested), size)

    def _read_columns(self, payload: PostgresPayload) -> Mapping[str, Any]:
        return {} if payload.data is None and payload.op == "delete" else to_mapping(payload.data)

    def _encode_statement(self, payload: PostgresPayload) -> Encoded:
        found = self._statements.get(payload.statement) if isinstance(payload.statement, str) else None
        if found is None:
            there = ", ".join(sorted(self._statements)) or "none"
            name = shorten(repr(payload.statement), 60)
            raise ValueError(f"statement {name} is not configured in {self.section}.statements; configured: {there}")
        if payload.table or payload.op != "insert" or payload.conflict or payload.where:
            raise ValueError(f"statement {payload.statement} takes data, not table, op, conflict or where")
        shape, identity = found
        data = {} if payload.data is None else to_mapping(payload.data)
        if data.keys() != set(shape.columns):
            wanted = ", ".join(shape.columns) or "nothing"
            given = shorten(", ".join(sorted(data))) or "nothing"
            raise ValueError(f"data of statement {payload.statement} must have the fields {wanted}, got {given}")
        whose = f"statement {shape.table}"
        values, size, nested = convert_values(whose, shape.columns, [data[name] for name in shape.columns])
        key = make_row_key(whose, identity, data)
        return Encoded(key, Row(shape, tuple(values), key, nested), size + 8)

    def _check_shape(self, known: tuple[Any, ...], data: Mapping[str, Any]) -> tuple[Shape, tuple[str, ...]]:
        """Return the shape of a new kind of row, and the columns that identify a row."""
        operation, table, conflict, _, looked_for, all_looked_for = known
        if not isinstance(table, str):
            raise TypeError(f"table must be a string, not {type(table).__name__}")
        if operation not in _OPERATIONS:
            raise ValueError(f"unknown op {shorten(repr(operation), 60)}; use one of {', '.join(_OPERATIONS)}")
        nulls = tuple(name for name in all_looked_for if name not in looked_for)
        decides = (conflict,) if isinstance(conflict, str) else conflict
        shape = Shape(RowOperation(operation), table, tuple(data), decides, looked_for, nulls)
        identity = all_looked_for or decides
        if len(self._shapes) >= MAX_KNOWN_SHAPES:
            self._shapes.clear()
        found = self._shapes[known] = shape, tuple(sorted(identity))
        return found

    # -- sending ------------------------------------------------------------------------------------------------

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Write the rows, in one transaction unless a row is faulty.

        Raises:
            RemoteError: The database is unavailable; nothing was written, unless the connection broke while the
                transaction was ending.
        """
        answers = Answers(batch)
        try:
            async with self._acquire() as connection:
                with writing_payloads():
                    await self._write_all(connection, [item.body for item in batch], answers)
        except (PoolerFoundError, ConfigError) as error:
            raise RemoteError(f"{self.section}: {error}") from error
        except asyncpg.InternalClientError as error:
            # The server closed the connection between two statements, and the client's protocol state is lost.
            return answers.collect(RemoteError(f"{self.section}: the connection broke: {self._describe(error)}"))
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            return answers.collect(RemoteError(f"{self.section}: {self._describe(error)}"))
        return answers.collect()

    @contextlib.asynccontextmanager
    async def _acquire(self) -> AsyncIterator[asyncpg.Connection]:
        pool = self.pool
        if pool is None:
            raise RemoteError(f"{self.section} is not connected")
        try:
            connection = await pool.acquire(timeout=CONNECT_SECONDS)
        except TimeoutError:
            raise RemoteError(
                f"{self.section}: no connection within {CONNECT_SECONDS:g} s: the server does not answer, "
                "or hooks hold all connections (pool_max)"
            ) from None
        try:
            yield connection
        except BaseException:
            # Terminate in any state, because a server that hangs might never end the call. A broken connection is no
            # longer ours; the error about that must not hide the original one.
            with contextlib.suppress(asyncpg.InterfaceError):
                connection.terminate()
            raise
        finally:
            await pool.release(connection)

    async def _write_all(self, connection: asyncpg.Connection, rows: Sequence[Row], answers: Answers) -> None:
        todo: list[Sequence[int]] = [range(len(rows))]
        reloaded = False
        while todo:
            indexes = answers.filter_sendable(todo.pop())
            if not indexes:
                continue
            try:
                await self._writer.write(connection, [rows[index] for index in indexes])
            except FailedError as failed:
                if is_passing(failed.error):
                    raise failed.error from None
                first, last = failed.part or (0, len(indexes))
                refused = _is_verdict(failed.error, indexes[first:last])
                # Reload only once a row would be refused: most batches that fail have a bad row, and reloading costs as
                # much again.
                if not reloaded and (is_outdated(failed.error) or (refused and may_be_outdated(failed.error))):
                    reloaded = True
                    await self._reload_types(connection, failed.error)
                    todo.append(indexes)
                else:
                    todo += reversed(self._split_failed(rows, indexes, failed, answers))
            else:
                answers.confirm(indexes)

    async def _reload_types(self, connection: asyncpg.Connection, error: Exception) -> None:
        """Forget all cached types, on all connections, so that no row is refused because of a migration.

        A row that fails again is at fault itself.
        """
        self._writer.forget_types()
        await connection.reload_schema_state()
        if is_outdated(error) and self.pool is not None:
            await self.pool.expire_connections()

    def _split_failed(
        self, rows: Sequence[Row], indexes: Sequence[int], failed: FailedError, answers: Answers
    ) -> list[Sequence[int]]:
        """Return the parts to send after a failed transaction, in order; refuse the faulty rows."""
        first, last = failed.part or (0, len(indexes))
        suspects = indexes[first:last]
        if _is_verdict(failed.error, suspects):
            for index in suspects:
                answers.refuse(
                    index, Refusal(f"{name_row(rows[index])}: {self._describe(failed.error)}", retryable=False)
                )
            return [indexes[:first], indexes[last:]]
        middle = len(suspects) // 2
        return [indexes[:first], suspects[:middle], suspects[middle:], indexes[last:]]

    async def close(self) -> None:
        """Close the connections, including those that a handler still holds."""
        pool, self.pool = self.pool, None
        if pool is not None and not await close_within(CLOSE_SECONDS, pool.close()):
            pool.terminate()


def _is_verdict(error: BaseException, suspects: Sequence[int]) -> bool:
    """Return whether an error refuses all these rows."""
    return len(suspects) == 1 or _concerns_all(error)


def _concerns_all(error: BaseException) -> bool:
    """Return whether every row of the statement would fail alone, too."""
    if isinstance(error, asyncpg.UnsupportedClientFeatureError):
        # The column's type is not supported, whatever the value.
        return True
    state = getattr(error, "sqlstate", None) or ""
    return state[:2] in _STATEMENT_CLASSES and state not in _ROW_STATES


def _read_conflict(payload: PostgresPayload) -> tuple[str, ...]:
    given = payload.conflict
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise TypeError(f"conflict must be one or more columns, not {type(given).__name__}")
    if wrong := [name for name in given if not isinstance(name, str)]:
        raise TypeError(f"conflict must name columns, not a {type(wrong[0]).__name__}")
    return tuple(given)


def _name_types(*values: object) -> str:
    return " and ".join(type(value).__name__ for value in values)
