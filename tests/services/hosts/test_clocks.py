"""Hosts whose clocks are wrong by ten minutes and more."""

from __future__ import annotations

import ast
import asyncio
import itertools
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.dags.attempts import attempt, resume
from tests.dags.test_sensors import sense, trigger_of
from tests.services.hosts.clocks import SetClock, set_clock
from tests.services.hosts.fleet import count, run_fleet, wait_for
from tests.store.dags import Player, dag, task
from tests.store.server import PostgresServer
from tests.triggers.builtin.triggers_contract import fired
from tests.until import until

import tidemill
from tidemill.config.sections.triggerer_settings import StoreSettings
from tidemill.dags import TimeDeltaSensor
from tidemill.runtime.log.task_lines import decode_lines
from tidemill.runtime.store_clock import STORE_CLOCK
from tidemill.store.calls.log_calls import ReadLog
from tidemill.store.calls.run_calls import CreateRun, ListRuns
from tidemill.store.calls.service_calls import BeatSession
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store
from tidemill.store.run_retention import RunRetention
from tidemill.triggers.builtin.temporal import DateTimeTrigger, TimeDeltaTrigger

__all__ = ["set_clock"]

FILE = """
from datetime import timedelta
from tidemill.dags import DAG, BaseOperator, BaseSensorOperator, task
from tidemill.triggers.builtin.temporal import TimeDeltaTrigger

class Waits(BaseOperator):
    def execute(self, context):
        print("before")
        self.defer(trigger=TimeDeltaTrigger(timedelta(seconds=0.5)), method_name="resume", timeout=120)
    def resume(self, context, event):
        print("after")

class Looks(BaseSensorOperator):
    looked = 0
    def poke(self, context):
        self.looked += 1
        return self.looked == 4

with DAG("clocked", schedule=None, default_args={"retries": 1, "retry_delay": 0.5, "execution_timeout": 120}):
    @task
    def fails(ti):
        if ti.try_number == 1:
            raise ValueError("the first time")
    for _ in range(3):
        Waits(task_id=f"waits{_}") >> fails.override(task_id=f"fails{_}")()
    Looks(task_id="looks", poke_interval=0.5, timeout=120)
"""

SRC = Path(tidemill.__file__).parent
#: What reads the clock of its host. Nothing of it is compared with times of other hosts.
READERS = {
    "dags/operators/http_pages.py": "a date of HTTP is compared with the clock only if the answer has none of its own",
    "services/dag_test.py": "one process runs all",
    "services/triggerer/hosting/trigger_book.py": "shown by the process that read it",
    "services/triggerer/lists/admission.py": "triggers of a list belong to one host",
    "services/triggerer/lists/reporting/host_recorder.py": "recorded by the process that read it",
    "services/triggerer/lists/reporting/host_view.py": "shown by the process that read it",
    "services/triggerer/lists/sessions.py": "sessions of lists are watched by their beats, not by their times",
    "services/triggerer/lists/source.py": "triggers of a list belong to one host",
    "services/triggerer/lists/state_writer.py": "triggers of a list belong to one host",
    "store/context.py": "the clock of SQLite is that of its host",
}
CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


def find_readers() -> Iterator[str]:
    for room in ("dags", "services", "store", "triggers"):
        for path in (SRC / room).rglob("*.py"):
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
            if any(isinstance(one.value, ast.Name) and (one.value.id, one.attr) in CLOCKS for one in nodes):
                yield str(path.relative_to(SRC))


def test_only_these_modules_read_the_clock_of_their_host() -> None:
    assert sorted(find_readers()) == sorted(READERS), "use STORE_CLOCK for what other hosts see or go by"


@pytest.mark.parametrize("ahead", [600, -600])
def test_a_sensor_that_looks_on_hosts_whose_clocks_differ_waits_as_long_as_its_timeout(
    set_clock: SetClock, ahead: float
) -> None:
    dag = sense(lambda: False, timeout=300, poke_interval=60)
    began = datetime.now(UTC)
    result = attempt(dag, "t")
    for shown in (ahead, -ahead, ahead):
        set_clock(shown)
        result = resume(dag, "t", result, "later")
        moment: Any = trigger_of(result).moment  # type: ignore[attr-defined]
        assert timedelta(seconds=60) <= moment - began <= timedelta(seconds=120)


