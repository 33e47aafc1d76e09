"""Workers that are told to stop while tasks run: what they give back, or lose then, uses up nothing."""

from __future__ import annotations

import pytest
from sqlalchemy import select
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Loss, Success
from tidemill.store.calls.service_calls import EndSession, LoseSession, StopSession
from tidemill.store.calls.worker_calls import CallbackReport
from tidemill.store.dag_tables import task_callback, task_instance
from tidemill.store.database import Database

#: More than the losses after which a task or a callback fails.
DRAINS = 8


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def drain(player: Player, *, killed: bool) -> None:
    """End the worker and begin another one."""
    assert await player.store.call(StopSession(player.worker))
    end = LoseSession(player.worker, player.scheduler) if killed else EndSession(player.worker)
    assert await player.store.call(end)
    player.worker = await player.begin_service("worker")


async def read_lost(player: Player, table: object) -> int:
    return int(await player.store.read(lambda connection: connection.execute(select(table.c.lost)).scalar_one()))  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["given back", "ended", "killed"])
async def test_a_task_that_many_drains_cut_short_is_not_lost_and_ends_once(player: Player, how: str) -> None:
    run = await player.create(dag(task("a")))
    for _ in range(DRAINS):
        attempt = await player.claim_one()
        assert attempt.try_number == 1
        if how == "given back":
            await player.report(attempt, Loss(is_return=True))
        await drain(player, killed=how == "killed")
        assert await read_lost(player, task_instance) == 1, "it does not rise"
    await player.report(await player.claim_one(), Success())
    assert (await player.run(run)).state == "success"
    assert (await player.tasks(run))["a"].tries == 1


@pytest.mark.parametrize("how", ["given back", "ended", "killed"])
async def test_a_callback_that_many_drains_cut_short_is_not_lost(player: Player, how: str) -> None:
    await player.create(dag(task("a", callbacks=("on_success",))))
    await player.report(await player.claim_one(), Success())
    for _ in range(DRAINS):
        callback = (await player.claim_one()).callback
        assert callback is not None
        if how == "given back":
            await player.turn(callbacks=(CallbackReport(callback.id, lost=True, returned=True),))
        await drain(player, killed=how == "killed")
        assert await read_lost(player, task_callback) == 0
    assert (await player.claim_one()).callback is not None


async def test_workers_that_die_without_having_been_told_to_stop_are_counted(player: Player) -> None:
    run = await player.create(dag(task("a")))
    for _ in range(DRAINS):
        if not await player.claim():
            break
        await player.store.call(LoseSession(player.worker, player.scheduler))
        player.worker = await player.begin_service("worker")
    assert (await player.run(run)).state == "failed"
