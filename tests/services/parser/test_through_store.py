"""From a DAG file to a run in the store: read, scheduled, claimed, run, reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs
from tests.services.parser.test_manager import DAG, running, write
from tests.store.dags import Player
from tests.until import until

from tidemill.core.errors import InvariantError
from tidemill.core.tasks.endings import Failure, Skip, Success
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.execution.running import run_attempt
from tidemill.dags.loading import load_file
from tidemill.services.parser.manager import ParserManager
from tidemill.services.worker.task.services import StoreServices
from tidemill.store.calls.dag_calls import ListDags
from tidemill.store.calls.instance_calls import ListTasks
from tidemill.store.calls.run_calls import CreateRun
from tidemill.store.calls.service_calls import BeginSession, ClaimFiles, ListFiles, RemoveFile, SchedulerTurn, StoreFile
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt, WorkerTurn
from tidemill.store.engines.opening import open_store

TEXT = """
from tidemill.dags import DAG, EmptyOperator, Param, TaskGroup, task, setup, teardown

with DAG("all", params={"n": Param(2, type="integer")}, tags=["x"]):
    @task
    def count(n):
        return {"rows": list(range(n))}

    @task.branch
    def choose(found):
        return "big" if len(found["rows"]) > 2 else "small"

    @setup
    def create(): return "c"

    @teardown
    def remove(name): pass

    found = count(3)
    chosen = choose(found)
    big, small = EmptyOperator(task_id="big"), EmptyOperator(task_id="small")
    chosen >> [big, small]
    end = EmptyOperator(task_id="end", trigger_rule="none_failed_min_one_success")
    [big, small] >> end
    with TaskGroup("scope"):
        made = create()
        with remove(made).as_teardown(setups=made):
            @task
            def fail(): raise ValueError("no")
            fail()
