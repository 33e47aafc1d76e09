"""Many triggers at once, on both databases: no deadlock, no repeated transaction, no scan, and fast enough."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import pytest
from sqlalchemy import Connection, text
from tests.store.helpers import NOW_US, claim, new_session, registered

from tidemill.core.triggers.event_plan import EventStored, NewEvent
from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.services.triggerer.hosting.state_change import StateChange
from tidemill.services.triggerer.lists.state_writer import CHUNK_COUNT, StateWriter
from tidemill.store.database import Database
from tidemill.store.database_events import DatabaseEvents
from tidemill.store.engines.opening import open_store
from tidemill.store.engines.postgres import open_postgres
from tidemill.store.group_commit import EventStore
from tidemill.store.queries.triggers.events import count_events, store_events
from tidemill.store.queries.triggers.sessions import count_held_triggers
from tidemill.store.queries.triggers.triggers import cancel_unlisted, count_triggers, report_triggers, store_serialized
from tidemill.store.records import TriggerReport, TriggerState

T = TypeVar("T")


class Counting:
    """A database that counts how often work was begun, and committed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.label = database.label
        self.begun = self.committed = 0

    async def write(self, work: Callable[[Connection], T]) -> T:
        def counted(connection: Connection) -> T:
            self.begun += 1
            return work(connection)

        result = await self._database.write(counted)
        self.committed += 1
        return result

    async def read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.read(work)

    async def close(self) -> None:
        await self._database.close()


@pytest.fixture
async def counting(database: Database) -> Counting:
    return Counting(database)


def deadlocks(connection: Connection) -> int:
    if connection.dialect.name != "postgresql":
        return 0
    connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
    found = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    return int(connection.exec_driver_sql(found).scalar_one())


@pytest.mark.parametrize("rounds", [2, pytest.param(5, marks=pytest.mark.long)])
async def test_two_thousand_triggers_that_end_while_they_fire_meet_no_deadlock_and_repeat_nothing(
    counting: Counting, rounds: int
) -> None:
    ids = list((await registered(counting, *[f"t{n:04}" for n in range(2_000)])).values())
    session = await new_session(counting)
    tokens = await claim(counting, *ids, session=session)
    before = (counting.begun, counting.committed)
    standings: list[ProducerStanding] = []
    outcomes: list[object] = []
    events, marks = EventStore(DatabaseEvents(counting), standings.append), StateWriter(counting)
    events.start()

    async def live(some: list[int]) -> None:
        """Fire, end, and start again under another token, fifty triggers at a time."""
        for start in range(0, len(some) * rounds, 50):
            part = [some[(start + n) % len(some)] for n in range(50)]
            stored = asyncio.Semaphore(0)

            def done(outcome: object, stored: asyncio.Semaphore = stored) -> None:
                outcomes.append(outcome)
                stored.release()

            for number in part:
                for n in range(2):
                    events.add(number, tokens[number], str(n), f"{tokens[number]}-{n}", done)
                marks.put(StateChange(number, tokens[number], TriggerState.FINISHED))
            for _ in range(2 * len(part)):
                await stored.acquire()
            tokens.update(await claim(counting, *part, session=session))
            await counting.write(lambda c, part=part: store_serialized(c, dict.fromkeys(part, "[]")))

    # Each trigger is in one task; the ids of the tasks interleave, and transactions contain events and reports of all.
    await asyncio.gather(*[live(ids[start::8]) for start in range(8)])
    await marks.settled()

    assert len(outcomes) == 2_000 * rounds * 2
    assert all(isinstance(outcome, EventStored) for outcome in outcomes)
    assert await counting.read(count_events) == len(outcomes)
    assert (counting.begun - before[0]) == (counting.committed - before[1])
    assert await counting.write(deadlocks) == 0
    assert await counting.read(count_triggers) == {TriggerState.RUNNING: 2_000}
    assert await counting.read(lambda c: count_held_triggers(c, session)) == (2_000, 2_000 * (rounds + 1))
    await events.close(5)


@pytest.mark.parametrize(
    ("count", "limit_seconds"),
    [
        (3 * CHUNK_COUNT, 60.0),
        pytest.param(30_000, 6.0, marks=[pytest.mark.alone, pytest.mark.long]),
    ],
)
async def test_reports_are_written_in_chunks_and_thirty_thousand_within_six_seconds(
    counting: Counting, count: int, limit_seconds: float
) -> None:
    ids = list((await registered(counting, *[f"t{n}" for n in range(count)])).values())
    tokens = await claim(counting, *ids)
    before = counting.begun
    marks = StateWriter(counting)
    began = time.perf_counter()
    for number in ids:
        marks.put(StateChange(number, tokens[number], TriggerState.FAILED, None, "Traceback " * 30))
    await marks.settled()
    seconds = time.perf_counter() - began

    assert counting.begun - before == count // CHUNK_COUNT
    assert await counting.read(count_triggers) == {TriggerState.FAILED: count}
    print(json.dumps({"endings_per_second": round(count / seconds), "database": counting.label[:10]}))
    assert seconds < limit_seconds


