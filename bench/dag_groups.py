"""What a mapped group of six tasks costs over a long list in the configuration of a run, in the tree of `tidemill dev`.

    python -m bench.dag_groups [--elements N ...]

JSON lines out, for each number of elements, in one tree: SQLite, durable, worker.reuse_processes. Each element is a
value of 1 kB, and `max_outstanding` is 50. Give the smaller number first: memory is compared to that of the first.

    rate            elements/s, and tasks/s, from the start of the run to its end
    most_open       the most elements that were open at a time, by the journal (bar: 50)
    growth_mb       PSS of the process that has grown most against the end of the first run (bar: 50)
    cpu_ms          CPU time of the whole tree per task
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sqlite3

from bench.dag_maps import read_sizes
from bench.dag_tree import Tree, start_tree
from bench.harness import report, tree_cpu_seconds

from tidemill.runtime.process.table import read_command
from tidemill.services.conf_lists import send_lists
from tidemill.store.calls.dag_calls import GetDag
from tidemill.store.calls.run_calls import CreateRun, GetRun, RunRecord, StageConfItems
from tidemill.store.calls.task_calls import GetValuePage
from tidemill.store.dag_plan import read_structure

ELEMENTS = (500, 5_000)
WINDOW, TASKS = 50, 6
DAGS = f"""
from tidemill.dags import DAG, task, task_group

with DAG("tasks"):
    task(task_id="one")(int)()

@task
def step(value):
    return value

@task
def join(left, right):
    return left if left == right else ""

@task
def measure(value):
    return len(value)

@task_group
def clean(row):
    first = step(row)
    joined = join(step(first), step(first))
    return measure(step(joined))

with DAG("groups", params={{"rows": []}}) as dag:
    clean.partial(max_outstanding={WINDOW}).expand(row=dag.param("rows"))
"""


async def play(site: Tree, elements: int) -> RunRecord:
    """Run the group over this many values of 1 kB; return the run."""
    found = await site.store.call(GetDag("groups"))
    assert found is not None
    calls: list[StageConfItems] = []
    rows = [f"{number:07} {'x' * 992}" for number in range(elements)]
    sent = send_lists(calls.append, read_structure(found.structure), {"rows": rows}, lambda done, total: None)  # type: ignore[arg-type]
    for call in calls:
        await site.store.call(call)
    created = await site.store.call(CreateRun("groups", conf=sent.text, stage=sent.stage))
    while True:
        run = await site.store.call(GetRun("groups", created.run_id))
        assert run is not None
        if run.ended_us is not None:
            assert run.state == "success", run
            page = await site.store.call(GetValuePage(run.id, "clean.measure", count=True))
            assert page.total == elements
            assert {value for _, value in page.values} == {"1000"}
            return run
        await asyncio.sleep(0.5)


def count_open(site: Tree, run: RunRecord) -> int:
    """Return the most elements of the group that were open at a time."""
    statement = """
        select j.after from task_journal j join task_instance t on t.id = j.task
        where t.run = ? and t.task_id = 'clean' and t.map_index >= 0 and j.after != j.before
        order by j.at_us, j.after = 'mapped'
    """
    now = most = 0
    with contextlib.closing(sqlite3.connect(site.url.removeprefix("sqlite:///"))) as connection:
        for (after,) in connection.execute(statement, (run.id,)):
            now += 1 if after == "mapped" else -1
            most = max(most, now)
    assert now == 0
    return most


async def main(numbers: list[int]) -> None:
    async with start_tree(DAGS, reuse='["*"]') as site:
        first: dict[int, int] = {}
        for elements in numbers:
            load, cpu = os.getloadavg()[0], tree_cpu_seconds(site.process.pid)
            run = await play(site, elements)
            cpu = tree_cpu_seconds(site.process.pid) - cpu
            sizes = read_sizes(site)
            first = first or sizes
            growth = {pid: size - first[pid] for pid, size in sizes.items() if pid in first}
            grown = max(growth, key=growth.__getitem__)
            assert run.ended_us is not None
            seconds = (run.ended_us - run.created_us) / 1e6
            report(
                bench="dag_groups",
                elements=elements,
                load=load,
                load_after=os.getloadavg()[0],
                elements_per_s=elements / seconds,
                tasks_per_s=TASKS * elements / seconds,
                most_open=count_open(site, run),
                growth_mb=growth[grown] / 1e6,
                grown=read_command(grown)[-60:],
                pss_mb=sum(sizes.values()) / 1e6,
                cpu_ms=1e3 * cpu / elements / TASKS,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=list(ELEMENTS))
    asyncio.run(main(parser.parse_args().elements))
