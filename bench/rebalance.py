"""What a rebalance does to partitions that stay, JSON lines out: `python -m bench.rebalance [wait|kill]`.

One engine works through four partitions with tasks of 4 ms, when a task of 20 s begins in one of them and a second
engine joins. `wait` measures how many messages per second of the partitions that stay leave the pipeline until that
task is done, `kill` how many messages are repeated if the first engine is killed in that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as ck
from bench.harness import ROOT, chosen, report

from tidemill.config.settings import Settings
from tidemill.pipeline.build import build_engine
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.runtime.identity import EngineIdentity
from tidemill.sinks.payloads import CollectResult, FilePayload

PARTITIONS = 4
MESSAGES = 6_000
SLOW_AT = 100
SLOW_SECONDS = 20.0


class Sleep(Handler[Any, Any]):
    """Every message is a process that sleeps for as long as it says."""

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return [
            ExecutorTask(
                f"{m.partition}-{m.offset}",
                source_offsets=[m.offset],
                binary_path="sleep",
                args=[m.value.decode()],
                metadata={"partition": m.partition, "offset": m.offset},
            )
            for m in messages
        ]

    async def on_task_complete(self, result: Any) -> CollectResult:
        row = {**result.task.metadata, "at": time.time(), "pid": os.getpid()}
        return CollectResult(files=[FilePayload(path="done", data=row)])


def engine(bootstrap: str, topic: str, worker: str, folder: str) -> None:
    """Run one engine in this process until it gets SIGTERM."""
    settings = Settings.model_validate(
        {
            "kafka": {
                "brokers": bootstrap,
                "source_topic": topic,
                "consumer_group": topic,
                "session_timeout_ms": 6000,
                "heartbeat_interval_ms": 500,
            },
            "executor": {"max_executors": 4},
            "sinks": {"filesystem": {"out": {"base_path": folder}}},
        }
    )

    async def run() -> None:
        built = build_engine(settings, Sleep(), EngineIdentity(worker, 0, uuid.uuid4().hex, topic, 1))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, built.drain)

        async def at_once() -> None:
            pass

        await built.run(at_once)

    asyncio.run(run())


class Group:
    """A topic with a slow task in partition 0, and the engines that read it."""

    def __init__(self, bootstrap: str, folder: Path) -> None:
        self.bootstrap, self.folder, self.topic = bootstrap, folder, f"rebalance-{uuid.uuid4().hex[:8]}"
        self.engines: list[subprocess.Popen[bytes]] = []

    def feed(self) -> None:
        producer = ck.Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 5})
        for offset in range(MESSAGES):
            for partition in range(PARTITIONS):
                slow = partition == 0 and offset == SLOW_AT
                value = str(SLOW_SECONDS) if slow else "0.004"
                producer.produce(self.topic, value.encode(), partition=partition)
            producer.poll(0)
        if producer.flush(30):
            raise AssertionError("the topic was not fed")

    def start(self, worker: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "bench.rebalance", "engine", self.bootstrap, self.topic, worker]
        log = (self.folder / f"{worker}.log").open("wb")
        self.engines.append(subprocess.Popen([*command, str(self.folder)], cwd=ROOT, stdout=log, stderr=log))
        return self.engines[-1]

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "done"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log(self, worker: str) -> str:
        return (self.folder / f"{worker}.log").read_text()

    def end(self) -> None:
        for process in self.engines:
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Poll until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def rebalancing(broker: EmbeddedBroker) -> Iterator[tuple[Group, float]]:
    """Yield a group whose first engine waits for its slow task to give partitions up, and since when it does."""
    with tempfile.TemporaryDirectory() as folder:
        group = Group(broker.bootstrap, Path(folder))
        try:
            broker.create_topic(group.topic, PARTITIONS)
            group.feed()
            group.start("first")
            wait_for(lambda: len(group.rows()) > SLOW_AT * PARTITIONS, 60, "the slow task runs")
            group.start("second")
            wait_for(lambda: "partitions revoked" in group.log("first"), 30, "a revoke")
            yield group, time.time()
        finally:
            group.end()


def revoked(log: str) -> set[int]:
    """Return the partitions that the first revoke was about."""
    line = next(line for line in log.splitlines() if "partitions revoked" in line)
    return {n for n in range(PARTITIONS) if f"/{n}'" in line}


def measure_wait(broker: EmbeddedBroker) -> None:
    """Report what partitions that stay do while a revoked one is waited for."""
    with rebalancing(broker) as (group, since):
        gone = revoked(group.log("first"))
        if 0 not in gone:
            raise AssertionError("the slow task's partition stays: nothing is measured")
        wait_for(lambda: any(row["at"] > since and row["pid"] != group.engines[0].pid for row in group.rows()), 60, "b")
        first = group.engines[0].pid
        slow = next(r["at"] for r in group.rows() if r["partition"] == 0 and r["offset"] == SLOW_AT)
        before = [r for r in group.rows() if since - 3 < r["at"] <= since and r["partition"] not in gone]
        kept = [r for r in group.rows() if since < r["at"] <= slow and r["partition"] not in gone and r["pid"] == first]
        times = sorted(r["at"] for r in kept)
        wait_for(
            lambda: len({(r["partition"], r["offset"]) for r in group.rows()}) == MESSAGES * PARTITIONS, 240, "all"
        )
        report(
            measure="wait",
            waited_seconds=slow - since,
            kept_per_second_before=len(before) / 3,
            kept_messages=len(kept),
            kept_per_second=len(kept) / (slow - since),
            kept_seconds_busy=(times[-1] - since) if times else 0.0,
            repeated=len(group.rows()) - MESSAGES * PARTITIONS,
        )


def measure_kill(broker: EmbeddedBroker) -> None:
    """Report what is repeated after SIGKILL in the middle of the wait."""
    with rebalancing(broker) as (group, since):
        gone = revoked(group.log("first"))
        time.sleep(max(0.0, since + SLOW_SECONDS / 3 - time.time()))
        group.engines[0].kill()
        wait_for(
            lambda: len({(r["partition"], r["offset"]) for r in group.rows()}) == MESSAGES * PARTITIONS, 240, "all"
        )
        times = Counter((row["partition"], row["offset"]) for row in group.rows())
        again = Counter(partition for (partition, _), count in times.items() if count > 1)
        report(
            measure="kill",
            repeated_of_the_slow_partition=again[0],
            repeated_of_other_revoked=sum(again[n] for n in gone if n != 0),
            repeated_of_kept=sum(count for n, count in again.items() if n not in gone),
        )


MEASURES = {"wait": measure_wait, "kill": measure_kill}


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        engine(*sys.argv[2:])
    else:
        with EmbeddedBroker() as broker:
            for name in chosen(MEASURES):
                MEASURES[name](broker)
