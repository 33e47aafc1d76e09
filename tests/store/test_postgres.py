"""The PostgreSQL store: durable whatever the server's defaults are, and outages fail nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import asyncpg
import pytest
import structlog
from sqlalchemy import Connection
from tests.pgbouncer import VERSIONS, PgBouncer
from tests.store.helpers import NOW_US, Outcomes, all_events, claim, claimed, new_session, registered
from tests.store.server import PostgresServer
from tests.until import slack, until

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.retry import Backoff
from tidemill.core.tasks.inputs import Channel
from tidemill.core.triggers.event_plan import EventStored, NewEvent
from tidemill.core.triggers.group_commit import CommitLimits, ProducerStanding
from tidemill.store.database import StoreAwayError
from tidemill.store.database_events import DatabaseEvents
from tidemill.store.engines.opening import open_reader, open_store
from tidemill.store.engines.postgres import PostgresDatabase, open_postgres
from tidemill.store.engines.postgres_doorbell import PostgresDoorbell
from tidemill.store.group_commit import EventStore
from tidemill.store.queries.triggers.cursors import lock_cursors
from tidemill.store.queries.triggers.events import count_events, store_events
from tidemill.store.queries.triggers.triggers import (
    cancel_unlisted,
    claim_triggers,
    register_triggers,
    report_triggers,
    store_serialized,
)
from tidemill.store.records import TriggerReport, TriggerSpec, TriggerState
from tidemill.store.statements import execute_text

T = TypeVar("T")
#: Short, so that the tests are short.
LIMITS = CommitLimits(outage_seconds=0.5, backoff=Backoff(0.05, 0.3))


class Feed:
    """Adds numbered events for as long as the store is open, as a producer does."""

    def __init__(self, database: PostgresDatabase, tokens: dict[int, int], limits: CommitLimits = LIMITS) -> None:
        self.standings: list[ProducerStanding] = []
        self.outcomes = Outcomes()
        self.store = EventStore(DatabaseEvents(database), self.standings.append, limits)
        self.store.start()
        self._tokens = tokens
        self.added = 0
        self.producing = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self.store.wait_open()
            for trigger_id, token in self._tokens.items():
                # Without an identity, so that an event that is stored twice would be seen.
                self.store.add(trigger_id, token, str(self.added), None, self.outcomes.of(self.added))
            self.added += 1
            await asyncio.sleep(0.001)

    async def end(self) -> None:
        self.producing.cancel()
        await self.store.wait_settled()
        await self.store.close(10)


async def fed(server: PostgresServer, attempt_seconds: float = 10.0) -> tuple[PostgresDatabase, Feed]:
    database = await open_postgres(server.url(), attempt_seconds=attempt_seconds)
    feed = Feed(database, await claimed(database, "one", "two", "three"))
    await until(lambda: len(feed.outcomes.all) > 100)
    return database, feed


async def check_all_stored_once(database: PostgresDatabase, feed: Feed) -> None:
    assert len(feed.outcomes.all) == feed.added * 3
    assert all(isinstance(outcome, EventStored) for _, outcome in feed.outcomes.all)
    rows = await all_events(database)
    for trigger_id in {row.trigger_id for row in rows}:
        of_one = [row for row in rows if row.trigger_id == trigger_id]
        assert [row.payload for row in of_one] == [str(number) for number in range(feed.added)]
        assert [row.sequence_index for row in of_one] == list(range(feed.added))


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_while_the_server_is_down_events_wait_and_nothing_is_lost_failed_or_stored_twice(
    own_postgres: PostgresServer, mode: str
) -> None:
    database, feed = await fed(own_postgres)

    await asyncio.to_thread(own_postgres.stop, mode)
    await until(lambda: feed.store.standing is ProducerStanding.DOWN)
    # Twice: each time it stays down for several attempts, and comes back.
    for _ in range(2):
        waiting, confirmed, began = feed.added, len(feed.outcomes.all), time.monotonic()
        await until(lambda began=began: time.monotonic() - began > 1.0)
        assert feed.added == waiting
        assert len(feed.outcomes.all) == confirmed
        assert feed.standings[-1] is ProducerStanding.DOWN
        await asyncio.to_thread(own_postgres.start)
        await until(lambda confirmed=confirmed: len(feed.outcomes.all) > confirmed + 100)
        await asyncio.to_thread(own_postgres.stop, mode)
        await until(lambda: feed.store.standing is ProducerStanding.DOWN)
    await asyncio.to_thread(own_postgres.start)
    await until(lambda: feed.store.standing is ProducerStanding.OPEN)
    await feed.end()

    await check_all_stored_once(database, feed)
    await database.close()


async def test_the_beginning_and_the_end_of_an_outage_are_logged_once(own_postgres: PostgresServer) -> None:
    database = await open_postgres(own_postgres.url())
    with structlog.testing.capture_logs() as logs:
        await asyncio.to_thread(own_postgres.stop, "fast")
        for _ in range(2):
            with pytest.raises(StoreAwayError):
                await database.read(lambda connection: None)
        await asyncio.to_thread(own_postgres.start)
        for _ in range(2):
            await database.read(lambda connection: None)
    assert [entry["log_level"] for entry in logs] == ["warning", "info"]
    assert 0 <= logs[1]["after_seconds"] < 60
    await database.close()


async def test_a_server_that_does_not_answer_counts_as_down_until_it_does(own_postgres: PostgresServer) -> None:
    database, feed = await fed(own_postgres, attempt_seconds=1.0)

    # So that there are idle connections, too.
    await asyncio.gather(*[database.read(count_events) for _ in range(3)])
    pids = own_postgres.freeze()
    began = time.monotonic()
    await until(lambda: feed.store.standing is ProducerStanding.DOWN)
    assert time.monotonic() - began < slack(3)
    # Longer than an attempt may take, so that some attempts are given up without an answer.
    await until(lambda: time.monotonic() - began > 3.5)
    waiting = feed.added
    assert feed.standings[-1] is ProducerStanding.DOWN
    own_postgres.thaw(pids)
    await until(lambda: feed.added > waiting + 100)
    await feed.end()

    await check_all_stored_once(database, feed)
    await database.close()


async def test_closing_does_not_wait_for_a_server_that_does_not_answer(own_postgres: PostgresServer) -> None:
    database, feed = await fed(own_postgres)
    await asyncio.gather(*[database.read(count_events) for _ in range(3)])
    pids = own_postgres.freeze()
    feed.producing.cancel()
    feed.store.add(1, 1, "1", None, feed.outcomes.of("last"))

    began = time.monotonic()
    assert await feed.store.close(0.2) > 0
    await database.close()

    assert time.monotonic() - began < slack(12)
    assert "last" not in feed.outcomes.told()
    own_postgres.thaw(pids)


async def test_connections_that_are_cut_repeatedly_store_nothing_twice(own_postgres: PostgresServer) -> None:
    database, feed = await fed(own_postgres)
    other = await asyncpg.connect(own_postgres.url())
    for _ in range(30):
        await other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tidemill'"
        )
        confirmed = len(feed.outcomes.all)
        await until(lambda confirmed=confirmed: len(feed.outcomes.all) > confirmed)
    await other.close()
    await feed.end()

    await check_all_stored_once(database, feed)
    await database.close()


async def test_a_connection_that_ends_in_the_middle_of_the_driver_s_work_is_an_outage(postgres: PostgresServer) -> None:
    database = await open_store(await postgres.new_database())

    def fail(connection: Connection) -> None:
        raise asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress")

    with pytest.raises(StoreAwayError):
        await database.write(fail)
    assert await database.write(lambda c: c.exec_driver_sql("SELECT 1").scalar()) == 1
    await database.close()


async def test_commits_wait_for_the_disk_whatever_the_default_of_the_role(postgres: PostgresServer) -> None:
    url = await postgres.new_database()
    connection = await asyncpg.connect(url)
    name = url.removeprefix("postgresql://postgres@/").partition("?")[0]
    await connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    await connection.close()

    database = await open_store(url)

    assert await database.write(lambda c: c.exec_driver_sql("SHOW synchronous_commit").scalar()) == "on"
    await database.close()


async def test_a_statement_is_prepared_once(postgres: PostgresServer) -> None:
    database = await open_postgres(await postgres.new_database())

    def use(connection: Connection) -> list[Any]:
        execute_text(connection, "SELECT 17")
        return execute_text(
            connection, "SELECT generic_plans FROM pg_prepared_statements WHERE statement = 'SELECT 17'"
        )

    try:
        found = [await database.write(use) for _ in range(2)]
    finally:
        await database.close()

    assert [[tuple(row) for row in rows] for rows in found] == [[(1,)], [(2,)]]


async def test_the_server_closes_the_connections_of_a_host_that_vanishes(postgres: PostgresServer) -> None:
    name = urlsplit(await postgres.new_database()).path.removeprefix("/")
    database = await open_postgres(postgres.tcp_url(name))
    try:
        for setting, value in (("tcp_keepalives_idle", "30"), ("tcp_user_timeout", "60000")):
            shown = await database.read(lambda c, s=setting: c.exec_driver_sql(f"SHOW {s}").scalar())
            assert (setting, shown) == (setting, value)
        for _ in range(2):  # all bells have rung at first, and ring once when the connection is there
            await database.doorbell.wait(Channel.WORKER, 30.0)
        listening = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tidemill doorbell' AND datname = "
        count = await database.read(lambda c: c.exec_driver_sql(f"{listening}current_database()").scalar())
        assert count == 1
        assert isinstance(database.doorbell, PostgresDoorbell)
        assert database.doorbell.is_direct, "then its connection has the settings, too"
    finally:
        await database.close()


async def test_a_reader_cannot_write(postgres: PostgresServer) -> None:
    url = await postgres.new_database()
    await (await open_store(url)).close()
    reader = await open_reader(url)

    assert await reader.read(count_events) == 0
    with pytest.raises(ConfigError, match="reading only"):
        await reader.write(count_events)
    with pytest.raises(RemoteError, match="read-only"):
        await reader.read(lambda c: c.exec_driver_sql("DELETE FROM trigger_event"))
    await reader.close()


async def test_no_batch_reads_the_whole_table_however_it_grew(postgres: PostgresServer) -> None:
    database = await open_postgres(await postgres.new_database())
    [(number, token)] = (await claimed(database, "one")).items()

    async def scans() -> object:
        await database.write(lambda c: c.exec_driver_sql("SELECT pg_stat_force_next_flush()").scalar())
        counted = "SELECT sum(seq_scan) FROM pg_stat_user_tables WHERE relname = 'trigger_event'"
        return await database.write(lambda c: c.exec_driver_sql(counted).scalar())

    before = await scans()  # making the indexes is one
    for batch in range(12):
        events = [NewEvent(number, token, "1", f"{batch}-{n}", NOW_US) for n in range(300)]
        await database.write(lambda c, events=events: store_events(c, events))

    assert await scans() == before
    await database.close()


@pytest.fixture
def pooler(postgres: PostgresServer) -> Iterator[Callable[..., PgBouncer]]:
    """Return a function that puts a PgBouncer in front of the server; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*args: Any, **options: Any) -> PgBouncer:
            started = PgBouncer(postgres, *args, **options)
            stack.callback(started.close)
            return started

        yield start


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", [pytest.param("session", marks=pytest.mark.long), "transaction"])
async def test_behind_a_pooler_events_are_stored_durably(
    postgres: PostgresServer, pooler: Callable[..., PgBouncer], mode: str, version: str
) -> None:
    url = await postgres.new_database()
    name = url.removeprefix("postgresql://postgres@/").partition("?")[0]
    connection = await asyncpg.connect(url)
    await connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    await connection.close()
    # Nothing of a session is left after a transaction; in session mode each connection has one to itself.
    reset = {"server_reset_query": "DISCARD ALL", "server_reset_query_always": 1}
    behind = pooler(mode, version, default_pool_size=3 if mode == "transaction" else 10, **reset).url(name)
    database = await open_postgres(behind)
    # However busy the machine is: only a refusal counts as an outage.
    feed = Feed(database, await claimed(database, "one", "two"), CommitLimits(outage_seconds=60))
    await until(lambda: len(feed.outcomes.all) > 300)
    await asyncio.gather(*[database.read(count_events) for _ in range(10)])
    await feed.end()

    for setting, value in (("synchronous_commit", "on"), ("enable_hashjoin", "off"), ("jit", "off")):
        shown = await database.write(lambda c, s=setting: c.exec_driver_sql(f"SHOW {s}").scalar())
        assert (setting, shown) == (setting, value)
    assert feed.standings == []
    assert await database.read(count_events) == feed.added * 2
    reader = await open_reader(behind)
    with pytest.raises(RemoteError, match="read-only"):
        await reader.read(lambda c: c.exec_driver_sql("DELETE FROM trigger_event"))
    await reader.close()
    await database.close()


