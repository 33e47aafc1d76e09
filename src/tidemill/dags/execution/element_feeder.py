"""Reads the elements of an iteration from the store, ahead of the work, and keeps failed ones until they are due.

Invariants: all methods but `feed` are called under the lock of the progress.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from tidemill.dags.attempt.task_services import IterationPart, TaskServices
from tidemill.dags.execution.elements import ElementToRun, Progress
from tidemill.dags.execution.result_keeper import ResultKeeper

#: The number of items that are read ahead of the work, and the characters from which on no more are read.
_AHEAD: Final = 1_000
_AHEAD_CHARACTERS: Final = 8 << 20
#: The most failed elements that wait for a retry in memory; the store knows the others.
_MAX_RETRYING: Final = 1_000
#: How long to wait between two looks for elements of a source that gives none now.
_POLL_SECONDS: Final = 0.05
_MAX_POLL_SECONDS: Final = 0.5
#: How long failed elements may wait in an attempt; for longer ones, the attempt gives its worker back.
_MAX_WAIT_SECONDS: Final = 5.0


class ElementFeeder:
    """The elements that wait to be run.

    Args:
        mapped: The task.
        services: The access to the store.
        progress: What the threads of the iteration share.
        keeper: The results that are not stored yet.
        is_last: Whether the task has no further try, in which failed elements could run again.
        read_clock: Returns the seconds of a clock that never goes back.
    """

    def __init__(
        self,
        mapped: Any,
        services: TaskServices,
        progress: Progress,
        keeper: ResultKeeper,
        is_last: bool,
        read_clock: Callable[[], float],
    ) -> None:
        self._services, self._progress, self._keeper, self._read_clock = services, progress, keeper, read_clock
        self._changed = progress.changed
        self._is_last = is_last
        self._delay = mapped.retry_delay.total_seconds()
        self._linger = float(mapped.operator_class.stream_linger)
        size = 1 if mapped.chunking is None else mapped.chunking.max_items
        #: The number of elements that are read at a time.
        self._ahead = max(1, min(_AHEAD // size, _AHEAD))
        self._parts: deque[ElementToRun] = deque()
        #: The characters of the items of elements that wait to be run, and of those that wait for a retry.
        self._waiting_size = self._retrying_size = 0
        self._retrying: list[tuple[float, int, ElementToRun]] = []
        self._order = itertools.count()
        self._left_out = False
        #: Whether elements that have failed wait for the next attempt.
        self.waits = False

    @property
    def has_parts(self) -> bool:
        """Whether there is an element to run."""
        return bool(self._parts) and not self._progress.takes_none

    @property
    def is_idle(self) -> bool:
        return not (self.has_parts or self._progress.running)

    def feed(self) -> None:
        """Read elements ahead of the work, until the source has closed and all have ended."""
        progress = self._progress
        after, closed, pause = -1, False, _POLL_SECONDS
        idle_since: float | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: progress.takes_none or self._wants_parts, self._find_pause())
                if progress.is_leaving:
                    self._changed.wait_for(lambda: progress.is_stopping or not progress.running)
                    self._end()
                if progress.takes_none:
                    return
                self._take_due()
                if not self._wants_parts:
                    continue
                if closed:
                    if self._has_ended():
                        self._end()
                        return
                    if self._left_out and not (self._parts or progress.running or self._retrying):
                        # They are to be tried again, as the store knows; it does so once it has all results.
                        self._changed.wait_for(lambda: progress.takes_none, self._delay)
                        self._changed.wait_for(lambda: progress.takes_none or self._keeper.is_empty)
                        after, closed, self._left_out = -1, False, False
                    else:
                        self._changed.wait_for(
                            lambda: progress.takes_none or (self.is_idle and not self._retrying), self._find_pause()
                        )
                    continue
            page = self._services.get_parts(after, self._ahead)
            if page.leaves:
                progress.leave()
                continue
            parts = [self._complete(one) for one in page.parts]
            with self._changed:
                moved = page.next > after
                after = page.next
                progress.seen = max(progress.seen, after + 1)
                self._add(parts)
                closed = page.closed
                if moved or closed:
                    idle_since, pause = None, _POLL_SECONDS
                    continue
                now = self._read_clock()
                busy = self._parts or progress.running or self._has_retry_soon
                idle_since = None if busy else now if idle_since is None else idle_since
                if idle_since is None or now - idle_since < self._linger:
                    self._changed.wait_for(lambda: progress.takes_none, min(pause, self._find_pause()))
                    pause = min(pause * 1.5, _MAX_POLL_SECONDS)
                    continue
            self._wait_for_elements()
            idle_since = None
            with self._changed:
                if self._left_out and not self._retrying:
                    after, self._left_out = -1, False  # the store knows what is to be tried again

    def _end(self) -> None:
        self._progress.is_done = True
        self._changed.notify_all()
        self._progress.wake()

    def take(self) -> ElementToRun | None:
        """Return an element to run; None: there is none now."""
        if not self.has_parts:
            return None
        self._progress.running += 1
        wanted = self._wants_parts
        part = self._parts.popleft()
        self._waiting_size -= part.size
        if self._wants_parts and not wanted:
            self._changed.notify_all()
        return part

    def retry(self, part: ElementToRun, tries: int) -> None:
        """Run a failed element again once its retry delay has passed."""
        if len(self._retrying) < _MAX_RETRYING and self._retrying_size < _AHEAD_CHARACTERS:
            self._retrying_size += part.size
            due = self._read_clock() + self._delay
            again = ElementToRun(part.number, tries, part.items, part.size)
            heapq.heappush(self._retrying, (due, next(self._order), again))
        else:
            self._left_out = True

    def _complete(self, one: IterationPart) -> ElementToRun:
        """Return an element with all its items; a page may end among those of its last one."""
        items = list(one.items)
        while len(items) < one.size:
            page = self._services.get_chunk_items(items[-1].number if items else one.first - 1, part=one.number)
            if not page:
                break
            items += page
        size = sum(len(text) for item in items for text in item.elements if text is not None)
        return ElementToRun(one.number, one.tries, tuple(items), size)

    @property
    def _wants_parts(self) -> bool:
        """Whether more elements are to be read."""
        return len(self._parts) < self._ahead and self._waiting_size < _AHEAD_CHARACTERS

    @property
    def _has_retry_soon(self) -> bool:
        """Whether an element waits for a retry that is worth keeping the worker for."""
        return bool(self._retrying) and self._retrying[0][0] - self._read_clock() <= _MAX_WAIT_SECONDS

    def _has_ended(self) -> bool:
        """Whether no element is left for this attempt; `waits` is set if some are for the next one."""
        if not self.is_idle:
            return False
        if not self._retrying and not self._left_out:
            return True
        delay = self._retrying[0][0] - self._read_clock() if self._retrying else self._delay
        self.waits = delay > _MAX_WAIT_SECONDS and not self._is_last
        return self.waits

    def _find_pause(self) -> float:
        """Return how long to wait for a change, at most until an element is due."""
        due = self._retrying[0][0] - self._read_clock() if self._retrying else _POLL_SECONDS
        return min(max(due, 0.001), _POLL_SECONDS)

    def _wait_for_elements(self) -> None:
        """Give the worker back until the source has more elements or has closed, or a retry is due."""
        with self._changed:
            # What the store knows decides when the attempt goes on.
            self._changed.wait_for(lambda: self._progress.is_stopping or self._keeper.is_empty)
            seen = self._progress.seen
        self._keeper.send([], seen, 0)
        self._services.wait_for_elements(lambda: self._progress.is_stopping)

    def _take_due(self) -> None:
        now = self._read_clock()
        due = []
        while self._retrying and self._retrying[0][0] <= now:
            due.append(heapq.heappop(self._retrying)[2])
            self._retrying_size -= due[-1].size
        self._add(due)

    def _add(self, parts: Sequence[ElementToRun]) -> None:
        before = len(self._parts)
        self._parts.extend(parts)
        self._waiting_size += sum(one.size for one in parts)
        if len(self._parts) > before:
            self._changed.notify_all()
            self._progress.wake()
