"""The order per key of one owned partition (`executor.order_by: key`): keeps tasks back until their turn has come.

`core.pipeline.key_order` decides when that is.

A task that waits is neither queued nor running; it is pending, and its messages count against `max_uncommitted` and the
bytes in flight, not against the executors. So whatever runs tasks, resident copies with their send-ahead included, only
ever gets those whose turn it is.

Invariant: a task that is terminal, a hook of a message that has run, and nothing else, lets others start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set

from tidemill.core.ledger import LedgerEntry
from tidemill.core.pipeline.key_order import KeyOrder
from tidemill.pipeline.tasks.task_run import TaskRun
from tidemill.runtime.messages import SourceMessage
from tidemill.sources.base import TopicPartition

#: Up to this many messages that no longer wait are kept before they are dropped.
_KEPT = 1_000


#: A message and its entry in the ledger.
Opened = tuple[SourceMessage, LedgerEntry[TopicPartition, int]]


class KeptPlace:
    """A placeholder for the tasks of a message that are not known yet.

    Args:
        turn: Called when nothing is ahead of it, which may be so from the beginning.
    """

    __slots__ = ("turn",)

    def __init__(self, turn: Callable[[], None] | None = None) -> None:
        """Keep what to call."""
        self.turn = turn


class OrderedTasks:
    """Which tasks of a partition wait for their key.

    Args:
        waits: Called with how many more messages wait, or fewer where it is negative.
        launch: Called with each task whose turn has come.
        hooked: Whether the handler has `on_message_complete`.
    """

    __slots__ = ("_begun", "_launch", "_offsets", "_order", "_waits")

    def __init__(self, waits: Callable[[int], None], launch: Callable[[TaskRun], None], *, hooked: bool) -> None:
        """Start with nothing open."""
        self._launch = launch
        self._order: KeyOrder[TaskRun | KeptPlace] = KeyOrder(hooked=hooked)
        self._waits = waits
        #: Of messages that wait, by position; what no longer waits is dropped now and then.
        self._offsets: dict[int, int] = {}
        #: Those of them whose hook is all that waits.
        self._begun: set[int] = set()

    @property
    def waiting(self) -> int:
        """How many tasks wait for their key."""
        return self._order.waiting_tasks

    @property
    def waiting_messages(self) -> int:
        """How many messages wait for their key."""
        return self._order.waiting_messages

    def arranged(
        self, opened: Sequence[Opened], runs: Sequence[tuple[TaskRun, Sequence[int]]], place: KeptPlace | None = None
    ) -> None:
        """Take the tasks of the next window and launch those whose turn it is.

        Args:
            opened: Its messages and their entries in the ledger.
            runs: Its tasks, each with the indexes of its messages.
            place: The place that was kept for it, if any.
        """
        if place is not None:
            self._launch_all(self._order.replace(place, [run for run, _ in runs]), self._order.waiting_messages)
            return
        self._arranged(opened, runs)

    def is_any_open(self, messages: Sequence[SourceMessage]) -> bool:
        """Return whether an earlier message with the key of one of these is not done."""
        order = self._order
        return any(message.key is not None and order.is_open(message.key) for message in messages)

    def take_hooks(self, opened: Sequence[Opened], call: Callable[[int], None]) -> None:
        """Take a window whose messages are done but for their hooks: those of a key are called one after another.

        Args:
            opened: Its messages and their entries in the ledger.
            call: Called with the index of each message once the hooks of earlier ones with its key are over.
        """
        places = [KeptPlace() for _ in opened]
        for index, (place, (_, entry)) in enumerate(zip(places, opened, strict=True)):
            place.turn = functools.partial(self._call_hook, place, entry.position, call, index)
            self._begun.add(entry.position)
        self._arranged(opened, [(each, (index,)) for index, each in enumerate(places)])

    def _call_hook(self, place: KeptPlace, position: int, call: Callable[[int], None], index: int) -> None:
        self._begun.discard(position)
        self.ended(place)  # its key is open until the hook is over
        call(index)

    def keep_place(self, opened: Opened, turn: Callable[[], None] | None = None) -> KeptPlace:
        """Keep the place of a message that cannot be arranged yet; `arranged` gives it to its tasks.

        Args:
            opened: The message and its entry in the ledger.
            turn: Called when nothing is ahead of it, which may be now.
        """
        place = KeptPlace(turn)
        self._arranged([opened], [(place, ())])
        return place

    def give_up_place(self, place: KeptPlace, entry: LedgerEntry[TopicPartition, int]) -> None:
        """Give up a place that was kept: its message gets no task."""
        self.ended(place)
        self.message_ended(entry)

    def _arranged(self, opened: Sequence[Opened], runs: Sequence[tuple[TaskRun | KeptPlace, Sequence[int]]]) -> None:
        # Positions in the ledger are never used twice.
        places = [entry.position for _, entry in opened]
        keys = {entry.position: message.key for message, entry in opened}
        tasks = [(run, [places[index] for index in indexes]) for run, indexes in runs]
        before = self._order.waiting_messages
        start = self._order.add_tasks(tasks, keys)
        for message, entry in opened:
            if self._order.is_waiting(entry.position):
                self._offsets[entry.position] = message.offset
        if len(self._offsets) > 2 * self._order.waiting_messages + _KEPT:
            self.find_waiting_offsets()
        self._launch_all(start, before)

    def find_waiting(self, entry: LedgerEntry[TopicPartition, int]) -> TaskRun | KeptPlace | None:
        """Return what of a message waits for its key, if anything does."""
        return self._order.find_waiting_task(entry.position)

    def find_blocker(self, run: TaskRun | KeptPlace) -> int | None:
        """Return the position in the ledger of the message that a task waits for; None: it does not wait."""
        return self._order.find_blocker(run)

    def find_waiting_offsets(self) -> Set[int]:
        """Return which messages have a task that waits for its key."""
        self._offsets = {place: offset for place, offset in self._offsets.items() if self._order.is_waiting(place)}
        return set(self._offsets.values())

    def find_unstarted_offsets(self) -> Set[int]:
        """Return which of them have not begun: their hook is not all that waits."""
        self.find_waiting_offsets()
        return {offset for place, offset in self._offsets.items() if place not in self._begun}

    def replaced(self, run: TaskRun, others: Sequence[TaskRun]) -> None:
        """Launch what replaces a task, in its place."""
        self._launch_all(self._order.replace(run, others), self._order.waiting_messages)

    def ended(self, run: TaskRun | KeptPlace) -> None:
        """Launch what waited for a task, which is terminal."""
        before = self._order.waiting_messages
        self._launch_all(self._order.note_task_done(run), before)

    def message_ended(self, entry: LedgerEntry[TopicPartition, int]) -> None:
        """Launch what waited for the hook of a message."""
        before = self._order.waiting_messages
        self._launch_all(self._order.note_message_done(entry.position), before)

    def close(self) -> None:
        """Forget everything: the partition was given up."""
        self._order.clear()
        self._offsets.clear()
        self._begun.clear()

    def _launch_all(self, runs: Sequence[TaskRun | KeptPlace], before: int) -> None:
        if change := self._order.waiting_messages - before:
            self._waits(change)
        for run in runs:
            if isinstance(run, TaskRun):
                self._launch(run)
            elif run.turn is not None:
                run.turn()
