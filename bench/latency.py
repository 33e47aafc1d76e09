"""How long a message takes from `produce` until its result can be read, beside a bare loop that does the same.

The bare loop is one process that consumes, spawns `cat` for each message and produces its output; it commits nothing
in time, and a broker's two hops and the `cat` are in its times as in the pipeline's.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka as ck
from bench.harness import Bench, report

#: How many messages come per second, and one in how many takes three seconds.
PER_SECOND = 20.0
SLOW = 200
#: A visitor of the group stays for so long, and stays away for as long.
VISIT_SECONDS = 10.0

BARE = """
import os, sys
import confluent_kafka as ck

dup2 = os.POSIX_SPAWN_DUP2
consumer = ck.Consumer({"bootstrap.servers": sys.argv[1], "group.id": "bare", "auto.offset.reset": "earliest",
                        "fetch.wait.max.ms": 50})
producer = ck.Producer({"bootstrap.servers": sys.argv[1], "linger.ms": 0, "acks": "all", "enable.idempotence": True,
                        "socket.nagle.disable": True})
consumer.subscribe(["in"])
while True:
    producer.poll(0)
    record = consumer.poll(0.25)
    if record is None or record.error() is not None:
        continue
    stdin, feed = os.pipe2(os.O_CLOEXEC)
    out, stdout = os.pipe2(os.O_CLOEXEC)
    pid = os.posix_spawn("/bin/cat", ["cat"], os.environ, file_actions=((dup2, stdin, 0), (dup2, stdout, 1)))
    os.close(stdin)
    os.close(stdout)
    os.write(feed, record.value())
    os.close(feed)
    data = b""
    while chunk := os.read(out, 65536):
        data += chunk
    os.close(out)
    os.waitpid(pid, 0)
    producer.produce("out", data)
"""


class Probe:
    """Sends messages to `in` and reads their results from `out`.

    Attributes:
        took: How many seconds each value took.
        tags: What the results had behind their value.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._bootstrap = bench.broker.bootstrap
        self._sent: dict[bytes, float] = {}
        self._places: dict[bytes, int] = {}
        self.took: dict[bytes, float] = {}
        self.tags: dict[int, list[bytes]] = {}
        self._over = threading.Event()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read results until the block ends."""
        consumer = ck.Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": "latency-probe",
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 5,
            }
        )
        consumer.subscribe(["out"])
        reader = threading.Thread(target=self._read, args=(consumer,))
        reader.start()
        try:
            yield
        finally:
            self._over.set()
            reader.join()
            consumer.close()

    def _read(self, consumer: ck.Consumer) -> None:
        while not self._over.is_set():
            record = consumer.poll(0.1)
            if record is None or record.error() is not None:
                continue
            value, _, tag = (record.value() or b"").partition(b"|")
            if value in self._sent and value not in self.took:
                self.took[value] = time.monotonic() - self._sent[value]
                self.tags.setdefault(self._places[value], []).append(tag)

    def send(self, count: int, *, slow: bool) -> None:
        """Send messages at their rate, and wait for all of their results."""
        producer = ck.Producer({"bootstrap.servers": self._bootstrap, "linger.ms": 0})
        partitions = self._bench.partitions
        for n in range(count):
            value = (b"slow %d" if slow and n % SLOW == SLOW // 2 else b"fast %d") % n
            self._places[value] = n % partitions
            self._sent[value] = time.monotonic()
            producer.produce(self._bench.topic, value, partition=n % partitions)
            producer.poll(0)
            time.sleep(1 / PER_SECOND)
        producer.flush(10)
        deadline = time.monotonic() + 60
        while len(self.took) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        if len(self.took) != count:
            raise AssertionError(f"{len(self.took)} of {count} results were readable")

    def list_milliseconds(self, partitions: set[int] | None = None) -> list[float]:
        """Return the milliseconds of all but the slow ones, in order; of some partitions, or of all."""
        return sorted(
            seconds * 1000
            for value, seconds in self.took.items()
            if value.startswith(b"fast") and (partitions is None or self._places[value] in partitions)
        )


def summarize(found: list[float]) -> dict[str, float]:
    """Return what is reported of times in order, in milliseconds."""
    return {"p50_ms": found[len(found) // 2], "p99_ms": found[int(len(found) * 0.99)], "max_ms": found[-1]}


def stable(folder: Path, count: int = 1200) -> None:
    """From `produce` to a result that can be read, one message in 200 taking three seconds; first the bare loop."""
    found = {}
    for name, amount in (("bare", count // 2), ("pipeline", count)):
        bench = Bench(folder / name)
        bench.broker.create_topic("out", partitions=1)
        probe = Probe(bench)
        try:
            with bare_loop(bench) if name == "bare" else running_pipeline(bench), probe.reading():
                probe.send(amount, slow=name == "pipeline")
        finally:
            bench.close()
        found[name] = summarize(probe.list_milliseconds())
        report(bench="latency", of=name, messages=amount, **found[name])
    ratios = {f"{key[:3]}_ratio": found["pipeline"][key] / found["bare"][key] for key in ("p50_ms", "p99_ms")}
    report(bench="latency", **ratios, bar_p50_ms=3, bar_p99_ms=8)


@contextlib.contextmanager
def bare_loop(bench: Bench) -> Iterator[None]:
    """Run the bare loop until the block ends."""
    process = subprocess.Popen([sys.executable, "-c", BARE, bench.broker.bootstrap])
    try:
        bench.feed([b"warm %d" % n for n in range(100)])
        bench.wait_settled("bare", 1)
        time.sleep(2)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running_pipeline(bench: Bench) -> Iterator[None]:
    """Run a pipeline with two engines until the block ends."""
    with bench.pipeline("Sleepy", "latency", sinks={"kafka": {"out": {"topic": "out"}}}):
        bench.feed([b"warm %d" % n for n in range(100)])
        bench.wait_committed("latency", 100)
        bench.wait_settled("latency", 2)
        yield


def joining(folder: Path, visits: int = 6) -> None:
    """The same for partitions that stay where they are while another member joins the group and leaves it again."""
    bench = Bench(folder, partitions=8)
    bench.broker.create_topic("out", partitions=1)
    probe = Probe(bench)
    over = threading.Event()
    visitor = threading.Thread(target=_visit, args=(bench.broker.bootstrap, over))
    try:
        with running_pipeline(bench), probe.reading():
            visitor.start()
            probe.send(int(visits * 2 * VISIT_SECONDS * PER_SECOND), slow=False)
    finally:
        over.set()
        visitor.join()
        bench.close()
    # A result says which engine made it; where a visitor held a partition, its messages waited until it had left.
    stayed = {
        place
        for place, tags in probe.tags.items()
        if len(set(tags)) == 1 and probe.list_milliseconds({place})[-1] < VISIT_SECONDS * 500
    }
    if not stayed or len(stayed) == bench.partitions:
        raise AssertionError(f"{len(stayed)} of {bench.partitions} partitions stayed")
    found = probe.list_milliseconds(stayed)
    report(bench="joining", visits=visits, stayed=len(stayed), messages=len(found), **summarize(found), bar_p99_ms=50)


def _visit(bootstrap: str, over: threading.Event) -> None:
    while not over.is_set():
        consumer = ck.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "latency",
                "partition.assignment.strategy": "cooperative-sticky",
                "enable.auto.commit": False,
            }
        )
        consumer.subscribe(["in"])
        leaves_at = time.monotonic() + VISIT_SECONDS
        while time.monotonic() < leaves_at and not over.is_set():
            consumer.poll(0.1)
        consumer.close()
        over.wait(VISIT_SECONDS)
