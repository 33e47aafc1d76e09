"""Pools in which deferred tasks keep their slots, on both databases."""

from __future__ import annotations

import pytest
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Deferral, Success
from tidemill.store.calls.setting_calls import ListPools, PoolRecord, SetPool
from tidemill.store.calls.trigger_calls import ClaimTriggers, FiredEvent, StoreEvents
from tidemill.store.database import Database


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def look(player: Player) -> PoolRecord:
    (pool,) = [one for one in await player.store.call(ListPools()) if one.name == "small"]
    return pool


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_deferred_task_keeps_its_slot_only_where_the_pool_says_so(player: Player, keeps: bool) -> None:
    await player.store.call(SetPool("small", 2, "", keeps))
    tasks = task("first", pool="small", pool_slots=2, priority=2), task("second", pool="small")
    run = await player.create(dag(*tasks))
    first = await player.claim_one()
    await player.report(first, Deferral("tests.Trigger", "{}", "resume", "{}"))

    claimed = await player.claim()

    assert [one.task_id for one in claimed] == ([] if keeps else ["second"])
    assert (await look(player)).used == (2 if keeps else 1)
    assert (await look(player)).waiting == (1 if keeps else 0)
    for one in claimed:
        await player.report(one, Success())
    triggerer = await player.begin_service("triggerer")
    (trigger,) = await player.store.call(ClaimTriggers(triggerer, 1, 5))
    await player.store.call(StoreEvents(triggerer, 1, (FiredEvent(trigger.id, trigger.token, "1", None, 1),)))
    # It goes on in the slots that it had, before anything else gets them.
    resumed = await player.claim_one()
    assert (resumed.task_id, resumed.resume is not None) == ("first", True)
    await player.report(resumed, Success())
    for one in await player.claim():
        await player.report(one, Success())
    assert set((await player.states(run)).values()) == {"success"}
    assert (await look(player)).used == 0


async def test_a_change_of_the_pool_holds_for_tasks_that_are_deferred_already(player: Player) -> None:
    await player.store.call(SetPool("small", 1, "", True))
    await player.create(dag(task("first", pool="small", priority=2), task("second", pool="small")))
    await player.report(await player.claim_one(), Deferral("tests.Trigger", "{}", "resume", "{}"))
    assert await player.claim() == ()

    await player.store.call(SetPool("small", 1, "", False))

    assert (await player.claim_one()).task_id == "second"
