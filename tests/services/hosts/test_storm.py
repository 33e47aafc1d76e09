"""Services on many hosts are killed, suspended and cut off, and their database crashes: each task ends once.

Nothing is wrongly failed, nothing runs again after it succeeded, no connection of a dead service is left, and the
journals lead to the stored states. Each record of a Kafka topic resumes the tasks that wait for it, and the offset that
the triggerers commit is never beyond a record whose events are not stored.

FLEET_RUNS=1000 FLEET_SECONDS=120 FLEET_LEASE=10 pytest -s --long tests/services/hosts/test_storm.py
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from sqlalchemy import Connection, text
from tests.faults import FaultyProxy
from tests.services.hosts.fleet import AGAIN, Fleet, run_fleet
from tests.services.hosts.heard import HEARD_VALUES, KEYS, LAST, LISTENERS, Topic
from tests.size import sized
from tests.store.replay import StoredLife, check_replay, read_lives
from tests.store.server import PostgresServer

from tidemill.core.errors import RemoteError
from tidemill.core.tasks.task_row import ENDED
from tidemill.runtime.embedded.broker import EmbeddedBroker, free_port
from tidemill.store.calls.run_calls import CreateRun
from tidemill.store.calls.service_calls import ListSessions
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store
from tidemill.store.wire.remote import call_patiently

T = TypeVar("T")

RUNS = int(os.environ.get("FLEET_RUNS", sized(8, 1_000)))
SECONDS = float(os.environ.get("FLEET_SECONDS", sized(9.0, 120.0)))
LEASE_SECONDS = float(os.environ.get("FLEET_LEASE", sized(2.0, 10.0)))
SEED = int(os.environ.get("FLEET_SEED", "0")) or random.randrange(1_000_000)
IS_LARGE = RUNS >= 100
ELEMENTS, EVENTS = (1_000, 200) if IS_LARGE else (30, 30)
#: The runs of `heard`, whose tasks wait for records.
HEARD = 40 if IS_LARGE else 1
KILL_SECONDS = 3.0 if IS_LARGE else 2.0
RESTART_SECONDS = 2.0 if IS_LARGE else 0.5
CUT_SECONDS = SECONDS / 2
#: How long after the storm everything has ended.
CALM_SECONDS = 300.0
#: How long a service may take to be there again.
RECOVERY_SECONDS = 60.0
#: The most connections of a service, its child included.
CONNECTIONS = 4
SERVICES = (
    *("scheduler-1", "scheduler-2", "triggerer-1", "triggerer-2"),
    *("worker-1", "worker-2", "worker-3", "parser-1", "parser-2"),
)
KINDS = ("worker", "triggerer", "scheduler", "parser")
#: The service that connects through a proxy, which cuts it off; it meets no other fault.
CUT = "worker-3"
#: The tries of each task of `six`.
TRIES = {"begin": 1, "unsure": 2, "w1": 1, "w2": 1, "w3": 1, "end": 1}
TRIGGERS = """
import asyncio, os, time
from pathlib import Path
from tidemill.triggers import KafkaTrigger
from tidemill.triggers.base import BaseTrigger, TriggerEvent

BEGAN = os.path.dirname(os.path.dirname(__file__)) + "/began"

def allow(total):
    \"\"\"Return how many values of a source are there; all of them are once the file has the age of the storm.\"\"\"
    return total * (time.time() - os.stat(BEGAN).st_mtime) / PACE

class Later(BaseTrigger):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
    def serialize(self):
        return "paced.Later", {"seconds": self.seconds}
    async def run(self):
        await asyncio.sleep(self.seconds)
        yield TriggerEvent(self.seconds)

class Ticks(BaseTrigger):
    def __init__(self, count):
        super().__init__()
        self.count = count
    def serialize(self):
        return "paced.Ticks", {"count": self.count}
    async def run(self):
        for number in range(self.count):
            while number >= allow(self.count):
                await asyncio.sleep(0.05)
            yield TriggerEvent(number, identity=str(number))

class Heard(KafkaTrigger):
    \"\"\"Fires for the records with a key; makes a file once it has subscribed.\"\"\"
    def __init__(self, made, **rest):
        super().__init__(**rest)
        self.made = made
    def serialize(self):
        return "paced.Heard", super().serialize()[1] | {"made": self.made}
    async def filter_shared_stream(self, shared_stream):
        Path(self.made).touch()
        async for event in super().filter_shared_stream(shared_stream):
            yield event
