"""Many runs while processes of the tree, and sometimes all of it, are killed again and again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter

import pytest
from tests.until import wait_until

from tidemill.runtime.processes import find_descendants, find_marked, read_command

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

with DAG("storm", max_active_runs=20):
    @task
    def begin():
        note("done")
    @task(retries=1, retry_delay=timedelta(seconds=0.2))
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


@pytest.mark.long
@pytest.mark.timeout(400)
def test_every_task_gets_one_final_state_while_processes_are_killed(dev):
    seed = int(os.environ.get("STORM_SEED", random.randrange(10**6)))
    print("STORM_SEED", seed)
    choose = random.Random(seed)
    (dev.folder / "dags" / "storm.py").write_text(STORM)
    process = dev.start()
    wait_until(lambda: dev.run("dags", "show", "storm").returncode == 0, what=lambda: dev.log)
    for number in range(60):
        assert dev.run("dags", "trigger", "storm", "--run", f"r{number}").returncode == 0
    until = time.monotonic() + 45
    while time.monotonic() < until:
        time.sleep(choose.uniform(1.0, 3.0))
        tree = [pid for pid in find_descendants(process.pid) if "tidemill" in read_command(pid)]
        if choose.random() < 0.2 or not tree:
            process.kill()
            process.wait()
            process = dev.start()
            continue
        try:
            os.kill(choose.choice(tree), signal.SIGKILL)
        except ProcessLookupError:
            continue

    def count() -> Counter[str]:
        return Counter(row["state"] for row in dev.rows("runs", "list", "storm", "--limit", "100"))

    wait_until(
        lambda: count() == {"success": 60}, 200, what=lambda: (seed, count(), dev.log[-5000:]), pause_seconds=0.5
    )
    for row in dev.rows("runs", "list", "storm", "--limit", "100"):
        tasks = dev.rows("tasks", "states", "storm", "--run", row["run"])
        assert {task["task"]: task["state"] for task in tasks} == dict.fromkeys(TASKS, "success")
    # A task that was killed after its last line, before its report, is run again; none is after its success is stored.
    noted = Counter((dev.folder / "noted.txt").read_text().splitlines())
    assert {tuple(line.split()[:2]) for line in noted} == {(f"r{n}", task) for n in range(60) for task in TASKS}
    for row in dev.rows("runs", "list", "storm", "--limit", "10"):
        for task in TASKS:
            changes = dev.rows("tasks", "history", "storm", task, "--run", row["run"])
            assert [change["to"] for change in changes].count("success") == 1
            assert changes[-1]["to"] == "success"
    assert find_marked(dev.mark), "this test sees no process"
    assert dev.stop() == 0
    # Ids are given to other processes again after some minutes; the mark is not.
    wait_until(lambda: not find_marked(dev.mark), 20, what=lambda: find_marked(dev.mark))
