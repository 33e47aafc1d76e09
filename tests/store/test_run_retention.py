"""Old runs of DAGs are removed with all that belongs to them, and nothing else is, on both databases."""

from __future__ import annotations

import time
from functools import partial

import pytest
from sqlalchemy import Connection, func, select, text, update
from tests.store.dags import Player, add_elements, dag, encode, task

from tidemill.config.sections.triggerer_settings import StoreSettings
from tidemill.core.tasks.endings import Deferral, Failure, Success
from tidemill.store import run_retention
from tidemill.store.calls.instance_calls import ClearTasks
from tidemill.store.calls.run_calls import ListRuns
from tidemill.store.calls.service_calls import StoreFile
from tidemill.store.calls.task_calls import AppendLog
from tidemill.store.calls.trigger_calls import ClaimTriggers, FiredEvent, StoreEvents
from tidemill.store.calls.worker_calls import CallbackReport, LogPart
from tidemill.store.dag_tables import (
    dag_run,
    dag_version,
    map_item,
    task_callback,
    task_instance,
    task_journal,
    task_log,
    task_state,
    xcom,
)
from tidemill.store.database import Database
from tidemill.store.queries.dags.runs.run_retention import TASKS, RemovedPart, RunRemoval, remove_part
from tidemill.store.run_retention import RunRetention
from tidemill.store.tables import trigger, trigger_cursor, trigger_event, trigger_identity

DAY_US = 86_400_000_000
OF_RUNS = (
    *(dag_run, task_callback, task_instance, task_journal, task_log, task_state, xcom),
    *(trigger, trigger_cursor, trigger_event, trigger_identity),
)


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


def retention(player: Player, days: float = 1, count: int = 1) -> RunRetention:
    settings = StoreSettings(retention_runs_days=days, retention_runs_count=count)
    return RunRetention(player.store, settings, round_seconds=0.01, pause_seconds=0)


def later(days: float) -> int:
    return time.time_ns() // 1000 + round(days * DAY_US)


async def play(player: Player, run_id: str, id: str = "dag", logical_us: int | None = None) -> None:
    """Make a run that leaves something in every table."""
    tasks = task("a", callbacks=("on_success",)), task("b")
    run = await player.create(dag(*tasks, id=id, callbacks=("on_success",)), run_id=run_id, logical_us=logical_us)
    waits, other = await player.claim(2)
    await player.report(waits, Deferral("tests.Trigger", "{}", "resume", "{}"))
    await player.report(other, Success(), xcoms=(("return_value", "1"),))
    triggerer = await player.begin_service("triggerer")
    (claimed,) = await player.store.call(ClaimTriggers(triggerer, 1, capacity=5))
    fired = FiredEvent(claimed.id, claimed.token, "1", "identity", 1)
    await player.store.call(StoreEvents(triggerer, 1, (fired,)))
    resumed = await player.claim_one()
    await player.store.call(AppendLog((LogPart(resumed.task, 1, 0, 5, b"data", 1),)))
    await player.store.call(AppendLog((LogPart(0, 0, run.id << 20, 5, b"data", 1),)))
    await player.report(resumed, Success(), xcoms=(("return_value", "2"),))
    callbacks = await player.claim(9)
    assert [one.callback is not None for one in callbacks] == [True, True]
    await player.turn(callbacks=tuple(CallbackReport(one.callback.id) for one in callbacks if one.callback))


async def names(player: Player) -> list[str]:
    return [run.run_id for run in (await player.store.call(ListRuns())).rows]


def count_all(connection: Connection) -> dict[str, int]:
    return {table.name: connection.execute(select(func.count()).select_from(table)).scalar_one() for table in OF_RUNS}


async def test_an_old_run_goes_with_all_that_belongs_to_it_and_the_last_ones_stay(player: Player) -> None:
    await play(player, "first")
    one = await player.store.read(count_all)
    assert 0 not in [count for name, count in one.items() if name != "task_state"], "the run left something everywhere"
    for name in ("second", "third"):
        await play(player, name)
    await play(player, "alone", "other")

    assert await retention(player).remove_old(later(0.5)) == 0, "they are not old"
    assert await retention(player, count=2).remove_old(later(2)) == 1
    assert await names(player) == ["alone", "third", "second"]
    assert await retention(player, count=1).remove_old(later(2)) == 1
    assert await names(player) == ["alone", "third"], "the last run of each DAG stays, however old it is"

    left = await player.store.read(count_all)
    expected = {name: 2 * count for name, count in one.items()}
    assert left == expected | {"task_log": 2}, "logs of callbacks of runs go by their age"


