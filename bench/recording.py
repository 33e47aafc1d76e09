"""What the flight recorder costs a pipeline, JSON lines out: `python -m bench.recording [known|cat]`.

Two pipelines run beside each other, one that records with the default settings and one that records nothing; messages
go to one and then to the other, and all that was recorded is found again.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from bench.harness import Bench, chosen, report, tree_cpu_seconds
from bench.pipeline import LINES, check_lines

NAMES = {False: "plain", True: "recorded"}


def compare(folder: Path, handler: str, values: list[bytes], rounds: int, bar: float, **config: Any) -> None:
    """Measure rounds in turn, and check that each message was recorded once per time it was committed."""
    bench = Bench(folder)
    recordings = folder / "recordings"
    speeds: dict[bool, list[float]] = {False: [], True: []}
    costs: dict[bool, list[float]] = {False: [], True: []}

    def turn(on: bool) -> None:
        bench.topic = f"in-{NAMES[on]}"
        bench.forget_probe()

    try:
        with contextlib.ExitStack() as running:
            processes = {}
            for on, name in NAMES.items():
                bench.broker.create_topic(f"in-{name}", partitions=bench.partitions)
                turn(on)
                files = {"filesystem": {"out": {"base_path": str(folder / name)}}}
                debug = {"enabled": on, "db_dir": str(recordings)}
                pipeline = bench.pipeline(handler, name, sinks=files, debug=debug, **config)
                processes[on] = running.enter_context(pipeline)
                bench.feed(values[:500])
                bench.wait_committed(name, 500)
                bench.wait_settled(name, 2)
            for n in range(rounds * 2):
                on = n % 2 == 1
                name = NAMES[on]
                turn(on)
                goal = bench.committed(name) + len(values)
                (folder / name / "out.jsonl").unlink()
                pid = processes[on].pid
                start, cpu = time.monotonic(), tree_cpu_seconds(pid)
                bench.feed(values)
                bench.wait_committed(name, goal)
                wall = time.monotonic() - start
                time.sleep(2)  # what was recorded follows within two seconds
                speeds[on].append(len(values) / wall)
                costs[on].append((tree_cpu_seconds(pid) - cpu) / len(values) * 1e6)
                check_lines(folder / name / "out.jsonl", values)
                report(bench=handler, recorded=on, round=n // 2, per_second=speeds[on][-1], cpu_us=costs[on][-1])
        found, size = count_rows(recordings)
        expected = 500 + rounds * len(values)
        if found < expected:
            raise AssertionError(f"{found} rows of {expected} messages")
    finally:
        bench.close()
    cpu = {on: statistics.median(found) for on, found in costs.items()}
    report(
        bench=handler,
        rows=found,
        bytes_per_row=size / found,
        median_cpu_us={NAMES[on]: round(value, 2) for on, value in cpu.items()},
        recorder_cpu_us=cpu[True] - cpu[False],
        cpu_ratio=cpu[False] / cpu[True],
        ratio=statistics.median(speeds[True]) / statistics.median(speeds[False]),
        bar_ratio=bar,
    )


def count_rows(recordings: Path) -> tuple[int, int]:
    """Return how many messages were recorded, and the bytes of everything that was."""
    rows = 0
    for path in recordings.rglob("*.parquet"):
        if "precomputed" in pq.read_schema(path).names:
            rows += pq.read_metadata(path).num_rows
    return rows, sum(path.stat().st_size for path in recordings.rglob("*") if path.is_file())


def known(folder: Path, count: int = 200_000, rounds: int = 4) -> None:
    """Known results."""
    compare(folder, "Known", [b"%07d %s" % (n, LINES[n % len(LINES)][:90]) for n in range(count)], rounds, 0.90)


def cat(folder: Path, rounds: int = 4) -> None:
    """A process per message."""
    compare(folder, "Cat", list(LINES), rounds, 0.95, executor={"binary_path": "/bin/cat"})


if __name__ == "__main__":
    measures = {"known": known, "cat": cat}
    for name in chosen(measures):
        where = Path(tempfile.mkdtemp(prefix="tidemill-bench-"))
        try:
            measures[name](where)
        finally:
            shutil.rmtree(where, ignore_errors=True)
