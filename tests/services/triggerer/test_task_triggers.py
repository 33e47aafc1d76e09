"""Tasks that defer, in a real store, and the triggerer that runs their triggers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.deferring import Deferring
from tests.services.triggerer.hosted import DID
from tests.size import sized
from tests.store.conftest import sqlite_url as url
from tests.store.dags import Player, dag, task
from tests.until import until

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.sections.triggerer_settings import TriggererSettings
from tidemill.core.tasks.endings import Deferral
from tidemill.runtime.json.codec import decode, encode_sorted
from tidemill.runtime.log.task_lines import decode_lines
from tidemill.services.supervision.child import stop_service
from tidemill.services.triggerer.tasks.folder_code import FolderCode
from tidemill.services.triggerer.tasks.host import TaskHost
from tidemill.store.calls.instance_calls import ClearTasks
from tidemill.store.calls.log_calls import ReadLog
from tidemill.store.calls.run_calls import CancelRun, RunRecord
from tidemill.store.calls.service_calls import BeginSession, ListSessions, LoseSession
from tidemill.store.calls.stream_calls import EndStream, StreamWant, TakeEvents
from tidemill.store.calls.trigger_calls import ListOwnedTriggers, StoreEvents
from tidemill.store.calls.worker_calls import ClaimedAttempt
from tidemill.store.database import Database, StoreClient
from tidemill.store.engines.opening import open_store
from tidemill.store.wire.call_server import CallServer

__all__ = ["url"]


@contextlib.asynccontextmanager
async def triggerer(store: StoreClient, folder: Path, grace_seconds: float = 60.0) -> AsyncIterator[TaskHost]:
    host = TaskHost(
        store,
        TriggererSettings(),
        BeginSession("triggerer", "t", "here", "boot", 1, (), 10_000),
        FolderCode(folder),
        65_536,
        KnownSecrets(),
        grace_seconds=grace_seconds,
    )
    stop = asyncio.Event()
    running = asyncio.create_task(host.run(stop))
    yield host
    stop.set()
    await asyncio.wait_for(running, 60)


def hosted_path(cls: type) -> str:
    return f"tests.services.triggerer.hosted.{cls.__name__}"


async def test_tasks_go_on_with_the_events_of_their_triggers(database: Database, tmp_path: Path):
    DID.clear()
    deferring = Deferring(database)
    await deferring.defer(3, hosted_path(hosted.Counting), count=2, then="wait")

    async with triggerer(database, tmp_path):
        await deferring.wait_resumed(3)

    assert [decode(one.resume.payload) for one in deferring.resumed.values()] == [{"n": 0}] * 3
    assert {one.resume.method for one in deferring.resumed.values()} == {"resume"}
    assert {one.try_number for one in deferring.resumed.values()} == {1}


@pytest.mark.parametrize(
    ("cls", "error"),
    [
        (hosted.Undescribable, "the payload of an event cannot be written as JSON"),
        (hosted.Large, "the payload of its event is 1,100,002 bytes long; at most 1,048,576 are stored"),
        (hosted.Raising, "the trigger raised OSError: the upstream is gone"),
        (hosted.RaisingAnyText, "the trigger raised OSError: no file \\udce9"),
        (hosted.RaisingMute, "its text cannot be read"),
        (hosted.RaisingNothing, "TidemillError"),
        (hosted.Leaving, "the trigger raised SystemExit: 3"),
        (hosted.Cancelling, "the trigger raised CancelledError"),
        (hosted.Silent, "the trigger ended without having fired an event; yield one before it returns"),
        (hosted.Interrupting, "the trigger raised KeyboardInterrupt"),
        (hosted.Refusing, "tests.services.triggerer.hosted.Refusing rejected its kwargs"),
    ],
)
async def test_a_trigger_that_cannot_fire_fails_its_task_with_the_error_and_its_log_says_so(
    database: Database, tmp_path: Path, cls: type, error: str
):
    deferring = Deferring(database)
    await deferring.defer(1, hosted_path(cls))

    async with triggerer(database, tmp_path):
        async with asyncio.timeout(60):
            while not (failed := await deferring.failed()):
                await asyncio.sleep(0.02)

    last = (failed[0].error or "").splitlines()[-1]
    assert last.startswith(f"TaskDeferralError: {error}")
    parts = (await database.call(ReadLog("dag", deferring.run.run_id, "t0"))).rows
    lines = [line for part in parts for line in decode_lines(zlib.decompress(part.data))]
    assert {(line.level, line.source) for line in lines} == {("error", "trigger")}
    assert any(error in line.text for line in lines)


class Meddling:
    """A store before whose calls something else happens. `before`: called with each request."""

    def __init__(self, database: Database, before: Callable[[Any], Awaitable[None]]) -> None:
        self._database, self._before = database, before
        self.label, self.doorbell, self.close = database.label, database.doorbell, database.close

    async def call(self, request: Any) -> Any:
        await self._before(request)
        return await self._database.call(request)


async def defer_stream(database: Database, **kwargs: Any) -> tuple[Player, RunRecord]:
    player = await Player(database).begin()
    run = await player.create(dag(task("a")))
    deferral = Deferral(hosted_path(hosted.Counting), encode_sorted(kwargs), "", streams=True)
    await player.report(await player.claim_one(), deferral)
    return player, run


async def claim_soon(player: Player) -> ClaimedAttempt:
    async with asyncio.timeout(30):
        while not (claimed := await player.claim()):
            await asyncio.sleep(0.02)
    return claimed[0]


async def test_the_events_before_an_error_are_stored_before_the_end_of_their_stream(database: Database, tmp_path: Path):
    player, _ = await defer_stream(database, count=3, then="raise")

    async def delay(request: Any) -> None:
        await asyncio.sleep(0.2 if isinstance(request, StoreEvents) else 0)

    store: Any = Meddling(database, delay)
    async with triggerer(store, tmp_path), asyncio.timeout(60):
        attempt = await claim_soon(player)
        assert attempt.stream is not None
        while True:
            (batch,) = await database.call(TakeEvents((StreamWant(attempt.stream.trigger, 0),)))
            if batch.ended:
                break
            await asyncio.sleep(0.02)
    assert [decode(one.payload) for one in batch.events] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert batch.error is not None
    assert "as it was told" in batch.error


async def test_a_task_that_is_cleared_just_as_its_stream_ends_runs_again_at_once(database: Database, tmp_path: Path):
    player, run = await defer_stream(database, count=1)

    cleared = asyncio.Event()

    async def clear(request: Any) -> None:
        if isinstance(request, EndStream):
            await database.call(ClearTasks(run.dag_id, run.run_id, ("a",), "tester"))
            cleared.set()

    store: Any = Meddling(database, clear)
    async with triggerer(store, tmp_path):
        await asyncio.wait_for(cleared.wait(), 30)
        attempt = await claim_soon(player)
    assert (attempt.try_number, attempt.stream) == (2, None)


async def test_the_trigger_of_a_run_that_a_user_cancels_ends_the_work_outside(database: Database, tmp_path: Path):
    DID.clear()
    deferring = Deferring(database)
    await deferring.defer(1, hosted_path(hosted.Counting), count=0, then="wait")
    async with triggerer(database, tmp_path):
        await until(lambda: any("yielded" in told for told in DID.values()))

        await database.call(CancelRun("dag", deferring.run.run_id, by="tester"))

        await until(lambda: ["run", "yielded", "on_kill", "cleanup"] in DID.values())
        await wait_for_state(deferring, "failed")


async def wait_for_state(deferring: Deferring, state: str) -> None:
    async with asyncio.timeout(60):
        while (await deferring.player.run(deferring.run)).state != state:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("grace_seconds", [0.05, 60.0])
async def test_a_cleared_deferral_runs_again_once_its_trigger_has_cleaned_up_or_has_had_its_time(
    database: Database, tmp_path: Path, grace_seconds: float
):
    DID.clear()
    hosted.RELEASED.clear()
    deferring = Deferring(database)
    await deferring.defer(1, hosted_path(hosted.SlowEnd), count=0, then="wait")
    async with triggerer(database, tmp_path, grace_seconds):
        await until(lambda: any("yielded" in told for told in DID.values()))
        await database.call(ClearTasks("dag", deferring.run.run_id, ("t0",), "tester"))
        await until(lambda: ["run", "yielded", "on_kill"] in DID.values())
        if grace_seconds > 1:
            await deferring.player.schedule()
            assert await deferring.player.states(deferring.run) == {"t0": "ending"}
            hosted.RELEASED.set()
        async with asyncio.timeout(60):
            while (await deferring.player.states(deferring.run)) == {"t0": "ending"}:
                await asyncio.sleep(0.02)
        assert (["run", "yielded", "on_kill", "cleanup"] in DID.values()) is (grace_seconds > 1)
        assert (await deferring.player.claim_one()).try_number == 2
        hosted.RELEASED.set()


async def test_a_trigger_that_raises_an_interruption_when_it_is_killed_ends_no_other(
    database: Database, tmp_path: Path
):
    DID.clear()
    killed, next_one = Deferring(database), Deferring(database)
    await killed.defer(1, hosted_path(hosted.InterruptingEnd), count=0, then="wait")
    async with triggerer(database, tmp_path):
        await until(lambda: any("yielded" in told for told in DID.values()))

        await database.call(CancelRun("dag", killed.run.run_id, by="tester"))

        await until(lambda: ["run", "yielded", "on_kill", "cleanup"] in DID.values())
        await next_one.defer(1, hosted_path(hosted.Counting))
        await next_one.wait_resumed(1)


async def test_the_trigger_of_a_task_that_is_too_late_is_stopped_and_its_work_goes_on(
    database: Database, tmp_path: Path
):
    DID.clear()
    deferring = Deferring(database)
    await deferring.defer(1, hosted_path(hosted.Counting), timeout_us=300_000, count=0, then="wait")
    async with triggerer(database, tmp_path):
        await until(lambda: any("yielded" in told for told in DID.values()))
        async with asyncio.timeout(60):
            while not (failed := await deferring.failed()):
                await deferring.player.schedule()
                await asyncio.sleep(0.05)

        await until(lambda: ["run", "yielded", "cleanup"] in DID.values())

    assert "TaskDeferralTimeout" in (failed[0].error or "")


async def test_many_short_deferrals_are_all_resumed_and_none_fails(database: Database, tmp_path: Path):
    deferring = Deferring(database)
    async with triggerer(database, tmp_path):
        await deferring.defer(200, delta=0.1)
        await deferring.wait_resumed(200)


@pytest.mark.long
async def test_thousands_of_deferrals_of_a_tenth_of_a_second_are_all_resumed_and_none_fails(tmp_path: Path):
    count = sized(2_500, 10_000)
    database = await open_store(f"sqlite:///{tmp_path}/dags.db")
    deferring = Deferring(database)
    async with triggerer(database, tmp_path):
        await deferring.defer(count, delta=0.1)
        await deferring.wait_resumed(count, 300)
    await database.close()


@pytest.mark.long
async def test_two_thousand_triggers_that_fire_at_once_resume_all_their_tasks(tmp_path: Path):
    database = await open_store(f"sqlite:///{tmp_path}/dags.db")
    deferring = Deferring(database)
    async with triggerer(database, tmp_path):
        moment = datetime.now(UTC) + timedelta(seconds=5)
        await deferring.defer(2_000, "tidemill.triggers.builtin.temporal.DateTimeTrigger", moment=moment)
        await deferring.wait_resumed(2_000, 120)
    await database.close()


# -- the process -------------------------------------------------------------------------------------------


class Process:
    """A triggerer in a process of its own, over the socket of this one."""

    def __init__(self, address: Path, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.process: asyncio.subprocess.Process

    async def start(self) -> Process:
        module = "tidemill.services.triggerer.tasks.process"
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(self.address),
            "--folder",
            str(self.folder),
            stdin=asyncio.subprocess.PIPE,
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        return self

    async def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 60)

    async def stop(self) -> int:
        """Stop it as its parent does."""
        stop_service(self.process)
        return await asyncio.wait_for(self.process.wait(), 60)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Database, CallServer]]:
    database = await open_store(f"sqlite:///{tmp_path}/dags.db")
    server = CallServer(database, tmp_path / "s")
    await server.start()
    yield database, server
    await server.close()
    await database.close()


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[list[Process]]:
    made: list[Process] = []
    yield made
    for one in made:
        await one.end(signal.SIGKILL)


async def find_triggerers(database: Database) -> list[int]:
    return [one.id for one in await database.call(ListSessions("triggerer"))]


async def wait_triggerers(database: Database, count: int) -> list[int]:
    async with asyncio.timeout(60):
        while len(found := await find_triggerers(database)) != count:
            await asyncio.sleep(0.02)
    return found


async def test_a_process_of_its_own_runs_triggers_and_gives_them_up_when_it_is_told_to_stop(
    served, processes, tmp_path
):
    database, server = served
    deferring = Deferring(database)
    process = await Process(server.path, tmp_path).start()
    processes.append(process)
    await deferring.defer(20, delta=0.1)
    await deferring.wait_resumed(20)
    waiting = Deferring(database)
    await waiting.defer(1, delta=3600)
    await wait_triggerers(database, 1)

    assert await process.stop() == 0

    assert await find_triggerers(database) == []
    assert not await waiting.failed()


async def test_a_stop_that_the_parent_did_not_ask_for_leaves_what_ran_to_it(served, processes, tmp_path):
    database, server = served
    processes.append(process := await Process(server.path, tmp_path).start())
    waiting = Deferring(database)
    await waiting.defer(1, delta=3600)
    (service,) = await wait_triggerers(database, 1)
    async with asyncio.timeout(60):
        while not await database.call(ListOwnedTriggers(service)):
            await asyncio.sleep(0.02)

    await process.end()

    assert await find_triggerers(database) == [service]
    (owned,) = await database.call(ListOwnedTriggers(service))
    assert owned.running
    assert not await waiting.failed()


async def test_the_triggers_of_a_killed_process_are_run_by_the_next_one_and_no_task_fails(served, processes, tmp_path):
    database, server = served
    deferring = Deferring(database)
    processes.append(first := await Process(server.path, tmp_path).start())
    await wait_triggerers(database, 1)
    await deferring.defer(200, delta=2.0)
    await deferring.wait_resumed(1)

    await first.end(signal.SIGKILL)
    (dead,) = await find_triggerers(database)
    await database.call(LoseSession(dead))  # what a parent does
    processes.append(await Process(server.path, tmp_path).start())

    await deferring.wait_resumed(200)


async def test_a_process_whose_store_was_started_again_goes_on_with_it(served, processes, tmp_path):
    database, server = served
    deferring = Deferring(database)
    processes.append(await Process(server.path, tmp_path).start())
    await deferring.defer(50, delta=1.5)
    (before,) = await wait_triggerers(database, 1)

    await server.close()
    await database.call(LoseSession(before))  # what who opens a store does
    await server.start()

    await deferring.wait_resumed(50)
    assert await find_triggerers(database) != [before]


async def test_a_process_ends_with_its_parent(served, processes, tmp_path):
    database, server = served
    processes.append(process := await Process(server.path, tmp_path).start())
    await wait_triggerers(database, 1)

    assert process.process.stdin is not None
    process.process.stdin.close()

    assert await asyncio.wait_for(process.process.wait(), 60) == 0
    assert await find_triggerers(database) == []
