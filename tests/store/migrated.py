"""The migrations of an empty database, run once for each kind of database, and repeated after that.

Alembic takes most of the time in which a short test opens a store. What is repeated are the statements that it ran,
in the same transaction; a database that has tables is upgraded as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, event, inspect

from tidemill.store.batches import find_dialect

#: What alembic looks at, and changes nothing.
_LOOKS = ("SELECT ", "PRAGMA main.", "PRAGMA temp.")


def repeat_migrations(run: Callable[[Connection], None]) -> Callable[[Connection], None]:
    """Return a function that does what this one, which runs the migrations, does."""
    recorded: dict[str, list[tuple[str, Any]]] = {}

    @functools.wraps(run)
    def repeat(connection: Connection) -> None:
        dialect = find_dialect(connection)
        if inspect(connection).get_table_names():
            run(connection)
        elif dialect in recorded:
            for statement, parameters in recorded[dialect]:
                connection.exec_driver_sql(statement, parameters or None)
        else:
            recorded[dialect] = _record(connection, run)

    return repeat


def _record(connection: Connection, run: Callable[[Connection], None]) -> list[tuple[str, Any]]:
    statements: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if not statement.lstrip().startswith(_LOOKS):
            statements.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", note)
    try:
        run(connection)
    finally:
        event.remove(connection, "before_cursor_execute", note)
    return statements
