"""One service of a name on a host."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from tests.services.hosts.fleet import run_fleet, wait_for
from tests.store.server import PostgresServer
from tests.until import until

from tidemill.runtime.embedded.broker import free_port
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.store.calls.run_calls import CreateRun
from tidemill.store.engines.opening import open_store

FILE = """
import pathlib, time
from tidemill.dags import DAG, task

with DAG("slow", schedule=None):
    @task
    def wait():
        ran = pathlib.Path(__file__).with_name("ran")
        if not ran.exists():
            ran.touch()
            time.sleep(600)
    wait()
"""


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_second_worker_of_a_name_is_refused_and_the_next_takes_over_from_a_killed_one_at_once(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = await postgres.new_database()
    store = await open_store(url)
    with run_fleet(tmp_path, url, lease_seconds=600) as fleet:
        fleet.write(FILE)
        fleet.start("scheduler-1")
        port = free_port()
        fleet.start("worker-1", TIDEMILL_METRICS__ENABLED="true", TIDEMILL_METRICS__PORT=str(port))
        await until(lambda: is_ready(port), what=fleet.describe, pause_seconds=0.1)
        await wait_for(store, "SELECT count(*) FROM dag", 1, "the DAG is stored")
        await store.call(CreateRun("slow", by="tester"))
        async with asyncio.timeout(60):
            while not (tmp_path / "dags" / "ran").exists():
                await asyncio.sleep(0.05)

        first = fleet.services["worker-1"]
        fleet.start("worker-1")
        assert fleet.services["worker-1"].wait(60) == ExitCode.FENCED
        assert f"as process {first.pid}" in fleet.read_log("worker-1")
        first.kill()
        first.wait()
        fleet.start("worker-1")

        await wait_for(store, "SELECT count(*) FROM dag_run WHERE state = 'success'", 1, fleet.describe, 60)
        assert "taking over its work" in fleet.read_log("worker-1")
    await store.close()
