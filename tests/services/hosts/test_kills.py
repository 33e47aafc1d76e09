"""Services of each kind are killed under load: every task ends once, and nothing runs again after it succeeded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.services.hosts.fleet import run_fleet
from tests.store.server import PostgresServer

from tidemill.store.calls.run_calls import CreateRun
from tidemill.store.calls.service_calls import ListSessions
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store

RUNS = 6
#: Six tasks, of which three defer and one is retried.
FILE = """
import asyncio, os, time
from datetime import timedelta
from tidemill.dags import DAG, BaseOperator, task
from tidemill.triggers.base import BaseTrigger, TriggerEvent

class Later(BaseTrigger):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
    def serialize(self):
        return "d.Later", {"seconds": self.seconds}
    async def run(self):
        await asyncio.sleep(self.seconds)
        yield TriggerEvent(self.seconds)

class Wait(BaseOperator):
    def __init__(self, seconds, **rest):
        super().__init__(**rest)
        self.seconds = seconds
    def execute(self, context):
        self.defer(trigger=Later(self.seconds), method_name="resume")
    def resume(self, context, event):
        return event

with DAG("six", schedule=None, max_active_runs=1000):
    @task
    def begin():
        time.sleep(0.3)
    @task(retries=3, retry_delay=timedelta(seconds=0.1))
    def unsure(ti):
        if ti.try_number == 1:
            raise RuntimeError("the first try fails")
    @task
    def end():
        time.sleep(0.1)
    waits = [Wait(task_id=f"w{n}", seconds=n) for n in (1, 2, 3)]
    begin() >> [*waits, unsure()] >> end()
"""
AGAIN = """
SELECT count(*) FROM task_journal AS a JOIN task_journal AS b ON b.task = a.task AND b.epoch > a.epoch
WHERE a.after = 'success'
"""


async def count(store: Database, statement: str) -> int:
    return int(await store.read(lambda connection: connection.execute(text(statement)).scalar_one()))


async def wait_for(store: Database, statement: str, wanted: int, what: object, seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while (found := await count(store, statement)) < wanted:
            await asyncio.sleep(0.1)
    assert found == wanted, what


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_each_task_ends_once_though_a_service_of_each_kind_is_killed(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = await postgres.new_database()
    store = await open_store(url)
    with run_fleet(tmp_path, url) as fleet:
        fleet.write(FILE)
        for kind in ("scheduler", "worker", "triggerer"):
            for number in (1, 2):
                fleet.start(f"{kind}-{number}")
        await wait_for(store, "SELECT count(*) FROM dag", 1, "the DAG is stored")
        for number in range(RUNS):
            await store.call(CreateRun("six", run_id=f"r{number}", by="tester"))
        await wait_for_some(store, "state = 'running'")
        fleet.kill("worker-1")
        await wait_for_some(store, "state = 'deferred'")
        fleet.kill("triggerer-1")
        fleet.kill("scheduler-1")

        await wait_for(store, "SELECT count(*) FROM dag_run WHERE state = 'success'", RUNS, fleet.describe)

        assert await count(store, "SELECT count(*) FROM task_instance WHERE state = 'success'") == 6 * RUNS
        assert await count(store, AGAIN) == 0
        assert await count(store, "SELECT count(*) FROM task_journal WHERE after = 'success'") == 6 * RUNS
        dead = "SELECT count(*) FROM service_session WHERE ended_by IS NOT NULL AND parent IS NULL"
        await wait_for(store, dead, 3, fleet.describe)
        services = [json.loads(line) for line in fleet.run("services", "list", "--json").splitlines()]
        assert {one["name"] for one in services} == {"scheduler-2", "worker-2", "triggerer-2"}
        # At most four each, parent and child together, and this test has four; those of the dead ones are gone.
        mine = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        assert await count(store, mine) <= 4 * (len(services) + 1)
        for name in list(fleet.services):
            assert fleet.stop(name) == 0
        assert await store.call(ListSessions()) == ()
    await store.close()


async def wait_for_some(store: Database, condition: str) -> None:
    async with asyncio.timeout(60):
        while await count(store, f"SELECT count(*) FROM task_instance WHERE {condition}") < RUNS / 4:
            await asyncio.sleep(0.05)
