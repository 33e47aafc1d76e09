"""What an engine keeps of one owned partition: its open window, its pending tasks, and how much is unresolved."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidemill.config.settings import ExecutorSettings
from tidemill.core.ledger import Entry
from tidemill.core.window import Windowing
from tidemill.pipeline.models import ExecutorTask
from tidemill.runtime.messages import SourceMessage
from tidemill.sources.base import TopicPartition

if TYPE_CHECKING:
    from tidemill.pipeline.ordering import Ordering
    from tidemill.pipeline.tasks import TaskRun
    from tidemill.pipeline.windowrun import WindowRun

Opened = tuple[SourceMessage, Entry[TopicPartition, int]]


class Lane:
    """One owned partition.

    Attributes:
        partition: Its topic and number.
        name: The same as one text, for logs.
        windowing: Collects messages into windows.
        pending: Tasks without a terminal outcome, by key (the task id, or an internal one for a repeated id).
        waiting: Windows that wait for `arrange`, which is serial per partition.
        arranging: Whether `arrange` runs now.
        unresolved: Messages in hand that did not leave the pipeline yet.
        undelivered: Its results that wait for sinks.
        undelivered_bytes: How much they are.
        starved: It had no room when it was looked at last.
        parked: Tasks that do not start before less of that waits.
        windows: Windows whose own hook, or what it delivers, is not done yet; their messages may be.
        order: Keeps tasks back until those of earlier messages with their key are done; None: no order.
        closed: The partition was given up: late results change nothing.
        leaving: The partition is about to be given up: nothing more is taken of it.
    """

    __slots__ = (
        "arranging",
        "closed",
        "drained",
        "leaving",
        "linger",
        "name",
        "order",
        "parked",
        "partition",
        "pending",
        "starved",
        "undelivered",
        "undelivered_bytes",
        "unresolved",
        "waiting",
        "windowing",
        "windows",
    )

    def __init__(self, partition: TopicPartition, settings: ExecutorSettings) -> None:
        """Start empty."""
        self.partition = partition
        self.name = f"{partition[0]}/{partition[1]}"
        self.windowing: Windowing[Opened] = Windowing(
            settings.window_size, settings.window_max_bytes, settings.window_linger_ms / 1000
        )
        self.pending: dict[object, TaskRun] = {}
        self.waiting: deque[WindowRun] = deque()
        self.arranging = False
        self.unresolved = 0
        self.undelivered = 0
        self.undelivered_bytes = 0
        self.starved = False
        self.parked: list[TaskRun] = []
        self.windows = 0
        self.order: Ordering | None = None
        self.closed = False
        self.leaving = False
        self.drained: asyncio.Event | None = None
        self.linger: asyncio.TimerHandle | None = None

    def pending_tasks(self) -> Iterator[ExecutorTask]:
        """Yield the tasks that have no terminal outcome yet."""
        return (run.task for run in self.pending.values())

    @property
    def held_back(self) -> int:
        """How many tasks wait for sinks or for their key."""
        return len(self.parked) + (self.order.waiting if self.order is not None else 0)

    @property
    def busy(self) -> bool:
        """Whether something is in hand."""
        return self.unresolved > 0 or self.windows > 0

    def resolved(self) -> None:
        """Count one message out."""
        self.unresolved -= 1
        self._note_idle()

    def window_done(self) -> None:
        """Count one window's own work out."""
        self.windows -= 1
        self._note_idle()

    def _note_idle(self) -> None:
        if self.drained is not None and not self.busy:
            self.drained.set()

    async def drain(self) -> None:
        """Wait until nothing is in hand, or the partition is given up."""
        while self.busy and not self.closed:
            self.drained = asyncio.Event()
            await self.drained.wait()

    def close(self) -> None:
        """Give the partition up."""
        self.closed = True
        self.waiting.clear()
        self.parked.clear()
        if self.order is not None:
            self.order.close()
        if self.linger is not None:
            self.linger.cancel()
        if self.drained is not None:
            self.drained.set()
