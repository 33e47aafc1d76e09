"""A hundred engines on one machine: processes with the real link, beats and drain that only say they work.

`Farm` stands in for Spark: it runs the job of a slot in a process that is forked from one prepared interpreter, so
that engines share its memory, and says of a killed one what Spark says. All above it, supervisor and link, is the
product's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any, cast

from pyspark import cloudpickle

from tidemill.config.settings import Settings
from tidemill.core.pipeline.message_stage import MessageStage
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.link.beats import Beat, PartitionChanges, whole_beat
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, PartitionHead, SinkStats, StopReason
from tidemill.runtime.loop.durations import DURATION_BOUNDS, Durations

_TIME = struct.Struct("d")
_MAX_JOB_BYTES = 200_000


class Plan(Handler[Any, Any]):
    """What each engine says of itself."""

    def __init__(self, partitions: int, per_second: float, work_seconds: float = 0.0) -> None:
        """Give an engine so many partitions, and so many messages a second in all of them.

        Args:
            partitions: How many an engine has.
            per_second: Messages in all of them.
            work_seconds: How long what is running takes to finish in a drain.
        """
        self.partitions = partitions
        self.per_second = per_second
        self.work_seconds = work_seconds


class ReportingEngine:
    """Counts messages by the clock; nothing else is made up."""

    records = live = prober = None

    def __init__(self, plan: Plan, slot: int) -> None:
        self._plan = plan
        self._slot = slot
        self._names = [f"orders/{slot * plan.partitions + n}" for n in range(plan.partitions)]
        self._started = time.monotonic()
        self._lag_at = 0.0
        self._lag = dict.fromkeys(self._names, 0)
        self._told: list[str] = []
        self._subscribed = False
        self._stop = asyncio.Event()

    def beat(self, *, whole: bool) -> Beat:
        """Return a beat in which all partitions have moved."""
        progress = self._take_progress()
        if whole:
            self._told = progress.partitions
            return whole_beat(progress)
        lag: dict[str, int] = {}
        if time.monotonic() - self._lag_at >= 1.0:  # as often as the source looks
            self._lag_at = time.monotonic()
            lag = self._lag = {name: int(self._lag_at * 1_000) % 997 for name in self._names}
        news = progress.partitions if progress.partitions is not self._told else None
        self._told = progress.partitions
        changes = PartitionChanges(
            committed=progress.committed, flow=progress.flow, heads=progress.heads, lag=lag, partitions=news
        )
        for field in ("committed", "flow", "heads", "lag"):
            setattr(progress, field, {})
        progress.partitions, progress.paused = [], []
        return Beat(progress, changes)

    def _take_progress(self) -> EngineProgress:
        if not self._subscribed:
            return EngineProgress()
        seconds = time.monotonic() - self._started
        done = int(seconds * self._plan.per_second)
        each = done // len(self._names)
        took = Durations([done // (len(DURATION_BOUNDS) + 1)] * (len(DURATION_BOUNDS) + 1), seconds)
        now = time.time()
        return EngineProgress(
            consumed=done,
            messages_done=done,
            tasks_done=done,
            delivered=done,
            in_flight=100,
            committed=dict.fromkeys(self._names, each),
            flow=dict.fromkeys(self._names, (each + 10, each, 0)),
            heads={name: PartitionHead(each, now, now, "", "", 3) for name in self._names},
            lag=self._lag,
            partitions=self._names,
            cpu_seconds=time.process_time(),
            rss_bytes=90_000_000,
            attempts=took,
            queue_waits=took,
            spawns=took,
            batches=took,
            loop_lags=took,
            hooks={"arrange": took, "on_task_complete": took},
            sinks={"sinks.filesystem.out": SinkStats(done // 100, done, sends=took, last_delivered_at=now)},
            slowest=[(seconds, f"task-{self._slot}-{n}", "") for n in range(5)],
        )

    def progress(self) -> EngineProgress:
        """Return a whole snapshot."""
        return self._take_progress()

    async def run(self, may_subscribe: Callable[[], Awaitable[None]]) -> EngineSummary:
        """Count until it is told to drain."""
        await may_subscribe()
        self._subscribed = True
        await self._stop.wait()
        await asyncio.sleep(self._plan.work_seconds)
        return EngineSummary(self._slot, StopReason.DRAINED, None, self._take_progress())

    def find_message(self, topic: str, partition: int, offset: int) -> MessageStage | None:
        """Have nothing open."""
        return None

    def drain(self, *, keep_membership: bool = False) -> None:
        """Note when the order came."""
        note_drained(self._slot)
        self._stop.set()

    def fail(self, text: str) -> None:
        """End as well."""
        self._stop.set()

    def pause(self, partitions: Collection[int] | None = None) -> None:
        """Count on; nothing is measured while engines are held."""

    def resume(self) -> None:
        """Count on."""

    def release(self) -> None:
        """Hold nothing."""


def build(settings: Settings, handler: Handler[Any, Any], identity: EngineIdentity) -> ReportingEngine:
    """Return the engine of a slot; named in its job."""
    return ReportingEngine(cast("Plan", handler), identity.slot)  # its class was sent as well, so it is another one


#: When each slot's engine was told to drain; shared by all processes, and mapped before the first fork.
_drained: list[mmap.mmap] = []


def note_drained(slot: int) -> None:
    """Note that a slot is told to drain now."""
    _TIME.pack_into(_drained[0], slot * _TIME.size, time.monotonic())


class Farm:
    """Runs jobs as processes, in place of Spark. Create it before any thread.

    Args:
        slots: How many slots there are.
        log: The file for what engines log.
    """

    def __init__(self, slots: int, log: str) -> None:
        """Fork the process that all engines are forked from."""
        self._slots = slots
        self._pids: dict[int, int] = {}
        self._lock = threading.Lock()
        _drained[:] = [mmap.mmap(-1, max(1, slots) * _TIME.size)]
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _MAX_JOB_BYTES)
        self._parent = os.fork()
        if self._parent == 0:
            self._orders.close()
            _fork_engines(theirs, log)
        theirs.close()
        self.context = self

    def drained_at(self) -> list[float]:
        """Return when each engine was told to drain, by the monotonic clock; 0: it was not."""
        return [_TIME.unpack_from(_drained[0], slot * _TIME.size)[0] for slot in range(self._slots)]

    def pid_of(self, slot: int) -> int:
        """Return the process of a slot's engine."""
        return self._pids[slot]

    def close(self) -> None:
        """End the process that forks, and all engines with it."""
        self._orders.close()
        os.waitpid(self._parent, 0)

    # -- what the supervisor asks of Spark -----------------------------------------------------------------------

    def setLocalProperty(self, name: str, value: str) -> None:
        """Have no scheduler."""

    def setJobGroup(self, group: str, text: str) -> None:
        """Have no groups: an engine is found by its slot."""

    def parallelize(self, data: list[int], parts: int) -> _Dataset:
        """Return the one task of a slot's job."""
        return _Dataset(self, data[0])

    def note_running(self) -> None:
        """Know that already."""

    def is_alive(self) -> bool:
        """Never be lost."""
        return True

    def cancel(self, group: str) -> None:
        """Kill the engine of a job group, "tidemill-WORKER-SLOT-TOKEN"."""
        self.kill_worker(self._pids[int(group.split("-")[-2])])

    def kill_worker(self, pid: int) -> None:
        """Kill an engine."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def run(self, slot: int, function: Callable[[Iterator[Any]], Iterator[bytes]]) -> list[bytes]:
        """Run a task in a new process, and return what it yields; blocks."""
        reading, writing = os.pipe()
        with self._lock:
            socket.send_fds(self._orders, [cloudpickle.dumps(function)], [writing])
        os.close(writing)
        with open(reading, "rb") as pipe:
            self._pids[slot] = int.from_bytes(pipe.read(4), "big")
            said = pipe.read()
        if not said:
            raise RuntimeError("Python worker exited unexpectedly (crashed)")
        return [said]


class _Dataset:
    """The little of an RDD that a slot's job needs."""

    def __init__(self, farm: Farm, slot: int) -> None:
        self._farm = farm
        self._slot = slot
        self._function: Callable[[Iterator[Any]], Iterator[bytes]]

    def mapPartitions(self, function: Callable[[Iterator[Any]], Iterator[bytes]]) -> _Dataset:
        self._function = function
        return self

    def collect(self) -> list[bytes]:
        return self._farm.run(self._slot, self._function)


def _fork_engines(orders: socket.socket, log: str) -> None:
    """Fork an engine for each order until there are no more; never returns."""
    gc.collect()
    gc.freeze()  # what is shared is not written to by the collector
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    engines: set[int] = set()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    while True:
        job, fds, _, _ = socket.recv_fds(orders, _MAX_JOB_BYTES, 1)
        if not job:
            break
        engine = os.fork()
        if engine == 0:
            orders.close()
            os.dup2(file, 2)
            _work(job, fds[0])
        engines.add(engine)
        os.close(fds[0])
    for engine in engines:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
    os._exit(0)


def _work(job: bytes, pipe: int) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.write(pipe, os.getpid().to_bytes(4, "big"))
        for said in cloudpickle.loads(job)(iter(())):
            os.write(pipe, said)
    finally:
        os._exit(0)
