"""No statement of the store costs more because many tasks have ended, on both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.store.dags import Player, dag, encode, task
from tests.store.history import Costs, copy_elements, copy_history, watch_costs, watch_rows
from tests.store.server import PostgresServer

from tidemill.core.tasks.structure import DagStructure, ScheduleStructure
from tidemill.store.calls import all_calls
from tidemill.store.calls.call import Call
from tidemill.store.calls.dispatch import list_kinds
from tidemill.store.dag_tables import task_instance
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store

DAY_US = 86_400_000_000
#: A statement that goes by an index takes far fewer; one that reads a thousand old rows takes more.
MOST_STEPS = 4_000


def build_dag() -> DagStructure:
    """Return a DAG with everything that has statements of its own."""
    return dag(
        task("a", callbacks=("on_success", "on_failure")),
        task("b", "a", depends_on_past=True, max_active_per_dag=5),
        task("c", "a", wait_for_downstream=True, execution_timeout_us=DAY_US),
        task("d", "b", "c", retries=1, retry_delay_us=0, max_active_per_run=3),
        task("e", "d"),
        task("f", "e"),
        max_active_tasks=16,
        max_active_runs=3,
        run_timeout_us=DAY_US,
        callbacks=("on_success",),
        schedule=ScheduleStructure("cron", cron="0 0 1 1 *"),
    )


class Everybody:
    """Plays all services and people on one DAG, and notes which calls were made."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.used: set[type[Call[object]]] = set()
        self.player = Player(self)
        self.number = 0

    async def call(self, request: Call[object]) -> object:
        self.used.add(type(request))
        return await self.database.call(request)

    async def run_once(self) -> None:
        """Play a run to its end, and no more than what services say of it."""
        player = self.player
        self.number += 1
        await player.begin()
        run = await player.create(build_dag(), run_id=f"run{self.number}", logical_us=self.number * DAY_US)
        triggerer = await player.begin_service("triggerer")
        for turn in range(20):
            attempts = await player.claim()
            reports = []
            for one in attempts:
                result: object = all_calls.Success()
                if one.task_id == "c" and one.resume is None:
                    result = all_calls.Deferral("package.Trigger", "{}", "resume", stream_key="key")
                elif one.task_id == "d" and one.try_number == 1:
                    result = all_calls.Failure("it failed")
                if one.callback is None:
                    xcoms = (("return_value", "1"),) if isinstance(result, all_calls.Success) else ()
                    reports.append(all_calls.AttemptReport(one.task, one.epoch, result, xcoms=xcoms))  # type: ignore[arg-type]
            done = tuple(all_calls.CallbackReport(one.callback.id) for one in attempts if one.callback is not None)
            await player.turn(*reports, callbacks=done, held=tuple((one.task, one.epoch) for one in attempts))
            claimed = await self.call(all_calls.ClaimTriggers(triggerer, turn, 10))
            for trigger in claimed:  # type: ignore[attr-defined]
                held = all_calls.HeldTriggers(triggerer, ((trigger.id, trigger.token),))
                await self.call(held)
                await self.call(
                    all_calls.StoreEvents(
                        triggerer, turn, (all_calls.FiredEvent(trigger.id, trigger.token, "1", "i", 0),)
                    )
                )
            if (await player.run(run)).state == "success" and not attempts:
                break
        else:
            raise AssertionError(f"the run does not end: {await player.states(run)}")
        for service in (player.scheduler, player.worker):
            await self.call(all_calls.BeatSession(service))
            await self.call(all_calls.EndSession(service))
        await self.call(all_calls.LoseSession(triggerer))

    async def do_all(self) -> None:
        """Make every call that there is."""
        await self.run_once()
        await self._attempt()
        await self._people()
        await self._settings()
        await self._triggers()

    async def _attempt(self) -> None:
        await self.player.begin()
        self.number += 1
        run = await self.player.create(build_dag(), run_id=f"run{self.number}")
        (one,) = await self.player.claim()
        part = all_calls.LogPart(one.task, 1, 0, 0, b"", 1)
        for request in (
            all_calls.PushXCom(one.task, one.epoch, "key", "1"),
            all_calls.SetTaskState(one.task, one.epoch, "key", "1"),
            all_calls.GetTaskState(one.task, one.epoch, "key"),
            all_calls.DeleteTaskState(one.task, one.epoch, "key"),
            all_calls.ClearTaskState(one.task, one.epoch),
            all_calls.SetTaskState(one.task, one.epoch, "other", "1"),
            all_calls.AppendLog((part,)),
            all_calls.GetEarlierRun(run.id),
            all_calls.GetEarlierRun(run.id, "success"),
            all_calls.GetXCom(run.id, ("a",)),
            all_calls.GetXCom(run.id, ("a",), include_prior=True),
            all_calls.GetXCom(run.id, ("a",), dag_id="dag"),
            all_calls.GetXCom(run.id, ("a",), dag_id="dag", run_id="run1"),
            all_calls.EmitItems(one.task, one.epoch, 0, ("1", "2")),
            all_calls.GetValuePage(run.id, "a", count=True),
            all_calls.GetValuePage(run.id, "b", count=True),
        ):
            await self.call(request)
        await self.player.turn(all_calls.AttemptReport(one.task, one.epoch, all_calls.Loss()))
        await self.player.claim()
        await self.call(all_calls.ClearTasks("dag", run.run_id, ("a",), "tester", downstream=True))
        await self.player.turn()
        await self.player.claim()
        await self.call(all_calls.MarkTasks("dag", run.run_id, ("a",), "success", "tester"))
        await self.player.turn()
        await self.call(all_calls.CancelRun("dag", run.run_id, "tester"))
        await self.player.schedule()

    async def _people(self) -> None:
        for request in (
            all_calls.ListDags(),
            all_calls.GetDag("dag"),
            all_calls.GetRun("dag"),
            all_calls.GetRun("dag", "run1"),
            all_calls.ListRuns(),
            all_calls.ListRuns("dag"),
            all_calls.ListRuns("dag", ("running",)),
            all_calls.WatchRuns(),
            all_calls.ListTasks("dag", "run1"),
            all_calls.ListTasks("dag", "run1", map_index=None),
            all_calls.ListElements("dag", "run1", "a"),
            all_calls.ListElements("dag", "run1", "a", ("failed",), 3, 5, "3"),
            all_calls.TaskHistory("dag", "run1", "a"),
            all_calls.ReadLog("dag", "run1", "a"),
            all_calls.ListXComs("dag", "run1"),
            all_calls.DescribeTriggers((1, 2)),
            all_calls.CountStore(),
            all_calls.ListFiles(),
            all_calls.ListSessions(),
            all_calls.ListSessions("worker"),
            all_calls.PauseDag("dag", True, "tester"),
            all_calls.PauseDag("dag", False, "tester"),
            all_calls.StoreFile("other.py", "digest", structures=(encode(dag(id="other")),)),
            all_calls.RemoveFile("other.py"),
        ):
            await self.call(request)
        listed = await self.call(all_calls.ListCallbacks("dag", "run1"))
        (own,) = [one.id for one in listed.rows if one.task_id is None]  # type: ignore[attr-defined]
        await self.call(all_calls.ReadCallbackLog("dag", "run1", own))

    async def _settings(self) -> None:
        for request in (
            all_calls.SetVariable("key", "1"),
            all_calls.GetVariable("key"),
            all_calls.ListVariables(),
            all_calls.DeleteVariable("key"),
            all_calls.SetConnection("key", "http"),
            all_calls.GetConnection("key"),
            all_calls.ListConnections(),
            all_calls.DeleteConnection("key"),
            all_calls.SetPool("pool", 3, include_deferred=True),
            all_calls.ListPools(),
            all_calls.DeletePool("pool"),
        ):
            await self.call(request)

    async def _triggers(self) -> None:
        await self.call(all_calls.SetPool("wide", 9, include_deferred=True))
        run = await self.player.create(dag(task("a", pool="wide"), task("b", pool="wide"), id="deferring"))
        deferral = all_calls.Deferral("package.Trigger", "{}", "resume", stream_key="key")
        attempts = await self.player.claim()
        await self.player.turn(*[all_calls.AttemptReport(one.task, one.epoch, deferral) for one in attempts])
        first, second = [await self.player.begin_service("triggerer") for _ in range(2)]
        one, other = await self.database.call(all_calls.ClaimTriggers(first, 1, 2))
        await self.call(all_calls.ListOwnedTriggers(first))
        await self.call(all_calls.ReserveTriggers(first, second, (one.id,)))
        (one,) = await self.database.call(all_calls.ClaimTriggers(second, 1, 2, reserved=True))
        await self.call(all_calls.FailTrigger(second, one.id, one.token, "no"))
        await self.call(all_calls.ReleaseTriggers(first, ((other.id, other.token),)))
        await self.call(all_calls.CancelRun("deferring", run.run_id, "tester"))
        await self._end_all()

    async def _end_all(self) -> None:
        """Run what is left of callbacks, and end all services."""
        await self.call(all_calls.LoseOtherSessions())
        await self.player.begin()
        while attempts := await self.player.claim():
            await self.player.turn(callbacks=tuple(all_calls.CallbackReport(one.callback.id) for one in attempts))  # type: ignore[union-attr]
        await self.call(all_calls.LoseOtherSessions())


