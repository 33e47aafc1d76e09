"""Who of several hosts over one PostgreSQL runs a list, and what becomes of those who did."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs
from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import DID
from tests.services.triggerer.hosts import spec
from tests.services.triggerer.replicas import QUICK, Stage
from tests.store.helpers import all_events, claim, new_session
from tests.until import slack, until

from tidemill.runtime.process.identity_lock import IdentityLock
from tidemill.services.triggerer.lists.sessions import KIND, Ownership, SessionEndedError
from tidemill.store.engines.opening import open_store
from tidemill.store.queries.triggers.sessions import end_session, list_live_sessions
from tidemill.store.queries.triggers.triggers import find_triggers
from tidemill.store.records import TriggerState

pytestmark = pytest.mark.usefixtures("fresh")

WAITS = spec("waits", hosted.Counting, then="wait")
TICKS = spec("ticks", hosted.Trickling)


@pytest.fixture
async def stage(postgres, fresh) -> AsyncIterator[Stage]:
    made = Stage(await postgres.new_database())
    yield made
    await made.close()


async def test_a_second_host_waits_logs_for_which_one_and_runs_nothing(stage):
    with capture_logs() as logs:
        first = await stage.started(WAITS)
        await until(lambda: "yielded" in DID["waits"])
        second = await stage.started(WAITS)
        await until(lambda: second.waits)
        await asyncio.sleep(2 * QUICK.lease_seconds)  # the list of one that beats is never taken
    assert first.owns
    assert not second.owns
    assert second.replica.report()["waits_for"]["process"] == os.getpid()
    assert second.replica.report()["waits_for"]["session"] == first.ownership.session_id
    assert DID["waits"] == ["run", "yielded"]
    said = [one for one in logs if "another host runs this list" in one["event"]]
    assert [one["session"] for one in said] == [first.ownership.session_id]
    assert not [one for one in logs if "runs other triggers" in one["event"]]


async def test_a_clean_end_is_followed_at_once(stage):
    first = await stage.started(WAITS)
    await until(lambda: first.owns and "yielded" in DID["waits"])
    second = await stage.started(WAITS)
    await until(lambda: second.waits)
    await first.end()
    ended = time.monotonic()
    await until(lambda: second.owns)
    assert time.monotonic() - ended < slack(QUICK.lease_seconds)
    await until(lambda: DID["waits"].count("yielded") == 2)


async def test_a_death_is_noticed_by_the_beat_and_the_dead_session_can_write_nothing_more(stage):
    first = await stage.started(WAITS)
    await until(lambda: first.owns and "yielded" in DID["waits"])
    second = await stage.started(WAITS)
    await until(lambda: second.waits)
    old = first.ownership.session_id
    await first.ownership.pause()
    await until(lambda: second.owns)
    with pytest.raises(SessionEndedError):
        await first.store.write(first.ownership.guard)
    assert old not in [session.id for session in await stage.sessions()]


async def test_of_two_waiting_hosts_one_takes_over_and_the_other_goes_on_waiting(stage):
    first = await stage.started(WAITS)
    await until(lambda: first.owns and "yielded" in DID["waits"])
    others = [await stage.started(WAITS, name=f"host-{n}") for n in range(3)]
    await until(lambda: all(other.waits for other in others))
    await first.vanish()
    await until(lambda: any(other.owns for other in others))
    owner = next(other for other in others if other.owns)
    await until(
        lambda: all(
            other is owner or (other.ownership.holder and other.ownership.holder.id == owner.ownership.session_id)
            for other in others
        )
    )
    assert sum(other.owns for other in others) == 1


async def test_an_owner_that_was_away_hands_over_waits_and_gets_the_list_back(stage):
    first = await stage.started(TICKS, WAITS)
    await until(lambda: first.owns and len(DID["ticks"]) > 3 and "yielded" in DID["waits"])
    old = first.ownership.session_id
    second = await stage.started(TICKS, WAITS)
    await until(lambda: second.waits)
    first.store.silent.clear()  # as a process that is stopped: it neither beats nor stores
    await until(lambda: second.owns)
    first.store.silent.set()
    await until(lambda: first.waits)
    assert DID["waits"].count("cleanup") == 1
    assert "on_kill" not in DID["waits"]
    assert first.ownership._session not in (None, old)
    [record] = await second.store.read(lambda c: find_triggers(c, ["waits"]))
    assert record.state is TriggerState.RUNNING  # as the second one says

    await until(lambda: DID["waits"].count("run") == 2)
    await second.end()
    await until(lambda: first.owns)
    await until(lambda: DID["waits"].count("run") == 3)
    rows = [row for row in await all_events(first.store.database) if row.trigger_name == "ticks"]
    assert [row.sequence_index for row in rows] == list(range(len(rows)))


async def test_a_single_trigger_that_another_session_claims_is_handed_over_with_the_next_beat(stage):
    first = await stage.started(WAITS, TICKS)
    await until(lambda: first.owns and "yielded" in DID["waits"])
    database = first.store.database
    [record] = await database.read(lambda c: find_triggers(c, ["waits"]))
    await claim(database, record.id, session=await new_session(database, host="another"))
    await until(lambda: "cleanup" in DID["waits"])
    assert "on_kill" not in DID["waits"]
    await until(lambda: first.replica.host is not None and first.replica.host.running == 1)
    [record] = await database.read(lambda c: find_triggers(c, ["waits"]))
    assert (record.state, record.session) == (TriggerState.RUNNING, "another, process 17")


async def test_a_host_that_cannot_reach_the_store_declares_no_other_dead(stage):
    first = await stage.started(WAITS)
    await until(lambda: first.owns)
    second = await stage.started(WAITS)
    await until(lambda: second.waits)
    second.store.fails = True
    await asyncio.sleep(2 * QUICK.lease_seconds)  # the outage itself is what is tested
    assert second.store.failed > 1
    second.store.fails = False
    await asyncio.sleep(5 * QUICK.look_seconds)
    assert first.owns
    assert not second.owns


async def test_an_outage_for_all_ends_no_session(stage):
    first = await stage.started(WAITS)
    second = await stage.started(WAITS)
    await until(lambda: first.waits or second.waits)
    owner, waiter = (first, second) if second.waits else (second, first)
    await until(lambda: owner.owns)
    session = owner.ownership.session_id
    first.store.fails = second.store.fails = True
    await asyncio.sleep(2 * QUICK.lease_seconds)  # the outage itself is what is tested
    waiter.store.fails = False
    await asyncio.sleep(3 * QUICK.look_seconds)  # it looks before the owner has come back
    owner.store.fails = False
    await until(lambda: not owner.store.fails and owner.ownership._beating is not None)
    await asyncio.sleep(3 * QUICK.beat_seconds)
    assert owner.owns
    assert owner.ownership.session_id == session


async def test_an_owner_that_has_not_beaten_for_half_a_lease_opens_no_stream_before_it_beats_again(stage):
    first = await stage.started(WAITS)
    await until(lambda: first.owns)
    await asyncio.wait_for(first.ownership.wait_confirmed(), 30)
    first.store.fails = True
    await asyncio.sleep(QUICK.lease_seconds)  # the outage itself is what is tested
    opening = asyncio.create_task(first.ownership.wait_confirmed())
    await asyncio.sleep(3 * QUICK.beat_seconds)
    assert not opening.done()
    first.store.fails = False
    await asyncio.wait_for(opening, 30)


async def test_an_owner_that_has_lost_its_list_opens_no_stream_before_it_has_it_again(stage):
    ownership = (await stage.part()).ownership
    await ownership.acquire()
    session = ownership.session_id
    await asyncio.wait_for(ownership.wait_confirmed(), 30)
    await stage.parts[0].store.write(lambda c: end_session(c, session, 1))
    await asyncio.wait_for(ownership.wait_lost(), 30)
    opening = asyncio.create_task(ownership.wait_confirmed())
    await asyncio.sleep(3 * QUICK.beat_seconds)
    assert not opening.done()
    await ownership.acquire()
    await asyncio.wait_for(opening, 30)
    assert ownership.session_id != session


async def test_a_waiting_session_that_is_ended_begins_again(stage):
    first = await stage.started(WAITS)
    await until(lambda: first.owns)
    second = await stage.started(WAITS)
    await until(lambda: second.waits)
    old = second.ownership.session_id
    await first.store.write(lambda c: end_session(c, old, 1))
    await until(lambda: second.ownership.session_id != old)
    await first.end()
    await until(lambda: second.owns)


async def test_a_session_that_died_while_waiting_is_ended_by_those_that_still_wait(stage):
    first = await stage.started(WAITS)
    await until(lambda: first.owns)
    second = await stage.started(WAITS)
    await until(lambda: second.waits)
    await second.vanish()
    third = await stage.started(WAITS)
    await until(lambda: third.waits)

    async with asyncio.timeout(30):
        while second.ownership.session_id in [one.id for one in await stage.sessions()]:
            await asyncio.sleep(0.05)
    assert first.owns
    assert not third.owns


async def test_a_beat_that_ends_for_a_reason_of_its_own_is_named_and_nothing_is_run_on_without_it(stage):
    with capture_logs() as logs:
        first = await stage.started(WAITS)
        await until(lambda: first.owns and "yielded" in DID["waits"])
        session = first.ownership.session_id
        assert first.ownership._beating is not None
        first.ownership._beating.cancel()
        await until(lambda: first.owns and first.ownership.session_id != session)
        await until(lambda: DID["waits"].count("run") == 2)
    assert [one["log_level"] for one in logs if "the heartbeat of the session has ended" in one["event"]] == ["error"]
    assert DID["waits"].count("cleanup") == 1


# -- the lock of the list


async def test_the_host_that_gets_the_lock_of_a_dead_one_takes_over_at_once(stage, tmp_path):
    locks = [IdentityLock("triggers", "list", tmp_path) for _ in range(2)]
    assert locks[0].acquire()
    first = await stage.started(WAITS, lock=locks[0])
    await until(lambda: first.owns)
    second = await stage.started(WAITS, lock=locks[1])
    await until(lambda: second.waits)
    assert not locks[1].held
    vanished = time.monotonic()
    await first.vanish()
    await until(lambda: second.owns)
    assert time.monotonic() - vanished < slack(QUICK.lease_seconds / 2)
    [own] = [one for one in await stage.sessions() if one.id == second.ownership.session_id]
    assert own.lock == locks[1].identity != ""


async def test_a_lock_in_another_folder_proves_nothing(stage, tmp_path):
    locks = [IdentityLock("triggers", "list", tmp_path / name) for name in ("one", "two")]
    assert all(lock.acquire() for lock in locks)
    assert locks[0].identity != locks[1].identity
    first = await stage.started(WAITS, lock=locks[0])
    await until(lambda: first.owns)
    second = await stage.started(WAITS, lock=locks[1])
    await until(lambda: second.waits)
    await first.vanish()
    vanished = time.monotonic()
    await until(lambda: second.owns)
    assert time.monotonic() - vanished > QUICK.lease_seconds / 2


# -- contents


async def test_replicas_with_different_lists_log_each_difference_once(stage):
    with capture_logs() as logs:
        first = await stage.started(WAITS)
        await until(lambda: first.owns)
        second = await stage.started(WAITS, TICKS)
        await until(lambda: any("runs other triggers" in one["event"] for one in logs))
        second.listed = [WAITS]
        second.replica.read_again()
        await until(lambda: any("reloaded" in one["event"] for one in logs))
        first.listed = [TICKS]
        first.replica.read_again()
        await until(lambda: sum("runs other triggers" in one["event"] for one in logs) == 2)
        await asyncio.sleep(5 * QUICK.look_seconds)
    assert sum("runs other triggers" in one["event"] for one in logs) == 2
    assert sum("another host runs this list" in one["event"] for one in logs) == 1


async def until_cancelled(here, name: str) -> None:
    """Wait until a trigger that is no longer listed is cancelled, which follows the start of those that are."""

    async def is_cancelled() -> bool:
        [record] = await here.store.read(lambda c: find_triggers(c, [name]))
        return (record.state, record.reason) == (TriggerState.CANCELLED, "user")

    async with asyncio.timeout(60):
        while not await is_cancelled():
            await asyncio.sleep(0.05)


async def test_a_list_that_was_read_again_while_waiting_is_what_runs_then(stage):
    first = await stage.started(WAITS)
    await until(lambda: first.owns and "yielded" in DID["waits"])
    second = await stage.started(WAITS)
    await until(lambda: second.waits)
    second.listed = [TICKS]
    second.replica.read_again()
    await until(lambda: second.replica._reading is None)
    await first.end()
    await until(lambda: len(DID["ticks"]) > 1)
    assert DID["waits"].count("run") == 1
    await until_cancelled(second, "waits")


async def test_what_was_removed_while_down_is_cancelled_by_a_replica_under_another_name(stage):
    first = await stage.started(WAITS, TICKS, name="one")
    await until(lambda: first.owns and "yielded" in DID["waits"])
    await first.vanish()
    second = await stage.started(TICKS, name="two")
    await until(lambda: second.owns and second.replica.host.running == 1)
    await until_cancelled(second, "waits")


# -- one process at a time


async def test_the_new_holder_of_a_sqlite_file_ends_all_sessions_at_once(tmp_path):
    url = f"sqlite:///{tmp_path}/tidemill.db"
    database = await open_store(url)
    for name in ("list", "other"):
        await Ownership(database, name)._begin()
    await database.close()
    database = await open_store(url)
    ownership = Ownership(database, "list")
    await asyncio.wait_for(ownership.acquire(), 30)
    assert [one.id for one in await database.read(lambda c: list_live_sessions(c, KIND))] == [ownership.session_id]
    await ownership.release()
    assert await database.read(lambda c: list_live_sessions(c, KIND)) == []
    await database.close()


async def test_a_list_that_is_read_again_as_its_host_is_about_to_start_is_run_whole(stage, monkeypatch):
    read = asyncio.get_running_loop().create_future()

    async def to_thread(work):
        await read
        return work()

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    part = await stage.part(WAITS)
    create = part.replica._create

    def create_as_the_list_is_read():
        read.set_result(None)
        return create()

    part.replica._create = create_as_the_list_is_read
    part.replica.read_again()
    part.listed = [WAITS, spec("new", hosted.Counting, then="wait")]
    part.begin()
    await until(lambda: DID["waits"] and DID["new"])
    await until(lambda: part.replica._reading is None)
    await part.replica.host.events.wait_settled()
    records = await part.store.read(lambda c: find_triggers(c, ["waits", "new"]))
    assert {(record.spec.name, record.state, record.next_index) for record in records} == {
        ("waits", TriggerState.RUNNING, 1),
        ("new", TriggerState.RUNNING, 1),
    }
