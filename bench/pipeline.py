"""The pipeline's speed against its bars, JSON lines out: `python -m bench.pipeline [cat|resident ...]`.

Everything runs on this machine: a real broker, Spark, and the pipeline as a process of its own. Ratios compare two
things measured in the same run, in turn.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.harness import ROOT, Bench, chosen, report, tree_cpu_seconds, tree_rss
from bench.spawn_floor import bare_cat_loop

from bench import latency

LINES = gzip.decompress((ROOT / "examples/access_log/access.log.gz").read_bytes()).splitlines()[:10_000]


def bare_loop() -> tuple[float, float]:
    """Return the CPU and the wall seconds of the bare loop over all lines."""

    def cpu_seconds() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    cpu, start = cpu_seconds(), time.monotonic()
    if bare_cat_loop(LINES, 8) != sum(len(line) for line in LINES):
        raise AssertionError("the bare loop lost output")
    return cpu_seconds() - cpu, time.monotonic() - start


def check_lines(path: Path, values: list[bytes]) -> None:
    """Fail unless the file holds every value at least once and nothing else."""
    got = path.read_bytes().splitlines()
    if sorted(set(got)) != sorted(set(values)) or len(got) < len(values):
        raise AssertionError(f"{path}: {len(got)} lines for {len(values)} messages, or not the same")


def cat(folder: Path, rounds: int = 5) -> None:
    """CPU time and wall time per message of `cat` per message, against a bare loop."""
    bench = Bench(folder)
    ratios, speeds = [], []
    files = {"filesystem": {"out": {"base_path": str(folder / "out")}}}
    try:
        with bench.pipeline("Cat", "cat", executor={"binary_path": "/bin/cat"}, sinks=files) as process:
            bench.feed(LINES[:500])
            bench.wait_committed("cat", 500)
            bench.wait_settled("cat", 2)
            time.sleep(2)
            idle_from, cpu_from = time.monotonic(), tree_cpu_seconds(process.pid)
            time.sleep(10)
            idle = (tree_cpu_seconds(process.pid) - cpu_from) / (time.monotonic() - idle_from)
            report(bench="cat", idle_cores=idle)
            for n in range(rounds):
                floor_cpu, floor_wall = bare_loop()
                goal = bench.committed("cat") + len(LINES)
                (folder / "out/out.jsonl").unlink()
                cpu, start = tree_cpu_seconds(process.pid), time.monotonic()
                bench.feed(LINES)
                bench.wait_committed("cat", goal)
                wall = time.monotonic() - start
                cpu = tree_cpu_seconds(process.pid) - cpu - idle * wall
                check_lines(folder / "out/out.jsonl", LINES)
                ratios.append(cpu / floor_cpu)
                speeds.append(floor_wall / wall)
                report(
                    bench="cat",
                    round=n,
                    floor_cpu_us=floor_cpu / len(LINES) * 1e6,
                    pipeline_cpu_us=cpu / len(LINES) * 1e6,
                    cpu_ratio=ratios[-1],
                    floor_per_second=len(LINES) / floor_wall,
                    pipeline_per_second=len(LINES) / wall,
                    speed_ratio=speeds[-1],
                )
    finally:
        bench.close()
    report(
        bench="cat", median_cpu_ratio=statistics.median(ratios), bar_cpu_ratio=1.1,
        median_speed_ratio=statistics.median(speeds), bar_speed_ratio=1.0,
    )  # fmt: skip


ECHO = """
import json, sys
for line in sys.stdin:
    task = json.loads(line)
    sys.stdout.write(json.dumps({"id": task["id"], "stdout": task["stdin"]}) + "\\n")
    sys.stdout.flush()
