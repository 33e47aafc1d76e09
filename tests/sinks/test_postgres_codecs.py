"""What numbers and JSON are in PostgreSQL, against a real server."""

from __future__ import annotations

import decimal
import enum
import math
import sys
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.server import PostgresServer

from tidemill.config.sections.sink_settings import PostgresSinkSettings
from tidemill.deadletters.payloads import encode_payload, restore_fields
from tidemill.sinks.base import to_json
from tidemill.sinks.payloads import PostgresPayload
from tidemill.sinks.postgres import PostgresSink
from tidemill.sinks.postgres_codecs import JsonCodec, decode_numeric, encode_numeric, set_codecs
from tidemill.testing.contract import deliver

D = decimal.Decimal
#: The client alone sends 19.989999..., 2.67499999... and 1.100000000000000088...
PRICES = {19.99: "19.99", 2.675: "2.675", 1.1: "1.1", 1e-7: "0.0000001", 1e22: "10000000000000000000000"}


@pytest.fixture
async def sink(postgres: PostgresServer, database: str) -> AsyncIterator[PostgresSink]:
    statements = {
        "add": {"sql": "INSERT INTO t (id, n) VALUES ($1, $2::numeric * 1)", "parameters": ["id", "n"], "key": ["n"]},
        "note": {"sql": "INSERT INTO t (id, j) VALUES ($1, $2)", "parameters": ["id", "j"]},
    }
    settings = PostgresSinkSettings.model_validate(
        {"dsn": postgres.url(database), "pool_min": 1, "pool_max": 2, "statements": statements}
    )
    made = PostgresSink("db", settings)
    await made.connect()
    yield made
    await made.close()


async def texts(sink: PostgresSink, column: str, table: str = "t") -> list[str | None]:
    assert sink.pool is not None
    rows = await sink.pool.fetch(f"SELECT ({column})::text AS text FROM {table} ORDER BY id")
    return [row["text"] for row in rows]


async def create(sink: PostgresSink, *statements: str) -> None:
    assert sink.pool is not None
    for sql in statements:
        await sink.pool.execute(sql)


def row(id: int, **data: Any) -> PostgresPayload:
    return PostgresPayload(table="t", data={"id": id, **data})


# -- numeric ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numeric", "numeric(40,8)", "price"])
@pytest.mark.parametrize("at", [{}, {"at": "::1"}], ids=["arrays", "groups of parameters"])
async def test_a_float_keeps_its_digits_in_a_numeric_column(sink: PostgresSink, kind: str, at: dict[str, Any]) -> None:
    await create(
        sink, "CREATE DOMAIN price AS numeric CHECK (value > -5)", f"CREATE TABLE t (id int, n {kind}, at inet)"
    )
    assert list(await deliver(sink, [row(0, n=19.99, **at)])) == [None]
    payloads = [row(id, n=price, **at) for id, price in enumerate(PRICES, 1)]
    assert list(await deliver(sink, payloads)) == [None] * len(payloads)
    assert [D(text or "") for text in await texts(sink, "n")] == [D("19.99"), *map(D, PRICES.values())]


async def test_a_float_keeps_its_digits_wherever_a_number_can_be(sink: PostgresSink) -> None:
    await create(
        sink,
        "CREATE TYPE money_of AS (amount numeric, currency text)",
        "CREATE TABLE t (id int, n numeric, many numeric[], between numrange, cash money_of, x float8)",
    )
    values = {"many": [2.675, None, D("1.10")], "between": asyncpg.Range(1.1, 2.675), "cash": (19.99, "EUR"), "x": 0.1}
    payloads = [
        row(1, n=19.99, **values),
        PostgresPayload(table="t", data={"x": 0.2}, op="update", where={"n": 19.99}),
        PostgresPayload(statement="add", data={"id": 2, "n": 2.675}),
    ]
    assert list(await deliver(sink, payloads)) == [None] * 3
    assert await texts(sink, "n") == ["19.99", "2.675"]
    assert (await texts(sink, "many"))[0] == "{2.675,NULL,1.10}"
    assert (await texts(sink, "between"))[0] == "[1.1,2.675)"
    assert (await texts(sink, "cash"))[0] == "(19.99,EUR)"
    assert (await texts(sink, "x"))[0] == "0.2"


async def test_hooks_read_decimals_and_copy_records_into_numeric_columns(sink: PostgresSink) -> None:
    await create(sink, "CREATE TABLE t (id int, n numeric)")
    assert sink.pool is not None
    async with sink.pool.acquire() as connection:
        await connection.copy_records_to_table("t", records=[(1, 19.99), (2, D("1.10")), (3, 7)])
    rows = await sink.pool.fetch("SELECT n, ARRAY[n] AS many FROM t ORDER BY id")
    assert [str(row["n"]) for row in rows] == ["19.99", "1.10", "7"]
    assert [row["many"] for row in rows] == [[D("19.99")], [D("1.10")], [D("7")]]