def fill(connection: Connection) -> None:
    """Create 100,000 triggers of ten lists, with arguments of 500 characters."""
    numbers = (
        "generate_series(1, 100000) AS n(i)"
        if connection.dialect.name == "postgresql"
        else "(WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000) SELECT i FROM n)"
    )
    connection.execute(
        text(
            "INSERT INTO trigger (name, classpath, kwargs, restart, state, list, created_us, changed_us) "
            f"SELECT 'trigger ' || i, 'a.B', :kwargs, 'always', 'registered', 'list ' || (i % 10), 0, 0 FROM {numbers}"
        ),
        {"kwargs": json.dumps({"x": "y" * 490})},
    )
    connection.execute(text("INSERT INTO trigger_cursor (trigger_id, token, next_index) SELECT id, 0, 0 FROM trigger"))


@pytest.fixture
async def filled(url: str) -> AsyncIterator[Database]:
    # To fill it may take a busy machine longer than any transaction of a host is allowed to.
    patient = await (open_postgres(url, attempt_seconds=100.0) if url.startswith("postgresql") else open_store(url))
    await patient.write(fill)
    await patient.close()
    database = await open_store(url)
    yield database
    await database.close()


@pytest.mark.alone
@pytest.mark.long
async def test_ten_thousand_of_a_hundred_thousand_triggers_are_claimed_at_five_thousand_a_second(
    filled: Database,
) -> None:
    session = await new_session(filled)
    ids = [number for (number,) in await filled.read(lambda c: c.execute(text(_TENTH)).all())]
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        tokens = await claim(filled, *ids, session=session)
        rates.append(len(tokens) / (time.perf_counter() - began))

    print(json.dumps({"claims_per_second": [round(rate) for rate in rates], "database": filled.label[:10]}))
    assert len(tokens) == 10_000
    assert min(rates) >= 5_000


_TENTH = "SELECT id FROM trigger WHERE list = 'list 3' ORDER BY id"


async def test_work_on_some_triggers_scans_neither_triggers_nor_cursors(filled: Database) -> None:
    session = await new_session(filled)
    ids = [number for (number,) in await filled.read(lambda c: c.execute(text(_TENTH + " LIMIT 500")).all())]
    plans: list[str] = []
    if filled.label.startswith("postgresql"):
        await filled.write(scans)
        before = await filled.write(scans)
    await registered(filled, *[f"trigger {n}" for n in range(500)], "new", list="list 3")
    tokens = await claim(filled, *ids, session=session)
    fired = [NewEvent(number, token, "1", None, NOW_US) for number, token in tokens.items()]
    ended = [TriggerReport(number, token, TriggerState.FINISHED, NOW_US) for number, token in tokens.items()]
    works: list[Callable[[Connection], object]] = [
        lambda c: store_events(c, fired),
        lambda c: report_triggers(c, ended[:250]),
        lambda c: store_serialized(c, dict.fromkeys(ids, "[]")),
        lambda c: count_held_triggers(c, session),
        lambda c: cancel_unlisted(c, "list 3", ["new"], NOW_US),
    ]
    for work in works:
        await filled.write(explained(work, plans))

    if filled.label.startswith("postgresql"):
        await filled.write(scans)
        assert await filled.write(scans) == before
    else:
        assert plans
        assert [plan for plan in plans if plan.startswith("SCAN trigger")] == []


def scans(connection: Connection) -> int:
    connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
    counted = (
        "SELECT sum(seq_scan) FROM pg_stat_user_tables WHERE relname IN ('trigger', 'trigger_cursor', 'trigger_event')"
    )
    return int(connection.exec_driver_sql(counted).scalar_one())


def explained(work: Callable[[Connection], T], plans: list[str]) -> Callable[[Connection], T]:
    """Wrap the work so that on SQLite it records the query plan of each statement."""

    def done(connection: Connection) -> T:
        if connection.dialect.name != "sqlite":
            return work(connection)
        statements: list[str] = []
        driver = connection.connection.driver_connection
        driver.set_trace_callback(statements.append)
        try:
            return work(connection)
        finally:
            driver.set_trace_callback(None)
            for statement in statements:
                if statement.startswith(("SELECT", "UPDATE", "INSERT", "DELETE")):
                    plans.extend(row[3] for row in driver.execute(f"EXPLAIN QUERY PLAN {statement}"))

    return done
