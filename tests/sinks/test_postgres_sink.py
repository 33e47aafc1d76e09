"""The PostgreSQL sink against a real server."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import asyncpg
import pydantic
import pytest
from tests.faults import FaultyProxy
from tests.store.server import PostgresServer

from tidemill.config.sections.sink_settings import PostgresSinkSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded.broker import free_port
from tidemill.sinks.base import Refusal, Sink
from tidemill.sinks.payloads import PostgresPayload
from tidemill.sinks.postgres import PostgresSink
from tidemill.testing.contract import Outage, SinkContract, deliver, deliver_at_last

TABLE = "CREATE TABLE items (at serial, k text, n int, note text, CHECK (n <> 666))"


def make_sink(dsn: str, **options: Any) -> PostgresSink:
    return PostgresSink("db", PostgresSinkSettings(dsn=dsn, **{"pool_min": 1, "pool_max": 2, **options}))


class TestPostgresContract(SinkContract):
    secret = "hunter2"

    @pytest.fixture(autouse=True)
    def _database(self, postgres: PostgresServer, database: str, proxy: Callable[[int], FaultyProxy]) -> None:
        assert postgres.port
        self.between = proxy(postgres.port)
        self.dsn = postgres.tcp_url(database, self.between.port)
        self.direct = postgres.url(database)
        asyncio.run(run(self.direct, TABLE))

    def make(self) -> Sink:
        return make_sink(self.dsn)

    def make_unusable(self) -> Sink:
        return make_sink(self.dsn.replace("app:", "nobody:"))

    def payload(self, data: Any, key: str = "k") -> Any:
        return PostgresPayload(table="items", data=data if isinstance(data, (dict, bytes)) else data.model_dump())

    def bad_payload(self) -> Any:
        return PostgresPayload(table="items; DROP TABLE items", data={"n": 1})

    def refused_payload(self) -> Any:
        return self.payload({"n": 666})

    def outage(self) -> Outage:
        return self.between

    async def received(self, count: int) -> Sequence[Mapping[str, Any]]:
        rows = await run(self.direct, "SELECT n, note FROM items ORDER BY at")
        return [{name: value for name, value in row.items() if value is not None} for row in rows]


async def run(dsn: str, sql: str, *values: Any) -> list[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        if values or sql.startswith("SELECT"):
            return list(await connection.fetch(sql, *values))
        await connection.execute(sql)
        return []
    finally:
        await connection.close()


class Statements:
    """What reaches the server, as the client sends it."""

    def __init__(self) -> None:
        self.sql: list[str] = []

    def __call__(self, record: Any) -> None:
        self.sql.append(record.query)

    def like(self, start: str) -> list[str]:
        return [sql for sql in self.sql if sql.startswith(start)]


@pytest.fixture
async def seen(monkeypatch: pytest.MonkeyPatch) -> Statements:
    statements = Statements()
    original = asyncpg.Connection.execute

    async def execute(self: Any, query: str, *args: Any, **kwargs: Any) -> Any:
        statements.sql.append(query)
        return await original(self, query, *args, **kwargs)

    monkeypatch.setattr(asyncpg.Connection, "execute", execute)
    return statements


@pytest.fixture
async def dsn(postgres: PostgresServer, database: str) -> str:
    return postgres.url(database)


@pytest.fixture
async def sink(dsn: str) -> AsyncIterator[PostgresSink]:
    made = make_sink(dsn)
    await made.connect()
    yield made
    await made.close()


ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, state text NOT NULL, total numeric)"


def order(id: int, state: str = "new", **more: Any) -> PostgresPayload:
    return PostgresPayload(table="orders", data={"id": id, "state": state}, **more)


def upsert(id: int, state: str) -> PostgresPayload:
    return order(id, state, op="upsert", conflict="id")


async def test_adjacent_rows_of_one_shape_are_one_statement_and_order_is_kept(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    await run(dsn, ORDERS)
    seen.sql.clear()
    change = PostgresPayload(table="orders", op="update", data={"state": "paid"}, where={"id": 1})
    payloads = [order(1), order(2), order(3), change, upsert(1, "sent"), upsert(2, "sent")]
    assert list(await deliver(sink, payloads)) == [None] * 6
    assert len(seen.like("INSERT")) == 2
    assert len(seen.like("UPDATE")) == 1
    rows = await run(dsn, "SELECT id, state FROM orders ORDER BY id")
    assert [tuple(row) for row in rows] == [(1, "sent"), (2, "sent"), (3, "new")]


async def test_a_single_statement_needs_no_transaction_of_its_own(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    await run(dsn, ORDERS)
    seen.sql.clear()
    await deliver(sink, [order(n) for n in range(500)])
    # The pool says a SELECT of its own when it has its connection back.
    assert [sql[:6] for sql in seen.sql if not sql.startswith("SELECT")] == ["INSERT"]


async def test_a_wide_table_takes_any_number_of_rows_in_one_short_statement(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    names = [f"c{n}" for n in range(100)]
    await run(dsn, f"CREATE TABLE wide (id int, {', '.join(f'{name} int' for name in names)})")
    seen.sql.clear()
    payloads = [PostgresPayload(table="wide", data={"id": n, **dict.fromkeys(names, n)}) for n in range(1_000)]
    assert list(await deliver(sink, payloads)) == [None] * 1_000
    assert len(seen.like("INSERT")) == 1
    for count in (2, 3, 997):
        assert list(await deliver(sink, payloads[:count])) == [None] * count
    assert len(set(seen.like("INSERT"))) == 1, "it depends on the number of rows"
    rows = await run(dsn, "SELECT id, c99 FROM wide ORDER BY ctid LIMIT 1000")
    assert [tuple(row) for row in rows] == [(n, n) for n in range(1_000)]


async def test_types_without_a_usable_array_go_in_powers_of_two_rows_of_bounded_length(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    await run(dsn, "CREATE TYPE mood AS ENUM ('sad', 'glad')")
    await run(dsn, "CREATE TABLE moods (id int PRIMARY KEY, mood mood, at inet, tags text[])")

    def row(n: int, **more: Any) -> PostgresPayload:
        data = {"id": n, "mood": ("sad", "glad")[n % 2], "at": f"10.0.0.{n % 250}", "tags": ["a", str(n)]}
        return PostgresPayload(table="moods", data=data, **more)

    seen.sql.clear()
    for count in (1, 3, 700, 999):
        assert list(await deliver(sink, [row(n, conflict="id") for n in range(count)])) == [None] * count
    lengths = {sql.count("(") for sql in set(seen.like("INSERT"))}
    assert len(lengths) <= 11
    assert max(len(sql) for sql in seen.sql) < 16_000
    found = await run(dsn, "SELECT count(*), max(tags[2]::int) AS last, count(mood) AS moods FROM moods")
    assert tuple(found[0]) == (999, 998, 999)


async def test_full_batches_have_a_statement_of_their_own_for_a_bounded_number_of_narrow_tables(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    for number in range(18):
        await run(dsn, f"CREATE TABLE narrow_{number} (a int, b text)")
    seen.sql.clear()
    for number in range(18):
        rows = [PostgresPayload(table=f"narrow_{number}", data={"a": n, "b": "x"}) for n in range(sink.max_batch_count)]
        for _ in range(2):
            assert list(await deliver(sink, rows)) == [None] * len(rows)
    statements = set(seen.like("INSERT"))
    assert len(statements) == 18
    assert len([sql for sql in statements if "VALUES" in sql]) == 16
    assert (await run(dsn, "SELECT count(*) FROM narrow_17 WHERE a = 999"))[0]["count"] == 2


async def test_lists_in_json_columns_are_one_value_each_and_in_others_are_refused(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    await run(dsn, "CREATE TABLE mixed (id int, j jsonb, k json, note text)")

    def row(n: int, note: Any = None, **data: Any) -> PostgresPayload:
        return PostgresPayload(table="mixed", data={"id": n, "note": note, "j": None, "k": None, **data})

    seen.sql.clear()
    rows = [row(1, j=["a", "b"], k={"x": [1]}), row(2, j=b"[3, 4]", k=b"null"), row(3, j=5, k=True), row(4)]
    assert list(await deliver(sink, rows)) == [None] * 4
    assert len(seen.like("INSERT")) == 1
    found = await run(dsn, "SELECT j, k FROM mixed ORDER BY id")
    assert [tuple(each) for each in found] == [
        ('["a", "b"]', '{"x":[1]}'),
        ("[3, 4]", "null"),
        ("5", "true"),
        (None,) * 2,
    ]
    # Lists of one length would be taken apart with the array, and put next to others' values.
    answers = await deliver(sink, [row(n, note=["a", "b"]) for n in (5, 6, 7)])
    assert all(answer is not None and not answer.retryable for answer in answers)
    assert (await run(dsn, "SELECT count(*) FROM mixed"))[0]["count"] == 4


@pytest.mark.parametrize("op", ["update", "delete"])
async def test_json_in_changes_of_many_rows(sink: PostgresSink, dsn: str, seen: Statements, op: Any) -> None:
    await run(dsn, "CREATE TABLE docs (id int, j jsonb)")
    await deliver(sink, [PostgresPayload(table="docs", data={"id": n, "j": {"n": n}}) for n in range(4)])
    seen.sql.clear()
    changes = [
        PostgresPayload(table="docs", op=op, data={"id": -n} if op == "update" else None, where={"j": {"n": n}})
        for n in (1, 2)
    ]
    assert list(await deliver(sink, changes)) == [None] * 2
    assert len(seen.like(op.upper())) == 1
    left = [row["id"] for row in await run(dsn, "SELECT id FROM docs ORDER BY id")]
    assert left == ([-2, -1, 0, 3] if op == "update" else [0, 3])


async def test_a_column_that_got_another_type_meanwhile_is_written_all_the_same(sink: PostgresSink, dsn: str) -> None:
    await run(dsn, "CREATE TABLE changing (id int, note text)")

    def rows(*notes: Any) -> list[PostgresPayload]:
        return [PostgresPayload(table="changing", data={"id": 1, "note": note}) for note in notes]

    assert list(await deliver(sink, rows("1", "2"))) == [None] * 2
    await run(dsn, "ALTER TABLE changing ALTER note TYPE int USING note::int")
    assert list(await deliver(sink, rows(3, 4))) == [None] * 2
    # For text there is no way into a number: that is the rows' own failure.
    answers = await deliver(sink, rows("five", "six"))
    assert all(answer is not None and not answer.retryable for answer in answers)
    assert [row["note"] for row in await run(dsn, "SELECT note FROM changing ORDER BY note")] == [1, 2, 3, 4]


async def test_a_trigger_that_speaks_of_types_is_no_reason_to_ask_for_them_forever(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    await run(dsn, "CREATE TABLE picky (n int)")
    await run(
        dsn,
        "CREATE FUNCTION picky() RETURNS trigger AS $$ BEGIN IF NEW.n % 5 = 0 THEN "
        "RAISE EXCEPTION USING ERRCODE = '42804'; END IF; RETURN NEW; END $$ LANGUAGE plpgsql",
    )
    await run(dsn, "CREATE TRIGGER picky BEFORE INSERT ON picky FOR EACH ROW EXECUTE FUNCTION picky()")
    seen.sql.clear()
    for _ in range(2):
        async with asyncio.timeout(30):
            answers = await deliver(sink, [PostgresPayload(table="picky", data={"n": n}) for n in range(1, 9)])
        assert all(answer is not None and not answer.retryable for answer in answers)
    assert len(seen.like("INSERT")) < 10


async def test_json_that_has_no_form_is_its_rows_own_failure(sink: PostgresSink, dsn: str) -> None:
    await run(dsn, "CREATE TABLE notes (id int, j jsonb)")
    values = [{"a": 1}, b"\xff", {"b": 2}, asyncpg.Range(1, 2), b'{"c": 3}', b"no json", {"nul": "\0"}]
    answers = await deliver(
        sink, [PostgresPayload(table="notes", data={"id": n, "j": j}) for n, j in enumerate(values)]
    )
    assert [answer is None for answer in answers] == [True, False, True, False, True, False, False]
    assert all(answer is None or not answer.retryable for answer in answers)
    assert [row["id"] for row in await run(dsn, "SELECT id FROM notes ORDER BY id")] == [0, 2, 4]


async def test_what_is_kept_per_table_does_not_grow_with_the_numbers_of_rows(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    names = [f"column_{n}" for n in range(30)]
    await run(dsn, f"CREATE TABLE many (at inet, {', '.join(f'{name} int' for name in names)})")
    seen.sql.clear()
    for count in range(1, 400, 7):
        for more in ({}, {"at": "::1"}):
            payload = PostgresPayload(table="many", data={**dict.fromkeys(names, 1), **more})
            assert list(await deliver(sink, [payload] * count)) == [None] * count
    statements = set(seen.like("INSERT"))
    assert len(statements) <= 2 + 8
    assert sum(len(sql) for sql in statements) < 64_000


async def test_one_statement_never_has_the_same_conflict_key_twice_and_the_last_one_wins(
    sink: PostgresSink, dsn: str
) -> None:
    await run(dsn, ORDERS)
    assert list(await deliver(sink, [upsert(n % 3, str(n)) for n in range(30)])) == [None] * 30
    rows = await run(dsn, "SELECT id, state FROM orders ORDER BY id")
    assert [tuple(row) for row in rows] == [(0, "27"), (1, "28"), (2, "29")]


async def test_an_insert_with_conflict_leaves_the_row_that_is_there(sink: PostgresSink, dsn: str) -> None:
    await run(dsn, ORDERS)
    assert list(await deliver(sink, [order(1, "a"), order(1, "b", conflict=["id"])])) == [None] * 2
    assert [row["state"] for row in await run(dsn, "SELECT state FROM orders")] == ["a"]


async def test_updates_of_many_rows_are_one_statement_with_the_types_of_the_table(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    await run(dsn, "CREATE SCHEMA shop")
    await run(dsn, "CREATE TABLE shop.stock (id uuid, size text, n int, seen timestamptz, tags jsonb, old text)")
    ids = [uuid.uuid4() for _ in range(10)]
    now = datetime.datetime.now(datetime.UTC)
    rows = [PostgresPayload(table="shop.stock", data={"id": each, "size": "l", "n": 0}) for each in ids]
    await deliver(sink, rows)
    seen.sql.clear()
    changes = [
        PostgresPayload(
            table="shop.stock",
            op="update",
            data={"n": n, "seen": now, "tags": {"n": [n]}},
            where={"id": each, "size": "l", "old": None},
        )
        for n, each in enumerate(ids)
    ]
    assert list(await deliver(sink, changes)) == [None] * 10
    assert len(seen.like("UPDATE")) == 1
    found = await run(dsn, "SELECT n, seen, tags->'n'->>0 AS tag FROM shop.stock ORDER BY n")
    assert [tuple(row) for row in found] == [(n, now, str(n)) for n in range(10)]


ONE = "f0e1d2c3-b4a5-4687-8796-a5b4c3d2e1f0"


@pytest.mark.parametrize(
    ("column", "there", "keys"),
    [
        ("uuid", ONE, [uuid.UUID(ONE), ONE, ONE.upper()]),
        ("char(6)", "a", ["a", "a ", "a   "]),
        ("numeric", 1, [1, decimal.Decimal("1.00"), decimal.Decimal("1.0")]),
        ("timestamptz", datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.UTC), []),
        # It can be compared, but not sorted.
        ("xid", 7, [7, 8]),
    ],
)
async def test_the_last_update_of_a_row_wins_whatever_form_its_key_has(
    sink: PostgresSink, dsn: str, column: str, there: Any, keys: list[Any]
) -> None:
    if isinstance(there, datetime.datetime):
        zones = [datetime.timezone(datetime.timedelta(hours=hours)) for hours in (0, 2, -3)]
        keys = [there.astimezone(zone) for zone in zones]
    await run(dsn, f"CREATE TABLE keyed (id {column}, n int, again int)")
    await deliver(sink, [PostgresPayload(table="keyed", data={"id": there, "n": 0})])
    for count in range(2, 12):
        changes = [
            PostgresPayload(
                table="keyed", op="update", data={"n": n, "again": -n}, where={"id": keys[(n + count) % len(keys)]}
            )
            for n in range(1, count + 1)
        ]
        last = max(n for n in range(1, count + 1) if column != "xid" or keys[(n + count) % 2] == there)
        assert list(await deliver(sink, changes)) == [None] * count
        assert [tuple(row) for row in await run(dsn, "SELECT n, again FROM keyed")] == [(last, -last)]


async def test_the_last_update_wins_where_several_columns_say_which_row_is_meant(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    await run(dsn, "CREATE TABLE keyed (id uuid, part int, gone text, n int)")
    await deliver(sink, [PostgresPayload(table="keyed", data={"id": ONE, "part": part, "n": 0}) for part in (1, 2)])
    changes = [
        PostgresPayload(table="keyed", op="update", data={"n": n}, where={"part": part, "id": key, "gone": None})
        for n, (part, key) in enumerate([(1, ONE), (2, ONE.upper()), (1, uuid.UUID(ONE)), (2, ONE), (1, ONE.upper())])
    ]
    seen.sql.clear()
    assert list(await deliver(sink, changes)) == [None] * 5
    assert len(seen.like("UPDATE")) == 1
    found = await run(dsn, "SELECT part, n FROM keyed ORDER BY part")
    assert [tuple(row) for row in found] == [(1, 4), (2, 3)]


async def test_an_update_that_changes_what_it_looks_for_goes_alone(sink: PostgresSink, dsn: str) -> None:
    await run(dsn, ORDERS)

    def step(before: str, after: str) -> PostgresPayload:
        return PostgresPayload(table="orders", op="update", data={"state": after}, where={"state": before})

    assert list(await deliver(sink, [order(1, "a"), step("a", "b"), step("b", "c"), step("c", "d")])) == [None] * 4
    assert [row["state"] for row in await run(dsn, "SELECT state FROM orders")] == ["d"]


async def test_where_none_finds_null_and_an_update_that_finds_nothing_is_done(sink: PostgresSink, dsn: str) -> None:
    await run(dsn, ORDERS)
    change = PostgresPayload(table="orders", op="update", data={"total": 5}, where={"total": None})
    assert list(await deliver(sink, [change, order(1), change])) == [None] * 3
    assert [row["total"] for row in await run(dsn, "SELECT total FROM orders")] == [5]


def gone(**where: Any) -> PostgresPayload:
    return PostgresPayload(table="orders", op="delete", where=where)


async def test_deletes_of_many_rows_are_one_statement_and_keep_their_place_among_others(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    await run(dsn, ORDERS)
    seen.sql.clear()
    payloads = [*(order(n) for n in range(10)), *(gone(id=n, total=None) for n in range(0, 10, 2)), order(4, "again")]
    assert list(await deliver(sink, payloads)) == [None] * len(payloads)
    assert len(seen.like("DELETE")) == 1
    left = await run(dsn, "SELECT id, state FROM orders ORDER BY id")
    assert [row["id"] for row in left] == [1, 3, 4, 5, 7, 9]
    assert [row["state"] for row in left][2] == "again"


async def test_a_delete_is_harmless_when_it_is_repeated_and_finds_null(sink: PostgresSink, dsn: str) -> None:
    await run(dsn, ORDERS)
    payloads = [order(1), order(2), gone(id=1), gone(id=1), gone(total=None, state="new"), gone(id=77)]
    assert list(await deliver(sink, payloads)) == [None] * 6
    assert list(await deliver(sink, payloads[2:])) == [None] * 4
    assert await run(dsn, "SELECT id FROM orders") == []


async def test_a_delete_that_is_refused_is_named_and_what_comes_later_for_its_row_waits(
    sink: PostgresSink, dsn: str
) -> None:
    await run(dsn, ORDERS)
    await run(dsn, "CREATE TABLE parts (id int PRIMARY KEY, parent int REFERENCES orders)")
    await deliver(sink, [*(order(n) for n in range(4)), PostgresPayload(table="parts", data={"id": 1, "parent": 2})])
    answers = await deliver(sink, [*(gone(id=n) for n in range(4)), gone(id=2)])
    assert [answer is None for answer in answers] == [True, True, False, True, False]
    assert "delete orders (id=2): ForeignKeyViolationError" in str(answers[2])
    assert answers[4] is not None
    assert answers[4].waits
    assert [row["id"] for row in await run(dsn, "SELECT id FROM orders")] == [2]


COUNT = {
    "sql": "INSERT INTO totals AS t (region, n) VALUES ($1, $2) "
    "ON CONFLICT (region) DO UPDATE SET n = t.n + excluded.n",
    "parameters": ["region", "n"],
    "key": ["region"],
}
#: The same, counted once however often it is delivered.
COUNT_ONCE = {
    "sql": "WITH fresh AS (INSERT INTO counted (id) VALUES ($1) ON CONFLICT DO NOTHING RETURNING id) "
    "INSERT INTO totals AS t (region, n) SELECT $2::text, $3::int FROM fresh "
    "ON CONFLICT (region) DO UPDATE SET n = t.n + excluded.n",
    "parameters": ["id", "region", "n"],
    "key": ["region"],
}


@pytest.fixture
async def counting(dsn: str) -> AsyncIterator[PostgresSink]:
    await run(
        dsn,
        "CREATE TABLE totals (region text PRIMARY KEY, n int CHECK (n < 1000)); CREATE TABLE counted (id int UNIQUE)",
    )
    made = make_sink(dsn, statements={"count": COUNT, "count_once": COUNT_ONCE})
    await made.connect()
    yield made
    await made.close()


def count(region: str | None, n: Any = 1) -> PostgresPayload:
    return PostgresPayload(statement="count", data={"n": n, "region": region})


async def totals(dsn: str) -> dict[str, int]:
    return {row["region"]: row["n"] for row in await run(dsn, "SELECT region, n FROM totals")}


async def test_a_statement_of_the_configuration_counts_per_key_whatever_shares_its_batch(
    counting: PostgresSink, dsn: str, seen: Statements
) -> None:
    seen.sql.clear()
    payloads = [count(("north", "south", "north")[n % 3]) for n in range(300)]
    assert list(await deliver(counting, payloads)) == [None] * 300
    assert await totals(dsn) == {"north": 200, "south": 100}
    assert list(await deliver(counting, [count("north", -200), count("east", 5)])) == [None] * 2
    assert await totals(dsn) == {"north": 0, "south": 100, "east": 5}
    assert not seen.like("BEGIN")


async def test_a_statement_keeps_its_place_among_rows(counting: PostgresSink, dsn: str) -> None:
    zero = PostgresPayload(table="totals", data={"region": "n", "n": 0}, op="upsert", conflict="region")
    payloads = [count("n", 7), zero, count("n", 1), count("n", 2), count("n", 3)]
    assert list(await deliver(counting, payloads)) == [None] * 5
    assert await totals(dsn) == {"n": 6}


async def test_of_many_statements_only_the_one_at_fault_is_refused_and_none_counts_twice(
    counting: PostgresSink, dsn: str
) -> None:
    payloads = [count("a") for _ in range(50)] + [count("b", 1_000), count("a"), count("c", "x"), count("b")]
    answers = await deliver(counting, payloads)
    refused = {index: answer for index, answer in enumerate(answers) if answer is not None}
    assert sorted(refused) == [50, 52, 53]
    assert "statement count (region=b, n=1000): CheckViolationError" in refused[50].error
    assert "statement count (region=c, n=x)" in refused[52].error
    assert refused[53].waits, "it would overtake the one of its key that is refused"
    assert await totals(dsn) == {"a": 51}


async def test_a_statement_that_notes_what_it_counted_counts_a_repeated_delivery_once(
    counting: PostgresSink, dsn: str
) -> None:
    payloads = [
        PostgresPayload(statement="count_once", data={"id": n, "region": "ab"[n % 2], "n": 1}) for n in range(40)
    ]
    assert list(await deliver(counting, payloads[:25])) == [None] * 25
    assert list(await deliver(counting, payloads)) == [None] * 40
    assert await totals(dsn) == {"a": 20, "b": 20}


async def test_values_are_bound_and_never_part_of_the_sql(counting: PostgresSink, dsn: str) -> None:
    evil = "x', 1); DROP TABLE totals; --"
    assert list(await deliver(counting, [count(evil), count(evil)])) == [None] * 2
    assert await totals(dsn) == {evil: 2}


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (
            PostgresPayload(statement="cuont", data={}),
            "statement 'cuont' is not configured in sinks.postgres.db.statements",
        ),
        (PostgresPayload(statement="x" * 10_000_000, data={}), "configured: count, count_once"),
        (PostgresPayload(statement="count", data={"n": 1}), "must have the fields region, n, got n"),
        (PostgresPayload(statement="count", data={"n": 1, "region": "", "m": 1}), "got m, n, region"),
        (PostgresPayload(statement="count"), "got nothing"),
        (PostgresPayload(statement="count", data={"n": 1, "region": "a\0"}), "'region' of statement count has a NUL"),
        (PostgresPayload(statement="count", data={"n": 1, "region": "\ud800"}), "lone surrogate"),
        (PostgresPayload(statement="count", data=[1, 2]), "data must be a model"),
        (PostgresPayload(statement="count", table="t", data={}), "not table, op, conflict or where"),
        (PostgresPayload(statement="count", op="upsert", data={}), "not table, op, conflict or where"),
        (PostgresPayload(statement=5, data={}), "statement 5 is not configured"),  # type: ignore[arg-type]
    ],
)
def test_a_payload_that_does_not_fit_its_statement_is_refused(payload: PostgresPayload, problem: str) -> None:
    made = make_sink("postgresql://nowhere/db", statements={"count": COUNT, "count_once": COUNT_ONCE})
    with pytest.raises((ValueError, TypeError), match=problem) as caught:
        made.encode(payload)
    assert len(str(caught.value)) < 500


async def test_a_wrong_statement_is_told_at_the_start_and_a_table_that_is_created_later_is_not(dsn: str) -> None:
    for sql, parameters, problem in (
        ("INSERT INTO t VALEUS ($1)", ["a"], r"statements\.s: PostgresSyntaxError.*correct sql"),
        ("SELECT 1; SELECT 2", [], r"statements\.s: .*multiple commands"),
        ("SELECT $1::int + $2::int", ["a"], r"statements\.s: sql has 2 parameters .* but parameters names 1"),
    ):
        sink = make_sink(dsn, statements={"s": {"sql": sql, "parameters": parameters}})
        with pytest.raises(ConfigError, match=problem):
            await sink.connect()
    sink = make_sink(dsn, statements={"s": {"sql": "INSERT INTO later VALUES ($1)", "parameters": ["a"]}})
    await sink.connect()
    payload = PostgresPayload(statement="s", data={"a": 1})
    (refused,) = await deliver(sink, [payload])
    assert refused is not None
    await run(dsn, "CREATE TABLE later (a int)")
    assert list(await deliver(sink, [payload, payload])) == [None, None]
    await sink.close()


async def test_a_statement_that_the_client_refuses_takes_no_rows_of_its_transaction_along(
    counting: PostgresSink, dsn: str
) -> None:
    await run(dsn, ORDERS)
    payloads = [order(1), count("a"), count("b", "x"), count("c"), order(2), count("d", 5_000), order(3)]
    answers = await deliver(counting, payloads)
    assert [index for index, answer in enumerate(answers) if answer is not None] == [2, 5]
    assert all(answer is None or not answer.retryable for answer in answers)
    assert await totals(dsn) == {"a": 1, "c": 1}
    assert [row["id"] for row in await run(dsn, "SELECT id FROM orders ORDER BY id")] == [1, 2, 3]


async def test_a_connection_that_breaks_before_the_end_leaves_nothing_of_a_batch_of_statements(
    counting: PostgresSink, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = asyncpg.Connection.executemany

    async def executemany(self: Any, query: str, *args: Any, **kwargs: Any) -> Any:
        await original(self, query, *args, **kwargs)
        self.terminate()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    batch = [order(1), *(count("a") for _ in range(5))]
    await run(dsn, ORDERS)
    with monkeypatch.context() as patched:
        patched.setattr(asyncpg.Connection, "executemany", executemany)
        with pytest.raises(RemoteError) as caught:
            await deliver(counting, batch)
    assert caught.value.retryable
    assert await totals(dsn) == {}
    assert list(await deliver(counting, batch)) == [None] * 6
    assert await totals(dsn) == {"a": 5}


async def test_a_failing_batch_falls_back_until_the_row_at_fault_is_named_and_the_others_are_there_once(
    sink: PostgresSink, dsn: str
) -> None:
    await run(dsn, ORDERS)
    await run(dsn, "CREATE TABLE log (at serial, id int, n int CHECK (n < 100))")
    entry = [PostgresPayload(table="log", data={"id": n, "n": n}) for n in (1, 2, 500, 3)]
    payloads = [order(1), *entry, order(1, "again"), order(2), PostgresPayload(table="log", data={"id": 9, "n": 9})]
    answers = await deliver(sink, payloads)
    assert [answer is None for answer in answers] == [True, True, True, False, True, False, True, True]
    check, double = answers[3], answers[5]
    assert check is not None
    assert double is not None
    assert not check.retryable
    assert "insert log (id=500, n=500): CheckViolationError" in check.error
    assert "UniqueViolationError" in double.error
    assert "insert orders (id=1, state=again)" in double.error
    assert [row["id"] for row in await run(dsn, "SELECT id FROM log ORDER BY at")] == [1, 2, 3, 9]
    assert [row["id"] for row in await run(dsn, "SELECT id FROM orders ORDER BY id")] == [1, 2]


async def test_several_rows_at_fault_in_a_large_batch_are_found(sink: PostgresSink, dsn: str, seen: Statements) -> None:
    await run(dsn, ORDERS)
    seen.sql.clear()
    bad = {17, 18, 400}
    answers = await deliver(sink, [order(n, None if n in bad else "x") for n in range(500)])  # type: ignore[arg-type]
    assert {n for n, answer in enumerate(answers) if answer is not None} == bad
    assert (await run(dsn, "SELECT count(*) FROM orders"))[0]["count"] == 497
    assert len(seen.like("INSERT")) < 80


async def test_a_value_of_the_wrong_type_is_its_rows_own_failure(sink: PostgresSink, dsn: str) -> None:
    await run(dsn, ORDERS)
    answers = await deliver(sink, [order(1), order("two"), order(3), order(10**30), order(5)])  # type: ignore[arg-type]
    assert [answer is None for answer in answers] == [True, False, True, False, True]
    assert "id=two" in str(answers[1])
    assert [row["id"] for row in await run(dsn, "SELECT id FROM orders ORDER BY id")] == [1, 3, 5]


async def test_a_value_that_the_client_cannot_represent_is_its_rows_own_failure(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    await run(dsn, ORDERS)
    await run(dsn, "CREATE TYPE address AS (street text, more jsonb)")
    await run(dsn, "CREATE TABLE people (id int PRIMARY KEY, home address, at int4range)")

    def person(id: int, **more: Any) -> PostgresPayload:
        return PostgresPayload(table="people", data={"id": id, **more})

    homes = [person(id, home=("street", {"x": 1})) for id in range(10, 110)]
    seen.sql.clear()
    answers = await deliver(sink, [order(1), person(1), *homes, person(2), person(3, at="one"), order(2)])
    refused = {n for n, answer in enumerate(answers) if answer is not None}
    assert refused == {*range(2, 102), 103}
    for n in (2, 101):
        answer = answers[n]
        assert answer is not None
        assert not answer.retryable
        assert f"id={n + 8}" in answer.error
        assert "UnsupportedClientFeatureError" in answer.error
    assert "id=3" in str(answers[103])
    # The whole column is at fault: nobody looks for single rows.
    assert len(seen.sql) < 30
    assert [row["id"] for row in await run(dsn, "SELECT id FROM people ORDER BY id")] == [1, 2]
    # One alone, without a transaction around it.
    (alone,) = await deliver(sink, homes[:1])
    assert alone is not None
    assert not alone.retryable
    assert list(await deliver(sink, [person(4)])) == [None]


async def test_errors_of_the_client_are_retryable_if_its_connection_cannot_be_used(
    sink: PostgresSink, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(dsn, ORDERS)
    original = asyncpg.Connection.execute

    async def execute(self: Any, query: str, *args: Any, **kwargs: Any) -> Any:
        if query.startswith("INSERT"):
            self.terminate()
        return await original(self, query, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(asyncpg.Connection, "execute", execute)
        with pytest.raises(RemoteError, match="closed") as caught:
            await sink.send([sink.encode(order(1)), sink.encode(order(2))])
    assert caught.value.retryable
    assert list(await deliver(sink, [order(1), order(2)])) == [None] * 2


async def test_what_fails_only_when_the_transaction_ends_is_found_too(sink: PostgresSink, dsn: str) -> None:
    await run(dsn, ORDERS)
    await run(
        dsn, "CREATE TABLE parts (id int PRIMARY KEY, parent int REFERENCES orders DEFERRABLE INITIALLY DEFERRED)"
    )
    parts = [
        PostgresPayload(table="parts", data={"id": n, "parent": parent}) for n, parent in ((1, 1), (2, 77), (3, 1))
    ]
    answers = await deliver(sink, [order(1), *parts, order(2)])
    assert [answer is None for answer in answers] == [True, True, False, True, True]
    assert "ForeignKeyViolationError" in str(answers[2])
    assert [row["id"] for row in await run(dsn, "SELECT id FROM parts ORDER BY id")] == [1, 3]


async def test_a_table_or_column_that_is_not_there_refuses_its_rows_at_once(
    sink: PostgresSink, dsn: str, seen: Statements
) -> None:
    await run(dsn, ORDERS)
    seen.sql.clear()
    nowhere = [PostgresPayload(table="nowhere", data={"id": n}) for n in range(200)]
    answers = await deliver(sink, [order(1), *nowhere, order(2)])
    assert [answers[0], answers[-1]] == [None, None]
    assert all(answer is not None and not answer.retryable and "nowhere" in answer.error for answer in answers[1:-1])
    assert len(seen.like("INSERT")) < 8


async def test_after_a_refusal_later_rows_of_its_key_wait_for_the_decision(sink: PostgresSink, dsn: str) -> None:
    await run(dsn, ORDERS)
    answers = await deliver(sink, [upsert(1, None), upsert(1, "later"), upsert(2, "x")])  # type: ignore[arg-type]
    assert answers[2] is None
    assert answers[0] is not None
    assert not answers[0].retryable
    assert isinstance(answers[1], Refusal)
    assert answers[1].retryable
    assert [row["id"] for row in await run(dsn, "SELECT id FROM orders")] == [2]


class Color(enum.Enum):
    RED = "red"


class Everything(pydantic.BaseModel):
    id: int
    color: Color
    amount: decimal.Decimal
    at: datetime.datetime
    day: datetime.date
    ref: uuid.UUID
    tags: list[str]
    extra: dict[str, Any]
    listed: list[Any]
    raw: bytes
    text: str
    none: str | None = None


async def test_models_keep_their_types_and_containers_become_arrays_or_json_as_the_column_says(
    sink: PostgresSink, dsn: str
) -> None:
    await run(
        dsn,
        "CREATE TABLE every (id int, color text, amount numeric, at timestamptz, day date, ref uuid, tags text[], "
        'extra jsonb, listed json, raw bytea, text jsonb, "none" text)',
    )
    model = Everything(
        id=1,
        color=Color.RED,
        amount=decimal.Decimal("1.10"),
        at=datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC),
        day=datetime.date(2026, 1, 2),
        ref=uuid.UUID(int=7),
        tags=["a", "b"],
        extra={"when": datetime.date(2026, 1, 2), "n": [1]},
        listed=[1, {"x": None}],
        raw=b"\x00\xff",
        text='as "json"',
    )
    assert list(await deliver(sink, [PostgresPayload(table="every", data=model)])) == [None]
    (row,) = await run(dsn, "SELECT * FROM every")
    assert dict(row) == {
        **model.model_dump(exclude={"color", "extra", "listed", "text"}),
        "color": "red",
        "text": r'"as \"json\""',
        "extra": '{"n": [1], "when": "2026-01-02"}',
        "listed": '[1,{"x":null}]',
    }


@pytest.mark.parametrize(
    "payload",
    [
        PostgresPayload(table="", data={"a": 1}),
        PostgresPayload(table="a.b.c", data={"a": 1}),
        PostgresPayload(table='a"b', data={"a": 1}),
        PostgresPayload(table="a\n", data={"a": 1}),
        PostgresPayload(table="1a", data={"a": 1}),
        PostgresPayload(table="t\u00e9", data={"a": 1}),
        PostgresPayload(table="t", data={"a\n": 1}),
        PostgresPayload(table="t", data={"a b": 1}),
        PostgresPayload(table="t", data={}),
        PostgresPayload(table="t", data={1: 1}),
        PostgresPayload(table="t", data=[1]),
        PostgresPayload(table="t", data=b"[1]"),
        PostgresPayload(table="t", data=b"{"),
        PostgresPayload(table="t", data={"a": 1}, op="delete"),
        PostgresPayload(table="t", data={"a": 1}, op="delete", where={"a": 1}),
        PostgresPayload(table="t", op="delete"),
        PostgresPayload(table="t", op="delete", where={}),
        PostgresPayload(table="t", data={"a": 1}, op="statement"),  # type: ignore[arg-type]
        PostgresPayload(table="t", data={"a": 1}, op="upsert"),
        PostgresPayload(table="t", data={"a": 1}, op="upsert", conflict=["b"]),
        PostgresPayload(table="t", data={"a": 1}, op="upsert", conflict=["a; --"]),
        PostgresPayload(table="t", data={"a": 1}, op="update"),
        PostgresPayload(table="t", data={"a": 1}, op="update", where={}),
        PostgresPayload(table="t", data={"a": 1}, op="update", where={"a\n": 1}),
        PostgresPayload(table="t", data={"a": 1}, op="update", where=[1]),  # type: ignore[arg-type]
        PostgresPayload(table="t", data={"a": 1}, op="update", where={"b": 1}, conflict=["a"]),
        PostgresPayload(table="t", data={"a": 1}, where={"b": 1}),
        PostgresPayload(table="t", data={"a": [object()]}),
    ],
)
def test_what_is_not_a_usable_row_is_refused_before_it_is_sent(payload: PostgresPayload) -> None:
    with pytest.raises((ValueError, TypeError)):
        make_sink("postgresql://nowhere/db").encode(payload)


def test_an_unknown_operation_is_told_with_those_there_are() -> None:
    payload = PostgresPayload(table="t", data={"a": 1}, op="replace")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown op 'replace'; use one of insert, upsert, update, delete"):
        make_sink("postgresql://nowhere/db").encode(payload)


async def test_reserved_words_are_names_like_others(sink: PostgresSink, dsn: str) -> None:
    await run(dsn, 'CREATE TABLE "order" ("user" int PRIMARY KEY, "End" text)')
    row = PostgresPayload(table="order", data={"user": 1, "End": "x"}, op="upsert", conflict="user")
    assert list(await deliver(sink, [row, row])) == [None] * 2


async def test_an_error_says_what_is_wrong_with_a_row_and_not_what_is_in_it(sink: PostgresSink, dsn: str) -> None:
    await run(dsn, "CREATE TABLE log (id int PRIMARY KEY, n int NOT NULL CHECK (n < 100), hidden text)")
    await run(dsn, "CREATE VIEW few AS SELECT * FROM log WHERE id < 10 WITH CHECK OPTION")
    rows = [("log", 1, 500), ("log", 2, None), ("few", 11, 1), ("log", 3, 1), ("log", 3, 1)]
    payloads = [
        PostgresPayload(table=table, data={"id": key, "n": n, "hidden": "do not tell"}) for table, key, n in rows
    ]
    texts = [answer.error for answer in await deliver(sink, payloads) if answer is not None]
    for text, kind in zip(texts, ("CheckViolation", "NotNullViolation", "WithCheckOption", "Unique"), strict=True):
        assert kind in text
        _, _, server_said = text.partition(kind)
        assert "do not tell" not in server_said
    assert texts[-1].endswith("(Key (id)=(3) already exists.)")


async def test_a_wrong_password_an_unknown_database_and_no_server_are_told_without_the_password(
    postgres: PostgresServer, database: str
) -> None:
    right = postgres.tcp_url(database)
    for dsn, kind in (
        (right.replace("hunter2", "hunter%403"), ConfigError),
        (right.replace(database, "hunter3db"), ConfigError),
        (right.replace(str(postgres.port), str(free_port())), RemoteError),
        (right.replace("127.0.0.1", "host.invalid"), RemoteError),
        (right + "?sslmode=nonsense&password=hunter3", ConfigError),
    ):
        with pytest.raises(kind, match=r"sinks\.postgres\.db: postgresql://\*\*\*@") as caught:
            await make_sink(dsn).connect()
        assert "hunter2" not in str(caught.value)
        assert "hunter@3" not in str(caught.value)
        assert "hunter3&" not in str(caught.value)


async def test_rows_that_were_committed_before_the_connection_broke_stay_confirmed(
    postgres: PostgresServer, database: str, proxy: Callable[[int], FaultyProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert postgres.port
    between = proxy(postgres.port)
    await run(postgres.url(database), ORDERS)
    sink = make_sink(postgres.tcp_url(database, between.port))
    await sink.connect()
    original = asyncpg.Connection.execute

    async def execute(self: Any, query: str, *args: Any, **kwargs: Any) -> Any:
        if args == (3, "new"):
            await asyncio.to_thread(between.down)
        return await original(self, query, *args, **kwargs)

    monkeypatch.setattr(asyncpg.Connection, "execute", execute)
    good, bad, later = await deliver(sink, [order(1), order(None), order(3)])  # type: ignore[arg-type]
    assert good is None
    assert bad is not None
    assert not bad.retryable
    assert later is not None
    assert later.retryable
    monkeypatch.undo()
    between.up()
    await deliver_at_last(sink, [order(3)])
    assert [row["id"] for row in await run(postgres.url(database), "SELECT id FROM orders ORDER BY id")] == [1, 3]
    await sink.close()


async def test_a_server_that_restarts_is_used_again_without_a_new_connect(postgres: PostgresServer) -> None:
    server = PostgresServer()
    try:
        await run(server.url(), ORDERS)
        sink = make_sink(server.url())
        await sink.connect()
        await deliver(sink, [order(1)])
        await asyncio.to_thread(server.stop, "immediate")
        with pytest.raises(RemoteError) as caught:
            await deliver(sink, [order(2)])
        assert caught.value.retryable
        await asyncio.to_thread(server.start)
        await deliver_at_last(sink, [order(2)])
        assert [row["id"] for row in await run(server.url(), "SELECT id FROM orders ORDER BY id")] == [1, 2]
        await sink.close()
    finally:
        await asyncio.to_thread(server.remove)


async def test_conflicts_of_transactions_locks_and_shutdowns_are_retryable(sink: PostgresSink, dsn: str) -> None:
    await run(dsn, ORDERS)
    await run(dsn, "CREATE TABLE raised (state text)")
    await run(
        dsn,
        "CREATE FUNCTION fail() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION USING ERRCODE = NEW.state; END $$ "
        "LANGUAGE plpgsql",
    )
    await run(dsn, "CREATE TRIGGER fail BEFORE INSERT ON raised FOR EACH ROW EXECUTE FUNCTION fail()")
    for state in ("40001", "40P01", "55P03", "53300", "57014", "25006"):
        with pytest.raises(RemoteError) as caught:
            await deliver(sink, [order(1), PostgresPayload(table="raised", data={"state": state})])
        assert caught.value.retryable
    for state in ("P0001", "22000", "23514", "42501", "44000"):
        ok, bad = await deliver(sink, [upsert(1, state), PostgresPayload(table="raised", data={"state": state})])
        assert ok is None
        assert bad is not None
        assert not bad.retryable


async def test_closing_ends_the_connections_that_a_handler_still_holds(sink: PostgresSink, monkeypatch: Any) -> None:
    monkeypatch.setattr("tidemill.sinks.postgres.CLOSE_SECONDS", 0.1)
    assert sink.pool is not None
    held = await sink.pool.acquire()
    async with asyncio.timeout(30):
        await sink.close()
    with pytest.raises(asyncpg.InterfaceError, match="released"):
        await held.execute("SELECT 1")
    assert sink.pool is None
    with pytest.raises(RemoteError, match="not connected"):
        await sink.send([sink.encode(order(1))])
