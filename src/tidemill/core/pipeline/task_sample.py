"""Chooses the finished tasks that the live view shows: slow and failed ones, and a sample of the others.

Invariants: each sample has one successful fast task per executor, with the number of tasks it stands for; memory is
bounded by `most` and the number of executors, and tasks that did not fit are counted.
"""

from __future__ import annotations

from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class TaskSample(Generic[ItemT]):
    """The tasks that ended since the last sample.

    Args:
        least_seconds: Successful tasks that took less time are sampled.
        most: The maximum number of other tasks.

    Example:
        >>> sample: TaskSample[str] = TaskSample(0.5, 10)
        >>> for name, seconds in (("a", 0.1), ("b", 0.1), ("slow", 2.0)):
        ...     sample.add(0, name, seconds, failed=False)
        >>> sample.take()
        ([('slow', 1), ('b', 2)], 0)
    """

    __slots__ = ("_fast", "_kept", "_least_seconds", "_left_out", "_most")

    def __init__(self, least_seconds: float, most: int) -> None:
        self._least_seconds = least_seconds
        self._most = most
        self._kept: list[tuple[ItemT, int]] = []
        self._fast: dict[int, tuple[ItemT, int]] = {}
        self._left_out = 0

    def add(self, slot: int, item: ItemT, seconds: float, *, failed: bool) -> None:
        """Add a task that ended in the executor `slot`."""
        if not failed and seconds < self._least_seconds:
            _, count = self._fast.get(slot, (item, 0))
            self._fast[slot] = item, count + 1
        elif len(self._kept) < self._most:
            self._kept.append((item, 1))
        else:
            self._left_out += 1

    def take(self) -> tuple[list[tuple[ItemT, int]], int]:
        """Return and reset the sample: tasks with the number each stands for, and the number of tasks left out."""
        taken = [*self._kept, *self._fast.values()], self._left_out
        self._kept, self._fast, self._left_out = [], {}, 0
        return taken
