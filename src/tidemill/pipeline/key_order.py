"""The order per key of one owned partition (`executor.order_by: key`): keeps tasks back until their turn has come.

`core.key_order` says when that is.

A task that waits is neither queued nor running; it is pending, and its messages count against `max_uncommitted` and the
bytes in flight, not against the executors. So whatever runs tasks, resident copies with their send-ahead included, only
ever gets those whose turn it is.

Invariant: a task that is terminal, a hook of a message that has run, and nothing else, lets others start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from tidemill.core.ledger import LedgerEntry
from tidemill.core.pipeline.key_order import KeyOrder
from tidemill.pipeline.handler.models import ExecutorTask
from tidemill.pipeline.tasks.pool import TaskRun
from tidemill.sources.base import TopicPartition

if TYPE_CHECKING:
    from tidemill.pipeline.window import WindowRun

#: What has the place of tasks that are not known yet.
_NOTHING = ExecutorTask("")

#: So many messages that wait no more are kept before they are dropped.
_KEPT = 1_000


class OrderedTasks:
    """Which tasks of a partition wait for their key.

    Args:
        waits: Called with how many messages more, or fewer, wait.
        hooked: Whether the handler has `on_message_complete`.
    """

    __slots__ = ("_offsets", "_order", "_waits")

    def __init__(self, waits: Callable[[int], None], *, hooked: bool) -> None:
        """Start with nothing open."""
        self._order: KeyOrder[TaskRun] = KeyOrder(hooked=hooked)
        self._waits = waits
        #: Of messages that wait, by position; what waits no more is dropped now and then.
        self._offsets: dict[int, int] = {}

    @property
    def waiting(self) -> int:
        """How many tasks wait for their key."""
        return self._order.waiting_tasks

    @property
    def waiting_messages(self) -> int:
        """How many messages wait for their key."""
        return self._order.waiting_messages

    def arranged(self, window: WindowRun, runs: Sequence[tuple[TaskRun, Sequence[int]]]) -> None:
        """Take the tasks of the next window and launch those whose turn it is."""
        if window.place is not None:
            self._launch(self._order.replace(window.place, [run for run, _ in runs]), self._order.waiting_messages)
            return
        self._arranged(window, runs)

    def keep(self, window: WindowRun) -> None:
        """Keep the place of a window of one message that cannot be arranged yet: `arranged` gives it to its tasks."""
        if window.place is None:
            window.place = TaskRun(_NOTHING, window, window.arrived)
            self._arranged(window, [(window.place, ())])

    def give_up(self, window: WindowRun) -> None:
        """Give up the place of a window that was kept."""
        if window.place is not None:
            self.ended(window.place)
            self.message_ended(window.entries[0])

    def _arranged(self, window: WindowRun, runs: Sequence[tuple[TaskRun, Sequence[int]]]) -> None:
        # Positions in the ledger are never used twice.
        places = [entry.position for entry in window.entries]
        keys = {place: message.key for place, message in zip(places, window.messages, strict=True)}
        tasks = [(run, [places[index] for index in indexes]) for run, indexes in runs]
        before = self._order.waiting_messages
        start = self._order.arranged(tasks, keys)
        for place, message in zip(places, window.messages, strict=True):
            if self._order.waits(place):
                self._offsets[place] = message.offset
        if len(self._offsets) > 2 * self._order.waiting_messages + _KEPT:
            self.waiting_offsets()
        self._launch(start, before)

    def waiting_offsets(self) -> Set[int]:
        """Return which messages have a task that waits for its key."""
        self._offsets = {place: offset for place, offset in self._offsets.items() if self._order.waits(place)}
        return set(self._offsets.values())

    def replaced(self, run: TaskRun, others: Sequence[TaskRun]) -> None:
        """Launch what replaces a task, in its place."""
        self._launch(self._order.replace(run, others), self._order.waiting_messages)

    def ended(self, run: TaskRun) -> None:
        """Launch what waited for a task, which is terminal."""
        before = self._order.waiting_messages
        self._launch(self._order.done(run), before)

    def message_ended(self, entry: LedgerEntry[TopicPartition, int]) -> None:
        """Launch what waited for the hook of a message."""
        before = self._order.waiting_messages
        self._launch(self._order.message_done(entry.position), before)

    def close(self) -> None:
        """Forget everything: the partition was given up."""
        self._order.clear()
        self._offsets.clear()

    def _launch(self, runs: Sequence[TaskRun], before: int) -> None:
        if change := self._order.waiting_messages - before:
            self._waits(change)
        for run in runs:
            if run is not run.window.place:
                run.window.launch(run)
