"""Services behind a transaction pooler lose the direct connection over which bells ring: their work goes on."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.faults import FaultyProxy
from tests.pgbouncer import PgBouncer
from tests.services.hosts.fleet import Fleet, run_fleet, wait_for
from tests.store.server import PostgresServer

from tidemill.store.calls.run_calls import CreateRun
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store

FILE = """
from tidemill.dags import DAG, BaseOperator
from tidemill.triggers.base import BaseTrigger, TriggerEvent

class Once(BaseTrigger):
    def serialize(self):
        return "d.Once", {}
    async def run(self):
        yield TriggerEvent("here")

class Wait(BaseOperator):
    def execute(self, context):
        self.defer(trigger=Once(), method_name="resume")
    def resume(self, context, event):
        return event

with DAG("ringing", schedule=None):
    Wait(task_id="wait")
"""
SERVICES = ("scheduler-1", "worker-1", "triggerer-1")


async def run_one(fleet: Fleet, store: Database, number: int) -> None:
    await store.call(CreateRun("ringing", by="tester"))
    await wait_for(store, "SELECT count(*) FROM dag_run WHERE state = 'success'", number, fleet.describe)


async def wait_said(fleet: Fleet, text: str) -> None:
    async with asyncio.timeout(60):
        while not all(text in fleet.read_log(name) for name in SERVICES):
            await asyncio.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_services_whose_bells_are_cut_off_find_their_work_by_looking_and_hear_them_again(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    address = await postgres.new_database()
    name = urlsplit(address).path.removeprefix("/")
    assert postgres.port is not None
    store = await open_store(address)
    with (
        contextlib.closing(FaultyProxy(postgres.port)) as proxy,
        contextlib.closing(PgBouncer(postgres, "transaction", "old", default_pool_size=20)) as pooler,
        run_fleet(tmp_path, pooler.url(name), lease_seconds=6.0) as fleet,
    ):
        fleet.write(FILE)
        for one in SERVICES:
            fleet.start(one, TIDEMILL_STORE__LISTEN_URL=postgres.tcp_url(name, proxy.port))
        await wait_for(store, "SELECT count(*) FROM dag", 1, "the DAG is stored")
        await run_one(fleet, store, 1)

        proxy.hang()
        await run_one(fleet, store, 2)

        proxy.down()
        await wait_said(fleet, "doorbell is disconnected")

        proxy.up()
        await wait_said(fleet, "doorbell is connected again")
        await run_one(fleet, store, 3)
        assert "the store cannot be reached" not in "".join(fleet.read_log(one) for one in SERVICES)
    await store.close()
