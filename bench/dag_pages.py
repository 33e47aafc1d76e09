"""How fast the web UI lists runs, tasks, elements and services of a large PostgreSQL database.

    python -m bench.dag_pages [--runs 5000] [--elements 450000] [--requests 7] [--slow 150] [PART-OF-A-NAME ...]

JSON lines out: one for each list whose median exceeds `--slow` milliseconds, and one for all (bar: 150 ms each). The
rows are made in the database: runs of 100 tasks, of which some failed and the newest are running, runs of 1,000 tasks,
a few runs of other DAGs, and a mapped task whose elements are in all states; a million tasks by default.
Requests go to `tidemill web`, over a new connection each: the first page, a page in the middle, and each
filter of the page and of the API. `cpu_ms` is the CPU time of `tidemill web` and of the database per request.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import yaml
from bench.harness import report, tree_cpu_seconds
from tests.store.dags import Player, dag, mapped, task
from tests.store.server import PostgresServer

from tidemill.core.tasks.structure import DagStructure
from tidemill.runtime.embedded.broker import free_port
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.service_calls import BeginSession
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store
from tidemill.web.access.hashes import hash_token
from tidemill.web.dags.api import ELEMENT_STATES, RUN_STATES, TASK_STATES

TOKEN = "the-token-of-the-bench"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
START_SECONDS = 60.0
_NOW = "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"
_CLONE_RUNS = """
INSERT INTO dag_run ({columns}) SELECT {values} FROM dag_run, generate_series(1, {count}) AS number
WHERE dag_run.id = {run} ORDER BY number
"""
_CLONE_TASKS = """
INSERT INTO task_instance ({columns})
SELECT {values} FROM task_instance AS t, dag_run AS r WHERE t.run = {run} AND r.dag = t.dag AND r.id <> t.run
ORDER BY r.id, t.number
"""
#: The newest 16 stay as they are, and every fiftieth of the others has failed.
_END_RUNS = """
UPDATE dag_run SET state = CASE WHEN id % 50 = 0 THEN 'failed' ELSE 'success' END, unfinished = 0,
started_us = created_us, ended_us = created_us + 60000000
WHERE dag = {dag} AND id NOT IN (SELECT id FROM dag_run WHERE dag = {dag} ORDER BY id DESC LIMIT 16)
"""
_END_TASKS = """
UPDATE task_instance AS t SET state = CASE WHEN r.state = 'failed' AND t.number = 7 THEN 'failed' ELSE 'success' END,
pending = 0, tries = 1, started_us = r.created_us, ended_us = r.created_us + 1000000, epoch = 4
FROM dag_run AS r WHERE r.id = t.run AND r.dag = {dag} AND r.ended_us IS NOT NULL
"""
#: States that few elements are in; one element in so many has it.
_RARE = {
    "failed": 1_000,
    "skipped": 1_001,
    "upstream_failed": 1_003,
    "running": 1_501,
    "queued": 1_503,
    "scheduled": 1_505,
    "deferred": 151,
    "up_for_retry": 1_507,
}
_ELEMENTS = """
INSERT INTO task_instance ({columns}) SELECT {values} FROM
(SELECT number AS index, CASE {cases} ELSE 'success' END AS new FROM generate_series(0, {last}) AS number) AS e,
task_instance AS t WHERE t.run = {run} AND t.task_id = 'each' AND t.map_index = -1 ORDER BY e.index
"""
_TRIGGERS = """
INSERT INTO trigger (classpath, kwargs, restart, state, created_us, changed_us, task_id, epoch, queue, priority)
SELECT 'tidemill.triggers.builtin.temporal.DateTimeTrigger', '{{"moment": "2999-01-01T00:00:00+00:00"}}', 'resume',
'running', {now}, {now}, id, epoch, 'default', 1 FROM task_instance WHERE state = 'deferred'
"""
_CURSORS = (
    "INSERT INTO trigger_cursor (trigger_id, session_id, token, claim_request) SELECT id, {session}, 1, 1 FROM trigger"
)
_JOURNAL = """
INSERT INTO task_journal (task, epoch, before, after, given, at_us, said_by)
SELECT id, 1, 'none', 'scheduled', 'Ready', since_us, 'bench' FROM task_instance ON CONFLICT DO NOTHING
"""


class Rows:
    """Makes rows of one DAG after the other."""

    def __init__(self, store: Database, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self.player = Player(store)
        self.columns: dict[str, list[str]] = {}

    async def execute(self, *statements: str) -> None:
        for statement in statements:
            await self._connection.execute(statement)

    async def read(self, statement: str) -> list[Any]:
        return [tuple(row) for row in await self._connection.fetch(statement)]

    async def build(self, table: str, prefix: str, **values: str) -> dict[str, str]:
        """Return the columns of a copied row, and their values."""
        if table not in self.columns:
            named = f"SELECT column_name FROM information_schema.columns WHERE table_name = '{table}'"
            self.columns[table] = [name for (name,) in await self.read(named) if name != "id"]
        columns = self.columns[table]
        chosen = [f"({values[name]})" if name in values else f"{prefix}.{name}" for name in columns]
        return {"columns": ", ".join(columns), "values": ", ".join(chosen)}

    async def add_runs(self, structure: DagStructure, count: int) -> RunRecord:
        """Store a DAG with so many runs; the newest 16 have not ended. Return the first run."""
        run = await self.player.create(structure)
        await self.player.schedule()
        ((number,),) = await self.read(f"SELECT dag FROM dag_run WHERE id = {run.id}")
        logical = "coalesce(dag_run.logical_us, dag_run.created_us) + 1000000 * CAST(number AS bigint)"
        # Runs without a request of a client may be many.
        about = {"run_id": "'r' || number", "logical_us": logical, "request": "NULL"}
        runs = await self.build("dag_run", "dag_run", **about)
        tasks = await self.build("task_instance", "t", run="r.id")
        await self.execute(
            _CLONE_RUNS.format(**runs, count=count - 1, run=run.id),
            _CLONE_TASKS.format(**tasks, run=run.id),
            _END_RUNS.format(dag=number),
            _END_TASKS.format(dag=number),
        )
        return run

    async def add_elements(self, count: int, worker: int) -> RunRecord:
        """Store a DAG with a mapped task of so many elements; return its run."""
        run = await self.player.create(dag(task("source"), mapped("each", "source"), id="wide"))
        await self.player.schedule()
        cases = " ".join(f"WHEN number % {every} = 1 THEN '{state}'" for state, every in _RARE.items())
        ended = "new IN ('success', 'failed', 'skipped', 'upstream_failed')"
        values = {
            "map_index": "e.index",
            "state": "e.new",
            "epoch": "3",
            "pending": "0",
            "tries": "1",
            "session_id": f"CASE WHEN new IN ('running', 'queued') THEN CAST({worker} AS bigint) END",
            "next_due_us": f"CASE WHEN new = 'up_for_retry' THEN {_NOW} + 3600000000 END",
            "due_us": f"CASE WHEN new = 'up_for_retry' THEN {_NOW} + 3600000000 END",
            "started_us": f"CASE WHEN new <> 'scheduled' THEN {_NOW} END",
            "ended_us": f"CASE WHEN {ended} THEN {_NOW} END",
            "error": "CASE WHEN new = 'failed' THEN 'ValueError: ' || e.index % 7 END",
        }
        elements = await self.build("task_instance", "t", **values)
        head = f"run = {run.id} AND task_id = 'each' AND map_index = -1"
        await self.execute(
            _ELEMENTS.format(**elements, cases=cases, last=count - 1, run=run.id),
            f"UPDATE task_instance SET state = 'mapped', pending = 0 WHERE {head}",
        )
        found = f"SELECT state, count(*) FROM task_instance WHERE run = {run.id} AND map_index >= 0 GROUP BY state"
        counts = dict(await self.read(found))
        numbers = {name: counts.get(name, 0) for name in ("success", "failed", "skipped", "upstream_failed")}
        numbers |= {"unfinished": count - sum(numbers.values()), "retrying": counts.get("up_for_retry", 0)}
        numbers |= {"created": count, "made": count, "arrived": count, "opened": 1, "closed": 1}
        given = ", ".join(f"{name} = {number}" for name, number in numbers.items())
        if not await self.read(f"SELECT 1 FROM task_map WHERE run = {run.id} AND task_id = 'each'"):
            row = f"SELECT id, run, task_id FROM task_instance WHERE {head}"
            await self.execute(f"INSERT INTO task_map (task, run, task_id) {row}")
        await self.execute(f"UPDATE task_map SET {given} WHERE run = {run.id} AND task_id = 'each'")
        return run


def count_huge(runs: int) -> int:
    """Return the number of runs of 1,000 tasks."""
    return max(20, runs // 100)


async def build_rows(store: Database, rows: Rows, runs: int, elements: int) -> dict[str, str]:
    """Make all rows; return the ids of the runs that pages show."""
    await rows.player.begin()
    sessions = {}
    for kind in ("scheduler", "parser", "triggerer", "worker"):
        for number in range(4):
            about = BeginSession(kind, f"{kind}-{number}", "machine", "boot", number + 1, ("default",), 1000)
            sessions[kind] = await store.call(about)
    many = dag(*(task(f"t{number}") for number in range(100)), id="daily")
    await rows.add_runs(many, runs)
    for number in range(20):
        await rows.add_runs(dag(*(task(f"t{index}") for index in range(10)), id=f"other{number}"), 20)
    await rows.add_runs(dag(*(task(f"t{index}") for index in range(1000)), id="huge"), count_huge(runs))
    wide = await rows.add_elements(elements, sessions["worker"])
    await rows.execute(
        _TRIGGERS.format(now=_NOW),
        _CURSORS.format(session=sessions["triggerer"]),
        _JOURNAL,
    )
    # Sessions that have ended.
    ended = await rows.build("service_session", "s", ended_us=_NOW)
    await rows.execute(
        f"INSERT INTO service_session ({ended['columns']}) SELECT {ended['values']} "
        "FROM service_session AS s, generate_series(1, 500) WHERE s.kind = 'worker'"
    )
    return {"wide": wide.run_id}


def list_addresses(ids: dict[str, str], counts: dict[str, int]) -> dict[str, str]:
    """Return the addresses of all lists, by name."""
    wide = f"/dags/wide/runs/{quote(ids['wide'], safe='')}"
    each, huge = f"{wide}/tasks/each", "/dags/huge/runs/r16"
    middle, half = counts["runs"] // 2, counts["elements"] // 2
    found = {
        "dags": "/dags",
        "services": "/services",
        "services, API": "/api/v1/services",
        "pools": "/pools",
        "runs": "/dag-runs",
        "runs, middle": f"/dag-runs?cursor={middle}",
        "runs of a DAG": "/dags/daily",
        "runs of a DAG, middle": f"/dags/daily?cursor={middle}",
        "runs of a DAG, API": "/api/v1/dags/daily/runs",
        "run": "/dags/daily/runs/r7",
        "run of 1,000 tasks": huge,
        "run of 1,000 tasks that has not ended": f"/dags/huge/runs/r{counts['huge'] - 1}",
        "run with elements": wide,
        "tasks of 1,000, API": f"/api/v1{huge}/tasks",
        "tasks of 1,000, API, middle": f"/api/v1{huge}/tasks?cursor=500:-1",
        "tasks with elements, API": f"/api/v1{wide}/tasks",
        "tasks with elements, API, middle": f"/api/v1{wide}/tasks?cursor=0:{half}",
        "elements": each,
        "elements, middle": f"{each}?cursor={half}",
        "elements, index": f"{each}?index={half}-{half + 1000}",
        "elements, API": f"/api/v1{each}/elements",
        "elements, API, middle": f"/api/v1{each}/elements?cursor={half}",
        "element": f"{each}?map_index={half}",
        "failures": f"/api/v1{each}/failures",
        "history": f"/api/v1{each}/history?map_index={half}",
        "events": f"/api/v1{each}/events?map_index=1",
    }
    for state in RUN_STATES:
        found[f"runs, {state}"] = f"/dag-runs?state={state}"
        found[f"runs, {state}, middle"] = f"/dag-runs?state={state}&cursor={middle}"
        found[f"runs of a DAG, API, {state}"] = f"/api/v1/dags/daily/runs?state={state}"
        found[f"runs of a DAG, API, {state}, middle"] = f"/api/v1/dags/daily/runs?state={state}&cursor={middle}"
        # Nearly all runs in the database are of other DAGs.
        found[f"runs of a small DAG, API, {state}"] = f"/api/v1/dags/other3/runs?state={state}"
    for state in TASK_STATES:
        found[f"tasks of 1,000, API, {state}"] = f"/api/v1{huge}/tasks?state={state}"
        found[f"tasks with elements, API, {state}"] = f"/api/v1{wide}/tasks?state={state}"
        found[f"tasks with elements, API, {state}, middle"] = f"/api/v1{wide}/tasks?state={state}&cursor=0:{half}"
    for state in ELEMENT_STATES:
        found[f"elements, {state}"] = f"{each}?state={state}"
        found[f"elements, {state}, middle"] = f"{each}?state={state}&cursor={half}"
        found[f"elements, API, {state}"] = f"/api/v1{each}/elements?state={state}"
        found[f"elements, {state}, index"] = f"{each}?state={state}&index={half}-{half + 100_000}"
    return found


def get(port: int, path: str) -> tuple[float, int]:
    """Return how long an answer took, and its size."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers=HEADERS)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise AssertionError(f"{path}: {answer.status} {body[:300]!r}")
    return time.perf_counter() - began, len(body)


