"""Many runs while processes of the tree, and sometimes all of it, are killed again and again.

STORM_RUNS=2000 STORM_SECONDS=120 pytest --long tests/cli/dags/test_dev_storm.py
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from tests.cli.dags.conftest import DevSite
from tests.size import sized
from tests.until import wait_until

from tidemill.runtime.process.table import find_descendants, find_marked, read_command
from tidemill.store.calls.instance_calls import ListTasks, TaskHistory
from tidemill.store.calls.run_calls import CreateRun, ListRuns
from tidemill.store.ciphers import build_cipher
from tidemill.store.database import StoreClient
from tidemill.store.engines.opening import open_caller

STORM = """
import os
from datetime import timedelta
from pathlib import Path
from tidemill.dags import DAG, BaseOperator, get_current_context, task
from tidemill.triggers.builtin.temporal import TimeDeltaTrigger

def note(what):
    context = get_current_context()
    line = f"{context['run_id']} {context['ti'].task_id} {what}\\n".encode()
    with open(Path(__file__).parent.parent / "noted.txt", "ab", buffering=0) as file:
        file.write(line)

class Waits(BaseOperator):
    def execute(self, context):
        self.defer(trigger=TimeDeltaTrigger(timedelta(seconds=0.2)), method_name="resume")
    def resume(self, context, event=None):
        note("done")

# A task whose own process is killed has failed.
with DAG("storm", max_active_runs=20, default_args={"retries": 9, "retry_delay": timedelta(seconds=0.2)}):
    @task
    def begin():
        note("done")
    @task
    def fails_once():
        if get_current_context()["ti"].try_number == 1:
            raise ValueError("the first time")
        note("done")
    @task
    def left():
        note("done")
    @task
    def end():
        note("done")
    first = begin()
    first >> Waits(task_id="a") >> fails_once() >> (last := end())
    first >> Waits(task_id="b") >> left() >> last
"""
TASKS = {"begin", "a", "b", "fails_once", "left", "end"}


RUNS = int(os.environ.get("STORM_RUNS", sized(40, 100)))
SECONDS = float(os.environ.get("STORM_SECONDS", sized(12, 25)))


@contextlib.asynccontextmanager
async def opened_store(dev: DevSite) -> AsyncIterator[StoreClient]:
    store = await open_caller(f"sqlite:///{dev.folder}/dags.db", build_cipher("", dev.folder / "dags.db.key"))
    try:
        yield store
    finally:
        await store.close()


async def create_runs(dev: DevSite) -> None:
    async with opened_store(dev) as store:
        for number in range(RUNS):
            await store.call(CreateRun("storm", f"r{number}", request=f"r{number}"))


async def count_states(dev: DevSite) -> Counter[str]:
    """Return how many runs are in each state."""
    states: Counter[str] = Counter()
    async with opened_store(dev) as store:
        after = None
        while True:
            page = await store.call(ListRuns("storm", after=after))
            states.update(run.state for run in page.rows)
            if (after := page.next) is None:
                return states


async def check_tasks(dev: DevSite) -> None:
    """Fail unless each task of each run has succeeded once, and nothing happened to it afterwards."""
    async with opened_store(dev) as store:
        for number in range(RUNS):
            rows = (await store.call(ListTasks("storm", f"r{number}"))).rows
            assert {row.task_id: row.state for row in rows} == dict.fromkeys(TASKS, "success")
            for task in TASKS:
                changes = [row.after for row in (await store.call(TaskHistory("storm", f"r{number}", task))).rows]
                assert (changes.count("success"), changes[-1]) == (1, "success"), (number, task, changes)


@pytest.mark.long
@pytest.mark.timeout(60 + 10 * SECONDS + RUNS)
def test_every_task_gets_one_final_state_while_processes_are_killed(dev: DevSite) -> None:
    seed = int(os.environ.get("STORM_SEED", random.randrange(10**6)))
    print("STORM_SEED", seed)
    choose = random.Random(seed)
    (dev.folder / "dags" / "storm.py").write_text(STORM)
    process = dev.start()
    wait_until(lambda: dev.run("dags", "show", "storm").returncode == 0, what=lambda: dev.log)
    asyncio.run(create_runs(dev))
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        time.sleep(choose.uniform(1.0, 3.0))
        tree = [pid for pid in find_descendants(process.pid) if "tidemill" in read_command(pid)]
        if choose.random() < 0.2 or not tree:
            process.kill()
            process.wait()
            process = dev.start()
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(choose.choice(tree), signal.SIGKILL)

    wait_until(
        lambda: asyncio.run(count_states(dev)) == {"success": RUNS},
        2 * SECONDS + RUNS / 2,
        what=lambda: (seed, asyncio.run(count_states(dev)), dev.log[-5000:]),
        pause_seconds=0.5,
    )
    asyncio.run(check_tasks(dev))
    # A task that was killed after its last line, before its report, is run again; none is after its success is stored.
    noted = Counter((dev.folder / "noted.txt").read_text().splitlines())
    assert {tuple(line.split()[:2]) for line in noted} == {(f"r{n}", task) for n in range(RUNS) for task in TASKS}
    assert find_marked(dev.mark), "this test sees no process"
    assert dev.stop() == 0
    # Ids are given to other processes again after some minutes; the mark is not.
    wait_until(lambda: not find_marked(dev.mark), 60, what=lambda: find_marked(dev.mark))
