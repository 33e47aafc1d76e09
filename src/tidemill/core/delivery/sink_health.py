"""What a queue knows of its sink: whether it may be sent to now, and what its answers and exceptions say about it.

Invariants: the circuit breaker counts only what says something about the sink, so neither a payload that is at fault
nor a batch in which one may be; the line pauses after a failure of the sink, and while the breaker is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.core.delivery.breaker import Breaker, BreakerState
from tidemill.core.delivery.culprit import Fault, Witnesses
from tidemill.core.delivery.send_items import Item, Limits, Refused


class SinkHealth:
    """One sink, as its queue sees it; all times are seconds of one monotonic clock, `bits` are 32 random bits."""

    def __init__(self, limits: Limits) -> None:
        """Start with a sink that works."""
        self._limits = limits
        self._failures = 0
        self._witnesses = Witnesses()
        self.breaker = Breaker(limits.breaker_failures, limits.breaker_seconds)
        self.paused_until = 0.0

    @property
    def max_count(self) -> int:
        """How many items a batch may have now."""
        return self._limits.max_count if self.breaker.until is None else 1

    def answered(
        self, batch: Sequence[Item[Any, Any]], answers: Sequence[Refused | None], now: float, bits: int
    ) -> None:
        """Take an answer.

        It is a failure if nothing in it says that the sink works. While the breaker is closed, an item that is only
        tried again proves nothing: the refusal may be its own, and must not hold up the others.
        """
        self._failures = 0
        if None in answers:
            self._witnesses.went_through()
        if not all(answer is not None and (answer.retryable or answer.waits) for answer in answers):
            self.breaker.succeeded()
            return
        tried = (item for item, answer in zip(batch, answers, strict=True) if answer and not answer.waits)
        if self.breaker.until is not None or any(item.attempts == 0 for item in tried):
            self._count(now, bits)

    def failed(self, retryable: bool, now: float, bits: int) -> float | None:
        """Take a failure of the sink; return when it is sent to again, None if trying again is of no use."""
        if not retryable:
            self.breaker.succeeded()
            return None
        self.pause(now, bits)
        self._count(now, bits)
        return self.paused_until

    def pause(self, now: float, bits: int) -> float:
        """Let the line pause, longer each time, and return until when."""
        self._failures += 1
        self.paused_until = now + self._limits.backoff.delay(self._failures, bits)
        return self.paused_until

    def doubt(self, batch: Sequence[Item[Any, Any]]) -> None:
        """Take that a call raised over several items, of which one may be at fault."""
        for item in batch:
            self._witnesses.doubt(item)

    def blames(self, item: Item[Any, Any], fault: Fault) -> bool:
        """Tell whether an item at which a call raised alone is at fault, and not the sink."""
        return self._witnesses.guilty(item, fault)

    def _count(self, now: float, bits: int) -> None:
        if self.breaker.failed(now, bits) is not BreakerState.CLOSED:
            self._witnesses.sink_failed()
        if self.breaker.until is not None:
            self.paused_until = max(self.paused_until, self.breaker.until)
