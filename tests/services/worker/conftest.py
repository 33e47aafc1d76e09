from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.services.worker.memory_store import MemoryStore
from tests.until import until

from tidemill.config.known_secrets import KnownSecrets
from tidemill.core.tasks.endings import Failure
from tidemill.core.tasks.worker_slots import WorkerLimits
from tidemill.services.worker.preloads import PRELOADS
from tidemill.services.worker.worker import Worker
from tidemill.services.worker.worker_config import WorkerConfig
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Setup
from tidemill.store.calls.worker_calls import AttemptReport

IMPORTS = """
from tidemill.dags import DAG, AirflowFailException, AirflowSkipException, BaseOperator, EmptyOperator, Variable, task
"""
LIMITS = WorkerLimits(concurrency=4, recycle_after=100, grace_seconds=0.5)


class RunningWorker:
    """A worker over a store in memory, and the folder of its DAGs."""

    def __init__(self, folder: Path, store: MemoryStore, worker: Worker, zygote: ZygoteClient) -> None:
        self.folder, self.store, self.worker, self.zygote = folder, store, worker, zygote
        self.running = asyncio.ensure_future(worker.run())

    def write(self, text: str, name: str = "d.py") -> None:
        (self.folder / name).write_text(IMPORTS + text)

    async def report(self, task: int) -> AttemptReport:
        """Return the report of a task."""
        return await until(lambda: self.store.reports.get(task), what=f"task {task} is reported")

    async def error(self, task: int) -> str:
        """Return the error that a task failed with."""
        result = (await self.report(task)).result
        assert isinstance(result, Failure), result
        return result.error


StartWorker = Callable[..., Coroutine[Any, Any, RunningWorker]]


@pytest.fixture
async def start_worker(tmp_path: Path) -> AsyncIterator[StartWorker]:
    started: list[RunningWorker] = []

    async def start(limits: WorkerLimits = LIMITS, **changes: Any) -> RunningWorker:
        zygote = ZygoteClient(Setup(preload=PRELOADS))
        await zygote.start()
        store = MemoryStore()
        worker = Worker(1, WorkerConfig(tmp_path, limits, **changes), store, store, zygote, KnownSecrets())
        running = RunningWorker(tmp_path, store, worker, zygote)
        started.append(running)
        return running

    yield start
    for each in started:
        each.running.cancel()
        await asyncio.wait([each.running])
        await each.zygote.close()


@pytest.fixture
async def worker(start_worker: StartWorker) -> RunningWorker:
    return await start_worker()
