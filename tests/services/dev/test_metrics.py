"""What is measured of DAGs, by calls to a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.runtime.metrics.asking import parse
from tests.store.dags import Player, dag, task

from tidemill.config.settings import Settings
from tidemill.core.tasks.endings import Deferral, Failure, Idle, Success
from tidemill.runtime.metrics.exposition import write_families
from tidemill.runtime.metrics.families import Family
from tidemill.services.dev.metrics import DEFINITIONS, CallMeter, DagMetrics, MeasuredStore, find_delay
from tidemill.services.dev.web_ui import serve_dags_metrics
from tidemill.store.calls.dag_calls import DagRecord
from tidemill.store.calls.service_calls import BeatSession, BeginSession, EndSession, StoreFile
from tidemill.store.calls.stream_calls import KeepBatch
from tidemill.store.calls.trigger_calls import ClaimTriggers, FiredEvent, StoreEvents
from tidemill.store.calls.worker_calls import AttemptReport, WorkerTurn
from tidemill.store.engines.sqlite import open_sqlite


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Any]:
    opened = await open_sqlite(tmp_path / "dags.db")
    yield opened
    await opened.close()


def read(metrics: list[Family]) -> dict[str, float]:
    found = parse(write_families(metrics).decode())
    return {
        f"{name.removeprefix('tidemill_')}{sorted(labels)}": value
        for name, samples in found.items()
        for labels, value in samples.items()
    }


async def test_tasks_attempts_pools_and_resumes_are_measured(database: Any) -> None:
    clock = {"now": 100.0}
    meter = CallMeter(lambda: clock["now"])
    store = MeasuredStore(database, meter)
    metrics = DagMetrics(database, asyncio.get_running_loop(), meter, ("worker-1", "0"))
    player = await Player(store).begin()  # type: ignore[arg-type]
    await store.call(StoreFile("broken.py", "x", error="SyntaxError"))
    await player.create(dag(task("a"), task("b"), task("c", retries=1), task("d", "c")))
    first, second, third = await player.claim()
    await player.report(first, Deferral("module.Trigger", "{}", "resume"))
    await player.report(second, Success())
    await player.report(third, Failure("no"))
    again = AttemptReport(second.task, second.epoch, Success())
    await store.call(WorkerTurn(player.worker, 900, (again,)))  # repeated: it is not counted twice
    triggerer = await store.call(BeginSession("triggerer", "t", "machine", "boot", 18))
    (trigger,) = await store.call(ClaimTriggers(triggerer, 1, 10))
    await store.call(StoreEvents(triggerer, 1, (FiredEvent(trigger.id, trigger.token, "1", None, 0),)))
    clock["now"] = 100.3
    await player.claim()
    for worker, late in ((player.worker, 0.25), (await player.begin_service("worker"), 0.5)):
        said = {"slots_busy": 2.0, "slots_free": 6.0, "processes": 3.0, "lag_seconds": late}
        await store.call(BeatSession(worker, said))
    await store.call(BeatSession(triggerer, {"triggers": 7.0, "lag_seconds": 0.125}))

    collected = await asyncio.to_thread(metrics.collect)
    values = read(collected)
    assert set(DEFINITIONS) == {family.definition for family in collected}
    assert values["attempts_total['success']"] == values["attempts_total['failure']"] == 1
    assert values["attempts_total['deferral']"] == 1
    assert (values["tasks['running']"], values["tasks['up_for_retry']"], values["tasks['none']"]) == (1, 1, 1)
    assert values["pool_slots['default_pool', 'held']"] == 1
    assert values["pool_slots['default_pool', 'free']"] == 127
    assert (values["resume_seconds_count[]"], values["resume_seconds_sum[]"]) == (1, pytest.approx(0.3))
    assert values["parse_errors[]"] == 1
    assert values["schedule_delay_seconds[]"] == 0
    assert (values["worker_slots['busy']"], values["worker_slots['free']"], values["task_processes[]"]) == (4, 12, 6)
    assert (values["task_triggers[]"], values["task_events_total[]"]) == (7, 1)
    assert values["service_lag_seconds['worker']"] == 0.5
    assert values["service_lag_seconds['triggerer']"] == 0.125

    await store.call(EndSession(triggerer))
    clock["now"] += 15
    await store.call(BeatSession(player.worker, said))
    clock["now"] += 15  # the other worker says nothing any more
    values = read(await asyncio.to_thread(metrics.collect))
    assert (values["worker_slots['busy']"], values["task_triggers[]"]) == (2, 0)
    assert "service_lag_seconds['triggerer']" not in values


async def test_attempts_that_leave_their_worker_and_all_events_of_a_stream_are_counted(database: Any) -> None:
    clock = {"now": 100.0}
    meter = CallMeter(lambda: clock["now"])
    store = MeasuredStore(database, meter)
    player = await Player(store).begin()
    await player.create(dag(task("a")))
    await player.report(await player.claim_one(), Deferral("module.Trigger", "{}", "", streams=True))
    triggerer = await player.begin_service("triggerer")
    (trigger,) = await store.call(ClaimTriggers(triggerer, 1, 10))

    async def fire(number: int) -> None:
        event = FiredEvent(trigger.id, trigger.token, "1", None, 0)
        await store.call(StoreEvents(triggerer, number, (event, event)))

    await fire(1)
    clock["now"] += 0.2
    await fire(2)
    attempt = await player.claim_one()
    clock["now"] += 9.0
    await fire(3)
    assert attempt.stream is not None
    await store.call(KeepBatch(attempt.task, attempt.epoch, trigger.id, 6, 1))
    await player.report(attempt, Idle())
    clock["now"] += 9.0
    await fire(4)
    clock["now"] += 0.1
    await player.claim_one()
    attempts, resumes = meter.read()
    assert (attempts["idle"], sum(resumes.counts), resumes.total) == (1, 2, pytest.approx(0.3))
    assert meter.read_services()[0]["events"] == 8


def test_the_delay_is_that_of_the_oldest_run_that_is_due() -> None:
    def record(name: str, next_us: int | None, *, paused: bool = False) -> DagRecord:
        return DagRecord(1, name, "f.py", 1, True, paused, next_us, "", (), "")

    dags = [record("a", 3_000_000), record("b", None), record("c", 1_000_000, paused=True), record("d", 99_000_000)]
    assert find_delay(dags, 5_000_000) == 2.0
    assert find_delay(dags[1:], 5_000_000) == 0.0


async def test_metrics_are_served_without_blocking_the_loop(database: Any) -> None:
    settings = Settings.model_validate({"metrics": {"enabled": True, "port": 0}})
    metrics = DagMetrics(database, asyncio.get_running_loop(), CallMeter(), ("worker-1", "0"))
    with serve_dags_metrics(settings, metrics) as address:
        assert address is not None
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"{address}/metrics")
    assert 'tidemill_pool_slots{pool="default_pool",state="free"} 128\n' in answer.text
