"""Order per key within one partition: tasks of one key start in the order of their messages.

Tasks are ordered by window, smallest offset and index. A task has the keys of its messages; a message without a key
adds none. A task may start when no earlier task with one of its keys is open. The exceptions are tasks that work, under
that key, for a single common message: they run in parallel. A task is open from its arrangement until it is done,
including its retries and hooks; replacements take its position. If messages have a hook of their own, the hook is part
of their last task: later messages with the key wait for it, too.

Theory of operation. Every key has a queue of groups; a group is one task, or the tasks of one message. A task is in one
group for each of its keys, and may start once all these groups are at the head of their queues. A group without an open
task leaves its queue.

Invariants: a task waits only for earlier ones, so that tasks never deadlock, however many keys they have; tasks without
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
        offset: The single message that its tasks work for under the key; `_SEVERAL` closes the group to other tasks.
        holders: The number of its tasks, and of messages with a hook, that are not done.
        blocked: Positions that wait until the group is at the head.
    """

    __slots__ = ("blocked", "holders", "key", "offset")

    def __init__(self, key: Hashable, offset: int) -> None:
        self.key = key
        self.offset = offset
        self.holders = 0
        self.blocked: list[_Position[TaskT]] = []


class _Position(Generic[TaskT]):
    """The position of a task, and of its replacements, in the queues of its keys.

    Attributes:
        groups: One group per key.
        behind: The number of groups that are not at the head of their queues.
        offsets: The messages that wait with the task.
        tasks: The tasks that start once no group is behind.
        left: The number of tasks that are not done.
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

    __slots__ = ("_hooked", "_hooks", "_positions", "_queues", "_waits", "waiting_tasks")

    def __init__(self, *, hooked: bool = False) -> None:
        self._hooked = hooked
        self._queues: dict[Hashable, deque[_Group[TaskT]]] = {}
        self._positions: dict[TaskT, _Position[TaskT]] = {}
        #: The last group of each message whose hook has not run.
        self._hooks: dict[int, _Group[TaskT]] = {}
        #: The number of waiting tasks of each message; messages without any are left out.
        self._waits: dict[int, int] = {}
        #: The number of waiting tasks.
        self.waiting_tasks = 0

    @property
    def waiting_messages(self) -> int:
        """The number of messages that have a waiting task."""
        return len(self._waits)

    def is_waiting(self, offset: int) -> bool:
        """Return whether a task of a message is waiting."""
        return offset in self._waits

    def is_open(self, key: Hashable) -> bool:
        """Return whether a key has open tasks or hooks, so that the next task would have to wait."""
        return key in self._queues

    def find_waiting_task(self, offset: int) -> TaskT | None:
        """Return a waiting task of a message, or None; O(open tasks)."""
        if offset not in self._waits:
            return None
        return next(
            task for task, position in self._positions.items() if position.behind and offset in position.offsets
        )

    def find_blocker(self, task: TaskT) -> int | None:
        """Return the first message that has to be done before a task starts; None if the task does not wait.

        O(open tasks): use it for display, not for decisions.
        """
        position = self._positions.get(task)
        if position is None or not position.behind:
            return None
        ahead = {id(self._queues[group.key][0]) for group in position.groups} - {id(group) for group in position.groups}
        tasks = (min(other.offsets) for other in self._positions.values() if ahead & set(map(id, other.groups)))
        hooks = (offset for offset, group in self._hooks.items() if id(group) in ahead)
        return min((*tasks, *hooks))

    def add_tasks(
        self, tasks: Sequence[tuple[TaskT, Sequence[int]]], keys: Mapping[int, Hashable | None]
    ) -> list[TaskT]:
        """Add the tasks of the next window.

        Args:
            tasks: Each task with the offsets of its messages; no offsets mean every message of the window.
            keys: The key of each message of the window, by offset; None: the message has no key.

        Returns:
            The tasks that may start now, in order.
        """
        every = sorted(keys)
        start: list[TaskT] = []
        last: dict[int, _Group[TaskT]] = {}
        for task, given in sorted(tasks, key=lambda pair: min(pair[1] or every)):
            offsets = given or every
            position = _Position(task, offsets)
            for key, own in _group_by_key(offsets, keys):
                group = self._join(position, key, own)
                for offset in own:
                    last[offset] = group
            if position.groups:
                self._positions[task] = position
            if position.behind:
                self._wait(position)
            else:
                start.append(task)
        if self._hooked:
            for offset, group in last.items():
                group.holders += 1
                self._hooks[offset] = group
        return start

    def replace(self, task: TaskT, others: Sequence[TaskT]) -> list[TaskT]:
        """Replace a task with others in the same position; without any, the task is done.

        Returns:
            The tasks that may start now.
        """
        if not others:
            return self.note_task_done(task)
        position = self._positions.pop(task, None)
        if position is None:
            return list(others)  # a task without a key has no position
        position.left += len(others) - 1
        for other in others:
            self._positions[other] = position
        if not position.behind:
            return list(others)
        position.tasks = [each for each in position.tasks if each != task] + list(others)
        self.waiting_tasks += len(others) - 1
        return []

    def note_task_done(self, task: TaskT) -> list[TaskT]:
        """Record that a task is done, or was withdrawn while it waited; return the tasks that may start now."""
        position = self._positions.pop(task, None)
        if position is None:
            return []
        position.left -= 1
        if position.behind:
            position.tasks.remove(task)
            self.waiting_tasks -= 1
        if position.left:
            return []
        if position.behind:
            self._stop_waiting(position)
        start: list[TaskT] = []
        for group in position.groups:
            self._leave(group, start)
        return start

    def note_message_done(self, offset: int) -> list[TaskT]:
        """Record that the hook of a message has ended; return the tasks that may start now."""
        group = self._hooks.pop(offset, None)
        start: list[TaskT] = []
        if group is not None:
            self._leave(group, start)
        return start

    def clear(self) -> None:
        """Forget everything, because the partition was given up."""
        for kept in (self._queues, self._positions, self._hooks, self._waits):
            kept.clear()
        self.waiting_tasks = 0

    def _join(self, position: _Position[TaskT], key: Hashable, offsets: Sequence[int]) -> _Group[TaskT]:
        """Append a task to the queue of a key; it joins the last group if both work for the same single message."""
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
        position.groups.append(group)
        if queue[0] is not group:
            group.blocked.append(position)
            position.behind += 1
        return group

    def _leave(self, group: _Group[TaskT], start: list[TaskT]) -> None:
        """Remove one holder of a group, and add the tasks that may start now to `start`."""
        group.holders -= 1
        queue = self._queues[group.key]
        if group.holders or queue[0] is not group:
            return
        while queue and not queue[0].holders:
            queue.popleft()
            for position in queue[0].blocked if queue else ():
                position.behind -= 1
                if not position.behind and position.left:
                    self._stop_waiting(position)
                    self.waiting_tasks -= len(position.tasks)
                    start += position.tasks
        if not queue:
            del self._queues[group.key]

    def _wait(self, position: _Position[TaskT]) -> None:
        self.waiting_tasks += 1
        waits = self._waits
        for offset in position.offsets:
            waits[offset] = waits.get(offset, 0) + 1

    def _stop_waiting(self, position: _Position[TaskT]) -> None:
        waits = self._waits
        for offset in position.offsets:
            if waits[offset] == 1:
                del waits[offset]
            else:
                waits[offset] -= 1


def _group_by_key(
    offsets: Sequence[int], keys: Mapping[int, Hashable | None]
) -> Iterable[tuple[Hashable, Sequence[int]]]:
    """Return the keys of a task's messages, each with its offsets."""
    if len(offsets) == 1:
        key = keys[offsets[0]]
        return () if key is None else ((key, offsets),)
    found: dict[Hashable, list[int]] = {}
    for offset in offsets:
        if (key := keys[offset]) is not None:
            found.setdefault(key, []).append(offset)
    return found.items()
