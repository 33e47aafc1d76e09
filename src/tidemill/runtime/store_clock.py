"""The time by the clock of the store, for what processes of several hosts store, compare or wait for.

A process has one store. What opens it notes readings; a process without a connection of its own is given one. Without a
reading, and for a store on this machine, the time is that of this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from tidemill.core.store_clock import ClockReading, choose_reading, find_error_us

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: The time of a suspended machine counts, where the system has such a clock.
_ELAPSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def read_elapsed_us() -> int:
    """Return the time of a clock that is never set and that all processes of this machine share, in microseconds."""
    return time.clock_gettime_ns(_ELAPSED) // 1000


def read_elapsed_seconds() -> float:
    """Return the time of that clock in seconds: leases run out while a machine is suspended."""
    return read_elapsed_us() / 1e6


def _read_wall_us() -> int:
    return time.time_ns() // 1000


class StoreClock:
    """The clock of the store.

    Args:
        read_wall_us: Reads the clock of this host.
        read_elapsed_us: Reads a clock that counts elapsed time.

    Attributes:
        reading: The reading of the store's clock that is in use; None: there was none.
    """

    def __init__(
        self, read_wall_us: Callable[[], int] = _read_wall_us, read_elapsed_us: Callable[[], int] = read_elapsed_us
    ) -> None:
        self._read_wall_us, self._read_elapsed_us = read_wall_us, read_elapsed_us
        self.reading: ClockReading | None = None

    def note(self, store_us: int, asked_us: int) -> None:
        """Note the store's time, which this process has just been told.

        Args:
            store_us: The store's time, in UTC microseconds since the epoch.
            asked_us: When the store was asked (`read_elapsed_us`).
        """
        at_us = self._read_elapsed_us()
        self.reading = choose_reading(self.reading, ClockReading(store_us, at_us, at_us - asked_us))

    def find_error_us(self) -> int:
        """Return how far the clock of this host is ahead of the store's; 0: they agree, or the store's is unknown."""
        return find_error_us(self.reading, self._read_wall_us(), self._read_elapsed_us())

    def now_us(self) -> int:
        """Return the time, in UTC microseconds since the epoch."""
        return self.correct_us(self._read_wall_us())

    def correct_us(self, wall_us: int) -> int:
        """Return the time by the store's clock of a moment that this host's clock has just shown."""
        if self.reading is None:
            return wall_us
        return wall_us - find_error_us(self.reading, wall_us, self._read_elapsed_us())

    def now(self) -> datetime:
        """Return the time in UTC."""
        return _EPOCH + timedelta(microseconds=self.now_us())


#: The clock of the store of this process.
STORE_CLOCK = StoreClock()
