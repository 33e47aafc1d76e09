"""Mapped groups of tasks in the store, on both databases: runs played through scheduler and worker turns."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.dags import Player, dag, task
from tests.store.test_maps import end, find_head, list_elements, literal

from tidemill.core.tasks.endings import Failure, Skip, Success
from tidemill.core.tasks.structure import MapSource, MapStructure, TaskStructure
from tidemill.store.calls.instance_calls import ClearTasks
from tidemill.store.calls.run_calls import CancelRun, RunRecord
from tidemill.store.calls.task_calls import EmitItems, GetValuePage
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt
from tidemill.store.database import Database


def group(*factors: MapSource, id: str = "G", upstream: tuple[str, ...] = (), **details: Any) -> TaskStructure:
    """A mapped group."""
    arguments = tuple(f"a{number}" for number in range(len(factors)))
    structure = MapStructure(arguments, factors, **details)
    return TaskStructure(
        id, upstream=tuple(sorted({*upstream, *structure.sources})), pool_slots=0, mapped=structure, is_group=True
    )


def part(id: str, *upstream: str, group: str = "G", **details: Any) -> TaskStructure:
    """A task of a mapped group."""
    return task(id, *upstream, mapped=MapStructure((), (MapSource("group", group),)), mapped_group=group, **details)


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


def name(one: ClaimedAttempt) -> str:
    return one.task_id if one.map_index < 0 else f"{one.task_id}{one.map_index}"


async def claim(player: Player, capacity: int = 100) -> dict[str, ClaimedAttempt]:
    return {name(one): one for one in await player.claim(capacity)}


async def states(player: Player, run: RunRecord) -> dict[str, str]:
    """Return the states of all instances, elements as T0, T1."""
    tasks = await player.tasks(run)
    return {key.replace("[", "").replace("]", ""): one.state for key, one in tasks.items()}


async def test_a_group_runs_each_unit_on_its_own(player: Player) -> None:
    run = await player.create(dag(group(literal(2)), part("a"), part("b", "a"), task("z", "b")))

    first = await claim(player)

    assert sorted(first) == ["a0", "a1"]
    assert (first["a1"].leaf_indexes, first["a1"].elements, first["a1"].map_length) == ((1,), (None,), 2)
    await player.report(first["a1"], Success())
    second = await claim(player)
    assert sorted(second) == ["b1"]
    await player.report(second["b1"], Success(), xcoms=(("return_value", "1"),))
    assert {key: state for key, state in (await states(player, run)).items() if "1" in key} == {
        "G1": "success",
        "a1": "success",
        "b1": "success",
    }
    await player.report(first["a0"], Success())
    await player.play()
    assert await end(player, run) == {
        "run": "success",
        "G": "success",
        "a": "success",
        "b": "success",
        "z": "success",
    }
    assert (await player.store.call(GetValuePage(run.id, "b"))).values == ((1, "1"),)
    counts = (await find_head(player, run, "G")).elements
    assert counts is not None
    assert (counts.arrived, counts.created, counts.success, counts.unfinished) == (2, 2, 2, 0)
    assert [one.map_index for one in await list_elements(player, run, "G", "success")] == [0, 1]


async def play(player: Player, *bad: str, by: Any = None) -> list[str]:
    """Run everything; the named instances fail finally; return the names of all attempts in order."""
    seen: list[str] = []

    def result(one: ClaimedAttempt) -> Any:
        seen.append(name(one))
        return (by or Failure("no", may_retry=False)) if name(one) in bad else Success()

    await player.play(result)
    return seen


async def test_a_generator_of_a_group_yields_in_each_unit_and_anew_when_it_is_cleared(player: Player) -> None:
    run = await player.create(dag(group(literal(2)), part("a", is_generator=True), part("b", "a")))

    async def yield_some(one: ClaimedAttempt, *values: str) -> None:
        await player.store.call(EmitItems(one.task, one.epoch, 0, values))
        await player.report(one, Success())

    async def read(index: int | None, key: str = "return_value") -> tuple[int | None, list[str]]:
        page = await player.store.call(GetValuePage(run.id, "a", key, count=True, map_index=index))
        return page.total, [value for _, value in page.values]

    held = await claim(player)
    await yield_some(held["a0"], "1", "2", "3")
    await yield_some(held["a1"], "4")
    assert [await read(index) for index in (0, 1, 2, None)] == [(3, ["1", "2", "3"]), (1, ["4"]), (0, []), (0, [])]
    assert await read(0, "other") == (0, [])
    assert sorted(await play(player)) == ["b0", "b1"]

    # One unit, and then the whole group.
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("a",), "tester", map_index=0, downstream=True))
    held = await claim(player)
    await yield_some(held["a0"], "5")
    assert [await read(index) for index in (0, 1)] == [(1, ["5"]), (1, ["4"])]
    await play(player)
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("G",), "tester", downstream=True))
    held = await claim(player)
    await yield_some(held["a0"], "6", "7")
    await player.report(held["a1"], Success())
    assert [await read(index) for index in (0, 1)] == [(2, ["6", "7"]), (0, [])]
    await play(player)
    assert set((await end(player, run)).values()) == {"success"}


async def test_a_unit_has_the_label_of_its_task_that_started_first(player: Player) -> None:
    run = await player.create(dag(group(literal(3)), part("b"), part("a", "b"), task("z", "a")))
    held = await claim(player)
    await player.report(held["b0"], Success(), label="first")
    await player.report(held["b1"], Success())
    after = await claim(player)
    await player.report(after["a0"], Success(), label="other")
    await player.report(after["a1"], Success(), label="second")

    assert [one.label for one in await list_elements(player, run, "G")] == ["first", "second", None]
    assert [one.label for one in await list_elements(player, run, "b")] == ["first", None, None]
    shown = (await player.tasks(run))["G[1]"]
    assert shown.label == "second"


async def test_a_failure_stays_in_its_unit(player: Player) -> None:
    structure = dag(
        group(literal(3)),
        part("a"),
        part("b", "a"),
        part("c", "a", "b", rule="all_done"),
        task("y", "c", rule="all_done"),
        task("z", "b"),
    )
    run = await player.create(structure)

    await play(player, "a1")

    found = await states(player, run)
    assert [found[one] for one in ("a0", "b0", "c0", "G0")] == ["success"] * 4
    assert [found[one] for one in ("a1", "b1", "c1", "G1")] == ["failed", "upstream_failed", "success", "failed"]
    assert await end(player, run) == {
        "run": "failed",
        "G": "failed",
        "a": "failed",
        "b": "upstream_failed",
        "c": "success",
        "y": "success",
        "z": "upstream_failed",
    }
    assert (await find_head(player, run, "b")).error is None


async def test_units_run_one_after_another_within_the_window(player: Player) -> None:
    await player.create(dag(group(literal(4), max_outstanding=2), part("a"), part("b", "a"), part("c", "b")))
    seen = []
    while held := await claim(player, 1):
        seen += held
        await player.report(*held.values(), Success())
    # The next claim of a full queue was admitted before the task behind it was known.
    assert [one[1] for one in seen] == sorted(one[1] for one in seen)


async def test_a_group_waits_for_its_sources_and_its_tasks_for_their_own_upstream(player: Player) -> None:
    run = await player.create(
        dag(
            task("s"),
            task("x"),
            task("y"),
            group(MapSource("xcom", "s", "return_value")),
            part("a"),
            part("b", "a", "x"),
            part("c", "b", "y", rule="all_done"),
        )
    )
    held = await claim(player)
    assert sorted(held) == ["s", "x", "y"]
    await player.report(held["s"], Success(), xcoms=(("return_value", '["v","w"]'),))
    assert await claim(player) == {}
    await player.report(held["x"], Skip())
    assert await claim(player) == {}
    await player.report(held["y"], Failure("no", may_retry=False))
    first = await claim(player)
    assert sorted(first) == ["a0", "a1", "c0", "c1"]
    assert first["a1"].elements == ('"w"',)
    await player.turn(*[AttemptReport(one.task, one.epoch, Success()) for one in first.values()])
    assert await play(player) == []
    found = await states(player, run)
    assert (found["b0"], found["G0"], found["G"], found["b"], found["c"]) == (
        "skipped", "success", "success", "skipped", "success",
    )  # fmt: skip
    assert (await end(player, run))["run"] == "success"


@pytest.mark.parametrize(
    ("result", "state"), [(Failure("no", may_retry=False), "upstream_failed"), (Skip(), "skipped")]
)
async def test_a_source_that_gives_nothing_decides_all_tasks_of_its_group(
    player: Player, result: Any, state: str
) -> None:
    run = await player.create(
        dag(task("s"), group(MapSource("xcom", "s", "return_value")), part("a"), part("b", "a"), task("z", "b"))
    )
    await player.report(await player.claim_one(), result)
    await player.play()
    found = await end(player, run)
    assert {found[one] for one in "Gabz"} == {state}


async def test_an_empty_group_is_skipped(player: Player) -> None:
    run = await player.create(dag(group(literal(0)), part("a"), part("b", "a"), task("z", "b")))
    await player.play()
    found = await end(player, run)
    assert found == {"run": "success", "G": "skipped", "a": "skipped", "b": "skipped", "z": "skipped"}


async def test_units_begin_while_a_generator_yields(player: Player) -> None:
    run = await player.create(
        dag(task("s", is_generator=True), group(MapSource("generator", "s")), part("a"), part("b", "a"), task("z", "b"))
    )
    source = await player.claim_one()
    await player.store.call(EmitItems(source.task, source.epoch, 0, ("1", "2")))
    first = await claim(player)
    assert {key: one.elements for key, one in first.items()} == {"a0": ("1",), "a1": ("2",)}
    await player.turn(*[AttemptReport(one.task, one.epoch, Success()) for one in first.values()])
    assert sorted(await play(player, "b1")) == ["b0", "b1"]
    assert (await end(player, run))["G"] == "mapped"
    await player.report(source, Success())
    await player.play()
    assert await end(player, run) == {
        "run": "failed", "s": "success", "G": "failed", "a": "success", "b": "failed", "z": "upstream_failed",
    }  # fmt: skip


async def test_skips_by_name_hold_in_the_unit(player: Player) -> None:
    run = await player.create(
        dag(group(literal(2)), part("a"), part("b", "a"), part("c", "a"), part("d", "b", "c", rule="none_failed"))
    )
    first = await claim(player)
    await player.report(first["a0"], Success(), skip=("b", "z"))
    await player.report(first["a1"], Success(), skip_all_downstream=True)
    assert sorted(await play(player)) == ["c0", "d0"]
    found = await states(player, run)
    assert [found[one] for one in ("b0", "b1", "c1", "d1")] == ["skipped"] * 4
    assert (found["G1"], (await end(player, run))["run"]) == ("success", "success")


async def test_a_group_stops_after_too_many_failed_units(player: Player) -> None:
    run = await player.create(
        dag(group(literal(9), max_outstanding=3, max_failed_elements=0), part("a"), part("b", "a"), task("z", "b"))
    )
    first = await claim(player, 2)
    await player.report(first["a0"], Failure("no", may_retry=False))
    await player.schedule()
    await player.report(first["a1"], Success())
    assert await play(player) == ["b1"]
    assert await end(player, run) == {
        "run": "failed", "G": "failed", "a": "failed", "b": "upstream_failed", "z": "upstream_failed",
    }  # fmt: skip
    counts = (await find_head(player, run, "G")).elements
    assert counts is not None
    assert (counts.success, counts.failed, counts.skipped, counts.stop) == (1, 1, 7, "failed_elements")
    of_part = (await find_head(player, run, "b")).elements
    assert of_part is not None
    assert (of_part.success, of_part.upstream_failed, of_part.skipped) == (1, 1, 7)


@pytest.mark.parametrize("begun", [0, 1, 2])
async def test_cancelling_a_run_ends_its_group(player: Player, begun: int) -> None:
    run = await player.create(
        dag(group(literal(1000), max_outstanding=4), part("a"), part("b", "a"), task("z", "b", rule="all_done"))
    )
    for _ in range(begun):
        held = await claim(player, 2)
        await player.report(next(iter(held.values())), Success())
    await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    await player.schedule()
    await player.turn(held=())
    await player.play()
    found = await end(player, run)
    assert found["run"] == "failed"
    assert {found[one] for one in "Gab"} <= {"failed", "skipped", "success"}
    counts = (await find_head(player, run, "a")).elements
    assert counts is not None
    assert counts.success + counts.failed + counts.skipped == (1000 if begun else 0)


async def test_a_group_that_stopped_itself_fails_its_run_whatever_comes_after_it(player: Player) -> None:
    one = group(literal(9), max_outstanding=1, max_failed_elements=0)
    run = await player.create(dag(one, part("a"), part("b", "a"), task("z", "b", rule="all_done")))
    held = await claim(player, 1)
    await player.report(held["a0"], Failure("no", may_retry=False))
    await player.play()
    found = await end(player, run)
    assert (found["run"], found["G"], found["z"]) == ("failed", "failed", "success")


async def test_a_fail_fast_run_ends_its_group(player: Player) -> None:
    run = await player.create(
        dag(
            group(literal(6), max_outstanding=3),
            part("a"),
            part("b", "a", is_teardown=True, rule="all_done_setup_success"),
            fail_fast=True,
        )
    )
    held = await claim(player, 2)
    await player.report(held["a0"], Failure("no", may_retry=False))
    await player.report(held["a1"], Success())
    await player.play()
    found = await end(player, run)
    assert (found["run"], found["G"], found["a"]) == ("failed", "failed", "failed")