"""


class Asker:
    """Calls the store from the thread of an attempt."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.loop = asyncio.get_running_loop()

    def ask(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(self.store.call(call), self.loop).result(60)


def report(claim: ClaimedAttempt, result: AttemptResult) -> AttemptReport:
    match result.ending:
        case Success():
            ending: Any = Success()
        case Failure(error, may_retry):
            ending = Failure(error, may_retry)
        case Skip():
            ending = Skip()
        case other:
            raise InvariantError(f"no task of this DAG defers: {other}")
    return AttemptReport(claim.task, claim.epoch, ending, result.xcoms, result.skip, result.skip_all_downstream)


async def test_a_dag_file_runs_through_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "dags"
    write(folder, "all.py", TEXT)
    store: Any = await open_store(f"sqlite:///{tmp_path}/dags.db")
    try:
        async with running(folder, store):
            (file,) = await store.call(ListFiles())
        assert (file.path, file.dags, file.error) == ("all.py", ("all",), None)
        dag = load_file(folder / "all.py", folder).dags["all"]
        player = await Player(store).begin()
        run = await store.call(CreateRun("all", by="test"))
        reports: tuple[AttemptReport, ...] = ()
        for request in range(1, 50):
            while (await store.call(SchedulerTurn(player.scheduler))).more:
                continue
            answer = await store.call(WorkerTurn(player.worker, request, reports=reports, capacity=4))
            reports = tuple(
                [
                    report(claim, await asyncio.to_thread(run_attempt, dag, claim, StoreServices(claim, Asker(store))))
                    for claim in answer.claimed
                ]
            )
            if not reports and not answer.outcomes:
                break
        tasks = (await store.call(ListTasks(run.dag_id, run.run_id))).rows
        assert {task.task_id: str(task.state) for task in tasks} == {
            "count": "success",
            "choose": "success",
            "big": "success",
            "small": "skipped",
            "end": "success",
            "scope.create": "success",
            "scope.fail": "failed",
            "scope.remove": "success",
        }
    finally:
        await store.close()


UNSTEADY = """
import time, uuid
from tidemill.dags import DAG, EmptyOperator
with DAG("unsteady", tags=[uuid.uuid4().hex]):
    EmptyOperator(task_id=f"t{time.time_ns()}")
with DAG("steady"):
    EmptyOperator(task_id="t")
"""


async def test_a_dag_that_differs_though_no_file_has_changed_gets_no_version_and_is_named_once(tmp_path: Path) -> None:
    folder = tmp_path / "dags"
    write(folder, "d.py", UNSTEADY)
    store: Any = await open_store(f"sqlite:///{tmp_path}/dags.db")

    async def list_versions() -> dict[str, int]:
        return {dag.dag_id: dag.version for dag in (await store.call(ListDags())).rows}

    try:
        with capture_logs() as logs:
            async with running(folder, store, reparse_seconds=0.1):
                times: set[int] = set()

                def note_time(files: Any) -> bool:
                    times.add(files[0].parsed_us)
                    return len(times) >= 4

                await until_answer(lambda: store.call(ListFiles()), note_time)
                assert await list_versions() == {"steady": 1, "unsteady": 1}
                # A person who saves the file means what it says now.
                (folder / "d.py").touch()
                await until_answer(list_versions, lambda found: found["unsteady"] == 2)
        warnings = [entry for entry in logs if entry["log_level"] == "warning"]
        assert {entry["dag"] for entry in warnings} == {"unsteady"}
        assert all(entry["differs"].startswith("tags, new task 't1") for entry in warnings)
        assert len(warnings) <= 2  # once before the file was saved, and once after
    finally:
        await store.close()


async def until_answer(ask: Callable[[], Awaitable[Any]], condition: Callable[[Any], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition(await ask()):
            await asyncio.sleep(0.02)


async def test_a_second_file_with_the_id_of_a_dag_is_an_error_until_the_first_one_gives_it_up(tmp_path: Path) -> None:
    folder = tmp_path / "dags"
    write(folder, "one.py", DAG.format(name="twin", task="a"))
    database = await open_store(f"sqlite:///{tmp_path}/dags.db")

    async def find_owner() -> list[tuple[str, bool]]:
        return [(dag.file, dag.active) for dag in (await database.call(ListDags())).rows if dag.dag_id == "twin"]

    async def list_errors() -> list[str | None]:
        return [file.error for file in await database.call(ListFiles(broken=True))]

    async with running(folder, database) as manager:
        write(folder, "two.py", DAG.format(name="twin", task="b"))
        error = "one.py already defines a DAG 'twin'; give one of them another id"
        await wait_for_answer(list_errors, [error])
        await until(lambda: manager.broken == 1, what="the manager has the store's answer")

        write(folder, "one.py", DAG.format(name="single", task="a"))
        await wait_for_answer(find_owner, [("two.py", True)])
        await wait_for_answer(list_errors, [])

        write(folder, "three.py", DAG.format(name="twin", task="c"))
        await wait_for_answer(list_errors, [error.replace("one.py", "two.py")])
        (folder / "two.py").unlink()
        await wait_for_answer(find_owner, [("three.py", True)])
        assert await list_errors() == []
    await database.close()


async def wait_for_answer(ask: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    async with asyncio.timeout(60):
        while (answer := await ask()) != wanted:
            await asyncio.sleep(0.05)
    assert answer == wanted


class Recorded:
    """A store that records its calls."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: list[Any] = []

    async def call(self, request: Any) -> Any:
        self.calls.append(request)
        return await self.store.call(request)


async def test_a_parser_asks_nothing_about_files_that_only_other_hosts_have(tmp_path: Path) -> None:
    (tmp_path / "dags").mkdir()
    database = await open_store(f"sqlite:///{tmp_path}/dags.db")
    first, second = [await database.call(BeginSession("parser", name, "here", "boot", 1)) for name in "ab"]
    paths = tuple(f"{number}.py" for number in range(3))
    await database.call(ClaimFiles(first, paths))
    for path in paths:
        await database.call(StoreFile(path, "digest", session=first))
    store = Recorded(database)
    forker: Any = None  # there is nothing to read
    manager = ParserManager(store, forker, tmp_path / "dags", session=second)

    parsing = asyncio.create_task(manager.run())
    async with asyncio.timeout(30):
        await manager.ready.wait()
    parsing.cancel()
    await asyncio.wait([parsing])

    assert not [call for call in store.calls if isinstance(call, RemoveFile)]
    assert len(await database.call(ListFiles())) == 3
    await database.close()
