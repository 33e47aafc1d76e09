"""Two triggerers over one PostgreSQL: claims, the take-over from a dead one, and many triggers that wait.

    python -m bench.dag_triggerers claims [--count 20000]
    python -m bench.dag_triggerers takeover [--count 10000] [--lease 5]
    python -m bench.dag_triggerers many [--count 100000] [--capacity 50000]

JSON lines out. Bars: 5,000 claims a second; 10,000 triggers run elsewhere within the lease + 5 s; 100,000 triggers are
claimed within 60 s, in less than 1.5 GB together, and each triggerer takes less than a tenth of a core while they wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sqlalchemy import text
from tests.store.dags import Player, dag, task
from tests.store.server import PostgresServer

from tidemill.core.tasks.endings import Deferral
from tidemill.runtime.process.table import find_children
from tidemill.store.calls.service_calls import BeginSession, ListSessions
from tidemill.store.calls.trigger_calls import ClaimTriggers
from tidemill.store.calls.worker_calls import AttemptReport
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store

_WAITS = "tidemill.triggers.builtin.temporal.DateTimeTrigger"
_MOMENT = json.dumps({"moment": "2999-01-01T00:00:00+00:00"})
#: Repeats the first deferred task, as if it were mapped.
_CLONE_TASKS = """
INSERT INTO task_instance ({columns})
SELECT {values} FROM task_instance, generate_series(0, {last}) AS element WHERE task_instance.id = {task}
"""
_CLONE_TRIGGERS = """
INSERT INTO trigger (classpath, kwargs, restart, state, created_us, changed_us, task_id, epoch, queue, priority)
SELECT t.classpath, t.kwargs, t.restart, 'registered', t.created_us, t.changed_us, i.id, t.epoch, t.queue, t.priority
FROM trigger t, task_instance i WHERE i.map_index >= 0
"""
_CURSORS = """
INSERT INTO trigger_cursor (trigger_id) SELECT id FROM trigger WHERE id NOT IN (SELECT trigger_id FROM trigger_cursor)
"""
_HELD = (
    "SELECT count(*) FROM trigger_cursor WHERE session_id IN (SELECT id FROM service_session WHERE ended_us IS NULL)"
)


async def defer(store: Database, count: int) -> None:
    """Defer this many tasks to triggers that wait for centuries."""
    player = await Player(store).begin()
    await player.create(dag(task("t")))
    (attempt,) = await player.claim()
    await player.turn(AttemptReport(attempt.task, attempt.epoch, Deferral(_WAITS, _MOMENT, "resume")))

    def clone(connection: Any) -> None:
        named = "SELECT column_name FROM information_schema.columns WHERE table_name = 'task_instance'"
        columns = [name for (name,) in connection.execute(text(named)) if name != "id"]
        values = ["element" if name == "map_index" else name for name in columns]
        given = {"columns": ", ".join(columns), "values": ", ".join(values), "last": count - 2, "task": attempt.task}
        for statement in (_CLONE_TASKS.format(**given), _CLONE_TRIGGERS, _CURSORS):
            connection.execute(text(statement))

    await store.write(clone)
    await store.write(lambda connection: connection.execute(text("ANALYZE")))


async def count_held(store: Database) -> int:
    return int(await store.read(lambda connection: connection.execute(text(_HELD)).scalar_one()))


def say(bench: str, **row: Any) -> None:
    load = round(os.getloadavg()[0], 1)
    print(json.dumps({"bench": f"dag_triggerers {bench}", **row, "load": load}), flush=True)


async def measure_claims(store: Database, count: int) -> None:
    await defer(store, count)
    sessions = [
        await store.call(BeginSession("triggerer", "t", "machine", "boot", 17, ("default",), count)) for _ in range(2)
    ]

    async def claim(session: int) -> int:
        held = request = 0
        while True:
            request += 1
            claimed = await store.call(ClaimTriggers(session, request, 500, ("default",), held=held))
            held += len(claimed)
            if not claimed:
                return held

    began = time.perf_counter()
    held = await asyncio.gather(*map(claim, sessions))
    seconds = time.perf_counter() - began
    say("claims", claimed=sum(held), shares=held, per_second=round(sum(held) / seconds))


class Services:
    """A scheduler, which observes sessions, and triggerers, each with a process that runs triggers."""

    def __init__(self, folder: Path, url: str, lease: float, capacity: int) -> None:
        self.folder = folder
        self.env = os.environ | {
            "TIDEMILL_STORE__URL": url,
            "TIDEMILL_SERVICES__LEASE_SECONDS": str(lease),
            "TIDEMILL_TRIGGERER__CAPACITY": str(capacity),
            "TIDEMILL_METRICS__ENABLED": "false",
            "TIDEMILL_DEBUG__ENABLED": "false",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "tidemill", name.partition("-")[0], "--folder", str(self.folder)]
        with open(self.folder / f"{name}.log", "ab") as output:
            self.processes[name] = subprocess.Popen(
                command, env=self.env | {"WORKER_ID": name}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def find_tree(self, name: str) -> list[int]:
        pid = self.processes[name].pid
        return [pid, *find_children(pid)]

    def kill(self, name: str) -> None:
        """Kill the service and its process at once, as the loss of its host would."""
        for pid in self.find_tree(name):
            os.kill(pid, signal.SIGKILL)
        self.processes.pop(name).wait()

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)


async def wait_held(store: Database, wanted: int, seconds: float) -> float:
    """Wait until live sessions hold this many triggers; return how long that took."""
    began = time.perf_counter()
    while (held := await count_held(store)) < wanted:
        if time.perf_counter() - began > seconds:
            raise TimeoutError(f"{held} of {wanted} triggers are held after {seconds} s")
        await asyncio.sleep(0.1)
    return time.perf_counter() - began


async def wait_triggerers(store: Database, count: int) -> None:
    while sum(one.capacity > 0 for one in await store.call(ListSessions("triggerer"))) < count:
        await asyncio.sleep(0.1)


async def measure_takeover(store: Database, services: Services, count: int, lease: float) -> None:
    await defer(store, count)
    services.start("scheduler")
    services.start("triggerer-1")
    await wait_triggerers(store, 1)
    claimed = await wait_held(store, count, 300)
    services.start("triggerer-2")
    await wait_triggerers(store, 2)
    services.kill("triggerer-1")
    began = time.perf_counter()
    while not await store.read(_has_ended):
        await asyncio.sleep(0.05)
    lost = time.perf_counter() - began
    await wait_held(store, count, 300)
    seconds = time.perf_counter() - began
    row = {"lost_seconds": round(lost, 2), "elsewhere_seconds": round(seconds, 2)}
    say("takeover", triggers=count, lease_seconds=lease, claimed_seconds=round(claimed, 2), **row)


def _has_ended(connection: Any) -> bool:
    ended = "SELECT count(*) FROM service_session WHERE name = 'triggerer-1' AND lost = 1"
    return bool(connection.execute(text(ended)).scalar_one())


def read_memory(pids: list[int]) -> float:
    """Return the proportional memory of processes, in MB."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def read_cpu(pids: list[int]) -> float:
    """Return the CPU time of processes, in seconds."""
    ticks = sum(sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) for pid in pids)
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure_many(store: Database, services: Services, count: int) -> None:
    for number in (1, 2):
        services.start(f"triggerer-{number}")
    await wait_triggerers(store, 2)
    began = time.perf_counter()
    await defer(store, count)
    say("many", deferred=count, seconds=round(time.perf_counter() - began, 1))
    claimed = await wait_held(store, count, 600)
    await asyncio.sleep(30)
    trees = [services.find_tree(f"triggerer-{number}") for number in (1, 2)]
    before = [read_cpu(tree) for tree in trees]
    await asyncio.sleep(20)
    idle = [round((read_cpu(tree) - cpu) / 20, 3) for tree, cpu in zip(trees, before, strict=True)]
    memory = [round(read_memory(tree)) for tree in trees]
    say("many", triggers=count, claimed_seconds=round(claimed, 1), memory_mb=memory, idle_cores=idle)


async def main(given: argparse.Namespace) -> None:
    server = PostgresServer()
    try:
        url = await server.new_database()
        store = await open_store(url)
        with tempfile.TemporaryDirectory() as folder:
            services = Services(Path(folder), url, given.lease, given.capacity)
            try:
                if given.what == "claims":
                    await measure_claims(store, given.count or 20_000)
                elif given.what == "takeover":
                    await measure_takeover(store, services, given.count or 10_000, given.lease)
                else:
                    await measure_many(store, services, given.count or 100_000)
            finally:
                services.close()
                await store.close()
    finally:
        server.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["claims", "takeover", "many"])
    parser.add_argument("--count", type=int)
    parser.add_argument("--capacity", type=int, default=50_000)
    parser.add_argument("--lease", type=float, default=5.0)
    asyncio.run(main(parser.parse_args()))
