"""Long lists in the configuration of a run, which are stored item by item, on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select, update
from tests.store.dags import Player, dag, task
from tests.store.test_maps import end, mapped

from tidemill.config.sections.triggerer_settings import StoreSettings
from tidemill.core.tasks.endings import Success
from tidemill.core.tasks.structure import DagStructure, MapSource, ParamStructure
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.instance_calls import ClearTasks
from tidemill.store.calls.run_calls import CreateRun, StageConfItems
from tidemill.store.calls.task_calls import GetValuePage
from tidemill.store.dag_tables import map_item
from tidemill.store.database import Database
from tidemill.store.queries.dags.items import conf_lists
from tidemill.store.run_retention import RunRetention

ROWS = MapSource("param", key="rows")
CONF = '{"rows":{"$tidemill":"items","value":3},"n":1}'


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


def over_rows() -> DagStructure:
    params = (ParamStructure("rows", default="[]"),)
    return dag(mapped("a", ROWS), mapped("b", ROWS), task("z", "a"), params=params)


async def stage(player: Player, number: int, *values: str, first: int = 0) -> None:
    await player.store.call(StageConfItems(number, "rows", first, values))


async def count_staged(player: Player) -> int:
    statement = select(func.count()).select_from(map_item).where(map_item.c.task < 0)
    return int(await player.store.read(lambda connection: connection.execute(statement).scalar_one()))


async def test_a_list_gives_elements_to_all_maps_over_it(player: Player) -> None:
    await stage(player, 7, "1", "2")
    await stage(player, 7, "3", first=2)
    await stage(player, 7, "3", first=2)
    run = await player.create(over_rows(), conf=CONF, stage=7)
    assert await count_staged(player) == 0

    attempts = await player.claim()
    found = sorted((one.task_id, one.map_index, one.elements) for one in attempts)
    assert found == [(name, index, (str(index + 1),)) for name in "ab" for index in range(3)]
    assert {one.conf for one in attempts} == {CONF}
    page = await player.store.call(GetValuePage(run.id, "", "rows", count=True))
    assert (page.total, page.values) == (3, ((0, "1"), (1, "2"), (2, "3")))
    page = await player.store.call(GetValuePage(run.id, "", "n", count=True))
    assert (page.total, page.values) == (0, ())

    for one in attempts:
        await player.report(one, Success())
    await player.play()
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("a",), "tester", downstream=True))
    again = await player.claim() or await player.claim()
    assert [(one.task_id, one.elements) for one in again] == [("a", (text,)) for text in "123"]
    for one in again:
        await player.report(one, Success())
    await player.play()
    assert set((await end(player, run)).values()) == {"success"}


async def test_a_list_that_is_incomplete_or_that_no_task_is_mapped_over_is_refused(player: Player) -> None:
    await player.create(dag(mapped("a", MapSource("literal", length=1))))
    await player.create(dag(mapped("a", ROWS), id="rows"), conf='{"rows":[1]}')
    await stage(player, 7, "1", "2")
    for name, number in (("rows", 0), ("rows", 7), ("rows", 8), ("dag", 7)):
        with pytest.raises(CallRefusedError) as caught:
            await player.store.call(CreateRun(name, by="tester", conf=CONF, stage=number))
        assert caught.value.kind is RefusalKind.INVALID


async def test_the_length_of_a_list_is_checked_against_the_schema_of_its_param(player: Player) -> None:
    schemas = {"fits": '{"type":"array","minItems":3,"items":{"type":"string"}}', "short": '{"minItems":4}'}
    schemas |= {"long": '{"maxItems":2}', "text": '{"type":"string"}', "unique": '{"uniqueItems":true}'}
    for number, (name, schema) in enumerate(schemas.items(), 1):
        params = (ParamStructure("rows", "[]", schema),)
        await player.create(dag(mapped("a", ROWS), id=name, params=params))
        await stage(player, number, "1", "2", "3")
        call = CreateRun(name, by="tester", conf=CONF, stage=number)
        if name == "fits":
            assert (await player.store.call(call)).state == "running"
            continue
        with pytest.raises(CallRefusedError) as caught:
            await player.store.call(call)
        assert caught.value.kind is RefusalKind.INVALID


async def test_wrong_parts_are_refused(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conf_lists, "MAX_STAGED_BYTES", 10)
    for number, first, value in ((0, 0, "1"), (1 << 62, 0, "1"), (1, 1, "1"), (1, 0, "\0"), (1, 0, '"123456789"')):
        with pytest.raises(CallRefusedError) as caught:
            await stage(player, number, value, first=first)
        assert caught.value.kind is RefusalKind.INVALID


async def test_lists_that_no_run_took_over_are_removed_after_a_day(player: Player) -> None:
    await stage(player, 5, "1", "2")
    await stage(player, 6, "1")
    assert await count_staged(player) == 5
    old = map_item.c.task == -5
    await player.store.write(
        lambda connection: connection.execute(
            update(map_item).where(old, map_item.c.key == conf_lists._STAGED).values(value="0")
        )
    )
    await stage(player, 8, "1")
    assert await count_staged(player) == 4


async def test_all_lists_that_no_run_took_over_are_removed_in_the_background(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conf_lists, "_REMOVED", 1)
    for number in (5, 6, 7):
        await stage(player, number, "1", "2", "3")
    old = map_item.c.task.in_([-5, -6])
    await player.store.write(
        lambda connection: connection.execute(
            update(map_item).where(old, map_item.c.key == conf_lists._STAGED).values(value="0")
        )
    )
    await RunRetention(player.store, StoreSettings(retention_runs_days=0), pause_seconds=0).remove_lists()
    assert await count_staged(player) == 4


async def test_lists_of_users_are_limited_in_length_and_number(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conf_lists, "MAX_STAGES", 2)

    async def send(number: int, by: str, *values: str, first: int = 0) -> RefusalKind | None:
        try:
            await player.store.call(StageConfItems(number, "rows", first, values, most=3, by=by))
        except CallRefusedError as error:
            return error.kind
        return None

    assert await send(1, "ann", "1", "2", "3") is None
    assert await send(1, "ann", "4", first=3) is RefusalKind.INVALID
    assert await send(2, "ann", "1") is None
    assert await send(3, "ann", "1") is RefusalKind.CONFLICT
    assert await send(3, "bob", "1") is None
    assert await send(2, "ann", "2", first=1) is None
    await player.create(over_rows(), conf=CONF, stage=1)
    assert await send(4, "ann", "1") is None
