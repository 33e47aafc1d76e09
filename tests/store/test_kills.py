"""`on_kill` of triggers that users stop: by their triggerer, or by another one once it is gone."""

from __future__ import annotations

from itertools import count

import pytest
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Deferral
from tidemill.core.triggers.lost_hosts import KILL_LOSSES
from tidemill.store.calls.callback_calls import ListCallbacks
from tidemill.store.calls.instance_calls import ClearTasks
from tidemill.store.calls.run_calls import CancelRun
from tidemill.store.calls.service_calls import BeginSession, EndSession, LoseSession, TrialKind
from tidemill.store.calls.trigger_calls import (
    ClaimedTrigger,
    ClaimTriggers,
    FindSuspects,
    FiredEvent,
    HeldTriggers,
    KillCalled,
    ReleaseTriggers,
    ReserveTriggers,
    StoreEvents,
)
from tidemill.store.calls.worker_calls import AttemptReport
from tidemill.store.database import Database
from tidemill.store.queries.sessions import kills

REQUESTS = count(1)


class Site:
    """A deferred task, and triggerers."""

    def __init__(self, database: Database) -> None:
        self.store = database

    async def defer(self) -> None:
        self.player = await Player(self.store).begin()
        self.run = await self.player.create(dag(task("t", retries=0)))
        await self.defer_again()

    async def defer_again(self) -> None:
        attempt = await self.player.claim_one()
        await self.player.turn(AttemptReport(attempt.task, attempt.epoch, Deferral("package.Class", "{}", "resume")))

    async def begin(self, trial: TrialKind = TrialKind.NONE) -> int:
        return await self.store.call(BeginSession("triggerer", "t", "machine", "boot", 17, trial=trial))

    async def claim(self, session: int) -> tuple[ClaimedTrigger, ...]:
        return await self.store.call(ClaimTriggers(session, next(REQUESTS), 10, ("default",), kills=True))

    async def cancel(self) -> None:
        await self.store.call(CancelRun(self.run.dag_id, self.run.run_id, "tester"))
        await self.player.schedule()

    async def state(self) -> str:
        return (await self.player.states(self.run))["t"]


@pytest.fixture
async def site(database: Database) -> Site:
    site = Site(database)
    await site.defer()
    return site


async def test_another_one_calls_it_if_no_triggerer_runs_the_trigger(site: Site):
    first, other = await site.begin(), await site.begin()
    (claimed,) = await site.claim(first)
    await site.store.call(EndSession(first))
    await site.cancel()
    assert await site.state() == "failed"

    request = ClaimTriggers(other, next(REQUESTS), 10, ("default",), kills=True)
    (kill,) = await site.store.call(request)
    assert (kill.id, kill.classpath, kill.kill is not None) == (claimed.id, "package.Class", True)
    assert await site.store.call(request) == (kill,), "the answer was lost"
    assert await site.claim(other) == ()
    assert await site.store.call(KillCalled(other, kill.kill or 0))
    assert not await site.store.call(KillCalled(other, kill.kill or 0))
    await site.store.call(LoseSession(other))
    assert await site.claim(await site.begin()) == ()


async def test_nobody_calls_it_for_a_trigger_that_has_never_run(site: Site):
    await site.cancel()
    assert await site.claim(await site.begin()) == ()


async def test_the_triggerer_of_the_trigger_calls_it(site: Site):
    first, other = await site.begin(), await site.begin()
    (claimed,) = await site.claim(first)
    await site.cancel()
    assert await site.state() == "ending"
    (stopped,) = await site.store.call(HeldTriggers(first, ((claimed.id, claimed.token),)))
    assert stopped.reason == "user"
    assert await site.claim(other) == ()
    released = ((claimed.id, claimed.token),)
    await site.store.call(ReleaseTriggers(first, released, killed=(claimed.id,)))
    assert await site.state() == "failed"
    await site.store.call(LoseSession(first))
    assert await site.claim(other) == ()


async def test_another_one_calls_it_if_the_triggerer_has_ended_before_it_did(site: Site):
    first, other = await site.begin(), await site.begin()
    await site.claim(first)
    await site.cancel()
    await site.store.call(EndSession(first))
    assert await site.state() == "failed"
    for _ in range(KILL_LOSSES):
        (kill,) = await site.claim(other)
        assert kill.kill is not None
        await site.store.call(EndSession(other))
        other = await site.begin()


async def test_a_process_of_its_own_calls_it_if_the_triggerer_was_lost_meanwhile(site: Site):
    first, other = await site.begin(), await site.begin()
    await site.claim(first)
    await site.cancel()
    assert not (await site.store.call(FindSuspects(("default",)))).kills
    await site.store.call(LoseSession(first))
    assert await site.state() == "failed"

    assert await site.claim(other) == (), "it may have killed the first one"
    assert not (await site.store.call(FindSuspects(("other",)))).kills
    for kwargs, is_found in (("fernet:unknown", False), ("plain:{}", True)):
        new = f"UPDATE trigger SET kwargs = '{kwargs}'"
        await site.store.write(lambda connection, new=new: connection.exec_driver_sql(new))
        assert (await site.store.call(FindSuspects(("default",)))).kills is is_found
    trial = await site.begin(TrialKind.KILLS)
    request = ClaimTriggers(trial, next(REQUESTS), 10, ("default",), reserved=True)
    (kill,) = await site.store.call(request)
    assert await site.store.call(request) == (kill,), "the answer was lost"
    assert await site.store.call(KillCalled(trial, kill.kill or 0))
    assert not (await site.store.call(FindSuspects(("default",)))).kills