async def test_bells_ring_over_the_url_that_is_given_for_them(postgres: PostgresServer) -> None:
    url, direct = [await postgres.new_database() for _ in range(2)]
    one, other = [await open_store(url, listen_url=direct) for _ in range(2)]
    try:
        for _ in range(2):  # all bells have rung at first, and ring once when the connection is there
            await other.doorbell.wait(Channel.WORKER, 5.0)
            await one.doorbell.wait(Channel.SCHEDULER, 5.0)
        connection = await asyncpg.connect(direct)
        listening = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        assert await connection.fetchval(f"{listening} AND application_name = 'tidemill doorbell'") == 2
        await connection.close()
        one.doorbell.ring([Channel.WORKER])
        assert await other.doorbell.wait(Channel.WORKER, 30.0)
    finally:
        await one.close()
        await other.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_pooler_in_statement_mode_is_refused_by_name(pooler: Callable[..., PgBouncer], version: str) -> None:
    with pytest.raises(ConfigError, match="pool_mode"):
        await open_postgres(pooler("statement", version).url("postgres"))


class Holding:
    """A transaction that has locked the cursor of a trigger, and stays open until `end`."""

    def __init__(self, database: PostgresDatabase, *ids: int) -> None:
        self.pid = 0
        self._steps = [threading.Event() for _ in ids]
        self.locked = 0
        self._ids = ids
        self.attempts = 0
        self.done = asyncio.create_task(database.write(self._work))

    def step(self, number: int = 0) -> None:
        self._steps[number].set()

    def _work(self, connection: Connection) -> int:
        self.attempts += 1
        self.pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        for number, step in zip(self._ids, self._steps, strict=True):
            lock_cursors(connection, [number])
            self.locked += 1
            while not step.is_set():
                connection.exec_driver_sql("SELECT pg_sleep(0.005)")
        return self.pid


