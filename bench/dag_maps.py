"""How fast a mapped task is in the whole tree of `tidemill dev`, beside as many tasks that are not mapped.

    python -m bench.dag_maps [sqlite|postgresql ...] [--elements N] [--modes reused default]

JSON lines out, for each database, with worker.reuse_processes and with a process for each task: durable, web UI and
metrics as by default (the PostgreSQL server of the tests does not sync its files). A generator yields the elements;
runs of 1,000 trivial tasks that wait for none are measured in the same tree before and after it.

    rate            elements/s from the first yield to the last end, and that of tasks; their ratio (bar: 0.85)
    last_to_first   the rate of the last tenth of the elements against that of the first one (bar: 0.9)
    first_ms        from the first yield until its element runs, while all the others follow (bar: 1,000)
    idle_p50_ms     the same for a map of one element (bar: 50)
    growth_mb       PSS at the end against that after 10,000 elements, the process that has grown most (bar: 50)
    stored_bytes    the growth of the database per element, its journal and log row included (bar: 1,500)
    cpu_ms          CPU time of the whole tree per element, and per task
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sqlite3

from bench.dag_tree import Tree, percentile, read_pss, start_tree
from bench.harness import report, tree, tree_cpu_seconds
from tests.store.server import PostgresServer

from tidemill.runtime.json.codec import decode, encode_sorted
from tidemill.runtime.process.table import read_command
from tidemill.store.calls.run_calls import CreateRun, GetRun, RunRecord
from tidemill.store.calls.task_calls import GetValuePage

ELEMENTS = 5_000
SETTLED = 10_000
TASKS = 1_000
IDLE_ROUNDS = 30
DAGS = """
import time
from tidemill.dags import DAG, task

def now():
    return time.time()

with DAG("tasks"):
    for n in range(1000):
        task(task_id=f"t{n}")(now)()

@task
def numbers(params):
    for _ in range(params["count"]):
        yield time.time()

@task
def element(yielded):
    return [yielded, time.time()]

with DAG("maps", params={"count": 1}):
    element.expand(yielded=numbers())
"""


async def play(site: Tree, dag_id: str, sizes: dict[int, int] | None = None, **conf: object) -> RunRecord:
    """Run a DAG until it ends; with `sizes`, keep the PSS of each process once SETTLED values are stored."""
    created = await site.store.call(CreateRun(dag_id, conf=encode_sorted(conf)))
    while True:
        found = await site.store.call(GetRun(dag_id, created.run_id))
        assert found is not None
        if found.state in ("success", "failed"):
            assert found.state == "success", found
            return found
        if sizes is not None and not sizes:
            page = await site.store.call(GetValuePage(created.id, "element", after=SETTLED - 2, limit=1))
            if page.values:
                sizes.update(read_sizes(site))
        await asyncio.sleep(0.02 if sizes is None else 0.5)


def read_sizes(site: Tree) -> dict[int, int]:
    sizes = {}
    for pid in tree(site.process.pid):
        with contextlib.suppress(OSError, AssertionError):
            sizes[pid] = read_pss(pid)
    return sizes


async def read_moments(site: Tree, run: RunRecord) -> list[tuple[float, float]]:
    """Return when each element was yielded and when it ran, by index."""
    moments: list[tuple[float, float]] = []
    while True:
        page = await site.store.call(GetValuePage(run.id, "element", after=len(moments) - 1))
        if not page.values:
            return moments
        for index, value in page.values:
            assert index == len(moments)
            yielded, ran = decode(value)
            moments.append((yielded, ran))


def read_bytes(site: Tree) -> int | None:
    """Return the bytes of a SQLite database that are in use."""
    if not site.url.startswith("sqlite"):
        return None
    with contextlib.closing(sqlite3.connect(site.url.removeprefix("sqlite:///"))) as connection:
        pages, free, size = (
            connection.execute(f"pragma {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return int((pages - free) * size)


async def measure_tasks(site: Tree, runs: int) -> tuple[float, float]:
    """Return tasks/s, and CPU milliseconds per task."""
    seconds, before = 0.0, tree_cpu_seconds(site.process.pid)
    for _ in range(runs):
        run = await play(site, "tasks")
        assert run.ended_us is not None
        seconds += (run.ended_us - run.created_us) / 1e6
    return runs * TASKS / seconds, 1e3 * (tree_cpu_seconds(site.process.pid) - before) / runs / TASKS


async def measure(database: str, mode: str, url: str, elements: int) -> None:
    async with start_tree(DAGS, reuse='["*"]' if mode == "reused" else "[]", url=url) as site:
        await play(site, "tasks")
        idle = []
        for _ in range(IDLE_ROUNDS):
            ((yielded, ran),) = await read_moments(site, await play(site, "maps", count=1))
            idle.append(ran - yielded)
        # As many tasks as elements, half of them before and half of them after.
        runs = max(1, elements // TASKS // 2)
        rates = [await measure_tasks(site, runs)]

        load, stored, cpu = os.getloadavg()[0], read_bytes(site), tree_cpu_seconds(site.process.pid)
        first_sizes: dict[int, int] = {}
        run = await play(site, "maps", first_sizes, count=elements)
        cpu = tree_cpu_seconds(site.process.pid) - cpu
        sizes, now_stored = read_sizes(site), read_bytes(site)
        moments = await read_moments(site, run)
        assert len(moments) == elements
        assert run.ended_us is not None

        rates.append(await measure_tasks(site, runs))
        task_rate = sum(rate for rate, _ in rates) / 2
        rate = elements / (run.ended_us / 1e6 - moments[0][0])
        ran = sorted(moment for _, moment in moments)
        tenth = elements // 10
        growth = {pid: size - first_sizes[pid] for pid, size in sizes.items() if pid in first_sizes}
        grown = max(growth, key=growth.__getitem__, default=None)
        report(
            bench=f"dag_maps {database} {mode}",
            elements=elements,
            load=load,
            load_after=os.getloadavg()[0],
            elements_per_s=rate,
            tasks_per_s=task_rate,
            ratio=rate / task_rate,
            last_to_first=(ran[tenth] - ran[0]) / (ran[-1] - ran[-1 - tenth]),
            first_ms=1e3 * (moments[0][1] - moments[0][0]),
            idle_p50_ms=1e3 * percentile(idle, 0.5),
            idle_p99_ms=1e3 * percentile(idle, 0.99),
            growth_mb=None if grown is None else growth[grown] / 1e6,
            grown=None if grown is None else read_command(grown)[-60:],
            pss_mb=sum(sizes.values()) / 1e6,
            stored_bytes=None if stored is None or now_stored is None else (now_stored - stored) / elements,
            cpu_ms=1e3 * cpu / elements,
            task_cpu_ms=sum(each for _, each in rates) / 2,
        )


async def main(databases: list[str], modes: list[str], elements: int) -> None:
    server = PostgresServer() if "postgresql" in databases else None
    try:
        for database in databases:
            for mode in modes:
                url = "" if database == "sqlite" or server is None else await server.new_database()
                await measure(database, mode, url, elements)
    finally:
        if server is not None:
            server.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("databases", nargs="*", default=["sqlite"])
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--modes", nargs="+", choices=("reused", "default"), default=["reused", "default"])
    arguments = parser.parse_args()
    asyncio.run(main(arguments.databases, arguments.modes, arguments.elements))