def describe(costs: Costs) -> str:
    """Return the statements that cost most, for a test that fails."""
    lines = [f"{steps:>9} {' '.join(said.split())[:400]}" for said, steps in costs.steps.most_common(12)]
    return "\n".join(lines + [f"{' '.join(said.split())[:400]}\n{plan}" for said, plan in costs.scans.items()])


async def check(database: Database, times: int, patch: pytest.MonkeyPatch) -> None:
    everybody = Everybody(database)
    await everybody.run_once()
    with watch_costs(patch) as empty:
        await everybody.run_once()
    await everybody.do_all()
    assert set(list_kinds()) - everybody.used == set(), "each call is made"
    await copy_history(database, times)
    await everybody.run_once()  # what is compiled and cached once
    with watch_costs(patch) as full:
        await everybody.run_once()
    assert full.total <= empty.total * 1.2, f"{full.total} steps, and {empty.total} in an empty store\n{describe(full)}"
    with watch_costs(patch) as costs:
        await everybody.do_all()
    dear = {said: steps for said, steps in costs.steps.items() if steps > MOST_STEPS}
    assert not dear, describe(costs)
    assert not costs.scans, describe(costs)


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await open_store(f"sqlite:///{tmp_path}/tidemill.db")
    yield opened
    await opened.close()


