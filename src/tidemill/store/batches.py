"""Passes many rows as few parameters: a FROM clause over values of the program, the same for both databases.

PostgreSQL gets one array per column (`unnest`), SQLite one JSON text (`json_each`). One statement then reads or writes
a whole batch: it is compiled once whatever its size, is not subject to a limit of parameters, and releases the GIL once
instead of once per row, which matters while the event loop is busy.

Building a statement costs more than executing it over a small batch. So the frequent ones are built once per database,
by a function of the dialect that is cached; what differs from call to call is a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Connection, FromClause, Select, Text, bindparam, cast, column, func, select
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.types import TypeEngine

_encode = msgspec.json.Encoder().encode


class RowSet:
    """The columns of a batch; its rows are given when a statement is executed.

    Args:
        name: The alias within statements.
        columns: Names and types: int or str; either may be None.

    Example:
        >>> names = RowSet("names", name=str)
        >>> sorted(names.build_parameters("sqlite", [("a",), ("b",)]))
        ['names_rows']
    """

    def __init__(self, name: str, /, **columns: type[int] | type[str]) -> None:
        """Convert the columns to the types of SQL."""
        self._name = name
        self._columns: dict[str, TypeEngine[Any]] = {
            name: BigInteger() if kind is int else Text() for name, kind in columns.items()
        }

    @cache  # noqa: B019 (batches are constants of modules)
    def build_source(self, dialect: str) -> FromClause:
        """Return the batch as something to select from: the columns, and `position`, which numbers the rows."""
        return self._build_unnest() if dialect == "postgresql" else self._build_json_each()

    def _build_unnest(self) -> FromClause:
        values = [
            bindparam(f"{self._name}_{name}", type_=ARRAY(kind, dimensions=1)) for name, kind in self._columns.items()
        ]
        columns = [column(name, kind) for name, kind in self._columns.items()]
        table = func.unnest(*values).table_valued(*columns, with_ordinality="position", name=self._name)
        return table.render_derived()

    def _build_json_each(self) -> FromClause:
        rows = func.json_each(bindparam(f"{self._name}_rows", type_=Text())).table_valued(
            "key", "value", name=f"{self._name}_json"
        )
        # json_extract returns the type of the JSON value; a cast would only cost time.
        values = [
            func.json_extract(rows.c.value, f"$[{number}]", type_=kind).label(name)
            for number, (name, kind) in enumerate(self._columns.items())
        ]
        statement: Select[Any] = select(cast(rows.c.key, BigInteger).label("position"), *values)
        return statement.subquery(self._name)

    def build_parameters(self, dialect: str, rows: Iterable[Sequence[int | str | None]]) -> dict[str, Any]:
        """Return the parameters of a statement over the batch.

        Args:
            dialect: The database's name, as `find_dialect` returns it.
            rows: The rows, with one value per column each.
        """
        if dialect != "postgresql":
            return {f"{self._name}_rows": _encode(list(rows)).decode()}
        columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) or [()] * len(self._columns)
        return {f"{self._name}_{name}": list(values) for name, values in zip(self._columns, columns, strict=True)}


def find_dialect(connection: Connection) -> str:
    """Return the name of the database behind a connection: sqlite or postgresql."""
    return connection.dialect.name
