"""Lists that are stored in parts, because they are larger than an XCom, on both databases."""

from __future__ import annotations

import pytest
from tests.store.dags import Player, dag, mapped, task

from tidemill.core.tasks.endings import Success
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.task_calls import GetValuePage, StoreListPart
from tidemill.store.database import Database

KEY = "return_value"


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def test_a_list_in_parts_gives_elements_and_a_later_try_replaces_it(player: Player) -> None:
    run = await player.create(dag(task("a", retries=1), mapped("m", "a"), task("z", "a")))
    source = await player.claim_one()
    values = tuple(f'"{number}"' for number in range(5))
    await player.store.call(StoreListPart(source.task, source.epoch, KEY, 0, values[:3], 5))
    await player.store.call(StoreListPart(source.task, source.epoch, KEY, 3, values[3:], 5))
    for first, part in ((0, ('"x"', '"1"')), (2, ('"2"', '"y"'))):
        await player.store.call(StoreListPart(source.task, source.epoch, KEY, first, part, 4))
    page = await player.store.call(GetValuePage(run.id, "a", count=True))
    assert (page.total, [value for _, value in page.values]) == (4, ['"x"', '"1"', '"2"', '"y"'])

    await player.report(source, Success(), xcoms=((KEY, '{"$tidemill":"items","value":4}'),))
    claimed = {(one.task_id, one.map_index): one for one in await player.claim()}

    assert [claimed["m", index].elements for index in range(4)] == [('"x"',), ('"1"',), ('"2"',), ('"y"',)]
    assert claimed.keys() == {("z", -1), *(("m", index) for index in range(4))}
    await player.play()


async def test_a_part_is_refused_after_a_gap_or_by_a_stale_attempt(player: Player) -> None:
    await player.create(dag(task("a"), mapped("m", "a")))
    source = await player.claim_one()
    for part, kind in (
        (StoreListPart(source.task, source.epoch, KEY, 1, ("1",), 2), RefusalKind.INVALID),
        (StoreListPart(source.task, source.epoch, KEY, 0, ("\0",), 2), RefusalKind.INVALID),
        (StoreListPart(source.task, source.epoch - 1, KEY, 0, ("1",), 2), RefusalKind.FENCED),
    ):
        with pytest.raises(CallRefusedError) as caught:
            await player.store.call(part)
        assert caught.value.kind is kind
