"""The sums over all engines, computed at most once per beat for all readers.

The web UI, metrics and health checks read them as often as their clients ask, and among a hundred engines there is
always one with news. Sums that are at most one beat old are as fresh as the engines' own numbers.

Invariant: readers must not change the result, because all get the same object until the next beat; values derived from
it can therefore be cached with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tidemill.runtime.link.engine import BEAT_SECONDS
from tidemill.spark.progress import PipelineProgress


class SharedProgress:
    """Returns the sums when called, on any thread.

    Args:
        read: Computes the sums; never called on two threads at once.
        seconds: The maximum age of the result.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        read: Callable[[], PipelineProgress],
        seconds: float = BEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._last: tuple[float, PipelineProgress] | None = None

    def __call__(self) -> PipelineProgress:
        """Return the current sums, or those computed less than a beat ago."""
        with self._lock:
            now = self._clock()
            if self._last is None or now - self._last[0] >= self._seconds:
                self._last = now, self._read()
            return self._last[1]
