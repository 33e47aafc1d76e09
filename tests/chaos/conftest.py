"""A pipeline as a process of its own, over a real broker, to be stopped, killed and watched."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
import yaml
from confluent_kafka.admin import AdminClient
from tests.jsonl import read_lines
from tests.sinks.conftest import database, http_double, mongo, postgres, valkey
from tests.spark.terminal import Command
from tests.until import wait_until

from tidemill.runtime.process.table import find_marked, read_parent

__all__ = ["database", "http_double", "mongo", "postgres", "valkey"]

ROOT = Path(__file__).parent.parent.parent


def read_all(bootstrap: str, topic: str) -> list[bytes]:
    """Return what a consumer that reads committed records sees of a topic, in the order of each partition."""
    consumer = ck.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "audit",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    partitions = list(consumer.list_topics(topic, timeout=60).topics[topic].partitions)
    consumer.assign([ck.TopicPartition(topic, n, 0) for n in partitions])
    values: list[bytes] = []
    ended: set[Any] = set()

    def done() -> bool:
        record = consumer.poll(0.5)
        while record is not None:
            if record.error() is None:
                values.append(record.value())
                ended.discard(record.partition())
            else:
                assert record.error().code() == ck.KafkaError._PARTITION_EOF, record.error()
                ended.add(record.partition())
            record = consumer.poll(0)
        return len(ended) == len(partitions)

    try:
        wait_until(done, 90, what="the end of the topic: a transaction is open")
    finally:
        consumer.close()
    return values


class Site:
    """A topic, an output folder, and the pipelines that work on them."""

    def __init__(self, folder: Path, bootstrap: str, create_topic: Callable[..., object], partitions: int = 4) -> None:
        self.folder = folder
        self.bootstrap = bootstrap
        self.topic = f"chaos-{uuid.uuid4().hex[:8]}"
        self.group = f"g-{self.topic}"
        self.partitions = partitions
        self.out = folder / "out"
        self.fed = 0
        self.running: list[PipelineProcess] = []
        create_topic(self.topic, partitions=partitions)

    def feed(self, count: int, *, sleep: float = 0.0, slow_every: int = 0, bad: bool = False) -> None:
        producer = ck.Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 5})
        for n in range(self.fed, self.fed + count):
            slow = slow_every and n % slow_every == 0
            value = json.dumps({"n": n, "sleep": sleep if (slow or not slow_every) else 0, "bad": bad})
            producer.produce(self.topic, value.encode(), partition=n % self.partitions)
        assert producer.flush(30) == 0
        self.fed += count

    def committed(self) -> dict[int, int]:
        # A consumer that reads committed would wait for the open transaction of an engine that was killed.
        settings = {"bootstrap.servers": self.bootstrap, "group.id": self.group}
        consumer, deadline = ck.Consumer({**settings, "isolation.level": "read_uncommitted"}), time.monotonic() + 30
        try:
            parts = [ck.TopicPartition(self.topic, n) for n in range(self.partitions)]
            answer: list[ck.TopicPartition] = []
            while not answer:
                try:
                    answer = consumer.committed(parts, timeout=30)
                except ck.KafkaException:  # the coordinator changes, for example
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.5)
            return {p.partition: max(0, p.offset) for p in answer}
        finally:
            consumer.close()

    def shares(self) -> list[int]:
        """Return how many partitions each member of the group has, once the group is stable."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        group = admin.describe_consumer_groups([self.group])[self.group].result(60)
        if group.state is not ck.ConsumerGroupState.STABLE:
            return []
        return sorted(len(member.assignment.topic_partitions) for member in group.members)

    def rows(self) -> list[dict[str, Any]]:
        path = self.out / "out.jsonl"
        return read_lines(path)

    def seen(self) -> Counter[int]:
        return Counter(row["n"] for row in self.rows())

    def wait_all_committed(self, seconds: float = 60.0) -> None:
        wait_until(lambda: sum(self.committed().values()) == self.fed, seconds, what=f"{self.fed} offsets committed")

    def assert_nothing_lost(self) -> Counter[int]:
        """Every message fed has a result; returns how often each was reprocessed."""
        seen = self.seen()
        assert set(seen) == set(range(self.fed))
        return Counter({n: times - 1 for n, times in seen.items() if times > 1})

    def start(
        self, worker: str = "w1", *, engines: int = 2, handler: str = "Work", in_shell: bool = False, **config: Any
    ) -> PipelineProcess:
        config.setdefault("kafka", {}).update(
            brokers=self.bootstrap, source_topic=self.topic, consumer_group=self.group
        )
        config.setdefault("sinks", {"filesystem": {"out": {"base_path": str(self.out)}}})
        config.setdefault("spark", {}).setdefault("engines", engines)
        path = self.folder / f"{worker}.yaml"
        path.write_text(yaml.safe_dump(config))
        process = (ShellPipeline if in_shell else PipelineProcess)(self, path, worker, handler)
        self.running.append(process)
        return process


