"""Describes how the elements of an iteration ended, and sends that to the store in groups.

Invariants: `add`, `has_room` and `is_empty` are used under the lock of the progress; `keep` and `send` are not.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from tidemill.core.errors import InvariantError, RemoteError, TidemillError, describe_error
from tidemill.dags.attempt.current import is_interrupted
from tidemill.dags.attempt.task_services import PartOutcome, TaskServices
from tidemill.dags.exceptions import TaskDeferred, TaskFailed, TaskSkipped
from tidemill.dags.execution.elements import ElementToRun, Progress, Result
from tidemill.dags.execution.endings import make_storable, skip_own_frames
from tidemill.runtime.json.codec import encode

log = logging.getLogger(__name__)

#: The time from one group of results to the next.
_GROUP_SECONDS: Final = 0.05
#: The most results of a group; workers wait while more are not sent.
_MAX_GROUP: Final = 1_000
_MAX_GROUP_BYTES: Final = 4 << 20
#: How often the keeper looks whether the attempt was interrupted.
_LOOK_SECONDS: Final = 0.25
#: The store refuses larger results.
_MAX_VALUE_BYTES: Final = 1 << 20
_MAX_ERROR: Final = 1_000


class ResultKeeper:
    """The results of elements that are not stored yet.

    Args:
        mapped: The task.
        services: The access to the store.
        progress: What the threads of the iteration share.
        read_clock: Returns the seconds of a clock that never goes back.
    """

    def __init__(
        self, mapped: Any, services: TaskServices, progress: Progress, read_clock: Callable[[], float]
    ) -> None:
        self._services, self._progress, self._read_clock = services, progress, read_clock
        self._pushes = bool(mapped.do_xcom_push)
        self._element_tries = int(mapped.retries) + 1
        self._results: deque[Result] = deque()
        self._size = 0
        self._sending = False
        #: What the store counted when it got the last group; None: it has got none.
        self.counts: PartOutcome | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the store has all results."""
        return not (self._results or self._sending)

    def describe(self, part: ElementToRun, started_us: int, value: Any, error: BaseException | None) -> Result:
        """Return how an element ended that returned a value, or raised an error."""
        text = None
        if error is None:
            try:
                text = self._encode(part, value)
            except Exception as fault:
                error = fault
        if error is None:
            return Result(part.number, "success", part.tries + 1, text, None, started_us)
        if isinstance(error, TaskSkipped):
            _, _, reason = describe_error(error).partition(": ")
            log.info("element %d is skipped: %s", part.number, reason)
            return Result(
                part.number, "skipped", part.tries + 1, None, make_storable(reason, _MAX_ERROR) or None, started_us
            )
        if isinstance(error, TaskDeferred):
            error = TaskFailed(
                f"element {part.number} deferred to {type(error.trigger).__name__}, but iterate() runs all elements in "
                "one attempt; use expand(), or an argument like deferrable=False"
            )
        tries = part.tries + 1
        again = not isinstance(error, TaskFailed) and tries < self._element_tries
        shown = error.with_traceback(skip_own_frames(error))
        exc_info = (type(error), shown, shown.__traceback__)
        log.error("element %d failed in try %d: %s", part.number, tries, describe_error(error), exc_info=exc_info)
        line = make_storable(describe_error(error), _MAX_ERROR)
        return Result(part.number, "up_for_retry" if again else "failed", tries, None, line, started_us)

    def add(self, result: Result, *, is_idle: bool) -> None:
        """Have a result stored.

        Args:
            result: The result.
            is_idle: Whether no other element runs or waits to be run.
        """
        self._results.append(result)
        self._size += len(result.value or "")
        if len(self._results) == 1 or self._has_group or is_idle:
            self._progress.changed.notify_all()

    def has_room(self) -> bool:
        few = len(self._results) < 2 * _MAX_GROUP and self._size < 2 * _MAX_GROUP_BYTES
        return few or self._progress.is_stopping

    def keep(self) -> None:
        """Send results in groups, until the attempt ends."""
        progress, changed = self._progress, self._progress.changed
        told = -1
        while True:
            with changed:
                changed.wait_for(lambda: self._results or progress.is_done or progress.is_stopping, _LOOK_SECONDS)
                if is_interrupted() and not (progress.is_done or progress.is_stopping):
                    # The exception may have been caught by an element, or logged by the loop.
                    progress.stop()
                results = self._take()
                ends = (progress.is_done or progress.is_stopping) and not results
                seen, running = progress.seen, progress.running
                self._sending = True
                changed.notify_all()
            due = self._read_clock() + _GROUP_SECONDS
            if results or running != told or ends:
                self.send(results, seen, 0 if ends else running)
                told = running
            with changed:
                self._sending = False
                changed.notify_all()
                if ends:
                    return
                changed.wait_for(self._is_group_due, max(0.0, due - self._read_clock()))

    def send(self, results: list[Result], seen: int, running: int) -> None:
        try:
            self.counts = self._services.keep_parts(tuple(results), seen, running)
            if self.counts.leaves:
                self._progress.leave()
        except (RemoteError, InvariantError):
            raise
        except TidemillError as error:
            raise TaskFailed(str(error)) from error

    def _encode(self, part: ElementToRun, value: Any) -> str | None:
        if value is None or not self._pushes:
            return None
        if inspect.isgenerator(value) or inspect.isasyncgen(value):
            raise TaskFailed("the function returned a generator; return a list")
        text = encode(value, f"the result of element {part.number}")
        if (size := len(text.encode("utf-8", "replace"))) > _MAX_VALUE_BYTES:
            raise TaskFailed(
                f"the result of element {part.number} has {size:,} bytes; at most {_MAX_VALUE_BYTES:,} are stored; "
                "return a reference"
            )
        return text

    def _take(self) -> list[Result]:
        """Return the next group of results, which are sent in one message."""
        found: list[Result] = []
        size = 0
        while self._results and len(found) < _MAX_GROUP and size < _MAX_GROUP_BYTES:
            found.append(self._results.popleft())
            size += len(found[-1].value or "")
        self._size -= size
        return found

    @property
    def _has_group(self) -> bool:
        return len(self._results) >= _MAX_GROUP or self._size >= _MAX_GROUP_BYTES

    def _is_group_due(self) -> bool:
        return self._progress.is_done or self._progress.is_stopping or self._has_group
