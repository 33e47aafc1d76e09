"""A task instance is found by its run, task and map index: each step touches one instance only, on both databases."""

from __future__ import annotations

from itertools import chain

import pytest
from sqlalchemy import select
from tests.store.dags import Player, add_elements, dag, task

from tidemill.core.tasks.endings import Deferral, Success
from tidemill.core.tasks.instance import format_instance
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.callback_calls import ListCallbacks
from tidemill.store.calls.instance_calls import ClearTasks, ListTasks, MarkTasks, TaskHistory
from tidemill.store.calls.log_calls import ReadLog
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.task_calls import AppendLog, GetXCom, PushXCom
from tidemill.store.calls.trigger_calls import ClaimTriggers, FiredEvent, StoreEvents
from tidemill.store.calls.worker_calls import AttemptReport, CallbackReport, LogPart
from tidemill.store.calls.xcom_calls import ListXComs
from tidemill.store.dag_tables import dag_run, task_instance
from tidemill.store.database import Database

DAY_US = 86_400_000_000


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def read_rows(player: Player, column: str) -> dict[tuple[str, int], object]:
    """Return a column of all task rows, by task and index."""
    columns = task_instance.c
    statement = select(columns.task_id, columns.map_index, columns[column]).order_by(columns.id)
    rows = await player.store.read(lambda connection: connection.execute(statement).all())
    return {(row[0], row[1]): row[2] for row in rows}


