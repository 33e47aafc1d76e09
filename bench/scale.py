"""What a driver with many engines costs, JSON lines out: `python -m bench.scale [engines] [partitions]`.

The engines are processes with the real link, see `scale_engines`; they report a million messages a second. The driver
is this process: supervisor, link, web UI, metrics and status line as `tidemill run` has them. Steady state, answers,
ten engines killed at once, and a drain are measured in one run.
"""

from __future__ import annotations

import functools
import http.client
import logging
import os
import queue
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from bench.harness import report
from bench.scale_engines import Farm, Plan

from tidemill.cli.terminal.status_text import format_status
from tidemill.config.settings import Settings
from tidemill.core.supervision.slot_group import RunFinished
from tidemill.core.supervision.slot_limits import SlotLimits
from tidemill.runtime.link.engine import BEAT_SECONDS
from tidemill.runtime.link.frames import LinkAddress
from tidemill.spark.engine.process import EngineJob
from tidemill.spark.live.linked_engines import LinkedEngines
from tidemill.spark.live.monitoring import Monitored, serve_metrics
from tidemill.spark.live.shared_progress import SharedProgress
from tidemill.spark.live.status_report import build_report
from tidemill.spark.live.supervisor import JobMaker, Supervisor
from tidemill.spark.live.user_requests import Control
from tidemill.spark.live.web_ui import Watched, serve_web
from tidemill.spark.run_state import RunPhase, RunState
from tidemill.spark.session.packaging import pack_handler
from tidemill.web.access.hashes import hash_token

TOKEN = "the-token-of-the-bench"
PER_SECOND = 1_000_000
#: How long the steady state is measured, and how many engines are killed at once.
STEADY_SECONDS, KILLED = 20.0, 10
#: How long engines need to finish in further drains: all that end at once take the cores from those that are told last.
DRAINS = (0.5, 0.0, 0.5)
_STATE = RunState(RunPhase.RUNNING, 100.0, 110.0, work_seconds=100.0)


