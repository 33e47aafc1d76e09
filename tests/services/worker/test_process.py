"""The worker as a process of its own over a real store: whole runs, processes killed, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.store.dags import ENDED, Player, dag, task
from tests.until import slack, until, wait_until

from tidemill.core.tasks.structure import DagStructure
from tidemill.runtime.log.task_lines import decode_lines
from tidemill.runtime.process.table import (
    find_children,
    find_descendants,
    find_marked,
    is_running,
    read_command,
    read_environment,
)
from tidemill.runtime.process.warden import ENGINE_ID_VARIABLE
from tidemill.store.calls.log_calls import ReadLog
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.service_calls import ListSessions, LoseSession
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store
from tidemill.store.wire.call_server import CallServer

FILE = """
import os, subprocess, time
from tidemill.dags import DAG, task

with DAG("dag", schedule=None):
    @task
    def first():
        print("first runs")
        BODY
        return os.getpid()

    @task
    def second(pid):
        return pid

    second(first())
"""
STRUCTURE = dag(task("first"), task("second", "first"))


class Site:
    """A store with a scheduler in this process, and a worker in another one."""

    def __init__(self, folder: Path, database: Database, address: Path, player: Player) -> None:
        self.folder, self.database, self.address, self.player = folder, database, address, player
        self.processes: list[subprocess.Popen[bytes]] = []
        self.scheduling = asyncio.ensure_future(self._schedule())

    async def _schedule(self) -> None:
        while True:
            await self.player.schedule()
            await asyncio.sleep(0.005)

    def write(self, body: str = "") -> None:
        (self.folder / "dag.py").write_text(FILE.replace("BODY", body))

    async def start_worker(self, **settings: object) -> subprocess.Popen[bytes]:
        environ = {f"TIDEMILL_WORKER__{name.upper()}": str(value) for name, value in settings.items()}
        argv = [sys.executable, "-m", "tidemill.services.worker.process", str(self.address)]
        process = subprocess.Popen(
            [*argv, "--folder", str(self.folder)],
            stdin=subprocess.PIPE,
            env=os.environ | environ,
            start_new_session=True,
        )
        self.processes.append(process)
        deadline = time.monotonic() + 60
        while process.pid not in {service.pid for service in await self.database.call(ListSessions("worker"))}:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        return process

    async def run(self, structure: DagStructure = STRUCTURE) -> RunRecord:
        return await self.player.create(structure)

    async def wait_ended(self, run: RunRecord) -> dict[str, str]:
        deadline = time.monotonic() + 60
        while True:
            states = await self.player.states(run)
            if all(state in ENDED for state in states.values()):
                return states
            assert time.monotonic() < deadline, states
            await asyncio.sleep(0.01)

    async def read_log(self, run: RunRecord, name: str, try_number: int = 1) -> str:
        parts = await self.database.call(ReadLog(run.dag_id, run.run_id, name, try_number=try_number))
        return "\n".join(line.text for part in parts.rows for line in decode_lines(zlib.decompress(part.data)))

    async def wait_for_line(self, run: RunRecord, name: str, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in await self.read_log(run, name):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.scheduling.cancel()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    database = await open_store(f"sqlite:///{tmp_path}/dags.db")
    with tempfile.TemporaryDirectory() as place:
        server = CallServer(database, Path(place) / "store.sock")
        await server.start()
        player = Player(database)
        player.scheduler = await player.begin_service("scheduler")
        site = Site(tmp_path, database, Path(place) / "store.sock", player)
        yield site
        await site.close()
        await server.close()
    await database.close()


def marks_of(process: subprocess.Popen[bytes]) -> set[str]:
    """Return the marks of all that a worker has started."""
    return {
        line
        for pid in find_descendants(process.pid)
        for line in read_environment(pid)
        if line.startswith(ENGINE_ID_VARIABLE)
    }


def nothing_left(marks: set[str]) -> bool:
    return not any(find_marked(mark) for mark in marks)


async def test_a_run_ends_with_its_xcoms_and_logs_stored(site: Site) -> None:
    site.write()
    process = await site.start_worker()
    run = await site.run()
    assert await site.wait_ended(run) == {"first": "success", "second": "success"}
    # The digest that the player stores is not that of the file, which the first line says.
    assert (await site.read_log(run, "first")).splitlines()[-1] == "first runs"
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 60) == 0
    assert not await site.database.call(ListSessions("worker"))


async def test_sigterm_gives_back_what_does_not_end_and_another_worker_runs_it_in_the_same_try(
    site: Site,
) -> None:
    site.write(f"time.sleep(0 if os.path.exists('{site.folder}/go') else 600)")
    process = await site.start_worker(drain_timeout_seconds=0.2, term_grace_seconds=0.5)
    run = await site.run()
    await site.wait_for_line(run, "first", "first runs")
    marks = marks_of(process)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 60) == 0
    wait_until(lambda: nothing_left(marks), what="nothing of it is left")
    (site.folder / "go").touch()
    await site.start_worker()
    assert await site.wait_ended(run) == {"first": "success", "second": "success"}
    assert (await site.player.tasks(run))["first"].tries == 1


@pytest.mark.long  # tests/services/zygote has it of a zygote
async def test_nothing_outlives_a_worker_that_is_killed(site: Site) -> None:
    site.write("subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)")
    process = await site.start_worker()
    run = await site.run()
    await site.wait_for_line(run, "first", "first runs")
    (service,) = await site.database.call(ListSessions("worker"))
    descendants = find_descendants(process.pid)
    marks = marks_of(process)
    process.kill()
    killed_at = time.monotonic()
    wait_until(lambda: not any(map(is_running, descendants)) and nothing_left(marks), what="all of it is gone")
    assert time.monotonic() - killed_at < slack(5)
    await site.database.call(LoseSession(service.id))
    site.write()
    await site.start_worker()
    assert await site.wait_ended(run) == {"first": "success", "second": "success"}


async def test_a_worker_ends_with_its_parent(site: Site) -> None:
    site.write("time.sleep(600)")
    process = await site.start_worker()
    run = await site.run()
    await site.wait_for_line(run, "first", "first runs")
    marks = marks_of(process)
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    assert await asyncio.to_thread(process.wait, 60) == 130
    wait_until(lambda: nothing_left(marks), what="nothing of it is left")


@pytest.mark.parametrize("victim", ["zygote", "template", "task process", "warden"])
async def test_a_run_ends_well_though_a_process_of_the_worker_is_killed(site: Site, victim: str) -> None:
    site.write(f"time.sleep(0 if os.path.exists('{site.folder}/go') else 600)")
    process = await site.start_worker()
    run = await site.run()
    await site.wait_for_line(run, "first", "first runs")
    (zygote,) = find_children(process.pid)
    below = {"warden" if "warden.py" in read_command(pid) else "template": pid for pid in find_children(zygote)}
    below["task process"] = min(find_children(below["template"]))  # the other one waits for an attempt
    (site.folder / "go").touch()
    os.kill({**below, "zygote": zygote}[victim], signal.SIGKILL)
    if victim == "warden":
        await until(lambda: len(find_children(zygote) - {below["warden"]}) == 2, what="it is replaced")
        return
    states = await site.wait_ended(run)
    if victim in ("zygote", "template"):
        assert states == {"first": "success", "second": "success"}
    else:  # nobody knows who killed it
        assert states == {"first": "failed", "second": "upstream_failed"}
        assert "SIGKILL" in await site.read_log(run, "first")


@pytest.mark.long
async def test_many_attempts_run_without_leaving_descriptors_or_processes(site: Site) -> None:
    names = [f"t{number:03}" for number in range(80)]
    lines = ["from tidemill.dags import DAG, EmptyOperator", "with DAG('dag', schedule=None):"]
    (site.folder / "dag.py").write_text(
        "\n".join([*lines, *(f"    EmptyOperator(task_id='{name}')" for name in names)])
    )
    process = await site.start_worker(recycle_after_tasks=20)
    structure = dag(*(task(name) for name in names))
    first = await site.run(structure)
    await site.wait_ended(first)
    count = lambda: len(os.listdir(f"/proc/{process.pid}/fd"))  # noqa: E731
    second = await site.run(structure)
    states = await site.wait_ended(second)
    assert set(states.values()) == {"success"}
    # Four for each process that is kept, beside those of the worker itself.
    wait_until(lambda: count() <= 20 + 4 * 16, what=lambda: f"descriptors are closed: {count()}")
    assert len(find_descendants(process.pid)) <= 2 + 16
