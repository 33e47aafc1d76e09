"""Hosts with unequal folders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.services.parser.test_manager import DAG, write

from tidemill.config.settings import Settings
from tidemill.services.parser import manager
from tidemill.services.parser.service import ParserService
from tidemill.services.supervision.supervisor import ServiceFolder
from tidemill.store.calls.dag_calls import ListDags
from tidemill.store.calls.service_calls import BeginSession, EndSession
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await open_store(f"sqlite:///{tmp_path}/dags.db")
    yield opened
    await opened.close()


@asynccontextmanager
async def parse(store: Database, folder: Path) -> AsyncIterator[None]:
    session = await store.call(BeginSession("parser", folder.name, folder.name, "boot", 1))
    service = ParserService(ServiceFolder(Settings(), folder))
    running = asyncio.create_task(service.run(store, session))
    async with asyncio.timeout(60):
        while not service.is_ready:
            await asyncio.sleep(0.02)
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])
        await service.close()
        await store.call(EndSession(session))


async def wait_active(store: Database, *wanted: str) -> None:
    async with asyncio.timeout(60):
        while tuple(one.dag_id for one in (await store.call(ListDags())).rows) != wanted:
            await asyncio.sleep(0.02)


async def test_each_host_adds_its_files_and_removes_no_others(
    store: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "SCAN_SECONDS", 0.2)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, names in ((one, "ab"), (two, "bc")):
        for name in names:
            write(folder, f"{name}.py", DAG.format(name=name, task="t"))
    async with parse(store, two):
        async with parse(store, one):
            await wait_active(store, "a", "b", "c")
            (two / "c.py").unlink()
            await wait_active(store, "a", "b")
        # The other host has ended, and this one lacks its file.
        await wait_active(store, "b")
