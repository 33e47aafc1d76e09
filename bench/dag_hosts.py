"""How fast tasks run on many hosts: schedulers, triggerers and workers as processes of their own over one PostgreSQL.

    python -m bench.dag_hosts resume [--one 100] [--triggerers 2] [--workers 3] [--reuse]
    python -m bench.dag_hosts many [--count 100000] [--triggerers 2] [--workers 3] [--schedulers 1] [--reuse]
    python -m bench.dag_hosts tasks [--runs 10] [--workers 3] [--schedulers 1] [--reuse]

JSON lines out. The database server, which does not sync its files, and everything else share the machine. Times are
those of the tasks' and triggers' own clocks, and of the journal. `cores` says how many cores each kind of service used,
and everything on the machine.

    resume      a trigger yields its event, until the resumed method runs: 100 one by one (bar: p50 50 ms, p99 250 ms),
                and three times 200 at once (bar: p50 800 ms). Each event is due 400 ms after its run is created; it is
                later than that if no triggerer claims the trigger by then
    many        tasks that wait in triggers, which yield their events all at once: resumed tasks/s by the journal (bar:
                1,000), and tasks/s whose resumed method has returned
    tasks       runs of 1,000 trivial tasks that wait for none, three runs at once (bar: 500 tasks/s), with a process
                for each task or with worker.reuse_processes
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
from bench.dag_tree import percentile
from bench.harness import TICKS, report, tree_cpu_seconds
from tests.store.server import PostgresServer

from tidemill.runtime.json.codec import decode, encode_sorted
from tidemill.store.calls.dag_calls import GetDag
from tidemill.store.calls.run_calls import CreateRun, GetRun, RunRecord
from tidemill.store.calls.service_calls import ListFiles, ListSessions
from tidemill.store.calls.xcom_calls import ListXComs
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store

START_SECONDS, END_SECONDS = 60.0, 1800.0
TRIGGERS = """
import asyncio, os, time
from tidemill.triggers.base import BaseTrigger, TriggerEvent

class Stamped(BaseTrigger):
    def __init__(self, moment):
        super().__init__()
        self.moment = moment
    def serialize(self):
        return "stamped.Stamped", {"moment": self.moment}
    async def run(self):
        await asyncio.sleep(max(0.0, self.moment - time.time()))
        yield TriggerEvent(time.time())

class Released(BaseTrigger):
    \"\"\"Fires once a file exists; one asyncio task of the process looks for it.\"\"\"
    looking = None
    def __init__(self, path):
        super().__init__()
        self.path = path
    def serialize(self):
        return "stamped.Released", {"path": self.path}
    async def run(self):
        if Released.looking is None:
            Released.looking = asyncio.create_task(self.look())
        await asyncio.shield(Released.looking)
        yield TriggerEvent(time.time())
    async def look(self):
        while not os.path.exists(self.path):
            await asyncio.sleep(0.2)
"""
DAGS = """
import time
from tidemill.dags import DAG, BaseOperator, StartTriggerArgs, task
from stamped import Stamped

class Waits(BaseOperator):
    def execute(self, context):
        self.defer(trigger=Stamped(context["params"]["moment"]), method_name="resume")
    def resume(self, context, event=None):
        return [time.time() - event, event - context["params"]["moment"]]

class Starts(BaseOperator):
    start_from_trigger = True
    start_trigger_args = StartTriggerArgs("stamped.Released", "resume", {"path": "RELEASED"})
    def __init__(self, number, **kwargs):
        super().__init__(**kwargs)
        self.number = number
    def resume(self, context, event=None):
        pass

def now():
    return time.time()

@task
def numbers(params):
    yield from range(params["count"])

with DAG("one", params={"moment": 0.0}):
    Waits(task_id="waits")
with DAG("at_once", params={"moment": 0.0}):
    for n in range(200):
        Waits(task_id=f"waits{n}")
with DAG("deferred", params={"count": 1}):
    for n in range(10):
        Starts.partial(task_id=f"waits{n}", max_outstanding=10_000).expand(number=numbers())
with DAG("tasks"):
    for n in range(1000):
        task(task_id=f"t{n}")(now)()
"""
#: How many tasks made a transition, the first and the last time, and when nine tenths of them had made it.
_RATES = """
SELECT count(*), min(at_us), max(at_us), percentile_disc(0.9) WITHIN GROUP (ORDER BY at_us)
FROM task_journal JOIN task_instance ON task_instance.id = task
WHERE run = $1 AND map_index >= 0 AND {condition}
"""


def read_busy_seconds() -> float:
    """Return the CPU time of everything on this machine."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(rest)) / TICKS