async def test_no_call_reads_the_history_of_a_sqlite_store(file: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    await check(file, 250, monkeypatch)


@pytest.mark.long
async def test_no_call_reads_a_history_of_200000_tasks_in_sqlite(
    file: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check(file, 12_000, monkeypatch)


@pytest.mark.long
async def test_no_call_reads_a_history_of_200000_tasks_in_postgresql(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await open_store(await postgres.new_database())
    try:
        await check(database, 12_000, monkeypatch)
    finally:
        await database.close()


ELEMENTS = 5_000
#: A lookup of one instance, or a page of a few, takes far fewer; one that reads all elements takes more.
MOST_ROWS = 100


async def use_instances(database: Database, run: all_calls.RunRecord, player: Player) -> None:
    """Make each call that names a task instance of a run whose task `b` has many elements."""
    of_run = ("dag", run.run_id)
    for request in (
        all_calls.ListTasks(*of_run, task_id="b", map_index=4_000),
        all_calls.ListTasks(*of_run, map_index=-1),
        all_calls.ListTasks(*of_run, limit=5, after="1:4000"),
        all_calls.ListTasks(*of_run, limit=5, task_id="b"),
        all_calls.ListTasks(*of_run, limit=5, task_id="b", after="1:4000"),
        all_calls.TaskHistory(*of_run, "b", 4_000),
        all_calls.ReadLog(*of_run, "b", 4_000),
        all_calls.GetXCom(run.id, ("a", "b"), map_index=4_000),
        all_calls.ListXComs(*of_run, "b", map_index=4_000),
        all_calls.MarkTasks(*of_run, ("b",), "success", "tester", 4_000),
        all_calls.ClearTasks(*of_run, ("b",), "tester", map_index=4_000),
        all_calls.MarkTasks(*of_run, ("a",), "success", "tester"),
        all_calls.MarkTasks(*of_run, ("b",), "success", "tester"),
        all_calls.MarkTasks(*of_run, ("c",), "success", "tester"),
    ):
        await database.call(request)  # type: ignore[arg-type]
    await player.schedule()


async def map_task(database: Database) -> tuple[all_calls.RunRecord, Player]:
    player = await Player(database).begin()
    structure = dag(task("a"), task("b", "a", wait_for_downstream=True), task("c", "b"))
    first = await player.create(structure, run_id="run1", logical_us=DAY_US)
    second = await player.create(structure, run_id="run2", logical_us=2 * DAY_US)
    await copy_elements(database, first.id, "b", ELEMENTS)
    await copy_elements(database, second.id, "b", ELEMENTS)
    return first, player


async def test_an_instance_is_found_in_sqlite_without_reading_the_elements_beside_it(
    file: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, player = await map_task(file)
    with watch_costs(monkeypatch) as costs:
        await use_instances(file, run, player)
    dear = {said: steps for said, steps in costs.steps.items() if steps > MOST_STEPS}
    assert not dear, describe(costs)


async def test_an_instance_is_found_in_postgresql_without_reading_the_elements_beside_it(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await open_store(await postgres.new_database())
    try:
        run, player = await map_task(database)
        with watch_rows(monkeypatch, task_instance) as rows:
            await use_instances(database, run, player)
    finally:
        await database.close()
    dear = {said: count for said, count in rows.items() if count > MOST_ROWS}
    assert not dear
    assert any(rows.values())
