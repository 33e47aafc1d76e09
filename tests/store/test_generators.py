"""What the store answers to a generator that yields, on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Skip
from tidemill.core.tasks.structure import MapSource, MapStructure, TaskStructure
from tidemill.store.calls.task_calls import EmitItems, GetValuePage
from tidemill.store.database import Database
from tidemill.store.queries.dags.items import items as map_items
from tidemill.store.queries.dags.items.items import read_range

GENERATOR = task("g", is_generator=True)
OVER_IT = MapStructure(("x",), (MapSource("generator", "g"),))


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


@pytest.mark.parametrize(
    "others",
    [
        pytest.param((), id="no task reads it"),
        pytest.param((task("z", "g"),), id="an unmapped task reads it"),
        pytest.param((task("m", "g", mapped=OVER_IT),), id="a map"),
        pytest.param((task("slow"), task("m", "g", "slow", mapped=OVER_IT)), id="a map that has not opened"),
        pytest.param((task("m", mapped=MapStructure(("x",), (MapSource("literal", length=1),))),), id="another map"),
    ],
)
async def test_a_generator_goes_on_while_a_task_may_read_it(player: Player, others: tuple[TaskStructure, ...]) -> None:
    await player.create(dag(GENERATOR, *others))
    attempt = next(one for one in await player.claim() if one.task_id == "g")

    for first in (0, 2, 0):
        stored = await player.store.call(EmitItems(attempt.task, attempt.epoch, first, ("1", "2")))
        assert stored.wanted

    page = await player.store.call(GetValuePage(attempt.run, "g", count=True))
    assert (page.total, page.values) == (4, ((0, "1"), (1, "2"), (2, "1"), (3, "2")))


async def test_a_retry_reads_only_as_many_stored_values_as_it_yields(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    await player.create(dag(GENERATOR))
    attempt = await player.claim_one()
    await player.store.call(EmitItems(attempt.task, attempt.epoch, 0, tuple(str(number) for number in range(900))))
    asked: list[int] = []

    def read(connection: Connection, task: int, key: str, first: int, number: int) -> list[str]:
        found = read_range(connection, task, key, first, number)
        asked.append(len(found))
        return found

    monkeypatch.setattr(map_items, "read_range", read)

    for first in (0, 1, 899):
        stored = await player.store.call(EmitItems(attempt.task, attempt.epoch, first, (str(first), str(first + 1))))

    assert (asked, stored.total) == ([2, 2, 1], 901)


async def test_a_generator_ends_if_its_map_was_skipped_before_it_opened(player: Player) -> None:
    run = await player.create(dag(GENERATOR, task("first"), task("m", "g", "first", mapped=OVER_IT)))
    attempts = {one.task_id: one for one in await player.claim()}
    generator = attempts["g"]
    assert (await player.store.call(EmitItems(generator.task, generator.epoch, 0, ("1",)))).wanted
    await player.report(attempts["first"], Skip())
    await player.schedule()
    assert (await player.states(run))["m"] == "skipped"

    stored = await player.store.call(EmitItems(generator.task, generator.epoch, 1, ("2",)))

    assert not stored.wanted
