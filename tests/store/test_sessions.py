"""Sessions, the lists that they run, and what they read from upstream, on both databases."""

from __future__ import annotations

import asyncio

import pytest
from tests.store.helpers import NOW_US, claim, new_session, registered

from tidemill.store.database import Database
from tidemill.store.engines.opening import has_one_writer, open_reader
from tidemill.store.engines.postgres import open_postgres
from tidemill.store.queries.triggers.sessions import (
    beat_session,
    claim_upstreams,
    count_held_triggers,
    end_session,
    find_foreign_names,
    find_lost_triggers,
    list_live_sessions,
    lock_lists,
    release_upstreams,
    take_list,
)
from tidemill.store.queries.triggers.triggers import find_triggers, release_names
from tidemill.store.records import ListHostSession


async def take(database: Database, session: int, name: str = "list") -> int | None:
    return await database.write(lambda c: take_list(c, name, session))


async def end(database: Database, session: int, by: int | None = None) -> bool:
    return await database.write(lambda c: end_session(c, session, NOW_US + 9, by))


async def claims(database: Database, session: int, *names: str) -> list[tuple[str, str]]:
    return await database.write(lambda c: claim_upstreams(c, session, names))


async def test_a_session_is_read_as_it_began_and_its_beat_rises(database: Database) -> None:
    number = await new_session(database)
    await new_session(database, kind="other")
    for beat in (1, 2):
        assert await database.write(lambda c, beat=beat: beat_session(c, number, NOW_US + beat))

    assert await database.read(lambda c: list_live_sessions(c, "triggerer")) == [
        ListHostSession(
            number,
            "triggerer",
            "host",
            "machine",
            "boot",
            17,
            "list",
            "lock",
            "digest",
            2,
            NOW_US,
            NOW_US + 2,
            None,
            None,
        )
    ]


async def test_a_session_that_was_ended_stays_dead(database: Database) -> None:
    dead, other = await new_session(database), await new_session(database)

    assert await end(database, dead, by=other)

    assert not await database.write(lambda c: beat_session(c, dead, NOW_US))
    assert not await end(database, dead)
    assert [one.id for one in await database.read(lambda c: list_live_sessions(c, "triggerer"))] == [other]
    assert await new_session(database) > other


async def test_a_list_has_one_session_until_that_one_ends(database: Database) -> None:
    one, two = await new_session(database), await new_session(database)

    assert [await take(database, one), await take(database, one)] == [None, None]
    assert await take(database, two) == one
    assert await take(database, two, "another list") is None
    await end(database, one, by=two)
    assert await take(database, two) is None
    assert await take(database, one) == two


async def test_of_many_sessions_that_take_a_list_at_once_one_gets_it(postgres) -> None:
    url = await postgres.new_database()
    databases = [await open_postgres(url) for _ in range(6)]
    sessions = [await new_session(database) for database in databases]

    taken = await asyncio.gather(*[take(*pair) for pair in zip(databases, sessions, strict=True)])

    assert taken.count(None) == 1
    holder = sessions[taken.index(None)]
    assert set(taken) == {None, holder}
    for database in databases:
        await database.close()


async def test_an_upstream_is_claimed_by_one_live_list(database: Database) -> None:
    mine, replica = await new_session(database, "mine"), await new_session(database, "mine")
    other = await new_session(database, "other")

    assert await claims(database, mine, "kafka a", "kafka b") == []
    assert await claims(database, mine, "kafka a") == []
    assert await claims(database, replica, "kafka a") == []
    assert await claims(database, other, "kafka c", "kafka b", "kafka a") == [("kafka a", "mine"), ("kafka b", "mine")]
    assert await claims(database, other) == []
    # Nothing was claimed for the one that was refused.
    assert await claims(database, mine, "kafka c") == []

    await end(database, mine)
    await database.write(lambda c: release_upstreams(c, replica, ["kafka a"]))
    assert await claims(database, other, "kafka a", "kafka b", "kafka c") == []


