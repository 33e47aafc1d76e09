"""What an attempt costs a worker: time to `execute` in a fresh and in a warm process, and CPU against bare forks.

    python bench/dag_worker.py [--rounds 3] [--tasks 300]

The bare loop forks one process, which has all the same modules in memory, for each task, and does nothing else: no
store, no log, no report. CPU times are those of the whole tree, ended children included, taken in alternating rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tidemill.services.worker.logs.logs import AttemptLog
from tidemill.services.worker.messages import AskStore, AttemptFinished, AttemptOrder, FileLoaded, ForkedTask
from tidemill.services.worker.preloads import PRELOADS
from tidemill.services.worker.processes.task_handle import FindLink, TaskHandle
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.link import ForkLink
from tidemill.services.zygote.messages import Exited, Setup
from tidemill.store.calls.worker_calls import ClaimedAttempt

FILE = """
import time
from tidemill.dags import DAG, task

with DAG("d", schedule=None):
    @task
    def run():
        return time.monotonic_ns()
    run()
"""
ATTEMPT = ClaimedAttempt(
    1, 1, 1, "d", "r", "run", -1, 1, 1, "d.py", "default", "", "manual", 1, None, None, None, "{}", "{}"
)
BARE = """
import os, sys, importlib, gc
sys.path.insert(0, sys.argv[3])
for name in sys.argv[2].split(","):
    importlib.import_module(name)
from tidemill.dags.loading import load_file
load_file(sys.argv[3] + "/d.py", sys.argv[3])
gc.collect(); gc.freeze()
import resource
def cpu():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
begun = cpu()
for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
print((cpu() - begun) / int(sys.argv[1]) * 1e3)
"""


class Listener:
    """Takes what task processes say."""

    def __init__(self) -> None:
        self.finished: asyncio.Future[AttemptFinished] = asyncio.get_running_loop().create_future()
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_loaded(self, handle: TaskHandle, loaded: FileLoaded) -> None:
        pass

    def on_ask(self, handle: TaskHandle, ask: AskStore) -> None:
        pass

    def on_written(self) -> None:
        pass

    def on_finished(self, handle: TaskHandle, finished: AttemptFinished) -> None:
        self.finished.set_result(finished)

    def on_exited(self, handle: TaskHandle, exited: Exited | None) -> None:
        self.exited.set_result(None)

    async def take(self) -> AttemptFinished:
        finished = await self.finished
        self.finished = asyncio.get_running_loop().create_future()
        return finished


async def run_one(handle: TaskHandle, listener: Listener, begun: int) -> tuple[float, float]:
    """Return the milliseconds until `execute`, and until the report."""
    handle.log = AttemptLog(1, 1, 1, 1_000_000)
    handle.tell(AttemptOrder(ATTEMPT))
    finished = await listener.take()
    ended = time.monotonic_ns()
    return (int(finished.xcoms[0][1]) - begun) / 1e6, (ended - begun) / 1e6


def find_link(zygote: ZygoteClient) -> FindLink:
    async def find() -> tuple[ForkLink, None]:
        return zygote.link, None

    return find


async def fresh(zygote: ZygoteClient, folder: str) -> tuple[float, float]:
    listener = Listener()
    begun = time.monotonic_ns()
    handle = TaskHandle(1, ForkedTask(folder, "d.py"), find_link(zygote), listener)
    handle.start()
    found = await run_one(handle, listener, begun)
    handle.leave()
    await listener.exited
    return found


def show(name: str, times: list[float]) -> None:
    ordered = sorted(times)
    at99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    print(f"{name}: p50 {statistics.median(ordered):.2f} ms, p99 {at99:.2f} ms ({len(times)})")


def cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


async def measure_cpu(folder: str, tasks: int) -> float:
    """Return the milliseconds of CPU of an attempt in processes that are recycled after 100, with their starts."""
    zygote = ZygoteClient(Setup(PRELOADS))
    await zygote.start()
    before_start = cpu()
    ticks = read_ticks(zygote.pid or 0)
    for _ in range(max(1, tasks // 100)):
        listener = Listener()
        handle = TaskHandle(1, ForkedTask(folder, "d.py"), find_link(zygote), listener)
        handle.start()
        for _ in range(100):
            await run_one(handle, listener, 0)
        handle.leave()
        await listener.exited
    used = cpu() - before_start + read_ticks(zygote.pid or 0) - ticks
    await zygote.close()
    return used / max(1, tasks // 100) / 100 * 1e3


def read_ticks(pid: int) -> float:
    """Return the seconds of CPU of a process and of its children that it has reaped."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=300)
    given: Any = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "d.py").write_text(FILE)
        zygote = ZygoteClient(Setup(PRELOADS))
        await zygote.start()
        await fresh(zygote, folder)
        show("fresh process to execute", [(await fresh(zygote, folder))[0] for _ in range(given.tasks)])
        listener = Listener()
        handle = TaskHandle(1, ForkedTask(folder, "d.py"), find_link(zygote), listener)
        handle.start()
        await run_one(handle, listener, 0)
        times = [await run_one(handle, listener, time.monotonic_ns()) for _ in range(given.tasks)]
        show("warm process to execute", [each[0] for each in times])
        show("warm process, there and back", [each[1] for each in times])
        await zygote.close()
        for _ in range(given.rounds):
            argv = [sys.executable, "-c", BARE, str(given.tasks), ",".join(PRELOADS), folder]
            bare = float(subprocess.run(argv, capture_output=True, check=True, text=True).stdout)
            ours = await measure_cpu(folder, given.tasks)
            print(f"CPU of an attempt: {ours:.2f} ms; of a bare fork: {bare:.2f} ms; ratio {ours / bare:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
