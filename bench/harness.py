"""What the pipeline benchmarks share: a broker, a pipeline as a process of its own, and the CPU time of a tree."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import yaml
from confluent_kafka.admin import AdminClient

from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.runtime.process.table import find_descendants, read_command, read_stat

ROOT = Path(__file__).parent.parent
TICKS = os.sysconf("SC_CLK_TCK")


def report(**row: Any) -> None:
    """Print one JSON line."""
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def chosen(names: Iterable[str]) -> list[str]:
    """Return those of the names that the command line has, or all; a name that is not one ends the process."""
    known = list(names)
    wanted = sys.argv[1:] or known
    if unknown := [name for name in wanted if name not in known]:
        sys.exit(f"error: nothing is measured under {', '.join(unknown)}; choose from {', '.join(known)}")
    return wanted


def tree(root: int) -> list[int]:
    """Return the ids of a process and of all that descend from it."""
    return [root, *find_descendants(root)]


def tree_cpu_seconds(root: int) -> float:
    """Return user and system time of a tree, its reaped children included."""
    total = 0
    for pid in tree(root):
        with contextlib.suppress(OSError, IndexError):
            total += sum(int(field) for field in read_stat(pid)[11:15])
    return total / TICKS


def tree_rss(root: int) -> dict[int, tuple[str, int]]:
    """Return command and resident bytes of each process of a tree."""
    sizes = {}
    for pid in tree(root):
        with contextlib.suppress(OSError, IndexError, ValueError):
            sizes[pid] = (read_command(pid)[:120], int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096)
    return sizes


class Bench:
    """A broker with a topic, and pipelines over it."""

    def __init__(self, folder: Path, topic: str = "in", partitions: int = 4) -> None:
        self.folder = folder
        self.topic = topic
        self.partitions = partitions
        self.broker = EmbeddedBroker(folder / "kafka").start()
        self.broker.create_topic(topic, partitions=partitions)
        self.produced = 0

    def close(self) -> None:
        self.broker.close()

    def feed(self, values: list[bytes]) -> None:
        producer = ck.Producer({"bootstrap.servers": self.broker.bootstrap, "linger.ms": 5, "acks": "1"})
        for n, value in enumerate(values):
            while True:
                try:
                    producer.produce(self.topic, value, partition=n % self.partitions)
                    break
                except BufferError:
                    producer.poll(0.05)
        producer.flush(60)
        self.produced += len(values)

    def forget_probe(self) -> None:
        """Ask about another topic or group from now on."""
        self.__dict__.pop("_probe", None)

    def readable(self, topic: str) -> int:
        """Return how many records a consumer with read_committed finds in a topic."""
        consumer = ck.Consumer(
            {"bootstrap.servers": self.broker.bootstrap, "group.id": "audit", "enable.partition.eof": True}
        )
        partitions = list(consumer.list_topics(topic, timeout=10).topics[topic].partitions)
        consumer.assign([ck.TopicPartition(topic, n, 0) for n in partitions])
        count, ended = 0, 0
        while ended < len(partitions):
            for record in consumer.consume(10_000, 1.0):
                if record.error() is None:
                    count += 1
                else:
                    ended += 1
        consumer.close()
        return count

    def committed(self, group: str) -> int:
        if not hasattr(self, "_probe"):
            self._probe = ck.Consumer(
                {"bootstrap.servers": self.broker.bootstrap, "group.id": group, "enable.auto.commit": False}
            )
        parts = [ck.TopicPartition(self.topic, n) for n in range(self.partitions)]
        try:
            return sum(max(0, p.offset) for p in self._probe.committed(parts, timeout=10))
        except ck.KafkaException:
            return 0  # a fresh broker has no coordinator yet

    def wait_settled(self, group: str, members: int, timeout: float = 60.0) -> None:
        """Wait until the group is stable, with its partitions shared by so many members."""
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap})
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(ck.KafkaException):  # a fresh broker has no coordinator yet
                found = admin.describe_consumer_groups([group])[group].result(10)
                shares = [len(member.assignment.topic_partitions) for member in found.members]
                if found.state is ck.ConsumerGroupState.STABLE and len(shares) == members and all(shares):
                    return
            time.sleep(0.1)
        raise TimeoutError(f"the group {group} did not settle")

    def wait_committed(self, group: str, count: int, timeout: float = 300.0) -> None:
        deadline = time.monotonic() + timeout
        while self.committed(group) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {self.committed(group)} of {count} committed")
            time.sleep(0.02)

    @contextlib.contextmanager
    def pipeline(self, handler: str, group: str, **config: Any) -> Iterator[subprocess.Popen[bytes]]:
        """Run a pipeline as its own process until the block ends; the log is `pipeline.log` in the folder."""
        self.forget_probe()
        config.setdefault("kafka", {}).update(
            brokers=self.broker.bootstrap, source_topic=self.topic, consumer_group=group
        )
        config.setdefault("spark", {}).setdefault("engines", 2)
        config.setdefault("metrics", {"enabled": False})
        config.setdefault("debug", {"enabled": False})
        path = self.folder / f"{group}.yaml"
        path.write_text(yaml.safe_dump(config))
        env = {**os.environ, "WORKER_ID": f"bench-{group}", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        with open(self.folder / "pipeline.log", "ab") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tidemill",
                    "run",
                    str(path),
                    "--handler",
                    f"bench.handlers:{handler}",
                ],
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
