"""The dependency graph of the messages and tasks of one window.

Messages are the indexes 0..size-1 of the window; tasks are keys. A message is complete once all its tasks have ended
(`MessageComplete`: its hook is due). It leaves the pipeline (`MessageResolved`) once its hook has ended and no delivery
holds it. Once all message hooks have ended, the window's own hook is due (`WindowComplete`).

Invariants: each effect occurs exactly once per message or window; `MessageResolved` never occurs before all tasks of
the message are terminal, its hook is done and every hold is released; late, unknown and repeated inputs change nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from tidemill.core.errors import InvariantError


@dataclass(frozen=True, slots=True)
class MessageComplete:
    """All tasks of a message are terminal: its hook is due."""

    index: int


@dataclass(frozen=True, slots=True)
class MessageResolved:
    """A message has no work left."""

    index: int


@dataclass(frozen=True, slots=True)
class WindowComplete:
    """All message hooks have ended: the window's hook is due."""


Effect = MessageComplete | MessageResolved | WindowComplete


class _Stage(enum.IntEnum):
    """The stages of a message."""

    TASKS = 0
    HOOK = 1
    HOLDS = 2
    RESOLVED = 3


# Plain integers: accessing a member of an IntEnum costs more than the rest of a step.
_TASKS, _HOOK, _HOLDS, _RESOLVED = (int(stage) for stage in _Stage)


class Arrangement:
    """The messages, tasks and holds of one window.

    Args:
        size: The number of messages in the window.

    Example:
        >>> window = Arrangement(2)
        >>> window.set_tasks([("task", [0])])
        [MessageComplete(index=1)]
        >>> window.note_task_done("task")
        [MessageComplete(index=0)]
        >>> window.note_hook_done(0)
        [MessageResolved(index=0)]
        >>> window.note_hook_done(1)
        [MessageResolved(index=1), WindowComplete()]
    """

    __slots__ = ("_all", "_arranged", "_holds", "_hooks_left", "_stages", "_tasks", "_tasks_left")

    def __init__(self, size: int) -> None:
        self._all: Sequence[int] = range(size)
        self._arranged = False
        self._hooks_left = size
        self._stages = bytearray(size)
        self._tasks_left = [0] * size
        self._holds = [0] * size
        #: The messages of each task that is not terminal.
        self._tasks: dict[Hashable, Sequence[int]] = {}

    def set_tasks(self, tasks: Iterable[tuple[Hashable, Sequence[int]]]) -> list[Effect]:
        """Set the tasks of the window, once.

        Args:
            tasks: The key of each task, and the indexes of its messages; no indexes mean every message.

        Returns:
            `MessageComplete` for each message without a task.

        Raises:
            InvariantError: Two tasks have the same key, or the tasks have already been set.
        """
        if self._arranged:
            raise InvariantError("the tasks of a window were set twice")
        self._arranged = True
        left = self._tasks_left
        for key, indexes in tasks:
            if key in self._tasks:
                raise InvariantError(f"two tasks of a window have the key {key!r}")
            self._tasks[key] = indexes = indexes or self._all
            for index in indexes:
                left[index] += 1
        effects: list[Effect] = [self._complete(index) for index in self._all if not left[index]]
        if not self._all:
            effects.append(WindowComplete())
        return effects

    def complete_all(self) -> list[int]:
        """Complete a window without tasks and message hooks, once; the window's own hook is due.

        Returns:
            The messages that nothing holds: they are resolved.

        Raises:
            InvariantError: The tasks have already been set.
        """
        if self._arranged:
            raise InvariantError("the tasks of a window were set twice")
        self._arranged = True
        self._hooks_left = 0
        resolved: list[int] = []
        for index, holds in enumerate(self._holds):
            if holds:
                self._stages[index] = _HOLDS
            else:
                self._stages[index] = _RESOLVED
                resolved.append(index)
        return resolved

    def note_task_done(self, key: Hashable) -> list[Effect]:
        """Record that a task is terminal, whether it succeeded or failed."""
        effects: list[Effect] = []
        left = self._tasks_left
        for index in self._tasks.pop(key, ()):
            left[index] -= 1
            if not left[index]:
                effects.append(self._complete(index))
        return effects

    def end_tasks(self, keys: Iterable[Hashable]) -> tuple[int, list[int], bool]:
        """Record that tasks are terminal, in a window without message hooks.

        Returns:
            The number of messages that this completes, the ones among them that nothing holds (they are resolved), and
            whether the window's own hook is due.
        """
        complete, resolved = 0, []
        left, holds, stages = self._tasks_left, self._holds, self._stages
        for key in keys:
            for index in self._tasks.pop(key, ()):
                left[index] -= 1
                if left[index]:
                    continue
                complete += 1
                if holds[index]:
                    stages[index] = _HOLDS
                else:
                    stages[index] = _RESOLVED
                    resolved.append(index)
        self._hooks_left -= complete
        return complete, resolved, complete > 0 and not self._hooks_left

    def replace(self, key: Hashable, replacements: Sequence[Hashable]) -> list[Effect]:
        """Replace a task with other tasks for the same messages; without replacements the task is done.

        Raises:
            InvariantError: A replacement has the key of a task that is not terminal.
        """
        if not replacements:
            return self.note_task_done(key)
        indexes = self._tasks.pop(key, None)
        if indexes is None:
            return []
        for replacement in replacements:
            if replacement in self._tasks:
                raise InvariantError(f"two tasks of a window have the key {replacement!r}")
            self._tasks[replacement] = indexes
        for index in indexes:
            self._tasks_left[index] += len(replacements) - 1
        return []

    def note_hook_done(self, index: int) -> list[Effect]:
        """Record that the message hook of a complete message has ended, or that there is none."""
        if self._stages[index] != _HOOK:
            return []
        effects: list[Effect] = []
        if self._holds[index]:
            self._stages[index] = _HOLDS
        else:
            self._stages[index] = _RESOLVED
            effects.append(MessageResolved(index))
        self._hooks_left -= 1
        if not self._hooks_left:
            effects.append(WindowComplete())
        return effects

    def hold(self, indexes: Iterable[int]) -> None:
        """Keep messages from being resolved while a delivery of theirs is open. Each hold needs its own `release`."""
        for index in indexes:
            self._holds[index] += 1

    def release(self, indexes: Iterable[int]) -> list[Effect]:
        """Release one hold of each of these messages."""
        return [MessageResolved(index) for index in self.release_all(indexes)]

    def release_all(self, indexes: Iterable[int]) -> list[int]:
        """Release one hold of each of these messages; return the messages that this resolves."""
        resolved: list[int] = []
        holds, stages = self._holds, self._stages
        for index in indexes:
            if holds[index]:
                holds[index] -= 1
                if not holds[index] and stages[index] == _HOLDS:
                    stages[index] = _RESOLVED
                    resolved.append(index)
        return resolved

    def find_indexes(self, key: Hashable) -> Sequence[int]:
        """Return the messages of a task; none once it is terminal."""
        return self._tasks.get(key, ())

    def _complete(self, index: int) -> MessageComplete:
        self._stages[index] = _HOOK
        return MessageComplete(index)
