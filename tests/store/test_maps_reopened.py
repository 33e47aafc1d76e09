"""Maps whose source is cleared while their elements run: they stay as they are, except elements with other values."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.dags import Player, dag, task
from tests.store.test_maps import end, find_head, list_elements, literal, mapped
from tests.store.test_maps_sources_again import KINDS, build, clear, feed, play, read

from tidemill.core.tasks.endings import Deferral, Failure, Success
from tidemill.core.tasks.structure import MapSource
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.run_calls import CancelRun, RunRecord
from tidemill.store.calls.task_calls import EmitItems
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt
from tidemill.store.database import Database


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def states(player: Player, run: RunRecord, task_id: str = "m") -> list[str]:
    return [one.state for one in await list_elements(player, run, task_id)]


async def give(player: Player, one: ClaimedAttempt, **details: Any) -> str:
    """Have an attempt succeed, and return its value."""
    xcoms = (("return_value", one.elements[0] or ""),)
    return (await player.report(one, Success(), xcoms=xcoms, **details)).kind


@KINDS
async def test_running_elements_go_on_while_their_source_runs_again(player: Player, kind: str) -> None:
    run = await player.create(dag(*build(kind)))
    await feed(player, await player.claim_one(), kind, ("1", "2", "3", "4"))
    first, second, third, fourth = await player.claim()
    await give(player, first)

    await clear(player, run)
    (source,) = await player.claim()
    assert await states(player, run) == ["success", "running", "running", "running"]
    assert (await end(player, run))["m"] == "mapped"
    assert await give(player, second) == "moved"
    await feed(player, source, kind, ("1", "2", "7"))
    await player.schedule()

    held = ((third.task, third.epoch), (fourth.task, fourth.epoch))
    assert sorted((await player.turn(held=held)).end) == sorted(held)
    assert await states(player, run) == ["success", "success", "ending", "ending"]
    await player.turn()
    assert await play(player) == [(2, "7")]
    assert await states(player, run) == ["success", "success", "success", "removed"]
    assert await read(player, run) == [(0, "1"), (1, "2"), (2, "7")]
    assert await end(player, run) == {"run": "success", "s": "success", "m": "success", "z": "success"}
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.arrived, counts.created, counts.unfinished, counts.success, counts.closed) == (3, 3, 0, 3, True)


@KINDS
async def test_elements_with_the_same_value_are_left_alone_in_any_state(player: Player, kind: str) -> None:
    source, middle, last = build(kind)
    run = await player.create(
        dag(source, mapped("m", middle.mapped.factors[0], retries=1, retry_delay_us=3_600_000_000), last)
    )  # type: ignore[union-attr]
    await feed(player, await player.claim_one(), kind, ("1", "2", "3", "4", "5"))
    running, deferred, retried, failed = await player.claim(4)
    await player.turn(
        AttemptReport(deferred.task, deferred.epoch, Deferral("t.Trigger", "{}", "resume", "{}", None)),
        AttemptReport(retried.task, retried.epoch, Failure("later")),
        AttemptReport(failed.task, failed.epoch, Failure("no", may_retry=False)),
        held=((running.task, running.epoch),),
    )

    await clear(player, run)
    await player.schedule()
    held = {(running.task, running.epoch)}
    claimed = {one.task_id: one for one in (await player.turn(capacity=2, held=tuple(held))).claimed}
    held |= {(one.task, one.epoch) for one in claimed.values()}
    # The last one waited for a worker, and starts before its source has given its value again.
    assert await states(player, run) == ["running", "deferred", "up_for_retry", "failed", "running"]
    await feed(player, source := claimed["s"], kind, ("1", "2", "3", "4", "5"))
    held -= {(source.task, source.epoch)}
    await player.schedule()

    assert await states(player, run) == ["running", "deferred", "up_for_retry", "failed", "running"]
    assert not (await player.turn(held=tuple(held))).end
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.unfinished, counts.failed, counts.closed) == (4, 1, True)


@KINDS
async def test_elements_are_created_beyond_the_old_end_after_the_others_are_compared(player: Player, kind: str) -> None:
    source, middle, last = build(kind)
    run = await player.create(dag(source, mapped("m", *middle.mapped.factors, max_outstanding=2), last))  # type: ignore[union-attr]
    await feed(player, await player.claim_one(), kind, ("1", "2", "3"))
    await play(player)

    await clear(player, run)
    await feed(player, await player.claim_one(), kind, ("9", "2", "3", "4", "5"))

    assert await play(player) == [(0, "9"), (3, "4"), (4, "5")]
    assert await end(player, run) == {"run": "success", "s": "success", "m": "success", "z": "success"}


@KINDS
async def test_a_source_that_is_cleared_twice_and_fails_in_between_changes_nothing_of_equal_elements(
    player: Player, kind: str
) -> None:
    run = await player.create(dag(*build(kind)))
    await feed(player, await player.claim_one(), kind, ("1", "2", "3"))
    first, second, third = await player.claim()
    await clear(player, run)
    await player.report(await player.claim_one(), Failure("no", may_retry=False))
    await player.schedule()
    assert await states(player, run) == ["running"] * 3
    await give(player, first)
    await clear(player, run)
    source = await player.claim_one()
    await clear(player, run)
    await player.turn(held=((second.task, second.epoch), (third.task, third.epoch)))
    source = await player.claim_one()
    await feed(player, source, kind, ("1", "2", "3"))
    await give(player, second)
    await give(player, third)

    assert await play(player) == []
    # What failed with the source is cleared by its name.
    assert await end(player, run) == {"run": "failed", "s": "success", "m": "success", "z": "upstream_failed"}
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.success, counts.upstream_failed) == (3, 0)


async def test_a_failed_source_that_a_user_marks_as_a_success_ends_the_elements_that_it_has_not_given(
    player: Player,
) -> None:
    run = await player.create(dag(*build("generator")))
    await feed(player, await player.claim_one(), "generator", ("1", "2", "3"))
    await play(player)
    await clear(player, run)
    source = await player.claim_one()
    await player.store.call(EmitItems(source.task, source.epoch, 0, ("1", "5")))
    await player.report(source, Failure("no", may_retry=False))
    await play(player)
    assert (await end(player, run))["m"] == "upstream_failed"

    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("s",), "success", "tester"))

    assert await play(player) in ([], [(1, "5")])
    assert await states(player, run) == ["success", "success", "removed"]
    assert await read(player, run) == [(0, "1"), (1, "5")]
    assert (await end(player, run))["run"] == "success"


@KINDS
async def test_a_map_that_stopped_after_failures_goes_on_once_they_are_corrected(player: Player, kind: str) -> None:
    source, middle, last = build(kind)
    details = {"max_outstanding": 2, "max_failed_elements": 0}
    run = await player.create(dag(source, mapped("m", *middle.mapped.factors, **details), last))  # type: ignore[union-attr]
    await feed(player, await player.claim_one(), kind, ("1", "2", "3", "4"))
    await play(player, lambda one: Failure("no", may_retry=False) if one.map_index == 1 else Success())
    assert (await end(player, run))["m"] == "failed"

    await clear(player, run)
    await feed(player, await player.claim_one(), kind, ("1", "5", "3", "4"))

    assert [one for one in await play(player) if one != (0, "1")] == [(1, "5"), (2, "3"), (3, "4")]
    assert await states(player, run) == ["success"] * 4
    assert (await end(player, run))["m"] == "success"


@KINDS
async def test_failures_beyond_the_new_end_of_a_source_stop_no_map(player: Player, kind: str) -> None:
    source, middle, last = build(kind)
    run = await player.create(dag(source, mapped("m", *middle.mapped.factors, max_failed_elements=0), last))  # type: ignore[union-attr]
    await feed(player, await player.claim_one(), kind, ("1", "2", "3"))
    await play(player, lambda one: Failure("no", may_retry=False) if one.map_index == 2 else Success())
    assert await end(player, run) == {"run": "failed", "s": "success", "m": "failed", "z": "upstream_failed"}

    await clear(player, run)
    await feed(player, await player.claim_one(), kind, ("1", "2"))

    assert await play(player) == []
    assert await states(player, run) == ["success", "success", "removed"]
    await clear(player, run, "z")
    await play(player)
    assert await end(player, run) == {"run": "success", "s": "success", "m": "success", "z": "success"}
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.arrived, counts.created, counts.failed, counts.stop) == (2, 2, 0, None)


@KINDS
async def test_users_clear_mark_and_cancel_while_the_source_runs_again(player: Player, kind: str) -> None:
    run = await player.create(dag(*build(kind)))
    await feed(player, await player.claim_one(), kind, ("1", "2", "3"))
    await play(player)
    await clear(player, run)
    source = await player.claim_one()
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester", map_index=1))
    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("m",), "failed", "tester", map_index=2))
    (again,) = await player.claim()
    assert (again.map_index, again.elements) == (1, ("2",))
    await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    await player.turn()
    await player.schedule()
    await player.turn()
    await player.schedule()
    assert (await end(player, run))["run"] == "failed"
    assert await states(player, run) == ["success", "failed", "failed"]
    assert source.task_id == "s"

    await player.store.call(ClearTasks(run.dag_id, run.run_id, (), "tester", failed=True, downstream=True))
    await clear(player, run)
    while (source := (await player.claim(1))[0]).task_id != "s":
        await give(player, source)
    await feed(player, source, kind, ("1", "2", "4"))
    await play(player)
    assert await read(player, run) == [(0, "1"), (1, "2"), (2, "4")]
    assert (await end(player, run))["run"] == "success"


async def test_elements_that_were_removed_before_their_map_was_cancelled_are_listed(player: Player) -> None:
    run = await player.create(dag(*build("xcom")))
    await feed(player, await player.claim_one(), "xcom", ("1", "2", "3"))
    first, _, third = await player.claim()
    await give(player, first)
    await give(player, third)
    await clear(player, run)
    await feed(player, await player.claim_one(), "xcom", ("1",))
    await player.schedule()
    assert await states(player, run) == ["success", "ending", "removed"]

    await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    await player.schedule()

    assert [one.map_index for one in await list_elements(player, run, "m", "removed")] == [2]
    await player.turn()
    assert [one.map_index for one in await list_elements(player, run, "m", "removed")] == [1, 2]


@pytest.mark.parametrize("length", [2, 3])
async def test_elements_of_cross_products_are_compared_by_their_values(player: Player, length: int) -> None:
    other = MapSource("xcom", "o", "return_value")
    run = await player.create(dag(*build("xcom", other), task("o")))
    for one in await player.claim():
        await feed(player, one, "xcom", ("1", "2"))
    attempts = {one.map_index: one for one in await player.claim()}
    assert [attempts[index].elements for index in range(4)] == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")]
    await give(player, attempts.pop(0))

    await clear(player, run, "o")
    await feed(player, await player.claim_one(), "xcom", ("1", "2", "2")[:length])
    await player.schedule()
    held = {(one.task, one.epoch) for one in attempts.values()}
    ended = {*(await player.turn(held=tuple(held))).end}

    if length == 2:
        assert not ended
        return
    # Now they are 11 12 12 21 22 22: the third and the fourth have other values.
    assert ended == {(attempts[index].task, attempts[index].epoch) for index in (2, 3)}
    await player.turn(held=tuple(held - ended))
    await give(player, attempts[1])
    assert [index for index, _ in await play(player)] == [2, 3, 4, 5]
    assert (await end(player, run))["run"] == "success"


async def test_elements_over_a_literal_and_a_list_know_which_literal_they_had(player: Player) -> None:
    run = await player.create(dag(*build("xcom", literal(2))))
    await feed(player, await player.claim_one(), "xcom", ("1", "2"))
    assert len(await play(player)) == 4
    await clear(player, run)
    await feed(player, await player.claim_one(), "xcom", ("2", "1"))
    assert await play(player) == [(0, "2"), (1, "2"), (2, "1"), (3, "1")]


@KINDS
async def test_a_map_over_a_map_goes_on_with_what_it_follows(player: Player, kind: str) -> None:
    run = await player.create(dag(*build(kind), mapped("f", MapSource("map", "m", "return_value"))))
    await feed(player, await player.claim_one(), kind, ("1", "2", "3"))
    first, second, third = await player.claim()
    await give(player, first)
    (follower,) = await player.claim()
    assert (follower.task_id, follower.elements) == ("f", ("1",))

    await clear(player, run)
    (source,) = await player.claim()
    await give(player, follower)
    await give(player, second)
    await feed(player, source, kind, ("1", "2"))
    await player.schedule()
    await player.turn(held=((third.task, third.epoch),))
    await player.turn()
    await play(player)

    assert await states(player, run) == ["success", "success", "removed"]
    assert await states(player, run, "f") == ["success", "success"]
    assert (await end(player, run))["run"] == "success"


@pytest.mark.parametrize("names", [(), ("s",), ("s", "m")])
async def test_a_failed_generator_that_is_cleared_with_what_failed_leaves_the_other_elements_alone(
    player: Player, names: tuple[str, ...]
) -> None:
    run = await player.create(dag(*build("generator")))
    source = await player.claim_one()
    await player.store.call(EmitItems(source.task, source.epoch, 0, ("1", "2", "3")))
    first, second, third = await player.claim()
    await give(player, first)
    await player.report(second, Failure("no", may_retry=False))
    await player.report(source, Failure("no", may_retry=False))
    await player.schedule()

    cleared = await player.store.call(ClearTasks(run.dag_id, run.run_id, names, "tester", failed=True))
    assert {"s", "m"} <= {*cleared}
    assert ("m[1]" in cleared) == (names != ("s",))
    claimed = {one.task_id: one for one in await player.claim()}
    if names != ("s",):
        await give(player, claimed["m"])
    await feed(player, claimed["s"], "generator", ("1", "2", "3", "4"))
    await give(player, third)
    await play(player)
    wanted = ["success", "failed" if names == ("s",) else "success", "success", "success"]
    assert await states(player, run) == wanted
    assert await tries(player, run) == [1, 1 if names == ("s",) else 2, 1, 1]


async def tries(player: Player, run: RunRecord) -> list[int]:
    return [one.tries for one in await list_elements(player, run, "m")]


async def test_a_turn_compares_elements_of_some_maps_and_later_turns_those_of_others(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.store.queries.dags.maps.turns.COMPARED", 1)
    runs = [await player.create(dag(*build("xcom")), run_id=f"r{number}") for number in range(3)]
    for source in await player.claim():
        await feed(player, source, "xcom", ("1", "2"))
    assert len(await play(player)) == 6
    for run in runs:
        await clear(player, run)
    for source in await player.claim():
        await feed(player, source, "xcom", ("1", "7"))
    assert sorted(await play(player)) == [(1, "7")] * 3
    assert [(await end(player, run))["run"] for run in runs] == ["success"] * 3
