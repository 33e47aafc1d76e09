"""Loops in the store, on both databases: groups whose last task decides whether they run again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Failure, Success
from tidemill.core.tasks.structure import DagStructure, LoopStructure, MapSource, MapStructure, TaskStructure
from tidemill.store.calls.element_calls import ListElements
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.run_calls import CancelRun, RunRecord
from tidemill.store.calls.worker_calls import ClaimedAttempt
from tidemill.store.database import Database


def part(name: str, *upstream: str, **details: Any) -> TaskStructure:
    mapped = MapStructure((), (MapSource("group", task="l"),))
    return task(f"l.{name}", *[f"l.{one}" for one in upstream], mapped=mapped, mapped_group="l", group="l", **details)


def loop(max_iterations: int = 5) -> DagStructure:
    structure = MapStructure(("loop",), (MapSource("loop"),), 1, loop=LoopStructure(max_iterations, "l.gate"))
    group = TaskStructure("l", "TaskGroup", pool_slots=0, mapped=structure, is_group=True)
    return dag(group, part("a"), part("b", "a"), part("gate", "b"), task("z", "l.gate"))


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def states(player: Player, run: RunRecord, task_id: str = "l") -> list[str]:
    rows = (await player.store.call(ListElements(run.dag_id, run.run_id, task_id))).rows
    return [one.state for one in rows]


async def play(player: Player, last: int, bad: tuple[str, int] | None = None) -> list[tuple[str, int]]:
    """Play until nothing is left; the gate ends the loop with iteration `last`. Return what ran."""
    seen: list[tuple[str, int]] = []
    while attempts := await player.claim():
        for one in attempts:
            await end(player, one, last, bad)
            seen.append((one.task_id, one.map_index))
    return seen


async def end(player: Player, one: ClaimedAttempt, last: int, bad: tuple[str, int] | None = None) -> None:
    if (one.task_id, one.map_index) == bad:
        await player.report(one, Failure("no", may_retry=False), map_index=one.map_index)
        return
    value = json.dumps({"done": one.map_index >= last, "reason": ""}) if one.task_id == "l.gate" else str(one.map_index)
    await player.report(one, Success(), map_index=one.map_index, xcoms=(("return_value", value),))


def list_gates(seen: list[tuple[str, int]]) -> list[int]:
    return [index for name, index in seen if name == "l.gate"]


async def test_iterations_follow_each_other_until_the_gate_ends_them(player: Player) -> None:
    run = await player.create(loop())
    seen = await play(player, 2)
    names = ("l.a", "l.b", "l.gate")
    assert seen == [*((name, index) for index in range(3) for name in names), ("z", -1)]
    assert (await player.run(run)).state == "success"
    assert await states(player, run) == ["success"] * 3


async def test_a_failed_iteration_ends_the_loop_as_failed(player: Player) -> None:
    run = await player.create(loop())
    await play(player, 4, bad=("l.b", 1))
    assert (await player.run(run)).state == "failed"
    assert await states(player, run) == ["success", "failed"]
    assert await states(player, run, "l.gate") == ["success", "upstream_failed"]

    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("l",), "tester", failed=True, downstream=True))
    assert list_gates(await play(player, 2)) == [1, 2]
    assert (await player.run(run)).state == "success"


@pytest.mark.parametrize("last", [1, 2, 4])
async def test_clearing_an_iteration_takes_the_later_ones_and_makes_new_ones(player: Player, last: int) -> None:
    run = await player.create(loop())
    await play(player, 3)

    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("l",), "tester", map_index=1, downstream=True))

    assert (await states(player, run))[2:] == ["removed", "removed"]
    assert (await states(player, run, "l.b"))[2:] == ["removed", "removed"]
    seen = await play(player, last)
    assert list_gates(seen) == list(range(1, last + 1))
    assert seen[-1] == ("z", -1)
    assert (await player.run(run)).state == "success"
    ended = ["success"] * (last + 1)
    assert await states(player, run) == ended + ["removed"] * (4 - len(ended))


async def test_an_iteration_is_cleared_while_a_later_one_runs(player: Player) -> None:
    run = await player.create(loop())
    for _ in range(4):
        await end(player, await player.claim_one(), 9)
    later = await player.claim_one()
    assert (later.task_id, later.map_index) == ("l.b", 1)

    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("l.b",), "tester", map_index=0))

    await player.schedule()
    key = (later.task, later.epoch)
    assert (await player.turn(held=(key,))).end == (key,)
    await player.turn()
    assert await play(player, 1) == [
        ("l.b", 0),
        ("l.gate", 0),
        ("l.a", 1),
        ("l.b", 1),
        ("l.gate", 1),
        ("z", -1),
    ]
    assert (await player.run(run)).state == "success"


async def test_an_iteration_that_a_user_marks_is_decided_by_its_gate(player: Player) -> None:
    run = await player.create(loop())
    await play(player, 9, bad=("l.b", 1))
    assert (await player.run(run)).state == "failed"

    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("l.b",), "success", "tester", map_index=1))

    seen = await play(player, 2)
    assert list_gates(seen) == [1, 2]
    assert seen[-1] == ("z", -1)
    assert await states(player, run) == ["success"] * 3
    assert (await player.run(run)).state == "success"


async def test_a_loop_that_is_about_to_end_loses_no_iteration(player: Player) -> None:
    run = await player.create(loop())
    for _ in range(4):
        await end(player, await player.claim_one(), 9)
    later = await player.claim_one()
    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("l",), "success", "tester"))

    cleared = await player.store.call(ClearTasks(run.dag_id, run.run_id, ("l.b",), "tester", map_index=0))

    assert cleared == ()
    await player.turn(held=((later.task, later.epoch),))
    await player.turn()
    await play(player, 9)
    assert await states(player, run, "l.b") == ["success", "success"]


async def test_a_cancelled_loop_has_no_further_iteration(player: Player) -> None:
    run = await player.create(loop())
    one = await player.claim_one()
    await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    await player.schedule()
    await player.turn(held=((one.task, one.epoch),))
    await player.turn()
    assert await play(player, 9) == []
    assert (await player.run(run)).state == "failed"


async def test_an_iteration_that_lost_tasks_when_its_loop_started_over_has_not_succeeded(player: Player) -> None:
    run = await player.create(loop())
    await end(player, await player.claim_one(), 9)
    running = await player.claim_one()
    assert running.task_id == "l.b"
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("l",), "tester", downstream=True))
    await player.schedule()

    await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    await player.turn()  # the attempt has ended
    await player.play()

    assert (await player.run(run)).state == "failed"
    found = [await states(player, run, name) for name in ("l", "l.a", "l.b", "l.gate")]
    assert found == [["removed"], ["success"], ["removed"], ["removed"]]


async def test_clearing_what_failed_in_a_loop_keeps_what_succeeded_in_the_iteration(player: Player) -> None:
    run = await player.create(loop())
    await play(player, 4, bad=("l.b", 1))

    cleared = await player.store.call(ClearTasks(run.dag_id, run.run_id, (), "tester", failed=True))

    assert sorted(name for name in cleared if "[" in name) == ["l.b[1]", "l.gate[1]"]
    assert await play(player, 1) == [("l.b", 1), ("l.gate", 1), ("z", -1)]
    assert await states(player, run) == ["success"] * 2
    assert (await player.run(run)).state == "success"
