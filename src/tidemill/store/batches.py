"""Passes many rows as few parameters, through one FROM clause that works on both databases.

PostgreSQL receives one array per column (`unnest`), SQLite one JSON text (`json_each`). One statement then reads or
writes a whole batch. It is compiled once whatever the batch size, never exceeds the parameter limit, and releases the
GIL once instead of once per row, which matters while the event loop is busy.

Building a statement costs more than executing it over a small batch. Frequent statements are therefore built once per
database by a cached function of the dialect; everything that differs between calls is a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Connection,
    FromClause,
    Select,
    Text,
    any_,
    bindparam,
    cast,
    column,
    func,
    select,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.types import TypeEngine

_encode = msgspec.json.Encoder().encode


class RowSet:
    """The columns of a batch; the rows are passed when a statement is executed.

    Args:
        name: The alias within statements.
        columns: Column names and types (int or str); values of either type may be None.

    Example:
        >>> names = RowSet("names", name=str)
        >>> sorted(names.build_parameters("sqlite", [("a",), ("b",)]))
        ['names_rows']
    """

    def __init__(self, name: str, /, **columns: type[int] | type[str]) -> None:
        self._name = name
        self._columns: dict[str, TypeEngine[Any]] = {
            name: BigInteger() if kind is int else Text() for name, kind in columns.items()
        }

    @cache  # noqa: B019 (batches are constants of modules)
    def build_source(self, dialect: str) -> FromClause:
        """Return the batch as a FROM clause with its columns and `position`, the index of each row."""
        return self._build_unnest() if dialect == "postgresql" else self._build_json_each()

    def build_match(self, dialect: str, name: str, value: ColumnElement[Any]) -> ColumnElement[bool]:
        """Return the condition that a value is in a column of the batch.

        With the other columns of a key as parameters, a kept plan of PostgreSQL finds the rows by the whole key; if the
        batch were joined, it would read all rows that have those parameters for each row of the batch.
        """
        if dialect == "postgresql":
            return value == any_(self._build_array(name))
        return value.in_(select(self.build_source(dialect).c[name]))

    def _build_array(self, name: str) -> BindParameter[Any]:
        return bindparam(f"{self._name}_{name}", type_=ARRAY(self._columns[name], dimensions=1))

    def _build_unnest(self) -> FromClause:
        values = [self._build_array(name) for name in self._columns]
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
        """Return the statement parameters that carry the rows.

        Args:
            dialect: The dialect's name, as returned by `find_dialect`.
            rows: The rows, with one value per column.
        """
        if dialect != "postgresql":
            return {f"{self._name}_rows": _encode(list(rows)).decode()}
        columns: Sequence[Sequence[Any]] = list(zip(*rows, strict=True)) or [()] * len(self._columns)
        return {f"{self._name}_{name}": list(values) for name, values in zip(self._columns, columns, strict=True)}


def find_dialect(connection: Connection) -> str:
    """Return the dialect of a connection: sqlite or postgresql."""
    return connection.dialect.name
