"""Finds the payload of a batch at which a sink raises, and tells a bad payload from a sink that fails.

Theory of operation. A sink says what it refuses, and raises a `TidemillError` if it failed as a whole. Any other
exception of a call is unexpected: one payload of the batch may have caused it. The batch is then sent in parts of
about the square root of its size, and the payloads of a part that raises too are sent one by one. Halves would find
the culprit in fewer calls, but a sink that writes a part of a batch before it raises would write the payloads next to
the culprit once for each halving (seven times in a batch of 50); with these parts nothing is sent more than three
times.

A payload that raised alone is at fault if the exception is of a kind that wrong data raise. With any other exception
it is at fault if it raises alone a second time although something has gone through since its batch was sent; until
then the sink failed. What went through before the circuit breaker opened proves nothing about the time after.

Invariant: a payload that has not raised alone is never at fault.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from tidemill.core.errors import TidemillError, WrongPlaceError

ItemT = TypeVar("ItemT")

#: What wrong data raise, whatever the sink does with them.
_DATA_ERRORS = (TypeError, ValueError, LookupError, AttributeError, OverflowError)


class Fault(enum.Enum):
    """What an exception of `send` says about its cause.

    Attributes:
        SINK: The sink failed, and says so.
        PLACE: What it writes to is not there, so no payload can be to blame, ever.
        DATA: A payload is wrong.
        UNKNOWN: Either.
    """

    SINK = "sink"
    PLACE = "place"
    DATA = "data"
    UNKNOWN = "unknown"

    @property
    def may_be_a_payload(self) -> bool:
        """Whether one payload of a batch may have caused it."""
        return self in (Fault.DATA, Fault.UNKNOWN)


def find_fault(error: BaseException) -> Fault:
    """Return what an exception of `send` says about its cause.

    Example:
        >>> find_fault(KeyError("id")), find_fault(OSError("gone"))
        (<Fault.DATA: 'data'>, <Fault.UNKNOWN: 'unknown'>)
    """
    if isinstance(error, BaseExceptionGroup):
        faults = {find_fault(each) for each in error.exceptions}
        return faults.pop() if len(faults) == 1 else Fault.UNKNOWN
    if isinstance(error, TidemillError):
        return Fault.PLACE if isinstance(error, WrongPlaceError) else Fault.SINK
    return Fault.DATA if isinstance(error, _DATA_ERRORS) else Fault.UNKNOWN


def split_batch(batch: Sequence[ItemT], *, is_part: bool) -> list[Sequence[ItemT]]:
    """Split what raised together.

    Args:
        batch: What raised.
        is_part: Whether it is such a part already; then its items stand alone.

    Example:
        >>> split_batch("abcdefg", is_part=False), split_batch("abc", is_part=True)
        (['ab', 'cd', 'ef', 'g'], ['a', 'b', 'c'])
    """
    size = 1 if is_part else math.isqrt(len(batch))
    return [batch[start : start + size] for start in range(0, len(batch), size)]


class Suspect(Protocol):
    """Something in a batch that raised.

    Attributes:
        doubted_at: How much had gone through when its batch was sent; None while it is above suspicion.
        raised_alone: Whether a call with nothing else raised.
    """

    doubted_at: int | None
    raised_alone: bool


class Witnesses:
    """Counts what goes through one sink, and judges what does not."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._through = 0
        self._since = 0

    def went_through(self) -> None:
        """Count a call that delivered something."""
        self._through += 1

    def sink_failed(self) -> None:
        """Let only what goes through from now on count."""
        self._since = self._through

    def doubt(self, suspect: Suspect) -> None:
        """Note that a batch raised with this in it."""
        if suspect.doubted_at is None:
            suspect.doubted_at = self._through

    def guilty(self, suspect: Suspect, fault: Fault) -> bool:
        """Judge what raised alone."""
        self.doubt(suspect)
        assert suspect.doubted_at is not None
        again, suspect.raised_alone = suspect.raised_alone, True
        if fault is Fault.DATA:
            return True
        return again and self._through > max(suspect.doubted_at, self._since)
