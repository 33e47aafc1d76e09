"""Tasks whose attempt runs all elements, in the store, on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, func, select, update
from tests.store.dags import Player, dag, task
from tests.store.history import watch_rows
from tests.store.server import PostgresServer

from tidemill.core.tasks.endings import Failure, Loss, Success
from tidemill.core.tasks.inputs import Channel
from tidemill.core.tasks.structure import ChunkStructure, MapSource, MapStructure, TaskStructure
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.element_calls import (
    ElementFailureCount,
    ElementFailures,
    GroupElementFailures,
    ListElements,
)
from tidemill.store.calls.instance_calls import ClearTasks, ListTasks, MapCounts, MarkTasks, TaskHistory
from tidemill.store.calls.iteration_calls import GetParts, IterationPage, KeepParts, KeptPart, PartCounts
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.service_calls import MapLimits
from tidemill.store.calls.task_calls import EmitItems, GetChunkItems, GetValuePage, GetXCom
from tidemill.store.calls.worker_calls import ClaimedAttempt
from tidemill.store.calls.xcom_calls import ListXComs
from tidemill.store.dag_tables import task_iteration, task_part
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store
from tidemill.store.queries.dags.runs.run_retention import RunRemoval, remove_part
from tidemill.store.queries.dags.views import task_lists

GENERATOR = MapSource("generator", "g", "return_value")


def iterated(id: str, *factors: MapSource, chunk: ChunkStructure | None = None, **details: Any) -> TaskStructure:
    names = tuple(f"x{number}" for number in range(len(factors)))
    structure = MapStructure(names, factors, chunk=chunk, iterated=True)
    return task(id, *structure.sources, mapped=structure, **details)


async def states(player: Player, run: RunRecord) -> dict[str, str]:
    return {name: state for name, state in (await player.states(run)).items() if "[" not in name}


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def get_parts(player: Player, one: ClaimedAttempt, after: int = -1, limit: int = 1000) -> IterationPage:
    return await player.store.call(GetParts(one.task, after, limit))


async def keep(player: Player, one: ClaimedAttempt, *parts: KeptPart, seen: int = 0, running: int = 0) -> PartCounts:
    return await player.store.call(KeepParts(one.task, one.epoch, parts, seen, running))


def done(number: int, value: str | None = "1") -> KeptPart:
    return KeptPart(number, "success", 1, value)


async def find_counts(player: Player, run: RunRecord, task_id: str = "i") -> MapCounts:
    (row,) = (await player.store.call(ListTasks(run.dag_id, run.run_id, task_id=task_id))).rows
    assert row.elements is not None
    return row.elements


async def list_states(player: Player, run: RunRecord, *states: str, **details: Any) -> dict[int, str]:
    rows = (await player.store.call(ListElements(run.dag_id, run.run_id, "i", states, **details))).rows
    return {one.map_index: one.state for one in rows}


async def test_one_attempt_runs_all_elements_and_their_results_are_a_sequence(player: Player) -> None:
    source = MapSource("xcom", "s", "return_value")
    after = task("z", "i", mapped=MapStructure(("x",), (MapSource("results", "i", "return_value"),)))
    run = await player.create(dag(task("s"), iterated("i", source), after))
    await player.report(await player.claim_one(), Success(), xcoms=(("return_value", '["a","b","c"]'),))

    one = await player.claim_one()
    assert (one.map_index, one.elements, one.map_length) == (0, (), None)
    page = await get_parts(player, one, limit=2)
    assert [(part.number, part.items[0].elements) for part in page.parts] == [(0, ('"a"',)), (1, ('"b"',))]
    assert (page.next, page.closed) == (1, False)
    page = await get_parts(player, one, page.next)
    assert ([part.number for part in page.parts], page.next, page.closed) == ([2], 2, True)
    assert await keep(player, one, done(0, '"A"'), seen=3, running=2) == PartCounts(1, 0, 0)
    counts = await find_counts(player, run)
    assert (counts.arrived, counts.closed, counts.running, counts.success, counts.unfinished) == (3, True, 2, 1, 2)
    assert await keep(player, one, done(2, '"C"'), done(1, None), seen=3) == PartCounts(3, 0, 0)
    await player.report(one, Success())
    found = await player.claim()

    assert [two.elements for two in found] == [('"A"',), ('"C"',)]
    page = await player.store.call(GetValuePage(run.id, "i", count=True))
    assert (page.total, page.values) == (2, ((0, '"A"'), (2, '"C"')))
    assert await player.store.call(GetXCom(run.id, ("i",), map_index=2)) == ('"C"',)
    assert await list_states(player, run) == {0: "success", 1: "success", 2: "success"}
    assert await list_states(player, run, first=1, limit=1) == {1: "success"}
    assert (await player.store.call(TaskHistory(run.dag_id, run.run_id, "i", 2))).rows


async def test_results_are_paired_by_index_with_gaps(player: Player) -> None:
    pairs = MapSource("zip", parts=(MapSource("results", "i", "return_value"), MapSource("xcom", "s", "return_value")))
    after = task("z", "i", "s", mapped=MapStructure(("x",), (pairs,)))
    await player.create(dag(task("s"), iterated("i", MapSource("xcom", "s", "return_value")), after))
    await player.report(await player.claim_one(), Success(), xcoms=(("return_value", '["a","b","c"]'),))
    one = await player.claim_one()
    await keep(player, one, done(0, '"A"'), done(1, None), done(2, '"C"'), seen=3)
    await player.report(one, Success())
    assert [two.elements for two in await player.claim()] == [('"A"', '"a"'), ('"C"', '"c"')]


@pytest.mark.parametrize(("rule", "values"), [("all_done", ["1"]), ("all_success", [])])
async def test_a_rule_decides_over_elements_that_failed(player: Player, rule: str, values: list[str]) -> None:
    after = task("z", "i", rule=rule, mapped=MapStructure(("x",), (MapSource("results", "i", "return_value"),)))
    run = await player.create(dag(iterated("i", MapSource("literal", length=2)), after))
    one = await player.claim_one()
    await keep(player, one, done(0), KeptPart(1, "failed", 1, None, "no"), seen=2)
    await player.report(one, Failure("1 of 2 elements failed", may_retry=False))
    assert [two.elements for two in await player.claim()] == [(value,) for value in values]
    assert (await states(player, run))["z"] == ("mapped" if values else "upstream_failed")


async def test_a_later_attempt_gets_what_is_left_and_no_success_is_overwritten(player: Player) -> None:
    run = await player.create(dag(iterated("i", MapSource("literal", length=4), retries=1)))
    one = await player.claim_one()
    parts = (done(1), KeptPart(2, "up_for_retry", 1, None, "no"), KeptPart(3, "failed", 2, None, "never"))
    assert await keep(player, one, *parts, seen=4) == PartCounts(1, 1, 0, 3, "never")
    # The answer was lost.
    assert await keep(player, one, *parts, seen=4) == PartCounts(1, 1, 0, 3, "never")
    await player.report(one, Loss())

    two = await player.claim_one()
    with pytest.raises(CallRefusedError) as refused:
        await keep(player, one, done(0), seen=4)
    assert refused.value.kind is RefusalKind.FENCED
    page = await get_parts(player, two)
    assert [(part.number, part.tries) for part in page.parts] == [(0, 0), (2, 1)]
    assert (page.next, page.closed) == (3, True)
    await keep(player, two, KeptPart(1, "failed", 2, None, "too late"), done(0), done(2), seen=4)
    counts = await find_counts(player, run)
    assert (counts.success, counts.failed, counts.unfinished) == (3, 1, 0)
    await player.report(two, Failure("1 of 4 elements failed", may_retry=False))
    await player.play()
    assert (await player.run(run)).state == "failed"
    assert await list_states(player, run, "failed") == {3: "failed"}
    groups = await player.store.call(GroupElementFailures(run.dag_id, run.run_id, "i"))
    assert groups == ElementFailures((ElementFailureCount("never", 1, 3),), 1, False)
    (row,) = (await player.store.call(ListTasks(run.dag_id, run.run_id, task_id="i", map_index=3))).rows
    assert (row.map_index, row.state, row.error) == (3, "failed", "never")


async def fail_some(player: Player) -> RunRecord:
    """Play a run in which element 1 of 3 fails."""
    run = await player.create(dag(iterated("i", MapSource("literal", length=3)), task("z", "i")))
    one = await player.claim_one()
    await keep(player, one, done(0), KeptPart(1, "failed", 1, None, "no"), done(2), seen=3)
    await player.report(one, Failure("1 of 3 elements failed", may_retry=False))
    await player.play()
    assert await states(player, run) == {"i": "failed", "z": "upstream_failed"}
    return run


@pytest.mark.parametrize(
    ("details", "left"),
    [
        ({"failed": True}, [1]),
        ({}, [0, 1, 2]),
        ({"map_index": 2}, [2]),
        ({"indexes": (0, 1)}, [0, 1]),
        ({"indexes": (0, 1), "failed": True}, [1]),
    ],
)
async def test_a_clear_lets_failed_named_or_all_elements_run_again(
    player: Player, details: dict[str, Any], left: list[int]
) -> None:
    run = await fail_some(player)

    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("i",), "tester", downstream=True, **details))

    one = await player.claim_one()
    page = await get_parts(player, one)
    assert [(part.number, part.tries) for part in page.parts] == [(number, 0) for number in left]
    await keep(player, one, *map(done, left), seen=3)
    failed = 1 not in left
    counts = await find_counts(player, run)
    assert (counts.success, counts.failed) == (3 - failed, failed)
    await player.report(one, Success())
    await player.play()
    assert (await player.run(run)).state == "success"


async def test_named_elements_are_cleared_with_no_other_task(player: Player) -> None:
    run = await fail_some(player)
    with pytest.raises(CallRefusedError):
        await player.store.call(ClearTasks(run.dag_id, run.run_id, ("i", "z"), "tester", map_index=1))
    with pytest.raises(CallRefusedError):
        await player.store.call(MarkTasks(run.dag_id, run.run_id, ("i",), "success", "tester", map_index=1))


async def test_an_open_source_lets_it_begin_with_its_first_element(player: Player) -> None:
    run = await player.create(dag(task("g", is_generator=True), iterated("i", GENERATOR)))
    source = await player.claim_one()
    assert await player.claim() == ()
    await player.store.call(EmitItems(source.task, source.epoch, 0, ("1", "2")))

    one = await player.claim_one()
    page = await get_parts(player, one)
    assert ([part.items[0].elements for part in page.parts], page.closed) == ([("1",), ("2",)], False)
    await keep(player, one, done(0), done(1), seen=2)

    # Without elements it holds no slot, and goes on with the next one, or the end.
    key = (one.task, one.epoch)
    for values in (("3",), ()):
        await player.turn(held=(key,), blocked=(key,))
        await player.schedule()
        assert (await player.turn(held=(key,), blocked=(key,))).unblocked == ()
        if values:
            await player.store.call(EmitItems(source.task, source.epoch, 2, values))
        else:
            await player.report(source, Success())
        await player.schedule()
        assert (await player.turn(held=(key,), blocked=(key,))).unblocked == (key,)
        await player.turn(held=(key,))
        page = await get_parts(player, one, 1)
        await keep(player, one, done(2), seen=3)
        assert page.closed is not bool(values)
    await player.report(one, Success())
    await player.play()
    assert (await player.run(run)).state == "success"


async def test_a_lost_attempt_runs_no_element(player: Player) -> None:
    run = await player.create(dag(iterated("i", MapSource("literal", length=4))))
    one = await player.claim_one()
    await keep(player, one, done(0), seen=4, running=3)
    assert (await find_counts(player, run)).running == 3
    await player.report(one, Loss())
    counts = await find_counts(player, run)
    assert (counts.running, counts.success, counts.unfinished) == (0, 1, 0)


async def test_without_an_element_it_is_skipped(player: Player) -> None:
    run = await player.create(dag(task("g", is_generator=True), iterated("i", GENERATOR)))
    await player.report(await player.claim_one(), Success())
    await player.play()
    assert await states(player, run) == {"g": "success", "i": "skipped"}


async def test_a_generator_runs_ahead_of_what_the_attempt_has_read(player: Player) -> None:
    player.map_limits = MapLimits(max_backlog=2)
    await player.create(dag(task("g", is_generator=True), iterated("i", GENERATOR)))
    source = await player.claim_one()
    await player.schedule()
    assert (await player.store.call(EmitItems(source.task, source.epoch, 0, ("1", "2")))).full
    one = await player.claim_one()
    await keep(player, one, seen=2, running=1)
    assert not (await player.store.call(EmitItems(source.task, source.epoch, 2, ("3",)))).full


async def test_chunks_are_the_elements(player: Player) -> None:
    run = await player.create(dag(task("g", is_generator=True), iterated("i", GENERATOR, chunk=ChunkStructure(2))))
    source = await player.claim_one()
    await player.store.call(EmitItems(source.task, source.epoch, 0, ("1", "2", "3")))
    one = await player.claim_one()
    page = await get_parts(player, one)
    assert [(part.number, part.first, part.size) for part in page.parts] == [(0, 0, 2)]
    assert [item.elements for item in page.parts[0].items] == [("1",), ("2",)]
    await player.report(source, Success())
    page = await get_parts(player, one, 0)
    assert ([(part.number, part.size) for part in page.parts], page.closed) == ([(1, 1)], True)
    items = await player.store.call(GetChunkItems(one.task, 0, part=0))
    assert [item.elements for item in items] == [("2",)]
    await keep(player, one, done(0), done(1), seen=2)
    assert (await find_counts(player, run)).arrived == 2


async def test_many_elements_that_are_done_are_passed_over(player: Player) -> None:
    await player.create(dag(iterated("i", MapSource("literal", length=100), MapSource("literal", length=45))))
    one = await player.claim_one()
    for first in range(0, 4000, 1000):
        await keep(player, one, *map(done, range(first, first + 1000)), seen=4000)
    page = await get_parts(player, one)
    assert [part.number for part in page.parts] == list(range(4000, 4500))
    assert page.parts[0].items[0].leaf_indexes == (88, 40)


async def test_results_go_with_their_run(player: Player, database: Database) -> None:
    run = await fail_some(player)
    while (await database.write(lambda one: remove_part(one, run.id, 1 << 60))).removal is not RunRemoval.DONE:
        pass
    for table in (task_part, task_iteration):
        statement = select(func.count()).select_from(table)
        assert await database.write(lambda one, wanted=statement: one.execute(wanted).scalar_one()) == 0


@pytest.mark.parametrize("part", [KeptPart(0, "running", 1), KeptPart(0, "success", 1, "x" * (1 << 20) + "x")])
async def test_what_cannot_be_stored_is_refused(player: Player, part: KeptPart) -> None:
    await player.create(dag(iterated("i", MapSource("literal", length=1))))
    one = await player.claim_one()
    with pytest.raises(CallRefusedError):
        await keep(player, one, part)


async def test_postgresql_reads_only_the_named_elements_of_many(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await open_store(await postgres.new_database())
    try:
        player = await Player(database).begin()
        await player.create(dag(iterated("i", MapSource("literal", length=3_000))))
        one = await player.claim_one()
        for first in range(0, 2_000, 1_000):
            await keep(player, one, *map(done, range(first, first + 1_000)), seen=2_000)
        with watch_rows(monkeypatch, task_part) as rows:
            counts = await keep(player, one, *map(done, range(1_950, 2_050)), seen=2_050)
    finally:
        await database.close()
    assert counts.success == 2_050
    assert rows
    assert max(rows.values()) <= 100


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 9])
async def test_results_are_listed_with_the_xcoms_of_the_attempt(player: Player, limit: int) -> None:
    run = await player.create(dag(iterated("i", MapSource("literal", length=5)), task("z")))
    (one,) = [each for each in await player.claim() if each.task_id == "i"]
    await keep(player, one, done(0, '"a"'), done(1, None), done(2, '"c"'), KeptPart(3, "failed", 1), done(4, '"e"'))
    await player.report(one, Success(), xcoms=(("pushed", "1"),))

    found: list[tuple[int, str, str]] = []
    after: str | None = None
    while not found or after is not None:
        page = await player.store.call(ListXComs(run.dag_id, run.run_id, "i", after, limit))
        assert len(page.rows) <= limit
        found += [(row.map_index, row.key, row.value) for row in page.rows]
        after = page.next

    results = [(0, "return_value", '"a"'), (2, "return_value", '"c"'), (4, "return_value", '"e"')]
    assert found == [*results, (0, "pushed", "1")]
    of_some = await player.store.call(ListXComs(run.dag_id, run.run_id, "i", map_index=1, last_index=3))
    assert [row.map_index for row in of_some.rows] == [2]


async def test_the_scheduler_is_rung_for_results_only_if_a_generator_waits(player: Player) -> None:
    player.map_limits = MapLimits(max_backlog=2)
    await player.create(dag(task("g", is_generator=True), iterated("i", GENERATOR)))
    source = await player.claim_one()
    stored = await player.store.call(EmitItems(source.task, source.epoch, 0, ("1", "2", "3", "4")))
    assert stored.full
    one = await player.claim_one()
    bell = player.store.doorbell

    async def rings(*parts: KeptPart, seen: int) -> bool:
        while await bell.wait(Channel.SCHEDULER, 0.02):
            pass
        await keep(player, one, *parts, seen=seen, running=1)
        return await bell.wait(Channel.SCHEDULER, 0.02)

    assert not await rings(done(0), seen=1)
    await player.turn(held=((source.task, source.epoch), (one.task, one.epoch)), blocked=((source.task, source.epoch),))
    await player.schedule()
    assert await rings(done(1), seen=4)


async def test_an_element_that_the_source_has_not_given_cannot_be_cleared(player: Player) -> None:
    run = await player.create(dag(iterated("i", MapSource("literal", length=2))))
    one = await player.claim_one()
    await keep(player, one, done(0), done(1), seen=2)
    await player.report(one, Success())
    await player.schedule()
    for given in ({"map_index": 2}, {"indexes": (2, 9)}):
        with pytest.raises(CallRefusedError) as refused:
            await player.store.call(ClearTasks(run.dag_id, run.run_id, ("i",), "tester", **given))
        assert refused.value.kind is RefusalKind.UNKNOWN
    assert (await states(player, run))["i"] == "success"
    assert await player.store.call(ClearTasks(run.dag_id, run.run_id, ("i",), "tester", indexes=(1, 9))) == ("i[0]",)


async def test_elements_without_a_result_are_listed(player: Player) -> None:
    run = await player.create(dag(iterated("i", MapSource("literal", length=5))))
    one = await player.claim_one()
    await keep(player, one, done(1), KeptPart(3, "failed", 1, None, "no"), seen=5, running=1)
    assert await list_states(player, run) == {0: "none", 1: "success", 2: "none", 3: "failed", 4: "none"}
    assert await list_states(player, run, "none") == {0: "none", 2: "none", 4: "none"}
    assert await list_states(player, run, "none", "failed", first=1, last=3) == {2: "none", 3: "failed"}
    found, after = {}, None
    while True:
        page = await player.store.call(ListElements(run.dag_id, run.run_id, "i", ("none",), after=after, limit=2))
        found |= {row.map_index: (row.tries, row.started_us, row.ended_us) for row in page.rows}
        after = page.next
        if after is None:
            break
    assert found == dict.fromkeys((0, 2, 4), (0, None, None))
    (row,) = (await player.store.call(ListTasks(run.dag_id, run.run_id, task_id="i", map_index=4))).rows
    assert (row.map_index, row.state) == (4, "none")


async def test_few_elements_without_a_result_among_many_are_found_page_by_page(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_lists, "_WINDOW", 2)
    monkeypatch.setattr(task_lists, "_WINDOWS", 2)
    run = await player.create(dag(iterated("i", MapSource("literal", length=11))))
    one = await player.claim_one()
    await keep(player, one, *[done(number) for number in range(10)], seen=11, running=1)
    pages, after = [], None
    while True:
        page = await player.store.call(ListElements(run.dag_id, run.run_id, "i", ("none",), after=after))
        pages.append([row.map_index for row in page.rows])
        after = page.next
        if after is None:
            break
    assert pages == [[], [], [10]]


async def test_an_attempt_that_waits_for_elements_goes_on_when_a_retry_is_due(player: Player) -> None:
    run = await player.create(dag(task("g", is_generator=True), iterated("i", GENERATOR, retry_delay_us=60_000_000)))
    source = await player.claim_one()
    await player.store.call(EmitItems(source.task, source.epoch, 0, ("1",)))
    one = await player.claim_one()
    await keep(player, one, KeptPart(0, "up_for_retry", 1, None, "no"), seen=1)
    held, waits = ((source.task, source.epoch), (one.task, one.epoch)), ((one.task, one.epoch),)
    await player.turn(held=held, blocked=waits)
    await player.schedule()
    assert (await player.turn(held=held, blocked=waits)).unblocked == ()

    def age(connection: Connection) -> None:
        connection.execute(update(task_part).values(ended_us=task_part.c.ended_us - 60_000_000))

    await player.store.write(age)
    await player.schedule()
    assert (await player.turn(held=held, blocked=waits)).unblocked == waits
    assert (await player.run(run)).state == "running"


async def test_a_task_of_elements_that_failed_has_the_error_of_its_attempt(player: Player) -> None:
    run = await player.create(dag(iterated("i", MapSource("literal", length=4))))
    one = await player.claim_one()
    await keep(player, one, *[done(number) for number in range(3)], KeptPart(3, "failed", 1, None, "no"), seen=4)
    await player.report(one, Failure("1 of 4 elements failed; element 3: no", may_retry=False))
    await player.play()
    (row,) = (await player.store.call(ListTasks(run.dag_id, run.run_id, task_id="i"))).rows
    assert row.error == "1 of 4 elements failed; element 3: no"
