"""Mapped groups whose source is cleared while their tasks run: all tasks of a unit with another value run again."""

from __future__ import annotations

import pytest
from tests.store.dags import Player, dag, task
from tests.store.test_groups import claim, group, part, states
from tests.store.test_maps import end, find_head
from tests.store.test_maps_sources_again import KINDS, clear, feed

from tidemill.core.tasks.endings import Failure, Skip, Success
from tidemill.core.tasks.structure import DagStructure, MapSource
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.worker_calls import ClaimedAttempt
from tidemill.store.database import Database


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


def build(kind: str, **details: int) -> DagStructure:
    source = task("s", is_generator=kind == "generator")
    units = group(MapSource(kind, "s", "return_value"), **details)
    return dag(source, units, part("a"), part("b", "a"), task("z", "b"))


async def read(player: Player, run: RunRecord, index: int) -> list[str | None]:
    """Return the states of a unit and its tasks."""
    found = await states(player, run)
    return [found.get(f"{name}{index}") for name in "Gab"]


async def play(player: Player) -> list[tuple[str, str | None]]:
    """Run everything; return what ran in units, with the value of the unit."""
    ran: list[tuple[str, str | None]] = []
    while claimed := await claim(player) or await claim(player):
        for name, one in claimed.items():
            await player.report(one, Success())
            if one.map_index >= 0:
                ran.append((name, one.elements[0]))
    return sorted(ran)


@KINDS
async def test_units_go_on_and_those_with_other_values_run_again_as_a_whole(player: Player, kind: str) -> None:
    run = await player.create(build(kind))
    await feed(player, await player.claim_one(), kind, ("1", "2", "3", "4"))
    first = await claim(player)
    for index in (0, 1):
        await player.report(first[f"a{index}"], Success())
    second = await claim(player)
    await player.report(second["b0"], Success())

    await clear(player, run)
    (source,) = await player.claim()
    assert await read(player, run, 1) == ["mapped", "success", "running"]
    await feed(player, source, kind, ("1", "7", "3"))
    await player.schedule()

    held = {(one.task, one.epoch): name for name, one in {**first, **second}.items() if name in ("b1", "a2", "a3")}
    assert sorted(held[one] for one in (await player.turn(held=tuple(held))).end) == ["a3", "b1"]
    assert await read(player, run, 0) == ["success"] * 3
    await player.report(first["a2"], Success())
    await player.turn()
    assert await play(player) == [("a1", "7"), ("b1", "7"), ("b2", "3")]
    assert await read(player, run, 3) == ["removed"] * 3
    assert await end(player, run) == dict.fromkeys(("run", "s", "G", "a", "b", "z"), "success")
    for name in "Gab":
        counts = (await find_head(player, run, name)).elements
        assert counts is not None
        assert (counts.arrived, counts.created, counts.success, counts.unfinished) == (3, 3, 3, 0)


@KINDS
async def test_a_group_that_has_ended_opens_again_for_more_and_other_values(player: Player, kind: str) -> None:
    run = await player.create(build(kind, max_outstanding=1))
    await feed(player, await player.claim_one(), kind, ("1", "2"))
    assert len(await play(player)) == 4

    assert await clear(player, run) == ("G", "s")
    await feed(player, await player.claim_one(), kind, ("5", "2", "6"))

    assert await play(player) == [("a0", "5"), ("a2", "6"), ("b0", "5"), ("b2", "6")]
    assert await end(player, run) == dict.fromkeys(("run", "s", "G", "a", "b", "z"), "success")

    await clear(player, run)
    await feed(player, await player.claim_one(), kind, ("5",))
    assert await play(player) == []
    assert [(await read(player, run, index))[0] for index in range(3)] == ["success", "removed", "removed"]
    assert await end(player, run) == dict.fromkeys(("run", "s", "G", "a", "b", "z"), "success")
    await clear(player, run)
    await feed(player, await player.claim_one(), kind, ("5", "2"))
    assert await play(player) == [("a1", "2"), ("b1", "2")]
    assert await end(player, run) == dict.fromkeys(("run", "s", "G", "a", "b", "z"), "success")


@KINDS
async def test_a_source_of_a_group_that_fails_again_changes_no_unit(player: Player, kind: str) -> None:
    run = await player.create(build(kind))
    await feed(player, await player.claim_one(), kind, ("1", "2"))
    held = await claim(player)
    await clear(player, run)
    source: ClaimedAttempt = await player.claim_one()
    await player.report(source, Failure("no", may_retry=False))
    await player.schedule()
    assert await read(player, run, 0) == ["mapped", "running", "none"]
    for one in held.values():
        await player.report(one, Success())
    assert await play(player) == [("b0", "1"), ("b1", "2")]
    assert (await end(player, run))["G"] == "upstream_failed"

    await clear(player, run, "s", "z")
    await feed(player, await player.claim_one(), kind, ("1", "2"))
    assert await play(player) == []
    assert await end(player, run) == dict.fromkeys(("run", "s", "G", "a", "b", "z"), "success")


async def test_a_unit_that_comes_back_has_the_tasks_that_were_decided_before_the_group_began(player: Player) -> None:
    units = group(MapSource("xcom", "s", "return_value"))
    run = await player.create(dag(task("s"), task("x"), units, part("a"), part("q", "x"), task("z", "a")))
    first = await claim(player)
    await player.report(first["x"], Skip())
    await feed(player, first["s"], "xcom", ("1", "2"))
    held = await claim(player)
    await player.report(held["a0"], Success())
    await clear(player, run)
    await feed(player, await player.claim_one(), "xcom", ("1",))
    await player.schedule()
    found = await states(player, run)
    assert (found["a1"], found["q1"]) == ("ending", "removed")
    await clear(player, run)
    await feed(player, await player.claim_one(), "xcom", ("1", "2"))
    ran = await play(player)

    assert ran == [("a1", "2")]
    found = await states(player, run)
    assert [[found[f"{one}{index}"] for one in "Gaq"] for index in (0, 1)] == [["success", "success", "skipped"]] * 2
    counts = (await find_head(player, run, "G")).elements
    assert counts is not None
    assert (counts.arrived, counts.created, counts.success, counts.unfinished) == (2, 2, 2, 0)
    assert (await end(player, run))["run"] == "success"