async def test_of_lists_that_claim_one_upstream_at_once_one_gets_it(postgres) -> None:
    url = await postgres.new_database()
    databases = [await open_postgres(url) for _ in range(6)]
    sessions = [await new_session(database, f"list {n}") for n, database in enumerate(databases)]

    found = await asyncio.gather(
        *[claims(database, session, "kafka a") for database, session in zip(databases, sessions, strict=True)]
    )

    assert found.count([]) == 1
    for database in databases:
        await database.close()


async def test_names_of_other_lists_are_returned_with_their_lists(database: Database) -> None:
    await registered(database, "a", "b", list="mine")
    await registered(database, "c", list="other")

    assert await database.read(lambda c: find_foreign_names(c, ["a", "c", "unknown"], "mine")) == {"c": "other"}


async def test_a_session_learns_what_it_has_lost(database: Database) -> None:
    session = await new_session(database)
    ids = await registered(database, "a", "b", "c")
    held = await claim(database, *ids.values(), session=session)
    assert await database.read(lambda c: count_held_triggers(c, session)) == (3, 3)
    assert await database.read(lambda c: find_lost_triggers(c, session, held)) == []

    await claim(database, ids["b"])
    again = await claim(database, ids["c"], session=session)

    assert await database.read(lambda c: count_held_triggers(c, session)) == (2, 3)
    assert await database.read(lambda c: find_lost_triggers(c, session, held | {999: 1})) == [ids["b"], ids["c"], 999]
    assert await database.read(lambda c: find_lost_triggers(c, session, held | again)) == [ids["b"]]
    assert await database.read(lambda c: count_held_triggers(c, 999)) == (0, 0)


@pytest.mark.parametrize("by", [None, 1])
async def test_a_session_that_has_ended_claims_no_trigger(database: Database, by: int | None) -> None:
    ids = await registered(database, "a")
    living, dead = await new_session(database), await new_session(database)
    tokens = await claim(database, *ids.values(), session=living)

    await end(database, dead, by)

    assert await claim(database, *ids.values(), session=dead) == {}
    [record] = await database.read(lambda c: find_triggers(c, ["a"]))
    assert record.token == tokens[record.id]
    await end(database, living)
    [record] = await database.read(lambda c: find_triggers(c, ["a"]))
    assert record.session is None


async def test_the_digest_of_a_list_is_updated_with_the_beat(database: Database) -> None:
    number = await new_session(database, digest="old")
    for digest, known in ((None, "old"), ("new", "new"), (None, "new"), ("", "")):
        assert await database.write(lambda c, digest=digest: beat_session(c, number, NOW_US, digest))
        [record] = await database.read(lambda c: list_live_sessions(c, "triggerer"))
        assert record.digest == known


async def test_names_that_a_list_has_released_belong_to_no_list(database: Database) -> None:
    await registered(database, "kept", "gone", list="mine")
    await registered(database, "theirs", list="other")
    for _ in range(2):
        await database.write(lambda c: release_names(c, "mine", ["kept", "unknown"]))
        assert await database.read(lambda c: find_foreign_names(c, ["kept", "gone", "theirs"], "another")) == {
            "kept": "mine",
            "theirs": "other",
        }
    await database.write(lambda c: release_names(c, "mine", []))
    assert await database.read(lambda c: find_foreign_names(c, ["kept"], "another")) == {}


async def test_lists_are_admitted_one_after_another(postgres) -> None:
    url = await postgres.new_database()
    databases = [await open_postgres(url) for _ in range(3)]
    under_way, most = 0, 0

    def admit(connection) -> None:
        nonlocal under_way, most
        lock_lists(connection)
        under_way += 1
        most = max(most, under_way)
        connection.exec_driver_sql("SELECT pg_sleep(0.05)")
        under_way -= 1

    await asyncio.gather(*[database.write(admit) for database in databases for _ in range(3)])
    assert most == 1
    for database in databases:
        await database.close()


async def test_a_file_has_one_writer_and_a_server_many(url: str, database: Database) -> None:
    assert has_one_writer(url) == database.exclusive == url.startswith("sqlite")
    reader = await open_reader(url)
    assert not reader.exclusive
    await reader.close()