"""
FILE = """
import os, time
from datetime import timedelta
from paced import Heard, Later, Ticks, allow
from tidemill.dags import DAG, BaseOperator, StreamOperator, task

AGAIN = dict(retries=9, retry_delay=timedelta(seconds=0.1))

class Wait(BaseOperator):
    def __init__(self, seconds, **rest):
        super().__init__(**rest)
        self.seconds = seconds
    def execute(self, context):
        self.defer(trigger=Later(self.seconds), method_name="resume")
    def resume(self, context, event):
        return event

class Read(BaseOperator):
    stream_max_events = 10
    stream_linger = 0.2
    def execute(self, context):
        self.defer(trigger=Ticks(EVENTS))
    def handle_trigger_events(self, events, context):
        for event in events:
            context["stream"].emit(event.payload, identity=event.identity)
        context["stream"].checkpoint(events[-1].payload)
    def on_stream_end(self, context):
        return context["stream"].cursor

class Listen(BaseOperator):
    def __init__(self, key, **rest):
        super().__init__(**rest)
        self.key = key
    def execute(self, context):
        run = context["run_id"]
        made = f"{os.path.dirname(os.path.dirname(__file__))}/heard/{run}.{self.task_id}"
        self.defer(trigger=Heard(made, **TOPIC, key=f"{run}.{self.key}"), method_name="resume")
    def resume(self, context, event):
        return event["value"]

with DAG("heard", schedule=None, max_active_runs=100, max_active_tasks=1000):
    for number in range(KEYS * LISTENERS):
        Listen(task_id=f"l{number}", key=number % KEYS)

with DAG("six", schedule=None, max_active_runs=100):
    @task
    def begin():
        time.sleep(0.1)
    @task(retries=1, retry_delay=timedelta(seconds=0.1))
    def unsure(ti):
        if ti.try_number == 1:
            raise RuntimeError("the first try fails")
    @task
    def end():
        time.sleep(0.1)
    waits = [Wait(task_id=f"w{number}", seconds=number / 2) for number in (1, 2, 3)]
    begin() >> [*waits, unsure()] >> end()

with DAG("mapped", schedule=None):
    @task(**AGAIN)
    def numbers():
        for number in range(ELEMENTS):
            while number >= allow(ELEMENTS):
                time.sleep(0.05)
            yield number
    @task(**AGAIN)
    def double(number):
        return 2 * number
    @task(**AGAIN)
    def collect(numbers):
        return list(numbers)
    collect(double.expand(number=numbers()))

with DAG("streamed", schedule=None, max_active_tasks=50):
    read = Read(task_id="read", **AGAIN)
    source = StreamOperator(task_id="source", trigger=Ticks(EVENTS), **AGAIN)
    collect.override(task_id="collect_read")(double.expand(number=read.output))
    collect.override(task_id="collect_source")(double.override(task_id="triple").expand(number=source.output))
