"""Sources of maps that are cleared and give their values again, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import Connection
from tests.store.dags import Player, dag, task
from tests.store.test_maps import end, list_elements, literal, mapped

from tidemill.core.tasks.endings import AttemptEnding, Failure, Success
from tidemill.core.tasks.structure import MapSource, TaskStructure
from tidemill.store.calls.instance_calls import ClearTasks
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.task_calls import EmitItems, GetValuePage
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt
from tidemill.store.database import Database
from tidemill.store.queries.dags.items.backlog import read_size
from tidemill.store.queries.dags.items.items import find_changes, read_range, replace_items, select_items
from tidemill.store.queries.dags.items.results import copy_pairs

KINDS = pytest.mark.parametrize("kind", ["xcom", "generator"])


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


def build(kind: str, *more: MapSource) -> tuple[TaskStructure, ...]:
    """A source and a task that is mapped over it."""
    source = MapSource(kind, "s", "return_value")
    return task("s", is_generator=kind == "generator"), mapped("m", source, *more), task("z", "m")


async def feed(player: Player, source: ClaimedAttempt, kind: str, values: tuple[str, ...]) -> None:
    """Have the source give these values, and end."""
    xcoms: tuple[tuple[str, str], ...] = ()
    if kind == "generator":
        stored = await player.store.call(EmitItems(source.task, source.epoch, 0, values))
        assert stored.total == len(values)
    else:
        xcoms = (("return_value", f"[{','.join(values)}]"),)
    await player.report(source, Success(), xcoms=xcoms)


async def play(
    player: Player, result: Callable[[ClaimedAttempt], AttemptEnding] = lambda _: Success()
) -> list[tuple[int, str]]:
    """Run all elements; return their indexes with the values that they had."""
    ran: list[tuple[int, str]] = []
    while attempts := await player.claim() or await player.claim():
        ran += [(one.map_index, one.elements[0] or "") for one in attempts if one.map_index >= 0]
        xcoms = {one.task: (("return_value", one.elements[0] or ""),) for one in attempts if one.map_index >= 0}
        await player.turn(
            *[AttemptReport(one.task, one.epoch, result(one), xcoms=xcoms.get(one.task, ())) for one in attempts]
        )
    return sorted(ran)


async def clear(player: Player, run: RunRecord, *names: str, **details: bool) -> tuple[str, ...]:
    cleared: tuple[str, ...] = await player.store.call(
        ClearTasks(run.dag_id, run.run_id, names or ("s",), "tester", **details)
    )
    return cleared


async def read(player: Player, run: RunRecord) -> list[tuple[int, str]]:
    return list((await player.store.call(GetValuePage(run.id, "m"))).values)


@KINDS
async def test_only_elements_whose_value_differs_run_again(player: Player, kind: str) -> None:
    run = await player.create(dag(*build(kind)))
    await feed(player, await player.claim_one(), kind, ("1", "2", "3", "4"))
    assert await play(player) == [(0, "1"), (1, "2"), (2, "3"), (3, "4")]

    assert await clear(player, run) == ("m", "s")
    await feed(player, await player.claim_one(), kind, ("1", "9", "3"))

    assert await play(player) == [(1, "9")]
    assert await end(player, run) == {"run": "success", "s": "success", "m": "success", "z": "success"}
    assert await read(player, run) == [(0, "1"), (1, "9"), (2, "3")]
    assert [one.state for one in await list_elements(player, run, "m")] == ["success"] * 3 + ["removed"]

    await clear(player, run)
    await feed(player, await player.claim_one(), kind, ("1", "9", "3", "4", "5"))
    assert await play(player) == [(3, "4"), (4, "5")]
    assert len(await read(player, run)) == 5


@KINDS
async def test_elements_that_are_cleared_too_run_again_and_failures_stay(player: Player, kind: str) -> None:
    run = await player.create(dag(*build(kind)))
    await feed(player, await player.claim_one(), kind, ("1", "2"))
    await play(player, lambda one: Failure("no", may_retry=False) if one.map_index == 1 else Success())

    await clear(player, run)
    await feed(player, await player.claim_one(), kind, ("1", "2"))
    assert await play(player) == []
    assert (await end(player, run))["m"] == "failed"

    await clear(player, run, downstream=True)
    await feed(player, await player.claim_one(), kind, ("1", "2"))
    assert await play(player) == [(0, "1"), (1, "2")]
    assert await end(player, run) == {"run": "success", "s": "success", "m": "success", "z": "success"}


@KINDS
async def test_elements_that_run_when_their_source_is_cleared_are_ended_and_run_with_the_new_value(
    player: Player, kind: str
) -> None:
    run = await player.create(dag(*build(kind)))
    await feed(player, await player.claim_one(), kind, ("1", "2"))
    first, second = await player.claim()
    await player.report(first, Success(), xcoms=(("return_value", "1"),))

    await clear(player, run)
    (source,) = await player.claim()
    await player.turn(held=((second.task, second.epoch),))
    assert await player.report(second, Success()) != "moved"
    await player.turn()
    await feed(player, source, kind, ("1", "7"))

    assert await play(player) == [(1, "7")]
    assert await read(player, run) == [(0, "1"), (1, "7")]
    assert (await end(player, run))["run"] == "success"


@KINDS
async def test_results_survive_a_source_that_fails_when_it_runs_again(player: Player, kind: str) -> None:
    run = await player.create(dag(*build(kind)))
    await feed(player, await player.claim_one(), kind, ("1", "2", "3"))
    await play(player)

    await clear(player, run)
    source = await player.claim_one()
    if kind == "generator":
        await player.store.call(EmitItems(source.task, source.epoch, 0, ("1",)))
    await player.report(source, Failure("no", may_retry=False))
    assert await play(player) == []
    assert (await end(player, run))["m"] in ("failed", "upstream_failed")

    await clear(player, run)
    await feed(player, await player.claim_one(), kind, ("1", "2", "4"))
    assert await play(player) == [(2, "4")]
    assert (await end(player, run))["run"] == "success"


async def test_a_retry_of_a_cleared_generator_may_not_change_what_it_has_yielded_again(player: Player) -> None:
    generator = task("s", is_generator=True, retries=1, retry_delay_us=0)
    run = await player.create(dag(generator, mapped("m", MapSource("generator", "s", "return_value"))))
    await feed(player, await player.claim_one(), "generator", ("1", "2", "3"))
    await play(player)
    await clear(player, run)
    source = await player.claim_one()
    await player.store.call(EmitItems(source.task, source.epoch, 0, ("5",)))

    page = await player.store.call(GetValuePage(run.id, "s", count=True))
    assert (page.total, page.values) == (1, ((0, "5"),))
    with pytest.raises(Exception, match="element 0 differs"):
        await player.store.call(EmitItems(source.task, source.epoch, 0, ("6",)))


@pytest.mark.parametrize("more", [(literal(2),), (MapSource("xcom", "o", "return_value"),)])
async def test_of_combined_sources_elements_keep_results_if_their_number_has_the_same_items(
    player: Player, more: tuple[MapSource, ...]
) -> None:
    run = await player.create(dag(*build("xcom", *more), *([task("o")] if more[0].kind == "xcom" else [])))
    for one in await player.claim():
        await feed(player, one, "xcom", ("1", "2"))
    assert len(await play(player)) == 4

    await clear(player, run)
    await feed(player, await player.claim_one(), "xcom", ("1", "3"))

    assert await play(player) == [(2, "3"), (3, "3")]


async def test_all_items_of_a_long_list_change_in_one_transaction(database: Database) -> None:
    count = 6_000
    for turn in range(3):
        values = [f'"{turn} {number}"' for number in range(count - turn)]
        # A transaction over PostgreSQL that takes longer never succeeds.
        async with asyncio.timeout(10):
            await database.write(lambda c, turn=turn, values=values: replace_items(c, 7, "k", values, turn))  # type: ignore[misc]

    def read(connection: Connection) -> tuple[list[str], dict[tuple[int, str, int], int], int]:
        changes = find_changes(connection, [(7, "k", 0), (7, "k", count - 3)])
        return read_range(connection, 7, "k", 0, count), changes, read_size(connection, 7, "k", count - 2)

    found, changes, size = await database.read(read)
    assert found == [f'"2 {number}"' for number in range(count - 2)]
    assert changes == {(7, "k", 0): 2, (7, "k", count - 3): 2}
    assert size == sum(map(len, found))


async def test_many_items_are_paired_in_one_transaction(database: Database) -> None:
    counts = (16_000, 15_000)

    def pair(connection: Connection) -> tuple[int, list[str], list[str]]:
        for task_id, count in enumerate(counts):
            replace_items(connection, task_id, "k", [str(number) for number in range(count)], 0)
        parts = [select_items(task_id, "k") for task_id in range(2)]
        number = copy_pairs(connection, parts, [(7, "x"), (7, "y")], fills=False)
        return number, *(read_range(connection, 7, key, 0, max(counts)) for key in "xy")  # type: ignore[return-value]

    async with asyncio.timeout(10):
        number, first, second = await database.write(pair)
    assert number == min(counts)
    assert first == second == [str(number) for number in range(min(counts))]
