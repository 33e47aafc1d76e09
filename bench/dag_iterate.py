"""How fast tasks run all elements in one attempt, in the whole tree of `tidemill dev`: SQLite, durable, web UI on.

    python -m bench.dag_iterate [plain] [chunks] [threads] [--elements N] [--postgresql]

JSON lines out: elements/s from the first store of a result to the last, and the growth of the process that grows most,
from a quarter of the elements on (bar: 50 MB).

    plain     no-op `async` elements, one result each (bar: 5,000/s)
    chunks    the same in chunks of 100 (bar: 20,000 items/s)
    threads   functions without `async`

With `--postgresql` over the server of the tests, which does not sync its files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sqlite3
from typing import Any

import asyncpg
from bench.dag_maps import play, read_sizes
from bench.dag_tree import Tree, start_tree
from bench.harness import report, tree_cpu_seconds
from tests.store.server import PostgresServer

DAGS = """
from tidemill.dags import DAG, task

def nothing():
    return None

with DAG("tasks"):
    task(nothing)()

@task
async def element(number):
    return number

@task
async def count(numbers):
    return len(numbers)

@task
def plain(number):
    return number

with DAG("plain"):
    element.iterate(number=range(ELEMENTS))
with DAG("chunks"):
    count.chunk(100).iterate(numbers=range(ELEMENTS))
with DAG("threads"):
    plain.iterate(number=range(ELEMENTS))
"""


async def _read(site: Tree, statement: str) -> list[Any]:
    if not site.url.startswith("sqlite"):
        connection = await asyncpg.connect(site.url)
        try:
            return [tuple(row) for row in await connection.fetch(statement)]
        finally:
            await connection.close()
    with contextlib.closing(sqlite3.connect(site.url.removeprefix("sqlite:///"), timeout=60)) as connection:
        return connection.execute(statement).fetchall()


async def measure(site: Tree, name: str, elements: int) -> None:
    parts = elements // 100 if name == "chunks" else elements
    load, cpu = os.getloadavg()[0], tree_cpu_seconds(site.process.pid)
    samples: list[dict[int, int]] = []

    async def sample() -> None:
        for share in (0.25, 0.9):
            while sum(row[0] for row in await _read(site, "select success from task_iteration")) < share * parts:
                await asyncio.sleep(0.05)
            samples.append(read_sizes(site))

    sampling = asyncio.create_task(sample())
    run = await play(site, name)
    await sampling
    cpu = tree_cpu_seconds(site.process.pid) - cpu
    ((done, began_us, changed_us),) = await _read(site, "select success, began_us, changed_us from task_iteration")
    assert done == parts
    assert run.ended_us is not None
    growth = {pid: size - samples[0][pid] for pid, size in samples[1].items() if pid in samples[0]}
    report(
        bench=f"dag_iterate {name}",
        store=site.url.partition(":")[0],
        load=load,
        load_after=os.getloadavg()[0],
        elements=elements,
        elements_per_s=elements / max((changed_us - began_us) / 1e6, 1e-3),
        run_seconds=(run.ended_us - run.created_us) / 1e6,
        cpu_us=1e6 * cpu / elements,
        growth_mb=max(growth.values(), default=0) / 1e6,
    )


async def main(names: list[str], elements: int, server: PostgresServer | None) -> None:
    for name in names:
        url = "" if server is None else await server.new_database()
        async with start_tree(DAGS.replace("ELEMENTS", str(elements)), url=url) as site:
            await play(site, "tasks")
            await measure(site, name, elements)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=["plain", "chunks", "threads", []], default=[])
    parser.add_argument("--elements", type=int, default=100_000)
    parser.add_argument("--postgresql", action="store_true")
    arguments = parser.parse_args()
    server = PostgresServer() if arguments.postgresql else None
    try:
        asyncio.run(main(arguments.names or ["plain", "chunks", "threads"], arguments.elements, server))
    finally:
        if server is not None:
            server.remove()
