"""Backfill against its bars: `python -m bench.backfill [messages] [rounds]`; JSON lines out.

A topic has 1,000,000 messages already; each has a known result that goes into a file. The same command runs with
`local[1]` and `local[2]`, in turn, over the same broker. What counts is the time from the first message arranged to
the last one done, as the outcomes tell it; the whole command, with the start of Spark, is reported beside it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.dataset as ds
import yaml
from bench.harness import ROOT, TICKS, Bench, report, tree_cpu_seconds, tree_rss
from bench.pipeline import LINES

from tidemill.runtime.process.table import read_stat


class Memory(threading.Thread):
    """Looks at the processes of a tree while they run."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.over = threading.Event()
        self._cpu: dict[int, float] = {}
        #: Seconds since the start, the largest engine, the JVM and the driver, in bytes.
        self.samples: list[tuple[float, int, int, int]] = []

    def run(self) -> None:
        start = time.monotonic()
        while not self.over.wait(0.5):
            sizes = tree_rss(self.pid)
            engines = [size for command, size in sizes.values() if "tidemill.spark.engine.daemon" in command]
            jvms = [size for command, size in sizes.values() if "SparkSubmit" in command or "java" in command]
            driver = sizes.get(self.pid, ("", 0))[1]
            for pid, (command, _) in sizes.items():
                if "tidemill.spark.engine.daemon" in command:
                    self._cpu[pid] = max(self._cpu.get(pid, 0.0), own_cpu_seconds(pid))
            if engines:
                self.samples.append((time.monotonic() - start, max(engines), max(jvms, default=0), driver))

    @property
    def cpu_seconds(self) -> float:
        """The CPU time of all engines, but for what they used after they were last looked at."""
        return sum(self._cpu.values())

    def third(self, number: int, column: int) -> float:
        """Return the largest megabytes in one third of the samples."""
        size = len(self.samples) // 3
        part = self.samples[number * size : (number + 1) * size]
        return max(sample[column] for sample in part) / 1e6


def own_cpu_seconds(pid: int) -> float:
    """Return the CPU time of one process; 0 if it has gone."""
    try:
        fields = read_stat(pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def once(bench: Bench, folder: Path, cores: int, count: int) -> dict[str, Any]:
    """Run one backfill of the whole topic and check what it did."""
    out, outcomes = folder / "out", folder / "outcomes"
    config = {
        "kafka": {"brokers": bench.broker.bootstrap, "source_topic": bench.topic, "consumer_group": "backfill"},
        "sinks": {"filesystem": {"out": {"base_path": str(out)}}},
        "spark": {"master": f"local[{cores}]"},
        "logging": {"level": "WARNING"},
    }
    (folder / "backfill.yaml").write_text(yaml.safe_dump(config))
    command = ["-m", "tidemill", "backfill", "backfill.yaml", "--handler", "bench.handlers:Known"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command, "--from", "earliest", "--outcomes", str(outcomes)],
        cwd=folder, env=env, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    memory = Memory(process.pid)
    memory.start()
    code = process.wait(600)
    whole = time.monotonic() - started
    memory.over.set()
    memory.join()
    if code != 0:
        raise AssertionError(f"the backfill ended with {code}")
    table = ds.dataset(outcomes, format="parquet").to_table(
        columns=["partition", "offset", "started_at", "finished_at"]
    )
    with open(out / "out.jsonl", "rb") as lines:
        written = sum(1 for _ in lines)
    if table.num_rows != count or written != count:
        raise AssertionError(f"{table.num_rows} outcomes and {written} lines for {count} messages")
    work = (pc.max(table["finished_at"]).as_py() - pc.min(table["started_at"]).as_py()).total_seconds()
    shutil.rmtree(out)
    shutil.rmtree(outcomes)
    return {
        "cores": cores,
        "work_seconds": work,
        "command_seconds": whole,
        "per_second": count / work,
        "engine_cpu_us": memory.cpu_seconds / count * 1e6,
        "engine_mb_first_third": memory.third(0, 1),
        "engine_mb_last_third": memory.third(2, 1),
        "jvm_mb_first_third": memory.third(0, 2),
        "jvm_mb_last_third": memory.third(2, 2),
        "driver_mb_last_third": memory.third(2, 3),
    }


def backfill(folder: Path, count: int = 1_000_000, rounds: int = 3) -> None:
    """Compare `local[2]` with `local[1]`."""
    bench = Bench(folder)
    try:
        for begin in range(0, count, 100_000):
            bench.feed(
                [b"%07d %s" % (n, LINES[n % len(LINES)][:90]) for n in range(begin, min(count, begin + 100_000))]
            )
        ratios = []
        for n in range(rounds):
            found = {}
            for cores in (1, 2):
                before = tree_cpu_seconds(bench.broker.pid or 0)
                found[cores] = once(bench, folder, cores, count)
                found[cores]["broker_cpu_seconds"] = tree_cpu_seconds(bench.broker.pid or 0) - before
                report(bench="backfill", round=n, **found[cores])
            ratios.append(found[1]["work_seconds"] / found[2]["work_seconds"])
        report(bench="backfill", messages=count, median_ratio=statistics.median(ratios), bar_ratio=1.4)
    finally:
        bench.close()


if __name__ == "__main__":
    where = Path(tempfile.mkdtemp(prefix="tidemill-bench-"))
    try:
        backfill(where, *(int(argument) for argument in sys.argv[1:]))
    finally:
        shutil.rmtree(where, ignore_errors=True)
