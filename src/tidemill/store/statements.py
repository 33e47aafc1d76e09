"""Frequent statements: built and compiled once per database, and executed by the driver itself.

Building a statement, finding its compiled form and wrapping its rows costs SQLAlchemy several times what SQLite needs
to execute it. So what runs with every step of a task is compiled once, and takes and returns plain values.

Invariants: errors of drivers are raised as those of SQLAlchemy, as they would be by `Connection.execute`; a statement
has the same text whatever its parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Executable
from sqlalchemy.exc import DBAPIError

from tidemill.store.batches import find_dialect

_NOTHING: dict[str, Any] = {}


class Statement:
    """A statement that is compiled once per database, and per variant of it; a decorator.

    Args:
        build: Builds the statement for a dialect, as `find_dialect` returns it, and a variant.

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
        """Compile nothing yet."""
        self._build = build
        self._compiled: dict[tuple[Any, ...], tuple[str, tuple[tuple[str, Any], ...]]] = {}

    def fetch(self, connection: Connection, given: Mapping[str, Any] = _NOTHING, *variant: Any) -> list[Any]:
        """Execute the statement, and return its rows as tuples.

        Args:
            connection: In a transaction.
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
    """Let the driver execute a text, and return the rows."""
    cursor = connection.connection.cursor()
    try:
        cursor.execute(text, values)
        return list(cursor.fetchall())
    except connection.dialect.loaded_dbapi.Error as error:
        raise DBAPIError(None, None, error) from error
    finally:
        cursor.close()


@contextmanager
def savepoint(connection: Connection) -> Iterator[None]:
    """Roll back what is done within it, and nothing else, if it raises."""
    execute_text(connection, "SAVEPOINT step")
    try:
        yield
    except BaseException:
        # Of several with one name the innermost is meant.
        execute_text(connection, "ROLLBACK TO SAVEPOINT step")
        execute_text(connection, "RELEASE SAVEPOINT step")
        raise
    execute_text(connection, "RELEASE SAVEPOINT step")
