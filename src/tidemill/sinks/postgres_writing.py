"""Writes rows on a PostgreSQL connection: all or none of them, in as few statements as `core.delivery.sql_plan` allows.

The types of the columns decide how several rows are sent; the server is asked for them once per shape. The caller
decides about rows that fail; `FailedError` names the part of the transaction that failed. Memory is O(shapes), which
are bounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, NamedTuple

import asyncpg

from tidemill.core.delivery.sql_plan import (
    ARRAY_TYPES,
    JSON_TYPES,
    Row,
    RowOperation,
    Shape,
    build_array_statement,
    group_rows,
    split_by_powers,
)
from tidemill.core.delivery.sql_plan import build_statement as build_statement
from tidemill.sinks.postgres_codecs import JsonCodec

#: How many shapes have cached types; a full cache is cleared.
MAX_KNOWN_SHAPES = 1_000
#: Under load, full batches recur, and the client packs parameters faster than arrays. A full batch therefore has a
#: statement of its own, up to this many parameters and for this many shapes (about 1.5 MB each in the server's
#: process).
MAX_FULL_PARAMETERS = 8_192
MAX_FULL_SHAPES = 16
#: SQLSTATEs after which a retry may succeed: connection, transaction conflicts, resources, locks, shutdown, the
#: operating system, and logins that are being changed.
_PASSING_CLASSES = frozenset({"08", "40", "53", "55", "57", "58", "28"})
_PASSING = frozenset({"25006", "3D000"})
#: SQLSTATEs for a value or a statement that fits the former type of a column: a data exception, a type mismatch, an
#: unknown operator, an unknown cast.
_MISFIT_CLASS = "22"
_MISFITS = frozenset({"42804", "42883", "42846"})
_CHECK_VIOLATED = "23514"
#: Errors of one statement; the client raises `OverflowError` for a number that is too large for every type of the
#: server.
_REFUSALS = (asyncpg.PostgresError, OverflowError)
_CLIENT_ERRORS = (asyncpg.InterfaceError, asyncpg.InternalClientError)
_CONTAINERS = (dict, list, tuple)


class FailedError(Exception):
    """A part of a transaction failed: the rows from `first` up to `last`; None means that the commit failed."""

    def __init__(self, part: tuple[int, int] | None, error: Exception) -> None:
        super().__init__(str(error))
        self.part = part
        self.error = error


class _Part(NamedTuple):
    """One statement: its rows and the types of its arrays; None sends a group of parameters per row instead."""

    first: int
    last: int
    types: tuple[str, ...] | None = None


class Writer:
    """Writes rows, and caches the types of the columns.

    Args:
        full: How many rows a full batch has.
        json: Encodes the values of json columns as text.
        pooled: Whether connections lead to a pooler, so that a session of the server lasts for one transaction only.
    """

    def __init__(self, full: int, json: JsonCodec, *, pooled: bool) -> None:
        self._full = full
        self._json = json
        self._pooled = pooled
        self._full_shapes: set[Shape] = set()
        # None: one of the types cannot be sent as an array.
        self._types: dict[Shape, tuple[str, ...] | None] = {}

    def forget_types(self) -> None:
        """Clear the cache, so that the server is asked for the types again."""
        self._types.clear()

    async def write(self, connection: asyncpg.Connection, rows: Sequence[Row]) -> None:
        """Write rows, all or none of them.

        Raises:
            FailedError: No row was written; the error names the part that failed.
        """
        async with contextlib.AsyncExitStack() as stack:
            if self._pooled:
                await stack.enter_async_context(_open_transaction(connection))
            groups = group_rows(rows)
            parts = [part for first, last in groups for part in await self._split(connection, rows, first, last)]
            # A single statement is a transaction of its own.
            if len(parts) > 1 and not self._pooled:
                await stack.enter_async_context(_open_transaction(connection))
            for part in parts:
                await self._execute(connection, rows, part)

    async def _split(
        self, connection: asyncpg.Connection, rows: Sequence[Row], first: int, last: int
    ) -> Sequence[_Part]:
        """Return the statements for rows that may share one."""
        shape, count = rows[first].shape, last - first
        if count == 1 or shape.operation is RowOperation.STATEMENT or self._is_full(shape, count):
            return (_Part(first, last),)
        if shape in self._types:
            types = self._types[shape]
        else:
            prepared = await _try(connection, (first, last), connection.prepare(build_statement(shape, 1)))
            kinds = prepared.get_parameters()
            usable = all(kind.schema == "pg_catalog" and kind.name in ARRAY_TYPES for kind in kinds)
            if len(self._types) >= MAX_KNOWN_SHAPES:
                self._types.clear()
            types = self._types[shape] = tuple(kind.name for kind in kinds) if usable else None
        if types is not None and _has_flat_arrays(rows[first:last], types):
            return (_Part(first, last, types),)
        return [_Part(*part) for part in split_by_powers(first, last, shape.parameters)]

    def _is_full(self, shape: Shape, count: int) -> bool:
        # Behind a pooler the statement would be parsed each time.
        if self._pooled or count != self._full or count * shape.parameters > MAX_FULL_PARAMETERS:
            return False
        if len(self._full_shapes) < MAX_FULL_SHAPES:
            self._full_shapes.add(shape)
        return shape in self._full_shapes

    async def _execute(self, connection: asyncpg.Connection, rows: Sequence[Row], part: _Part) -> None:
        first, last, types = part
        some = rows[first:last]
        shape = some[0].shape
        if shape.operation is RowOperation.STATEMENT:
            # The statement's result is ignored, so it cannot fail a row that has been written.
            await _try(connection, part[:2], connection.executemany(shape.sql, [row.values for row in some]))
        elif types is None:
            values = [value for row in some for value in row.values]
            await _try(connection, part[:2], connection.execute(build_statement(shape, last - first), *values))
        else:
            try:
                arrays = self._make_arrays(some, types)
            except (TypeError, ValueError) as error:
                # A value without a JSON form; the caller finds its row as for any other error.
                raise FailedError(part[:2], error) from error
            await _try(connection, part[:2], connection.execute(build_array_statement(shape, types), *arrays))

    def _make_arrays(self, rows: Sequence[Row], types: Sequence[str]) -> list[Sequence[Any]]:
        """Return an array of values per parameter; arrays for json columns contain text."""
        columns: list[Sequence[Any]] = list(zip(*[row.values for row in rows], strict=True))
        encode = self._json.encode_payload
        for index, kind in enumerate(types):
            if kind in JSON_TYPES:
                columns[index] = [None if value is None else encode(value) for value in columns[index]]
        return columns


@contextlib.asynccontextmanager
async def _open_transaction(connection: asyncpg.Connection) -> AsyncIterator[None]:
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    except FailedError as failed:
        # Otherwise the caller terminates the connection, and the transaction with it.
        if not is_passing(failed.error):
            await transaction.rollback()
        raise
    try:
        await transaction.commit()
    except asyncpg.PostgresError as error:
        raise FailedError(None, error) from error


async def _try(connection: asyncpg.Connection, part: tuple[int, int], call: Awaitable[Any]) -> Any:
    """Await a call for these rows.

    Raises:
        FailedError: The server refuses the call, or the client cannot represent a value.
        InterfaceError: The connection is not usable.
    """
    try:
        return await call
    except _REFUSALS as error:
        raise FailedError(part, error) from error
    except _CLIENT_ERRORS as error:
        # The client's own errors are of two kinds. Either the connection is unusable, which this query shows, or the
        # client cannot represent a value, and the connection is still good.
        try:
            await connection.execute("SELECT 1")
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
            raise error from None
        raise FailedError(part, error) from error


def _has_flat_arrays(rows: Sequence[Row], types: Sequence[str]) -> bool:
    """Return whether arrays of these values have one element per row; the client turns nested lists into dimensions."""
    if not any(row.nested for row in rows):
        return True
    simple = [index for index, kind in enumerate(types) if kind not in JSON_TYPES]
    return not any(row.nested and any(_is_nested(row.values[index]) for index in simple) for row in rows)


def _is_nested(value: object) -> bool:
    return isinstance(value, _CONTAINERS) or type(value).__module__.startswith("asyncpg.")


def is_passing(error: BaseException) -> bool:
    """Return whether a retry may succeed."""
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        return True
    state = getattr(error, "sqlstate", None) or ""
    return state[:2] in _PASSING_CLASSES or state in _PASSING


def is_outdated(error: BaseException) -> bool:
    """Return whether a type of a prepared statement has been dropped, or a composite type has changed."""
    if isinstance(error, asyncpg.OutdatedSchemaCacheError):
        return True
    # This SQLSTATE covers every internal error, so the text decides; the server does not translate it.
    return isinstance(error, asyncpg.InternalServerError) and "cache lookup failed for type" in str(error)


def may_be_outdated(error: BaseException) -> bool:
    """Return whether a row may have been refused only because cached column types predate a migration.

    A replaced type may still exist under another name, with its values and constraints. The client also refuses values
    that its cached knowledge of a type does not allow.
    """
    state = getattr(error, "sqlstate", None) or ""
    if state[:2] == _MISFIT_CLASS or state in _MISFITS or is_outdated(error):
        return True
    if state == _CHECK_VIOLATED:
        return bool(getattr(error, "data_type_name", None))  # of a domain
    return not isinstance(error, asyncpg.PostgresError)