class Web:
    """`tidemill web` over the database."""

    def __init__(self, folder: Path, url: str, server: PostgresServer) -> None:
        self._server = server
        self.port = free_port()
        tokens = {"bench": {"hash": hash_token(TOKEN), "role": "read"}}
        config = {"store": {"url": url}, "debug": {"enabled": True, "port": self.port, "tokens": tokens}}
        (folder / "web.yaml").write_text(yaml.safe_dump(config))
        self.log = folder / "web.log"
        with self.log.open("wb") as output:
            command = [sys.executable, "-m", "tidemill", "web", "web.yaml"]
            self.process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)

    def wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            try:
                get(self.port, "/services")
            # The store is opened after the server.
            except (OSError, AssertionError):
                time.sleep(0.1)
            else:
                return

    def read_cpu(self) -> float:
        """Return the CPU time of the command and the database server, in seconds."""
        return tree_cpu_seconds(self.process.pid) + tree_cpu_seconds(self._server.pids()[0])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


async def measure(given: argparse.Namespace, server: PostgresServer, folder: Path) -> None:
    url = await server.new_database()
    store = await open_store(url)
    connection = await asyncpg.connect(url)
    rows, began = Rows(store, connection), time.monotonic()
    ids = await build_rows(store, rows, given.runs, given.elements)
    # As autovacuum does, which the server of the tests leaves out.
    await rows.execute("VACUUM ANALYZE")
    ((tasks,),) = await rows.read("SELECT count(*) FROM task_instance")
    report(bench="dag_pages: rows", tasks=tasks, seconds=time.monotonic() - began)
    counts = {"runs": given.runs, "elements": given.elements, "huge": count_huge(given.runs)}
    web = Web(folder, url, server)
    try:
        web.wait()
        await asyncio.to_thread(ask, web, list_addresses(ids, counts), given)
        if given.keep:
            print(url, f"http://127.0.0.1:{web.port}", file=sys.stderr, flush=True)
            await asyncio.sleep(given.keep)
    finally:
        web.close()
        await connection.close()
        await store.close()


