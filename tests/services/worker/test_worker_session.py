"""The session of a worker: when it is ready."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.services.worker.memory_store import MemoryStore
from tests.until import until

from tidemill.config.known_secrets import KnownSecrets
from tidemill.services.worker.preloads import PRELOADS
from tidemill.services.worker.worker_config import WorkerConfig
from tidemill.services.worker.worker_session import WorkerSession
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Setup
from tidemill.store.calls.service_calls import BeatSession, BeginSession


async def test_a_worker_is_ready_once_its_session_has_begun(tmp_path: Path) -> None:
    store, zygote, stop = MemoryStore(), ZygoteClient(Setup(preload=PRELOADS)), asyncio.Event()
    ready: list[int] = []
    about = BeginSession("worker", "w", "here", "boot", 1)
    store.away = True
    session = WorkerSession(WorkerConfig(tmp_path), 1.0, about, store, zygote, KnownSecrets(), lambda: ready.append(1))
    running = asyncio.create_task(session.run(stop))
    try:
        await until(lambda: store.refused["BeginSession"], what="the database is away")
        assert not ready
        store.away = False
        await until(lambda: ready, what="it is ready")
    finally:
        stop.set()
        await running
        await zygote.close()


async def test_a_worker_is_ready_once_it_knows_the_time_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, zygote, stop = MemoryStore(), ZygoteClient(Setup(preload=PRELOADS)), asyncio.Event()
    beats: list[int] = []
    ready: list[int] = []
    call = store.call

    async def call_slowly(request: Any) -> Any:
        if isinstance(request, BeatSession):
            for _ in range(100):
                await asyncio.sleep(0)
            beats.append(1)
        return await call(request)

    monkeypatch.setattr(store, "call", call_slowly)
    await zygote.start()
    about = BeginSession("worker", "w", "here", "boot", 1)

    def note_ready() -> None:
        ready.append(len(beats))

    session = WorkerSession(WorkerConfig(tmp_path), 1.0, about, store, zygote, KnownSecrets(), note_ready)
    running = asyncio.create_task(session.run(stop))
    try:
        await until(lambda: ready, what="it is ready")
        assert ready[0] > 0
    finally:
        stop.set()
        await running
        await zygote.close()
