"""The parent of all services, in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.until import until

from tidemill.config.settings import Settings
from tidemill.runtime.processes import is_running
from tidemill.services.dev import process, silence
from tidemill.services.dev.process import Dev, DevFolder
from tidemill.services.zygote.client import ZygoteClient
from tidemill.store.call_server import CallServer
from tidemill.store.calls import ListServices
from tidemill.store.sqlite import SqliteDatabase, open_sqlite


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
    dev = Dev(DevFolder(Settings(), tmp_path), store, tmp_path / "calls.sock", sys.stderr.fileno())
    stop = asyncio.Event()
    running = asyncio.create_task(dev.run(stop, None))
    await asyncio.wait_for(starting.wait(), 30)
    stop.set()

    await until(running.done)

    running.result()
    assert await store.call(ListServices()) == ()


@pytest.mark.long
async def test_a_triggerer_that_hangs_without_a_word_is_replaced(
    store: SqliteDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As C code that holds Python's global lock makes it hang: no thread of it can say so."""
    monkeypatch.setattr(process, "_SILENT_SECONDS", 9.0)
    monkeypatch.setattr(silence, "LOOK_SECONDS", 1.0)
    settings = Settings.model_validate({"triggerer": {"block_limit_seconds": 4}})
    server = CallServer(store, tmp_path / "calls.sock")
    await server.start()
    dev = Dev(DevFolder(settings, tmp_path), store, server.path, sys.stderr.fileno())
    stop = asyncio.Event()
    running = asyncio.create_task(dev.run(stop, None))
    try:
        pid = await until(lambda: dev.children[1].pid, what="the triggerer runs")
        assert pid is not None
        async with asyncio.timeout(60):
            while not any(one.pid == pid for one in await store.call(ListServices("triggerer"))):
                await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGSTOP)

        await until(lambda: dev.children[1].pid not in (pid, None), seconds=90, what="it is replaced")
        assert not is_running(pid)
    finally:
        stop.set()
        await asyncio.wait({running})
        await server.close()
    running.result()