NUMBERS = (
    st.floats()
    | st.decimals(allow_nan=False)
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.builds(lambda digits, places: D(digits).scaleb(-places), st.integers(-(10**25), 10**25), st.integers(0, 60))
)


@given(NUMBERS)
def test_a_number_is_equal_when_it_is_read(value: Any) -> None:
    try:
        found = decode_numeric(encode_numeric(value))
    except ValueError:
        assert isinstance(value, D)
        assert not -131_072 < value.adjusted() < 131_072 or value.as_tuple().exponent < -16_383  # type: ignore[operator]
        return
    if value != value:
        assert found.is_nan()
        return
    assert found == (D(repr(value)) if isinstance(value, float) else value)
    if isinstance(value, D) and value.is_finite():
        assert found.as_tuple().exponent == min(0, value.as_tuple().exponent)  # type: ignore[type-var]


async def test_the_server_has_the_same_form_for_numbers(postgres: PostgresServer, database: str) -> None:
    plain, ours = [await asyncpg.connect(postgres.url(database)) for _ in range(2)]
    await set_codecs(ours, JsonCodec(to_json))
    numbers = [0, 1, -1, 9999, 10000, -10001, 10**40, True, D("0.00"), D("-0.0001"), D("1.10"), D("123456.789000")]
    numbers += [D("1E+5"), D("1E-16383"), 10**131_071, 0.1, -2.5, 5e-324, sys.float_info.max, 1e16, 123456789.125]
    numbers += [math.inf, -math.inf]
    for number in numbers:
        text = await ours.fetchval("SELECT ($1::numeric)::text", number)
        exact = D(repr(number)) if isinstance(number, float) else D(number)
        assert D(text) == exact
        read = [await each.fetchval("SELECT $1::text::numeric", text) for each in (ours, plain)]
        assert read[0] == read[1]
        assert format(read[0], "f") == text
    assert (await ours.fetchval("SELECT $1::numeric", math.nan)).is_nan()
    await plain.close()
    await ours.close()


@pytest.mark.parametrize("value", [D("1E+131072"), D("1E+999999999"), D("1E-16384"), D("1E-999999999"), D("0E-99999")])
def test_a_number_that_numeric_cannot_hold_is_refused_and_not_written_out(value: decimal.Decimal) -> None:
    with pytest.raises(ValueError, match="numeric holds up to"):
        encode_numeric(value)


class Size(enum.Enum):
    SMALL = 1.5


def test_numbers_that_are_equal_to_postgresql_are_one_row(sink: PostgresSink) -> None:
    def key(value: Any) -> Any:
        return sink.encode(PostgresPayload(table="t", data={"n": value, "m": 1}, op="upsert", conflict="n")).key

    for equal in ([19.99, D("19.99"), D("19.990")], [1, 1.0, D(1)], [1.5, Size.SMALL], [math.nan, D("nan"), D("snan")]):
        assert len({key(value) for value in equal}) == 1
    assert len({key(value) for value in (19.99, D("19.99000000000000199"), "19.99", None, math.inf)}) == 5


async def test_the_last_of_two_upserts_of_a_number_wins_whatever_type_it_has(sink: PostgresSink) -> None:
    await create(sink, "CREATE TABLE t (id int, n numeric PRIMARY KEY)")
    payloads = [
        PostgresPayload(table="t", data={"id": id, "n": n}, op="upsert", conflict="n")
        for id, n in enumerate((19.99, D("19.99"), 2.5, D("19.990"), D("2.5")))
    ]
    assert list(await deliver(sink, payloads)) == [None] * 5
    assert sink.pool is not None
    rows = await sink.pool.fetch("SELECT id, n FROM t ORDER BY n")
    assert [tuple(each) for each in rows] == [(4, D("2.5")), (3, D("19.99"))]


# -- json ---------------------------------------------------------------------------------------------------------

TEXTS = ["hello", "123", "null", "true", '{"a": 1}', "", '"', "é\n"]


