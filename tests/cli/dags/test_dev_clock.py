"""The clock of the machine is set by an hour, either way, under a tree of `tidemill dev`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.cli.dags.conftest import DevSite
from tests.until import wait_until

from tidemill.store.calls.instance_calls import TaskHistory
from tidemill.store.calls.run_calls import CreateRun, ListRuns, RunRecord
from tidemill.store.ciphers import build_cipher
from tidemill.store.engines.opening import open_caller

#: What Python imports at its start: `time.time` is ahead of the clock by the seconds that a file says.
SHIM = """
import time
def build(read, unit):
    def now():
        with open({file!r}) as file:
            return read() + int(file.read()) * unit
    return now
time.time, time.time_ns = build(time.time, 1), build(time.time_ns, 10**9)
"""
#: A trigger that goes by no clock that is set; one that waits for a time waits as much longer as the clock is set back.
SOON = """
import asyncio
from tidemill.triggers.base import BaseTrigger, TriggerEvent
class Soon(BaseTrigger):
    def serialize(self):
        return "soon.Soon", {}
    async def run(self):
        await asyncio.sleep(0.5)
        yield TriggerEvent(None)
"""
CLOCKED = """
from datetime import timedelta
from pathlib import Path
from tidemill.dags import DAG, BaseOperator, get_current_context, task
from soon import Soon

def note():
    context = get_current_context()
    with open(Path(__file__).parent.parent / "noted.txt", "ab", buffering=0) as file:
        file.write(f"{context['run_id']} {context['ti'].task_id}\\n".encode())

class Waits(BaseOperator):
    def execute(self, context):
        self.defer(trigger=Soon(), method_name="resume")
    def resume(self, context, event=None):
        note()

with DAG("clocked", max_active_runs=10):
    @task
    def first():
        note()
    @task
    def last():
        note()
    first() >> Waits(task_id="waits") >> last()

with DAG("every_second", schedule=timedelta(seconds=1)):
    @task
    def tick():
        pass
    tick()
"""


def start_with_clock(dev: DevSite, seconds: Path) -> None:
    """Start `tidemill dev`, all of whose processes read the time as the file says."""
    shim = dev.folder / "shim"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(SHIM.format(file=str(seconds)))
    set_clock(seconds, 0)
    path = os.pathsep.join([str(shim), *(folder or str(Path.cwd()) for folder in sys.path)])
    with (dev.folder / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "tidemill", "dev"]
        env = {**dev.env, "PYTHONPATH": path}
        process = subprocess.Popen(command, cwd=dev.folder, env=env, stdout=log, stderr=log)
    dev.process = process  # type: ignore[assignment]  # it has the same methods
    for dag in ("clocked", "gated"):
        wait_until(lambda name=dag: dev.run("dags", "show", name).returncode == 0, what=lambda: dev.log)


def set_clock(seconds: Path, ahead: int) -> None:
    new = seconds.with_suffix(".new")
    new.write_text(str(ahead))
    new.replace(seconds)


class Runs:
    """The runs of a tree, through its socket."""

    def __init__(self, dev: DevSite, count: int) -> None:
        self.dev = dev
        self.count = count
        self.url = f"sqlite:///{dev.folder}/dags.db"
        self.cipher = build_cipher("", dev.folder / "dags.db.key")

    def create(self, prefix: str) -> None:
        async def create() -> None:
            store = await open_caller(self.url, self.cipher)
            for number in range(self.count):
                await store.call(CreateRun("clocked", f"{prefix}{number}", request=f"{prefix}{number}"))
            await store.close()

        asyncio.run(create())

    def list(self, dag: str) -> list[RunRecord]:
        async def read() -> list[RunRecord]:
            store = await open_caller(self.url, self.cipher)
            found = (await store.call(ListRuns(dag, limit=1000))).rows
            await store.close()
            return list(found)

        return asyncio.run(read())

    def count_done(self, prefix: str) -> int:
        return sum(run.run_id.startswith(prefix) and run.state == "success" for run in self.list("clocked"))

    def read_changes(self, run_id: str) -> dict[str, list[str]]:
        """Return the states that each task of a run has had, one after the other."""

        async def read() -> dict[str, list[str]]:
            store = await open_caller(self.url, self.cipher)
            names = ("first", "waits", "last")
            found = {
                name: [row.after for row in (await store.call(TaskHistory("clocked", run_id, name))).rows]
                for name in names
            }
            await store.close()
            return found

        return asyncio.run(read())


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_clock_that_is_set_loses_nothing_doubles_nothing_and_holds_nothing_up(dev: DevSite) -> None:
    (dev.folder / "dags" / "soon.py").write_text(SOON)
    (dev.folder / "dags" / "clocked.py").write_text(CLOCKED)
    began, go = dev.add_gated()
    seconds = dev.folder / "ahead.txt"
    start_with_clock(dev, seconds)
    runs = Runs(dev, 12)
    assert dev.run("dags", "trigger", "gated").returncode == 0
    wait_until(began.exists, what=lambda: dev.log)

    for prefix, ahead in (("forward", 3600), ("back", 0), ("behind", -3600), ("again", 0)):
        runs.create(prefix)
        wait_until(lambda name=prefix: runs.count_done(name) > 0, what=lambda: dev.log)
        set_clock(seconds, ahead)
        ticks = len(runs.list("every_second"))
        wait_until(lambda name=prefix: runs.count_done(name) == runs.count, what=lambda: dev.log)
        if ahead == 3600:
            wait_until(lambda before=ticks: len(runs.list("every_second")) > before + 1, what=lambda: dev.log)

    set_clock(seconds, 3700)  # what is scheduled goes on once its clock has caught up
    ticks = len(runs.list("every_second"))
    wait_until(lambda: len(runs.list("every_second")) > ticks + 1, what=lambda: dev.log)
    go.touch()
    wait_until(lambda: dev.states("gated") == {"waits": "success"}, what=lambda: dev.log)
    found = runs.list("clocked")
    assert len(found) == 4 * runs.count
    for run in found:
        for name, changes in runs.read_changes(run.run_id).items():
            assert (changes.count("success"), changes[-1]) == (1, "success"), (run.run_id, name, changes)
    noted = Counter((dev.folder / "noted.txt").read_text().splitlines())
    assert noted == {f"{run.run_id} {name}": 1 for run in found for name in ("first", "waits", "last")}
    dates = [run.logical_us for run in runs.list("every_second") if run.logical_us is not None]
    assert len(dates) == len(set(dates))
    assert max(dates) > (time.time() + 3000) * 1e6, "the clock was not set"
    assert dev.stop() == 0
