"""Who may run the services of a store: sessions of a real PostgreSQL, and of SQLite."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from tests.until import until

from tidemill.core.errors import ConfigError
from tidemill.runtime.process.boot import read_boot_id
from tidemill.runtime.process.table import is_running
from tidemill.runtime.process.warden import ENGINE_ID_VARIABLE
from tidemill.services.dev.takeover import Lease, take_over
from tidemill.store.calls.service_calls import BeatSession, BeginSession, ListSessions
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store
from tidemill.store.queries.triggers.sessions import begin_session

#: No process has this number.
NOBODY = 2**22 + 1
QUICK = Lease(0.3, 0.02)


@pytest.fixture
async def shared(postgres):
    opened = await open_store(await postgres.new_database())
    yield opened
    await opened.close()


async def begin(
    database: Database, pid: int, host: str = "here", boot: str = "boot", kind: str = "dev", parent: int | None = None
) -> int:
    return await database.call(BeginSession(kind, "w", host, boot, pid, parent=parent))


async def list_live(database: Database) -> set[int]:
    return {service.id for service in await database.call(ListSessions())}


async def test_what_a_dead_dev_of_this_machine_had_is_free_at_once(database):
    dead = await begin(database, NOBODY)
    await begin(database, NOBODY, kind="worker", parent=dead)
    own = await begin(database, os.getpid())

    await asyncio.wait_for(take_over(database, own, "here", "boot", Lease(600.0)), 30)

    assert await list_live(database) == {own}


@pytest.mark.parametrize("boot", ["boot", "another boot"])
async def test_a_container_that_was_started_again_finds_its_own_number_and_is_not_refused(shared, boot):
    await begin(shared, os.getpid(), boot=boot)
    own = await begin(shared, os.getpid())

    await asyncio.wait_for(take_over(shared, own, "here", "boot", Lease(600.0)), 30)

    assert await list_live(shared) == {own}


@pytest.mark.parametrize("host", ["here", "elsewhere"])
async def test_a_dev_that_beats_is_not_ended_and_the_second_one_says_where_it_runs(shared, host):
    first = await begin(shared, os.getppid(), host)
    worker = await begin(shared, os.getppid(), host, kind="worker")
    own = await begin(shared, os.getpid())
    taking = asyncio.create_task(take_over(shared, own, "here", "boot", Lease(600.0, 0.02)))

    async def beat() -> None:
        while True:
            await shared.call(BeatSession(first))
            await asyncio.sleep(0.01)

    beating = asyncio.create_task(beat())
    await until(taking.done)
    beating.cancel()

    with pytest.raises(ConfigError, match=f"as process {os.getppid()} on {host}; stop that process"):
        taking.result()
    assert {first, worker} <= await list_live(shared)


@pytest.mark.parametrize("host", ["here", "elsewhere"])
async def test_one_that_beats_no_more_is_ended_wherever_it_was(shared, host):
    dead = await begin(shared, os.getppid(), host)
    await begin(shared, os.getppid(), host, kind="worker", parent=dead)
    own = await begin(shared, os.getpid())

    await asyncio.wait_for(take_over(shared, own, "here", "boot", QUICK), 30)

    assert await list_live(shared) == {own}


async def test_of_two_that_begin_at_the_same_time_one_stays(shared):
    # The first one waits for nobody: it has the lower number.
    first, second = await asyncio.gather(begin(shared, os.getpid(), "a"), begin(shared, os.getppid(), "b"))
    first, second = min(first, second), max(first, second)
    await take_over(shared, first, "a", "boot", QUICK)
    taking = asyncio.create_task(take_over(shared, second, "b", "boot", Lease(600.0, 0.02)))
    while not taking.done():
        await shared.call(BeatSession(first))
        await asyncio.sleep(0.01)

    with pytest.raises(ConfigError, match="is in use by"):
        taking.result()


async def test_services_that_run_by_themselves_on_the_host_of_a_dead_dev_stay(shared):
    await begin(shared, NOBODY)
    worker = await begin(shared, NOBODY, kind="worker")
    own = await begin(shared, os.getpid())

    await asyncio.wait_for(take_over(shared, own, "here", "boot", Lease(600.0)), 30)

    assert await list_live(shared) == {worker, own}


async def test_a_host_of_a_list_of_triggers_on_the_same_server_stays(shared):
    about = {"name": "w", "host": "here", "boot_id": "boot", "pid": NOBODY, "lock": "", "digest": "", "now_us": 1}
    hosting = await shared.write(lambda c: begin_session(c, kind="triggerer", list="nightly", **about))
    own = await begin(shared, os.getpid())

    await take_over(shared, own, "here", "boot", Lease(600.0))

    assert await list_live(shared) == {hosting, own}


async def test_what_a_dead_dev_left_behind_has_ended_before_its_tasks_are_free(database):
    mark = {ENGINE_ID_VARIABLE: f"tree-{NOBODY}-abc-def"}
    # Started by it, without the mark and outside its group.
    code = (
        "import subprocess; print(subprocess.Popen(['sleep', '600'], env={}, start_new_session=True).pid, flush=True)"
    )
    left = subprocess.Popen(
        [sys.executable, "-c", f"{code}; import time; time.sleep(600)"],
        env={**os.environ, **mark},
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert left.stdout is not None
    started = int(left.stdout.readline())
    try:
        await begin(database, NOBODY, boot=read_boot_id())
        own = await begin(database, os.getpid())

        await take_over(database, own, "here", read_boot_id(), Lease(600.0))

        assert left.poll() is not None or not is_running(left.pid)
        assert not is_running(started)
    finally:
        left.kill()
        left.wait()
        left.stdout.close()
        if is_running(started):
            os.kill(started, signal.SIGKILL)