"""
OF_SERVICES = "FROM pg_stat_activity WHERE datname = current_database() AND client_port > 0"


class Storm:
    """The faults that services meet.

    Args:
        fleet: The services.
        server: Their database.
        url: Its URL.
        proxy: Leads to the server, too.
        proxied: The URL of the database through the proxy.

    Attributes:
        kills: The names and process ids of the services that were killed, and the times.
        faults: All faults, for people.
    """

    def __init__(self, fleet: Fleet, server: PostgresServer, url: str, proxy: FaultyProxy, proxied: str) -> None:
        self._fleet, self._server, self._proxy = fleet, server, proxy
        self._choose = random.Random(SEED)
        self._urls = {slot: proxied if slot == CUT else url for slot in SERVICES}
        #: The name of the service in each slot: every second one that was killed comes back under another name.
        self._names = {slot: slot for slot in SERVICES}
        self._absent = {CUT}
        self._began = time.monotonic()
        self.kills: list[tuple[str, int, int]] = []
        self.faults: list[str] = []

    def start_services(self) -> None:
        """Start all services."""
        for slot in SERVICES:
            self._start(slot)

    async def rage(self) -> None:
        """Cause all faults."""
        self._began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._kill_services())
            group.create_task(self._suspend_service())
            group.create_task(self._cut_service_off())
            group.create_task(self._crash_database())

    def _start(self, slot: str) -> None:
        self._fleet.start(self._names[slot], TIDEMILL_DAGS__PARSER="separate", TIDEMILL_STORE__URL=self._urls[slot])

    def _note(self, fault: str) -> None:
        self.faults.append(f"{time.monotonic() - self._began:.1f} s: {fault}")

    def _choose_slot(self, *kinds: str) -> str:
        present = [slot for slot in SERVICES if slot not in self._absent and slot.partition("-")[0] in kinds]
        slot = self._choose.choice(present)
        name = self._names[slot]
        assert self._fleet.services[name].poll() is None, f"{name} has ended by itself\n{self._fleet.describe()}"
        self._absent.add(slot)
        return slot

    async def _kill_services(self) -> None:
        async with asyncio.TaskGroup() as restarts:
            for number in range(int(SECONDS / KILL_SECONDS)):
                await asyncio.sleep(KILL_SECONDS)
                # A short storm kills one of each kind.
                slot = self._choose_slot(*(KINDS if IS_LARGE else (KINDS[number % len(KINDS)],)))
                name = self._names[slot]
                pid = self._fleet.services[name].pid
                killed_us = time.time_ns() // 1_000
                self._fleet.kill(name)
                self.kills.append((name, pid, killed_us))
                self._note(f"{name} is killed")
                if number % 2:
                    self._names[slot] = f"{slot}-{number}"
                restarts.create_task(self._restart(slot, self._choose.uniform(0.0, RESTART_SECONDS)))

    async def _restart(self, slot: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._start(slot)
        self._absent.remove(slot)

    async def _suspend_service(self) -> None:
        await asyncio.sleep(SECONDS / 10)
        slot = self._choose_slot("worker", "triggerer", "scheduler")
        name = self._names[slot]
        self._fleet.freeze(name)
        self._note(f"{name} is suspended")
        await asyncio.sleep(2 * LEASE_SECONDS)
        self._fleet.thaw(name)
        self._note(f"{name} goes on")
        self._absent.remove(slot)

    async def _cut_service_off(self) -> None:
        await asyncio.sleep(SECONDS / 4)
        self._proxy.hang()
        self._note(f"{CUT} is cut off")
        await asyncio.sleep(CUT_SECONDS)
        self._proxy.up()
        self._note(f"{CUT} is connected")

    async def _crash_database(self) -> None:
        await asyncio.sleep(0.6 * SECONDS)
        self._note("the database crashes")
        await asyncio.to_thread(self._server.stop, "immediate")
        await asyncio.to_thread(self._server.start)
        self._note("the database is back")


class Site:
    """Services, a storm that hits them, and their database, which is read however often it is away.

    Attributes:
        fleet: The services.
        server: The server of the database.
        storm: The storm.
        store: The database.
    """

    def __init__(self, fleet: Fleet, server: PostgresServer, storm: Storm, store: Database) -> None:
        self.fleet, self.server, self.storm, self.store = fleet, server, storm, store

    def describe(self) -> str:
        """Return the faults and the ends of all logs."""
        faults = "\n".join(self.storm.faults)
        return f"FLEET_SEED={SEED}\n{faults}\n{self.fleet.describe()}"

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Read the database."""
        while True:
            try:
                return await self.store.read(work)
            except RemoteError as error:
                if not error.retryable:
                    raise
            await asyncio.sleep(0.1)

    async def rows(self, statement: str) -> Sequence[Sequence[Any]]:
        """Return the rows that a statement selects."""
        return await self.read(lambda connection: connection.execute(text(statement)).all())

    async def count(self, statement: str) -> int:
        """Return the number that a statement selects."""
        return int((await self.rows(statement))[0][0])

    async def wait(self, statement: str, wanted: int, seconds: float = RECOVERY_SECONDS) -> None:
        """Wait until a statement selects a number."""
        began = time.monotonic()
        while (found := await self.count(statement)) != wanted:
            if time.monotonic() - began > seconds:
                raise AssertionError(f"{found} instead of {wanted}: {statement}\n{self.describe()}")
            await asyncio.sleep(0.1)

    async def wait_live(self) -> None:
        """Wait until exactly the services that run have sessions."""
        live = "SELECT count(*) FROM service_session WHERE ended_us IS NULL AND parent IS NULL"
        await self.wait(live, len(SERVICES))


@contextmanager
def run_server() -> Iterator[PostgresServer]:
    """Yield a server that listens on a port, and may be stopped."""
    server = PostgresServer(free_port())
    try:
        yield server
    finally:
        server.remove()


