"""The order per key of one owned partition (`executor.order_by: key`): holds tasks back until it is their turn.

`core.pipeline.key_order` decides when that is.

A waiting task is neither queued nor running. It is pending; its messages count against `max_uncommitted` and the bytes
in flight, but not against the executors. So executors, including resident copies with their send-ahead, receive only
tasks whose turn has come.

Invariant: only the end of a task, or of a message's hook, lets other tasks start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set

from tidemill.core.ledger import LedgerEntry
from tidemill.core.pipeline.key_order import KeyOrder
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sources.base import TopicPartition

#: Up to this many offsets of messages that no longer wait may accumulate before they are dropped.
_KEPT = 1_000


#: A message and its entry in the ledger.
Opened = tuple[SourceMessage, LedgerEntry[TopicPartition, int]]


class ReservedTurn:
    """A placeholder for a message whose tasks are not known yet.

    Args:
        turn: Called when nothing is ahead of it, possibly right away.
    """

    __slots__ = ("turn",)

    def __init__(self, turn: Callable[[], None] | None = None) -> None:
        self.turn = turn


class OrderedTasks:
    """The tasks of a partition that wait for their key.

    Args:
        waits: Called with the change of the number of waiting messages.
        launch: Called with each task whose turn has come.
        hooked: Whether the handler has `on_message_complete`.
    """

    __slots__ = ("_begun", "_launch", "_offsets", "_order", "_waits")

    def __init__(self, waits: Callable[[int], None], launch: Callable[[TaskInFlight], None], *, hooked: bool) -> None:
        self._launch = launch
        self._order: KeyOrder[TaskInFlight | ReservedTurn] = KeyOrder(hooked=hooked)
        self._waits = waits
        #: Offsets of waiting messages by ledger position; entries of messages that no longer wait are dropped lazily.
        self._offsets: dict[int, int] = {}
        #: Positions of the messages that wait only for their hook.
        self._begun: set[int] = set()

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for their key."""
        return self._order.waiting_tasks

    @property
    def waiting_messages(self) -> int:
        """The number of messages that wait for their key."""
        return self._order.waiting_messages

    def arranged(
        self,
        opened: Sequence[Opened],
        flights: Sequence[tuple[TaskInFlight, Sequence[int]]],
        reserved: ReservedTurn | None = None,
    ) -> None:
        """Add the tasks of the next window and launch those whose turn it is.

        Args:
            opened: The window's messages and their entries in the ledger.
            flights: The window's tasks, each with the indexes of its messages.
            reserved: The placeholder that the tasks replace, if any.
        """
        if reserved is not None:
            self._launch_all(
                self._order.replace(reserved, [flight for flight, _ in flights]), self._order.waiting_messages
            )
            return
        self._arranged(opened, flights)

    def is_any_open(self, messages: Sequence[SourceMessage]) -> bool:
        """Return whether an earlier message with the key of one of these is not done."""
        order = self._order
        return any(message.key is not None and order.is_open(message.key) for message in messages)

    def take_hooks(self, opened: Sequence[Opened], call: Callable[[int], None]) -> None:
        """Add a window whose messages only lack their hooks; the hooks of one key are called one after another.

        Args:
            opened: The window's messages and their entries in the ledger.
            call: Called with the index of a message once the hooks of earlier messages with its key have ended.
        """
        all_reserved = [ReservedTurn() for _ in opened]
        for index, (reserved, (_, entry)) in enumerate(zip(all_reserved, opened, strict=True)):
            reserved.turn = functools.partial(self._call_hook, reserved, entry.position, call, index)
            self._begun.add(entry.position)
        self._arranged(opened, [(each, (index,)) for index, each in enumerate(all_reserved)])

    def _call_hook(self, reserved: ReservedTurn, position: int, call: Callable[[int], None], index: int) -> None:
        self._begun.discard(position)
        self.ended(reserved)  # the key stays open until the hook ends
        call(index)

    def reserve_turn(self, opened: Opened, turn: Callable[[], None] | None = None) -> ReservedTurn:
        """Add a placeholder for a message that cannot be arranged yet; `arranged` replaces it with the message's tasks.

        Args:
            opened: The message and its entry in the ledger.
            turn: Called when nothing is ahead of it, possibly right away.
        """
        reserved = ReservedTurn(turn)
        self._arranged([opened], [(reserved, ())])
        return reserved

    def release_turn(self, reserved: ReservedTurn, entry: LedgerEntry[TopicPartition, int]) -> None:
        """Remove a placeholder: its message gets no task."""
        self.ended(reserved)
        self.message_ended(entry)

    def _arranged(
        self, opened: Sequence[Opened], flights: Sequence[tuple[TaskInFlight | ReservedTurn, Sequence[int]]]
    ) -> None:
        # Positions in the ledger are never reused.
        all_reserved = [entry.position for _, entry in opened]
        keys = {entry.position: message.key for message, entry in opened}
        tasks = [(flight, [all_reserved[index] for index in indexes]) for flight, indexes in flights]
        before = self._order.waiting_messages
        start = self._order.add_tasks(tasks, keys)
        for message, entry in opened:
            if self._order.is_waiting(entry.position):
                self._offsets[entry.position] = message.offset
        if len(self._offsets) > 2 * self._order.waiting_messages + _KEPT:
            self.find_waiting_offsets()
        self._launch_all(start, before)

    def find_waiting(self, entry: LedgerEntry[TopicPartition, int]) -> TaskInFlight | ReservedTurn | None:
        """Return the task or placeholder of a message that waits for its key, if any."""
        return self._order.find_waiting_task(entry.position)

    def find_blocker(self, flight: TaskInFlight | ReservedTurn) -> int | None:
        """Return the ledger position of the message that a task waits for; None: it does not wait."""
        return self._order.find_blocker(flight)

    def find_waiting_offsets(self) -> Set[int]:
        """Return the offsets of the messages that have a task waiting for its key."""
        self._offsets = {
            reserved: offset for reserved, offset in self._offsets.items() if self._order.is_waiting(reserved)
        }
        return set(self._offsets.values())

    def find_unstarted_offsets(self) -> Set[int]:
        """Return the offsets of the waiting messages that have not started, that is, wait for more than their hook."""
        self.find_waiting_offsets()
        return {offset for reserved, offset in self._offsets.items() if reserved not in self._begun}

    def replaced(self, flight: TaskInFlight, others: Sequence[TaskInFlight]) -> None:
        """Launch the tasks that replace a task, at its position in the order."""
        self._launch_all(self._order.replace(flight, others), self._order.waiting_messages)

    def ended(self, flight: TaskInFlight | ReservedTurn) -> None:
        """Launch the tasks that waited for this one, which has ended."""
        before = self._order.waiting_messages
        self._launch_all(self._order.note_task_done(flight), before)

    def message_ended(self, entry: LedgerEntry[TopicPartition, int]) -> None:
        """Launch the tasks that waited for the hook of a message."""
        before = self._order.waiting_messages
        self._launch_all(self._order.note_message_done(entry.position), before)

    def close(self) -> None:
        """Forget everything: the partition was given up."""
        self._order.clear()
        self._offsets.clear()
        self._begun.clear()

    def _launch_all(self, flights: Sequence[TaskInFlight | ReservedTurn], before: int) -> None:
        if change := self._order.waiting_messages - before:
            self._waits(change)
        for flight in flights:
            if isinstance(flight, TaskInFlight):
                self._launch(flight)
            elif flight.turn is not None:
                flight.turn()
