"""No statement of the store costs more because many tasks have ended, on both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import update
from tests.size import sized
from tests.store.dags import Player, dag, encode, task
from tests.store.history import (
    GROWING,
    MORE,
    Costs,
    copy_elements,
    copy_history,
    plan_statements,
    pretend_large,
    watch_costs,
    watch_plans,
    watch_rows,
)
from tests.store.server import PostgresServer

from tidemill.core.tasks.endings import Deferral, Failure, Idle, Loss, Success
from tidemill.core.tasks.structure import ChunkStructure, DagStructure, MapSource, MapStructure, ScheduleStructure
from tidemill.store.calls.call import Call
from tidemill.store.calls.callback_calls import ListCallbacks, ReadCallbackLog
from tidemill.store.calls.count_calls import CountStore
from tidemill.store.calls.dag_calls import GetDag, ListDags, PauseDag
from tidemill.store.calls.dispatch import list_kinds
from tidemill.store.calls.element_calls import GroupElementFailures, ListElements
from tidemill.store.calls.instance_calls import (
    ClearTasks,
    DescribeAdmission,
    DescribeTriggers,
    ListGrid,
    ListTasks,
    MarkTasks,
    TaskHistory,
)
from tidemill.store.calls.iteration_calls import GetParts, KeepParts, KeptPart
from tidemill.store.calls.log_calls import ReadLog
from tidemill.store.calls.run_calls import CancelRun, GetRun, ListRuns, RunRecord, StageConfItems, WatchRuns
from tidemill.store.calls.service_calls import (
    BeatSession,
    CheckKey,
    ClaimFiles,
    DescribeServices,
    EndSession,
    ListFileDifferences,
    ListFiles,
    ListSessions,
    LoseOtherSessions,
    LoseSession,
    MapLimits,
    ReleaseLeft,
    RemoveFile,
    ReportFiles,
    StopSession,
    StoreFile,
)
from tidemill.store.calls.setting_calls import (
    DeleteConnection,
    DeletePool,
    ListConnections,
    ListPools,
    ListVariables,
    SetConnection,
    SetPool,
)
from tidemill.store.calls.stream_calls import EndStream, KeepBatch, ListTaskEvents, StreamWant, TakeEvents
from tidemill.store.calls.task_calls import (
    AppendLog,
    ClearTaskState,
    DeleteTaskState,
    DeleteVariable,
    EmitItems,
    GetChunkItems,
    GetConnection,
    GetEarlierRun,
    GetTaskState,
    GetValuePage,
    GetVariable,
    GetXCom,
    PushXCom,
    SetTaskState,
    SetVariable,
    StoreListPart,
)
from tidemill.store.calls.trigger_calls import (
    ClaimTriggers,
    ClearDeaths,
    CountUndelivered,
    FailTrigger,
    FindSuspects,
    FiredEvent,
    HeldTriggers,
    KillCalled,
    ListLoads,
    ListOwnedTriggers,
    PlaceTriggers,
    ReleaseTriggers,
    ReserveTriggers,
    StoreEvents,
    TakeSuspects,
)
from tidemill.store.calls.worker_calls import AttemptReport, CallbackReport, ClaimedAttempt, LogPart
from tidemill.store.calls.xcom_calls import ListXComs
from tidemill.store.dag_tables import task_instance, task_map
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
        task("m", "e", mapped=MapStructure(("x",), (MapSource("literal", length=3),), max_outstanding=2)),
        task("g", "e", is_generator=True),
        task("n", "g", mapped=MapStructure(("x",), (MapSource("generator", "g"),))),
        task("k", "g", mapped=MapStructure(("x",), (MapSource("generator", "g"),), chunk=ChunkStructure(2, DAY_US))),
        task("i", "e", mapped=MapStructure(("x",), (MapSource("literal", length=3),), iterated=True)),
        task("r", "i", mapped=MapStructure(("x",), (MapSource("results", "i", "return_value"),))),
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
        player.map_limits = MapLimits(max_backlog=2)
        self.number += 1
        await player.begin()
        run = await player.create(build_dag(), run_id=f"run{self.number}", logical_us=self.number * DAY_US)
        triggerer = await player.begin_service("triggerer")
        for turn in range(20):
            attempts = await player.claim()
            reports = []
            for one in attempts:
                result: object = Success()
                if one.task_id == "c" and one.resume is None:
                    result = Deferral("package.Trigger", "{}", "resume", stream_key="key")
                elif one.task_id == "g":
                    await self._wait_at_yield(one)
                elif one.task_id == "k":
                    await self.call(GetChunkItems(one.task))
                elif one.task_id == "i" and one.callback is None:
                    page = await self.call(GetParts(one.task))
                    kept = tuple(KeptPart(part.number, "success", 1, "1") for part in page.parts)  # type: ignore[attr-defined]
                    await self.call(KeepParts(one.task, one.epoch, kept, 1))
                elif one.task_id == "d" and one.try_number == 1:
                    result = Failure("it failed")
                if one.callback is None:
                    xcoms = (("return_value", "1"),) if isinstance(result, Success) else ()
                    reports.append(AttemptReport(one.task, one.epoch, result, xcoms=xcoms))  # type: ignore[arg-type]
            done = tuple(CallbackReport(one.callback.id) for one in attempts if one.callback is not None)
            await player.turn(*reports, callbacks=done, held=tuple((one.task, one.epoch) for one in attempts))
            claimed = await self.call(ClaimTriggers(triggerer, turn, 10))
            for trigger in claimed:  # type: ignore[attr-defined]
                held = HeldTriggers(triggerer, ((trigger.id, trigger.token),))
                await self.call(held)
                await self.call(PlaceTriggers(triggerer, ((trigger.id, trigger.token, "key"),)))
                await self.call(StoreEvents(triggerer, turn, (FiredEvent(trigger.id, trigger.token, "1", "i", 0),)))
            if (await player.run(run)).state == "success" and not attempts:
                break
        else:
            raise AssertionError(f"the run does not end: {await player.states(run)}")
        for service in (player.scheduler, player.worker):
            await self.call(BeatSession(service))
            await self.call(EndSession(service))
        await self.call(LoseSession(triggerer))

    async def _wait_at_yield(self, one: ClaimedAttempt) -> None:
        """Let a generator yield more than may be stored ahead, wait, and go on."""
        player, key = self.player, (one.task, one.epoch)
        await self.call(EmitItems(*key, 0, tuple(map(str, range(3)))))
        await player.turn(held=(key,), blocked=(key,))
        await player.schedule()
        answer = await player.turn(held=(key,), blocked=(key,))
        assert answer.unblocked == (key,)
        await player.turn(held=(key,))

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
        part = LogPart(one.task, 1, 0, 0, b"", 1)
        for request in (
            PushXCom(one.task, one.epoch, "key", "1"),
            SetTaskState(one.task, one.epoch, "key", "1"),
            GetTaskState(one.task, one.epoch, "key"),
            DeleteTaskState(one.task, one.epoch, "key"),
            ClearTaskState(one.task, one.epoch),
            SetTaskState(one.task, one.epoch, "other", "1"),
            AppendLog((part,)),
            GetEarlierRun(run.id),
            GetEarlierRun(run.id, "success"),
            GetXCom(run.id, ("a",)),
            GetXCom(run.id, ("a",), include_prior=True),
            GetXCom(run.id, ("a",), dag_id="dag"),
            GetXCom(run.id, ("a",), dag_id="dag", run_id="run1"),
            EmitItems(one.task, one.epoch, 0, ("1", "2")),
            StoreListPart(one.task, one.epoch, "list", 0, ("1", "2"), 2),
            StoreListPart(one.task, one.epoch, "list", 0, ("1", "3"), 1),
            GetValuePage(run.id, "a", count=True),
            GetValuePage(run.id, "", "list"),
            StageConfItems(1, "list", 0, ("1",)),
            GetValuePage(run.id, "b", count=True),
        ):
            await self.call(request)
        await self.player.turn(AttemptReport(one.task, one.epoch, Loss()))
        await self.player.claim()
        await self.call(ClearTasks("dag", run.run_id, ("a",), "tester", downstream=True))
        await self.player.turn()
        await self.player.claim()
        await self.call(MarkTasks("dag", run.run_id, ("a",), "success", "tester"))
        await self.player.turn()
        await self.call(CancelRun("dag", run.run_id, "tester"))
        await self.player.schedule()

    async def _people(self) -> None:
        for request in (
            ListDags(),
            GetDag("dag"),
            GetRun("dag"),
            GetRun("dag", "run1"),
            ListRuns(),
            ListRuns("dag"),
            ListRuns("dag", ("running",)),
            WatchRuns(),
            ListTasks("dag", "run1"),
            ListGrid((1, 2)),
            ListTasks("dag", "run1", map_index=None),
            ListElements("dag", "run1", "a"),
            ListElements("dag", "run1", "a", ("failed",), 3, 5, "3"),
            GroupElementFailures("dag", "run1", "a"),
            TaskHistory("dag", "run1", "a"),
            ReadLog("dag", "run1", "a"),
            ListXComs("dag", "run1"),
            DescribeTriggers((1, 2)),
            DescribeAdmission((1, 2)),
            CountStore(),
            ListFiles(),
            ListSessions(),
            ListSessions("worker"),
            PauseDag("dag", True, "tester"),
            PauseDag("dag", False, "tester"),
            StoreFile("other.py", "digest", structures=(encode(dag(id="other")),)),
            RemoveFile("other.py"),
        ):
            await self.call(request)
        listed = await self.call(ListCallbacks("dag", "run1"))
        (own,) = [one.id for one in listed.rows if one.task_id is None]  # type: ignore[attr-defined]
        await self.call(ReadCallbackLog("dag", "run1", own))

    async def _settings(self) -> None:
        for request in (
            SetVariable("key", "1"),
            GetVariable("key"),
            ListVariables(),
            DeleteVariable("key"),
            SetConnection("key", "http"),
            GetConnection("key"),
            ListConnections(),
            DeleteConnection("key"),
            SetPool("pool", 3, include_deferred=True),
            ListPools(),
            DeletePool("pool"),
        ):
            await self.call(request)

    async def _triggers(self) -> None:
        await self.call(SetPool("wide", 9, include_deferred=True))
        run = await self.player.create(dag(task("a", pool="wide"), task("b", pool="wide"), id="deferring"))
        deferral = Deferral("package.Trigger", "{}", "resume", stream_key="key")
        attempts = await self.player.claim()
        await self.player.turn(*[AttemptReport(one.task, one.epoch, deferral) for one in attempts])
        first, second = [await self.player.begin_service("triggerer") for _ in range(2)]
        one, other = await self.database.call(ClaimTriggers(first, 1, 2))
        await self.call(ListOwnedTriggers(first))
        await self.call(ReserveTriggers(first, second, (one.id,)))
        (one,) = await self.database.call(ClaimTriggers(second, 1, 2, reserved=True))
        await self.call(FailTrigger(second, one.id, one.token, "no"))
        await self.call(ReleaseTriggers(first, ((other.id, other.token),)))
        await self._suspects(first, run.run_id)
        await self.call(CancelRun("deferring", run.run_id, "tester"))
        await self._stream(first)
        await self._end_all()

    async def _suspects(self, other: int, run_id: str) -> None:
        """Lose two sessions with a trigger, try it, and have its `on_kill` called by another session."""
        for _ in range(2):
            lost = await self.player.begin_service("triggerer")
            await self.call(ClaimTriggers(lost, 1, 2))
            await self.call(LoseSession(lost))
        trial = await self.player.begin_service("triggerer")
        await self.call(FindSuspects(("default",)))
        taken = await self.call(TakeSuspects(trial, ("default",)))
        await self.call(ClearDeaths(taken.triggers, 1))  # type: ignore[attr-defined]
        await self.call(ListLoads(trial, ("default",)))
        await self.call(StopSession(trial))
        await self.call(EndSession(trial))
        await self.call(CancelRun("deferring", run_id, "tester"))
        for kill in await self.call(ClaimTriggers(other, 77, 2, kills=True)):  # type: ignore[attr-defined]
            await self.call(KillCalled(other, kill.kill or 0))

    async def _stream(self, triggerer: int) -> None:
        """Play a task that handles a stream, waits for its end, and is resumed by it."""
        await self.player.create(dag(task("s", retries=1, retry_delay_us=0), id="streaming"))
        (attempt,) = [one for one in await self.player.claim() if one.task_id == "s"]
        deferral = Deferral("package.Trigger", "{}", "", streams=True)
        await self.player.turn(AttemptReport(attempt.task, attempt.epoch, deferral))
        (trigger,) = await self.database.call(ClaimTriggers(triggerer, 2, 2))
        await self.call(StoreEvents(triggerer, 1, (FiredEvent(trigger.id, trigger.token, "1", None, 0),)))
        (attempt,) = [one for one in await self.player.claim() if one.task_id == "s"]
        await self.call(TakeEvents((StreamWant(trigger.id, 0),)))
        await self.call(CountUndelivered((trigger.id,)))
        await self.call(KeepBatch(attempt.task, attempt.epoch, trigger.id, 1, 1, (("1", None), ("2", "key"))))
        await self.player.turn(AttemptReport(attempt.task, attempt.epoch, Idle()))
        await self.call(EndStream(triggerer, trigger.id, trigger.token))
        await self.call(ListTaskEvents(attempt.dag_id, attempt.run_id, "s"))
        (attempt,) = [one for one in await self.player.claim() if one.task_id == "s"]
        await self.call(KeepBatch(attempt.task, attempt.epoch, trigger.id, 1, 2, stops=True, lists=True))
        await self.player.turn(AttemptReport(attempt.task, attempt.epoch, Failure("it broke")))
        (attempt,) = [one for one in await self.player.claim() if one.task_id == "s"]
        await self.player.turn(AttemptReport(attempt.task, attempt.epoch, Success()))

    async def _end_all(self) -> None:
        """Run what is left of callbacks, and end all services."""
        await self.call(LoseOtherSessions())
        parser = await self.player.begin_service("parser")
        await self.call(ClaimFiles(parser, ("claimed.py",)))
        await self.call(ListFiles(removable_by=parser))
        await self.call(ListFiles(not_of=parser))
        await self.call(ReportFiles(parser, ("other.py",)))
        await self.call(ListFileDifferences())
        await self.call(ReleaseLeft())
        await self.call(DescribeServices())
        await self.call(CheckKey())
        await self.player.begin()
        while attempts := await self.player.claim():
            await self.player.turn(callbacks=tuple(CallbackReport(one.callback.id) for one in attempts))  # type: ignore[union-attr]
        await self.call(LoseOtherSessions())


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


@pytest.mark.nightly
async def test_no_call_reads_a_history_of_200000_tasks_in_sqlite(
    file: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check(file, 12_000, monkeypatch)


@pytest.mark.long
async def test_no_call_reads_the_history_of_a_postgresql_store(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await open_store(await postgres.new_database())
    try:
        await check(database, sized(2_000, 12_000), monkeypatch)
    finally:
        await database.close()


async def test_a_kept_plan_of_postgresql_finds_each_row_by_all_columns_of_a_key(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await open_store(await postgres.new_database())
    try:
        everybody = Everybody(database)
        await everybody.run_once()
        await everybody.do_all()
        await copy_history(database, 20, GROWING | MORE)
        indexes = await database.write(pretend_large)
        with watch_plans(monkeypatch) as plans:
            await everybody.do_all()
        plans |= await database.write(lambda connection: plan_statements(connection, plans))
    finally:
        await database.close()
    assert len(plans) > 250
    faults = [(plan.said, found) for plan in plans.values() if (found := plan.find_faults(indexes))]
    assert not faults, "\n".join(f"{' '.join(said.split())}\n    {found}" for said, found in faults)


ELEMENTS = 5_000
#: A lookup of one instance, or a page of a few, takes far fewer; one that reads all elements takes more.
MOST_ROWS = 100


async def use_instances(database: Database, run: RunRecord, player: Player) -> None:
    """Make each call that names a task instance of a run whose task `b` has many elements."""
    of_run = ("dag", run.run_id)
    for request in (
        ListTasks(*of_run, task_id="b", map_index=4_000),
        ListTasks(*of_run, map_index=-1),
        ListGrid((run.id,)),
        ListTasks(*of_run, limit=5, after="1:4000"),
        ListTasks(*of_run, limit=5, task_id="b"),
        ListTasks(*of_run, limit=5, task_id="b", after="1:4000"),
        ListTasks(*of_run),
        ListElements(*of_run, "b", limit=5, after="4000"),
        ListElements(*of_run, "b", ("success",), limit=5),
        GroupElementFailures(*of_run, "b"),
        WatchRuns(),
        CountStore(),
        TaskHistory(*of_run, "b", 4_000),
        ReadLog(*of_run, "b", 4_000),
        GetXCom(run.id, ("a", "b"), map_index=4_000),
        ListXComs(*of_run, "b", map_index=4_000),
        ListXComs(*of_run, "b", map_index=4_000, last_index=4_010),
        MarkTasks(*of_run, ("b",), "success", "tester", 4_000),
        ClearTasks(*of_run, ("b",), "tester", map_index=4_000),
        MarkTasks(*of_run, ("a",), "success", "tester"),
        MarkTasks(*of_run, ("b",), "success", "tester"),
        MarkTasks(*of_run, ("c",), "success", "tester"),
    ):
        await database.call(request)  # type: ignore[arg-type]
    await player.schedule()
    # The counts say that some elements may be in these states.
    few = dict.fromkeys(("unfinished", "retrying", "failed", "skipped"), 1)
    await database.write(lambda connection: connection.execute(update(task_map).values(few)))
    for states in (("failed", "upstream_failed"), ("running", "queued"), ("up_for_retry", "deferred"), ("skipped",)):
        await database.call(ListElements(*of_run, "b", states, limit=5))
    await database.call(ListElements(*of_run, "b", ("failed", "skipped", "running"), limit=5))


async def map_task(database: Database) -> tuple[RunRecord, Player]:
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


async def test_an_element_costs_the_same_however_many_have_ended(
    file: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = await Player(file).begin()
    long = MapStructure(("x",), (MapSource("literal", length=3_000),))
    await player.create(dag(task("m", mapped=long), id="long"))

    async def run_some(turns: int) -> None:
        for _ in range(turns):
            attempts = await player.claim()
            await player.turn(*[AttemptReport(one.task, one.epoch, Success()) for one in attempts])

    await run_some(2)
    with watch_costs(monkeypatch) as first:
        await run_some(4)
    await run_some(12)
    with watch_costs(monkeypatch) as last:
        await run_some(4)
    assert last.total <= first.total * 1.2, describe(last)
    assert not last.scans, describe(last)
