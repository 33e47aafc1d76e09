"""The time by the clock of the store, on hosts whose own clocks may be wrong.

A process knows a reading of the store's clock, with the time of a clock that counts what has elapsed and is never set.
A host whose clock agrees with the reading uses its own clock, which is more precise. Invariant: where they disagree,
the time is never ahead of the store's.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: How far the clocks of a host and of the store may be apart before the host's counts as wrong.
TOLERANCE_US: Final = 2_000_000
#: Clocks that count elapsed time drift apart by less than one part in so many.
_DRIFT: Final = 10_000


class ClockReading(NamedTuple):
    """A reading of the store's clock.

    Attributes:
        store_us: The store's time, in UTC microseconds since the epoch.
        at_us: When the answer arrived, in microseconds of the clock that counts elapsed time.
        took_us: How long the answer took; the store read its clock at some moment of that time.
    """

    store_us: int
    at_us: int
    took_us: int


def choose_reading(known: ClockReading | None, new: ClockReading) -> ClockReading:
    """Return the reading to use from now on: the more precise one, unless the clock of the store has been set.

    An answer may take as long as an outage. If it replaced a quick one, a clock that is wrong by less would seem right.

    Example:
        >>> quick, slow = ClockReading(1_000_000, 0, 100), ClockReading(2_000_000, 1_000_000, 300_000)
        >>> choose_reading(quick, slow) is quick
        True
    """
    if known is None or new.took_us <= known.took_us + (new.at_us - known.at_us) // _DRIFT:
        return new
    # The store may have read its clock at any moment between the question and the answer.
    known_us = known.store_us + new.at_us - known.at_us
    earliest_us, latest_us = known_us - new.took_us - TOLERANCE_US, known_us + known.took_us + TOLERANCE_US
    return known if earliest_us <= new.store_us <= latest_us else new


def find_error_us(reading: ClockReading | None, wall_us: int, elapsed_us: int) -> int:
    """Return how far the clock of this host is ahead of the store's; 0: they agree, or the store's is unknown.

    Args:
        reading: The reading.
        wall_us: The time by the clock of this host, in UTC microseconds since the epoch.
        elapsed_us: The time by the clock that counts elapsed time, as in `ClockReading.at_us`.

    Example:
        >>> reading = ClockReading(1_000_000_000, at_us=50, took_us=10)
        >>> find_error_us(reading, 1_000_001_000, elapsed_us=1_050)
        0
        >>> find_error_us(reading, 1_600_001_000, elapsed_us=1_050)
        600000000
    """
    if reading is None:
        return 0
    earliest_us = reading.store_us + elapsed_us - reading.at_us
    if earliest_us - TOLERANCE_US <= wall_us <= earliest_us + reading.took_us + TOLERANCE_US:
        return 0
    return wall_us - earliest_us