async def test_nothing_calls_it_any_more_once_it_has_killed_several_processes(site: Site):
    session = await site.begin()
    await site.claim(session)
    await site.cancel()
    for _ in range(KILL_LOSSES - 1):
        await site.store.call(LoseSession(session))
        session = await site.begin(TrialKind.KILLS)
        assert len(await site.claim(session)) == 1
    await site.store.call(LoseSession(session))
    assert not (await site.store.call(FindSuspects(("default",)))).kills
    (row,) = (await site.store.call(ListCallbacks(site.run.dag_id, site.run.run_id))).rows
    assert (row.state, "its triggerer was lost 3 times" in (row.error or "")) == ("failed", True)


async def test_what_was_lost_again_is_called_while_its_process_calls_nothing_else(site: Site):
    other = Site(site.store)
    await other.defer()
    session = await site.begin()
    assert len(await site.claim(session)) == 2
    await site.cancel()
    await other.cancel()
    for _ in range(KILL_LOSSES - 1):
        await site.store.call(LoseSession(session))
        session = await site.begin(TrialKind.KILLS)
        first, *rest = await site.claim(session)
    assert rest == []
    assert await site.claim(session) == (), "it would be lost with the first one"
    assert await site.store.call(KillCalled(session, first.kill or 0))
    assert len(await site.claim(session)) == 1


async def test_another_one_calls_it_if_the_triggerer_was_handing_the_trigger_over(site: Site):
    first, other = await site.begin(), await site.begin()
    (claimed,) = await site.claim(first)
    await site.cancel()
    await site.store.call(ReleaseTriggers(first, ((claimed.id, claimed.token),), moves=True))
    assert await site.state() == "failed"
    (kill,) = await site.claim(other)
    assert kill.kill is not None


async def test_one_that_was_cut_off_is_not_told_the_reason_of_a_later_claim(site: Site):
    cut_off, other = await site.begin(), await site.begin()
    (old,) = await site.claim(cut_off)
    await site.store.call(LoseSession(cut_off))
    (new,) = await site.claim(other)
    await site.store.call(ClearTasks(site.run.dag_id, site.run.run_id, ("t",), "tester"))
    held = HeldTriggers(cut_off, ((old.id, old.token),))
    assert [one.reason for one in await site.store.call(held)] == ["hand-over"]
    held = HeldTriggers(other, ((new.id, new.token),))
    assert [one.reason for one in await site.store.call(held)] == ["user"]


async def test_another_one_calls_it_for_a_trigger_that_waits_for_its_trial(site: Site):
    first, holder = await site.begin(), await site.begin()
    (claimed,) = await site.claim(first)
    await site.store.call(ReserveTriggers(first, holder, (claimed.id,)))
    await site.store.call(LoseSession(first))
    await site.cancel()
    assert await site.state() == "failed", "nobody has to clean up"
    (kill,) = await site.claim(await site.begin())
    assert kill.kill is not None


async def test_one_whose_session_has_ended_leaves_it_to_another(site: Site):
    cut_off = await site.begin()
    (claimed,) = await site.claim(cut_off)
    await site.cancel()
    await site.store.call(LoseSession(cut_off))
    held = HeldTriggers(cut_off, ((claimed.id, claimed.token),))
    assert [one.reason for one in await site.store.call(held)] == ["hand-over"]
    (kill,) = await site.claim(await site.begin(TrialKind.KILLS))
    assert kill.kill is not None


async def test_one_whose_arguments_cannot_be_decrypted_waits_for_its_key_and_keeps_no_other_waiting(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kills, "_KILLS", 2)
    first, other = await site.begin(), await site.begin()
    secret, readable = "UPDATE trigger SET kwargs = 'fernet:unknown'", "UPDATE trigger SET kwargs = 'plain:{}'"
    stopped = []
    for _ in range(4):
        (claimed,) = await site.store.call(ClaimTriggers(first, next(REQUESTS), 10, ("default",)))
        stopped.append(claimed.id)
        await site.store.call(EndSession(first))
        first = await site.begin()
        await site.store.call(ClearTasks(site.run.dag_id, site.run.run_id, ("t",), "tester"))
        await site.defer_again()
    unreadable = f"{secret} WHERE id IN ({stopped[0]}, {stopped[1]}, {stopped[2]})"
    await site.store.write(lambda connection: connection.exec_driver_sql(unreadable))

    assert [one.id for one in await site.claim(other) if one.kill is not None] == stopped[3:]
    await site.store.write(lambda connection: connection.exec_driver_sql(readable))
    found = [one.id for _ in range(2) for one in await site.claim(first) if one.kill is not None]
    assert found == stopped[:3], "no session that lacks the key has kept them"


async def test_nothing_but_a_user_has_it_called(site: Site):
    first, other = await site.begin(), await site.begin()
    await site.claim(first)
    await site.store.call(LoseSession(first))
    (claimed,) = await site.claim(other)
    assert claimed.kill is None
    await site.store.call(StoreEvents(other, 1, (FiredEvent(claimed.id, claimed.token, "1", None, 0),)))
    await site.store.call(LoseSession(other))
    assert await site.claim(await site.begin()) == ()
