"""Groups rows into SQL statements, and builds those statements.

Theory of operation. A row has a shape (operation, table, columns) and values; adjacent rows of one shape share a
statement. If all its parameters have types whose arrays can be unnested, several rows are sent as one array per
parameter: such a statement is short and the same for any number of rows. Otherwise each row is a group of parameters,
and the number of rows is a power of two. Either way there are few statements per shape, so that client and server can
cache them as prepared statements. An update or delete of several rows joins the table with a list of the rows. A list
of parameter groups begins with a row of NULLs taken from the table itself, which gives each column its type and matches
nothing. Keys that differ here may be equal to the database (an upper-case uuid, a padded char, citext). The rows of the
list are therefore numbered, and of rows with equal keys only the last is joined.

Invariants, each a property test:
1. The ranges cover all rows, in order, without overlap; the rows of a range have one shape.
2. No statement for several rows has more parameters than `MAX_PARAMETERS`, nor the same conflict key twice.
3. The rows of one statement have the same effect as if applied one by one: an update that changes a column of its own
   condition is sent alone, and of several updates of one row the last wins.
4. Only identifiers are inserted into a statement, and they are quoted; statements from the configuration are sent as
   they are.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: The maximum number of parameters of a statement for several rows without arrays. The protocol allows 32,767, but
#: longer statements are no faster, and the client and every server process cache each of them.
MAX_PARAMETERS = 2_048
#: Parameter types whose arrays always have one element per row.
ARRAY_TYPES = frozenset(
    {
        *("bool", "int2", "int4", "int8", "float4", "float8", "numeric", "text", "varchar", "bpchar", "bytea", "uuid"),
        *("date", "time", "timetz", "timestamp", "timestamptz", "interval", "json", "jsonb"),
    }
)
#: These are sent as text and cast, since their values may be lists, which unnest would flatten.
JSON_TYPES = frozenset({"json", "jsonb"})
#: The number of statements cached as text. Each has at most a few thousand parameters, or the columns of one row.
_KEPT = 512
#: PostgreSQL truncates longer names, which might then name another table or column.
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,62}")


class RowOperation(enum.StrEnum):
    INSERT = "insert"
    UPSERT = "upsert"
    UPDATE = "update"
    DELETE = "delete"
    STATEMENT = "statement"


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties that rows in one statement share.

    Attributes:
        operation: The operation.
        table: `table` or `schema.table`; for a statement from the configuration, its name.
        columns: The columns, or the statement's parameters, that get values, in the order of the values.
        conflict: The columns that decide whether a row already exists.
        where: The columns in the condition of an update or delete; their values follow those of `columns`.
        nulls: The columns that must be NULL; they have no values.
        sql: The text of a statement from the configuration.
    """

    operation: RowOperation
    table: str
    columns: tuple[str, ...]
    conflict: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    nulls: tuple[str, ...] = ()
    sql: str = ""

    def __post_init__(self) -> None:
        """Check that names are identifiers and that the fields suit the operation.

        Raises:
            ValueError: A name is not an identifier, or a field does not suit the operation.
        """
        if not all(_NAME.fullmatch(part) for part in self.table.split(".", 1)):
            raise ValueError(
                f"table {_abbreviate(self.table)} is not a valid table name: up to 63 letters, digits and _ are "
                "allowed, not starting with a digit, with an optional schema and a dot before them"
            )
        for name in (*self.columns, *self.conflict, *self.where, *self.nulls):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError(
                    f"column {_abbreviate(name)} of {self.table} is not a valid column name: up to 63 letters, digits "
                    "and _ are allowed, not starting with a digit"
                )
        if problem := self._find_problem():
            raise ValueError(f"{self.operation} of {self.table}: {problem}")

    def _find_problem(self) -> str | None:
        if self.operation is RowOperation.STATEMENT:
            return None
        if self.operation in (RowOperation.UPDATE, RowOperation.DELETE):
            return self._find_change_problem()
        if not self.columns:
            return "data has no columns"
        if self.where or self.nulls:
            return "where is only for updates and deletes"
        if self.operation is RowOperation.UPSERT and not self.conflict:
            return "an upsert needs conflict: the columns that decide whether the row exists"
        missing = [name for name in self.conflict if name not in self.columns]
        return f"data has no {', '.join(missing)}, which conflict names" if missing else None

    def _find_change_problem(self) -> str | None:
        if self.conflict:
            return f"it needs where, not conflict; conflict is for {RowOperation.INSERT} and {RowOperation.UPSERT}"
        if bool(self.columns) is (self.operation is RowOperation.DELETE):
            return "data has no columns" if self.operation is RowOperation.UPDATE else "it needs where, not data"
        return None if self.where or self.nulls else "without where it would affect every row"

    @property
    def parameters(self) -> int:
        """The number of values in a row."""
        return len(self.columns) + len(self.where)

    @property
    def batchable(self) -> bool:
        """Whether several rows in one statement have the same effect as one by one."""
        if self.operation is RowOperation.UPDATE:
            return bool(self.where) and not set(self.columns) & {*self.where, *self.nulls}
        return self.operation is not RowOperation.DELETE or bool(self.where)