def ask(web: Web, addresses: dict[str, str], given: argparse.Namespace) -> None:
    medians: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for name, path in addresses.items():
        if given.names and not any(part in name for part in given.names):
            continue
        get(web.port, path)
        spent = [web.read_cpu(), 0.0]
        found = [get(web.port, path) for _ in range(given.requests)]
        spent[1] = web.read_cpu()
        cpu[name] = 1e3 * (spent[1] - spent[0]) / given.requests
        milliseconds = sorted(1e3 * seconds for seconds, _ in found)
        median = medians[name] = statistics.median(milliseconds)
        if median > given.slow:
            figures = {"p50_ms": median, "worst_ms": milliseconds[-1], "cpu_ms": cpu[name], "size": found[0][1]}
            report(bench=f"dag_pages: {name}", path=path, **figures)
    slowest = max(medians, key=medians.__getitem__)
    report(
        bench="dag_pages",
        lists=len(medians),
        over_150_ms=sum(value > 150 for value in medians.values()),
        p50_ms=statistics.median(medians.values()),
        slowest=slowest,
        slowest_ms=medians[slowest],
        cpu_p50_ms=statistics.median(cpu.values()),
        cpu_over_150_ms=sum(value > 150 for value in cpu.values()),
        load=os.getloadavg()[0],
    )


async def main(given: argparse.Namespace) -> None:
    server = PostgresServer()
    try:
        with tempfile.TemporaryDirectory() as name:
            await measure(given, server, Path(name))
    finally:
        server.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--runs", type=int, default=5_000)
    parser.add_argument("--elements", type=int, default=450_000)
    parser.add_argument("--requests", type=int, default=7)
    parser.add_argument("--slow", type=float, default=150.0)
    parser.add_argument("--keep", type=float, default=0.0, help="seconds for which the database stays afterwards")
    asyncio.run(main(parser.parse_args()))