"""


def resident(folder: Path, rounds: int = 3) -> None:
    """Messages per second of a resident echo worker in Python against those of `cat` per message, in turn."""
    bench = Bench(folder)
    values = [line.decode("utf-8", "replace").encode() for line in LINES]  # JSON lines carry text
    copies = {"binary_path": sys.executable, "mode": "resident", "resident": {"args": ["-I", "-S", "-c", ECHO]}}
    ahead = {**copies, "resident": {**copies["resident"], "send_ahead": 16}}
    variants = {
        "cat": ({"binary_path": "/bin/cat"}, values),
        "resident": (copies, values * 10),
        "send_ahead": (ahead, values * 10),
    }
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    try:
        for n in range(rounds):
            for name, (executor, lines) in variants.items():
                out = folder / f"{name}-{n}"
                files = {"filesystem": {"out": {"base_path": str(out)}}}
                with bench.pipeline("Cat", "resident", executor=executor, sinks=files) as process:
                    bench.feed(values[:500])
                    bench.wait_committed("resident", bench.produced)
                    bench.wait_settled("resident", 2)
                    (out / "out.jsonl").unlink()
                    start, cpu = time.monotonic(), tree_cpu_seconds(process.pid)
                    bench.feed(lines)
                    bench.wait_committed("resident", bench.produced)
                    speeds[name].append(len(lines) / (time.monotonic() - start))
                    cpu = tree_cpu_seconds(process.pid) - cpu
                    check_lines(out / "out.jsonl", lines)
                report(
                    bench="resident",
                    round=n,
                    variant=name,
                    messages=len(lines),
                    per_second=speeds[name][-1],
                    cpu_us=cpu / len(lines) * 1e6,
                )
    finally:
        bench.close()
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    report(
        bench="resident",
        median_ratio_one_at_a_time=medians["resident"] / medians["cat"],
        median_ratio=medians["send_ahead"] / medians["cat"],
        bar_ratio_one_at_a_time=12,
        bar_ratio=25,
    )


def known(folder: Path, count: int = 200_000, rounds: int = 3) -> None:
    """Messages per second with known results, from the first produced to the last committed."""
    _without_processes(folder, "Known", "known", count, rounds, bar_per_second=110_000)


def transform(folder: Path, count: int = 200_000, rounds: int = 3) -> None:
    """Messages per second with `transform`, from the first produced to the last committed."""
    _without_processes(folder, "Transform", "transform", count, rounds, bar_per_second=160_000)


def _without_processes(folder: Path, handler: str, name: str, count: int, rounds: int, *, bar_per_second: int) -> None:
    bench = Bench(folder)
    files = {"filesystem": {"out": {"base_path": str(folder / "out")}}}
    speeds = []
    try:
        values = [b"%07d %s" % (n, LINES[n % len(LINES)][:90]) for n in range(count)]
        with bench.pipeline(handler, name, sinks=files) as process:
            bench.feed(values[:500])
            bench.wait_committed(name, 500)
            bench.wait_settled(name, 2)
            for n in range(rounds):
                goal = bench.committed(name) + count
                (folder / "out/out.jsonl").unlink()
                start, cpu = time.monotonic(), tree_cpu_seconds(process.pid)
                bench.feed(values)
                bench.wait_committed(name, goal)
                wall = time.monotonic() - start
                cpu = tree_cpu_seconds(process.pid) - cpu
                check_lines(folder / "out/out.jsonl", values)
                speeds.append(count / wall)
                report(bench=name, round=n, messages=count, per_second=speeds[-1], cpu_us=cpu / count * 1e6)
    finally:
        bench.close()
    report(bench=name, median_per_second=statistics.median(speeds), bar_per_second=bar_per_second)


def exactly_once(folder: Path, count: int = 150_000, rounds: int = 4) -> None:
    """Known results into a topic, with transactions and without: two pipelines that run in turn."""
    bench = Bench(folder)
    values = [b"%07d %s" % (n, LINES[n % len(LINES)][:90]) for n in range(count)]
    speeds: dict[bool, list[float]] = {False: [], True: []}
    costs: dict[bool, list[float]] = {False: [], True: []}
    processes: dict[bool, int] = {}
    topics = {False: "in", True: "in-once"}
    groups = {False: "plain", True: "once"}

    def turn(once: bool) -> None:
        bench.topic = topics[once]
        bench.forget_probe()

    try:
        bench.broker.create_topic(topics[True], partitions=bench.partitions)
        with contextlib.ExitStack() as running:
            for once in (False, True):
                bench.broker.create_topic(f"out-{groups[once]}", partitions=4)
                turn(once)
                sinks = {"kafka": {"out": {"topic": f"out-{groups[once]}"}}}
                pipeline = bench.pipeline("KnownTopic", groups[once], kafka={"exactly_once": once}, sinks=sinks)
                processes[once] = running.enter_context(pipeline).pid
                bench.feed(values[:500])
                bench.wait_committed(groups[once], 500)
                bench.wait_settled(groups[once], 2)
            for n in range(rounds * 2):
                once = n % 2 == 1
                turn(once)
                goal = bench.committed(groups[once]) + count
                start, cpu = time.monotonic(), tree_cpu_seconds(processes[once])
                bench.feed(values)
                bench.wait_committed(groups[once], goal)
                speeds[once].append(count / (time.monotonic() - start))
                costs[once].append((tree_cpu_seconds(processes[once]) - cpu) / count * 1e6)
                report(
                    bench="exactly_once",
                    exactly_once=once,
                    round=n // 2,
                    per_second=speeds[once][-1],
                    cpu_us=costs[once][-1],
                )
        for once in (False, True):
            seen = bench.readable(f"out-{groups[once]}")
            if seen < 500 + rounds * count or (once and seen != 500 + rounds * count):
                raise AssertionError(f"{seen} results are readable for {500 + rounds * count} messages")
    finally:
        bench.close()
    plain, once_speed = statistics.median(speeds[False]), statistics.median(speeds[True])
    report(
        bench="exactly_once",
        median_plain=plain,
        median_exactly_once=once_speed,
        median_cpu_us=[statistics.median(costs[once]) for once in (False, True)],
        ratio=once_speed / plain,
        bar_ratio=0.95,
    )


def memory(folder: Path) -> None:
    """Resident memory of an engine with 20,000 messages queued, and over 800,000 messages."""
    idle = idle_worker_mb()
    bench = Bench(folder)
    files = {"filesystem": {"out": {"base_path": str(folder / "out")}}}
    try:
        executor = {"backpressure_high_multiplier": 5000, "drain_timeout_seconds": 1}
        with bench.pipeline("Stuck", "queued", spark={"engines": 1}, executor=executor, sinks=files) as process:
            deadline = time.monotonic() + 60
            while not _engines(process.pid) and time.monotonic() < deadline:
                time.sleep(0.1)
            bench.feed([b"x" * 1000] * 40_000)
            arranged = folder / "arranged"
            while not arranged.exists() or sum(map(int, arranged.read_text().split())) < 20_000:
                if time.monotonic() > deadline:
                    raise TimeoutError("20,000 messages were not queued")
                time.sleep(0.1)
            time.sleep(3)
            engine = max(_engines(process.pid).values())
            report(bench="memory", case="queued", engine_mb=engine / 1e6, idle_mb=idle, above_mb=engine / 1e6 - idle,
                   bar_above_mb=150)  # fmt: skip
        with bench.pipeline("Known", "flat", spark={"engines": 1}, sinks=files) as process:
            for target in range(100_000, 800_001, 100_000):
                bench.feed([b"x" * 1000] * 100_000)
                bench.wait_committed("flat", target)
                report(
                    bench="memory",
                    case="flat",
                    messages=target,
                    engine_mb=max(_engines(process.pid).values()) / 1e6,
                )
    finally:
        bench.close()


def idle_worker_mb() -> float:
    """Return the resident megabytes of a plain Spark Python worker that only waits."""
    script = (
        "import time; from pyspark import SparkContext; sc = SparkContext('local[1]', conf=None);"
        "sc.setLogLevel('OFF'); sc.parallelize([0], 1).map(lambda _: time.sleep(30)).collect()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while len(_engines(process.pid)) < 2:
            if time.monotonic() > deadline:
                raise TimeoutError("no Spark worker started")
            time.sleep(0.2)
        time.sleep(2)
        return max(_engines(process.pid).values()) / 1e6
    finally:
        process.terminate()
        process.wait(30)


def _engines(pid: int) -> dict[int, int]:
    """Return the resident bytes of the Spark Python workers; the daemon that forks them is the smaller one."""
    found = {
        p: size
        for p, (command, size) in tree_rss(pid).items()
        if "python" in command.split(" ")[0] and "daemon" in command
    }
    return found if len(found) > 1 else {}


if __name__ == "__main__":
    measures = {
        "cat": cat,
        "resident": resident,
        "known": known,
        "transform": transform,
        "exactly_once": exactly_once,
        "latency": latency.stable,
        "joining": latency.joining,
        "memory": memory,
    }
    for name in chosen(measures):
        where = Path(tempfile.mkdtemp(prefix="tidemill-bench-"))
        try:
            measures[name](where)
        finally:
            shutil.rmtree(where, ignore_errors=True)
