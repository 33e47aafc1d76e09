"""How long things take to start: `python -m bench.start [CHECKOUT] [rounds]`; JSON lines out.

With another checkout of tidemill both are measured in turn, and the last line has the ratios of their medians. The bar
is that a pipeline has its partitions in at most 0.6 of the time of the commit from before this was worked on. What is
measured, per round: README's example from the command to its partitions, and to its first result, with one message in
the topic, the CPU time of all its processes until then, and its end; `tidemill --help`; `tidemill doctor` of that
example; `tidemill triggers run` until a trigger runs. Both use the same interpreter and packages, and each has a broker
and a cache folder of its own.

The first start of a checkout comes before the rounds, and is reported by itself: it finds nothing in the cache folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import confluent_kafka as ck
from bench.harness import ROOT, report, tree_cpu_seconds
from confluent_kafka.admin import AdminClient

from tidemill.runtime.embedded.broker import free_port

SHOUT = """
from tidemill import CollectResult, ExecutorTask, FilePayload, Handler


class Shout(Handler[str, str]):
    async def arrange(self, messages, pending):
        return [
            ExecutorTask(
                f"shout-{m.offset}", ["a-z", "A-Z"], source_offsets=[m.offset], binary_path="tr", stdin=m.payload
            )
            for m in messages
        ]

    async def on_task_complete(self, result):
        return CollectResult(files=[FilePayload(path="shouted.jsonl", data={"text": result.stdout})])
"""
WAITER = """
import asyncio
from pathlib import Path

from tidemill.triggers.base import BaseTrigger, TriggerEvent


class Waiter(BaseTrigger):
    def serialize(self):
        return "waiter.Waiter", {}

    async def run(self):
        Path("runs").touch()
        await asyncio.Event().wait()
        yield TriggerEvent(None)
"""
PARTITIONS = 4
LIMIT_SECONDS = 180.0
#: How long the first start may take to leave what later ones use.
LEFT_SECONDS = 120.0


class Checkout:
    """One version of tidemill, with a folder for what it needs."""

    def __init__(self, name: str, root: Path, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.runs = 0
        folder.mkdir()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
        self.env = {**clean, "PYTHONPATH": str(root / "src"), "XDG_CACHE_HOME": str(folder / "cache")}
        self.leaves_archive = (root / "src/tidemill/spark/session/archive.py").exists()
        (folder / "shout.py").write_text(SHOUT)
        (folder / "waiter.py").write_text(WAITER)
        (folder / "list.yaml").write_text("- {name: waiter, classpath: waiter.Waiter}\n")

    def write_config(self, group: str) -> None:
        (self.folder / "shout.yaml").write_text(
            f"kafka: {{brokers: '{self.address}', source_topic: in, consumer_group: {group}}}\n"
            "sinks: {filesystem: {out: {base_path: output}}}\n"
        )

    @contextlib.contextmanager
    def broker(self) -> Iterator[None]:
        """Run README's broker, with one message in the topic, until the block ends."""
        # What it downloads is not measured.
        environ = {**self.env, "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", "")}
        log = self.folder / "log.txt"
        words = ("broker", "--port", self.address.rpartition(":")[2], "--topic", f"in:{PARTITIONS}")
        with self.command(*words, environ=environ) as process:
            self.wait(process, lambda: "Kafka is ready" in log.read_text())
            producer = ck.Producer({"bootstrap.servers": self.address, "log_level": 0})
            producer.produce("in", b"tide")
            producer.flush(60)
            yield

    @contextlib.contextmanager
    def command(self, *words: str, environ: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command until the block ends."""
        with (self.folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tidemill", *words],
                cwd=self.folder, env=environ or self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def wait(self, process: subprocess.Popen[bytes], reached: Callable[[], bool]) -> float:
        """Return the moment at which something is so."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not reached():
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.name}: {(self.folder / 'log.txt').read_text()[-3000:]}")
            time.sleep(0.02)
        return time.monotonic()

    def run(self, wait_for_archive: bool = False) -> dict[str, float]:
        """Run README's example from its start to its end."""
        self.runs += 1
        group = f"{self.name}-{self.runs}"
        self.write_config(group)
        results = self.folder / "output" / "shouted.jsonl"
        results.unlink(missing_ok=True)
        admin = AdminClient({"bootstrap.servers": self.address})

        def is_assigned() -> bool:
            try:
                found = admin.describe_consumer_groups([group])[group].result(10)
            except ck.KafkaException:
                return False
            shares = [len(member.assignment.topic_partitions) for member in found.members]
            return all(shares) and sum(shares) == PARTITIONS

        started = time.monotonic()
        with self.command("run", "shout.yaml", "--handler", "shout:Shout") as process:
            assigned = self.wait(process, is_assigned) - started
            cpu = tree_cpu_seconds(process.pid)
            first = self.wait(process, lambda: results.exists() and bool(results.read_bytes())) - started
            if wait_for_archive and self.leaves_archive:
                deadline = time.monotonic() + LEFT_SECONDS
                while not list((self.folder / "cache").rglob("classes.jsa")) and time.monotonic() < deadline:
                    time.sleep(0.1)
            told = time.monotonic()
        if results.read_text() != '{"text":"TIDE"}\n':
            raise AssertionError(f"{self.name}: {results.read_text()!r}")
        return {"assigned": assigned, "first_result": first, "cpu": cpu, "end": time.monotonic() - told}

    def once(self, *words: str) -> float:
        """Return how long a command takes that ends by itself."""
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tidemill", *words],
            cwd=self.folder, env=self.env, capture_output=True, timeout=LIMIT_SECONDS,
        )  # fmt: skip
        if done.returncode != 0:
            raise AssertionError(f"{self.name}: {words}: {done.stdout.decode()}{done.stderr.decode()}")
        return time.monotonic() - started

    def trigger(self) -> float:
        """Return how long a trigger host takes until its trigger runs."""
        runs = self.folder / "runs"
        runs.unlink(missing_ok=True)
        started = time.monotonic()
        with self.command("triggers", "run", "list.yaml") as process:
            return self.wait(process, runs.exists) - started

    def measure(self) -> dict[str, float]:
        return {
            **self.run(),
            "help": self.once("--help"),
            "doctor": self.once("doctor", "shout.yaml"),
            "triggers": self.trigger(),
        }


def main() -> None:
    other = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    if other is not None and not (other / "src/tidemill").is_dir():
        sys.exit(f"error: {other} is not a checkout of tidemill")
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as scratch, contextlib.ExitStack() as stack:
        checkouts = [Checkout("this", ROOT, Path(scratch) / "this")]
        if other is not None:
            checkouts.append(Checkout("other", other, Path(scratch) / "other"))
        for checkout in checkouts:
            stack.enter_context(checkout.broker())
            report(bench="start first", checkout=checkout.name, **checkout.run(wait_for_archive=True))
        rows: dict[str, list[dict[str, float]]] = {checkout.name: [] for checkout in checkouts}
        for _ in range(rounds):
            for checkout in checkouts:
                row = checkout.measure()
                rows[checkout.name].append(row)
                report(bench="start", checkout=checkout.name, load=os.getloadavg()[0], **row)
    medians = {
        name: {key: statistics.median(row[key] for row in found) for key in found[0]} for name, found in rows.items()
    }
    for name, row in medians.items():
        report(bench="start median", checkout=name, **row)
    if other is not None:
        report(bench="start ratio", **{key: value / medians["other"][key] for key, value in medians["this"].items()})


if __name__ == "__main__":
    main()