async def test_an_attempt_names_its_element_and_its_end_moves_only_that(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a")))
    await add_elements(player.store, run, "a", "scheduled", "scheduled", "scheduled")

    attempts = {one.map_index: one for one in await player.claim()}

    assert sorted(attempts) == [-1, 0, 1, 2]
    assert {one.task_id for one in attempts.values()} == {"a"}
    await player.report(attempts[1], Success())
    states = {"a": "running", "a[0]": "running", "a[1]": "success", "a[2]": "running", "b": "none"}
    assert await player.states(run) == states
    unfinished = await player.store.read(lambda c: c.execute(select(dag_run.c.unfinished)).scalar_one())
    assert unfinished == 2, "the run counts its tasks"
    await player.turn(*[AttemptReport(attempts[index].task, attempts[index].epoch, Success()) for index in (0, 2)])
    await player.schedule()
    assert (await player.states(run))["b"] == "none"
    await player.report(attempts[-1], Success())
    await player.schedule()
    assert (await player.states(run))["b"] == "queued"


async def test_the_end_of_a_task_decides_its_successor_and_no_element_of_it(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a"), task("c", "b")))
    await add_elements(player.store, run, "b", "none", "none")
    await add_elements(player.store, run, "c", "none")
    (attempt,) = await player.claim()

    await player.report(attempt, Success())
    await player.schedule()

    assert await player.states(run) == {
        "a": "success", "b": "queued", "b[0]": "none", "b[1]": "none", "c": "none", "c[0]": "none"
    }  # fmt: skip
    assert (await read_rows(player, "epoch"))["b", 0] == 0
    assert [(await read_rows(player, "tallies"))["b", index] for index in (-1, 0, 1)] == ["1 0 0 0", "", ""]


async def test_a_skip_by_name_and_its_wave_pass_by_elements(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a"), task("c", "b"), task("d", "a")))
    await add_elements(player.store, run, "b", "none", "none")
    await add_elements(player.store, run, "c", "none")

    await player.report(await player.claim_one(), Success(), skip=("b",))

    votes = await read_rows(player, "skip_votes")
    assert {key: found for key, found in votes.items() if found} == {("b", -1): 1}
    states = await player.states(run)
    assert [states[name] for name in ("b", "c", "b[0]", "b[1]", "c[0]")] == ["skipped", "skipped", *["none"] * 3]


async def test_the_leaves_of_a_run_are_tasks_not_elements(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a")))
    await add_elements(player.store, run, "b", "failed", "success")

    await player.play()

    assert (await player.run(run)).state == "success"


async def test_an_instance_waits_for_the_same_instance_of_the_previous_run(player: Player) -> None:
    structure = dag(task("a", depends_on_past=True), task("b", "a"))
    first = await player.create(structure, run_id="first", logical_us=DAY_US)
    await add_elements(player.store, first, "a", "failed", "none")
    second = await player.create(structure, run_id="second", logical_us=2 * DAY_US)
    await add_elements(player.store, second, "a", "none", "none")
    (attempt,) = await player.claim()
    assert attempt.run == first.id
    assert (await player.states(second))["a"] == "none"

    await player.report(attempt, Success())
    await player.schedule()

    states = await player.states(second)
    assert [states[name] for name in ("a", "a[0]", "a[1]")] == ["queued", "none", "none"]


async def test_an_instance_waits_for_the_tasks_that_follow_it_in_the_previous_run(player: Player) -> None:
    structure = dag(task("a", wait_for_downstream=True), task("b", "a"))
    first = await player.create(structure, run_id="first", logical_us=DAY_US)
    await add_elements(player.store, first, "b", "none")
    second = await player.create(structure, run_id="second", logical_us=2 * DAY_US)
    await add_elements(player.store, second, "a", "none")

    await player.report(await player.claim_one(), Success())
    (attempt,) = await player.claim()
    assert (attempt.run, attempt.task_id) == (first.id, "b")
    assert (await player.states(second))["a"] == "none"
    await player.report(attempt, Success())
    (attempt,) = await player.claim()

    assert (attempt.run, attempt.task_id, attempt.map_index) == (second.id, "a", -1)
    assert (await player.states(second))["a[0]"] == "none"


async def list_pages(player: Player, run: RunRecord, limit: int, **details: object) -> list[list[str]]:
    """Return the names on each page of the tasks of a run."""
    pages, after = [], None
    while True:
        wanted = {"map_index": None, **details}
        request = ListTasks(run.dag_id, run.run_id, after=after, limit=limit, **wanted)  # type: ignore[arg-type]
        page = await player.store.call(request)
        pages.append([format_instance(one.task_id, one.map_index) for one in page.rows])
        after = page.next
        if after is None:
            return pages


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
async def test_pages_of_tasks_lose_and_repeat_no_element(player: Player, limit: int) -> None:
    run = await player.create(dag(task("a"), task("b", "a"), task("c", "b")))
    await add_elements(player.store, run, "b", *["none"] * 6)

    pages = await list_pages(player, run, limit)

    assert [*chain.from_iterable(pages)] == ["a", "b", *[f"b[{index}]" for index in range(6)], "c"]
    assert all(len(page) <= limit for page in pages)


async def test_a_list_of_tasks_has_the_instances_that_it_names(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a"), task("c", "b")))
    await add_elements(player.store, run, "b", "none", "none", "failed")
    await add_elements(player.store, run, "c", "failed", "none")

    async def find(limit: int = 1, **details: object) -> list[str]:
        return [*chain.from_iterable(await list_pages(player, run, limit, **details))]

    assert await find(map_index=-1) == ["a", "b", "c"]
    assert await find(map_index=1) == ["b[1]", "c[1]"]
    assert await find(task_id="b") == ["b", "b[0]", "b[1]", "b[2]"]
    assert await find(task_id="c", map_index=0) == ["c[0]"]
    assert await find(task_id="c", map_index=2) == []
    assert await find(states=("failed",)) == ["b[2]", "c[0]"]


async def test_history_logs_and_xcoms_are_those_of_the_instance(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a")))
    await add_elements(player.store, run, "a", "scheduled", "scheduled")
    call = player.store.call
    for one in await player.claim():
        text = format_instance("a", one.map_index)
        await call(AppendLog((LogPart(one.task, 1, 0, 0, text.encode(), 1),)))
        await call(PushXCom(one.task, one.epoch, "return_value", f'"{text}"'))
        if one.map_index == 1:
            await player.report(one, Success())

    for index in (-1, 0, 1):
        name = format_instance("a", index)
        log = await call(ReadLog("dag", run.run_id, "a", index))
        assert [part.data.decode() for part in log.rows] == [name]
        assert await call(GetXCom(run.id, ("a", "b"), map_index=index)) == (f'"{name}"', None)
        listed = await call(ListXComs("dag", run.run_id, "a", map_index=index))
        assert [(one.map_index, one.value) for one in listed.rows] == [(index, f'"{name}"')]
        history = await call(TaskHistory("dag", run.run_id, "a", index))
        assert [one.after for one in history.rows][-1] == ("success" if index == 1 else "running")
    listed = await call(ListXComs("dag", run.run_id, "a"))
    assert sorted(one.map_index for one in listed.rows) == [-1, 0, 1]
    for request in (ReadLog("dag", run.run_id, "a", 2), TaskHistory("dag", run.run_id, "b", 0)):
        with pytest.raises(CallRefusedError) as caught:
            await call(request)
        assert caught.value.kind is RefusalKind.UNKNOWN


async def test_clearing_changes_the_named_instance_only(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a"), task("c", "b")))
    await player.play()
    await add_elements(player.store, run, "b", "success", "success", "failed")
    call = player.store.call

    dry = ClearTasks("dag", run.run_id, ("b",), "me", downstream=True, dry_run=True, map_index=1)
    assert await call(dry) == ("b[1]", "c")
    assert await call(ClearTasks("dag", run.run_id, ("b",), "me", failed=True, map_index=1)) == ()
    assert await call(ClearTasks("dag", run.run_id, ("b",), "me", failed=True, map_index=2)) == ("b[2]",)
    assert await call(ClearTasks("dag", run.run_id, ("b",), "me", map_index=1)) == ("b[1]",)

    after = {"a": "success", "b": "success", "b[0]": "success", "b[1]": "none", "b[2]": "none", "c": "success"}
    assert await player.states(run) == after
    assert (await read_rows(player, "tallies"))["c", -1] == "1 0 0 0"
    assert await call(ClearTasks("dag", run.run_id, ("b",), "me")) == ("b",)
    assert await player.states(run) == after | {"b": "none"}
    assert await call(ClearTasks("dag", run.run_id, (), "me")) == ("a", "c")
    assert (await player.states(run))["b[0]"] == "success"


async def test_marking_changes_the_named_instance_only(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a"), task("c", "b")))
    await add_elements(player.store, run, "b", "none", "failed")
    call = player.store.call

    assert await call(MarkTasks("dag", run.run_id, ("b",), "success", "me", map_index=1)) == ("b[1]",)
    assert await call(MarkTasks("dag", run.run_id, ("b",), "skipped", "me", map_index=0)) == ("b[0]",)
    states = await player.states(run)
    assert [states[name] for name in ("b", "b[0]", "b[1]", "c")] == ["none", "skipped", "success", "none"]

    assert await call(MarkTasks("dag", run.run_id, ("b",), "failed", "me")) == ("b",)
    await player.schedule()
    states = await player.states(run)
    assert [states[name] for name in ("b", "b[0]", "b[1]")] == ["failed", "skipped", "success"]
    assert states["c"] == "upstream_failed"


async def test_an_element_that_does_not_exist_is_refused(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a")))
    await add_elements(player.store, run, "b", "none")
    for request, kind in (
        (ClearTasks("dag", run.run_id, ("b",), "me", map_index=1), RefusalKind.UNKNOWN),
        (ClearTasks("dag", run.run_id, ("a", "b"), "me", map_index=0), RefusalKind.UNKNOWN),
        (ClearTasks("dag", run.run_id, (), "me", map_index=0), RefusalKind.INVALID),
        (MarkTasks("dag", run.run_id, ("b",), "success", "me", map_index=7), RefusalKind.UNKNOWN),
    ):
        with pytest.raises(CallRefusedError) as caught:
            await player.store.call(request)
        assert caught.value.kind is kind


async def test_a_trigger_and_a_callback_belong_to_their_element(player: Player) -> None:
    run = await player.create(dag(task("a", callbacks=("on_success",))))
    await add_elements(player.store, run, "a", "scheduled", "scheduled")
    call = player.store.call
    deferral = Deferral("package.Trigger", "{}", "resume")
    await player.turn(*[AttemptReport(one.task, one.epoch, deferral) for one in await player.claim()])
    triggerer = await player.begin_service("triggerer")

    claimed = {one.map_index: one for one in await call(ClaimTriggers(triggerer, 1, 10))}
    assert sorted(claimed) == [-1, 0, 1]
    fired = FiredEvent(claimed[1].id, claimed[1].token, "1", None, 0)
    await call(StoreEvents(triggerer, 2, (fired,)))

    attempt = await player.claim_one()
    assert (attempt.task_id, attempt.map_index, attempt.resume is not None) == ("a", 1, True)
    await player.report(attempt, Success())
    callback = await player.claim_one()
    assert callback.callback is not None
    assert (callback.task_id, callback.map_index) == ("a", 1)
    await player.turn(callbacks=(CallbackReport(callback.callback.id, "no"),))
    listed = await call(ListCallbacks("dag", run.run_id))
    assert [(one.task_id, one.map_index) for one in listed.rows] == [("a", 1)]
    assert await player.states(run) == {"a": "deferred", "a[0]": "deferred", "a[1]": "success"}


async def test_an_xcom_of_an_earlier_run_is_that_of_the_same_element(player: Player) -> None:
    first = await player.create(dag(task("a")), run_id="first", logical_us=DAY_US)
    await add_elements(player.store, first, "a", "scheduled")
    for one in await player.claim():
        await player.report(one, Success(), xcoms=(("return_value", str(one.map_index)),))
    second = await player.create(dag(task("a")), run_id="second", logical_us=2 * DAY_US)

    for index, value in ((-1, "-1"), (0, "0"), (1, None)):
        pulled = await player.store.call(GetXCom(second.id, ("a",), map_index=index, include_prior=True))
        assert pulled == (value,)