class Row(NamedTuple):
    """One row for a statement.

    Attributes:
        shape: The shape it shares with the other rows of its statement.
        values: The values, in the order of the shape.
        key: Equal for rows that affect the same row of the table; None: unknown.
        nested: Whether a value is a list or the like, which would be unnested together with an array of values.
    """

    shape: Shape
    values: tuple[object, ...]
    key: Hashable = None
    nested: bool = False


def group_rows(rows: Sequence[Row]) -> Iterator[tuple[int, int]]:
    """Yield the ranges (first, last + 1) of rows that may share a statement, in order."""
    first, keys = 0, set[Hashable]()
    shape: Shape | None = None
    together = apart = False
    for index, row in enumerate(rows):
        row_shape, key = row.shape, row.key
        # Equal shapes are nearly always the same object.
        same = row_shape is shape or row_shape == shape
        if not same or not together or (apart and key in keys):
            if index:
                yield first, index
            first, shape = index, row_shape
            together = shape.batchable
            # Statements from the configuration are executed one by one, but in one round trip.
            apart = shape.operation is not RowOperation.STATEMENT
            keys = set()
        if key is not None:
            keys.add(key)
    if rows:
        yield first, len(rows)


def split_by_powers(first: int, last: int, parameters: int) -> Iterator[tuple[int, int]]:
    """Split a range into parts whose lengths are powers of two, each within `MAX_PARAMETERS` unless it is a single row.

    Example:
        >>> list(split_by_powers(0, 7, 2))
        [(0, 4), (4, 6), (6, 7)]
    """
    most = max(1, MAX_PARAMETERS // max(1, parameters))
    while first < last:
        count = 1 << (min(last - first, most).bit_length() - 1)
        yield first, first + count
        first += count


@functools.lru_cache(maxsize=_KEPT)
def build_statement(shape: Shape, count: int) -> str:
    """Return the SQL for this many rows of a shape, with parameters for each.

    Example:
        >>> build_statement(Shape(RowOperation.UPSERT, "shop.orders", ("id", "n"), ("id",)), 2)
        'INSERT INTO "shop"."orders" ("id", "n") VALUES ($1, $2), ($3, $4) ON CONFLICT ("id") DO UPDATE SET "n" = EXCLUDED."n"'
    """  # noqa: E501
    if shape.operation is RowOperation.STATEMENT:
        return shape.sql
    table = _quote_table(shape)
    if shape.operation in (RowOperation.INSERT, RowOperation.UPSERT):
        head = f"INSERT INTO {table} ({_list_names(shape.columns)}) VALUES "  # noqa: S608 - names are identifiers
        return head + _group_parameters(shape, count) + _build_conflict_clause(shape)
    if count > 1:
        # Only a statement for a single row may both set a column and test it, so these names are distinct.
        names = (*shape.columns, *shape.where)
        types = ", ".join(f'(NULL::{table})."{name}"' for name in names)
        values = _group_parameters(shape, count, numbered=True)
        return _join_rows(shape, f"(VALUES ({types}, 0), {values}) AS rows ({_number_names(names)})")
    terms = [f'"{name}" = ${number}' for number, name in enumerate((*shape.columns, *shape.where), 1)]
    tests = " AND ".join([*terms[len(shape.columns) :], *(f'"{name}" IS NULL' for name in shape.nulls)])
    if shape.operation is RowOperation.DELETE:
        return f"DELETE FROM {table} WHERE {tests}"  # noqa: S608 - names are identifiers
    changes = ", ".join(terms[: len(shape.columns)])
    return f"UPDATE {table} SET {changes} WHERE {tests}"  # noqa: S608 - names are identifiers


@functools.lru_cache(maxsize=_KEPT)
def build_array_statement(shape: Shape, types: tuple[str, ...]) -> str:
    """Return the SQL for any number of rows of a shape, with one array per parameter.

    Args:
        shape: The shape of a batchable insert, upsert, update or delete.
        types: The types of its parameters, all in `ARRAY_TYPES`.

    Example:
        >>> build_array_statement(Shape(RowOperation.INSERT, "t", ("id", "j")), ("int4", "jsonb"))
        'INSERT INTO "t" ("id", "j") SELECT "id", "j"::pg_catalog."jsonb" FROM unnest($1::pg_catalog."int4"[], $2::pg_catalog."text"[]) AS rows ("id", "j")'
    """  # noqa: E501
    names = (*shape.columns, *shape.where)
    sent = ["text" if kind in JSON_TYPES else kind for kind in types]
    arrays = ", ".join(f'${number}::pg_catalog."{kind}"[]' for number, kind in enumerate(sent, 1))
    if shape.operation in (RowOperation.INSERT, RowOperation.UPSERT):
        cast = ", ".join(
            f'"{name}"::pg_catalog."{kind}"' if kind in JSON_TYPES else f'"{name}"'
            for name, kind in zip(names, types, strict=True)
        )
        head = f"INSERT INTO {_quote_table(shape)} ({_list_names(names)}) SELECT {cast} FROM "  # noqa: S608 - the same
        return f"{head}unnest({arrays}) AS rows ({_list_names(names)}){_build_conflict_clause(shape)}"
    rows = f"unnest({arrays}) WITH ORDINALITY AS rows ({_number_names(names)})"
    cast = ", ".join(
        f'"{name}"::pg_catalog."{kind}" AS "{name}"' if kind in JSON_TYPES else f'"{name}"'
        for name, kind in zip(names, types, strict=True)
    )
    return _join_rows(shape, f'(SELECT {cast}, "#" FROM {rows}) AS rows')  # noqa: S608 - the same


def _join_rows(shape: Shape, rows: str) -> str:
    """Return an update or delete that joins the table with a list of numbered rows."""
    keys = _list_names(shape.where)
    given = f'(SELECT DISTINCT ON ({keys}) * FROM {rows} ORDER BY {keys}, "#" DESC) AS given'  # noqa: S608 - the same
    tests = [f'there."{name}" = given."{name}"' for name in shape.where]
    found = " AND ".join([*tests, *(f'there."{name}" IS NULL' for name in shape.nulls)])
    if shape.operation is RowOperation.DELETE:
        return f"DELETE FROM {_quote_table(shape)} AS there USING {given} WHERE {found}"  # noqa: S608 - the same
    changes = ", ".join(f'"{name}" = given."{name}"' for name in shape.columns)
    return f"UPDATE {_quote_table(shape)} AS there SET {changes} FROM {given} WHERE {found}"  # noqa: S608 - the same


def _number_names(names: Sequence[str]) -> str:
    # A column cannot be named "#", so the row numbers cannot clash with one.
    return f'{_list_names(names)}, "#"'


def _quote_table(shape: Shape) -> str:
    return ".".join(f'"{part}"' for part in shape.table.split("."))


def _build_conflict_clause(shape: Shape) -> str:
    if not shape.conflict:
        return ""
    changes = [name for name in shape.columns if name not in shape.conflict]
    if shape.operation is RowOperation.INSERT or not changes:
        return f" ON CONFLICT ({_list_names(shape.conflict)}) DO NOTHING"
    assigned = ", ".join(f'"{name}" = EXCLUDED."{name}"' for name in changes)
    return f" ON CONFLICT ({_list_names(shape.conflict)}) DO UPDATE SET {assigned}"


def _abbreviate(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _group_parameters(shape: Shape, count: int, *, numbered: bool = False) -> str:
    size = shape.parameters
    groups = []
    for number in range(count):
        parameters = [f"${index}" for index in range(number * size + 1, (number + 1) * size + 1)]
        groups.append(f"({', '.join([*parameters, str(number + 1)] if numbered else parameters)})")
    return ", ".join(groups)