@asynccontextmanager
async def run_site(folder: Path, server: PostgresServer, topic: Topic) -> AsyncIterator[Site]:
    """Yield a site whose services are not started yet."""
    await server.add_user()
    direct = await server.new_database()
    store = await open_store(direct)
    name = urlsplit(direct).path.removeprefix("/")
    assert server.port is not None
    proxy = FaultyProxy(server.port)
    try:
        with run_fleet(folder, server.tcp_url(name), LEASE_SECONDS) as fleet:
            (folder / "dags" / "paced.py").write_text(TRIGGERS.replace("PACE", str(0.7 * SECONDS)))
            sizes = {
                "ELEMENTS": ELEMENTS,
                "EVENTS": EVENTS,
                "KEYS": KEYS,
                "LISTENERS": LISTENERS,
                "TOPIC": topic.kwargs,
            }
            file = FILE
            for word, value in sizes.items():
                file = file.replace(word, repr(value))
            fleet.write(file)
            storm = Storm(fleet, server, server.tcp_url(name), proxy, server.tcp_url(name, proxy.port))
            yield Site(fleet, server, storm, store)
    finally:
        proxy.close()
        await store.close()


@pytest.mark.long
@pytest.mark.timeout(120 + 2 * SECONDS + 2 * CALM_SECONDS)
async def test_each_task_ends_once_though_services_die_freeze_and_lose_their_database(
    tmp_path: Path, embedded_kafka: EmbeddedBroker
) -> None:
    began = time.monotonic()
    topic = Topic(embedded_kafka, tmp_path / "heard", random.Random(SEED))
    with run_server() as server:
        async with run_site(tmp_path, server, topic) as site:
            site.storm.start_services()
            await site.wait("SELECT count(*) FROM dag", 4)
            await site.wait_live()
            (tmp_path / "began").touch()
            ready = time.monotonic()
            watch = asyncio.create_task(topic.watch(site.rows))
            names = [f"h{number}" for number in range(HEARD)]
            writing = asyncio.create_task(topic.write_all(names))
            await asyncio.gather(site.storm.rage(), create_runs(site.store))
            over = time.monotonic()
            await site.wait("SELECT count(*) FROM dag_run WHERE ended_us IS NULL", 0, CALM_SECONDS)
            calm = time.monotonic()
            await writing
            await call_patiently(site.store, CreateRun("heard", run_id=LAST, by="tester", request=LAST))
            await topic.finish()
            await site.wait("SELECT count(*) FROM dag_run WHERE ended_us IS NULL", 0)
            watch.cancel()

            await check_tasks(site)
            topic.check(await site.rows(HEARD_VALUES))
            await site.wait_live()
            await check_connections(site)
            await stop_services(site)
            print(f"started in {ready - began:.1f} s, storm {over - ready:.1f} s, ended {calm - over:.1f} s later")
            print(f"committed offsets were compared with stored events {topic.looks} times")
            await describe_storm(site)


async def create_runs(store: Database) -> None:
    """Create all runs, those of `six` one after the other during the storm."""
    began = time.monotonic()
    for dag in ("mapped", "streamed"):
        await call_patiently(store, CreateRun(dag, run_id="r", by="tester", request="r"))
    names = [(number / RUNS, "six", f"r{number}") for number in range(RUNS)]
    names += [(number / HEARD, "heard", f"h{number}") for number in range(HEARD)]
    for part, dag, name in sorted(names):
        await asyncio.sleep(began + 0.8 * SECONDS * part - time.monotonic())
        await call_patiently(store, CreateRun(dag, run_id=name, by="tester", request=name))


async def check_tasks(site: Site) -> None:
    """Check the state and the journal of each task and element, and the results."""
    bad = await site.rows("SELECT run_id, state, reason FROM dag_run WHERE state <> 'success'")
    assert not bad, site.describe()
    assert await site.count(AGAIN) == 0
    runs = [row[0] for row in await site.rows("SELECT id FROM dag_run ORDER BY id")]
    assert len(runs) == RUNS + 2 + HEARD + 1
    lives: list[StoredLife] = []
    for first in range(0, len(runs), 50):
        part = runs[first : first + 50]
        lives += await site.read(lambda connection, part=part: read_lives(connection, part))  # type: ignore[misc]
    # Beside the elements, a map has its head, and there are their sources and the tasks that collect results.
    listening = (HEARD + 1) * KEYS * LISTENERS
    assert len(lives) == len(TRIES) * RUNS + (ELEMENTS + 3) + 2 * (EVENTS + 3) + listening
    for life in lives:
        check_life(life)
        check_replay(life)
    results = await site.rows(
        "SELECT t.task_id, x.value FROM xcom x JOIN task_instance t ON t.id = x.task "
        "WHERE x.key = 'return_value' AND t.task_id IN ('collect', 'collect_read', 'collect_source', 'read')"
    )
    doubles = {
        name: [2 * number for number in range(count)]
        for name, count in (("collect", ELEMENTS), ("collect_read", EVENTS), ("collect_source", EVENTS))
    }
    assert {name: json.loads(value) for name, value in results} == {"read": EVENTS - 1, **doubles}


