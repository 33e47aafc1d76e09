"""A task instance is found by its run, task and map index: each step touches one instance only, on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import select
from tests.store.dags import Player, add_elements, dag, task

from tidemill.store.calls.all_calls import (
    AttemptReport,
    Success,
)
from tidemill.store.dag_tables import dag_run, task_instance
from tidemill.store.database import Database

DAY_US = 86_400_000_000


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def read_rows(player: Player, column: str) -> dict[tuple[str, int], object]:
    """Return a column of all task rows, by task and index."""
    columns = task_instance.c
    statement = select(columns.task_id, columns.map_index, columns[column]).order_by(columns.id)
    rows = await player.store.read(lambda connection: connection.execute(statement).all())
    return {(row[0], row[1]): row[2] for row in rows}


async def test_an_attempt_names_its_element_and_its_end_moves_only_that(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a")))
    await add_elements(player.store, run, "a", "scheduled", "scheduled", "scheduled")

    attempts = {one.map_index: one for one in await player.claim()}

    assert sorted(attempts) == [-1, 0, 1, 2]
    assert {one.task_id for one in attempts.values()} == {"a"}
    await player.report(attempts[1], Success())
    states = {"a": "running", "a[0]": "running", "a[1]": "success", "a[2]": "running", "b": "none"}
    assert await player.states(run) == states
    unfinished = await player.store.read(lambda c: c.execute(select(dag_run.c.unfinished)).scalar_one())
    assert unfinished == 2, "the run counts its tasks"
    await player.turn(*[AttemptReport(attempts[index].task, attempts[index].epoch, Success()) for index in (0, 2)])
    await player.schedule()
    assert (await player.states(run))["b"] == "none"
    await player.report(attempts[-1], Success())
    await player.schedule()
    assert (await player.states(run))["b"] == "queued"


async def test_the_end_of_a_task_decides_its_successor_and_no_element_of_it(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a"), task("c", "b")))
    await add_elements(player.store, run, "b", "none", "none")
    await add_elements(player.store, run, "c", "none")
    (attempt,) = await player.claim()

    await player.report(attempt, Success())
    await player.schedule()

    assert await player.states(run) == {
        "a": "success", "b": "queued", "b[0]": "none", "b[1]": "none", "c": "none", "c[0]": "none"
    }  # fmt: skip
    assert (await read_rows(player, "epoch"))["b", 0] == 0
    assert [(await read_rows(player, "tallies"))["b", index] for index in (-1, 0, 1)] == ["1 0 0 0", "", ""]


async def test_a_skip_by_name_and_its_wave_pass_by_elements(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a"), task("c", "b"), task("d", "a")))
    await add_elements(player.store, run, "b", "none", "none")
    await add_elements(player.store, run, "c", "none")

    await player.report(await player.claim_one(), Success(), skip=("b",))

    votes = await read_rows(player, "skip_votes")
    assert {key: found for key, found in votes.items() if found} == {("b", -1): 1}
    states = await player.states(run)
    assert [states[name] for name in ("b", "c", "b[0]", "b[1]", "c[0]")] == ["skipped", "skipped", *["none"] * 3]


async def test_the_leaves_of_a_run_are_tasks_not_elements(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a")))
    await add_elements(player.store, run, "b", "failed", "success")

    await player.play()

    assert (await player.run(run)).state == "success"


async def test_an_instance_waits_for_the_same_instance_of_the_previous_run(player: Player) -> None:
    structure = dag(task("a", depends_on_past=True), task("b", "a"))
    first = await player.create(structure, run_id="first", logical_us=DAY_US)
    await add_elements(player.store, first, "a", "failed", "none")
    second = await player.create(structure, run_id="second", logical_us=2 * DAY_US)
    await add_elements(player.store, second, "a", "none", "none")
    (attempt,) = await player.claim()
    assert attempt.run == first.id
    assert (await player.states(second))["a"] == "none"

    await player.report(attempt, Success())
    await player.schedule()

    states = await player.states(second)
    assert [states[name] for name in ("a", "a[0]", "a[1]")] == ["queued", "none", "none"]


async def test_an_instance_waits_for_the_tasks_that_follow_it_in_the_previous_run(player: Player) -> None:
    structure = dag(task("a", wait_for_downstream=True), task("b", "a"))
    first = await player.create(structure, run_id="first", logical_us=DAY_US)
    await add_elements(player.store, first, "b", "none")
    second = await player.create(structure, run_id="second", logical_us=2 * DAY_US)
    await add_elements(player.store, second, "a", "none")

    await player.report(await player.claim_one(), Success())
    (attempt,) = await player.claim()
    assert (attempt.run, attempt.task_id) == (first.id, "b")
    assert (await player.states(second))["a"] == "none"
    await player.report(attempt, Success())
    (attempt,) = await player.claim()

    assert (attempt.run, attempt.task_id, attempt.map_index) == (second.id, "a", -1)
    assert (await player.states(second))["a[0]"] == "none"