async def test_a_writer_that_fails_leaves_the_transaction_of_another_alone(postgres: PostgresServer) -> None:
    url = await postgres.new_database()
    database = await open_postgres(url)
    one, two = await claimed(database, "one", "two")
    holding, failing = Holding(database, one), Holding(database, two)
    await until(lambda: bool(holding.locked and failing.locked))

    other = await asyncpg.connect(url)
    await other.execute("SELECT pg_terminate_backend($1)", failing.pid)
    with pytest.raises(RemoteError) as caught:
        await failing.done
    assert caught.value.retryable
    with pytest.raises(RemoteError, match="in time"):
        await open_and_wait(database)
    holding.step()

    assert await holding.done == holding.pid
    assert holding.attempts == 1
    # Idle connections are not trusted, and the next transactions find the server.
    assert await database.read(count_events) == 0
    await other.close()
    await database.close()


async def open_and_wait(database: PostgresDatabase) -> None:
    """Let a transaction run into the time limit."""
    database._attempt_seconds, before = 0.2, database._attempt_seconds
    try:
        await database.write(lambda c: c.exec_driver_sql("SELECT pg_sleep(60)"))
    finally:
        database._attempt_seconds = before


async def test_a_deadlock_is_not_an_outage_and_both_transactions_are_committed(postgres: PostgresServer) -> None:
    url = await postgres.new_database()
    database = await open_postgres(url)
    one, two = await claimed(database, "one", "two")
    tokens = await claimed(database, "three")
    feed = Feed(database, tokens)
    await until(lambda: len(feed.outcomes.all) > 10)
    # Violates the order of locks, as no query does.
    crossing = [Holding(database, one, two), Holding(database, two, one)]
    await until(lambda: all(each.locked for each in crossing))
    look = await asyncpg.connect(url)
    before = {row["pid"] for row in await look.fetch("SELECT pid FROM pg_stat_activity")}
    await look.close()
    for each in crossing:
        each.step(0)
        each.step(1)

    # The repeated transaction may get another idle connection than its own, but not a new one.
    assert {await each.done for each in crossing} <= before
    first, second = sorted(each.attempts for each in crossing)
    assert (first, second >= 2) == (1, True)
    await feed.end()
    assert feed.standings == []
    await database.close()


