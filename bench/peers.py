"""The same work by tidemill, by two other libraries, and by a bare loop over their common client, in turn.

`python -m bench.peers PYTHON [messages] [rounds]`, where PYTHON has what `bench/peers.lock` says; `scripts/bench peers`
makes that. JSON lines out. All read the same messages, which are in the topic before, by a group of their own: from the
first line in the file to the last. Then each is killed with SIGKILL, all its processes at once, when half is done, and
started again: `lost` are messages that are not in the file, `doubled` those that are there again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.harness import Bench, report, tree, tree_cpu_seconds
from bench.recording import make_lines

PEERS = ("bare", "quix", "faststream_batch", "faststream_one")
TIDEMILL = {"tidemill_transform": "Transform", "tidemill_known": "Known"}
#: One at a time takes minutes for what the others do in seconds: it gets this share, and a topic of its own.
FEW = 50
_PROGRAMS = Path(__file__).parent / "peer_programs.py"


class Contest:
    """A broker with the messages, and each contestant as a process that reads them."""

    def __init__(self, folder: Path, python: str, count: int) -> None:
        """Start the broker and write the messages."""
        self.folder = folder
        self.python = python
        self.values = make_lines(count)
        self.few = self.values[: max(1, count // FEW)]
        self.bench = Bench(folder)
        self.bench.feed(self.values)
        self.bench.broker.create_topic("few", partitions=4)
        self.bench.topic = "few"
        self.bench.feed(self.few)
        self._groups = 0

    def new_group(self, name: str) -> str:
        """Return a consumer group that has read nothing."""
        self._groups += 1
        return f"{name}-{self._groups}"

    def expect(self, name: str) -> list[bytes]:
        """Return the messages that a contestant has to write."""
        return self.few if name == "faststream_one" else self.values

    @contextlib.contextmanager
    def running(self, name: str, group: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """Run a contestant until the block ends; yields its process and its file."""
        self.bench.topic = "few" if name == "faststream_one" else "in"
        out = self.folder / group
        out.mkdir(exist_ok=True)
        path = out / "out.jsonl"
        if name in TIDEMILL:
            files = {"filesystem": {"out": {"base_path": str(out)}}}
            with self.bench.pipeline(TIDEMILL[name], group, sinks=files) as process:
                yield process, path
            return
        with open(self.folder / "peers.log", "ab") as log:
            process = subprocess.Popen(
                [self.python, _PROGRAMS, name, self.bench.broker.bootstrap, self.bench.topic, group, path],
                cwd=out, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield process, path
        finally:
            process.kill()
            process.wait()

    def measure(self, name: str) -> tuple[float, float]:
        """Return messages per second and microseconds of CPU time per message, of all its processes."""
        values = self.expect(name)
        size = sum(map(len, values)) + len(values)
        with self.running(name, self.new_group(name)) as (process, path):
            wait_for(lambda: size_of(path) > 0, process, name)
            first, start, cpu = size_of(path), time.monotonic(), tree_cpu_seconds(process.pid)
            wait_for(lambda: size_of(path) >= size, process, name)
            wall, cpu = time.monotonic() - start, tree_cpu_seconds(process.pid) - cpu
        lost, doubled, torn = compare(path, values)
        if lost or torn:
            raise AssertionError(f"{name}: {lost} lost, {doubled} doubled, {torn} torn")
        part = max(1.0, len(values) * (1 - first / size))  # a few messages may all be there at the first look
        path.unlink()
        return part / max(wall, 1e-6), cpu / part * 1e6

    def kill(self, name: str) -> None:
        """Report what a contestant loses and doubles that is killed in the middle and started again."""
        values, group = self.expect(name), self.new_group(name)
        size = sum(map(len, values)) + len(values)
        with self.running(name, group) as (process, path):
            wait_for(lambda: size_of(path) >= size / 2, process, name)
            for pid in reversed(tree(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        start, before = time.monotonic(), size_of(path)
        with self.running(name, group) as (process, path):
            self.bench.forget_probe()

            def is_done() -> bool:
                return self.bench.committed(group) >= len(values)

            # A small number of messages may have been done before the kill.
            wait_for(lambda: size_of(path) > before or is_done(), process, name)
            back = time.monotonic() - start
            wait_for(is_done, process, name)
        lost, doubled, torn = compare(path, values)
        path.unlink()
        report(bench="peers_kill", who=name, messages=len(values), lost=lost, doubled=doubled, torn_lines=torn,
               next_line_seconds=back)  # fmt: skip


def size_of(path: Path) -> int:
    """Return the size of a file, 0 if it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], name: str) -> None:
    """Wait for a condition, as long as the process lives, for at most five minutes."""
    deadline = time.monotonic() + 300
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{name} ended with {process.poll()}, or took too long")
        time.sleep(0.005)


def compare(path: Path, values: list[bytes]) -> tuple[int, int, int]:
    """Return how many messages are not in a file, are there again, and how many lines are none of them."""
    lines = path.read_bytes().splitlines()
    known, seen = set(values), set(lines)
    torn = len(seen - known)
    return len(known - seen), len(lines) - torn - len(seen & known), torn


def compete(python: str, count: int, rounds: int, names: tuple[str, ...] = (*PEERS, *TIDEMILL)) -> None:
    """Report the speed of all in turn, and then what a kill does to each."""
    folder = Path(tempfile.mkdtemp(prefix="tidemill-bench-"))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    try:
        contest = Contest(folder, python, count)
        try:
            for n in range(rounds):
                for name in names:
                    speed, cpu = contest.measure(name)
                    found[name].append((speed, cpu))
                    load = os.getloadavg()[0]
                    report(bench="peers", round=n, who=name, per_second=speed, cpu_us=cpu, load=load)
            for name in names:
                contest.kill(name)
        finally:
            contest.bench.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, rows in found.items():
        speed, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        report(bench="peers", who=name, median_per_second=speed, median_cpu_us=cpu)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("error: give the Python that has the peers, or run scripts/bench peers")
    numbers = [int(number) for number in sys.argv[2:]]
    compete(sys.argv[1], numbers[0] if numbers else 1_000_000, numbers[1] if len(numbers) > 1 else 3)
