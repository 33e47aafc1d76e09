"""Which rows go together in one SQL statement, and what that statement says.

Theory of operation. A row has a shape (operation, table, columns) and its values; rows of one shape that are adjacent
share a statement with one group of parameters each. An update of several rows joins the table with a list of values;
that list begins with a row of NULLs taken from the table itself, which gives each column its type and matches nothing.
Keys that differ here may be one to the database (a uuid in capitals, a padded char, citext): the list's rows are
numbered, and of those that the database finds equal the last one is joined.

Invariants, each a property test:
1. The ranges cover all rows, in order, without overlap; the rows of a range have one shape.
2. No statement has more parameters than the protocol allows, nor the same conflict key twice.
3. Rows in one statement do what they would do one after the other: an update that changes a column it looks for goes
   alone, and of several updates of one row the last one wins.
4. Names come into a statement only if they are identifiers, and in quotes.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: PostgreSQL counts the parameters of a statement in 16 bits; its clients take them for signed.
MAX_PARAMETERS = 32_767
#: PostgreSQL cuts longer names off, and would find something else.
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,62}")


class Operation(enum.StrEnum):
    """What is done with a row."""

    INSERT = "insert"
    UPSERT = "upsert"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Shape:
    """What rows in one statement have in common.

    Attributes:
        operation: What is done.
        table: `table` or `schema.table`.
        columns: The columns that get values, in the order of the values.
        conflict: The columns that decide whether a row is there already.
        where: The columns that an update looks for; their values follow those of `columns`.
        nulls: The columns that have to be NULL; they have no values.
    """

    operation: Operation
    table: str
    columns: tuple[str, ...]
    conflict: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    nulls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the names and what belongs together.

        Raises:
            ValueError: A name is no identifier, or the parts do not fit each other.
        """
        if not all(_NAME.fullmatch(part) for part in self.table.split(".", 1)):
            raise ValueError(
                f"table {_shown(self.table)} is no name of a table: letters, digits and _ are allowed, not first a "
                "digit, up to 63 of them, and one schema before a dot"
            )
        for name in (*self.columns, *self.conflict, *self.where, *self.nulls):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError(
                    f"column {_shown(name)} of {self.table} is no name of a column: letters, digits and _ are "
                    "allowed, not first a digit, up to 63 of them"
                )
        if problem := self._problem():
            raise ValueError(f"{self.operation} of {self.table}: {problem}")

    def _problem(self) -> str | None:
        if not self.columns:
            return "data has no column"
        if self.operation is Operation.UPDATE:
            if self.conflict:
                return "an update takes where, not conflict"
            return None if self.where or self.nulls else "an update without where would change every row"
        if self.where or self.nulls:
            return "where is for updates"
        if self.operation is Operation.UPSERT and not self.conflict:
            return "an upsert needs the columns that decide whether the row is there: conflict"
        missing = [name for name in self.conflict if name not in self.columns]
        return f"data has no {', '.join(missing)}, which conflict names" if missing else None

    @property
    def parameters(self) -> int:
        """How many values a row has."""
        return len(self.columns) + len(self.where)

    @property
    def batchable(self) -> bool:
        """Whether several rows in one statement do what they would do one after the other."""
        if self.operation is not Operation.UPDATE:
            return True
        return bool(self.where) and not set(self.columns) & {*self.where, *self.nulls}


class Row(NamedTuple):
    """One row for a statement.

    Attributes:
        shape: What it has in common with others.
        values: Its values, as the shape says.
        key: Equal for rows that concern the same row of the table; None: no such thing is known.
    """

    shape: Shape
    values: tuple[object, ...]
    key: Hashable = None


def ranges(rows: Sequence[Row], max_parameters: int = MAX_PARAMETERS) -> Iterator[tuple[int, int]]:
    """Yield the statements for these rows as (first, last + 1), in order."""
    first, room, keys = 0, 0, set[Hashable]()
    shape: Shape | None = None
    for index, (row_shape, _, key) in enumerate(rows):
        # Equal shapes are nearly always the same object.
        same = row_shape is shape or row_shape == shape
        if not same or room == 0 or (key is not None and key in keys):
            if index:
                yield first, index
            first, shape = index, row_shape
            room = max(1, max_parameters // shape.parameters) if shape.batchable else 1
            keys = set()
        room -= 1
        if key is not None:
            keys.add(key)
    if rows:
        yield first, len(rows)


@functools.lru_cache(maxsize=1024)
def statement(shape: Shape, count: int) -> str:
    """Return the SQL for so many rows of a shape.

    Example:
        >>> statement(Shape(Operation.UPSERT, "shop.orders", ("id", "n"), ("id",)), 2)
        'INSERT INTO "shop"."orders" ("id", "n") VALUES ($1, $2), ($3, $4) ON CONFLICT ("id") DO UPDATE SET "n" = EXCLUDED."n"'
    """  # noqa: E501
    table = ".".join(f'"{part}"' for part in shape.table.split("."))
    if shape.operation is not Operation.UPDATE:
        head = f"INSERT INTO {table} ({_listed(shape.columns)}) VALUES "  # noqa: S608 - names are identifiers
        return head + _groups(shape, count) + _on_conflict(shape)
    if count == 1:
        places = [f'"{name}" = ${place}' for place, name in enumerate((*shape.columns, *shape.where), 1)]
        tests = [*places[len(shape.columns) :], *(f'"{name}" IS NULL' for name in shape.nulls)]
        changes = ", ".join(places[: len(shape.columns)])
        return f"UPDATE {table} SET {changes} WHERE {' AND '.join(tests)}"  # noqa: S608 - names are identifiers
    return _joined_update(table, shape, count)


def _joined_update(table: str, shape: Shape, count: int) -> str:
    # A column can be both set and looked for only in statements of one row, so the names are distinct here.
    names = (*shape.columns, *shape.where)
    types = ", ".join(f'(NULL::{table})."{name}"' for name in names)
    changes = ", ".join(f'"{name}" = given."{name}"' for name in shape.columns)
    tests = [f'there."{name}" = given."{name}"' for name in shape.where]
    tests += [f'there."{name}" IS NULL' for name in shape.nulls]
    # No column can be called "#", so that the rows' numbers are in nobody's way.
    rows = f'(VALUES ({types}, 0), {_groups(shape, count, numbered=True)}) AS rows ({_listed(names)}, "#")'
    keys = _listed(shape.where)
    given = f'(SELECT DISTINCT ON ({keys}) * FROM {rows} ORDER BY {keys}, "#" DESC) AS given'  # noqa: S608 - the same
    found = " AND ".join(tests)
    return f"UPDATE {table} AS there SET {changes} FROM {given} WHERE {found}"  # noqa: S608 - names are identifiers


def _on_conflict(shape: Shape) -> str:
    if not shape.conflict:
        return ""
    changes = [name for name in shape.columns if name not in shape.conflict]
    if shape.operation is Operation.INSERT or not changes:
        return f" ON CONFLICT ({_listed(shape.conflict)}) DO NOTHING"
    assigned = ", ".join(f'"{name}" = EXCLUDED."{name}"' for name in changes)
    return f" ON CONFLICT ({_listed(shape.conflict)}) DO UPDATE SET {assigned}"


def _shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _groups(shape: Shape, count: int, *, numbered: bool = False) -> str:
    size = shape.parameters
    groups = []
    for number in range(count):
        places = [f"${place}" for place in range(number * size + 1, (number + 1) * size + 1)]
        groups.append(f"({', '.join([*places, str(number + 1)] if numbered else places)})")
    return ", ".join(groups)
