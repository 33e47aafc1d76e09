"""How many whole lives of tasks a second the store takes, durably: create, decide, admit, claim, report.

Run: `python -m bench.dag_store [sqlite] [postgresql] [--lives N]`. JSON lines out, one per database and size of batch.
A run of as many tasks as the batch is created; the scheduler takes a turn; the worker reports the batch before, with an
XCom and a log part each, and claims this one. Each is a call with a commit of its own; the journal has four rows per
life. CPU seconds are those of this process: all of SQLite, and what PostgreSQL leaves to its client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from tests.store.dags import Player, dag, encode, task
from tests.store.server import PostgresServer

from tidemill.core.tasks.endings import Success
from tidemill.store.calls.count_calls import CountStore
from tidemill.store.calls.run_calls import CreateRun
from tidemill.store.calls.service_calls import SchedulerTurn, StoreFile
from tidemill.store.calls.worker_calls import AttemptReport, LogPart, WorkerTurn
from tidemill.store.engines.opening import open_store

BATCHES = (1, 8, 32)
#: Rounds that are not counted: statements are built in them.
WARM_UP = -5
XCOM = (("return_value", '{"count":12345,"path":"/data/part-0001"}'),)
LOG = b"x" * 300


async def measure(name: str, url: str, batch: int, lives: int) -> None:
    store = await open_store(url)
    player = await Player(store).begin()
    structure = dag(*[task(f"task-{number}") for number in range(batch)], id=f"batch-{batch}")
    await store.call(StoreFile(f"{structure.id}.py", "digest", structures=(encode(structure),)))
    reports: tuple[AttemptReport, ...] = ()
    began = cpu = 0.0
    rounds = max(lives // batch, 3)
    for number in range(WARM_UP, rounds + 1):
        if not number:
            began, cpu = time.perf_counter(), time.process_time()
        if number < rounds:
            await store.call(CreateRun(structure.id, by="bench"))
            await store.call(SchedulerTurn(player.scheduler))
        answer = await store.call(WorkerTurn(player.worker, number - WARM_UP, reports, capacity=batch))
        assert all(one.kind == "moved" for one in answer.outcomes)
        reports = tuple(
            AttemptReport(one.task, one.epoch, Success(), XCOM, log_end=LogPart(one.task, 1, 0, 1, LOG, 3, last=True))
            for one in answer.claimed
        )
        assert len(reports) == (batch if number < rounds else 0)
    seconds = time.perf_counter() - began
    counts = await store.call(CountStore())
    assert not counts.tasks, counts
    await store.close()
    result = {
        "database": name,
        "batch": batch,
        "lives": rounds * batch,
        "lives_per_second": round(rounds * batch / seconds),
        "cpu_us_per_life": round((time.process_time() - cpu) * 1e6 / rounds / batch),
    }
    print(json.dumps(result), flush=True)


async def main(databases: list[str], lives: int) -> None:
    if "sqlite" in databases:
        for batch in BATCHES:
            with tempfile.TemporaryDirectory(dir=".") as folder:
                await measure("sqlite", f"sqlite:///{Path(folder).absolute()}/store.db", batch, lives * batch // 8)
    if "postgresql" in databases:
        server = PostgresServer()
        try:
            for batch in BATCHES:
                await measure("postgresql", await server.new_database(), batch, lives * batch // 8)
        finally:
            server.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgresql"])
    parser.add_argument("--lives", type=int, default=2_000)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.databases, arguments.lives))
