"""Rows and statements: which rows may share one, and its SQL."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.delivery.sql_plan import (
    MAX_PARAMETERS,
    Row,
    RowOperation,
    Shape,
    build_array_statement,
    build_statement,
    group_rows,
    split_by_powers,
)

INSERT = Shape(RowOperation.INSERT, "t", ("a", "b"))
IGNORE = Shape(RowOperation.INSERT, "t", ("a", "b"), ("a",))
UPSERT = Shape(RowOperation.UPSERT, "s.t", ("a", "b"), ("a",))
UPDATE = Shape(RowOperation.UPDATE, "t", ("a",), where=("b",), nulls=("c",))
MOVING = Shape(RowOperation.UPDATE, "t", ("a",), where=("a",))
NULLS = Shape(RowOperation.UPDATE, "t", ("a",), nulls=("b",))
DELETE = Shape(RowOperation.DELETE, "t", (), where=("a", "b"), nulls=("c",))
DELETE_NULLS = Shape(RowOperation.DELETE, "t", (), nulls=("b",))
NAMED = Shape(RowOperation.STATEMENT, "count", ("a", "b"), sql="SELECT add($1, $2)")
SHAPES = [INSERT, IGNORE, UPSERT, UPDATE, MOVING, NULLS, DELETE, DELETE_NULLS]

rows = st.builds(
    lambda shape, key: Row(shape, tuple(range(shape.parameters)), None if shape is INSERT else key),
    st.sampled_from([*SHAPES, NAMED]),
    st.integers(0, 5),
)


@given(st.lists(rows))
def test_ranges_cover_all_rows_in_order_and_keep_every_limit(given: list[Row]) -> None:
    parts = list(group_rows(given))
    assert [index for first, last in parts for index in range(first, last)] == list(range(len(given)))
    for first, last in parts:
        part = given[first:last]
        assert len({row.shape for row in part}) == 1
        keys = [row.key for row in part if row.key is not None]
        # Statements from the configuration are executed one by one.
        assert len(keys) == len(set(keys)) or part[0].shape is NAMED
        assert len(part) == 1 or part[0].shape not in (MOVING, NULLS, DELETE_NULLS)


@given(st.lists(rows, min_size=1))
def test_rows_that_can_share_a_statement_do(given: list[Row]) -> None:
    parts = list(group_rows(given))
    for (first, last), (after, _) in pairwise(parts):
        part, following = given[first:last], given[after]
        assert (
            following.shape != part[0].shape
            or not following.shape.batchable
            or following.key in {row.key for row in part}
        )


@given(st.integers(0, 3_000), st.integers(0, 1_000), st.integers(0, 40_000))
def test_parts_of_a_range_are_powers_of_two_within_the_limit_so_that_few_statements_exist(
    first: int, count: int, parameters: int
) -> None:
    parts = list(split_by_powers(first, first + count, parameters))
    assert [index for start, end in parts for index in range(start, end)] == list(range(first, first + count))
    lengths = [end - start for start, end in parts]
    assert all(length & (length - 1) == 0 for length in lengths)
    assert all(length == 1 or length * parameters <= MAX_PARAMETERS for length in lengths)
    assert lengths == sorted(lengths, reverse=True)


@given(st.sampled_from(SHAPES), st.integers(1, 5))
def test_a_statement_has_each_parameter_once_and_in_order_of_the_rows(shape: Shape, count: int) -> None:
    count = count if shape.batchable else 1
    places = [int(place) for place in re.findall(r"\$(\d+)", build_statement(shape, count))]
    assert places == list(range(1, count * shape.parameters + 1))


@given(st.sampled_from([shape for shape in SHAPES if shape.batchable]), st.data())
def test_a_statement_of_arrays_has_one_parameter_per_column_whatever_the_number_of_rows(
    shape: Shape, data: st.DataObject
) -> None:
    types = data.draw(st.tuples(*[st.sampled_from(["int4", "text", "jsonb"])] * shape.parameters))
    sql = build_array_statement(shape, types)
    sent = re.findall(r'\$(\d+)::pg_catalog\."(\w+)"\[\]', sql)
    assert sent == [(str(n), "text" if kind == "jsonb" else kind) for n, kind in enumerate(types, 1)]
    assert sql.count('::pg_catalog."jsonb"') == types.count("jsonb")


@pytest.mark.parametrize(
    ("shape", "count", "sql"),
    [
        (INSERT, 2, 'INSERT INTO "t" ("a", "b") VALUES ($1, $2), ($3, $4)'),
        (IGNORE, 1, 'INSERT INTO "t" ("a", "b") VALUES ($1, $2) ON CONFLICT ("a") DO NOTHING'),
        (
            UPSERT,
            1,
            'INSERT INTO "s"."t" ("a", "b") VALUES ($1, $2) ON CONFLICT ("a") DO UPDATE SET "b" = EXCLUDED."b"',
        ),
        (
            Shape(RowOperation.UPSERT, "t", ("a",), ("a",)),
            1,
            'INSERT INTO "t" ("a") VALUES ($1) ON CONFLICT ("a") DO NOTHING',
        ),
        (UPDATE, 1, 'UPDATE "t" SET "a" = $1 WHERE "b" = $2 AND "c" IS NULL'),
        (
            UPDATE,
            2,
            'UPDATE "t" AS there SET "a" = given."a" FROM (SELECT DISTINCT ON ("b") * FROM (VALUES ((NULL::"t")."a", '
            '(NULL::"t")."b", 0), ($1, $2, 1), ($3, $4, 2)) AS rows ("a", "b", "#") ORDER BY "b", "#" DESC) AS given '
            'WHERE there."b" = given."b" AND there."c" IS NULL',
        ),
        (NULLS, 1, 'UPDATE "t" SET "a" = $1 WHERE "b" IS NULL'),
        (DELETE, 1, 'DELETE FROM "t" WHERE "a" = $1 AND "b" = $2 AND "c" IS NULL'),
        (DELETE_NULLS, 1, 'DELETE FROM "t" WHERE "b" IS NULL'),
        (
            Shape(RowOperation.DELETE, "t", (), where=("a",)),
            2,
            'DELETE FROM "t" AS there USING (SELECT DISTINCT ON ("a") * FROM (VALUES ((NULL::"t")."a", 0), ($1, 1), '
            '($2, 2)) AS rows ("a", "#") ORDER BY "a", "#" DESC) AS given WHERE there."a" = given."a"',
        ),
        (NAMED, 1, "SELECT add($1, $2)"),
    ],
)
def test_a_shape_gives_the_expected_statement(shape: Shape, count: int, sql: str) -> None:
    assert build_statement(shape, count) == sql


@pytest.mark.parametrize(
    ("shape", "types", "sql"),
    [
        (
            UPSERT,
            ("int4", "json"),
            'INSERT INTO "s"."t" ("a", "b") SELECT "a", "b"::pg_catalog."json" FROM unnest($1::pg_catalog."int4"[], '
            '$2::pg_catalog."text"[]) AS rows ("a", "b") ON CONFLICT ("a") DO UPDATE SET "b" = EXCLUDED."b"',
        ),
        (
            UPDATE,
            ("jsonb", "uuid"),
            'UPDATE "t" AS there SET "a" = given."a" FROM (SELECT DISTINCT ON ("b") * FROM (SELECT '
            '"a"::pg_catalog."jsonb" AS "a", "b", "#" FROM unnest($1::pg_catalog."text"[], $2::pg_catalog."uuid"[]) '
            'WITH ORDINALITY AS rows ("a", "b", "#")) AS rows ORDER BY "b", "#" DESC) AS given '
            'WHERE there."b" = given."b" AND there."c" IS NULL',
        ),
    ],
)
def test_a_shape_gives_the_expected_array_statement(shape: Shape, types: tuple[str, ...], sql: str) -> None:
    assert build_array_statement(shape, types) == sql


@given(st.text(max_size=8), st.sampled_from(["table", "schema", "columns", "conflict", "where", "nulls"]))
def test_only_identifiers_are_inserted_into_a_statement(name: str, place: str) -> None:
    fine = re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]{0,62}", name) is not None
    parts: dict[str, tuple[str, ...]] = {"columns": ("a",), "conflict": (), "where": ("b",), "nulls": ()}
    operation = RowOperation.UPDATE
    table = {"table": name, "schema": f"{name}.t"}.get(place, "t")
    if place == "conflict":
        operation, parts = RowOperation.INSERT, {"columns": (name,), "conflict": (name,), "where": (), "nulls": ()}
    elif place in parts:
        parts[place] = (name,)
    try:
        shape = Shape(operation, table, **parts)
    except ValueError:
        assert not fine or (place == "table" and "." in name)
    else:
        assert fine or (place == "table" and all(re.fullmatch("[a-zA-Z_]\\w*", part) for part in name.split(".")))
        assert f'"{name}"' in build_statement(shape, 1) or place == "table"


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"columns": ()}, "no column"),
        ({"operation": RowOperation.UPDATE, "conflict": ("a",), "where": ("a",)}, "needs where, not conflict"),
        ({"operation": RowOperation.UPDATE}, "would affect every row"),
        ({"operation": RowOperation.UPDATE, "columns": (), "where": ("a",)}, "no column"),
        ({"operation": RowOperation.DELETE, "where": ("a",)}, "needs where, not data"),
        ({"operation": RowOperation.DELETE, "columns": ()}, "would affect every row"),
        ({"where": ("a",)}, "where is only for updates"),
        ({"nulls": ("a",)}, "where is only for updates"),
        ({"table": "t" * 64}, "is not a valid table name"),
        ({"table": "t" * 10_000_000}, "is not a valid table name"),
        ({"operation": RowOperation.UPSERT}, "an upsert needs conflict"),
        ({"operation": RowOperation.UPSERT, "conflict": ("b", "c")}, "data has no b, c"),
        ({"conflict": (1,)}, "column 1 of t is not a valid column name"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Shape(**{"operation": RowOperation.INSERT, "table": "t", "columns": ("a",), **parts})  # type: ignore[arg-type]
