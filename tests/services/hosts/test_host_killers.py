"""A trigger that kills its whole host, with three hosts that are started again.

The real hosts run with `TIDEMILL_HOST_KILLERS=1`; `tests.core.triggers.test_lost_hosts` and
`tests.store.test_trigger_deaths` always play them.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.services.hosts.fleet import count, run_fleet, wait_for
from tests.store.server import PostgresServer

from tidemill.store.calls.instance_calls import ListTasks
from tidemill.store.calls.run_calls import CreateRun
from tidemill.store.engines.opening import open_store

FILE = """
import asyncio, os, signal
from tidemill.dags import DAG, BaseOperator
from tidemill.triggers.base import BaseTrigger, TriggerEvent

class Waits(BaseTrigger):
    def __init__(self, kills, path):
        super().__init__()
        self.kills, self.path = kills, path
    def serialize(self):
        return "d.Waits", {"kills": self.kills, "path": self.path}
    async def run(self):
        while not os.path.exists(self.path):
            await asyncio.sleep(0.1)
            if self.kills:
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        yield TriggerEvent(1)

class Wait(BaseOperator):
    def __init__(self, kills, **rest):
        super().__init__(**rest)
        self.kills = kills
    def execute(self, context):
        self.defer(trigger=Waits(self.kills, os.path.dirname(__file__) + "/go"), method_name="resume")
    def resume(self, context, event):
        return event

with DAG("waiting", schedule=None):
    for number in range(4):
        Wait(task_id=f"w{number}", kills=number == 1)
"""


@pytest.mark.skipif("TIDEMILL_HOST_KILLERS" not in os.environ, reason="five hosts must be lost, which takes a minute")
@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_trigger_that_kills_its_hosts_fails_and_nothing_else(postgres: PostgresServer, tmp_path: Path) -> None:
    url = await postgres.new_database()
    store = await open_store(url)
    with run_fleet(tmp_path, url) as fleet:
        fleet.write(FILE)
        hosts = [f"triggerer-{number}" for number in (1, 2, 3)]
        for name in ("scheduler-1", "worker-1", *hosts):
            fleet.start(name)
        await wait_for(store, "SELECT count(*) FROM dag", 1, "the DAG is stored")
        await store.call(CreateRun("waiting", run_id="r", by="tester"))
        losses = 0
        async with asyncio.timeout(240):
            while not await count(store, "SELECT count(*) FROM task_instance WHERE state = 'failed'"):
                for name in hosts:
                    if fleet.services[name].poll() is not None:
                        losses += 1
                        fleet.services.pop(name)
                        fleet.start(name)
                await asyncio.sleep(0.1)
        assert 5 <= losses <= 9, fleet.describe()
        (fleet.folder / "dags" / "go").touch()
        await wait_for(store, "SELECT count(*) FROM task_instance WHERE state = 'success'", 3, fleet.describe)
        rows = (await store.call(ListTasks("waiting", "r"))).rows
        assert [one.task_id for one in rows if one.state == "failed"] == ["w1"]
        assert all("tried only this trigger" in (one.error or "") for one in rows if one.state == "failed")
    await store.close()
