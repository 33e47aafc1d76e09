"""Frequent statements, compiled once per database and executed directly by the driver.

In SQLAlchemy, building a statement, looking up its compiled form and wrapping its rows cost several times what SQLite
needs to execute it. Statements that run with every step of a task are therefore compiled once, and take and return
plain values.

Invariants: driver errors are raised as SQLAlchemy errors, as `Connection.execute` would raise them. A statement's text
does not depend on its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Executable
from sqlalchemy.exc import DBAPIError

from tidemill.store.batches import find_dialect

#: The SQL of PostgreSQL's clock, in UTC microseconds since the epoch.
CLOCK = "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"

_NOTHING: dict[str, Any] = {}


class Statement:
    """A decorator for a statement that is compiled once per database and variant.

    Args:
        build: Builds the statement for a dialect, as returned by `find_dialect`, and a variant.

    Example:
        >>> from sqlalchemy import Integer, bindparam, create_engine, select
        >>> @Statement
        ... def double(dialect):
        ...     return select(bindparam("number", type_=Integer) * 2)
        >>> with create_engine("sqlite://").connect() as connection:
        ...     double.fetch(connection, {"number": 4})
        [(8,)]
    """

    __slots__ = ("_build", "_compiled")

    def __init__(self, build: Callable[..., Executable]) -> None:
        self._build = build
        self._compiled: dict[tuple[Any, ...], tuple[str, tuple[tuple[str, Any], ...]]] = {}

    def fetch(self, connection: Connection, given: Mapping[str, Any] = _NOTHING, *variant: Any) -> list[Any]:
        """Execute the statement and return its rows as tuples.

        Args:
            connection: A connection inside a transaction.
            given: The parameters.
            variant: Passed to `build`.
        """
        text, names = self._find(connection, variant)
        return execute_text(connection, text, [given.get(name, constant) for name, constant in names])

    def execute_many(self, connection: Connection, rows: Sequence[Mapping[str, Any]], *variant: Any) -> None:
        """Execute the statement once per row of parameters."""
        text, names = self._find(connection, variant)
        values = [[row.get(name, constant) for name, constant in names] for row in rows]
        cursor = connection.connection.cursor()
        try:
            cursor.executemany(text, values)
        except connection.dialect.loaded_dbapi.Error as error:
            raise DBAPIError(None, None, error) from error
        finally:
            cursor.close()

    def _find(self, connection: Connection, variant: tuple[Any, ...]) -> tuple[str, tuple[tuple[str, Any], ...]]:
        key = (find_dialect(connection), *variant)
        found = self._compiled.get(key)
        if found is None:
            compiled: Any = self._build(*key).compile(dialect=connection.dialect)  # type: ignore[attr-defined]
            constants = compiled.params
            names = tuple((name, constants.get(name)) for name in compiled.positiontup)
            found = self._compiled[key] = (str(compiled), names)
        return found


def execute_text(connection: Connection, text: str, values: Sequence[Any] = ()) -> list[Any]:
    """Execute SQL text with the driver and return the rows."""
    cursor = connection.connection.cursor()
    try:
        cursor.execute(text, values)
        return list(cursor.fetchall())
    except connection.dialect.loaded_dbapi.Error as error:
        raise DBAPIError(None, None, error) from error
    finally:
        cursor.close()


class NeedsIsolationError(Exception):
    """A step of a transaction failed that was not isolated from the others by a savepoint."""


@contextmanager
def savepoint(connection: Connection) -> Iterator[None]:
    """Roll back the statements inside the block, and only those, if the block raises."""
    execute_text(connection, "SAVEPOINT step")
    try:
        yield
    except BaseException:
        # Savepoints may nest under the same name; the innermost one applies.
        execute_text(connection, "ROLLBACK TO SAVEPOINT step")
        execute_text(connection, "RELEASE SAVEPOINT step")
        raise
    execute_text(connection, "RELEASE SAVEPOINT step")
