"""The counters of an engine: plain attributes, written on hot paths and read by snapshots."""

from __future__ import annotations

import heapq
import os
import resource
from typing import Any

import msgspec

from tidemill.pipeline.handler.base import Handler, overrides
from tidemill.pipeline.handler.models import ExecutorResult
from tidemill.runtime.loop.durations import Durations

#: Task ids and labels are cut to this length, so that a snapshot does not grow with users' data.
SHOWN_CHARS = 200
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class CounterStatistics(msgspec.Struct, frozen=True):
    """The counters at one moment; see `Counters`."""

    consumed: int
    messages_done: int
    tasks_done: int
    tasks_failed: int
    skipped: int
    warnings: int
    in_flight: int
    batches: Durations = msgspec.field(default_factory=Durations)


class Counters:
    """Counters of an engine, and a few gauges.

    Attributes:
        in_flight: Messages that were taken and have not left the pipeline (a gauge).
        windows: Windows that were arranged.
        batches: How long windows took, from their first message until the hooks of all their messages had run.
        parked: Tasks that wait until fewer results of their partition wait for sinks (a gauge).
    """

    __slots__ = (
        "batches",
        "consumed",
        "in_flight",
        "messages_done",
        "parked",
        "skipped",
        "tasks_done",
        "tasks_failed",
        "warnings",
        "windows",
    )

    def __init__(self) -> None:
        self.consumed = 0
        self.messages_done = 0
        self.tasks_done = 0
        self.tasks_failed = 0
        self.skipped = 0
        self.warnings = 0
        self.windows = 0
        self.batches = Durations()
        self.in_flight = 0
        self.parked = 0

    def statistics(self) -> CounterStatistics:
        return CounterStatistics(
            self.consumed,
            self.messages_done,
            self.tasks_done,
            self.tasks_failed,
            self.skipped,
            self.warnings,
            self.in_flight,
            self.batches.copy(),
        )


class Slowest:
    """The few slowest tasks so far."""

    def __init__(self, keep: int = 5) -> None:
        self._keep = keep
        self._floor = 0.0
        self._heap: list[tuple[float, str, str]] = []

    def add(self, result: ExecutorResult) -> None:
        """Add a result if it is among the slowest; otherwise this costs one comparison."""
        if result.duration_seconds <= self._floor:
            return
        labels = ",".join(f"{name}={value}" for name, value in result.task.labels.items())
        item = result.duration_seconds, result.task.task_id[:SHOWN_CHARS], labels[:SHOWN_CHARS]
        if len(self._heap) < self._keep:
            heapq.heappush(self._heap, item)
        else:
            heapq.heapreplace(self._heap, item)
            self._floor = self._heap[0][0]

    def list_tasks(self) -> list[tuple[float, str, str]]:
        """Return (seconds, task id, labels), the slowest first."""
        return sorted(self._heap, reverse=True)


class Overridden:
    """The hooks that the handler overrides; the others are never called."""

    __slots__ = ("on_error", "on_message_complete", "on_task_complete", "on_window_complete", "transform")

    def __init__(self, handler: Handler[Any, Any]) -> None:
        self.on_error = overrides(handler, "on_error")
        self.on_message_complete = overrides(handler, "on_message_complete")
        self.on_task_complete = overrides(handler, "on_task_complete")
        self.on_window_complete = overrides(handler, "on_window_complete")
        self.transform = overrides(handler, "transform")

    @property
    def window_hook(self) -> str:
        """The name of the hook that receives windows."""
        return "transform" if self.transform else "arrange"


class ProcessStatistics(msgspec.Struct, frozen=True):
    """The resource usage of a process.

    Attributes:
        cpu_seconds: The CPU time of the process and of its ended children.
        rss_bytes: Its resident memory.
    """

    cpu_seconds: float
    rss_bytes: int


def measure_process() -> ProcessStatistics:
    """Return the resource usage of this process."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    # Called four times a second; a Path would cost more than the rest.
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        pages = int(statm.read().split()[1])
    cpu_seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return ProcessStatistics(cpu_seconds, pages * _PAGE_BYTES)