class Driver:
    """The driver's parts over a farm of engines."""

    def __init__(self, farm: Farm, engines: int, partitions: int, settings: Settings) -> None:
        """Start the engines."""
        self.farm = farm
        self.engines = engines
        self.settings = settings
        self.partitions = partitions
        self.ends: queue.SimpleQueue[RunFinished] = queue.SimpleQueue()
        self.live = Supervisor(farm, "w", engines, self._plan(0.0), self.ends.put, SlotLimits(), partitions)  # type: ignore[arg-type]
        self.live.start()

    def _plan(self, work_seconds: float) -> JobMaker:
        packed = pack_handler(Plan(self.partitions // self.engines, PER_SECOND / self.engines, work_seconds))

        def make_job(slot: int, job_token: int, address: LinkAddress) -> EngineJob:
            return EngineJob(slot, job_token, "w", address, self.settings, packed, {}, "bench.scale_engines:build")

        return make_job

    def start_again(self, work_seconds: float) -> None:
        """Start engines again after a drain, such that need some time to finish; wait until all of them run."""
        self.live.restart(self._plan(work_seconds), SlotLimits())
        self.wait_running()

    def count_running(self) -> int:
        """Return how many engines run and have partitions."""
        statuses = self.live.progress().engines
        return sum(one.state == "running" and bool(one.progress and one.progress.partitions) for one in statuses)

    def wait_running(self) -> float:
        """Wait until all engines run; return how long that took, in seconds."""
        return wait_for(lambda: self.count_running() == self.engines, "the engines do not run")

    @contextmanager
    def served(self) -> Iterator[Callable[[str], float]]:
        """Serve web UI and metrics; yields what asks for a path and returns how many seconds the answer took."""
        linked = LinkedEngines(lambda: self.settings.kafka.source_topic)
        linked.live = self.live
        asked = Monitored(SharedProgress(self.live.progress), lambda: _STATE, list, lambda: 8)
        control = Control(lambda: linked.actions)
        with serve_metrics(self.settings.metrics, self.settings, "w", asked) as metrics:
            watched = Watched(asked, self.settings, self.settings, "w", control, linked, lambda: None, metrics)
            with serve_web(watched) as web:
                if web is None or web.address is None or metrics is None:
                    raise AssertionError("there is no web UI, or no metrics")
                web.begin()
                places = {"/metrics": metrics.split("://")[1]}
                home = web.address.split("://")[1].split("/")[0]

                def ask(what: str) -> float:
                    path, _, encoding = what.partition(" ")
                    return get(places.get(path, home), path, encoding or "identity")

                yield ask


def get(place: str, path: str, encoding: str) -> float:
    """Return how many seconds an answer took, over a connection of its own."""
    start = time.perf_counter()
    connection = http.client.HTTPConnection(place, timeout=60)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}", "Accept-Encoding": encoding})
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise AssertionError(f"{path}: {answer.status}")
    return time.perf_counter() - start


def wait_for(condition: Callable[[], bool], problem: str, seconds: float = 120.0) -> float:
    """Wait for a condition; return how long it took, in seconds."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise TimeoutError(problem)
        time.sleep(0.005)
    return time.monotonic() - start


def resident_mb() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure_steady(driver: Driver, seconds: float) -> None:
    """Report what the driver uses while nobody asks anything but its status line, twice a second."""
    before, messages, start = time.process_time(), driver.live.progress().messages_done, time.monotonic()
    while time.monotonic() - start < seconds:
        format_status(_STATE, driver.live.progress(), 0.0, 120)
        time.sleep(0.5)
    took = time.monotonic() - start
    report(
        bench="steady",
        engines=driver.engines,
        reported_per_second=(driver.live.progress().messages_done - messages) / took,
        core_percent=100 * (time.process_time() - before) / took,
        resident_mb=resident_mb(),
        load=os.getloadavg()[0],
        bar_core_percent=20,
        bar_resident_mb=200,
    )


#: What is asked over HTTP, and in which encoding.
_PATHS = ("/", "/partitions", "/api/v1/overview", "/api/v1/partitions", "/api/v1/series", "/metrics", "/metrics gzip")


def measure_answers(driver: Driver, ask: Callable[[str], float], rounds: int) -> None:
    """Report how long status line, status and pages take.

    They are asked for once a beat, so that each answer is made anew; what many clients of one beat cost is measured
    by asking again at once.
    """

    def line() -> None:
        format_status(_STATE, driver.live.progress(), 0.0, 120)

    def status() -> None:
        build_report(driver.settings, "w", _STATE, driver.live.progress(), 0.0)

    asked: dict[str, Callable[[], object]] = {"status line": line, "tidemill status": status}
    for path in _PATHS:
        asked[path] = functools.partial(ask, path)
    for name, call in asked.items():
        read_cpu = functools.partial(answering_seconds, driver) if name in _PATHS else time.thread_time
        call()
        walls, used = measure_calls(call, read_cpu, rounds, BEAT_SECONDS + 0.01)
        _, shared = measure_calls(call, read_cpu, rounds, 0.0)
        report(
            bench="answer",
            what=name,
            p50_ms=statistics.median(walls),
            max_ms=max(walls),
            cpu_ms=used,
            shared_cpu_ms=shared,
            load=os.getloadavg()[0],
            bar_ms=20 if name.startswith("/metrics") else 10,
        )


def answering_seconds(driver: Driver) -> float:
    """Return the CPU time of what answers: of this process, but for the link and the thread that asks."""
    link = driver.live._server._thread.ident
    assert link is not None
    return time.process_time() - time.clock_gettime(time.pthread_getcpuclockid(link)) - time.thread_time()


def measure_calls(
    call: Callable[[], object], read_cpu: Callable[[], float], rounds: int, pause_seconds: float
) -> tuple[list[float], float]:
    """Return how long each call took, and the median of their CPU times; in milliseconds."""
    walls, used = [], []
    for _ in range(rounds):
        time.sleep(pause_seconds)
        before, start = read_cpu(), time.perf_counter()
        call()
        walls.append((time.perf_counter() - start) * 1e3)
        used.append((read_cpu() - before) * 1e3)
    return walls, statistics.median(used)


def measure_kill(driver: Driver, count: int) -> None:
    """Report how soon engines that are killed at once are noticed, and run again."""
    slots = range(driver.engines - count, driver.engines)
    before = {slot: driver.farm.pid_of(slot) for slot in slots}
    start = time.monotonic()
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)

    def noticed() -> bool:
        return not any(driver.live.progress().engines[n].state == "running" for n in slots)

    seen = wait_for(noticed, "the killed engines are not noticed")
    wait_for(lambda: driver.count_running() == driver.engines, "the killed engines do not come back")
    again = time.monotonic() - start
    report(bench="kill", killed=count, noticed_seconds=seen, running_again_seconds=again, load=os.getloadavg()[0],
           bar_noticed_seconds=0.5)  # fmt: skip


def measure_drain(driver: Driver, work_seconds: float) -> None:
    """Report how soon a drain order is written and has reached all engines, and how long the drain takes."""
    told: queue.SimpleQueue[tuple[float, float]] = queue.SimpleQueue()
    loop = driver.live._server.loop  # what is called there after the drain is called once all orders are written
    start, cpu = time.monotonic(), time.process_time()
    loop.call_soon_threadsafe(lambda: told.put((time.monotonic(), time.thread_time())))
    driver.live.drain()
    loop.call_soon_threadsafe(lambda: told.put((time.monotonic(), time.thread_time())))
    end = driver.ends.get(timeout=60)
    took, cpu = time.monotonic() - start, time.process_time() - cpu
    reached = sorted(moment - start for moment in driver.farm.drained_at())
    if end.error is not None or reached[0] < 0:
        raise AssertionError(f"not all engines were drained: {end}, {reached[0]}")
    begun, written = told.get(), told.get()
    report(
        bench="drain",
        work_seconds=work_seconds,
        written_to_all_ms=(written[0] - start) * 1e3,
        writing_cpu_ms=(written[1] - begun[1]) * 1e3,
        p50_ms=statistics.median(reached) * 1e3,
        last_ms=reached[-1] * 1e3,
        drained_seconds=took,
        cpu_ms=cpu * 1e3,
        load=os.getloadavg()[0],
        bar_last_ms=100,
    )


def measure(engines: int, partitions: int, *, steady_seconds: float = STEADY_SECONDS, rounds: int = 20) -> None:
    """Report everything with so many engines and partitions; to be called before this process has threads."""
    if threading.active_count() > 1:
        raise AssertionError("engines are forked from a process without threads")
    # Rows of the bench are alone on stdout; what the driver logs is not of interest.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder:
        farm = Farm(engines, f"{folder}/engines.log")
        try:
            tokens = {"bench": {"hash": hash_token(TOKEN), "role": "read"}}
            settings = Settings.model_validate(
                {
                    "kafka": {"source_topic": "orders", "consumer_group": "scale", "brokers": "127.0.0.1:1"},
                    "sinks": {"filesystem": {"out": {"base_path": folder}}},
                    "debug": {"enabled": True, "port": 0, "db_dir": f"{folder}/recordings", "tokens": tokens},
                    "metrics": {"enabled": True, "port": 0},
                    "logging": {"level": "ERROR"},
                }
            )
            driver = Driver(farm, engines, partitions, settings)
            try:
                report(bench="start", engines=engines, partitions=partitions, seconds=driver.wait_running())
                with driver.served() as ask:
                    measure_steady(driver, steady_seconds)
                    measure_answers(driver, ask, rounds)
                    measure_kill(driver, min(KILLED, engines))
                    measure_drain(driver, 0.0)
                    for work_seconds in DRAINS:
                        driver.start_again(work_seconds)
                        measure_drain(driver, work_seconds)
            finally:
                driver.live.close()
        finally:
            farm.close()


if __name__ == "__main__":
    counts = [int(number) for number in sys.argv[1:]]
    engines = counts[0] if counts else 100
    measure(engines, counts[1] if len(counts) > 1 else 10 * engines)
