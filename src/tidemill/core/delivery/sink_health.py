"""The health of a sink: whether it may be called now, as judged by its answers and exceptions.

Invariants: the circuit breaker counts only failures of the sink itself, not a payload that is at fault nor a batch that
may contain one; the queue pauses after a failure of the sink, and while the breaker is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.core.delivery.breaker import Breaker, BreakerState
from tidemill.core.delivery.culprit import SendFault, Witnesses
from tidemill.core.delivery.send_items import Item, RefusedItem, SendLimits


class SinkHealth:
    """The health of one sink. All times are seconds of one monotonic clock; `bits` are 32 random bits."""

    def __init__(self, limits: SendLimits) -> None:
        self._limits = limits
        self._failures = 0
        self._witnesses = Witnesses()
        self.breaker = Breaker(limits.breaker_failures, limits.breaker_seconds)
        self.paused_until = 0.0

    @property
    def max_count(self) -> int:
        """The maximum size of a batch now: a single item unless the breaker is closed."""
        return self._limits.max_count if self.breaker.until is None else 1

    def note_answers(
        self, batch: Sequence[Item[Any, Any]], answers: Sequence[RefusedItem | None], now: float, bits: int
    ) -> None:
        """Process the answers for a batch.

        They count as a failure if none of them shows that the sink works. While the breaker is closed, one more refusal
        of a retried item proves nothing: the item may be to blame and must not hold up the others.
        """
        self._failures = 0
        if None in answers:
            self._witnesses.note_delivery()
        if not all(answer is not None and (answer.retryable or answer.waits) for answer in answers):
            self.breaker.note_success()
            return
        tried = (item for item, answer in zip(batch, answers, strict=True) if answer and not answer.waits)
        if self.breaker.until is not None or any(item.attempts == 0 for item in tried):
            self._count(now, bits)

    def note_failure(self, retryable: bool, now: float, bits: int) -> float | None:
        """Process a failure of the sink; return when to call it again, or None if a retry is useless."""
        if not retryable:
            self.breaker.note_success()
            return None
        self.pause(now, bits)
        self._count(now, bits)
        return self.paused_until

    def pause(self, now: float, bits: int) -> float:
        """Pause the queue, longer each time, and return when the pause ends."""
        self._failures += 1
        self.paused_until = now + self._limits.backoff.compute_delay(self._failures, bits)
        return self.paused_until

    def doubt(self, batch: Sequence[Item[Any, Any]]) -> None:
        """Mark the items of a batch whose call raised as suspects."""
        for item in batch:
            self._witnesses.doubt(item)

    def blames(self, item: Item[Any, Any], fault: SendFault) -> bool:
        """Return whether a call that raised with this item alone is the item's fault rather than the sink's."""
        return self._witnesses.judge_alone(item, fault)

    def _count(self, now: float, bits: int) -> None:
        if self.breaker.note_failure(now, bits) is not BreakerState.CLOSED:
            self._witnesses.note_sink_failure()
        if self.breaker.until is not None:
            self.paused_until = max(self.paused_until, self.breaker.until)
