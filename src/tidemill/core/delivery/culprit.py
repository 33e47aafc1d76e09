"""Tells a bad payload from a broken sink when `send` raises, and finds the payload at fault.

Theory of operation. A sink reports the payloads it refuses, and raises a `TidemillError` if it failed as a whole. Any
other exception is unexpected: one payload of the batch may have caused it. The batch is then sent in parts of about the
square root of its size; if a part raises too, its payloads are sent one by one. Bisection would take fewer calls, but a
sink that writes part of a batch before it raises would write the neighbours of the bad payload once per step (seven
times in a batch of 50). This way no payload is sent more than three times.

A payload that was sent alone when the call raised is at fault if the exception is of a kind that bad data causes. After
any other exception the payload is at fault only if its call raises a second time although another payload has been
delivered since its batch was sent; until then the sink is blamed. Deliveries before the circuit breaker opened prove
nothing about the time after.

Invariant: a payload is never at fault unless a call with that payload alone has raised.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from tidemill.core.errors import TargetMissingError, TidemillError

ItemT = TypeVar("ItemT")

#: Exceptions that point to bad data in any sink.
_DATA_ERRORS = (TypeError, ValueError, LookupError, AttributeError, OverflowError)


class SendFault(enum.Enum):
    """The cause that an exception raised by `send` points to.

    Attributes:
        SINK: The sink failed and says so.
        TARGET: The target (a table or topic, say) is missing, so no payload can be to blame.
        DATA: A payload is bad.
        UNKNOWN: Either the sink or a payload.
    """

    SINK = "sink"
    TARGET = "target"
    DATA = "data"
    UNKNOWN = "unknown"

    @property
    def may_be_a_payload(self) -> bool:
        """Whether a single payload of the batch may be the cause."""
        return self in (SendFault.DATA, SendFault.UNKNOWN)


def find_fault(error: BaseException) -> SendFault:
    """Return the cause that an exception raised by `send` points to.

    Example:
        >>> find_fault(KeyError("id")), find_fault(OSError("gone"))
        (<SendFault.DATA: 'data'>, <SendFault.UNKNOWN: 'unknown'>)
    """
    if isinstance(error, BaseExceptionGroup):
        faults = {find_fault(each) for each in error.exceptions}
        return faults.pop() if len(faults) == 1 else SendFault.UNKNOWN
    if isinstance(error, TidemillError):
        return SendFault.TARGET if isinstance(error, TargetMissingError) else SendFault.SINK
    return SendFault.DATA if isinstance(error, _DATA_ERRORS) else SendFault.UNKNOWN


def split_batch(batch: Sequence[ItemT], *, is_part: bool) -> list[Sequence[ItemT]]:
    """Split a batch whose call raised.

    Args:
        batch: The items of the batch.
        is_part: Whether the batch is already a part of a larger one; then each item is sent alone.

    Example:
        >>> split_batch("abcdefg", is_part=False), split_batch("abc", is_part=True)
        (['ab', 'cd', 'ef', 'g'], ['a', 'b', 'c'])
    """
    size = 1 if is_part else math.isqrt(len(batch))
    return [batch[start : start + size] for start in range(0, len(batch), size)]


class Suspect(Protocol):
    """An item of a batch whose call raised.

    Attributes:
        doubted_at: The number of deliveries counted when the batch was sent; None while the item is above suspicion.
        raised_alone: Whether a call with this item alone has raised.
    """

    doubted_at: int | None
    raised_alone: bool


class Witnesses:
    """Counts a sink's deliveries and uses them to judge the items for which it raises."""

    def __init__(self) -> None:
        self._through = 0
        self._since = 0

    def note_delivery(self) -> None:
        """Count a call that delivered at least one item."""
        self._through += 1

    def note_sink_failure(self) -> None:
        """Discard the deliveries so far: they no longer prove that the sink works."""
        self._since = self._through

    def doubt(self, suspect: Suspect) -> None:
        """Mark an item of a batch whose call raised as suspect."""
        if suspect.doubted_at is None:
            suspect.doubted_at = self._through

    def judge_alone(self, suspect: Suspect, fault: SendFault) -> bool:
        """Record that a call with this item alone raised; return whether the item is at fault."""
        self.doubt(suspect)
        assert suspect.doubted_at is not None
        again, suspect.raised_alone = suspect.raised_alone, True
        if fault is SendFault.DATA:
            return True
        return again and self._through > max(suspect.doubted_at, self._since)
