"""The times at which the messages of a partition were written, to compute the age of the oldest open one.

One mark is kept per batch of messages, not per message: a message gets the age of the first one in its batch.
Invariant: memory is bounded even if nothing is ever committed; beyond `MAX_MARKS` batches are merged, so that an age is
never too low.
"""

from __future__ import annotations

from collections import deque

MAX_MARKS = 1024


class RecordTimes:
    """The marks of one partition.

    Attributes:
        last: The offset of the last message that was taken; -1: none.

    Example:
        >>> times = RecordTimes()
        >>> times.note(10, 14, 5_000)
        >>> times.note(15, 19, 6_000)
        >>> times.find(14), times.find(16)
        (5000, 6000)
    """

    __slots__ = ("_marks", "last")

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int]] = deque()
        self.last = -1

    def note(self, first: int, last: int, written_ms: int) -> None:
        """Mark a batch that was taken.

        Args:
            first: The offset of its first message.
            last: The offset of its last message.
            written_ms: When the first one was written, in milliseconds since the epoch; negative: unknown.
        """
        self.last = last
        self._marks.append((first, written_ms))
        if len(self._marks) > MAX_MARKS:
            self._marks = deque(mark for number, mark in enumerate(self._marks) if number % 2 == 0)

    def find(self, offset: int) -> int | None:
        """Return when a message was written, in milliseconds since the epoch; None: unknown.

        Earlier batches are forgotten: later calls must ask for the same message or a later one.
        """
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= offset:
            marks.popleft()
        if not marks or marks[0][0] > offset or marks[0][1] < 0:
            return None
        return marks[0][1]
