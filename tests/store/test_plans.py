"""No statement of the store costs more because many tasks have ended, on both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.store.dags import Player, dag, encode, task
from tests.store.history import Costs, copy_history, watch_costs
from tests.store.server import PostgresServer

from tidemill.core.tasks.structure import DagStructure, ScheduleStructure
from tidemill.store import calls
from tidemill.store.answers import FUNCTIONS
from tidemill.store.call import Call
from tidemill.store.database import Database
from tidemill.store.opening import open_store

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
                result: object = calls.Success()
                if one.task_id == "c" and one.resume is None:
                    result = calls.Deferral("package.Trigger", "{}", "resume", stream_key="key")
                elif one.task_id == "d" and one.try_number == 1:
                    result = calls.Failure("it failed")
                if one.callback is None:
                    xcoms = (("return_value", "1"),) if isinstance(result, calls.Success) else ()
                    reports.append(calls.Report(one.task, one.epoch, result, xcoms=xcoms))  # type: ignore[arg-type]
            done = tuple(calls.CallbackReport(one.callback.id) for one in attempts if one.callback is not None)
            await player.turn(*reports, callbacks=done, held=tuple((one.task, one.epoch) for one in attempts))
            claimed = await self.call(calls.ClaimTriggers(triggerer, turn, 10))
            for trigger in claimed:  # type: ignore[attr-defined]
                held = calls.HeldTriggers(triggerer, ((trigger.id, trigger.token),))
                await self.call(held)
                await self.call(
                    calls.StoreEvents(triggerer, turn, (calls.FiredEvent(trigger.id, trigger.token, "1", "i", 0),))
                )
            if (await player.run(run)).state == "success" and not attempts:
                break
        else:
            raise AssertionError(f"the run does not end: {await player.states(run)}")
        for service in (player.scheduler, player.worker):
            await self.call(calls.BeatService(service))
            await self.call(calls.EndService(service))
        await self.call(calls.LoseService(triggerer))

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
        part = calls.LogPart(one.task, 1, 0, 0, b"", 1)
        for request in (
            calls.PushXCom(one.task, one.epoch, "key", "1"),
            calls.SetTaskState(one.task, one.epoch, "key", "1"),
            calls.GetTaskState(one.task, one.epoch, "key"),
            calls.DeleteTaskState(one.task, one.epoch, "key"),
            calls.ClearTaskState(one.task, one.epoch),
            calls.SetTaskState(one.task, one.epoch, "other", "1"),
            calls.AppendLog((part,)),
            calls.GetEarlierRun(run.id),
            calls.GetEarlierRun(run.id, "success"),
            calls.GetXCom(run.id, ("a",)),
            calls.GetXCom(run.id, ("a",), include_prior=True),
            calls.GetXCom(run.id, ("a",), dag_id="dag"),
            calls.GetXCom(run.id, ("a",), dag_id="dag", run_id="run1"),
        ):
            await self.call(request)
        await self.player.turn(calls.Report(one.task, one.epoch, calls.Loss()))
        await self.player.claim()
        await self.call(calls.ClearTasks("dag", run.run_id, ("a",), "tester", downstream=True))
        await self.player.turn()
        await self.player.claim()
        await self.call(calls.MarkTasks("dag", run.run_id, ("a",), "success", "tester"))
        await self.player.turn()
        await self.call(calls.CancelRun("dag", run.run_id, "tester"))
        await self.player.schedule()

    async def _people(self) -> None:
        for request in (
            calls.ListDags(),
            calls.GetDag("dag"),
            calls.GetRun("dag"),
            calls.GetRun("dag", "run1"),
            calls.ListRuns(),
            calls.ListRuns("dag"),
            calls.ListRuns("dag", ("running",)),
            calls.WatchRuns(),
            calls.ListTasks("dag", "run1"),
            calls.TaskHistory("dag", "run1", "a"),
            calls.ReadLog("dag", "run1", "a"),
            calls.ListXComs("dag", "run1"),
            calls.DescribeTriggers((1, 2)),
            calls.CountStore(),
            calls.ListFiles(),
            calls.ListServices(),
            calls.ListServices("worker"),
            calls.PauseDag("dag", True, "tester"),
            calls.PauseDag("dag", False, "tester"),
            calls.StoreFile("other.py", "digest", structures=(encode(dag(id="other")),)),
            calls.RemoveFile("other.py"),
        ):
            await self.call(request)
        listed = await self.call(calls.ListCallbacks("dag", "run1"))
        (own,) = [one.id for one in listed.rows if one.task_id is None]  # type: ignore[attr-defined]
        await self.call(calls.ReadCallbackLog("dag", "run1", own))

    async def _settings(self) -> None:
        for request in (
            calls.SetVariable("key", "1"),
            calls.GetVariable("key"),
            calls.ListVariables(),
            calls.DeleteVariable("key"),
            calls.SetConnection("key", "http"),
            calls.GetConnection("key"),
            calls.ListConnections(),
            calls.DeleteConnection("key"),
            calls.SetPool("pool", 3, include_deferred=True),
            calls.ListPools(),
            calls.DeletePool("pool"),
        ):
            await self.call(request)

    async def _triggers(self) -> None:
        await self.call(calls.SetPool("wide", 9, include_deferred=True))
        run = await self.player.create(dag(task("a", pool="wide"), task("b", pool="wide"), id="deferring"))
        deferral = calls.Deferral("package.Trigger", "{}", "resume", stream_key="key")
        attempts = await self.player.claim()
        await self.player.turn(*[calls.Report(one.task, one.epoch, deferral) for one in attempts])
        first, second = [await self.player.begin_service("triggerer") for _ in range(2)]
        one, other = await self.database.call(calls.ClaimTriggers(first, 1, 2))
        await self.call(calls.ListOwnedTriggers(first))
        await self.call(calls.ReserveTriggers(first, second, (one.id,)))
        (one,) = await self.database.call(calls.ClaimTriggers(second, 1, 2, reserved=True))
        await self.call(calls.FailTrigger(second, one.id, one.token, "no"))
        await self.call(calls.ReleaseTriggers(first, ((other.id, other.token),)))
        await self.call(calls.CancelRun("deferring", run.run_id, "tester"))
        await self._end_all()

    async def _end_all(self) -> None:
        """Run what is left of callbacks, and end all services."""
        await self.call(calls.LoseOthers())
        await self.player.begin()
        while attempts := await self.player.claim():
            await self.player.turn(callbacks=tuple(calls.CallbackReport(one.callback.id) for one in attempts))  # type: ignore[union-attr]
        await self.call(calls.LoseOthers())


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
    assert set(FUNCTIONS) - everybody.used == set(), "each call is made"
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
