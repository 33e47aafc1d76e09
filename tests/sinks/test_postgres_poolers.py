"""The PostgreSQL sink, and the pool of hooks, behind a real PgBouncer of each kind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.faults import FaultyProxy
from tests.pgbouncer import VERSIONS, PgBouncer
from tests.sinks import test_postgres_sink
from tests.sinks.test_postgres_sink import make_sink, run
from tests.store.server import PostgresServer

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.sinks import postgres as postgres_sink
from tidemill.sinks import postgres_connections
from tidemill.sinks.payloads import PostgresPayload
from tidemill.sinks.postgres_connections import PoolerFoundError
from tidemill.testing.contract import deliver, deliver_at_last

MODES = (pytest.param("session", marks=pytest.mark.long), "transaction")
Start = Callable[..., PgBouncer]


@pytest.fixture
def pooler(postgres: PostgresServer) -> Iterator[Start]:
    """Return a function that puts a PgBouncer in front of the shared server; all end with the test."""
    started: list[PgBouncer] = []

    def start(*args: Any, **options: Any) -> PgBouncer:
        started.append(PgBouncer(postgres, *args, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each connection number its statements from 1, as the first connection of every process does."""
    numbers: dict[Any, itertools.count[int]] = {}

    def name(self: Any, prefix: str) -> str:
        return f"__asyncpg_{prefix}_{next(numbers.setdefault(self, itertools.count(1)))}__"

    monkeypatch.setattr(asyncpg.Connection, "_get_unique_id", name)


