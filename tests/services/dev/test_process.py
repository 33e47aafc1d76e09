"""The parent of all services, in this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.until import until

from tidemill.config.settings import Settings
from tidemill.services.dev.process import Dev, DevFolder
from tidemill.services.zygote.client import ZygoteClient
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
