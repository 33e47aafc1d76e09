"""The parent of all services, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.until import until

from tidemill.config.settings import Settings
from tidemill.runtime.process.table import find_descendants, is_running
from tidemill.services.dev.process import Dev
from tidemill.services.supervision import silence, supervisor
from tidemill.services.supervision.supervisor import ServiceFolder
from tidemill.services.zygote.client import ZygoteClient
from tidemill.store.calls.dag_calls import ListDags
from tidemill.store.calls.run_calls import CreateRun, GetRun
from tidemill.store.calls.service_calls import ListSessions
from tidemill.store.engines.sqlite import SqliteDatabase, open_sqlite
from tidemill.store.wire.call_server import CallServer


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    opened = await open_sqlite(tmp_path / "store.db")
    yield opened
    await opened.close()


async def test_a_stop_ends_a_start_that_does_not_end(
    store: SqliteDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = asyncio.Event()

    async def start(zygote: ZygoteClient) -> None:
        starting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(ZygoteClient, "start", start)
    dev = Dev(ServiceFolder(Settings(), tmp_path), store, tmp_path / "calls.sock", sys.stderr.fileno())
    stop = asyncio.Event()
    running = asyncio.create_task(dev.run(stop, None))
    await asyncio.wait_for(starting.wait(), 30)
    stop.set()

    await until(running.done)

    running.result()
    assert await store.call(ListSessions()) == ()


FILE = """
import os, time
from tidemill.dags import DAG, task

with DAG("hangs", schedule=None):
    @task
    def slow(ti):
        with open("TRIES", "a") as tries:
            print(ti.try_number, file=tries, flush=True)
        if len(open("TRIES").readlines()) == 1:
            time.sleep(600)

    slow()
"""


@contextlib.asynccontextmanager
async def run_dev(store: SqliteDatabase, folder: Path) -> AsyncIterator[Dev]:
    settings = Settings.model_validate({"triggerer": {"block_limit_seconds": 4}})
    server = CallServer(store, folder / "calls.sock")
    await server.start()
    (folder / "dags").mkdir()
    dev = Dev(ServiceFolder(settings, folder / "dags"), store, server.path, sys.stderr.fileno())
    stop = asyncio.Event()
    running = asyncio.create_task(dev.run(stop, None))
    try:
        yield dev
    finally:
        stop.set()
        await asyncio.wait({running})
        await server.close()
    running.result()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("has_begun", [True, False], ids=["at work", "as it starts"])
@pytest.mark.parametrize("name", ["worker", "triggerer"])
async def test_a_service_that_hangs_without_a_word_is_replaced(
    store: SqliteDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_begun: bool
) -> None:
    """As C code that holds Python's global lock makes it hang: no thread of it can say so."""
    monkeypatch.setattr(supervisor, "_SILENT_SECONDS", 9.0)
    monkeypatch.setattr(supervisor, "_START_SECONDS", 9.0)
    monkeypatch.setattr(silence, "LOOK_SECONDS", 1.0)
    async with run_dev(store, tmp_path) as dev:
        (child,) = [child for child in dev.children if child.name == name]
        pid = await until(lambda: child.pid, what="it runs")
        assert pid is not None
        if has_begun:
            await wait_begun(store, name, pid)
        os.kill(pid, signal.SIGSTOP)

        await until(lambda: child.pid not in (pid, None), seconds=90, what="it is replaced")
        assert not is_running(pid)
        assert child.pid is not None
        await wait_begun(store, name, child.pid)


async def wait_begun(store: SqliteDatabase, name: str, pid: int) -> None:
    async with asyncio.timeout(60):
        while not any(one.pid == pid for one in await store.call(ListSessions(name))):
            await asyncio.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_task_of_a_worker_that_hangs_goes_on_in_another_one_and_uses_no_retry(
    store: SqliteDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_SILENT_SECONDS", 9.0)
    monkeypatch.setattr(silence, "LOOK_SECONDS", 1.0)
    tries = tmp_path / "tries"
    async with run_dev(store, tmp_path) as dev:
        (tmp_path / "dags" / "hangs.py").write_text(FILE.replace("TRIES", str(tries)))
        async with asyncio.timeout(60):
            while not (await store.call(ListDags())).rows:
                await asyncio.sleep(0.1)
        run = await store.call(CreateRun("hangs", by="tester"))
        await until(lambda: tries.exists() and tries.read_text(), what="the first attempt runs")
        hung = dev.children[0].pid
        assert hung is not None
        below = find_descendants(hung)
        os.kill(hung, signal.SIGSTOP)

        async with asyncio.timeout(90):
            while (found := await store.call(GetRun("hangs", run.run_id))) is None or found.ended_us is None:
                await asyncio.sleep(0.1)
        assert found.state == "success"
        assert tries.read_text() == "1\n1\n"
        assert not [pid for pid in below if is_running(pid)]