def rows(table: str, first: int, count: int, **more: Any) -> list[PostgresPayload]:
    return [PostgresPayload(table=table, data={"n": n, "who": table, **more}) for n in range(first, first + count)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("as_processes")
async def test_rows_of_busy_clients_get_into_their_own_tables(
    pooler: Start, postgres: PostgresServer, database: str, mode: str, version: str
) -> None:
    direct = postgres.url(database)
    await run(direct, "CREATE TABLE a (n int, who text, state text); CREATE TABLE b (n int, who text, state text)")
    behind = pooler(mode, version, default_pool_size=4, **({"max_prepared_statements": 50} if version == "new" else {}))
    sinks = {table: make_sink(behind.url(database)) for table in "ab"}
    for sink in sinks.values():
        await sink.connect()

    async def deliver_all(table: str, offset: int) -> None:
        for first in range(offset, 300, 30):
            # Of each size there is another statement; a second shape makes it a transaction of several.
            size = 1 + first // 30 % 12
            batch = [*rows(table, first, size), *rows(table, first + size, 15 - size, state="new")]
            await deliver_at_last(sinks[table], batch)

    await asyncio.gather(*[deliver_all(table, offset) for table in "ab" for offset in (0, 15)])
    for table, sink in sinks.items():
        found = await run(direct, f"SELECT n, who FROM {table} ORDER BY n")
        assert [tuple(row) for row in found] == [(n, table) for n in range(300)]
        await sink.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_statement_mode_is_refused_by_name(pooler: Start, database: str, version: str) -> None:
    sink = make_sink(pooler("statement", version).url(database))
    with pytest.raises(ConfigError, match="pool_mode"):
        await sink.connect()
    assert sink.pool is None


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_login_that_the_pooler_refuses_is_a_mistake_in_the_configuration(
    pooler: Start, database: str, version: str, tmp_path: Path
) -> None:
    behind = pooler("transaction", version, auth_type="plain", auth_file=make_users(tmp_path))
    for user, name in (("app:wrong", database), ("nobody:hunter2", database), ("app:hunter2", "nowhere")):
        with pytest.raises(ConfigError) as caught:
            await make_sink(f"postgresql://{user}@127.0.0.1:{behind.port}/{name}").connect()
        assert "hunter2" not in str(caught.value)
    sink = make_sink(f"postgresql://app:hunter2@127.0.0.1:{behind.port}/{database}")
    await sink.connect()
    await sink.close()


async def test_a_pooler_without_room_for_a_client_is_tried_again(pooler: Start, database: str) -> None:
    behind = pooler("transaction", max_client_conn=1)
    first = await asyncpg.connect(behind.url(database), statement_cache_size=0)
    with pytest.raises(RemoteError) as caught:
        await make_sink(behind.url(database)).connect()
    assert caught.value.retryable
    await first.close()


def make_users(folder: Path) -> Path:
    users = folder / "users"
    users.write_text('"app" "hunter2"\n')
    users.chmod(0o644)
    return users


@pytest.mark.long
class TestContractBehindAPooler(test_postgres_sink.TestPostgresContract):
    @pytest.fixture(autouse=True)
    def _pooler(
        self, pooler: Start, postgres: PostgresServer, proxy: Callable[[int], FaultyProxy], tmp_path: Path
    ) -> None:
        behind = pooler("transaction", auth_type="plain", auth_file=make_users(tmp_path))
        self.between = proxy(behind.port)
        self.dsn = self.dsn.replace(self.dsn.split("@")[1].split("/")[0], f"127.0.0.1:{self.between.port}")


async def test_the_row_at_fault_is_found_behind_a_pooler(
    pooler: Start, postgres: PostgresServer, database: str
) -> None:
    direct = postgres.url(database)
    await run(direct, "CREATE TABLE a (n int CHECK (n <> 7), who text)")
    statements = {"add": {"sql": "INSERT INTO a (n) VALUES ($1) RETURNING n", "parameters": ["n"]}}
    sink = make_sink(pooler("transaction").url(database), statements=statements)
    await sink.connect()
    calls = [PostgresPayload(statement="add", data={"n": n}) for n in (100, 7, 101)]
    unknown = [PostgresPayload(table="nowhere", data={"n": 1})]
    wrong = [PostgresPayload(table="a", data={"n": "one"})]

    answers = await deliver(sink, [*rows("a", 0, 10), *calls, *unknown, *wrong, *rows("a", 10, 1)])

    assert [index for index, answer in enumerate(answers) if answer is not None] == [7, 11, 13, 14]
    assert [row[0] for row in await run(direct, "SELECT n FROM a ORDER BY n")] == [*range(7), 8, 9, 10, 100, 101]
    await sink.close()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.usefixtures("as_processes")
async def test_hooks_can_use_their_pool_behind_a_pooler(
    pooler: Start, postgres: PostgresServer, database: str, version: str
) -> None:
    kinds = "CREATE TYPE mood AS ENUM ('good', 'bad'); CREATE TYPE place AS (x int, m mood)"
    await run(postgres.url(database), f"{kinds}; CREATE TABLE a (n int, m mood, p place)")
    behind = pooler("transaction", version, default_pool_size=4)
    # What one transaction leaves in a session is gone, or another client's.
    clients = [make_sink(behind.url(database)) for _ in range(3)]

    async def use(pool: asyncpg.Pool, number: int) -> None:
        for n in range(number, 60, len(clients)):
            assert await pool.fetchval("SELECT $1::int + 1", n) == n + 1
            await pool.execute("INSERT INTO a VALUES ($1, $2, $3)", n, "good", (n, "bad"))
            [row] = await pool.fetch("SELECT n, m, p FROM a WHERE n = $1", n)
            assert (row["n"], row["m"], tuple(row["p"])) == (n, "good", (n, "bad"))
        async with pool.acquire() as connection:
            statement = await connection.prepare("SELECT $1::text")
            await asyncio.sleep(0)
            assert await statement.fetchval("one") == "one"
            assert await connection.fetchval("SELECT $1::int", 2) == 2
            assert await statement.fetchval("three") == "three"
            async with connection.transaction():
                await connection.executemany("INSERT INTO a (n) VALUES ($1)", [(1000,), (1001,)])
                many = await connection.prepare("SELECT generate_series(1, $1)")
                assert [row[0] async for row in many.cursor(120)] == list(range(1, 121))
            await connection.copy_records_to_table("a", records=[(2000, "bad")], columns=["n", "m"])
            assert (await connection.fetchrow("SELECT $1::mood AS m", "bad"))["m"] == "bad"

    for client in clients:
        await client.connect()
    await asyncio.gather(*[use(client.pool, number) for number, client in enumerate(clients)])
    [row] = await run(postgres.url(database), "SELECT count(*) FROM a")
    assert row[0] == 60 + 3 * len(clients)
    for client in clients:
        await client.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_numbers_and_json_are_the_same_behind_a_pooler(
    pooler: Start, postgres: PostgresServer, database: str, version: str
) -> None:
    await run(postgres.url(database), "CREATE TABLE v (id int, n numeric, many numeric[], j jsonb)")
    sink = make_sink(pooler("transaction", version, default_pool_size=2).url(database))
    await sink.connect()
    for first, count in ((0, 1), (1, 3)):
        values = [{"n": 19.99, "many": [2.675], "j": each} for each in ("null", b"null", {"a": 1})[:count]]
        payloads = [PostgresPayload(table="v", data={"id": n, **each}) for n, each in enumerate(values, first)]
        assert list(await deliver(sink, payloads)) == [None] * count
    assert sink.pool is not None
    found = await sink.pool.fetch("SELECT n, many, j FROM v ORDER BY id")
    assert {(str(row["n"]), str(row["many"][0])) for row in found} == {("19.99", "2.675")}
    assert [row["j"] for row in found] == ['"null"', '"null"', "null", '{"a": 1}']
    await sink.close()


async def test_what_a_pooler_cannot_carry_is_refused_to_hooks_by_name(pooler: Start, database: str) -> None:
    sink = make_sink(pooler("transaction").url(database))
    await sink.connect()
    assert sink.pool is not None
    async with sink.pool.acquire() as connection:
        with pytest.raises(asyncpg.InterfaceError, match="cursor"):
            connection.cursor("SELECT 1")
        with pytest.raises(asyncpg.InterfaceError, match="add_listener"):
            await connection.add_listener("news", print)
        with pytest.raises(asyncpg.InterfaceError, match="mine"):
            await connection.prepare("SELECT 1", name="mine")
        assert await connection.fetchval("SELECT $1::int", 1) == 1
    await sink.close()


async def test_a_pooler_that_comes_in_between_later_is_noticed(
    pooler: Start, postgres: PostgresServer, database: str, proxy: Callable[[int], FaultyProxy]
) -> None:
    assert postgres.port
    between = proxy(postgres.port)
    sink = make_sink(postgres.tcp_url(database, between.port))
    await run(postgres.url(database), "CREATE TABLE a (n int, who text)")
    await sink.connect()
    assert list(await deliver(sink, rows("a", 0, 1))) == [None]

    between.target_port = pooler("transaction").port
    between.down()
    between.up()

    for _ in range(3):  # the connections of before break first
        with pytest.raises(RemoteError) as caught:
            await deliver(sink, rows("a", 1, 1))
    assert isinstance(caught.value.__cause__, PoolerFoundError)
    await sink.close()


async def test_a_pooler_whose_server_does_not_answer_is_given_up_in_time(
    pooler: Start, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connections, "CONNECT_SECONDS", 0.5)
    behind = pooler("transaction", default_pool_size=1)
    holder = await asyncpg.connect(behind.url(database), statement_cache_size=0)
    await holder.execute("BEGIN")  # has the only connection to the server

    sink = make_sink(behind.url(database))
    async with asyncio.timeout(10):
        with pytest.raises(RemoteError) as caught:
            await sink.connect()
    assert caught.value.retryable
    await holder.close()
    await sink.connect()
    await sink.close()


async def test_a_frozen_pooler_takes_no_connection_of_the_pool_for_ever(
    pooler: Start, postgres: PostgresServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(postgres.url(database), "CREATE TABLE a (n int, who text)")
    behind = pooler("transaction")
    sink = make_sink(behind.url(database))
    await sink.connect()
    for module in (postgres_connections, postgres_sink):
        monkeypatch.setattr(module, "CONNECT_SECONDS", 0.5)
    behind.freeze()
    for n in range(4):  # more than the pool has connections
        with pytest.raises((RemoteError, TimeoutError)):
            async with asyncio.timeout(1):
                await deliver(sink, rows("a", n, 1))
    behind.thaw()
    await deliver_at_last(sink, rows("a", 0, 10))
    found = await run(postgres.url(database), "SELECT DISTINCT n FROM a ORDER BY n")
    assert [row[0] for row in found] == list(range(10))
    await sink.close()
