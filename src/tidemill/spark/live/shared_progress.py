"""The sums over all engines, added up once per beat for everybody who looks.

Web UI, metrics and health checks ask as often as their clients do, and engines send beats at their own pace: of a
hundred there is always one with news. What is at most one beat old is as new as the engines' own numbers.

Invariant: nobody changes what is returned, since all get the same object until the next beat; so what is made of
it can be kept with it.
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
        read: Adds up; never called on two threads at once.
        seconds: How old they may be.
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        read: Callable[[], PipelineProgress],
        seconds: float = BEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Add up nothing yet."""
        self._read = read
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._last: tuple[float, PipelineProgress] | None = None

    def __call__(self) -> PipelineProgress:
        """Return the sums of now, or of less than a beat ago."""
        with self._lock:
            now = self._clock()
            if self._last is None or now - self._last[0] >= self._seconds:
                self._last = now, self._read()
            return self._last[1]