def check_life(life: StoredLife) -> None:
    """Check that a task ended once, with success, and that none of its attempts was wrongly failed."""
    states = [line.after for line in life.journal]
    assert [line.epoch for line in life.journal] == list(range(1, life.row.epoch + 1)), life
    assert [state for state in states if state in ENDED] == states[-1:] == ["success"], life
    failed = [line.kind for line in life.journal if line.kind in ("failed", "trigger-failed", "file-missing")]
    assert failed == (["failed"] if life.task_id == "unsure" else []), life
    assert life.row.tries == TRIES.get(life.task_id, life.row.tries), life
    fired = [line for line in life.journal if line.kind == "trigger-fired"]
    if life.task_id.startswith(("l", "w")):
        assert len(fired) == 1, life


async def check_connections(site: Site) -> None:
    """Check that each connection belongs to a process that lives, and that no service has too many."""
    began = time.monotonic()
    while True:
        ports = {row[0] for row in await site.rows(f"SELECT client_port {OF_SERVICES}")}
        dead = ports - find_open_ports()
        if not dead and len(ports) <= CONNECTIONS * len(SERVICES):
            return
        assert time.monotonic() - began < RECOVERY_SECONDS, (dead, len(ports), site.describe())
        await asyncio.sleep(0.1)


def find_open_ports() -> set[int]:
    """Return the TCP ports of the sockets that processes of this machine have open."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[9] != "0"}


async def stop_services(site: Site) -> None:
    """Stop all services in order, and check that nothing of them is left in the database."""
    processes = dict(site.fleet.services)
    assert {process.poll() for process in processes.values()} == {None}, site.describe()
    for process in processes.values():
        process.terminate()
    codes = {name: await asyncio.to_thread(process.wait, 60) for name, process in processes.items()}
    assert set(codes.values()) == {0}, (codes, site.describe())
    site.fleet.services.clear()
    assert await call_patiently(site.store, ListSessions()) == ()
    await site.wait(f"SELECT count(*) {OF_SERVICES}", 0)
    faulty = [path.name for path in site.fleet.folder.glob("*.log") if "this is a bug in tidemill" in path.read_text()]
    assert not faulty, site.describe()


async def describe_storm(site: Site) -> None:
    """Print the measures of the storm."""
    take_overs = sorted([one async for one in find_take_overs(site)])
    (middle, _), (longest, name) = take_overs[len(take_overs) // 2], take_overs[-1]
    deadlocks = (site.server.folder / "log").read_text(errors="replace").count("deadlock detected")
    changes = await site.rows("SELECT split_part(given, ' ', 1), count(*) FROM task_journal GROUP BY 1 ORDER BY 1")
    states = await site.rows("SELECT state, count(*) FROM task_instance GROUP BY 1")
    print(
        f"FLEET_SEED={SEED}, load {os.getloadavg()[0]:.1f}",
        f"killed: {dict(Counter(killed.partition('-')[0] for killed, *_ in site.storm.kills))}",
        f"sessions ended after a kill: p50 {middle:.2f} s, longest {longest:.2f} s ({name})",
        f"deadlocks: {deadlocks}",
        f"states: {dict(map(tuple, states))}",
        f"inputs: {dict(map(tuple, changes))}",
        *site.storm.faults,
        sep="\n  ",
    )


async def find_take_overs(site: Site) -> AsyncIterator[tuple[float, str]]:
    """Yield the seconds between the kill of each service and the end of its session, and the name of the service."""
    for name, pid, killed_us in site.storm.kills:
        rows = await site.rows(
            f"SELECT ended_us FROM service_session WHERE parent IS NULL AND pid = {pid} "
            f"AND started_us < {killed_us} AND ended_us >= {killed_us} ORDER BY id DESC LIMIT 1"
        )
        if rows:
            yield (rows[0][0] - killed_us) / 1e6, name
        else:
            print(f"{name} (process {pid}) had no session yet when it was killed")
