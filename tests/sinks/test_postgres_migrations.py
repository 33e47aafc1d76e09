"""The PostgreSQL sink while a migration replaces the types that it writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import asyncpg
import pytest
from tests.pgbouncer import PgBouncer
from tests.sinks.test_postgres_sink import make_sink, run
from tests.store.server import PostgresServer

from tidemill.sinks.payloads import PostgresPayload
from tidemill.sinks.postgres import PostgresSink
from tidemill.testing.contract import deliver


class Migration(NamedTuple):
    """Of the column `v`: its type with a value, and what replaces the type with a value that only the new one takes."""

    types: str
    column: str
    before: Any
    change: str
    after: Any


REPLACED_ENUM = "ALTER TYPE kind RENAME TO kind_old; CREATE TYPE kind AS ENUM ('a', 'b'); "
MIGRATIONS = {
    "an enum": Migration(
        "CREATE TYPE kind AS ENUM ('a')", "kind", "a",
        REPLACED_ENUM + "ALTER TABLE t ALTER v TYPE kind USING v::text::kind; DROP TYPE kind_old", "b",
    ),
    "an enum that is kept under another name": Migration(
        "CREATE TYPE kind AS ENUM ('a')", "kind", "a",
        REPLACED_ENUM + "ALTER TABLE t ALTER v TYPE kind USING v::text::kind", "b",
    ),
    "an array of an enum": Migration(
        "CREATE TYPE kind AS ENUM ('a')", "kind[]", ["a"],
        REPLACED_ENUM + "ALTER TABLE t ALTER v TYPE kind[] USING v::text[]::kind[]; DROP TYPE kind_old", ["b"],
    ),
    "a domain": Migration(
        "CREATE DOMAIN kind AS int", "kind", 1,
        "ALTER DOMAIN kind RENAME TO kind_old; CREATE DOMAIN kind AS bigint; "
        "ALTER TABLE t ALTER v TYPE kind USING v::bigint::kind; DROP DOMAIN kind_old", 2**40,
    ),
    "a domain's constraint": Migration(
        "CREATE DOMAIN kind AS text CHECK (value <> 'b')", "kind", "a",
        "ALTER DOMAIN kind RENAME TO kind_old; CREATE DOMAIN kind AS text; "
        "ALTER TABLE t ALTER v TYPE kind USING v::text::kind", "b",
    ),
    "a composite type": Migration(
        "CREATE TYPE kind AS (x int)", "kind", (1,),
        "ALTER TYPE kind RENAME TO kind_old; CREATE TYPE kind AS (x int, y text); "
        "ALTER TABLE t ALTER v TYPE kind USING NULL; DROP TYPE kind_old", (1, "b"),
    ),
    "a composite type in place": Migration(
        "CREATE TYPE kind AS (x int)", "kind", (1,), "ALTER TYPE kind ADD ATTRIBUTE y text CASCADE", (1, "b")
    ),
    "an extension": Migration(
        "CREATE EXTENSION vector", "vector(2)", "[1,2]",
        "ALTER TABLE t ALTER v TYPE text; DROP EXTENSION vector; CREATE EXTENSION vector; "
        "ALTER TABLE t ALTER v TYPE vector(3) USING NULL", "[1,2,3]",
    ),
    "a column": Migration("", "int", 1, "ALTER TABLE t ALTER v TYPE bigint", 2**40),
    "a column by another kind": Migration(
        "", "text", "a", "CREATE TYPE kind AS ENUM ('a', 'b'); ALTER TABLE t ALTER v TYPE kind USING v::kind", "b"
    ),
}  # fmt: skip


#: One of each way in which the old type shows: dropped, kept, outdated in the client, another kind.
QUICK = ("an enum", "an enum that is kept under another name", "a composite type in place", "a column by another kind")


def one(number: int, value: Any) -> list[PostgresPayload]:
    return [PostgresPayload(table="t", data={"n": number, "v": value})]


def several(number: int, value: Any) -> list[PostgresPayload]:
    return [PostgresPayload(table="t", data={"n": number + each, "v": value}) for each in range(5)]


def statements(number: int, value: Any) -> list[PostgresPayload]:
    return [PostgresPayload(statement="add", data={"n": number, "v": value})]


async def connect(dsn: str) -> PostgresSink:
    add = {"sql": "INSERT INTO t (n, v) VALUES ($1, $2) RETURNING v", "parameters": ["n", "v"]}
    sink = make_sink(dsn, statements={"add": add}, pool_min=2)
    await sink.connect()
    return sink


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in MIGRATIONS]
)
async def test_rows_after_a_migration_are_written(postgres: PostgresServer, database: str, name: str) -> None:
    dsn = postgres.url(database)
    migration = MIGRATIONS[name]
    await run(dsn, f"{migration.types}; CREATE TABLE t (n int, v {migration.column})")
    sink = await connect(dsn)
    ways = (one, several, statements)
    for number, way in enumerate(ways):
        assert not any(await deliver(sink, way(100 * number, migration.before)))

    await run(dsn, migration.change)

    for number, way in enumerate(ways):
        for each in (10, 20):
            assert not any(await deliver(sink, way(100 * number + each, migration.after))), way
    [[count, distinct]] = await run(dsn, "SELECT count(*), count(DISTINCT n) FROM t")
    assert count == distinct == 3 * 7
    await sink.close()


async def test_a_bad_row_after_a_migration_is_the_only_one_refused(postgres: PostgresServer, database: str) -> None:
    dsn = postgres.url(database)
    migration = MIGRATIONS["an enum"]
    await run(dsn, f"{migration.types}; CREATE TABLE t (n int, v {migration.column})")
    sink = await connect(dsn)
    await deliver(sink, several(0, "a"))
    await run(dsn, migration.change)

    answers = await deliver(sink, [*several(10, "b"), *one(20, "c"), *several(30, "b")])

    assert [index for index, answer in enumerate(answers) if answer is not None] == [5]
    assert answers[5] is not None
    assert not answers[5].retryable
    await sink.close()


async def test_connections_from_before_a_migration_are_not_used_again(postgres: PostgresServer, database: str) -> None:
    dsn = postgres.url(database)
    migration = MIGRATIONS["an enum"]
    await run(dsn, f"{migration.types}; CREATE TABLE t (n int, v {migration.column})")
    sink = await connect(dsn)
    assert sink.pool is not None

    async def pids() -> set[int]:
        assert sink.pool is not None
        async with sink.pool.acquire() as first, sink.pool.acquire() as second:
            return {first.get_server_pid(), second.get_server_pid()}

    before = await pids()
    await deliver(sink, one(0, "a"))
    await run(dsn, migration.change)
    assert list(await deliver(sink, one(1, "b"))) == [None]
    assert not before & await pids()
    await sink.close()


async def test_an_internal_error_of_another_kind_is_the_verdict_at_once(
    postgres: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = postgres.url(database)
    await run(
        dsn,
        "CREATE TABLE t (n int, v text); CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'broken' USING ERRCODE = 'XX000'; END $$; "
        "CREATE TRIGGER fail BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION fail()",
    )
    sink = await connect(dsn)
    reloads: list[object] = []
    monkeypatch.setattr(asyncpg.Connection, "reload_schema_state", lambda self: _note(reloads))
    [answer] = await deliver(sink, one(0, "a"))
    assert answer is not None
    assert not answer.retryable
    assert reloads == []
    await sink.close()


async def _note(reloads: list[object]) -> None:
    reloads.append(None)


async def test_a_bad_row_costs_one_reload_in_a_batch(
    postgres: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = postgres.url(database)
    await run(dsn, "CREATE TABLE t (n int, v int)")
    sink = await connect(dsn)
    reloads: list[object] = []
    monkeypatch.setattr(asyncpg.Connection, "reload_schema_state", lambda self: _note(reloads))
    answers = await deliver(sink, [*several(0, 1), *one(5, "x"), *several(10, 1), *one(15, "y")])
    assert [index for index, answer in enumerate(answers) if answer is not None] == [5, 11]
    assert len(reloads) == 1
    await sink.close()


@pytest.fixture
def pooler(postgres: PostgresServer) -> Iterator[Callable[[], PgBouncer]]:
    started: list[PgBouncer] = []

    def start() -> PgBouncer:
        started.append(PgBouncer(postgres, "transaction"))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.parametrize("name", ["an enum", "a composite type in place"])
async def test_rows_after_a_migration_are_written_behind_a_pooler(
    postgres: PostgresServer, database: str, pooler: Callable[[], PgBouncer], name: str
) -> None:
    direct = postgres.url(database)
    migration = MIGRATIONS[name]
    await run(direct, f"{migration.types}; CREATE TABLE t (n int, v {migration.column})")
    sink = await connect(pooler().url(database))
    batches: Sequence[Callable[[int, Any], list[PostgresPayload]]] = (one, several)
    for batch in batches:
        await deliver(sink, batch(0, migration.before))
    await run(direct, migration.change)
    for batch in batches:
        assert not any(await deliver(sink, batch(10, migration.after)))
    await sink.close()


@pytest.mark.long
async def test_migrations_under_load_refuse_no_row(postgres: PostgresServer, database: str) -> None:
    dsn = postgres.url(database)
    await run(dsn, "CREATE TYPE kind AS ENUM ('a', 'b'); CREATE TABLE t (n int, v kind)")
    sink = await connect(dsn)
    written = 0

    async def migrate() -> None:
        for _ in range(10):
            start = written
            while written < start + 10:
                await asyncio.sleep(0)
            await run(
                dsn,
                "BEGIN; ALTER TYPE kind RENAME TO kind_old; CREATE TYPE kind AS ENUM ('a', 'b'); "
                "ALTER TABLE t ALTER v TYPE kind USING v::text::kind; DROP TYPE kind_old; COMMIT",
            )

    migrating = asyncio.create_task(migrate())
    while not migrating.done():
        batch = [*one(written, "a"), *several(written + 1, "b")] if written % 2 else one(written, "b")
        assert not any(await deliver(sink, batch))
        written += len(batch)
    await migrating
    assert await run(dsn, "SELECT count(*) FROM t") == [(written,)]
    await sink.close()
