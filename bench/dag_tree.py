"""How fast the whole tree of `tidemill dev` is, as a user has it: SQLite, durable, web UI and metrics as by default.

    python -m bench.dag_tree [start] [first_line] [resume] [tasks] [reused] [arrow] [files] [idle]

JSON lines out. Times are those of the tasks' own clocks, which they return as XComs.

    start       a fresh folder: `tidemill init`, `tidemill dev`, `dags trigger --wait`, until its run is shown (10 s)
    first_line  a run is committed, until the first line of `execute`, one by one (bar: p50 200 ms)
    resume      a trigger yields its event, until the resumed method runs: one by one (p50 50 ms, p99 250 ms), and 200
                at once (p50 800 ms)
    tasks       1,000 trivial tasks that wait for none: tasks/s from the run's commit to its last end (bar: 250), and
                CPU of the whole tree per task, beside that of a loop that only forks a warm process for each (bar: 1.0)
    reused      the same, with worker.reuse_processes
    arrow       100 of them in a file that imports pyarrow, which each process imports
    files       200 tasks of 20 files in turn, one by one and all at once
    idle        CPU and memory (PSS) of the tree in which nothing happens, mean of 60 s (bar: 2 % of a core, 400 MB)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.dag_worker import BARE
from bench.harness import chosen, report, tree, tree_cpu_seconds

from tidemill.runtime.json.codec import decode, encode_sorted
from tidemill.services.worker.preloads import PRELOADS
from tidemill.store.calls.dag_calls import GetDag
from tidemill.store.calls.run_calls import CreateRun, GetRun, RunRecord
from tidemill.store.calls.service_calls import ListFiles
from tidemill.store.calls.xcom_calls import ListXComs
from tidemill.store.ciphers import build_cipher
from tidemill.store.database import StoreClient
from tidemill.store.engines.opening import open_caller

TASKS = 1000
FILES = 20
IDLE_SECONDS = 60.0
TRIGGER = """
import asyncio, time
from tidemill.triggers.base import BaseTrigger, TriggerEvent

class Stamped(BaseTrigger):
    def __init__(self, moment):
        super().__init__()
        self.moment = moment
    def serialize(self):
        return "stamped.Stamped", {"moment": self.moment}
    async def run(self):
        await asyncio.sleep(max(0.0, self.moment - time.time()))
        yield TriggerEvent(time.time())
"""
DAGS = """
import time
from tidemill.dags import DAG, BaseOperator, task
from stamped import Stamped

class Waits(BaseOperator):
    template_fields = ()
    def execute(self, context):
        self.defer(trigger=Stamped(context["params"]["moment"]), method_name="resume")
    def resume(self, context, event=None):
        return time.time() - event

def now():
    return time.time()

with DAG("first_line"):
    task(task_id="now")(now)()
with DAG("one", params={"moment": 0.0}):
    Waits(task_id="waits")
with DAG("many", params={"moment": 0.0}, max_active_tasks=1000):
    for n in range(200):
        Waits(task_id=f"waits{n}")
with DAG("tasks"):
    for n in range(1000):
        task(task_id=f"t{n}")(now)()
"""
COMMAND = [sys.executable, "-m", "tidemill"]
FILE = """
import time
from tidemill.dags import DAG, task
with DAG("fileNUMBER", max_active_runs=100):
    task(task_id="now")(time.time)()
