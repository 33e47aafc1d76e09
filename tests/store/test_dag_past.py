"""What a task reads of other runs: their XComs, and when they were, on both databases."""

from __future__ import annotations

import pytest
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Failure, Success
from tidemill.store.calls.run_calls import CreateRun, RunRecord, WatchRuns
from tidemill.store.calls.task_calls import GetEarlierRun, GetXCom
from tidemill.store.database import Database

DAY_US = 86_400_000_000


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def play(player: Player, run_id: str, day: int | None, *, fails: bool = False, id: str = "dag") -> RunRecord:
    """Make a run whose task leaves its name, or fails."""
    logical_us = None if day is None else day * DAY_US
    run = await player.create(dag(task("a"), id=id), run_id=run_id, logical_us=logical_us)
    attempt = await player.claim_one()
    if fails:
        await player.report(attempt, Failure("no"))
    else:
        await player.report(attempt, Success(), xcoms=(("return_value", f'"{run_id}"'),))
    return run


async def pull(player: Player, run: RunRecord, **details: object) -> str | None:
    (found,) = await player.store.call(GetXCom(run.id, ("a",), **details))  # type: ignore[arg-type]
    return found


async def test_the_earlier_run_goes_by_logical_date_and_may_have_to_have_succeeded(player: Player) -> None:
    # Not created in the order of their dates.
    third = await play(player, "third", 3)
    await play(player, "first", 1)
    await play(player, "second", 2, fails=True)
    undated = await play(player, "undated", None)
    await play(player, "elsewhere", 2, id="other")

    async def find(run: RunRecord, state: str | None = None) -> str | None:
        found = await player.store.call(GetEarlierRun(run.id, state))
        return None if found is None else found.run_id

    assert [await find(third), await find(third, "success"), await find(third, "queued")] == ["second", "first", None]
    assert await find(undated) is None
    first = await player.store.call(GetEarlierRun(third.id, "success"))
    assert first is not None
    assert await find(first) is None


async def test_xcoms_of_earlier_runs_other_runs_and_other_dags_are_read(player: Player) -> None:
    await play(player, "first", 1)
    await play(player, "elsewhere", 1, id="other")
    await play(player, "later elsewhere", 9, id="other")
    second = await play(player, "second", 2, fails=True)

    assert await pull(player, second) is None
    assert await pull(player, second, include_prior=True) == '"first"'
    assert await pull(player, second, run_id="first") == '"first"'
    assert await pull(player, second, run_id="nothing") is None
    assert await pull(player, second, dag_id="other") == '"elsewhere"'
    assert await pull(player, second, dag_id="other", run_id="later elsewhere") == '"later elsewhere"'
    assert await pull(player, second, dag_id="nothing") is None
    await player.store.call(CreateRun("dag", run_id="third", logical_us=3 * DAY_US))
    third = await player.store.call(GetEarlierRun(second.id))
    assert third is not None
    assert third.run_id == "first", "a run of a later date is not earlier"


async def test_runs_are_watched_with_those_first_that_have_not_ended(player: Player) -> None:
    await play(player, "old", None)
    await play(player, "failed", None, fails=True)
    await play(player, "newest", None)
    wide = dag(task("a"), task("b"), task("c", "a"), id="wide", max_active_runs=1)
    await player.create(wide, run_id="runs")
    await player.create(wide, run_id="waits")
    await player.schedule()
    first, second = await player.claim(2)
    await player.report(first, Success())

    seen = await player.store.call(WatchRuns(4))

    assert [(one.run.run_id, one.run.state, one.done, one.total, one.running, one.waiting) for one in seen] == [
        ("runs", "running", 1, 3, 1, 1),
        ("waits", "queued", 0, 3, 0, 3),
        ("newest", "success", 1, 1, 0, 0),
        ("failed", "failed", 1, 1, 0, 0),
    ]
    assert second.task_id == "b"