@pytest.mark.parametrize("ahead", [600, -600])
async def test_triggers_and_sensors_of_time_go_by_the_clock_of_the_store(set_clock: SetClock, ahead: float) -> None:
    real_now = datetime.now(UTC)
    set_clock(ahead)
    assert abs(TimeDeltaTrigger(60).moment - real_now - timedelta(seconds=60)) < timedelta(seconds=30)
    sensor: Any = TimeDeltaSensor(task_id="t", delta=0)
    sensor.find_moment = lambda context: real_now + timedelta(seconds=300)
    with pytest.raises(BaseException) as raised:
        sensor.execute({})
    assert type(raised.value).__name__ == "TaskDeferred"
    sensor.find_moment = lambda context: real_now - timedelta(seconds=300)
    assert sensor.execute({}) is None

    await fired(DateTimeTrigger(real_now), seconds=60)
    early = asyncio.ensure_future(fired(DateTimeTrigger(real_now + timedelta(seconds=300)), seconds=60))
    await asyncio.sleep(0.05)
    assert not early.done()
    early.cancel()
    await asyncio.wait([early])


@pytest.fixture
async def store(postgres: PostgresServer) -> AsyncIterator[Database]:
    store = await open_store(await postgres.new_database())
    yield store
    await store.close()


@pytest.mark.parametrize("ahead", [400 * 86_400, -400 * 86_400])
async def test_a_scheduler_whose_clock_is_wrong_removes_what_is_old_by_the_clock_of_the_store(
    store: Database, set_clock: SetClock, ahead: float
) -> None:
    player = await Player(store).begin()
    for _ in range(2):
        await player.create(dag(task("a")))
        await player.play()
    set_clock(ahead)
    settings = StoreSettings(retention_runs_days=1, retention_runs_count=1)
    retention = RunRetention(store, settings, round_seconds=0.01, pause_seconds=0)
    remove, rounds = retention.remove_old, []

    async def remove_old(now_us: int) -> int:
        rounds.append(await remove(now_us))
        return rounds[-1]

    retention.remove_old = remove_old  # type: ignore[method-assign]
    running = asyncio.create_task(retention.run())
    await until(lambda: rounds)
    running.cancel()
    assert rounds[0] == 0
    assert len((await store.call(ListRuns("dag"))).rows) == 2


async def test_a_heartbeat_brings_the_time_of_the_store(store: Database, set_clock: SetClock) -> None:
    player, real_us = await Player(store).begin(), time.time_ns() // 1000
    set_clock(600)

    now_us = await store.call(BeatSession(player.worker))

    assert abs(now_us - real_us) < 120_000_000
    assert abs(STORE_CLOCK.find_error_us() - 600_000_000) < 120_000_000


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_services_whose_clocks_differ_by_twenty_minutes_run_everything_in_time(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = await postgres.new_database()
    store = await open_store(url)
    ahead = {"scheduler-1": 600, "worker-1": -600, "worker-2": 600, "triggerer-1": -600}
    with run_fleet(tmp_path, url) as fleet:
        fleet.write(FILE)
        for name, seconds in ahead.items():
            fleet.start(name, clock=seconds)
        await wait_for(store, "SELECT count(*) FROM dag", 1, "the DAG is stored")
        live = "SELECT count(*) FROM service_session WHERE ended_us IS NULL AND kind IN ('worker', 'triggerer')"
        await wait_for(store, f"{live} AND parent IS NULL", 3, fleet.describe)
        began = time.time()
        for number in range(3):
            await store.call(CreateRun("clocked", f"run{number}"))
        await wait_for(store, "SELECT count(*) FROM dag_run WHERE state = 'success'", 3, fleet.describe)
        took = time.time() - began

        assert await count(store, "SELECT count(*) FROM task_journal WHERE after = 'success'") == 3 * 7
        assert await count(store, "SELECT max(tries) FROM task_instance") == 2
        for number, index in itertools.product(range(3), range(3)):
            (part, *rest) = (await store.call(ReadLog("clocked", f"run{number}", f"waits{index}"))).rows
            lines = [line for one in (part, *rest) for line in decode_lines(zlib.decompress(one.data))]
            assert {"before", "after"} <= {line.text for line in lines}
            times = [line.time_us / 1e6 for line in lines]
            assert began - 60 < times[0] <= times[-1] < began + took + 60
        for name, seconds in ahead.items():
            await until(lambda name=name: "the clock of this host differs" in fleet.read_log(name), what=fleet.describe)
            assert f'"ahead_seconds": {seconds},' in fleet.read_log(name)
    await store.close()
