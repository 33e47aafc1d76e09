"""Files of DAGs, their versions, and the runs that their schedules create, on both databases."""

from __future__ import annotations

import time

import msgspec
import pytest
from tests.store.dags import Player, dag, encode, task

from tidemill.core.tasks.endings import Success
from tidemill.core.tasks.structure import ParamStructure, ScheduleStructure
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.dag_calls import GetDag, ListDags, PauseDag
from tidemill.store.calls.run_calls import CreateRun, ListRuns
from tidemill.store.calls.service_calls import ListFiles, RemoveFile, StoredDag, StoreFile
from tidemill.store.database import Database

HOUR_US = 3_600_000_000


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


def every(interval_us: int, *, start_us: int, catchup: bool = False) -> ScheduleStructure:
    return ScheduleStructure("interval", interval_us=interval_us, start_us=start_us, catchup=catchup)


async def test_a_new_version_exists_only_where_the_structure_has_changed(player: Player) -> None:
    store, first, second = player.store, dag(task("a")), dag(task("a"), task("b", "a"))

    for structure, changed in ((first, True), (first, False), (second, True), (first, True)):
        (stored,) = await store.call(StoreFile("dag.py", "digest", structures=(encode(structure),)))
        assert stored == StoredDag("dag", changed)
    found = await store.call(GetDag("dag"))
    assert found is not None
    assert (found.dag.version, found.structure) == (3, encode(first))
    old = await store.call(GetDag("dag", version=2))
    assert old is not None
    assert old.structure == encode(second)


