"""Maps whose elements are lists of items, in the store, on both databases."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from sqlalchemy import Connection, select, update
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Failure, Success
from tidemill.core.tasks.structure import ChunkStructure, MapSource, MapStructure, TaskStructure
from tidemill.store.calls.element_calls import ListElements
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.run_calls import CancelRun, RunRecord
from tidemill.store.calls.service_calls import MapLimits
from tidemill.store.calls.task_calls import EmitItems, GetChunkItems
from tidemill.store.dag_tables import map_item, task_map
from tidemill.store.database import Database
from tidemill.store.queries.dags.items.stored_sources import read_sources, write_sources


def chunked(id: str, source: MapSource, max_items: int, max_wait_us: int | None = None) -> TaskStructure:
    structure = MapStructure(("x",), (source,), chunk=ChunkStructure(max_items, max_wait_us))
    return task(id, *structure.sources, mapped=structure)


async def states(player: Player, run: RunRecord) -> dict[str, str]:
    return {name: state for name, state in (await player.states(run)).items() if "[" not in name}


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def read(player: Player, element: int, limit: int = 1000) -> list[tuple[int, str | None]]:
    """Return the items of an element, page by page."""
    found: list[tuple[int, str | None]] = []
    while page := await player.store.call(GetChunkItems(element, found[-1][0] if found else -1, limit)):
        assert len(page) <= limit
        found += [(one.number, one.elements[0]) for one in page]
    return found


async def list_labels(player: Player, run: RunRecord) -> list[str | None]:
    return [one.label for one in (await player.store.call(ListElements(run.dag_id, run.run_id, "m"))).rows]


async def test_a_map_over_a_list_has_an_element_per_chunk(player: Player) -> None:
    run = await player.create(dag(task("s"), chunked("m", MapSource("xcom", "s", "return_value"), 2), task("z", "m")))
    await player.report(await player.claim_one(), Success(), xcoms=(("return_value", '["a","b","c"]'),))

    attempts = await player.claim()

    assert [(one.map_index, one.elements, one.leaf_indexes, one.map_length) for one in attempts] == [
        (0, (), (), 2),
        (1, (), (), 2),
    ]
    assert await read(player, attempts[0].task, limit=1) == [(0, '"a"'), (1, '"b"')]
    assert await read(player, attempts[1].task) == [(2, '"c"')]
    assert await list_labels(player, run) == ["items 0-1", "items 2-2"]
    for one in attempts:
        await player.report(one, Success())
    await player.play()
    assert await states(player, run) == {"m": "success", "s": "success", "z": "success"}


async def test_literals_and_an_empty_list_are_chunked_too(player: Player) -> None:
    run = await player.create(
        dag(chunked("m", MapSource("literal", length=3), 2), chunked("n", MapSource("literal", length=0), 2))
    )
    attempts = await player.claim()
    assert [await read(player, one.task) for one in attempts] == [[(0, None), (1, None)], [(2, None)]]
    assert (await states(player, run))["n"] == "skipped"


async def test_a_map_over_a_map_waits_for_all_results(player: Player) -> None:
    follower = chunked("m", MapSource("map", "f", "return_value"), 2)
    first = task("f", mapped=MapStructure(("x",), (MapSource("literal", length=3),)))
    await player.create(dag(first, follower))
    attempts = await player.claim()
    for one in attempts[:2]:
        await player.report(one, Success(), xcoms=(("return_value", str(one.map_index)),))
    assert await player.claim() == ()
    await player.report(attempts[2], Success(), xcoms=(("return_value", "2"),))
    found = await player.claim()
    assert [await read(player, one.task) for one in found] == [[(0, "0"), (1, "1")], [(2, "2")]]


async def test_chunks_of_a_generator_are_cut_when_full_and_at_its_end(player: Player) -> None:
    generator = task("g", is_generator=True)
    run = await player.create(dag(generator, chunked("m", MapSource("generator", "g", "return_value"), 2)))
    source = await player.claim_one()
    await player.store.call(EmitItems(source.task, source.epoch, 0, ("1", "2", "3")))

    (first,) = await player.claim()
    assert await read(player, first.task) == [(0, "1"), (1, "2")]
    await player.report(source, Success())
    (last,) = await player.claim()

    assert await read(player, last.task) == [(2, "3")]
    for one in (first, last):
        await player.report(one, Success())
    await player.play()
    assert (await player.run(run)).state == "success"


async def let_pass(database: Database, task: int, us: int) -> None:
    """Let the first item of the unfinished chunk have arrived earlier."""

    def change(connection: Connection) -> None:
        found = connection.execute(select(task_map.c.sources, task_map.c.due_us).where(task_map.c.task == task)).one()
        sources = read_sources(found.sources)
        assert sources.since_us is not None
        earlier = msgspec.structs.replace(sources, since_us=sources.since_us - us)
        new = {"due_us": found.due_us - us, "sources": write_sources(earlier)}
        connection.execute(update(task_map).where(task_map.c.task == task).values(new))

    await database.write(change)


async def test_a_chunk_is_cut_when_its_first_item_has_waited(player: Player, database: Database) -> None:
    wait_us = 60_000_000
    structure = dag(task("g", is_generator=True), chunked("m", MapSource("generator", "g", "return_value"), 3, wait_us))
    run = await player.create(structure)
    source = await player.claim_one()
    await player.store.call(EmitItems(source.task, source.epoch, 0, ("1", "2", "3", "4")))
    (first,) = await player.claim()
    answer = await player.schedule()
    assert answer.next_due_us is not None
    assert 0 < answer.next_due_us - answer.now_us <= wait_us
    assert await player.claim() == ()

    head = (await player.tasks(run))["m"].id
    await let_pass(database, head, wait_us)
    (second,) = await player.claim()
    assert (await player.schedule()).next_due_us is None
    await player.store.call(EmitItems(source.task, source.epoch, 4, ("5", "6", "7", "8")))
    (third,) = await player.claim()
    await player.report(source, Success())
    (last,) = await player.claim()

    found = [await read(player, one.task) for one in (first, second, third, last)]
    assert [[text for _, text in items] for items in found] == [["1", "2", "3"], ["4"], ["5", "6", "7"], ["8"]]
    assert await list_labels(player, run) == ["items 0-2", "items 3-3", "items 4-6", "items 7-7"]
    for one in (first, second, third, last):
        await player.report(one, Success())
    await player.play()
    assert (await player.run(run)).state == "success"

    # All begins anew with the generator; nothing is left of where the items were cut before.
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("g",), "tester", downstream=True))
    source = await player.claim_one()
    await player.store.call(EmitItems(source.task, source.epoch, 0, ("1", "2")))
    await player.report(source, Success())
    (only,) = await player.claim()
    assert [text for _, text in await read(player, only.task)] == ["1", "2"]
    await player.report(only, Success())
    await player.play()
    assert (await player.run(run)).state == "success"
    assert (await list_labels(player, run))[0] == "items 0-1"

    def count(connection: Connection) -> int:
        mine = (map_item.c.task == head) & (map_item.c.key == "\x1fcut")
        return len(connection.execute(select(map_item.c.number).where(mine)).all())

    assert await database.write(count) == 1


@pytest.mark.parametrize("stops", ["cancel", "mark", "failure"])
async def test_a_map_that_was_stopped_has_no_chunk_to_cut(player: Player, stops: str) -> None:
    mapped = chunked("m", MapSource("generator", "g", "return_value"), 2, 60_000_000)
    assert mapped.mapped is not None
    mapped = dataclasses.replace(mapped, mapped=dataclasses.replace(mapped.mapped, max_failed_elements=0))
    run = await player.create(dag(task("g", is_generator=True), mapped))
    source = await player.claim_one()
    await player.store.call(EmitItems(source.task, source.epoch, 0, ("1", "2", "3")))
    (one,) = await player.claim()
    assert (await player.schedule()).next_due_us is not None

    match stops:
        case "cancel":
            await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
        case "mark":
            await player.store.call(MarkTasks(run.dag_id, run.run_id, ("m",), "success", "tester"))
        case _:
            await player.report(one, Failure("no", may_retry=False))

    # A time in the past would have schedulers take turns without end.
    await player.schedule()
    assert (await player.schedule()).next_due_us is None


async def test_a_failed_chunk_runs_again_with_the_same_items(player: Player) -> None:
    run = await player.create(dag(chunked("m", MapSource("literal", length=4), 3)))

    await player.play(lambda one: Failure("no", may_retry=False) if one.map_index == 1 else Success())
    assert (await player.run(run)).state == "failed"
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester", failed=True))

    (again,) = await player.claim()
    assert (again.map_index, await read(player, again.task)) == (1, [(3, None)])


async def test_a_generator_may_fill_a_chunk_whatever_its_backlog(player: Player) -> None:
    player.map_limits = MapLimits(max_backlog=2)
    generator = task("g", is_generator=True)
    await player.create(dag(generator, chunked("m", MapSource("generator", "g", "return_value"), 4)))
    source = await player.claim_one()
    await player.schedule()

    full = [(await player.store.call(EmitItems(source.task, source.epoch, number, ("1",)))).full for number in range(7)]

    assert full == [False] * 5 + [True] * 2