class Hosts:
    """Services over one database, each as its command starts it.

    Args:
        folder: Has the DAG files in `dags`, and the logs.
        url: The database.
        settings: Environment variables of all services.
    """

    def __init__(self, folder: Path, url: str, **settings: str) -> None:
        self.folder = folder
        (folder / "dags").mkdir()
        (folder / "dags" / "stamped.py").write_text(TRIGGERS)
        (folder / "dags" / "hosts.py").write_text(DAGS.replace("RELEASED", str(folder / "released")))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
        self._environment = clean | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TIDEMILL_STORE__URL": url,
            "TIDEMILL_TRIGGERER__CAPACITY": "60000",
            "TIDEMILL_METRICS__ENABLED": "false",
            "TIDEMILL_DEBUG__ENABLED": "false",
            **settings,
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self, store: Database, **numbers: int) -> None:
        """Start so many services of each kind, and wait until all can work and all DAGs are stored."""
        for kind, number in numbers.items():
            for one in range(1, number + 1):
                self._start(kind, f"{kind}-{one}")
        async with asyncio.timeout(START_SECONDS):
            while len(await store.call(ListSessions())) < sum(numbers.values()):
                await asyncio.sleep(0.1)
            while not (found := await store.call(GetDag("tasks"))) or not found.dag.active:
                errors = await store.call(ListFiles(broken=True))
                assert not errors, errors
                await asyncio.sleep(0.1)
        # Workers and triggerers import the modules of tasks before they claim any.
        await asyncio.sleep(3.0)

    def _start(self, kind: str, name: str) -> None:
        command = [sys.executable, "-m", "tidemill", kind, "--folder", str(self.folder / "dags")]
        with open(self.folder / f"{name}.log", "ab") as output:
            self.processes[name] = subprocess.Popen(
                command,
                env=self._environment | {"WORKER_ID": name},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def read_cpu(self, server: PostgresServer) -> dict[str, float]:
        """Return the CPU seconds of each kind of service with its children, and of the database server."""
        spent = {"machine": read_busy_seconds(), "postgresql": tree_cpu_seconds(server.pids()[0])}
        for name, process in self.processes.items():
            kind = name.partition("-")[0]
            spent[kind] = spent.get(kind, 0.0) + tree_cpu_seconds(process.pid)
        return spent

    def close(self) -> None:
        """Stop all services."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for name, process in self.processes.items():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                print((self.folder / f"{name}.log").read_text()[-2000:], file=sys.stderr)
                process.kill()
                process.wait()


class Site:
    """The services, their database, and a connection to it."""

    def __init__(self, hosts: Hosts, server: PostgresServer, store: Database, url: str) -> None:
        self.hosts = hosts
        self.server = server
        self.store = store
        self.url = url

    async def create(self, dag_id: str, **conf: object) -> RunRecord:
        return await self.store.call(CreateRun(dag_id, conf=encode_sorted(conf)))

    async def wait(self, created: RunRecord, pause: float = 0.02) -> RunRecord:
        async with asyncio.timeout(END_SECONDS):
            while True:
                found = await self.store.call(GetRun(created.dag_id, created.run_id))
                assert found is not None
                if found.state in ("success", "failed"):
                    assert found.state == "success", found
                    return found
                await asyncio.sleep(pause)

    async def play(self, dag_id: str, **conf: object) -> list[Any]:
        """Run a DAG, and return what its tasks returned."""
        run = await self.wait(await self.create(dag_id, **conf))
        return [decode(row.value) for row in (await self.store.call(ListXComs(dag_id, run.run_id, limit=1000))).rows]


class Meter:
    """Measures the CPU time of all services from its start."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._began, self._spent = time.monotonic(), site.hosts.read_cpu(site.server)

    def read(self) -> dict[str, float]:
        """Return the cores that each kind of service has used since."""
        seconds, spent = time.monotonic() - self._began, self._site.hosts.read_cpu(self._site.server)
        return {kind: round((spent[kind] - before) / seconds, 2) for kind, before in self._spent.items()}


async def measure_resume(site: Site, given: argparse.Namespace) -> None:
    delays = []
    meter = Meter(site)
    for _ in range(given.one + 10):
        delays += await site.play("one", moment=time.time() + 0.4)
    _say("resume, one by one", meter, delays[10:])
    for _ in range(3):
        meter = Meter(site)
        _say("resume, 200 at once", meter, await site.play("at_once", moment=time.time() + 4))


def _say(name: str, meter: Meter, found: list[tuple[float, float]]) -> None:
    delays, late = zip(*found, strict=True)
    figures = {f"p{share}_ms": round(1e3 * percentile(delays, share / 100), 1) for share in (50, 99)}
    figures["event_late_p50_ms"] = round(1e3 * percentile(late, 0.5), 1)
    report(bench=f"dag_hosts {name}", count=len(delays), **figures, cores=meter.read(), load=os.getloadavg()[0])


async def measure_many(site: Site, given: argparse.Namespace) -> None:
    count = given.count
    connection = await asyncpg.connect(site.url)
    began, meter = time.monotonic(), Meter(site)
    run = await site.create("deferred", count=count // 10)
    waiting = "SELECT count(*) FROM trigger_cursor WHERE session_id IS NOT NULL"
    async with asyncio.timeout(END_SECONDS):
        while (found := await connection.fetchval(waiting)) < count:
            await asyncio.sleep(1.0)
    seconds = time.monotonic() - began
    report(bench="dag_hosts many: start", deferred=found, per_s=found / seconds, seconds=seconds, cores=meter.read())
    # As autovacuum does, which the server of the tests leaves out.
    await connection.execute("ANALYZE")
    await asyncio.sleep(5.0)
    meter = Meter(site)
    released_us = time.time() * 1e6
    (site.hosts.folder / "released").touch()
    while await connection.fetchval(
        "SELECT EXISTS (SELECT FROM task_instance WHERE run = $1 AND map_index >= 0 AND state = 'deferred')", run.id
    ):
        await asyncio.sleep(0.5)
    cores = meter.read()
    resumed = await _read_rates(connection, run, "before = 'deferred'", released_us)
    report(bench="dag_hosts many: resumed", **resumed, cores=cores, load=os.getloadavg()[0])
    meter = Meter(site)
    await site.wait(run, 1.0)
    ended = await _read_rates(connection, run, "after = 'success'", released_us)
    report(bench="dag_hosts many: ended", **ended, cores_after=meter.read(), load=os.getloadavg()[0])
    await connection.close()


async def _read_rates(
    connection: asyncpg.Connection, run: RunRecord, condition: str, began_us: float
) -> dict[str, float]:
    found, first, last, most = await connection.fetchrow(_RATES.format(condition=condition), run.id)
    return {
        "tasks": found,
        "per_s": found / ((last - began_us) / 1e6),
        "first_s": (first - began_us) / 1e6,
        "nine_tenths_s": (most - began_us) / 1e6,
        "last_s": (last - began_us) / 1e6,
    }


async def measure_tasks(site: Site, given: argparse.Namespace) -> None:
    await site.play("tasks")
    meter, began = Meter(site), time.monotonic()
    runs: Iterator[int] = iter(range(given.runs))

    async def play() -> None:
        for _ in runs:
            await site.wait(await site.create("tasks"), 0.1)

    await asyncio.gather(*(play() for _ in range(3)))
    rate = 1000 * given.runs / (time.monotonic() - began)
    mode = "reused" if given.reuse else "a process each"
    about = {"workers": given.workers, "schedulers": given.schedulers}
    report(bench=f"dag_hosts tasks, {mode}", **about, tasks_per_s=rate, cores=meter.read(), load=os.getloadavg()[0])


BENCHES = {"resume": measure_resume, "many": measure_many, "tasks": measure_tasks}


async def main(given: argparse.Namespace) -> None:
    server = PostgresServer()
    try:
        url = await server.new_database()
        store = await open_store(url)
        with tempfile.TemporaryDirectory() as name:
            settings = {"TIDEMILL_WORKER__REUSE_PROCESSES": '["*"]'} if given.reuse else {}
            hosts = Hosts(Path(name), url, **settings)
            try:
                triggerers = 0 if given.what == "tasks" else given.triggerers
                await hosts.start(store, scheduler=given.schedulers, triggerer=triggerers, worker=given.workers)
                await BENCHES[given.what](Site(hosts, server, store, url), given)
            finally:
                hosts.close()
                await store.close()
    finally:
        server.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--one", type=int, default=100)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--schedulers", type=int, default=1)
    parser.add_argument("--triggerers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--reuse", action="store_true")
    asyncio.run(main(parser.parse_args()))
