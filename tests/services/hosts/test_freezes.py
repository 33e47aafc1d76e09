"""Services that are suspended for longer than their lease: others do their work, and they give it up as they go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.services.hosts.fleet import AGAIN, count, run_fleet, wait_for
from tests.store.server import PostgresServer

from tidemill.store.calls.run_calls import CreateRun
from tidemill.store.engines.opening import open_store

FILE = """
import asyncio, pathlib, time
from tidemill.dags import DAG, BaseOperator, task
from tidemill.triggers.base import BaseTrigger, TriggerEvent

HERE = pathlib.Path(__file__).parent

class Once(BaseTrigger):
    def serialize(self):
        return "d.Once", {}
    async def run(self):
        try:
            if not (HERE / "waiting").exists():
                (HERE / "waiting").touch()
                await asyncio.sleep(600)
            yield TriggerEvent("here")
        finally:
            with (HERE / "cleanups").open("a") as file:
                print("cleanup", file=file)

class Wait(BaseOperator):
    def execute(self, context):
        self.defer(trigger=Once(), method_name="resume")
    def resume(self, context, event):
        return event

with DAG("frozen", schedule=None):
    @task
    def slow():
        if not (HERE / "running").exists():
            (HERE / "running").touch()
            time.sleep(600)
    slow()
    Wait(task_id="wait")
"""


async def wait_true(condition: Callable[[], object], what: Callable[[], str]) -> None:
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_what_a_suspended_service_runs_is_done_by_another_and_given_up_when_it_goes_on(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = await postgres.new_database()
    store = await open_store(url)
    dags = tmp_path / "dags"
    with run_fleet(tmp_path, url) as fleet:
        fleet.write(FILE)
        for name in ("scheduler-1", "worker-1", "triggerer-1"):
            fleet.start(name)
        await wait_for(store, "SELECT count(*) FROM dag", 1, "the DAG is stored")
        await store.call(CreateRun("frozen", by="tester"))
        await wait_true(lambda: (dags / "waiting").exists() and (dags / "running").exists(), fleet.describe)
        for kind in ("worker", "triggerer"):
            fleet.freeze(f"{kind}-1")
            fleet.start(f"{kind}-2")

        await wait_for(store, "SELECT count(*) FROM dag_run WHERE state = 'success'", 1, fleet.describe)

        for kind in ("worker", "triggerer"):
            fleet.thaw(f"{kind}-1")
            lost = f"this {kind} was taken for dead"
            await wait_true(lambda kind=kind, lost=lost: lost in fleet.read_log(f"{kind}-1"), fleet.describe)
        await wait_true(lambda: (dags / "cleanups").read_text().count("cleanup") == 2, fleet.describe)
        assert await count(store, AGAIN) == 0
        assert await count(store, "SELECT count(*) FROM task_journal WHERE after = 'success'") == 2
        assert await count(store, "SELECT max(tries) FROM task_instance") == 1
        live = "SELECT count(*) FROM service_session WHERE ended_us IS NULL AND kind IN ('worker', 'triggerer')"
        await wait_for(store, f"{live} AND parent IS NULL", 4, fleet.describe)
    await store.close()
