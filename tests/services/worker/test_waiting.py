"""Generators that wait at their `yield`, in real task processes: what they hold, and how they end."""

from __future__ import annotations

import time

import pytest
from tests.services.worker.conftest import RunningWorker, StartWorker
from tests.services.worker.memory_store import make_attempt
from tests.until import until

from tidemill.core.tasks.endings import Failure, Loss, Success
from tidemill.core.tasks.worker_slots import WorkerLimits
from tidemill.runtime.process.table import is_running

DAG = """
import threading, time
from pathlib import Path

with DAG("d", schedule=None) as dag:
    @task
    def numbers():
        try:
            for number in range(6_000):
                yield number
            time.sleep(SECONDS)
        finally:
            Path("CLOSED").touch()
    @task
    async def numbers_async():
        try:
            for number in range(6_000):
                yield number
        finally:
            Path("CLOSED").touch()
    @task
    def asks():
        def ask():
            for number in range(100):
                Variable.set("asked", str(number))
                time.sleep(0.01)
        thread = threading.Thread(target=ask)
        thread.start()
        yield from range(6_000)
        thread.join()
    @task
    def plain():
        return 1
    numbers()
    numbers_async()
    asks()
    plain()
"""
ONE = WorkerLimits(concurrency=1, grace_seconds=1.0)


def write(worker: RunningWorker, seconds: float = 0.0) -> None:
    worker.write(DAG.replace("SECONDS", str(seconds)).replace("CLOSED", str(worker.folder / "closed")))


async def wait(worker: RunningWorker, number: int = 1) -> int:
    """Wait until a generator waits; return the number of values that are stored by then."""
    await until(lambda: any((number, 3) in turn.blocked for turn in worker.store.turns), what="the generator waits")
    return len(worker.store.yielded)


@pytest.mark.parametrize("name", ["numbers", "numbers_async"])
async def test_other_attempts_run_in_the_place_of_one_that_waits(start_worker: StartWorker, name: str) -> None:
    worker = await start_worker(ONE)
    write(worker)
    worker.store.backlog = 1_000
    worker.store.queue(make_attempt(1, name))
    stored = await wait(worker)
    assert 1_000 <= stored <= 2_000
    process = worker.worker.processes.pids[0]
    for number in (2, 3):
        worker.store.queue(make_attempt(number, "plain"))
        assert (await worker.report(number)).result == Success()
    assert len(worker.store.yielded) == stored
    assert (1, 3) in worker.store.turns[-1].held
    assert is_running(process)
    worker.store.go_on()
    assert (await worker.report(1)).result == Success()
    assert worker.store.yielded == [str(number) for number in range(6_000)]
    assert worker.store.turns[-1].blocked == ()


async def test_a_generator_waits_for_a_place_of_its_worker(start_worker: StartWorker) -> None:
    worker = await start_worker(ONE)
    ended = worker.folder / "ended"
    text = DAG.replace("return 1", f"time.sleep(0.5); Path({str(ended)!r}).touch()")
    worker.write(text.replace("SECONDS", "0").replace("CLOSED", str(worker.folder / "closed")))
    worker.store.backlog = 1_000
    worker.store.queue(make_attempt(1, "numbers"))
    stored = await wait(worker)
    worker.store.queue(make_attempt(2, "plain"))
    await until(lambda: (2, 3) in worker.store.claimed, what="another attempt runs")
    worker.store.go_on()
    await until(lambda: len(worker.store.yielded) > stored, what="the generator goes on")
    assert ended.exists(), "it had no place before"
    assert (await worker.report(1)).result == Success()


async def test_the_time_of_a_wait_does_not_count_for_the_timeout(start_worker: StartWorker) -> None:
    worker = await start_worker(ONE)
    write(worker, seconds=60.0)
    worker.store.backlog = 3_000
    # Enough for the start of the first process of the file.
    worker.store.queue(make_attempt(9, "plain"))
    await worker.report(9)
    worker.store.queue(make_attempt(1, "numbers", deadline_us=time.time_ns() // 1000 + 2_000_000))
    await wait(worker)
    began = time.monotonic()
    await until(lambda: time.monotonic() > began + 3.0)
    assert 1 not in worker.store.reports
    worker.store.go_on()
    result = (await worker.report(1)).result
    assert isinstance(result, Failure)
    assert "time limit" in result.error
    assert len(worker.store.yielded) == 6_000
    assert (worker.folder / "closed").exists()


@pytest.mark.parametrize("name", ["numbers", "numbers_async"])
async def test_a_generator_that_waits_is_closed_when_its_task_has_moved_on(
    start_worker: StartWorker, name: str
) -> None:
    worker = await start_worker(ONE)
    write(worker)
    worker.store.backlog = 1_000
    worker.store.queue(make_attempt(1, name))
    await wait(worker)
    worker.store.end(1)
    await until(lambda: not worker.worker.processes.running, what="the attempt is gone")
    assert (worker.folder / "closed").exists()
    assert 1 not in worker.store.reports
    worker.store.queue(make_attempt(2, "plain"))
    assert (await worker.report(2)).result == Success()


async def test_a_worker_that_stops_returns_a_generator_that_waits(start_worker: StartWorker) -> None:
    worker = await start_worker(ONE)
    write(worker)
    worker.store.backlog = 1_000
    worker.store.queue(make_attempt(1, "numbers"))
    await wait(worker)
    worker.worker.drain()
    assert (await worker.report(1)).result == Loss(is_return=True)


async def test_a_generator_that_waits_may_still_use_the_store(start_worker: StartWorker) -> None:
    worker = await start_worker(ONE)
    write(worker)
    worker.store.backlog = 1_000
    worker.store.queue(make_attempt(1, "asks"))
    await wait(worker)
    await until(lambda: worker.store.variables.get("asked") == "99", what="its other thread has asked")
    worker.store.go_on()
    assert (await worker.report(1)).result == Success()
    assert len(worker.store.yielded) == 6_000