"""


def build_environment(folder: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    (folder / "runtime").mkdir(mode=0o700, exist_ok=True)
    return {
        **clean,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "XDG_RUNTIME_DIR": str(folder / "runtime"),
        "XDG_STATE_HOME": str(folder / "state"),
    }


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Tree:
    """`tidemill dev` over DAGS, and a connection to its store."""

    def __init__(self, process: subprocess.Popen[bytes], store: StoreClient, url: str) -> None:
        self.process = process
        self.store = store
        self.url = url

    async def play(self, dag_id: str, **conf: object) -> tuple[RunRecord, list[Any]]:
        """Run a DAG, and return its run and what its tasks returned."""
        created = await self.store.call(CreateRun(dag_id, conf=encode_sorted(conf)))
        while True:
            found = await self.store.call(GetRun(dag_id, created.run_id))
            assert found is not None
            if found.state in ("success", "failed"):
                break
            await asyncio.sleep(0.02)
        assert found.state == "success", found
        rows = (await self.store.call(ListXComs(dag_id, created.run_id, limit=1000))).rows
        return found, [decode(row.value) for row in rows]


@contextlib.asynccontextmanager
async def start_tree(
    text: str = DAGS, *, reuse: str = "[]", files: int = 0, url: str = "", modules: Mapping[str, str] | None = None
) -> AsyncIterator[Tree]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "dags").mkdir()
        for module, code in {"stamped": TRIGGER, "bench": text, **(modules or {})}.items():
            (folder / "dags" / f"{module}.py").write_text(code)
        for number in range(files):
            (folder / "dags" / f"file{number}.py").write_text(FILE.replace("NUMBER", str(number)))
        environment = {**build_environment(folder), "TIDEMILL_WORKER__REUSE_PROCESSES": reuse}
        if url:
            environment["TIDEMILL_STORE__URL"] = url
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen([*COMMAND, "dev"], cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            url = url or f"sqlite:///{folder}/dags.db"
            while b"the worker is ready" not in (folder / "log.txt").read_bytes():
                assert process.poll() is None, (folder / "log.txt").read_text()
                await asyncio.sleep(0.05)
            store = await open_caller(url, build_cipher("", folder / "dags.db.key"))
            try:
                while not (found := await store.call(GetDag("tasks"))) or not found.dag.active:
                    errors = await store.call(ListFiles(broken=True))
                    assert not errors, errors
                    await asyncio.sleep(0.05)
                yield Tree(process, store, url)
            finally:
                await store.close()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(90)


async def measure_start() -> None:
    with tempfile.TemporaryDirectory() as name:
        env = build_environment(Path(name))
        began = time.monotonic()
        subprocess.run([*COMMAND, "init", "fresh", "--template", "dags"], cwd=name, env=env, check=True, stdout=-3)
        folder = Path(name, "fresh")
        # What the first task of the example waits for.
        (folder / "words.txt").write_text("a few words")
        with Path(name, "log.txt").open("wb") as log:
            process = subprocess.Popen([*COMMAND, "dev"], cwd=folder, env=env, stdout=log, stderr=log)
        try:
            trigger = [*COMMAND, "dags", "trigger", "daily_report", "--wait"]
            while subprocess.run(trigger, cwd=folder, env=env, stdout=-3, stderr=-3, check=False).returncode:
                assert process.poll() is None, Path(name, "log.txt").read_text()
            report(bench="dag_tree start", seconds=time.monotonic() - began)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(90)


async def measure_first_line() -> None:
    async with start_tree() as site:
        delays = []
        for _ in range(60):
            run, (executed,) = await site.play("first_line")
            delays.append(executed - run.created_us / 1e6)
        _say("first_line", delays[10:])


async def measure_resume() -> None:
    async with start_tree() as site:
        delays = []
        for _ in range(110):
            delays += (await site.play("one", moment=time.time() + 0.4))[1]
        _say("resume, one by one", delays[10:])
        for _ in range(3):
            _say("resume, 200 at once", (await site.play("many", moment=time.time() + 4))[1])


def _say(name: str, delays: Sequence[float]) -> None:
    figures = {f"p{share}_ms": 1e3 * percentile(delays, share / 100) for share in (50, 99)}
    report(bench=f"dag_tree {name}", count=len(delays), **figures)


async def measure_tasks() -> None:
    await _measure_rate("tasks", DAGS, TASKS)


async def measure_reused() -> None:
    await _measure_rate("reused", DAGS, TASKS, reuse='["*"]')


async def measure_arrow() -> None:
    await _measure_rate("arrow", f"import pyarrow\n{DAGS}".replace("range(1000)", "range(100)"), 100)


async def _measure_rate(name: str, text: str, tasks: int, *, reuse: str = "[]") -> None:
    async with start_tree(text, reuse=reuse) as site:
        for round_ in range(4):
            before = tree_cpu_seconds(site.process.pid)
            run, _ = await site.play("tasks")
            cpu_ms = 1e3 * (tree_cpu_seconds(site.process.pid) - before) / tasks
            bare_ms = await asyncio.to_thread(_measure_bare)
            assert run.ended_us is not None
            if round_:
                rate = tasks / ((run.ended_us - run.created_us) / 1e6)
                report(bench=f"dag_tree {name}", tasks_per_s=rate, cpu_ms=cpu_ms, bare_cpu_ms=bare_ms)


async def measure_files() -> None:
    async with start_tree(files=FILES) as site:
        for number in range(FILES):
            while not (found := await site.store.call(GetDag(f"file{number}"))) or not found.dag.active:
                await asyncio.sleep(0.05)
        names = [f"file{number % FILES}" for number in range(10 * FILES)]
        for round_ in range(2):
            began = time.monotonic()
            for name in names:
                await site.play(name)
            one_by_one = len(names) / (time.monotonic() - began)
            began = time.monotonic()
            await asyncio.gather(*(site.play(name) for name in names))
            if round_:
                at_once = len(names) / (time.monotonic() - began)
                report(bench="dag_tree files", one_by_one_per_s=one_by_one, at_once_per_s=at_once)


def _measure_bare() -> float:
    """Return the milliseconds of CPU of a fork of a process that has the same modules in memory."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stamped.py").write_text(TRIGGER)
        Path(folder, "d.py").write_text(DAGS)
        argv = [sys.executable, "-c", BARE, str(TASKS), ",".join(PRELOADS), folder]
        return float(subprocess.run(argv, capture_output=True, check=True, text=True).stdout)


async def measure_idle() -> None:
    async with start_tree() as site:
        await asyncio.sleep(10.0)
        before, began = tree_cpu_seconds(site.process.pid), time.monotonic()
        await asyncio.sleep(IDLE_SECONDS)
        share = (tree_cpu_seconds(site.process.pid) - before) / (time.monotonic() - began)
        sizes = {pid: read_pss(pid) for pid in tree(site.process.pid)}
        report(bench="dag_tree idle", cpu_share=share, pss_mb=sum(sizes.values()) / 1e6, processes=len(sizes))


def read_pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(pid)


BENCHES: dict[str, Callable[[], Awaitable[None]]] = {
    "start": measure_start,
    "first_line": measure_first_line,
    "resume": measure_resume,
    "tasks": measure_tasks,
    "reused": measure_reused,
    "arrow": measure_arrow,
    "files": measure_files,
    "idle": measure_idle,
}


async def main() -> None:
    for name in chosen(BENCHES):
        await BENCHES[name]()


if __name__ == "__main__":
    asyncio.run(main())