@pytest.mark.parametrize(
    "touch",
    [
        lambda c, ids, tokens, session: store_events(c, [NewEvent(n, tokens[n], "1", None, NOW_US) for n in ids]),
        lambda c, ids, tokens, session: report_triggers(
            c, [TriggerReport(n, tokens[n], TriggerState.FINISHED, NOW_US) for n in ids]
        ),
        lambda c, ids, tokens, session: claim_triggers(c, ids, session, NOW_US),
        lambda c, ids, tokens, session: store_serialized(c, dict.fromkeys(ids, "[]")),
        lambda c, ids, tokens, session: cancel_unlisted(c, "list", [], NOW_US),
        lambda c, ids, tokens, session: register_triggers(
            c, [TriggerSpec(name, "another.Class") for name in "zyx"], "list", NOW_US
        ),
    ],
    ids=["store", "mark", "claim", "note made", "cancel unlisted", "register"],
)
async def test_cursors_are_locked_by_ascending_id_before_any_wide_row(postgres: PostgresServer, touch) -> None:
    url = await postgres.new_database()
    database = await open_postgres(url)
    tokens = {number: 1 for name in "zyx" for number in (await registered(database, name)).values()}
    first, middle, last = sorted(tokens)
    session = await new_session(database)
    assert await claim(database, *tokens, session=session) == tokens
    holding = Holding(database, middle)
    await until(lambda: bool(holding.locked))
    other = await asyncpg.connect(url)

    touching = asyncio.create_task(database.write(lambda c: touch(c, [last, first, middle], tokens, session)))
    async with asyncio.timeout(30):
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        while not await other.fetchval(waiting):
            await asyncio.sleep(0.01)

    await other.execute("SELECT FROM trigger FOR UPDATE NOWAIT")
    await other.execute(f"SELECT FROM trigger_cursor WHERE trigger_id = {last} FOR UPDATE NOWAIT")
    with pytest.raises(asyncpg.LockNotAvailableError):
        await other.execute(f"SELECT FROM trigger_cursor WHERE trigger_id = {first} FOR UPDATE NOWAIT")
    holding.step()
    await holding.done
    await touching
    await other.close()
    await database.close()


