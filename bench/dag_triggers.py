"""How fast a deferred task goes on: from the event that its trigger yields to the claim of its next attempt.

    python -m bench.dag_triggers [--one 100] [--at-once 200 2000]

JSON lines out. The triggerer is a process of its own, as `tidemill dev` starts it; this one has the store (SQLite,
durable), and plays scheduler and worker, each woken by its bell. `queued` is the time until the transaction begins that
gives the task its slots, by the journal; `claimed` is the time until a worker has the attempt. Bars for the whole way,
with a task process at its end: p50 <= 50 ms, p99 <= 250 ms one by one; p50 <= 800 ms with 200 at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Deferral, Success
from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.json.codec import decode, encode_sorted
from tidemill.store.calls.instance_calls import TaskHistory
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.service_calls import ListSessions
from tidemill.store.calls.setting_calls import SetPool
from tidemill.store.calls.worker_calls import AttemptReport
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store
from tidemill.store.wire.call_server import CallServer
from tidemill.triggers.base import BaseTrigger, TriggerEvent


class Stamped(BaseTrigger):
    """Fires once the given moment has come, with the time at which it does."""

    def __init__(self, moment: float) -> None:
        super().__init__()
        self.moment = moment

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "bench.dag_triggers.Stamped", {"moment": self.moment}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await asyncio.sleep(max(0.0, self.moment - time.time()))
        yield TriggerEvent(time.time())


class Loops:
    """A scheduler and a worker, each woken by its bell.

    Attributes:
        claimed: The delays from event to claim, in seconds, by task.
    """

    def __init__(self, database: Database) -> None:
        self.player = Player(database)
        self.claimed: dict[str, float] = {}
        self.fired: dict[str, float] = {}
        self.moment = 0.0
        self.deferred = 0

    async def schedule(self) -> None:
        while True:
            await self.player.schedule()
            await self.player.store.doorbell.wait(Channel.SCHEDULER)

    async def work(self) -> None:
        while True:
            attempts = (await self.player.turn(capacity=500)).claimed
            now = time.time()
            reports = []
            for one in attempts:
                if one.resume is None:
                    kwargs = encode_sorted({"moment": self.moment})
                    reports.append(
                        AttemptReport(one.task, one.epoch, Deferral("bench.dag_triggers.Stamped", kwargs, "resume"))
                    )
                    continue
                self.fired[one.task_id] = decode(one.resume.payload)
                self.claimed[one.task_id] = now - self.fired[one.task_id]
                reports.append(AttemptReport(one.task, one.epoch, Success()))
            if reports:
                await self.player.turn(*reports)
                self.deferred += sum(isinstance(report.result, Deferral) for report in reports)
            else:
                await self.player.store.doorbell.wait(Channel.WORKER)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def play(loops: Loops, name: str, count: int, lead_seconds: float) -> list[float]:
    """Defer this many tasks to one moment; return the delays until they were queued, in seconds."""
    player = loops.player
    loops.claimed.clear()
    loops.moment = time.time() + lead_seconds
    run: RunRecord = await player.create(dag(*(task(f"t{n}", pool="wide") for n in range(count)), id=name))
    while len(loops.claimed) < count:
        await asyncio.sleep(0.001 if count == 1 else 0.02)
    queued = []
    for task_id in list(loops.claimed)[:200]:
        rows = (await player.store.call(TaskHistory(name, run.run_id, task_id))).rows
        at_us = max(row.at_us for row in rows if row.after == "queued")
        queued.append(at_us / 1e6 - loops.fired[task_id])
    return queued


def say(bench: str, queued: Sequence[float], claimed: Sequence[float], **row: Any) -> None:
    figures = {
        f"{name}_{mark}_ms": round(1e3 * percentile(values, share), 1)
        for name, values in (("queued", queued), ("claimed", claimed))
        for mark, share in (("p50", 0.5), ("p99", 0.99))
    }
    print(json.dumps({"bench": f"dag_triggers {bench}", **row, **figures}), flush=True)


async def measure(folder: Path, one: int, at_once: Sequence[int]) -> None:
    database = await open_store(f"sqlite:///{folder}/dags.db")
    server = CallServer(database, folder / "s")
    await server.start()
    triggerer = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tidemill.services.triggerer.tasks.process",
        str(server.path),
        "--folder",
        str(folder),
        stdin=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
    )
    while not await database.call(ListSessions("triggerer")):
        await asyncio.sleep(0.02)
    loops = Loops(database)
    await loops.player.begin()
    await database.call(SetPool("wide", 1_000_000))
    tasks = [asyncio.create_task(loops.schedule()), asyncio.create_task(loops.work())]
    queued, claimed = [], []
    for n in range(one):
        queued += await play(loops, f"one{n}", 1, 0.1)
        claimed += loops.claimed.values()
    say("one by one", queued, claimed, tasks=one)
    for count in at_once:
        queued = await play(loops, f"many{count}", count, 1.0 + count / 500)
        say("at once", queued, list(loops.claimed.values()), tasks=count)
    for each in tasks:
        each.cancel()
    triggerer.terminate()
    await triggerer.wait()
    await server.close()
    await database.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=int, default=100)
    parser.add_argument("--at-once", type=int, nargs="*", default=[200, 2000])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), arguments.one, arguments.at_once))


if __name__ == "__main__":
    main()
