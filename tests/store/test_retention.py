"""Old events and identities are removed in batches, independently of each other, on both databases."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import Connection, text
from tests.store.helpers import NOW_US, all_events, claimed
from tests.until import until

from tidemill.config.sections.triggerer_settings import StoreSettings
from tidemill.core.triggers.event_plan import Duplicate, EventPlan, EventStored, NewEvent
from tidemill.store.database import Database
from tidemill.store.engines.postgres import open_postgres
from tidemill.store.queries.triggers.events import store_events
from tidemill.store.queries.triggers.retention import BATCH_COUNT, remove_events, remove_identities
from tidemill.store.retention import Retention

DAY_US = 24 * 60 * 60 * 1_000_000


async def store(database: Database, *events: NewEvent) -> EventPlan:
    return await database.write(lambda c: store_events(c, events))


def retention(database: Database, **days: float) -> Retention:
    return Retention(database, StoreSettings(**days), round_seconds=0.01, pause_seconds=0)


def count_identities(connection: Connection) -> object:
    return connection.execute(text("SELECT count(*) FROM trigger_identity")).scalar()


async def test_events_and_identities_are_removed_when_each_are_old(database: Database) -> None:
    [(number, token)] = (await claimed(database, "one")).items()

    def fired(day: int) -> NewEvent:
        return NewEvent(number, token, str(day), f"id {day}", NOW_US + day * DAY_US)

    await store(database, *[fired(day) for day in range(10)])

    keeping = retention(database, retention_events_days=3, retention_identities_days=6)
    assert await keeping.remove_old(NOW_US + 9 * DAY_US) == 6 + 3

    assert [row.payload for row in await all_events(database)] == ["6", "7", "8", "9"]
    plan = await store(database, fired(2), fired(3))
    assert plan.outcomes == [EventStored(10), Duplicate(3)]
    assert await keeping.remove_old(NOW_US + 9 * DAY_US) == 2


async def test_many_batches_remove_all_that_is_old_and_nothing_else(database: Database) -> None:
    [(number, token)] = (await claimed(database, "one")).items()
    # Many in the same microsecond: the next batch begins where one ends.
    old = [NewEvent(number, token, "0", f"id {n}", NOW_US - n // 1500) for n in range(2 * BATCH_COUNT + 700)]
    await store(database, *old, NewEvent(number, token, '"new"', "new", NOW_US + DAY_US))

    removed = await retention(database, retention_events_days=1, retention_identities_days=1).remove_old(
        NOW_US + 2 * DAY_US
    )

    assert removed == 2 * len(old)
    assert [row.payload for row in await all_events(database)] == ['"new"']
    assert await database.read(count_identities) == 1


async def test_the_filter_ends_if_everything_is_kept_and_runs_on_otherwise(database: Database) -> None:
    await asyncio.wait_for(retention(database).run(), 30)
    [(number, token)] = (await claimed(database, "one")).items()
    task = asyncio.create_task(retention(database, retention_events_days=1).run())
    for _ in range(2):
        await store(database, NewEvent(number, token, "1", None, NOW_US))
        async with asyncio.timeout(30):
            while await all_events(database):
                await asyncio.sleep(0.01)
    task.cancel()
    # Numbers are not reused: pages continue after them.
    await store(database, NewEvent(number, token, "1", None, NOW_US))
    [row] = await all_events(database)
    assert (row.id, row.sequence_index) == (3, 2)


async def test_an_outage_is_survived(own_postgres) -> None:
    database = await open_postgres(own_postgres.url())
    [(number, token)] = (await claimed(database, "one")).items()
    await asyncio.to_thread(own_postgres.stop)
    task = asyncio.create_task(retention(database, retention_events_days=1).run())
    await until(lambda: database._epoch > 2)
    await asyncio.to_thread(own_postgres.start)
    await store(database, NewEvent(number, token, "1", None, NOW_US))
    async with asyncio.timeout(30):
        while await all_events(database):
            await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    await database.close()


async def test_two_hosts_that_remove_at_the_same_time_do_not_wait_for_each_other(postgres) -> None:
    url = await postgres.new_database()
    databases = [await open_postgres(url) for _ in range(2)]
    [(number, token)] = (await claimed(databases[0], "one")).items()
    old = [NewEvent(number, token, "0", f"id {n}", NOW_US) for n in range(5 * BATCH_COUNT)]
    await store(databases[0], *old)

    removed = await asyncio.gather(
        *[
            retention(each, retention_events_days=1, retention_identities_days=1).remove_old(NOW_US + 2 * DAY_US)
            for each in databases
        ]
    )

    assert sum(removed) == 2 * len(old)
    for database in databases:
        await database.close()


@pytest.mark.parametrize("remove", [remove_events, remove_identities])
async def test_a_batch_walks_an_index_and_scans_no_table(postgres, remove) -> None:
    database = await open_postgres(await postgres.new_database())
    [(number, token)] = (await claimed(database, "one")).items()
    await store(database, *[NewEvent(number, token, "0", f"id {n}", NOW_US + n) for n in range(5000)])

    def scans(connection: Connection) -> object:
        connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
        names = "'trigger_event', 'trigger_identity'"
        counted = f"SELECT sum(seq_scan) FROM pg_stat_user_tables WHERE relname IN ({names})"
        return connection.exec_driver_sql(counted).scalar()

    await database.write(scans)
    before = await database.write(scans)
    since = 0
    for _ in range(3):
        count, since = await database.write(lambda c, since=since: remove(c, NOW_US + 4000, since))
        assert count == BATCH_COUNT
    await database.write(scans)
    assert await database.write(scans) == before
    await database.close()
