"""What the flight recorder costs a pipeline, JSON lines out: `python -m bench.recording [known|history|resident|cat]`.

Two pipelines run beside each other: one with recorder, web UI and metrics on, with default settings, one with all
of that off. Messages go to one and then to the other, and all that was recorded is found again. CPU time is that of a
pipeline's processes: of its driver, of Spark's JVM, and of engines with their tasks; what the two use while nothing
happens is measured too, since it is not a cost per message.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from bench.harness import TICKS, Bench, chosen, report, tree, tree_rss
from bench.pipeline import ECHO, LINES, check_lines

from tidemill.runtime.process.table import read_command, read_stat

#: So long nothing happens when the two are compared at rest.
IDLE_SECONDS = 20
NAMES = {False: "plain", True: "recorded"}


def compare(
    folder: Path,
    label: str,
    handler: str,
    values: list[bytes],
    rounds: int,
    bar: float,
    *,
    starts: int = 1,
    with_history: bool = False,
    **config: Any,
) -> None:
    """Measure rounds in turn, and check that each message was recorded once per time it was committed.

    Two pipelines that are alike differ by up to 5 % from start to start, and less from round to round.

    Args:
        folder: For all files.
        label: What is measured.
        handler: The handler.
        values: The messages of a round.
        rounds: How many rounds for each start.
        bar: The least ratio of the speeds.
        starts: How often the two are started.
        with_history: The one that records writes a history, too.
        config: Of both pipelines.
    """
    bench = Bench(folder)
    load = os.getloadavg()[0]
    recordings = folder / "recordings"
    speeds: dict[bool, list[float]] = {False: [], True: []}
    costs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    idle: dict[bool, float] = {}
    memory: dict[bool, dict[str, float]] = {}

    def turn(on: bool) -> None:
        bench.topic = f"in-{NAMES[on]}"
        bench.forget_probe()

    try:
        for name in NAMES.values():
            bench.broker.create_topic(f"in-{name}", partitions=bench.partitions)
        for start_number in range(starts):
            with contextlib.ExitStack() as running:
                processes = {}
                for on in sorted(NAMES, reverse=start_number % 2 == 1):
                    name = NAMES[on]
                    turn(on)
                    files = {"filesystem": {"out": {"base_path": str(folder / name)}}}
                    debug = {"enabled": on, "db_dir": str(recordings)}
                    history = {"path": str(folder / f"history-{name}")} if with_history and on else {}
                    pipeline = bench.pipeline(
                        handler,
                        name,
                        sinks=files,
                        debug=debug,
                        metrics={"enabled": on, "port": 0},
                        history=history,
                        **config,
                    )
                    processes[on] = running.enter_context(pipeline)
                    goal = bench.committed(name) + 500
                    bench.feed(values[:500])
                    bench.wait_committed(name, goal)
                    bench.wait_settled(name, 2)
                for n in range(rounds * 2):
                    on = (n + start_number) % 2 == 1
                    name = NAMES[on]
                    turn(on)
                    goal = bench.committed(name) + len(values)
                    (folder / name / "out.jsonl").unlink()
                    pid = processes[on].pid
                    start, before = time.monotonic(), measure_cpu(pid)
                    bench.feed(values)
                    bench.wait_committed(name, goal)
                    wall = time.monotonic() - start
                    time.sleep(2)  # what was recorded follows within two seconds
                    speeds[on].append(len(values) / wall)
                    after = measure_cpu(pid)
                    costs[on].append({part: (after[part] - before[part]) / len(values) * 1e6 for part in after})
                    check_lines(folder / name / "out.jsonl", values)
                    spent = {part: round(cost, 2) for part, cost in costs[on][-1].items()}
                    at = {"start": start_number, "round": n // 2}
                    report(bench=label, recorded=on, **at, per_second=speeds[on][-1], cpu_us=spent)
                if start_number < starts - 1:
                    continue
                for on, process in processes.items():
                    memory[on] = measure_memory(process.pid)
                    before = measure_cpu(process.pid)
                    time.sleep(IDLE_SECONDS)
                    idle[on] = (sum(measure_cpu(process.pid).values()) - sum(before.values())) / IDLE_SECONDS
        found, size = count_rows(recordings)
        expected = starts * (500 + rounds * len(values))
        if found < expected:
            raise AssertionError(f"{found} rows of {expected} messages")
    finally:
        bench.close()
    # By part: a process that is told from Spark's too late moves from one part to another in some rounds.
    cpu = {on: sum(statistics.median(cost[part] for cost in found) for part in found[0]) for on, found in costs.items()}
    parts = {
        part: round(statistics.median(a[part] - b[part] for a, b in zip(costs[True], costs[False], strict=True)), 2)
        for part in costs[True][0]
    }
    each = [
        statistics.median(speeds[True][n : n + rounds]) / statistics.median(speeds[False][n : n + rounds])
        for n in range(0, starts * rounds, rounds)
    ]
    report(
        bench=label,
        rows=found,
        bytes_per_row=size / found,
        median_cpu_us={NAMES[on]: round(value, 2) for on, value in cpu.items()},
        recorder_cpu_us=cpu[True] - cpu[False],
        recorder_cpu_us_by_process=parts,
        idle_percent_of_a_core={NAMES[on]: round(value * 100, 2) for on, value in idle.items()},
        memory_mb={NAMES[on]: sizes for on, sizes in memory.items()},
        cpu_ratio=cpu[False] / cpu[True],
        ratio_of_each_start=[round(ratio, 3) for ratio in each],
        ratio=statistics.median(speeds[True]) / statistics.median(speeds[False]),
        bar_ratio=bar,
        load=[load, os.getloadavg()[0]],
    )


def name_part(pid: int, driver: int) -> str:
    """Return which part of a pipeline a process is."""
    if pid == driver:
        return "driver"
    return "jvm" if "java" in read_command(pid).split(" ", 1)[0] else "engines"


def measure_cpu(driver: int) -> dict[str, float]:
    """Return the seconds of CPU time that each part of a pipeline has used; of engines, with tasks that ended."""
    used = {"driver": 0.0, "jvm": 0.0, "engines": 0.0}
    for pid in tree(driver):
        with contextlib.suppress(OSError, IndexError):
            part = name_part(pid, driver)
            fields = read_stat(pid)[11:15] if part == "engines" else read_stat(pid)[11:13]
            used[part] += sum(int(field) for field in fields) / TICKS
    return used


def measure_memory(driver: int) -> dict[str, float]:
    """Return the resident megabytes of the driver, and of the largest process of an engine."""
    sizes = {"driver": 0.0, "engines": 0.0}
    for pid, (_, size) in tree_rss(driver).items():
        part = name_part(pid, driver)
        if part in sizes:
            sizes[part] = max(sizes[part], round(size / 1e6, 1))
    return sizes


def count_rows(recordings: Path) -> tuple[int, int]:
    """Return how many messages were recorded, and the bytes of everything that was."""
    rows = 0
    for path in recordings.rglob("*.parquet"):
        if "precomputed" in pq.read_schema(path).names:
            rows += pq.read_metadata(path).num_rows
    return rows, sum(path.stat().st_size for path in recordings.rglob("*") if path.is_file())


def make_lines(count: int) -> list[bytes]:
    """Return so many short messages."""
    return [b"%07d %s" % (n, LINES[n % len(LINES)][:90]) for n in range(count)]


def known(folder: Path, count: int = 200_000, rounds: int = 3, starts: int = 3) -> None:
    """Known results."""
    compare(folder, "known", "Known", make_lines(count), rounds, 0.90, starts=starts)


def history(folder: Path, count: int = 200_000, rounds: int = 4) -> None:
    """Known results, with a history as well."""
    compare(folder, "known, history", "Known", make_lines(count), rounds, 0.87, with_history=True)


def resident(folder: Path, count: int = 200_000, rounds: int = 3, starts: int = 5) -> None:
    """A resident echo worker that gets tasks ahead."""
    program = {"args": ["-I", "-S", "-c", ECHO], "send_ahead": 16}
    executor = {"binary_path": sys.executable, "mode": "resident", "resident": program}
    compare(folder, "resident", "Cat", make_lines(count), rounds, 0.90, starts=starts, executor=executor)


def cat(folder: Path, rounds: int = 4) -> None:
    """A process per message."""
    compare(folder, "cat", "Cat", list(LINES), rounds, 0.95, executor={"binary_path": "/bin/cat"})


if __name__ == "__main__":
    measures = {"known": known, "history": history, "resident": resident, "cat": cat}
    for name in chosen(measures):
        where = Path(tempfile.mkdtemp(prefix="tidemill-bench-"))
        try:
            measures[name](where)
        finally:
            shutil.rmtree(where, ignore_errors=True)