async def test_a_run_that_has_not_ended_or_is_looked_back_to_stays(player: Player) -> None:
    one = dag(task("a", depends_on_past=True))
    for day in (1, 2, 3, 4):
        await player.create(one, run_id=f"day {day}", logical_us=day * DAY_US)
    for result in (Success(), Success(), Failure("no")):
        await player.report(await player.claim_one(), result)
    assert await player.claim() == (), "day 4 waits for day 3"
    await player.create(one, run_id="undated")
    await player.report(await player.claim_one(), Success())

    assert await retention(player).remove_old(later(2)) == 2

    assert await names(player) == ["undated", "day 4", "day 3"]
    assert await player.claim() == (), "day 4 still waits for day 3"


async def test_what_is_large_is_removed_in_parts_and_a_run_that_is_cleared_meanwhile_stays(player: Player) -> None:
    await play(player, "old")
    await play(player, "new")
    (number,) = await player.store.read(lambda c: c.execute(select(func.min(dag_run.c.id))).scalars().all())
    task_id = await player.store.read(
        lambda c: c.execute(select(func.min(task_instance.c.id)).where(task_instance.c.run == number)).scalar_one()
    )
    parts = tuple(LogPart(task_id, 1, 10 + part, 5, b"data", 1) for part in range(500))
    await player.store.call(AppendLog(parts))
    before_us = later(2)

    first = await player.store.write(lambda c: remove_part(c, number, before_us))

    assert first.removal is RunRemoval.PART
    assert (await player.store.read(count_all))["task_log"] == 502 + 2 - 200
    assert "old" in await names(player)
    await player.store.call(ClearTasks("dag", "old", (), "me"))
    assert await player.store.write(lambda c: remove_part(c, number, before_us)) == RemovedPart(RunRemoval.KEPT)
    assert await retention(player).remove_old(before_us) == 0
    for attempt in await player.claim(2):
        await player.report(attempt, Success())
    callbacks = await player.claim(9)
    kept = await player.store.write(lambda c: remove_part(c, number, before_us))
    assert kept.removal is RunRemoval.KEPT, "a callback runs"
    await player.turn(callbacks=tuple(CallbackReport(one.callback.id) for one in callbacks if one.callback))
    assert await retention(player).remove_old(later(2)) == 1
    assert await names(player) == ["new"]


async def test_the_data_of_many_elements_is_removed_page_by_page(player: Player) -> None:
    run = await player.create(dag(task("a"), task("m"), task("z")))
    await player.play()
    await add_elements(player.store, run, "m", *["success"] * (2 * TASKS))

    def fill(connection: Connection) -> None:
        for table, columns in ((xcom, "task, key, value, created_us"), (map_item, "task, key, number, value")):
            values = "id, 'return_value', '1', 0" if table is xcom else "id, 'return_value', 0, '1'"
            connection.execute(text(f"INSERT INTO {table.name} ({columns}) SELECT {values} FROM task_instance"))

    await player.store.write(fill)
    part, parts, before_us = RemovedPart(RunRemoval.PART), [], later(2)
    while part.removal is RunRemoval.PART:
        part = await player.store.write(lambda c, after=part.after: remove_part(c, run.id, before_us, after))
        parts.append(part.after)

    pages = (2 * TASKS + 3) / TASKS
    assert len(parts) <= 2 * 2 * TASKS / 50 + 3 * pages
    assert set(parts) == {None, ("m", TASKS - 3), ("m", 2 * TASKS - 3), ("z", -1)}
    assert set((await player.store.read(count_all)).values()) == {0}
    assert await player.store.read(lambda c: c.execute(select(map_item)).all()) == []


async def test_versions_that_no_run_has_are_removed_except_the_last_one(player: Player) -> None:
    for number in range(3):
        run = await player.create(dag(task(f"task{number}")), run_id=f"run {number}")
        await player.report(await player.claim_one(), Success())
    assert run.version == 3
    for number in range(3, 6):  # nobody has ever run these
        structure = encode(dag(task(f"task{number}")))
        await player.store.call(StoreFile("dag.py", "digest", structures=(structure,)))

    assert await retention(player, count=2).remove_old(later(2)) == 1

    def read(connection: Connection) -> list[int]:
        return list(connection.execute(select(dag_version.c.number).order_by(dag_version.c.number)).scalars())

    assert await player.store.read(read) == [2, 3, 6]


async def test_pages_are_gone_through_and_the_rest_of_the_store_is_as_it_was(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_retention, "look_at_runs", partial(run_retention.look_at_runs, limit=3))
    for number in range(8):
        await player.create(dag(task("a")), run_id=str(number))
        await player.report(await player.claim_one(), Success())
    young = later(0)
    await player.store.write(lambda c: c.execute(update(dag_run).where(dag_run.c.run_id == "4").values(ended_us=young)))

    assert await retention(player, days=1e-9, count=2).remove_old(young) == 5
    assert await names(player) == ["7", "6", "4"]
