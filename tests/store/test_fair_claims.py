"""What triggerers claim of the triggers that wait, side by side."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count

import asyncpg
import pytest
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Deferral
from tidemill.store.calls.service_calls import BeatSession, BeginSession, StopSession
from tidemill.store.calls.trigger_calls import ClaimedTrigger, ClaimTriggers, ListLoads, ReleaseTriggers
from tidemill.store.calls.worker_calls import AttemptReport
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store
from tidemill.store.queries.sessions import claims

REQUESTS = count(1)


async def defer(database: Database, streams: list[str | None], **details: object) -> Player:
    player = await Player(database).begin()
    tasks = [task(f"t{n:02}", priority=n % 3) for n in range(len(streams))]
    await player.create(dag(*tasks), **details)
    attempts = sorted(await player.claim(), key=lambda one: one.task_id)
    await player.turn(
        *[
            AttemptReport(one.task, one.epoch, Deferral("package.Class", "{}", "resume", stream_key=stream))
            for one, stream in zip(attempts, streams, strict=True)
        ]
    )
    return player


async def begin(database: Database, capacity: int = 100, *queues: str) -> int:
    request = BeginSession("triggerer", "t", "machine", "boot", 17, queues or ("default",), capacity)
    return await database.call(request)


async def claim(
    database: Database, session: int, capacity: int = 100, held: int = 0, **details: object
) -> tuple[ClaimedTrigger, ...]:
    request = ClaimTriggers(session, next(REQUESTS), capacity, ("default",), held=held, **details)  # type: ignore[arg-type]
    return await database.call(request)


async def test_each_takes_its_share_the_most_urgent_first_and_leaves_the_rest(database: Database):
    await defer(database, [None] * 12)
    one, two, three = [await begin(database) for _ in range(3)]
    first = await claim(database, one)
    assert len(first) == 4
    assert {int(each.task_id[1:]) % 3 for each in first} == {2}
    assert len(await claim(database, two)) == 4
    assert len(await claim(database, three)) == 4
    assert await claim(database, one, 96, 4) == ()
    assert [load.held for load in await database.call(ListLoads(one, ("default",)))] == [4, 4]


async def test_the_emptier_one_takes_more(database: Database):
    await defer(database, [None] * 10)
    full, empty = await begin(database), await begin(database)
    await database.call(BeatSession(full, {"triggers": 6.0}))
    assert len(await claim(database, empty)) == 8
    assert len(await claim(database, full, 94, 6)) == 2


async def test_those_that_stop_or_serve_other_queues_have_no_share(database: Database):
    await defer(database, [None] * 4)
    one, stopping = await begin(database), await begin(database)
    await begin(database, 100, "other")
    await database.call(StopSession(stopping))
    assert len(await claim(database, one)) == 4


async def test_a_share_that_exceeds_the_capacity_of_another_is_claimed(database: Database):
    await defer(database, [None] * 10)
    large, small = await begin(database), await begin(database, 2)
    assert len(await claim(database, large)) == 8
    assert len(await claim(database, small, 2)) == 2


async def test_a_stream_is_one_unit_that_a_claimer_takes_beyond_its_share(database: Database):
    await defer(database, ["s"] * 6)
    one, two = await begin(database), await begin(database)
    assert len(await claim(database, one)) == 6
    assert await claim(database, two) == ()


@pytest.mark.parametrize("others", [0, 1])
async def test_all_triggers_of_a_stream_are_claimed_at_once_so_that_none_misses_what_the_first_ones_read(
    database: Database, others: int
):
    await defer(database, ["s", None, "s", "s", "s", "s", "s"])
    one = await begin(database)
    rest = [await begin(database) for _ in range(others)]
    found = await claim(database, one, 2)
    assert [each.stream_key for each in found].count("s") == 6
    for two in rest:
        assert [each.stream_key for each in await claim(database, two, 2)] in ([], [None])


async def test_a_stream_is_claimed_whole_although_the_only_triggerer_has_no_room_for_all_of_it(database: Database):
    await defer(database, ["s"] * 6)
    one = await begin(database, 8)
    await database.call(BeatSession(one, {"triggers": 5.0}))
    assert len(await claim(database, one, 3, 5)) == 6


async def test_a_stream_waits_while_another_transaction_holds_one_of_its_triggers(database: Database, url: str):
    if url.startswith("sqlite"):
        pytest.skip("SQLite has one writer")
    await defer(database, ["s", "s", "s", None])
    one, _ = await begin(database), await begin(database)
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute("SELECT * FROM trigger_cursor ORDER BY trigger_id LIMIT 1 FOR UPDATE")
            assert "s" not in [each.stream_key for each in await claim(database, one)]
        assert [each.stream_key for each in await claim(database, one)].count("s") == 3
    finally:
        await connection.close()


async def test_claims_side_by_side_never_divide_a_stream(database: Database, url: str):
    if url.startswith("sqlite"):
        pytest.skip("SQLite has one writer")
    await defer(database, [f"s{number % 4}" for number in range(24)])
    sessions = [await begin(database) for _ in range(3)]
    stores = [database, *[await open_store(url) for _ in sessions[1:]]]
    try:
        claimed: list[str | None] = []
        async with asyncio.timeout(60):
            while len(claimed) < 4:
                for found in await asyncio.gather(*map(claim, stores, sessions)):
                    sizes = Counter(each.stream_key for each in found)
                    assert set(sizes.values()) <= {6}
                    claimed += sizes
        assert sorted(map(str, claimed)) == ["s0", "s1", "s2", "s3"]
    finally:
        for store in stores[1:]:
            await store.close()


async def test_the_share_of_one_that_does_not_claim_it_is_claimed_after_a_while(database: Database, monkeypatch):
    await defer(database, [None] * 6)
    full, _ = await begin(database), await begin(database)
    assert await claim(database, full, 50, 50) == ()
    monkeypatch.setattr(claims, "_PATIENCE_US", -60_000_000)
    assert len(await claim(database, full, 50, 50)) == 6


async def test_one_that_serves_a_part_of_the_queues_only_keeps_nothing_waiting(database: Database):
    await defer(database, [None] * 4)
    full = await begin(database, 100, "default", "other")
    await begin(database, 100, "other")
    queues = ("default", "other")
    found = await database.call(ClaimTriggers(full, next(REQUESTS), 50, queues, held=50))
    assert len(found) == 4
    assert await database.call(ListLoads(full, queues)) == ()


async def test_a_stream_that_does_not_fit_is_left_to_another(database: Database):
    await defer(database, ["s"] * 6 + [None] * 2)
    small, large = await begin(database, 5), await begin(database, 50)
    assert [one.stream_key for one in await claim(database, small, 5)] == [None, None]
    assert len(await claim(database, large)) == 6


async def test_room_is_kept_for_a_stream_that_has_waited_for_long(database: Database, monkeypatch):
    await defer(database, ["s"] * 4)
    one, two = await begin(database, 5), await begin(database, 5)
    for session, held in ((one, 2.0), (two, 3.0)):
        await database.call(BeatSession(session, {"triggers": held}))
    await defer(database, [None] * 4, run_id="later")
    assert [len(await claim(database, session, 1, 4)) for session in (one, two)] == [1, 1], "it fits into no room"
    monkeypatch.setattr(claims, "_PATIENCE_US", -1_000_000)
    for session, held in ((one, 2.0), (two, 3.0)):
        await database.call(BeatSession(session, {"triggers": held}))
    assert await claim(database, one, 3, 2) == ()
    assert [each.stream_key for each in await claim(database, two, 2, 3)] == [None, None]
    assert [each.stream_key for each in await claim(database, one, 4, 1)] == ["s"] * 4


async def test_one_of_two_with_equal_room_goes_on_with_small_triggers(database: Database, monkeypatch):
    await defer(database, ["s"] * 4)
    one, two = await begin(database, 5), await begin(database, 5)
    await defer(database, [None] * 4, run_id="later")
    monkeypatch.setattr(claims, "_PATIENCE_US", -1_000_000)
    for session in (one, two):
        await database.call(BeatSession(session, {"triggers": 2.0}))
    assert await claim(database, one, 3, 2) == ()
    assert {each.stream_key for each in await claim(database, two, 3, 2)} == {None}


async def test_streams_that_are_too_many_for_one_claim_are_not_divided(database: Database, monkeypatch):
    await defer(database, ["s", "t"] * 3)
    monkeypatch.setattr(claims, "_WHOLE", 5)
    one = await begin(database)
    assert [Counter(each.stream_key for each in await claim(database, one)) for _ in range(2)] == [{"s": 3}, {"t": 3}]


async def test_a_stream_larger_than_every_capacity_is_claimed_at_once_by_the_emptiest(database: Database):
    await defer(database, ["s"] * 6)
    one, two = await begin(database, 3), await begin(database, 4)
    await database.call(BeatSession(one, {"triggers": 1.0}))
    assert await claim(database, one, 2, 1) == ()
    assert len(await claim(database, two, 4)) == 6
    assert await claim(database, two, 0, 6) == ()


async def test_nothing_is_handed_over_while_something_waits_that_was(database: Database):
    await defer(database, [None] * 2)
    full = await begin(database)
    first, _ = await claim(database, full)
    empty = await begin(database)
    assert [load.held for load in await database.call(ListLoads(full, ("default",)))] == [0]
    await database.call(ReleaseTriggers(full, ((first.id, first.token),), moves=True))
    assert await database.call(ListLoads(full, ("default",))) == ()
    assert len(await claim(database, empty)) == 1
    assert [load.held for load in await database.call(ListLoads(full, ("default",)))] == [1]


async def test_a_stream_that_is_being_handed_over_is_not_joined(database: Database):
    await defer(database, ["s"] * 2)
    session = await begin(database)
    first, second = await claim(database, session)
    await database.call(ReleaseTriggers(session, ((first.id, first.token),), moves=True))
    assert await claim(database, session, 99, 1, leaving=("s",)) == ()
    (again,) = await claim(database, session, 99, 1)
    assert (again.id, again.rests_us > 50_000_000, second.rests_us) == (first.id, True, 0)


async def test_many_triggers_that_cannot_be_decrypted_keep_no_triggerer_from_the_rest(database: Database):
    await defer(database, [None] * 60)
    # The last ones are the least urgent.
    keep = "SELECT id FROM trigger ORDER BY priority, id DESC LIMIT 4"
    unreadable = f"UPDATE trigger SET kwargs = 'fernet:unknown' WHERE id NOT IN ({keep})"
    await database.write(lambda connection: connection.exec_driver_sql(unreadable))
    one = await begin(database)
    assert len(await claim(database, one, 2)) == 2
    assert len(await claim(database, one, 2, 2)) == 2
