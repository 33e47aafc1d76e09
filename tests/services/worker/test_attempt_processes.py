"""Attempts in task processes without a store: only a listener hears of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.services.worker.conftest import IMPORTS
from tests.services.worker.memory_store import make_attempt
from tests.until import until

from tidemill.config.known_secrets import KnownSecrets
from tidemill.core.tasks.endings import AttemptEnding, Failure, Loss, Success
from tidemill.core.tasks.worker_slots import Attempt, Key, WorkerLimits
from tidemill.services.worker.logs.logs import AttemptLog
from tidemill.services.worker.messages import AttemptFinished
from tidemill.services.worker.preloads import PRELOADS
from tidemill.services.worker.processes.attempt_processes import AttemptProcesses, RunningAttempt
from tidemill.services.worker.worker_config import WorkerConfig
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Setup
from tidemill.store.calls.task_calls import GetVariable

DAG = """
import time
with DAG("d", schedule=None):
    @task
    def run():
        BODY
    run()
"""
KEY = (1, 3)
#: A signal that arrives just before a sleep begins does not end it; so each sleep is short.
SLEEPS = """print('begun', flush=True)
        while True:
            time.sleep(0.01)"""


class Processes:
    """Attempt processes that were started, and what their listener heard."""

    def __init__(self, folder: Path, zygote: ZygoteClient) -> None:
        self.folder, self.zygote = folder, zygote
        # The grace period is long, so that no process is killed before it has reported the end of its attempt.
        self.all = AttemptProcesses(WorkerConfig(folder, WorkerLimits(concurrency=2, grace_seconds=30.0)), zygote, self)
        self.calls: list[tuple[str, Any]] = []
        self.ended: dict[Key, tuple[AttemptEnding | None, AttemptFinished | None]] = {}
        self.held_at_end: list[Key] = []
        self.written = self.released = 0

    def start(self, body: str, key: Key = KEY) -> None:
        (self.folder / "d.py").write_text(IMPORTS + DAG.replace("BODY", body))
        claim = make_attempt(key[0], "run", epoch=key[1])
        log = AttemptLog(key[0], 1, key[1], 100_000, KnownSecrets())
        self.all.start(RunningAttempt(Attempt(key, "d.py"), claim, log, asyncio.get_running_loop().time()))

    async def find_end(self, key: Key = KEY) -> tuple[AttemptEnding | None, AttemptFinished | None]:
        await until(lambda: key in self.ended, what="it has ended")
        return self.ended[key]

    async def call_store(self, file: str, call: Any) -> Any:
        self.calls.append((file, call))
        return "Ann"

    def on_written(self) -> None:
        self.written += 1

    def on_ended(self, running: RunningAttempt, result: AttemptEnding | None, finished: AttemptFinished | None) -> None:
        self.ended[running.attempt.key] = result, finished
        self.held_at_end = self.all.held

    def on_released(self) -> None:
        self.released += 1


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    zygote = ZygoteClient(Setup(preload=PRELOADS))
    await zygote.start()
    processes = Processes(tmp_path, zygote)
    yield processes
    await processes.all.close()
    assert not processes.all.pids
    await zygote.close()


async def test_the_listener_answers_the_calls_of_an_attempt_and_gets_its_result(processes: Processes) -> None:
    assert processes.all.capacity == 2
    processes.start("return Variable.get('name')")
    assert processes.all.runs(KEY)
    assert (processes.all.running, processes.all.capacity, processes.all.held) == (1, 1, [KEY])
    result, finished = await processes.find_end()
    assert isinstance(result, Success)
    assert finished is not None
    assert finished.xcoms == (("return_value", '"Ann"'),)
    assert processes.calls == [("d.py", GetVariable("name"))]
    assert not processes.all.runs(KEY)
    assert (processes.all.running, processes.all.capacity, processes.all.held) == (0, 2, [])


async def test_an_attempt_whose_process_crashes_fails_without_a_message_of_the_process(processes: Processes) -> None:
    processes.start("import os; os._exit(5)")
    result, finished = await processes.find_end()
    assert isinstance(result, Failure)
    assert finished is None
    assert processes.released == 0


async def test_an_attempt_that_moved_on_is_held_until_its_process_has_exited(processes: Processes) -> None:
    processes.start(SLEEPS)
    await until(lambda: processes.written, what="it has begun")
    processes.all.end(KEY)
    result, _ = await processes.find_end()
    assert result is None
    assert processes.held_at_end == [KEY]
    await until(lambda: processes.released == 1, what="its process has exited")
    assert processes.all.held == []


async def test_attempts_that_are_ended_together_are_lost_and_no_more_start(processes: Processes) -> None:
    processes.start(SLEEPS)
    await until(lambda: processes.written, what="it has begun")
    processes.all.end_all()
    assert (processes.all.draining, processes.all.capacity) == (True, 0)
    result, _ = await processes.find_end()
    assert isinstance(result, Loss)


async def test_the_capacity_is_0_while_the_zygote_restarts(processes: Processes) -> None:
    processes.zygote.ready.clear()
    assert processes.all.capacity == 0
    assert processes.all.measure()["slots_free"] == 2
    processes.zygote.ready.set()
    assert processes.all.capacity == 2
