"""Order per key within one partition: which tasks may start, so that those of one key follow their messages' order.

Tasks are ordered by window, smallest offset, index. A task has the keys of its messages; a message without a key adds
none. A task may start when no earlier task with one of its keys is open, except for tasks that work, under that key,
for one and the same message: those run in parallel. A task is open from its arrangement until it is done, including its
retries and hooks; a replacement takes its place. If messages have a hook of their own, it is part of their last task:
later messages with the key wait for it, too.

Theory of operation. Every key has a queue of groups; a group is one task, or the tasks of one message. A task is in one
group for each of its keys, and may start once all of these are at the head of their queues. A group without an open
task leaves its queue.

Invariants: a task waits for earlier ones only, so that tasks never deadlock, however many keys they have; tasks without
a common key never wait for each other; a task that was withdrawn is never started. The cost of a call depends on the
messages and keys of its tasks, not on the length of the queues; memory is O(open).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

TaskT = TypeVar("TaskT", bound=Hashable)

#: The offset of a group whose task works for several messages.
_SEVERAL = -1


class _Group(Generic[TaskT]):
    """Tasks that may run in parallel under one key.

    Attributes:
        key: The key.
        offset: The message that all of its tasks work for under the key; `_SEVERAL` closes it to other tasks.
        holders: How many tasks, and messages with a hook, are not done.
        blocked: Places that wait until it is at the head.
    """

    __slots__ = ("blocked", "holders", "key", "offset")

    def __init__(self, key: Hashable, offset: int) -> None:
        self.key = key
        self.offset = offset
        self.holders = 0
        self.blocked: list[_Place[TaskT]] = []


class _Place(Generic[TaskT]):
    """The place of a task, and of the tasks that replace it.

    Attributes:
        groups: One per key.
        behind: How many of them are not at the head of their queues.
        offsets: The messages that wait with it.
        tasks: The tasks that start once nothing is ahead of it.
        left: How many of its tasks are not done.
    """

    __slots__ = ("behind", "groups", "left", "offsets", "tasks")

    def __init__(self, task: TaskT, offsets: Sequence[int]) -> None:
        self.groups: list[_Group[TaskT]] = []
        self.behind = 0
        self.offsets = offsets
        self.tasks = [task]
        self.left = 1


class KeyOrder(Generic[TaskT]):
    """The open tasks of one partition, by key.

    Args:
        hooked: Whether messages have a hook of their own, whose end is reported with `note_message_done`.

    Example:
        >>> order: KeyOrder[str] = KeyOrder()
        >>> order.add_tasks([("a", [10]), ("b", [11]), ("c", [12])], {10: b"x", 11: b"x", 12: b"y"})
        ['a', 'c']
        >>> order.note_task_done("a")
        ['b']
    """

    __slots__ = ("_hooked", "_hooks", "_places", "_queues", "_waits", "waiting_tasks")

    def __init__(self, *, hooked: bool = False) -> None:
        self._hooked = hooked
        self._queues: dict[Hashable, deque[_Group[TaskT]]] = {}
        self._places: dict[TaskT, _Place[TaskT]] = {}
        #: The last group of each message whose hook has not run.
        self._hooks: dict[int, _Group[TaskT]] = {}
        #: How many tasks of each message wait for their turn; messages without such tasks are left out.
        self._waits: dict[int, int] = {}
        #: How many tasks wait for their turn.
        self.waiting_tasks = 0

    @property
    def waiting_messages(self) -> int:
        """How many messages have a task that waits for its turn."""
        return len(self._waits)

    def is_waiting(self, offset: int) -> bool:
        """Return whether a task of a message waits for its turn."""
        return offset in self._waits

    def is_open(self, key: Hashable) -> bool:
        """Return whether something under a key is not done: what comes next would have to wait."""
        return key in self._queues

    def find_waiting_task(self, offset: int) -> TaskT | None:
        """Return a task of a message that waits for its turn, if there is one; costs by how many tasks are open."""
        if offset not in self._waits:
            return None
        return next(task for task, place in self._places.items() if place.behind and offset in place.offsets)

    def find_blocker(self, task: TaskT) -> int | None:
        """Return the first message that has to be done before a task starts; None: the task does not wait.

        Costs by how many tasks are open: for questions, not for decisions.
        """
        place = self._places.get(task)
        if place is None or not place.behind:
            return None
        ahead = {id(self._queues[group.key][0]) for group in place.groups} - {id(group) for group in place.groups}
        tasks = (min(other.offsets) for other in self._places.values() if ahead & set(map(id, other.groups)))
        hooks = (offset for offset, group in self._hooks.items() if id(group) in ahead)
        return min((*tasks, *hooks))

    def add_tasks(
        self, tasks: Sequence[tuple[TaskT, Sequence[int]]], keys: Mapping[int, Hashable | None]
    ) -> list[TaskT]:
        """Add the tasks of the next window.

        Args:
            tasks: Each with the offsets of its messages; none means every message of the window.
            keys: The key of each message of the window, by offset; None: the message has no key.

        Returns:
            The tasks that may start now, in order.
        """
        every = sorted(keys)
        start: list[TaskT] = []
        last: dict[int, _Group[TaskT]] = {}
        for task, given in sorted(tasks, key=lambda pair: min(pair[1] or every)):
            offsets = given or every
            place = _Place(task, offsets)
            for key, own in _group_by_key(offsets, keys):
                group = self._join(place, key, own)
                for offset in own:
                    last[offset] = group
            if place.groups:
                self._places[task] = place
            if place.behind:
                self._wait(place)
            else:
                start.append(task)
        if self._hooked:
            for offset, group in last.items():
                group.holders += 1
                self._hooks[offset] = group
        return start

    def replace(self, task: TaskT, others: Sequence[TaskT]) -> list[TaskT]:
        """Give the place of a task to others; without any, the task is done.

        Returns:
            The tasks that may start now.
        """
        if not others:
            return self.note_task_done(task)
        place = self._places.pop(task, None)
        if place is None:
            return list(others)  # without a key there is no place
        place.left += len(others) - 1
        for other in others:
            self._places[other] = place
        if not place.behind:
            return list(others)
        place.tasks = [each for each in place.tasks if each != task] + list(others)
        self.waiting_tasks += len(others) - 1
        return []

    def note_task_done(self, task: TaskT) -> list[TaskT]:
        """Note that a task is over, or was withdrawn while it waited; return the tasks that may start now."""
        place = self._places.pop(task, None)
        if place is None:
            return []
        place.left -= 1
        if place.behind:
            place.tasks.remove(task)
            self.waiting_tasks -= 1
        if place.left:
            return []
        if place.behind:
            self._stop_waiting(place)
        start: list[TaskT] = []
        for group in place.groups:
            self._leave(group, start)
        return start

    def note_message_done(self, offset: int) -> list[TaskT]:
        """Note that the hook of a message has run; return the tasks that may start now."""
        group = self._hooks.pop(offset, None)
        start: list[TaskT] = []
        if group is not None:
            self._leave(group, start)
        return start

    def clear(self) -> None:
        """Forget everything: the partition was given up."""
        for kept in (self._queues, self._places, self._hooks, self._waits):
            kept.clear()
        self.waiting_tasks = 0

    def _join(self, place: _Place[TaskT], key: Hashable, offsets: Sequence[int]) -> _Group[TaskT]:
        """Put a task at the end of a key's queue, in the last group if that works for the same single message."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
        offset = offsets[0] if len(offsets) == 1 else _SEVERAL
        if queue and offset != _SEVERAL and queue[-1].offset == offset:
            group = queue[-1]
        else:
            group = _Group(key, offset)
            queue.append(group)
        group.holders += 1
        place.groups.append(group)
        if queue[0] is not group:
            group.blocked.append(place)
            place.behind += 1
        return group

    def _leave(self, group: _Group[TaskT], start: list[TaskT]) -> None:
        """Remove one holder of a group, and add the tasks that may start now to `start`."""
        group.holders -= 1
        queue = self._queues[group.key]
        if group.holders or queue[0] is not group:
            return
        while queue and not queue[0].holders:
            queue.popleft()
            for place in queue[0].blocked if queue else ():
                place.behind -= 1
                if not place.behind and place.left:
                    self._stop_waiting(place)
                    self.waiting_tasks -= len(place.tasks)
                    start += place.tasks
        if not queue:
            del self._queues[group.key]

    def _wait(self, place: _Place[TaskT]) -> None:
        self.waiting_tasks += 1
        waits = self._waits
        for offset in place.offsets:
            waits[offset] = waits.get(offset, 0) + 1

    def _stop_waiting(self, place: _Place[TaskT]) -> None:
        waits = self._waits
        for offset in place.offsets:
            if waits[offset] == 1:
                del waits[offset]
            else:
                waits[offset] -= 1


def _group_by_key(
    offsets: Sequence[int], keys: Mapping[int, Hashable | None]
) -> Iterable[tuple[Hashable, Sequence[int]]]:
    """Return the keys of a task's messages, each with its messages."""
    if len(offsets) == 1:
        key = keys[offsets[0]]
        return () if key is None else ((key, offsets),)
    found: dict[Hashable, list[int]] = {}
    for offset in offsets:
        if (key := keys[offset]) is not None:
            found.setdefault(key, []).append(offset)
    return found.items()
