"""Hosts with unequal folders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.services.parser.test_manager import DAG, write

from tidemill.config.sections.services_settings import ServicesSettings
from tidemill.config.settings import Settings
from tidemill.services.parser import manager
from tidemill.services.parser.service import ParserService
from tidemill.services.supervision.supervisor import ServiceFolder
from tidemill.store.calls.dag_calls import ListDags
from tidemill.store.calls.service_calls import BeginSession, EndSession, ListFileDifferences
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store

#: The files of a host that has ended are removed at once.
SETTINGS = Settings(services=ServicesSettings(lease_seconds=1.0))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await open_store(f"sqlite:///{tmp_path}/dags.db")
    yield opened
    await opened.close()


@asynccontextmanager
async def parse(store: Database, folder: Path) -> AsyncIterator[None]:
    session = await store.call(BeginSession("parser", folder.name, folder.name, "boot", 1))
    service = ParserService(ServiceFolder(SETTINGS, folder))
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


async def wait_differences(store: Database, *wanted: tuple[str, str, str]) -> None:
    async with asyncio.timeout(60):
        while True:
            found = await store.call(ListFileDifferences())
            if tuple((one.path, one.difference, one.host) for one in found) == wanted:
                return
            await asyncio.sleep(0.02)


async def test_each_host_adds_its_files_and_removes_no_others(
    store: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "SCAN_SECONDS", 0.2)
    monkeypatch.setattr(manager, "CONFIRM_SECONDS", 0.05)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, names in ((one, "ab"), (two, "bc")):
        for name in names:
            write(folder, f"{name}.py", DAG.format(name=name, task="t"))
    async with parse(store, two):
        async with parse(store, one):
            await wait_active(store, "a", "b", "c")
            await wait_differences(store, ("a.py", "missing", "two"), ("c.py", "missing", "one"))
            write(one, "b.py", DAG.format(name="b", task="other"))
            differs = ("b.py", "differs", "one")
            await wait_differences(store, ("a.py", "missing", "two"), differs, ("c.py", "missing", "one"))
            (two / "c.py").unlink()
            await wait_active(store, "a", "b")
        # The other host has ended, and this one lacks its file.
        await wait_active(store, "b")
