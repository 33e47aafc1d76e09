"""A triggerer that starts beside another one, which then ends: triggers are handed over, and nothing else happens."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.services.hosts.fleet import AGAIN, Fleet, count, run_fleet, wait_for
from tests.size import sized
from tests.store.server import PostgresServer

from tidemill.runtime.process.exitcode import ExitCode
from tidemill.store.calls.run_calls import CreateRun
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store

COUNT = 200
#: The lease of all services; a newcomer has work within 10 s whatever it is.
LEASE_SECONDS = sized(2.0, 30.0)
TRIGGER = """
import asyncio, pathlib
from tidemill.triggers import BaseTrigger, TaskSuccessEvent

HERE = pathlib.Path(__file__).parent

class Waits(BaseTrigger):
    def __init__(self, number):
        super().__init__()
        self.number = number
    def serialize(self):
        return "waiting.Waits", {"number": self.number}
    async def run(self):
        while not (HERE / "go").exists():
            await asyncio.sleep(0.5)
        yield TaskSuccessEvent()
    async def on_kill(self):
        (HERE / f"killed {self.number}").touch()
"""
FILE = """
from tidemill.dags import DAG, BaseOperator, StartTriggerArgs

class Wait(BaseOperator):
    start_trigger_args = StartTriggerArgs("waiting.Waits", next_method=None)
    start_from_trigger = True

with DAG("waits", schedule=None):
    for number in range(COUNT):
        Wait(task_id=f"w{number}", trigger_kwargs={"number": number})
"""
#: Counts the triggers that a triggerer's child runs.
HELD = """
SELECT count(*) FROM trigger_cursor AS c JOIN service_session AS s ON s.id = c.session_id
JOIN service_session AS p ON p.id = s.parent WHERE p.name = '{name}' AND s.ended_us IS NULL
"""


async def wait_until_held(store: Database, fleet: Fleet, name: str, least: int) -> float:
    """Wait until a triggerer has at least so many triggers; return the time that took, in seconds."""
    began = time.monotonic()
    async with asyncio.timeout(120):
        while await count(store, HELD.format(name=name)) < least:
            assert not list((fleet.folder / "dags").glob("killed*")), fleet.describe()
            await asyncio.sleep(0.05)
    return time.monotonic() - began


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_newcomer_is_handed_triggers_and_takes_all_when_the_other_one_ends(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = await postgres.new_database()
    store = await open_store(url)
    with run_fleet(tmp_path, url, lease_seconds=LEASE_SECONDS) as fleet:
        (tmp_path / "dags" / "waiting.py").write_text(TRIGGER)
        fleet.write(FILE.replace("COUNT", str(COUNT)))
        fleet.start("scheduler-1")
        fleet.start("triggerer-1")
        await wait_for(store, "SELECT count(*) FROM dag", 1, "the DAG is stored")
        await store.call(CreateRun("waits", run_id="r", by="tester"))
        await wait_until_held(store, fleet, "triggerer-1", COUNT)

        fleet.start("triggerer-2")
        lives = "SELECT count(*) FROM service_session WHERE name = 'triggerer-2' AND parent IS NOT NULL"
        await wait_for(store, lives, 1, fleet.describe)
        took = await wait_until_held(store, fleet, "triggerer-2", 1)
        print(f"the newcomer had work after {took:.1f} s")
        await wait_until_held(store, fleet, "triggerer-2", COUNT // 4)
        assert fleet.stop("triggerer-1") == ExitCode.OK
        await wait_until_held(store, fleet, "triggerer-2", COUNT)
        (tmp_path / "dags" / "go").touch()

        await wait_for(store, "SELECT count(*) FROM dag_run WHERE state = 'success'", 1, fleet.describe)
        assert not list((tmp_path / "dags").glob("killed*"))
        assert await count(store, "SELECT count(*) FROM task_journal WHERE after = 'success'") == COUNT
        assert await count(store, AGAIN) == 0
        assert await count(store, "SELECT count(*) FROM trigger_event") == COUNT
        assert await count(store, "SELECT count(*) FROM trigger_death") == 0
    await store.close()
