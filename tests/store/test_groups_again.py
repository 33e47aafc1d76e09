"""Users clear and mark mapped groups of tasks: whole groups, tasks of units, and what is around them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.dags import Player, dag, task
from tests.store.test_groups import claim, group, part, play, states
from tests.store.test_maps import end, find_head, literal

from tidemill.core.tasks.endings import Failure, Success
from tidemill.core.tasks.structure import MapSource
from tidemill.store.calls.call import CallRefusedError
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.run_calls import CancelRun, RunRecord
from tidemill.store.calls.task_calls import EmitItems
from tidemill.store.database import Database

#: Three tasks in a line, and one after the group.
LINE = (part("a"), part("b", "a"), part("c", "b"), task("z", "c"))


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def clear(player: Player, run: RunRecord, *names: str, **details: Any) -> list[str]:
    return sorted(await player.store.call(ClearTasks(run.dag_id, run.run_id, names, "tester", **details)))


async def test_a_cleared_task_runs_again_in_its_unit_alone(player: Player) -> None:
    run = await player.create(dag(group(literal(3)), *LINE))
    await play(player)

    assert await clear(player, run, "b", indexes=(1, 1), downstream=True) == ["b[1]", "c[1]", "z"]

    assert (await states(player, run))["c"] == "mapped"
    assert await play(player) == ["b1", "c1", "z"]
    assert await end(player, run) == dict.fromkeys(("run", "G", "a", "b", "c", "z"), "success")


async def test_failed_tasks_of_a_group_run_again(player: Player) -> None:
    run = await player.create(dag(group(literal(4)), *LINE))
    await play(player, "a1", "b2")
    assert (await end(player, run))["G"] == "failed"

    cleared = await clear(player, run, "G", failed=True, downstream=True)

    assert cleared == ["a[1]", "b[1]", "b[2]", "c[1]", "c[2]", "z"]
    assert sorted(await play(player)) == ["a1", "b1", "b2", "c1", "c2", "z"]
    assert await end(player, run) == dict.fromkeys(("run", "G", "a", "b", "c", "z"), "success")


async def test_a_unit_that_is_cleared_waits_for_the_window(player: Player) -> None:
    run = await player.create(dag(group(literal(3), max_outstanding=1), *LINE[:2]))
    held = await claim(player)
    await player.report(held["a0"], Success())
    held = await claim(player)
    await player.report(held["b0"], Success())
    held = await claim(player)
    assert sorted(held) == ["a1"]

    assert await clear(player, run, "G", map_index=0) == ["a[0]", "b[0]"]

    assert await claim(player) == {}
    await player.report(held["a1"], Success())
    assert await play(player) == ["b1", "a0", "b0", "a2", "b2"]
    assert (await end(player, run))["run"] == "success"


async def test_a_group_that_is_cleared_begins_anew(player: Player) -> None:
    run = await player.create(dag(group(literal(2)), *LINE))
    await play(player, "a1")

    assert await clear(player, run, "G", downstream=True) == ["G", "a", "b", "c", "z"]

    assert sorted(await play(player)) == ["a0", "a1", "b0", "b1", "c0", "c1", "z"]
    assert await end(player, run) == dict.fromkeys(("run", "G", "a", "b", "c", "z"), "success")


async def test_a_group_that_is_cleared_while_it_runs_ends_first(player: Player) -> None:
    run = await player.create(dag(group(literal(5), max_outstanding=2), *LINE))
    held = await claim(player)
    await player.report(held["a0"], Success())
    held |= await claim(player)

    await clear(player, run, "G", downstream=True)

    await player.schedule()
    assert (await states(player, run))["G"] == "ending"
    await player.turn(held=())
    assert sorted(await play(player)) == [*(f"{one}{index}" for one in "abc" for index in range(5)), "z"]
    found = await states(player, run)
    assert set(found.values()) == {"success"}


async def test_a_source_with_fewer_items_removes_units(player: Player) -> None:
    run = await player.create(dag(task("s"), group(MapSource("xcom", "s", "return_value")), *LINE))
    await player.report(await player.claim_one(), Success(), xcoms=(("return_value", "[1,2,3]"),))
    await play(player)

    cleared = await clear(player, run, "s", downstream=True)
    assert cleared == ["G", "a", "b", "c", "s", "z"]
    await player.report(await player.claim_one(), Success(), xcoms=(("return_value", "[1]"),))
    assert await play(player) == ["a0", "b0", "c0", "z"]

    found = await states(player, run)
    assert {found[f"{one}{index}"] for one in "Gabc" for index in (1, 2)} == {"removed"}
    assert await end(player, run) == dict.fromkeys(("run", "s", "G", "a", "b", "c", "z"), "success")
    counts = (await find_head(player, run, "b")).elements
    assert counts is not None
    assert (counts.created, counts.success) == (1, 1)


async def test_a_task_that_is_marked_lets_its_unit_go_on(player: Player) -> None:
    run = await player.create(dag(group(literal(2)), *LINE))
    await play(player, "a1")

    marked = await player.store.call(MarkTasks(run.dag_id, run.run_id, ("a",), "success", "tester", indexes=(1, 1)))

    assert marked == ("a[1]",)
    assert await play(player) == ["b1", "c1", "z"]
    assert await end(player, run) == dict.fromkeys(("run", "G", "a", "b", "c", "z"), "success")


@pytest.mark.parametrize("names", [("G",), ("a", "b", "c")])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_group_that_is_marked_ends(player: Player, names: tuple[str, ...], begun: bool) -> None:
    run = await player.create(dag(task("s"), group(MapSource("xcom", "s", "k")), *LINE))
    held = await claim(player)
    if begun:
        await player.report(held["s"], Success(), xcoms=(("k", "[1,2]"),))
        held = await claim(player)

    await player.store.call(MarkTasks(run.dag_id, run.run_id, names, "success", "tester"))

    await player.schedule()
    if begun:
        await player.turn(held=())
    else:
        await player.report(held["s"], Success(), xcoms=(("k", "[1,2]"),))
    assert await play(player) == ["z"]
    found = await end(player, run)
    assert (found["run"], found["a"], found["c"], found["z"]) == ("success",) * 4


async def test_a_task_outside_that_failed_begins_the_group_anew(player: Player) -> None:
    run = await player.create(dag(task("x"), group(literal(2)), part("a"), part("b", "a", "x"), task("z", "b")))
    held = await claim(player)
    await player.report(held["x"], Failure("no", may_retry=False))
    assert sorted(await play(player)) == ["a0", "a1"]
    assert (await end(player, run))["b"] == "upstream_failed"

    await clear(player, run, failed=True)

    assert sorted(await play(player)) == ["a0", "a1", "b0", "b1", "x", "z"]
    assert (await end(player, run))["run"] == "success"


async def test_an_element_that_does_not_exist_cannot_be_cleared(player: Player) -> None:
    run = await player.create(dag(group(literal(2)), *LINE))
    await player.schedule()
    for name in ("G", "a"):
        with pytest.raises(CallRefusedError, match=f"{name}\\[7\\]"):
            await clear(player, run, name, map_index=7)


async def test_the_group_over_a_failed_generator_opens_again(player: Player) -> None:
    run = await player.create(dag(task("s", is_generator=True), group(MapSource("generator", "s")), *LINE))
    source = await player.claim_one()
    await player.store.call(EmitItems(source.task, source.epoch, 0, ("1",)))
    await player.report(source, Failure("no", may_retry=False))
    await play(player)
    assert (await end(player, run))["G"] == "upstream_failed"

    assert await clear(player, run, failed=True) == ["G", "s", "z"]
    assert (await claim(player)).keys() == {"s"}


@pytest.mark.parametrize("then", ["cancel", "mark"])
async def test_a_group_that_ends_before_it_begins_anew_counts_its_elements_again(player: Player, then: str) -> None:
    run = await player.create(dag(group(literal(1)), part("a"), part("b", "a")))
    await player.report(await player.claim_one(), Success())
    last = await player.claim_one()
    await player.report(last, Failure("no", may_retry=False))
    # The scheduler has not looked: the first task has ended as a whole, and the group has not.
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("G",), "tester"))
    if then == "cancel":
        await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    else:
        await player.store.call(MarkTasks(run.dag_id, run.run_id, ("G",), "failed", "tester"))

    await player.schedule()

    counts = {name: (await find_head(player, run, name)).elements for name in ("G", "a", "b")}
    found = {name: (one.success, one.failed) for name, one in counts.items() if one is not None}
    assert found == {"G": (0, 1), "a": (1, 0), "b": (0, 1)}


async def test_a_group_of_which_a_task_was_cleared_has_not_ended_when_all_of_it_is_cleared(player: Player) -> None:
    run = await player.create(dag(group(literal(1)), part("a"), part("b", "a")))
    await play(player, "a0")
    # The scheduler does not look in between.
    await clear(player, run, "a", indexes=(0, 0), downstream=True)
    assert {name: (await find_head(player, run, name)).state for name in "Gab"} == dict.fromkeys("Gab", "mapped")
    await clear(player, run, "G")

    assert await play(player) == ["a0", "b0"]

    assert set((await end(player, run)).values()) == {"success"}
    counts = [(await find_head(player, run, name)).elements for name in ("G", "a", "b")]
    assert [(one.success, one.failed, one.skipped) for one in counts if one is not None] == [(1, 0, 0)] * 3


async def test_no_task_of_a_group_that_is_about_to_end_is_cleared(player: Player) -> None:
    run = await player.create(dag(group(literal(2), max_outstanding=1), part("a"), part("b", "a")))
    held = await player.claim_one()
    await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    await player.schedule()
    await player.turn(held=())
    # The scheduler has not looked at the end of the attempt.
    assert (await find_head(player, run, "G")).state == "ending"

    assert await clear(player, run, "b", indexes=(0, 0)) == []

    await player.schedule()
    assert held.task_id == "a"
    assert (await player.run(run)).state == "failed"
