"""Maps whose elements run again, end in batches, or belong to a former life of the map."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Connection, update
from tests.store.dags import Player, dag, task
from tests.store.test_maps import emit, end, fail_indexes, find_head, list_elements, literal, mapped

from tidemill.core.tasks.endings import Failure, Success
from tidemill.core.tasks.structure import MapSource
from tidemill.store.calls import instance_calls
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks, split_clear
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.service_calls import SchedulerTurn
from tidemill.store.calls.task_calls import GetValuePage
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt
from tidemill.store.dag_tables import task_instance, task_map
from tidemill.store.database import Database
from tidemill.store.queries.dags.maps import preparation, steps


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def count_states(player: Player, run: RunRecord, task_id: str) -> Counter[str]:
    return Counter(one.state for one in await list_elements(player, run, task_id))


async def test_an_element_that_a_worker_gives_back_while_the_map_is_looked_at_runs_again(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await player.create(dag(mapped("m", literal(2), max_outstanding=2), task("z", "m")))
    first, second = await player.claim()
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester", map_index=1))
    await player.turn(AttemptReport(first.task, first.epoch, Success()), held=((second.task, second.epoch),))
    read_maps, given_back = steps.read_maps, []

    def read(connection: Connection, heads: Any, *, locks: bool) -> Any:
        if locks and not given_back:
            # A worker commits the end of the cleared element after the scheduler looked for waiting elements.
            given_back.append(second.task)
            back = {"state": "none", "pending": 2, "session_id": None, "epoch": task_instance.c.epoch + 1}
            connection.execute(update(task_instance).where(task_instance.c.id == second.task).values(back))
            counts = {"waiting": task_map.c.waiting + 1, "unfinished": task_map.c.unfinished - 1, "pending": 1}
            connection.execute(update(task_map).where(task_map.c.run == run.id).values(counts))
        return read_maps(connection, heads, locks=locks)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "read_maps", read)
        await player.schedule()

    (again,) = await player.claim()
    assert given_back
    assert (again.map_index, again.try_number) == (1, 2)
    await player.report(again, Success())
    await player.play()
    assert await end(player, run) == {"run": "success", "m": "success", "z": "success"}


async def test_elements_of_a_cleared_map_end_in_batches(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "ELEMENTS", 3)
    run = await player.create(dag(mapped("m", literal(7), max_outstanding=7), task("z", "m")))
    attempts = await player.claim()
    # This one is ending already, but to run again.
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester", map_index=0))
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester"))

    turns = [(await player.store.call(SchedulerTurn(player.scheduler))).more for _ in range(5)]

    assert turns[-1] is False
    assert await count_states(player, run, "m") == {"ending": 7}
    # The user decides otherwise; elements that are about to be removed stay so.
    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("m",), "success", "tester"))
    turns = [(await player.store.call(SchedulerTurn(player.scheduler))).more for _ in range(5)]
    assert turns[-1] is False
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester"))
    assert sorted((await player.turn(held=())).end) == []
    claimed: list[int] = []

    def note(one: ClaimedAttempt) -> Success:
        claimed.append(one.map_index)
        return Success()

    await player.play(note)
    assert len(attempts) == 7
    assert sorted(claimed) == [-1, *range(7)]
    assert await end(player, run) == {"run": "success", "m": "success", "z": "success"}


async def test_clearing_one_of_several_failed_elements_does_not_stop_a_run_that_fails_fast(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(3), max_outstanding=3), fail_fast=True))
    attempts = await player.claim()
    failure = Failure("no", may_retry=False)
    await player.turn(*[AttemptReport(one.task, one.epoch, failure) for one in attempts])
    await player.play()
    assert await count_states(player, run, "m") == {"failed": 3}

    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester", map_index=0))
    await player.play()

    assert await count_states(player, run, "m") == {"failed": 2, "success": 1}
    assert await end(player, run) == {"run": "failed", "m": "failed"}


async def test_failed_elements_of_a_map_that_stopped_itself_run_again(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(9), max_outstanding=4, max_failed_elements=0), task("z", "m")))
    attempts = await player.claim()
    failure = Failure("no", may_retry=False)
    await player.turn(*[AttemptReport(one.task, one.epoch, failure) for one in attempts])
    await player.play()
    assert await count_states(player, run, "m") == {"failed": 4}

    clear = ClearTasks(run.dag_id, run.run_id, ("m",), "tester", failed=True, downstream=True)
    assert len(await player.store.call(clear)) == 5
    for _ in range(4):
        await player.schedule()
        for one in (await player.turn(capacity=1)).claimed:
            await player.report(one, Success())
    await player.play()

    assert await count_states(player, run, "m") == {"success": 4}
    assert (await end(player, run))["m"] == "success"
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.success, counts.failed, counts.skipped, counts.stop) == (4, 0, 5, "failed_elements")


async def test_a_map_that_stops_itself_ends_its_elements_in_batches_and_once(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "ELEMENTS", 2)
    run = await player.create(dag(mapped("m", literal(9), max_outstanding=6, max_failed_elements=0)))
    await player.schedule()
    (first,) = (await player.turn(capacity=1)).claimed
    await player.report(first, Failure("no", may_retry=False))
    await player.store.call(SchedulerTurn(player.scheduler))
    # A user who clears the failed element in the middle of it has it run again.
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester", map_index=0))
    await player.schedule()
    assert await count_states(player, run, "m") in ({"skipped": 5, "scheduled": 1}, {"skipped": 5, "queued": 1})
    for index in (0, 3):
        if index:
            await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester", map_index=index))
        (again,) = await player.claim()
        assert again.map_index == index
        await player.report(again, Success())
        await player.play()
    assert await count_states(player, run, "m") == {"skipped": 4, "success": 2}
    assert await end(player, run) == {"run": "success", "m": "success"}


async def test_results_of_a_former_life_of_a_map_are_gone_before_its_successors_run(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "ELEMENTS", 3)
    results = (("return_value", "[1, 2, 3, 4, 5, 6, 7, 8]"),)
    run = await player.create(
        dag(task("s"), mapped("m", MapSource("xcom", "s", "return_value")), task("z", "m", rule="all_done"))
    )
    await player.report(await player.claim_one(), Success(), xcoms=results)
    for one in await player.claim():
        await player.report(one, Success(), xcoms=(("return_value", "1"),))
    await player.play()
    page = GetValuePage(run.id, "m", count=True)
    assert (await player.store.call(page)).total == 8

    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("s",), "tester", downstream=True))

    assert await player.store.call(page) == await player.store.call(GetValuePage(run.id, "nothing", count=True))
    await player.report(await player.claim_one(), Success(), xcoms=(("return_value", "[9]"),))
    claimed: list[ClaimedAttempt] = []
    for _ in range(12):
        await player.store.call(SchedulerTurn(player.scheduler))
        claimed += (await player.turn(capacity=10)).claimed
        for one in claimed:
            if one.task_id == "m":
                claimed.remove(one)
                await player.report(one, Success(), xcoms=(("return_value", "10"),))
        if claimed:
            break
    assert [one.task_id for one in claimed] == ["z"]
    assert await count_states(player, run, "m") == {"success": 1, "removed": 7}
    assert (await player.store.call(page)).values == ((0, "10"),)
    await player.report(claimed[0], Success())
    await player.play()
    assert await end(player, run) == {"run": "success", "s": "success", "m": "success", "z": "success"}


async def test_an_empty_map_ends_once_the_elements_of_its_former_life_are_removed(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "ELEMENTS", 3)
    run = await player.create(dag(task("s"), mapped("m", MapSource("xcom", "s", "return_value")), task("z", "m")))
    await player.report(await player.claim_one(), Success(), xcoms=(("return_value", "[1, 2, 3, 4, 5, 6]"),))
    await player.play()
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("s",), "tester", downstream=True))
    await player.report(await player.claim_one(), Success(), xcoms=(("return_value", "[]"),))

    for _ in range(6):
        await player.store.call(SchedulerTurn(player.scheduler))
        head, states = await find_head(player, run, "m"), await count_states(player, run, "m")
        assert head.state == "mapped" or states == {"removed": 6}

    assert await end(player, run) == {"run": "success", "s": "success", "m": "skipped", "z": "skipped"}


async def test_a_map_that_stops_in_its_second_life_ends_without_elements_of_the_first(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "ELEMENTS", 2)
    run = await player.create(dag(mapped("m", literal(9), max_outstanding=2, max_failed_elements=0), task("z", "m")))
    await player.play()
    assert await count_states(player, run, "m") == {"success": 9}
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester", downstream=True))
    await player.play(fail_indexes(0, 1))
    assert await end(player, run) == {"run": "failed", "m": "failed", "z": "upstream_failed"}
    states = await count_states(player, run, "m")
    assert (states["removed"], states["success"]) == (7, 0)
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.created, counts.failed, counts.skipped) == (2, states["failed"], 7 + states["skipped"])


async def fail_generator(player: Player, *values: str, **details: Any) -> RunRecord:
    """Play a run whose generator fails after these elements; its elements have not run."""
    generator = task("g", is_generator=True)
    run = await player.create(dag(generator, mapped("m", MapSource("generator", "g"), **details), task("z", "m")))
    source = await player.claim_one()
    if values:
        await emit(player, source, 0, *values)
    await player.report(source, Failure("no", may_retry=False))
    return run


async def test_marking_a_failed_generator_as_a_success_runs_no_element_again(player: Player) -> None:
    run = await fail_generator(player, "1", "2", "3")
    await player.play()
    states = {"run": "failed", "g": "failed", "m": "upstream_failed", "z": "upstream_failed"}
    assert await end(player, run) == states

    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("g",), "success", "tester"))

    last = await player.claim_one()
    assert (last.task_id, last.map_index) == ("z", -1)
    await player.report(last, Success())
    await player.play()
    assert await end(player, run) == {"run": "success", "g": "success", "m": "success", "z": "success"}


async def test_marking_a_failed_generator_while_its_elements_run_or_after_one_failed(player: Player) -> None:
    run = await fail_generator(player, "1", "2")
    first, second = await player.claim()
    await player.report(first, Failure("no", may_retry=False))
    await player.schedule()
    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("g",), "success", "tester"))
    await player.report(second, Success())
    await player.play()
    assert await end(player, run) == {"run": "failed", "g": "success", "m": "failed", "z": "upstream_failed"}
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.success, counts.failed, counts.upstream_failed) == (1, 1, 0)

    clear = ClearTasks(run.dag_id, run.run_id, ("m",), "tester", failed=True, downstream=True)
    assert sorted(await player.store.call(clear)) == ["m[0]", "z"]
    await player.play()
    assert await end(player, run) == {"run": "success", "g": "success", "m": "success", "z": "success"}


async def test_marking_a_failed_generator_keeps_what_a_user_said_about_its_map(player: Player) -> None:
    run = await fail_generator(player, "1")
    await player.play()
    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("m",), "failed", "tester"))
    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("g",), "success", "tester"))
    await player.play()
    assert await end(player, run) == {"run": "failed", "g": "success", "m": "failed", "z": "upstream_failed"}


async def test_marking_a_generator_that_failed_before_its_first_element_skips_the_map(player: Player) -> None:
    run = await fail_generator(player)
    await player.play()
    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("g",), "success", "tester"))
    await player.play()
    assert await end(player, run) == {"run": "success", "g": "success", "m": "skipped", "z": "skipped"}


@pytest.mark.parametrize("by_range", [False, True])
async def test_a_map_that_is_cleared_in_part_is_open_again_before_the_tasks_after_it_are_decided(
    player: Player, by_range: bool
) -> None:
    run = await player.create(dag(mapped("m", literal(2)), task("z", "m"), task("beside")))
    attempts = {(one.task_id, one.map_index): one for one in await player.claim()}
    beside = attempts.pop(("beside", -1))
    for (_, index), one in attempts.items():
        ending = Failure("no", may_retry=False) if index == 0 else Success()
        await player.report(one, ending)
    await player.schedule()
    assert (await end(player, run))["z"] == "upstream_failed"

    chosen: dict[str, Any] = {"indexes": (0, 0)} if by_range else {"map_index": 0}
    cleared = await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester", downstream=True, **chosen))

    assert sorted(cleared) == ["m[0]", "z"]
    assert await end(player, run) == {"run": "running", "m": "mapped", "z": "none", "beside": "running"}
    await player.report(await player.claim_one(), Success())
    await player.report(beside, Success())
    await player.play()
    assert await end(player, run) == dict.fromkeys(("run", "m", "z", "beside"), "success")


async def test_many_failed_elements_are_cleared_in_parts(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_calls, "CLEARED_AT_ONCE", 3)
    run = await player.create(dag(mapped("m", literal(8)), task("z", "m")))
    await player.play(fail_indexes(0, 1, 4, 7))
    call = ClearTasks(run.dag_id, run.run_id, ("m",), "tester", failed=True, downstream=True)

    parts = list(split_clear(call, (await find_head(player, run, "m")).elements))
    cleared = [await player.store.call(part) for part in parts]

    assert [part.indexes for part in parts] == [(0, 2), (3, 5), (6, 7), (8, 1 << 62)]
    assert [sorted(names) for names in cleared] == [["m[0]", "m[1]", "z"], ["m[4]"], ["m[7]"], []]
    await player.play()
    assert await end(player, run) == {"run": "success", "m": "success", "z": "success"}
    assert list(split_clear(call, (await find_head(player, run, "m")).elements)) == [call]
