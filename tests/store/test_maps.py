"""Mapped tasks in the store, on both databases: runs played through scheduler and worker turns, without processes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from sqlalchemy import func, select, update
from tests.store.dags import Player, add_elements, dag, task

from tidemill.core.tasks.endings import Deferral, Failure, Skip, Success
from tidemill.core.tasks.structure import MapSource, MapStructure, TaskStructure
from tidemill.store.calls.call import CallRefusedError
from tidemill.store.calls.count_calls import CountStore
from tidemill.store.calls.element_calls import ListElements
from tidemill.store.calls.instance_calls import ClearTasks, ListGrid, ListTasks, MarkTasks, TaskRecord
from tidemill.store.calls.run_calls import CancelRun, RunRecord, WatchRuns
from tidemill.store.calls.service_calls import LoseSession, SchedulerTurn
from tidemill.store.calls.task_calls import EmitItems, GetValuePage
from tidemill.store.calls.trigger_calls import ClaimTriggers, FiredEvent, StoreEvents
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt
from tidemill.store.dag_tables import map_item, task_instance, task_journal, task_map
from tidemill.store.database import Database
from tidemill.store.queries.dags.runs.run_retention import RunRemoval, remove_part


def literal(length: int) -> MapSource:
    return MapSource("literal", length=length)


def mapped(id: str, *factors: MapSource, upstream: tuple[str, ...] = (), **details: Any) -> TaskStructure:
    names = {name: details.pop(name) for name in ("max_outstanding", "max_failed_elements") if name in details}
    arguments = details.pop("arguments", tuple(f"a{number}" for number in range(len(factors))))
    structure = MapStructure(arguments, factors, **names)
    return task(id, *{*upstream, *structure.sources}, mapped=structure, **details)


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def list_elements(player: Player, run: RunRecord, task_id: str, *states: str) -> list[TaskRecord]:
    return list((await player.store.call(ListElements(run.dag_id, run.run_id, task_id, states))).rows)


async def find_head(player: Player, run: RunRecord, task_id: str) -> TaskRecord:
    rows = (await player.store.call(ListTasks(run.dag_id, run.run_id, task_id=task_id))).rows
    return rows[0]


async def end(player: Player, run: RunRecord) -> dict[str, str]:
    """Return the states of run and tasks."""
    rows = (await player.store.call(ListTasks(run.dag_id, run.run_id))).rows
    return {"run": (await player.run(run)).state, **{one.task_id: one.state for one in rows}}


async def test_a_map_over_a_list_creates_its_elements_within_the_window_and_ends_the_run(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(5), max_outstanding=2), task("z", "m")))

    attempts = await player.claim()

    assert [(one.task_id, one.map_index) for one in attempts] == [("m", 0), ("m", 1)]
    assert [(one.leaf_indexes, one.elements, one.map_length) for one in attempts][1] == ((1,), (None,), 5)
    assert (await end(player, run))["m"] == "mapped"
    await player.report(attempts[1], Success())
    (attempt,) = await player.claim()
    assert attempt.map_index == 2
    await player.report(attempts[0], Success())
    await player.report(attempt, Success())
    await player.play()

    assert await end(player, run) == {"run": "success", "m": "success", "z": "success"}
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.arrived, counts.closed, counts.created, counts.unfinished, counts.success) == (5, True, 5, 0, 5)
    assert [one.map_index for one in await list_elements(player, run, "m", "success")] == [0, 1, 2, 3, 4]


async def test_elements_are_listed_by_states_in_order_of_their_index(player: Player) -> None:
    run = await player.create(dag(task("s"), mapped("m", MapSource("xcom", "s", "return_value"), retries=1)))
    listed = ("return_value", "[1,2,3,4,5,6]")
    await player.report(await player.claim_one(), Success(), xcoms=(listed,))
    attempts = await player.claim(5)
    results = (Failure("no", may_retry=False), Skip(), Success(), Failure("later"), Skip())
    await player.turn(
        *[AttemptReport(one.task, one.epoch, result) for one, result in zip(attempts, results, strict=True)]
    )
    await player.schedule()

    async def index(*states: str, **details: Any) -> list[int]:
        found = await player.store.call(ListElements(run.dag_id, run.run_id, "m", states, **details))
        return [one.map_index for one in found.rows]

    assert await index("skipped") == [1, 4]
    assert await index("failed", "skipped", "up_for_retry") == [0, 1, 3, 4]
    assert await index("failed", "skipped", "up_for_retry", limit=2, after="0") == [1, 3]
    assert await index("success", "skipped", "upstream_failed") == [1, 2, 4]
    assert await index("scheduled", "queued", "deferred") == [5]
    assert await index("upstream_failed", "deferred", "removed", "nothing") == []

    # After the map was cleared, its elements of before are listed until it comes to them again.
    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("m",), "success", "tester", 3))
    await player.play()
    assert (await end(player, run))["m"] == "failed"
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("s",), "tester", downstream=True))
    assert await index("skipped") == [1, 4]


async def test_a_page_looks_through_a_part_of_a_long_map_for_elements_in_a_rare_state(player: Player) -> None:
    run = await player.create(dag(task("s"), mapped("m", MapSource("xcom", "s", "return_value"))))
    await add_elements(player.store, run, "m", "removed", "removed", "success")
    rows = task_instance.c
    far = update(task_instance).where(rows.task_id == "m", rows.map_index > 0)
    await player.store.write(
        lambda connection: connection.execute(far.values(map_index=rows.map_index + 249_999)).rowcount
    )
    asked = ListElements(run.dag_id, run.run_id, "m", ("removed",))

    pages: list[list[int]] = []
    after: str | None = ""
    while after is not None and len(pages) < 10:
        page = await player.store.call(msgspec.structs.replace(asked, after=after or None))
        pages.append([one.map_index for one in page.rows])
        after = page.next

    assert pages == [[0], [], [250_000]]
    assert (await player.store.call(msgspec.structs.replace(asked, last=99_999))).next is None


async def test_an_element_keeps_the_label_that_its_last_attempt_gave_it(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(2))))
    first, other = await player.claim()

    await player.report(first, Failure("no"), map_index=0, label="one\0")
    await player.report(other, Success())
    await player.play()

    assert [one.label for one in await list_elements(player, run, "m")] == ["one\N{REPLACEMENT CHARACTER}", None]


def fail_indexes(*indexes: int) -> Any:
    return lambda one: Failure("it failed", may_retry=False) if one.map_index in indexes else Success()


async def test_a_failed_element_fails_the_map_and_clearing_it_ends_both_well(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(4)), task("z", "m"), task("y", "m", rule="all_done")))
    await player.play(fail_indexes(1, 2))
    states = {"run": "failed", "m": "failed", "z": "upstream_failed", "y": "success"}
    assert await end(player, run) == states
    head = await find_head(player, run, "m")
    assert head.error == "2 of 4 elements failed"

    cleared = await player.store.call(
        ClearTasks(run.dag_id, run.run_id, ("m",), "tester", failed=True, downstream=True)
    )

    assert sorted(cleared) == ["m[1]", "m[2]", "z"]
    assert (await end(player, run))["m"] == "mapped"
    claimed: list[int] = []

    def note(one: ClaimedAttempt) -> Success:
        claimed.append(one.map_index)
        return Success()

    await player.play(note)
    assert sorted(claimed) == [-1, 1, 2]
    assert await end(player, run) == {"run": "success", "m": "success", "z": "success", "y": "success"}


async def test_an_empty_map_is_skipped(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(0)), task("z", "m"), task("y", "m", rule="none_failed")))
    await player.play()
    assert await end(player, run) == {"run": "success", "m": "skipped", "z": "skipped", "y": "success"}


async def emit(player: Player, attempt: ClaimedAttempt, first: int, *values: str) -> tuple[int, bool]:
    stored = await player.store.call(EmitItems(attempt.task, attempt.epoch, first, values))
    return stored.total, stored.wanted


async def test_elements_of_a_generator_run_while_it_yields(player: Player) -> None:
    run = await player.create(
        dag(task("g", is_generator=True), mapped("m", MapSource("generator", "g")), task("z", "m"))
    )
    source = await player.claim_one()

    assert await emit(player, source, 0, "1", '"b"') == (2, True)

    first, second = await player.claim()
    assert [first.elements, second.elements, first.map_length] == [("1",), ('"b"',), None]
    await player.report(first, Success(), xcoms=(("return_value", "11"),))
    await player.report(second, Failure("no", may_retry=False))
    await emit(player, source, 2, "3")
    (third,) = await player.claim()
    assert (third.map_index, third.elements) == (2, ("3",))
    await player.report(source, Success())
    await player.report(third, Success(), xcoms=(("return_value", "33"),))
    await player.play()
    assert await end(player, run) == {"run": "failed", "g": "success", "m": "failed", "z": "upstream_failed"}
    page = await player.store.call(GetValuePage(run.id, "m", count=True))
    assert (page.total, page.values) == (2, ((0, "11"), (2, "33")))
    page = await player.store.call(GetValuePage(run.id, "g", after=0, limit=1, count=True))
    assert (page.total, page.values) == (3, ((1, '"b"'),))


async def test_a_retried_generator_goes_on_and_a_different_element_is_refused(player: Player) -> None:
    run = await player.create(
        dag(task("g", is_generator=True, retries=2, retry_delay_us=0), mapped("m", MapSource("generator", "g")))
    )
    source = await player.claim_one()
    await emit(player, source, 0, "1", "2")
    await player.report(source, Failure("no"))
    first, second, again = sorted(await player.claim(), key=lambda one: one.task_id, reverse=True)
    assert (again.task_id, again.try_number) == ("g", 2)
    assert await emit(player, again, 0, "1") == (2, True)
    assert await emit(player, again, 1, "2", "3") == (3, True)
    with pytest.raises(CallRefusedError, match="element 2 differs"):
        await emit(player, again, 2, "4")
    await player.report(again, Failure("no", may_retry=False))
    await player.report(first, Success())
    await player.report(second, Success())
    await player.play()
    assert await end(player, run) == {"run": "failed", "g": "failed", "m": "upstream_failed"}
    assert len(await list_elements(player, run, "m", "success")) == 3


async def test_the_items_of_lists_are_combined_as_numbered(player: Player) -> None:
    zipped = MapSource("zip", parts=(MapSource("xcom", "a", "k"), MapSource("param", key="p")), fills=True)
    run = await player.create(
        dag(task("a"), mapped("m", MapSource("xcom", "a", "return_value"), zipped)), conf='{"p":{"x":1}}'
    )
    source = await player.claim_one()
    await player.report(source, Success(), xcoms=(("return_value", '[1,"two"]'), ("k", "[3, 4]")))

    attempts = await player.claim()

    pair = '{"$tidemill":"tuple","value":["x",1]}'
    assert [one.elements for one in attempts] == [
        ("1", "3", pair),
        ("1", "4", None),
        ('"two"', "3", pair),
        ('"two"', "4", None),
    ]
    assert [one.leaf_indexes for one in attempts] == [(0, 0, 0), (0, 1, -1), (1, 0, 0), (1, 1, -1)]
    await player.turn(*[AttemptReport(one.task, one.epoch, Success()) for one in attempts])
    await player.play()
    assert (await end(player, run))["run"] == "success"


@pytest.mark.parametrize(("value", "arguments"), [("3", ("x",)), ('{"a":1}', ("**",)), (None, ("x",))])
async def test_a_map_over_a_value_that_is_no_list_fails_by_name(
    player: Player, value: str | None, arguments: Any
) -> None:
    run = await player.create(dag(task("a"), mapped("m", MapSource("xcom", "a", "k"), arguments=arguments)))
    await player.report(await player.claim_one(), Success(), xcoms=() if value is None else (("k", value),))
    await player.play()
    assert await end(player, run) == {"run": "failed", "a": "success", "m": "upstream_failed"}
    assert "the XCom 'k' of task 'a'" in str((await find_head(player, run, "m")).error)


@pytest.mark.parametrize(
    ("result", "state"), [(Failure("no", may_retry=False), "upstream_failed"), (Skip(), "skipped")]
)
async def test_a_source_that_gives_nothing_decides_its_map(player: Player, result: Any, state: str) -> None:
    run = await player.create(dag(task("a"), mapped("m", MapSource("xcom", "a", "return_value"))))
    await player.report(await player.claim_one(), result)
    await player.play()
    assert (await end(player, run))["m"] == state


async def test_a_map_stops_after_too_many_failed_elements(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(9), max_outstanding=3, max_failed_elements=0), task("z", "m")))
    attempts = await player.claim()
    await player.report(attempts[0], Failure("no", may_retry=False))
    assert await player.claim() == ()
    await player.report(attempts[1], Success())
    await player.report(attempts[2], Success())
    await player.play()
    assert await end(player, run) == {"run": "failed", "m": "failed", "z": "upstream_failed"}
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.success, counts.failed, counts.skipped, counts.stop) == (2, 1, 6, "failed_elements")


async def test_cancelling_a_run_ends_its_map(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(1000), max_outstanding=4), task("z", "m")))
    attempts = await player.claim(2)
    await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    await player.schedule()
    await player.turn(held=())
    await player.schedule()
    assert len(attempts) == 2
    assert await end(player, run) == {"run": "failed", "m": "failed", "z": "skipped"}
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.failed, counts.skipped, counts.unfinished) == (2, 998, 0)


async def test_fail_fast_ends_a_map_at_the_first_failure(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(100), max_outstanding=3), fail_fast=True))
    attempts = await player.claim(2)
    await player.report(attempts[0], Failure("no", may_retry=False))
    assert await player.claim() == ()
    await player.report(attempts[1], Success())
    await player.play()
    assert await end(player, run) == {"run": "failed", "m": "failed"}


async def test_a_map_that_has_just_failed_fast_runs_again_if_it_is_cleared(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(1)), fail_fast=True))
    await player.report(await player.claim_one(), Failure("no"))
    while (await player.run(run)).state == "running":
        await player.store.call(SchedulerTurn(player.scheduler))
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester"))
    await player.play()
    assert await end(player, run) == {"run": "success", "m": "success"}


async def test_a_fail_fast_run_fails_although_the_tasks_after_its_map_are_skipped(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(100), max_outstanding=3), task("z", "m"), fail_fast=True))
    attempt, *_ = await player.claim(1)
    await player.report(attempt, Failure("no", may_retry=False))
    await player.play()
    assert await end(player, run) == {"run": "failed", "m": "failed", "z": "skipped"}


@pytest.mark.parametrize(("limit", "state"), [(0, "failed"), (None, "success")])
async def test_a_map_that_stopped_itself_fails_its_run_whatever_comes_after_it(
    player: Player, limit: int | None, state: str
) -> None:
    one = mapped("m", literal(9), max_outstanding=1, max_failed_elements=limit)
    run = await player.create(dag(one, task("z", "m", rule="all_done")))
    await player.report(await player.claim_one(), Failure("no", may_retry=False))
    await player.play()
    assert await end(player, run) == {"run": state, "m": "failed", "z": "success"}


async def test_the_whole_map_is_cleared_while_it_runs_and_after_it(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(3), max_outstanding=2), task("z", "m")))
    first, _ = await player.claim()
    await player.report(first, Success())
    assert await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester")) == ("m",)
    await player.schedule()
    assert (await end(player, run))["m"] == "ending"
    await player.turn(held=())
    claimed: list[tuple[int, int]] = []

    def note(one: ClaimedAttempt) -> Success:
        claimed.append((one.map_index, one.try_number))
        return Success()

    await player.play(note)
    assert sorted(claimed) == [(-1, 1), (0, 2), (1, 2), (2, 1)]
    assert await end(player, run) == {"run": "success", "m": "success", "z": "success"}
    claimed.clear()
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester", downstream=True))
    await player.play(note)
    assert [index for index, _ in sorted(claimed)] == [-1, 0, 1, 2]
    assert await end(player, run) == {"run": "success", "m": "success", "z": "success"}


async def test_a_cleared_source_with_fewer_items_removes_elements(player: Player) -> None:
    run = await player.create(dag(task("g", is_generator=True), mapped("m", MapSource("generator", "g"))))
    source = await player.claim_one()
    await emit(player, source, 0, "1", "2", "3")
    await player.report(source, Success())
    await player.play()
    assert (await end(player, run))["m"] == "success"
    assert sorted(await player.store.call(ClearTasks(run.dag_id, run.run_id, ("g",), "tester"))) == ["g", "m"]
    source = await player.claim_one()
    assert await emit(player, source, 0, "7") == (1, True)
    await player.report(source, Success())
    (one,) = await player.claim()
    assert (one.map_index, one.elements, one.try_number) == (0, ("7",), 2)
    await player.report(one, Success())
    await player.play()
    assert await end(player, run) == {"run": "success", "g": "success", "m": "success"}
    assert [one.state for one in await list_elements(player, run, "m")] == ["success", "removed", "removed"]
    assert [one.map_index for one in await list_elements(player, run, "m", "removed")] == [1, 2]
    assert await list_elements(player, run, "m", "mapped") == []
    listed = (await player.store.call(ListTasks(run.dag_id, run.run_id))).rows
    grid = await player.store.call(ListGrid((run.id,)))
    assert [(one.run, one.task_id, one.state, one.elements) for one in grid] == [
        (run.id, one.task_id, one.state, one.elements) for one in listed
    ]
    assert [one.elements is None for one in grid] == [True, False]
    assert await player.store.call(ListGrid((run.id + 1,))) == ()
    assert [one.task_id for one in await player.store.call(ListGrid((run.id,), limit=1))] == ["g"]


async def test_elements_and_maps_are_marked(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(3)), task("z", "m")))
    await player.play(fail_indexes(0, 1))
    mark = MarkTasks(run.dag_id, run.run_id, ("m",), "success", "tester", indexes=(0, 1))
    assert await player.store.call(mark) == ("m[0]", "m[1]")
    await player.play()
    assert (await end(player, run))["m"] == "success"
    assert await end(player, run) == {"run": "success", "m": "success", "z": "success"}
    other = await player.create(dag(mapped("m", literal(30), max_outstanding=2), task("z", "m"), id="other"))
    first, _ = await player.claim()
    await player.report(first, Failure("no", may_retry=False))
    await player.store.call(MarkTasks("other", other.run_id, ("m",), "success", "tester"))
    await player.schedule()
    await player.turn(held=())
    await player.play()
    assert await end(player, other) == {"run": "success", "m": "success", "z": "success"}


async def test_retention_removes_a_map_with_its_elements_and_items(player: Player) -> None:
    run = await player.create(dag(task("g", is_generator=True), mapped("m", MapSource("generator", "g"))))
    source = await player.claim_one()
    await emit(player, source, 0, *map(str, range(60)))
    await player.report(source, Success())
    await player.play()
    assert (await player.run(run)).state == "success"
    later_us = (await player.run(run)).created_us + 86_400_000_000
    while (await player.store.write(lambda c: remove_part(c, run.id, later_us))).removal is not RunRemoval.DONE:
        pass
    for table in (map_item, task_map, task_instance, task_journal):
        assert (
            await player.store.read(lambda c, table=table: c.execute(select(func.count()).select_from(table)).scalar())
            == 0
        )


async def test_progress_counts_elements_beside_tasks_and_metrics_by_state(player: Player) -> None:
    await player.create(dag(mapped("m", literal(9), max_outstanding=3), task("z", "m")))
    await player.claim(2)
    (progress,) = await player.store.call(WatchRuns())
    assert (progress.total, progress.done, progress.running) == (11, 0, 2)
    counts = await player.store.call(CountStore())
    assert counts.tasks == {"mapped": 1, "none": 1, "running": 2, "queued": 1}


async def test_a_generator_ends_once_its_map_was_stopped_and_runs_on_without_a_map(player: Player) -> None:
    run = await player.create(
        dag(task("g", is_generator=True), mapped("m", MapSource("generator", "g"), max_failed_elements=0))
    )
    source = await player.claim_one()
    await emit(player, source, 0, "1")
    await player.report(await player.claim_one(), Failure("no", may_retry=False))
    await player.schedule()
    assert await emit(player, source, 1, "2") == (2, False)
    await player.report(source, Success())
    await player.play()
    assert await end(player, run) == {"run": "failed", "g": "success", "m": "failed"}
    await player.create(dag(task("g", is_generator=True), task("z", "g"), id="other"))
    assert await emit(player, await player.claim_one(), 0, "1") == (1, True)


async def test_elements_are_retried_deferred_and_lost_like_tasks(player: Player) -> None:
    run = await player.create(
        dag(mapped("m", literal(3), retries=1, retry_delay_us=0, max_outstanding=3), task("z", "m"))
    )
    first, second, _ = await player.claim()
    await player.report(first, Failure("no"))
    await player.report(second, Deferral("package.Trigger", "{}", "resume"))
    await player.store.call(LoseSession(player.worker))
    player.worker = await player.begin_service("worker")
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.unfinished, counts.failed, counts.success) == (3, 0, 0)

    claimed = await player.claim()

    assert sorted((one.map_index, one.try_number) for one in claimed) == [(0, 2), (2, 1)]
    triggerer = await player.begin_service("triggerer")
    (trigger,) = await player.store.call(ClaimTriggers(triggerer, 1, 10))
    await player.store.call(StoreEvents(triggerer, 1, (FiredEvent(trigger.id, trigger.token, "1", None, 0),)))
    (resumed,) = await player.claim()
    assert (resumed.map_index, resumed.resume is not None, resumed.leaf_indexes) == (1, True, (1,))
    await player.turn(*[AttemptReport(one.task, one.epoch, Success()) for one in (*claimed, resumed)])
    await player.play()
    assert await end(player, run) == {"run": "success", "m": "success", "z": "success"}


async def test_an_element_that_is_cleared_while_it_runs_runs_again(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(3), max_outstanding=2), task("z", "m")))
    first, second = await player.claim()
    clear = ClearTasks(run.dag_id, run.run_id, ("m",), "tester", map_index=1)
    assert await player.store.call(clear) == ("m[1]",)
    await player.turn(held=((first.task, first.epoch),))
    await player.report(first, Success())
    again, third = sorted(await player.claim(), key=lambda one: one.map_index)
    assert [(one.map_index, one.try_number) for one in (again, third)] == [(1, 2), (2, 1)]
    assert again.task == second.task
    await player.report(again, Success())
    await player.report(third, Success())
    await player.play()
    assert await end(player, run) == {"run": "success", "m": "success", "z": "success"}


async def test_a_map_in_a_queued_run_waits_for_the_run(player: Player) -> None:
    structure = dag(mapped("m", literal(2)), max_active_runs=1)
    one = await player.create(structure, run_id="one")
    await player.play(fail_indexes(0))
    assert (await player.run(one)).state == "failed"
    two = await player.create(structure, run_id="two")
    held = await player.claim()
    await player.store.call(ClearTasks("dag", "one", ("m",), "tester", failed=True))
    assert await player.claim() == ()
    assert await end(player, one) == {"run": "queued", "m": "mapped"}
    await player.turn(*[AttemptReport(a.task, a.epoch, Success()) for a in held])
    await player.play()
    assert await end(player, one) == {"run": "success", "m": "success"}
    assert await end(player, two) == {"run": "success", "m": "success"}


async def test_failed_elements_of_a_map_that_begins_anew_are_not_cleared_before_it_reaches_them(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(3)), task("z", "m")))
    await player.play(fail_indexes(0, 1))
    names = (run.dag_id, run.run_id)
    assert await player.store.call(ClearTasks(*names, ("m",), "tester", downstream=True)) == ("m", "z")
    assert await player.store.call(ClearTasks(*names, (), "tester", failed=True)) == ()
    assert await player.store.call(ClearTasks(*names, ("m",), "tester", indexes=(0, 2))) == ()
    assert await player.store.call(MarkTasks(*names, ("m",), "failed", "tester", indexes=(0, 2))) == ()
    await player.play()
    assert await end(player, run) == {"run": "success", "m": "success", "z": "success"}
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.success, counts.failed, counts.unfinished) == (3, 0, 0)


async def test_removed_elements_leave_the_counts_of_a_map_as_they_are(player: Player) -> None:
    run = await player.create(dag(task("g", is_generator=True), mapped("m", MapSource("generator", "g"))))
    source = await player.claim_one()
    await emit(player, source, 0, "1", "2", "3")
    await player.report(source, Success())
    await player.play()
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("g",), "tester"))
    source = await player.claim_one()
    await emit(player, source, 0, "7")
    await player.report(source, Success())
    await player.play()
    counts = (await find_head(player, run, "m")).elements
    assert counts is not None
    assert (counts.created, counts.success, counts.failed, counts.unfinished) == (1, 1, 0, 0)


async def test_clearing_what_failed_opens_a_map_again_with_its_generator(player: Player) -> None:
    run = await player.create(dag(task("g", is_generator=True), mapped("m", MapSource("generator", "g"))))
    source = await player.claim_one()
    await emit(player, source, 0, "1", "2")
    first, second = await player.claim()
    await player.report(first, Success())
    await player.report(second, Failure("no", may_retry=False))
    await player.report(source, Failure("no", may_retry=False))
    await player.schedule()
    cleared = await player.store.call(ClearTasks(run.dag_id, run.run_id, (), "tester", failed=True))
    assert sorted(cleared) == ["g", "m", "m[1]"]
    again = {one.task_id: one for one in await player.claim()}
    assert again["m"].elements == ("2",)
    await player.report(again["m"], Success())
    source = again["g"]
    await emit(player, source, 0, "8", "9")
    await player.report(source, Success())
    claimed = await player.claim()
    assert [(one.map_index, one.elements) for one in claimed] == [(0, ("8",)), (1, ("9",))]
    for one in claimed:
        await player.report(one, Success())
    await player.play()
    assert await end(player, run) == {"run": "success", "g": "success", "m": "success"}


async def test_an_element_that_skips_tasks_skips_none_that_all_elements_share(player: Player) -> None:
    run = await player.create(dag(mapped("m", literal(2)), task("a", "m"), task("b", "m")))
    first, second = await player.claim()

    await player.report(first, Success(), skip=("a",))
    await player.report(second, Success(), skip_all_downstream=True)
    await player.play()

    assert await end(player, run) == {"run": "success", "m": "success", "a": "success", "b": "success"}


async def test_a_mapped_teardown_runs_if_an_element_of_the_setup_succeeded(player: Player) -> None:
    up = mapped("up", literal(2), is_setup=True)
    work = task("work", "up", setups=("up",))
    teardown = {"rule": "all_done_setup_success", "is_teardown": True, "setups": ("up",), "fails_run": True}
    run = await player.create(dag(up, work, mapped("down", literal(3), upstream=("up", "work"), **teardown)))

    await player.play(lambda one: Failure("no") if (one.task_id, one.map_index) == ("up", 1) else Success())

    assert await end(player, run) == {
        "run": "success",
        "up": "failed",
        "work": "upstream_failed",
        "down": "success",
    }
    assert len(await list_elements(player, run, "down", "success")) == 3


async def test_a_mapped_teardown_cleans_up_after_a_fail_fast_stop(player: Player) -> None:
    up = mapped("up", literal(2), is_setup=True)
    teardown = {"rule": "all_done_setup_success", "is_teardown": True, "setups": ("up",)}
    down = mapped("down", literal(3), upstream=("up", "work"), max_outstanding=2, **teardown)
    tasks = [up, mapped("work", literal(4), upstream=("up",), max_outstanding=2), down]
    run = await player.create(dag(*tasks, fail_fast=True))

    await player.play(lambda one: Failure("no", may_retry=False) if one.task_id == "work" else Success())

    assert await end(player, run) == {
        "run": "failed",
        "up": "success",
        "work": "failed",
        "down": "success",
    }
    assert len(await list_elements(player, run, "down", "success")) == 3


async def test_a_callback_of_an_element_is_claimed_with_the_items_of_the_element(player: Player) -> None:
    values = MapSource("xcom", "a", "return_value")
    run = await player.create(dag(task("a"), mapped("m", values, callbacks=("on_failure",))))
    await player.report(await player.claim_one(), Success(), xcoms=(("return_value", '["x","y"]'),))
    for one in await player.claim():
        await player.report(one, Failure("no", may_retry=False) if one.map_index else Success())

    (callback,) = await player.claim()

    assert callback.callback is not None
    assert (callback.map_index, callback.elements, callback.leaf_indexes) == (1, ('"y"',), (1,))
    assert callback.map_length == 2
    assert (await end(player, run))["m"] == "failed"
