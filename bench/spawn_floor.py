"""What a task costs beside its process: CPU time of the executor against a bare posix_spawn loop of `cat`.

Prints JSON lines: one per round and variant, then a summary with the ratio of the medians. Both run the same
lines, 8 at a time, alternating, and both check what came back.

    python bench/spawn_floor.py [--count 2000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.pipeline.tasks.executor import Executor, ProcessOutcome

PARALLEL = 8
_ENVIRON = {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}


def bare_cat_loop(lines: Iterable[bytes], parallel: int = PARALLEL) -> int:
    """Run `cat` once per line, `parallel` at a time, oldest first; return how many bytes came back."""
    cat = shutil.which("cat") or "/bin/cat"
    argv, dup2, environ = ("cat",), os.POSIX_SPAWN_DUP2, _ENVIRON
    running: deque[tuple[int, int]] = deque()

    def finish_oldest() -> int:
        pid, out = running.popleft()
        size = 0
        while data := os.read(out, 65536):
            size += len(data)
        os.close(out)
        if os.waitpid(pid, 0)[1]:
            raise RuntimeError("cat failed")
        return size

    total = 0
    for line in lines:
        if len(running) >= parallel:
            total += finish_oldest()
        stdin, feed = os.pipe2(os.O_CLOEXEC)
        out, stdout = os.pipe2(os.O_CLOEXEC)
        pid = os.posix_spawn(cat, argv, environ, file_actions=((dup2, stdin, 0), (dup2, stdout, 1)))
        os.close(stdin)
        os.close(stdout)
        os.write(feed, line)
        os.close(feed)
        running.append((pid, out))
    while running:
        total += finish_oldest()
    return total


def executor_loop(lines: Sequence[bytes], parallel: int = PARALLEL) -> int:
    """Do the same through the executor; return how many bytes came back."""
    return asyncio.run(_drive(lines, parallel))


async def _drive(lines: Sequence[bytes], parallel: int) -> int:
    executor = Executor(ExecutorSettings(), "bench")
    executor.open()
    over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = iter(lines)
    total = 0

    def start_next() -> None:
        line = next(waiting, None)
        if line is not None:
            executor.start(("cat",), line, {}, 120.0, done)
        elif not executor.running:
            over.set_result(total)

    def done(outcome: ProcessOutcome) -> None:
        nonlocal total
        if outcome.exit_code != 0:
            raise RuntimeError(outcome)
        total += len(outcome.stdout)
        start_next()

    for _ in range(parallel):
        start_next()
    try:
        return await over
    finally:
        executor.close()


def _cpu() -> tuple[float, float]:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


def measure(name: str, loop: Callable[[list[bytes]], int], lines: list[bytes]) -> dict[str, float | str]:
    """Return microseconds per task: CPU in all, CPU of this process alone, and wall time."""
    own, children = _cpu()
    started = time.perf_counter()
    size = loop(lines)
    wall = time.perf_counter() - started
    own_after, children_after = _cpu()
    if size != sum(map(len, lines)):
        raise RuntimeError(f"{name} returned {size} bytes")
    scale = 1e6 / len(lines)
    return {
        "variant": name,
        "cpu_us": round((own_after - own + children_after - children) * scale, 1),
        "own_cpu_us": round((own_after - own) * scale, 1),
        "wall_us": round(wall * scale, 1),
    }


def main() -> None:
    """Alternate both loops and print what they cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lines = [(f"{number:08d} ".encode() + b"x" * 220)[:229] + b"\n" for number in range(options.count)]
    results: dict[str, list[float]] = {"bare": [], "executor": []}
    for round_number in range(options.rounds):
        for name, loop in (("bare", bare_cat_loop), ("executor", executor_loop)):
            row = measure(name, loop, lines)
            results[name].append(float(row["cpu_us"]))
            print(json.dumps({"bench": "spawn_floor", "round": round_number, **row}), flush=True)
    bare, executor = (statistics.median(results[name]) for name in ("bare", "executor"))
    ratios = [mine / floor for mine, floor in zip(results["executor"], results["bare"], strict=True)]
    summary = {"bare_cpu_us": bare, "executor_cpu_us": executor, "ratio": round(executor / bare, 3)}
    spread = {"ratio_min": round(min(ratios), 3), "ratio_max": round(max(ratios), 3)}
    print(json.dumps({"bench": "spawn_floor", "summary": summary | spread}))


if __name__ == "__main__":
    main()
