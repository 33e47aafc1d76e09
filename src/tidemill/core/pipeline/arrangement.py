"""The graph message <-> task of one window: what is complete, and when.

Messages are the indexes 0..size-1 of the window, tasks are keys. Per message: first its tasks end
(`MessageComplete`, the message hook is due), then the hook ends, and when no delivery is held for it either,
it leaves the pipeline (`MessageResolved`). Once all hooks ended, the window's own hook is due
(`WindowComplete`).

Invariants: each effect comes exactly once per message or window; `MessageResolved` never before all of the
message's tasks are terminal, its hook is done and every hold is released; late, unknown and repeated inputs
change nothing.
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
    """Nothing is left to do for a message."""

    index: int


@dataclass(frozen=True, slots=True)
class WindowComplete:
    """All messages had their hooks: the window's hook is due."""


Effect = MessageComplete | MessageResolved | WindowComplete


class _Stage(enum.IntEnum):
    """How far a message is."""

    TASKS = 0
    HOOK = 1
    HOLDS = 2
    RESOLVED = 3


# Plain integers: reading a member of an IntEnum costs more than all the rest of a step.
_TASKS, _HOOK, _HOLDS, _RESOLVED = (int(stage) for stage in _Stage)


class Arrangement:
    """One window's messages, tasks and holds.

    Args:
        size: How many messages the window has.

    Example:
        >>> window = Arrangement(2)
        >>> window.arranged([("task", [0])])
        [MessageComplete(index=1)]
        >>> window.task_done("task")
        [MessageComplete(index=0)]
        >>> window.message_hook_done(0)
        [MessageResolved(index=0)]
        >>> window.message_hook_done(1)
        [MessageResolved(index=1), WindowComplete()]
    """

    __slots__ = ("_all", "_arranged", "_holds", "_hooks_left", "_stages", "_tasks", "_tasks_left")

    def __init__(self, size: int) -> None:
        """Start with nothing arranged."""
        self._all: Sequence[int] = range(size)
        self._arranged = False
        self._hooks_left = size
        self._stages = bytearray(size)
        self._tasks_left = [0] * size
        self._holds = [0] * size
        #: The messages of each task that is not terminal.
        self._tasks: dict[Hashable, Sequence[int]] = {}

    def arranged(self, tasks: Iterable[tuple[Hashable, Sequence[int]]]) -> list[Effect]:
        """Take the tasks of the window.

        Args:
            tasks: Key and indexes of the messages that each works for; no index means every message.

        Returns:
            `MessageComplete` for each message without a task.

        Raises:
            InvariantError: A key comes twice, or the window was arranged before.
        """
        if self._arranged:
            raise InvariantError("a window was arranged twice")
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

    def task_done(self, key: Hashable) -> list[Effect]:
        """Note that a task is terminal, well or not."""
        effects: list[Effect] = []
        left = self._tasks_left
        for index in self._tasks.pop(key, ()):
            left[index] -= 1
            if not left[index]:
                effects.append(self._complete(index))
        return effects

    def replace(self, key: Hashable, replacements: Sequence[Hashable]) -> list[Effect]:
        """Let other tasks work for the messages of a task, which is terminal by that; with none, it is done.

        Raises:
            InvariantError: A replacement has the key of a task that is not terminal.
        """
        if not replacements:
            return self.task_done(key)
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

    def message_hook_done(self, index: int) -> list[Effect]:
        """Note that the message hook of a complete message has run, or that there is none."""
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
        """Keep messages from being resolved until as many `release`: a delivery is open for them."""
        for index in indexes:
            self._holds[index] += 1

    def release(self, indexes: Iterable[int]) -> list[Effect]:
        """Take one hold off each of these messages."""
        effects: list[Effect] = []
        holds = self._holds
        for index in indexes:
            if holds[index]:
                holds[index] -= 1
                if not holds[index] and self._stages[index] == _HOLDS:
                    self._stages[index] = _RESOLVED
                    effects.append(MessageResolved(index))
        return effects

    def indexes_of(self, key: Hashable) -> Sequence[int]:
        """Return the messages that a task works for; none once it is terminal."""
        return self._tasks.get(key, ())

    def _complete(self, index: int) -> MessageComplete:
        self._stages[index] = _HOOK
        return MessageComplete(index)