class PipelineProcess:
    """One `tidemill run`, in a session of its own, marked so that whatever it leaves behind is found."""

    def __init__(self, site: Site, config: Path, worker: str, handler: str) -> None:
        self.site = site
        self.mark = uuid.uuid4().hex
        self.log_path = config.with_suffix(".log")
        env = {**os.environ, "WORKER_ID": worker, "CHAOS_MARK": self.mark, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        handler = f"tests.chaos.handlers:{handler}"
        self.process = self._launched([sys.executable, "-m", "tidemill", "run", str(config), "--handler", handler], env)

    def _launched(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self.log_path, "ab") as log:
            return subprocess.Popen(
                command,
                cwd=self.site.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def driver(self) -> int:
        """Return the process of `tidemill run`."""
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def marked(self) -> dict[int, str]:
        """Return the command of every living process that carries this pipeline's mark."""
        return find_marked(f"CHAOS_MARK={self.mark}")

    def engines(self) -> list[int]:
        """Return the Spark Python workers: children of the daemon that forks them."""
        daemons = {pid for pid, command in self.marked().items() if "-m tidemill.spark.engine.daemon" in command}
        return sorted(pid for pid in daemons if read_parent(pid) in daemons)

    def wait_working(self, seconds: float = 60.0) -> None:
        def working() -> bool:
            assert self.process.poll() is None, self.log
            return bool(self.site.rows())

        wait_until(working, seconds, what="a first result")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        """End whatever is left of it, at once."""
        while left := self.marked():
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
        self.process.wait(60)


class ShellPipeline(PipelineProcess):
    """One `tidemill run` that was typed into a shell with job control, on a terminal."""

    def _launched(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        # Wide enough for a log line above the status line, which begins with the same words.
        wide = {**env, "COLUMNS": "1000", "TERM": "xterm", "TIDEMILL_LOGGING__FORMAT": "json"}
        self.shell = Command(("-im",), wide, self.site.folder, terminal=True, program=("/bin/sh",))
        self.shell.type(shlex.join(command) + "\n")
        return self.shell.process

    @property
    def driver(self) -> int:
        """Return the process of `tidemill run`."""
        (found,) = [pid for pid, command in self.marked().items() if " -m tidemill run " in command]
        return found

    @property
    def log(self) -> str:
        return self.shell.said

    def ctrl_c(self) -> None:
        self.shell.interrupt()

    def ctrl_z(self) -> None:
        self.shell.type("\x1a")

    def fg(self) -> None:
        """Type the command that lets it go on in the foreground."""
        self.shell.type("fg\n")

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the end of the command, and of the shell; return the command's exit code."""
        wait_until(
            lambda: not [1 for command in self.marked().values() if "-m tidemill" in command], seconds, what="its end"
        )
        # What is typed before a program has left the terminal may be thrown away.
        self.shell.type("exit $?\n")
        return self.process.wait(60)

    def end(self) -> None:
        super().end()
        self.shell.close()


@pytest.fixture
def site(tmp_path: Path, embedded_kafka: Any, request: pytest.FixtureRequest) -> Iterator[Site]:
    place = Site(tmp_path, embedded_kafka.bootstrap, embedded_kafka.create_topic)
    yield place
    for pipeline in place.running:
        pipeline.end()