async def test_events_that_meet_a_deadlock_are_stored_without_an_outage(postgres: PostgresServer) -> None:
    database = await open_postgres(await postgres.new_database())
    [(number, token)] = (await claimed(database, "one")).items()
    standings: list[ProducerStanding] = []
    outcomes = Outcomes()
    store = EventStore(DatabaseEvents(Conflicting(database, 5)), standings.append)
    store.start()
    store.add(number, token, "1", None, outcomes.of(1))
    store.add(number, token, "2", None, outcomes.of(2))
    await store.wait_settled()

    assert outcomes.all == [(1, EventStored(0)), (2, EventStored(1))]
    assert standings == []
    assert [row.payload for row in await all_events(database)] == ["1", "2"]
    await store.close(1)
    await database.close()


class Conflicting:
    """A database that rolls back the first transactions, as after a deadlock, after their work is done."""

    def __init__(self, database: PostgresDatabase, times: int) -> None:
        self._database = database
        self.label = database.label
        self._times = times

    async def write(self, work: Callable[[Connection], T]) -> T:
        def rolled_back(connection: Connection) -> T:
            result = work(connection)
            self._times -= 1
            if self._times >= 0:
                state = ("40P01", "40001")[self._times % 2]
                connection.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{state}'; END $$")
            return result

        return await self._database.write(rolled_back)

    async def read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.read(work)

    async def close(self) -> None:
        await self._database.close()


async def test_a_process_that_hangs_in_a_transaction_loses_its_locks(postgres: PostgresServer) -> None:
    url = await postgres.new_database()
    other = await open_postgres(url)
    [(number, token)] = (await claimed(other, "one")).items()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STANDS_STILL, url, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"locked\n"
        process.send_signal(signal.SIGSTOP)

        async with asyncio.timeout(30):
            assert await claim(other, number) == {number: token + 1}
    finally:
        process.kill()
        await process.wait()
    await other.close()


STANDS_STILL = """
import asyncio, sys
from tidemill.store.engines.postgres import open_postgres
from tidemill.store.queries.triggers.cursors import lock_cursors

def work(connection):
    lock_cursors(connection, [1])
    print("locked", flush=True)
    while True:
        connection.exec_driver_sql("SELECT 1")

async def main():
    database = await open_postgres(sys.argv[1], attempt_seconds=1.0)
    await database.write(work)

asyncio.run(main())
"""


async def test_two_hosts_store_events_of_many_triggers_at_once(postgres: PostgresServer) -> None:
    url = await postgres.new_database()
    one, two = await open_postgres(url), await open_postgres(url)
    feeds = []
    for database, names in ((one, "abc"), (two, "def")):
        feeds.append(Feed(database, await claimed(database, *names)))
    await until(lambda: all(len(feed.outcomes.all) > 500 for feed in feeds))
    for feed in feeds:
        await feed.end()

    assert await one.read(count_events) == sum(feed.added * 3 for feed in feeds)
    for database in (one, two):
        await database.close()


async def test_an_unreachable_server_is_named_without_its_password() -> None:
    with pytest.raises(RemoteError, match=r"127\.0\.0\.1:1/x") as caught:
        await open_store("postgresql://me:hunter2@127.0.0.1:1/x")
    assert caught.value.retryable
    assert "hunter2" not in str(caught.value)


async def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    monkeypatch.delitem(sys.modules, "tidemill.store.engines.postgres", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'tidemill\[postgres\]'"):
        await open_store("postgresql://localhost/nothing")