@pytest.mark.parametrize("kind", ["json", "jsonb", "noted"])
@pytest.mark.parametrize("count", [1, 3], ids=["alone", "several rows"])
async def test_text_is_a_json_string_and_bytes_are_json_text(sink: PostgresSink, kind: str, count: int) -> None:
    await create(sink, "CREATE DOMAIN noted AS jsonb CHECK (true)", f"CREATE TABLE t (id int, j {kind})")
    values = [*TEXTS, b'{"a": [1, "x"]}', b"null", b"123", b'"quoted"', None]
    for start in range(0, len(values), count):
        payloads = [row(start + n, j=value) for n, value in enumerate(values[start : start + count])]
        assert list(await deliver(sink, payloads)) == [None] * len(payloads)
    assert await texts(sink, "j #>> '{}'") == [*TEXTS, '{"a": [1, "x"]}', None, "123", "quoted", None]
    kinds = [*["string"] * len(TEXTS), "object", "null", "number", "string", None]
    assert await texts(sink, f"{kind.replace('noted', 'jsonb')}_typeof(j)") == kinds


async def test_text_is_a_json_string_in_arrays_conditions_and_statements(sink: PostgresSink) -> None:
    await create(sink, "CREATE TABLE t (id int, j jsonb, many jsonb[])")
    payloads = [
        row(1, j="123", many=["123", b"123", {"a": "b"}, None]),
        PostgresPayload(statement="note", data={"id": 2, "j": "true"}),
        PostgresPayload(statement="note", data={"id": 3, "j": b"true"}),
        PostgresPayload(table="t", data={"id": 11}, op="update", where={"j": "123"}),
        PostgresPayload(table="t", data={"id": 13}, op="update", where={"j": b"true"}),
        PostgresPayload(table="t", data=b'{"id": 14, "j": "null"}'),
    ]
    assert list(await deliver(sink, payloads)) == [None] * 6
    assert await texts(sink, "j") == ['"true"', '"123"', "true", '"null"']
    assert (await texts(sink, "many"))[1] == r'{"\"123\"",123,"{\"a\": \"b\"}",NULL}'


async def test_bytes_that_are_not_json_are_their_rows_own_failure(sink: PostgresSink) -> None:
    await create(sink, "CREATE TABLE t (id int, j jsonb)")
    values = [b"{}", b"hello", b"{", b"", b"NaN", b"\xff", b'"\xff"', b"[1]"]
    for rows in ([row(id, j=value) for id, value in enumerate(values)], [row(99, j=b"hello")]):
        answers = list(await deliver(sink, rows))
        wrong = [answer for answer in answers if answer is not None]
        assert len(wrong) == len(rows) - (2 if len(rows) > 1 else 0)
        assert all(not answer.retryable and "must be JSON text" in answer.error for answer in wrong)
    assert await texts(sink, "j") == ["{}", "[1]"]


async def test_hooks_keep_the_convention_of_the_client(sink: PostgresSink) -> None:
    await create(sink, "CREATE TABLE t (id int, j jsonb, k json)")
    assert sink.pool is not None
    await sink.pool.execute("INSERT INTO t VALUES (1, $1, $2)", '{"a": 1}', "123")
    await deliver(sink, [row(2, j='{"a": 1}', k="123")])
    await sink.pool.execute("INSERT INTO t VALUES (3, $1, $2)", {"a": 1}, [1])
    rows = await sink.pool.fetch("SELECT j, k FROM t ORDER BY id")
    assert [tuple(each) for each in rows] == [('{"a": 1}', "123"), (r'"{\"a\": 1}"', '"123"'), ('{"a": 1}', "[1]")]
    with pytest.raises(asyncpg.InvalidTextRepresentationError):
        await sink.pool.execute("INSERT INTO t VALUES (4, $1)", "hello")


class Document(pydantic.BaseModel):
    id: int
    j: Any
    k: bytes = b"[2]"


@pytest.mark.parametrize(
    "payload",
    [
        PostgresPayload(table="t", data={"id": 1, "j": "[1]", "k": b"[2]"}),
        PostgresPayload(table="t", data=Document(id=1, j="[1]")),
        PostgresPayload(table="t", data=b'{"id": 1, "j": "[1]", "k": [2]}'),
        PostgresPayload(table="t", data={"id": 1}, op="update", where={"j": "[1]", "k": b"[2]"}),
    ],
)
async def test_a_redrive_sends_text_and_bytes_as_they_were(sink: PostgresSink, payload: PostgresPayload) -> None:
    await create(sink, "CREATE TABLE t (id int, j jsonb, k jsonb)")
    if payload.where:
        await deliver(sink, [row(0, j="[1]", k=b"[2]")])
    again = PostgresPayload(**restore_fields(encode_payload(payload), typed=True))
    assert list(await deliver(sink, [again])) == [None]
    assert (await texts(sink, "j"), await texts(sink, "k")) == (['"[1]"'], ["[2]"])
    assert await texts(sink, "id") == ["1"]


def test_a_long_number_in_bytes_stays_as_it_is() -> None:
    assert JsonCodec(to_json).encode_payload(b'{"n": 1e400}') == '{"n": 1e400}'
