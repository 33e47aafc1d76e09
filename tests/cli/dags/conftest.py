"""`tidemill dev` over a folder of DAGs, as a process of its own, and commands about it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import prepared
from tests.store.conftest import postgres
from tests.until import wait_until

from tidemill.runtime.process.table import find_descendants

__all__ = ["postgres"]

DAGS = """
import os, time
from datetime import timedelta
from tidemill.dags import DAG, BaseOperator, Param, Variable, get_current_context, task
from tidemill.triggers.builtin.temporal import TimeDeltaTrigger

class Waits(BaseOperator):
    def __init__(self, seconds=0.1, **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds
    def execute(self, context):
        self.defer(trigger=TimeDeltaTrigger(timedelta(seconds=self.seconds)), method_name="resume")
    def resume(self, context, event=None):
        return "resumed"

with DAG("story", tags=["example"], params={"rows": Param(3, "how many rows", type="integer", minimum=1)}):
    @task
    def first():
        print("the first task")
        return get_current_context()["params"]["rows"]
    @task(retries=1, retry_delay=timedelta(seconds=0.1))
    def second(rows):
        if get_current_context()["ti"].try_number == 1:
            raise ValueError("not at once")
        return rows + 1
    second(first()) >> Waits(task_id="waits")

with DAG("fails"):
    @task
    def fails():
        raise RuntimeError("it is broken")
    @task
    def after():
        pass
    fails() >> after()

with DAG("long"):
    @task
    def sleeps():
        print("sleeping", flush=True)
        time.sleep(float(Variable.get("seconds", default="60")))
    sleeps()
"""

GATED = """
import time
from pathlib import Path
from tidemill.dags import DAG, task

with DAG("gated"):
    @task
    def waits():
        Path({began!r}).touch()
        while not Path({go!r}).exists():
            time.sleep(0.05)
    waits()
"""


class DevSite:
    """A folder of DAGs, `tidemill dev` over it, and commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "dags").mkdir()
        (folder / "dags" / "example.py").write_text(DAGS)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
        self.env = {
            **clean,
            "COLUMNS": "200",
            "TIDEMILL_DEBUG__ENABLED": "false",
            "TIDEMILL_METRICS__ENABLED": "false",
            "XDG_RUNTIME_DIR": str(folder / "runtime"),
        }
        (folder / "runtime").mkdir(mode=0o700)
        self.process: prepared.Forked | None = None

    @property
    def mark(self) -> str:
        """What all processes of the tree have in their environment, and no others."""
        return f"XDG_RUNTIME_DIR={self.env['XDG_RUNTIME_DIR']}"

    @property
    def log(self) -> str:
        path = self.folder / "log.txt"
        return path.read_text() if path.exists() else ""

    def start(self, **env: str) -> prepared.Forked:
        """Start `tidemill dev`, and wait until its worker and its triggerer are there."""
        begun = self.log.count("the worker is ready")
        with (self.folder / "log.txt").open("ab") as log:
            self.process = prepared.start(["dev"], cwd=self.folder, env={**self.env, **env}, stdout=log, stderr=log)
        wait_until(lambda: self.log.count("the worker is ready") > begun, what=lambda: self.log)
        wait_until(lambda: self.run("dags", "show", "story").returncode == 0, what=lambda: self.log)
        return self.process

    def add_gated(self) -> tuple[Path, Path]:
        """Add a DAG with one task; return the files that it makes when it runs, and that it waits for to end."""
        began, go = self.folder / "began", self.folder / "go"
        (self.folder / "dags" / "gated.py").write_text(GATED.format(began=str(began), go=str(go)))
        return began, go

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return prepared.run_text(arguments, cwd=self.folder, env=self.env)

    def rows(self, *arguments: object) -> list[dict[str, Any]]:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def states(self, dag: str) -> dict[str, str]:
        return {row["task"]: row["state"] for row in self.rows("tasks", "states", dag)}

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(90)

    def close(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        tree = find_descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        for pid in tree:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[DevSite]:
    """Make a folder of DAGs; whatever still runs at the end is killed."""
    site = DevSite(tmp_path)
    yield site
    site.close()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)])
async def any_dev(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DevSite]:
    """Do what `dev` does, over a database of either kind."""
    site = DevSite(tmp_path)
    if request.param == "postgresql":
        site.env["TIDEMILL_STORE__URL"] = await request.getfixturevalue("postgres").new_database()
    yield site
    site.close()
