"""The phases of the demo's startup, with the duration of each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidemill.spark.progress import PipelineProgress


class Phases:
    """The phases of one run; used by one thread at a time.

    Args:
        partitions: The number of partitions of the source topic.
        clock: Returns monotonic seconds.

    Example:
        >>> clock = iter([0.0, 2.5, 3.0]).__next__
        >>> phases = Phases(4, clock)
        >>> phases.end("Kafka")
        >>> phases.end("topics")
        >>> phases.describe()
        'Kafka 2.5 s, topics 0.5 s'
    """

    def __init__(self, partitions: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._partitions = partitions
        self._clock = clock
        self._began = clock()
        self._ended: dict[str, float] = {}

    def end(self, name: str) -> None:
        """End the current phase under a name, and start the next; repeating a name changes nothing."""
        if name not in self._ended:
            now = self._clock()
            self._ended[name] = now - self._began
            self._began = now

    def follow(self, progress: PipelineProgress) -> None:
        """End the completed phases of the pipeline's startup."""
        if not progress.engines:
            return
        self.end("Spark")
        if any(engine.pid is None for engine in progress.engines):
            return
        self.end("engines")
        if len(progress.partitions) == self._partitions:
            self.end("partitions")

    def describe(self) -> str:
        """Return all ended phases in one line."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._ended.items())