async def test_a_run_keeps_its_structure(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a")))
    await player.store.call(StoreFile("dag.py", "other", structures=(encode(dag(task("a"))),)))
    await player.play()

    assert await player.states(run) == {"a": "success", "b": "success"}


async def test_an_id_that_another_file_has_is_refused_and_free_when_that_file_is_gone(player: Player) -> None:
    store, text = player.store, encode(dag(task("a")))
    await store.call(StoreFile("one.py", "digest", structures=(text,)))

    (refused,) = await store.call(StoreFile("two.py", "digest", structures=(text,)))
    assert refused.refused == "one.py already defines a DAG 'dag'; give one of them another id"
    assert await store.call(RemoveFile("one.py"))
    assert not await store.call(RemoveFile("one.py"))
    with pytest.raises(CallRefusedError, match="its file no longer defines it"):
        await store.call(CreateRun("dag"))
    (stored,) = await store.call(StoreFile("two.py", "digest", structures=(text,)))
    assert not stored.refused
    assert [one.file for one in (await store.call(ListDags())).rows] == ["two.py"]


async def test_a_file_that_is_broken_keeps_its_dags_and_says_why(player: Player) -> None:
    store = player.store
    await store.call(StoreFile("dag.py", "good", {"lib.py": "1"}, structures=(encode(dag(task("a"))),)))
    await store.call(StoreFile("dag.py", "bad", error="Traceback\0"))

    (file,) = await store.call(ListFiles(broken=True))
    assert (file.digest, file.error, file.dags) == ("bad", "Traceback\ufffd", ("dag",))
    await store.call(StoreFile("dag.py", "good", structures=()))
    assert (await store.call(ListDags())).rows == ()
    assert len((await store.call(ListDags(inactive=True))).rows) == 1


async def test_dags_are_found_by_any_tag(player: Player) -> None:
    tags = ("übung", 'a "quoted" one', "100%", "back\\slash", "plain")
    await player.store.call(StoreFile("dag.py", "digest", structures=(encode(dag(task("a"), tags=tags)),)))

    for tag in tags:
        assert [one.dag_id for one in (await player.store.call(ListDags(tag=tag))).rows] == ["dag"]
    assert (await player.store.call(ListDags(tag="slash"))).rows == ()


async def test_a_schedule_creates_a_run_for_the_last_time_that_has_passed(player: Player) -> None:
    now_us = time.time_ns() // 1000
    schedule = every(HOUR_US, start_us=now_us - 5 * HOUR_US + 60_000_000, catchup=True)
    await player.store.call(StoreFile("dag.py", "d", structures=(encode(dag(task("a"), schedule=schedule)),)))

    answer = await player.schedule()
    runs = (await player.store.call(ListRuns("dag"))).rows
    assert [run.logical_us for run in reversed(runs)] == [
        now_us - number * HOUR_US + 60_000_000 for number in (5, 4, 3, 2, 1)
    ]
    assert {run.kind for run in runs} == {"scheduled"}
    assert answer.next_due_us == now_us + 60_000_000
    assert (await player.schedule()).created == 0


async def test_runs_that_are_made_up_for_wait_in_the_schedule_and_not_as_rows(player: Player) -> None:
    now_us = time.time_ns() // 1000
    schedule = every(HOUR_US, start_us=now_us - 50 * HOUR_US, catchup=True)
    structure = dag(task("a"), schedule=schedule, max_active_runs=2)
    await player.store.call(StoreFile("dag.py", "d", structures=(encode(structure),)))

    answer = await player.schedule()
    assert len((await player.store.call(ListRuns("dag"))).rows) == 2
    assert answer.next_due_us is None
    await player.report((await player.claim())[0], Success())
    await player.schedule()
    assert len((await player.store.call(ListRuns("dag"))).rows) == 3


async def test_a_paused_dag_creates_no_runs_and_leaves_out_what_passed_meanwhile(player: Player) -> None:
    now_us = time.time_ns() // 1000
    structure = dag(task("a"), schedule=every(HOUR_US, start_us=now_us - 3 * HOUR_US - 1))
    await player.store.call(StoreFile("dag.py", "d", structures=(encode(structure),), paused=True))
    assert (await player.schedule()).created == 0
    waiting = await player.store.call(CreateRun("dag"))
    assert waiting.state == "queued"

    assert await player.store.call(PauseDag("dag", False, "tester"))
    assert not await player.store.call(PauseDag("dag", False, "tester"))
    await player.schedule()
    assert [run.id for run in (await player.store.call(ListRuns("dag"))).rows] == [waiting.id]
    assert (await player.run(waiting)).state == "running"


async def test_lists_are_read_in_pages(player: Player) -> None:
    structures = [dag(task("a"), id=f"dag{number}", tags=("even",) * (number % 2 == 0)) for number in range(5)]
    await player.store.call(StoreFile("dag.py", "d", structures=tuple(encode(one) for one in structures)))
    seen, after = [], None
    while True:
        page = await player.store.call(ListDags(after=after, limit=2))
        seen += [one.dag_id for one in page.rows]
        after = page.next
        if after is None:
            break
    assert seen == [f"dag{number}" for number in range(5)]
    tagged = await player.store.call(ListDags(tag="even"))
    assert [one.dag_id for one in tagged.rows] == ["dag0", "dag2", "dag4"]


async def test_the_params_of_a_run_are_the_defaults_with_its_configuration_over_them(player: Player) -> None:
    params = (ParamStructure("a", '{"$tidemill":"tuple","value":[1]}'), ParamStructure("b", "2"), ParamStructure("c"))
    await player.create(dag(task("a"), params=params), conf='{"b": 3, "c": [], "d": null}')

    attempt = await player.claim_one()
    assert msgspec.json.decode(attempt.params) == {
        "a": {"$tidemill": "tuple", "value": [1]},
        "b": 3,
        "c": [],
        "d": None,
    }


@pytest.mark.parametrize(
    ("conf", "meant"),
    [
        ('{"Size": 1}', {"Size": "size"}),
        ('{"widht": 1, "sise": 2}', {"widht": "width", "sise": "size"}),
        ('{"size": 1, "Size": 2}', {}),
        ('{"colour": 1, "": 2, "%s": 3}' % ("size" * 50), {}),
    ],
)
async def test_a_name_that_is_probably_a_misspelt_param_is_answered_with_the_run(
    player: Player, conf: str, meant: dict[str, str]
) -> None:
    params = (ParamStructure("size", "1"), ParamStructure("width", "1"))
    run = await player.create(dag(task("a"), params=params), conf=conf, request="once")
    again = await player.store.call(CreateRun("dag", by="tester", conf=conf, request="once"))
    said = [f"DAG 'dag' has no param {name!r}; did you mean {param!r}?" for name, param in meant.items()]
    assert list(run.warnings) == list(again.warnings) == said


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ("{}", "param 'day' of DAG 'dag' has no default; give it a value"),
        ('{"day": "2026-01-01", "size": "big"}', "param 'size': 'big' is not of type 'integer'; no run of DAG 'dag'"),
        ('{"day": "2026-01-01", "size": 0}', "param 'size': 0 is less than the minimum of 1"),
        ('{"day": "2026-01-01", "names": ["a", 1]}', r"param 'names'\[1\]: 1 is not of type 'string'"),
        ('{"day": "2026-01-01", "names": "' + "x" * 5000 + '"}', "^param 'names': 'xxx.{,400} is not of type 'array'"),
        ('{"day": "2026-01-01", "far": 1}', "the schema of param 'far' is invalid: Unresolvable: http://127.0.0.1:9"),
        ('{"day": "2026-01-01", "word": "' + "a" * 5000 + '!"}', "param 'word': 'aaa.* does not match"),
        ('{"day": "2026-01-01", "size": ' + "[" * 50_000 + "]" * 50_000 + "}", "a run is nested too deeply"),
        (
            '{"day": "2026-01-01", "more": "' + "x" * 1_048_576 + '"}',
            "a run may have up to 1,048,576 bytes; pass a ref",
        ),
        ('{"day": "2026-01-01", "round": 1}', "the schema of param 'round' is invalid: it refers to itself"),
    ],
)
async def test_a_run_whose_configuration_does_not_match_a_param_is_not_created(
    player: Player, conf: str, said: str
) -> None:
    """The server checks it, wherever the run comes from; what a schema refers to elsewhere is not fetched."""
    params = (
        ParamStructure("day", None, "{}"),
        ParamStructure("far", "1", '{"$ref": "http://127.0.0.1:9/schema.json"}'),
        ParamStructure("names", "[]", '{"type": "array", "items": {"type": "string"}}'),
        ParamStructure("round", "1", '{"$ref": "#"}'),
        ParamStructure("size", "3", '{"type": "integer", "minimum": 1}'),
        ParamStructure("word", '"a"', '{"pattern": "^(a+)+$"}'),
    )
    await player.create(dag(task("a"), params=params), conf='{"day": null, "size": 4, "more": 1}', run_id="fits")

    with pytest.raises(CallRefusedError, match=said) as refused:
        await player.store.call(CreateRun("dag", conf=conf))

    assert refused.value.kind is RefusalKind.INVALID
    assert "\n" not in str(refused.value)
    assert [run.run_id for run in (await player.store.call(ListRuns())).rows] == ["fits"]
