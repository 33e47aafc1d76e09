"""What an engine keeps of one owned partition: its open window, its pending tasks, and how much is unresolved."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tidemill.config.executor_settings import ExecutorSettings
from tidemill.core.ledger import LedgerEntry
from tidemill.core.pipeline.handover import Handover
from tidemill.core.pipeline.window import Windowing
from tidemill.pipeline.handler.models import ExecutorTask
from tidemill.runtime.messages import SourceMessage
from tidemill.sources.base import TopicPartition, name_of

if TYPE_CHECKING:
    from tidemill.pipeline.key_order import OrderedTasks
    from tidemill.pipeline.tasks.pool import TaskRun
    from tidemill.pipeline.window import WindowRun

Opened = tuple[SourceMessage, LedgerEntry[TopicPartition, int]]


class OwnedPartition:
    """One owned partition.

    Attributes:
        partition: Its topic and number.
        name: The same as one text, for logs.
        windowing: Collects messages into windows.
        pending: Tasks without a terminal outcome, by key (the task id, or an internal one for a repeated id).
        waiting: Windows that wait for `arrange`, which is serial per partition.
        arranging: Whether `arrange` runs now.
        arranged: The window that it runs for.
        unresolved: Messages in hand that did not leave the pipeline yet.
        undelivered: Its results that wait for sinks.
        undelivered_bytes: How much they are.
        starved: It had no room when it was looked at last.
        parked: Tasks that do not start before less of that waits.
        windows: Windows whose own hook, or what it delivers, is not done yet; their messages may be. Not held ones.
        held: How many failures the brake holds of a message, by its offset.
        stuck: Messages that are held, or wait for their key while others are: nothing comes of them by itself.
        order: Keeps tasks back until those of earlier messages with their key are done; None: no order.
        closed: The partition was given up: late results change nothing.
        handover: What is still waited for, once the partition is about to be given up: nothing more is taken of it,
            and nothing more of it starts.
    """

    __slots__ = (
        "arranged",
        "arranging",
        "closed",
        "handed_over",
        "handover",
        "held",
        "linger",
        "name",
        "order",
        "parked",
        "partition",
        "pending",
        "starved",
        "stuck",
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
        self.name = name_of(partition)
        self.windowing: Windowing[Opened] = Windowing(
            settings.window_size, settings.window_max_bytes, settings.window_linger_ms / 1000
        )
        self.pending: dict[object, TaskRun] = {}
        self.waiting: deque[WindowRun] = deque()
        self.arranging = False
        self.arranged: WindowRun | None = None
        self.unresolved = 0
        self.undelivered = 0
        self.undelivered_bytes = 0
        self.starved = False
        self.parked: list[TaskRun] = []
        self.windows = 0
        self.held: dict[int, int] = {}
        self.stuck = 0
        self.order: OrderedTasks | None = None
        self.closed = False
        self.handover: Handover | None = None
        self.handed_over: asyncio.Event | None = None
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
        """Whether something is in hand that may come to an end."""
        return self.unresolved > self.stuck or self.windows > 0

    def resolved(self, offset: int) -> None:
        """Count one message out."""
        self.unresolved -= 1
        if self.handover is not None:
            self.handover.resolved(offset)
            self._look()

    def window_done(self) -> None:
        """Count one window's own work out."""
        self.windows -= 1
        self._look()

    def count_stuck(self) -> None:
        """Look again how many messages nothing comes of by itself."""
        waiting = self.order.waiting_offsets() if self.order is not None and self.held else ()
        self.stuck = len(self.held.keys() | waiting)
        if self.handover is not None and self.held:
            self.withdraw(self.held)

    # -- giving the partition up ------------------------------------------------------------------------------

    def hand_over(self, unresolved: Iterable[int], queued: Iterable[TaskRun]) -> None:
        """Drop what has not started, and let nothing more start.

        Args:
            unresolved: The offsets of its messages that did not leave the pipeline.
            queued: Its tasks that were taken out of the queue.
        """
        unstarted = [offset for run in (*queued, *self.parked) for offset in run.window.offsets_of(run)]
        unstarted += [window.messages[0].offset for window in self.waiting]
        unstarted += self.held
        if self.order is not None:  # those that wait for their key
            waiting = [run for run in self.pending.values() if not run.attempts]
            unstarted += [offset for run in waiting for offset in run.window.offsets_of(run)]
        if self.arranged is not None:
            unstarted.append(self.arranged.messages[0].offset)
        if (window := self.windowing.flush()) is not None:
            unstarted.append(window.items[0][0].offset)
        self.handover = Handover(unresolved, unstarted)
        self.waiting.clear()
        self.parked.clear()
        self._stop_linger()

    def withdraw(self, offsets: Iterable[int]) -> None:
        """Leave messages to the next owner whose work would have to start now; only while it is handed over."""
        assert self.handover is not None
        self.handover.withdrawn(offsets)
        self._look()

    def _look(self) -> None:
        if self.handed_over is not None and self._is_over():
            self.handed_over.set()

    def _is_over(self) -> bool:
        return self.closed or self.handover is None or not (self.handover.left or self.windows)

    async def finish(self) -> None:
        """Wait until nothing is left that is worth it, or the partition is gone; the caller bounds the time."""
        while not self._is_over():
            self.handed_over = asyncio.Event()
            await self.handed_over.wait()

    def close(self) -> None:
        """Give the partition up."""
        self.closed = True
        self.waiting.clear()
        self.parked.clear()
        if self.order is not None:
            self.order.close()
        self._stop_linger()
        self._look()

    def _stop_linger(self) -> None:
        if self.linger is not None:
            self.linger.cancel()
            self.linger = None
