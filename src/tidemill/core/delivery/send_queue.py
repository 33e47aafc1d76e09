"""The send queue of one sink: it builds batches, schedules retries, keeps the order per key and gives items up.

Theory of operation. Items wait in one queue in order of arrival. At most one batch is in flight; items that arrive
meanwhile go into the next one. An item that is refused and may be retried *holds* its key: later items of that key wait
behind it. Once its backoff is over, it is sent alone as a probe; when it is delivered, those behind it return to the
head of the queue together. Items without a key hold nothing. When the sink as a whole fails, the whole queue pauses;
after several consecutive failures its circuit breaker opens, and the first item sent afterwards goes alone. An item
that cannot be retried, or was retried for too long, needs a decision and holds its key until then. An item that the
sink did not try because it refused an earlier one of the batch waits behind that one, and is not counted as refused. A
batch for which the sink raises is sent in *parts* before anything else, to find the item at fault (`culprit`).

Invariants, each a property test:
1. Every item ends exactly once: delivered, given up, dropped by a decision, or abandoned with its lane.
2. Items of one key are delivered in order of arrival, provided the sink itself keeps the order within a batch.
3. No more than one batch is in flight; memory is O(outstanding).
4. An item is retried for no longer than twice the budget, counted from its first refusal. The second budget starts only
   with a decision to retry, and allows at most `max_retries` retries.
5. An item that was never tried needs no decision, and its budget does not start.
6. While the breaker is not closed, at most one item is in flight; with `WhenOpen.GIVE_UP` no item waits for it.
7. A call that raised leads to a decision about an item only if the item was sent alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic

from tidemill.core.delivery.breaker import BreakerState
from tidemill.core.delivery.culprit import SendFault
from tidemill.core.delivery.send_items import (
    AskDecision,
    BatchFailures,
    Decision,
    Effect,
    GaveUp,
    HeldKey,
    Item,
    ItemsDelivered,
    LaneT,
    RefusedItem,
    SendLimits,
    State,
    ValueT,
    WhenOpen,
    WholeBatch,
)
from tidemill.core.delivery.send_parts import Parts
from tidemill.core.delivery.send_probes import Probes
from tidemill.core.delivery.sink_health import SinkHealth


class SendQueue(Generic[LaneT, ValueT]):
    """The queue in front of one sink.

    Call `take` after every input and at the time `due`. The batch it returns is in flight until `note_answers` or
    `note_failure`. All times are seconds of one monotonic clock; `bits` are 32 random bits.
    """

    def __init__(self, limits: SendLimits) -> None:
        self._limits = limits
        self._health = SinkHealth(limits)
        self._ready: deque[Item[LaneT, ValueT]] = deque()
        self._ready_bytes = 0
        self._ready_since = 0.0
        self._probes: Probes[LaneT, ValueT] = Probes()
        self._holds: dict[Hashable, HeldKey[LaneT, ValueT]] = {}
        self._asked: set[Item[LaneT, ValueT]] = set()
        self._in_flight: list[Item[LaneT, ValueT]] = []
        self._parts: Parts[LaneT, ValueT] = Parts()
        self._numbers = 0
        self._abandoned = False
        #: The number of items that are not done.
        self.outstanding = 0
        #: The time of the first refusal and the last error; None while no item is refused.
        self.failing: tuple[float, str] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a batch is with the sink."""
        return bool(self._in_flight)

    @property
    def asked(self) -> int:
        """The number of items that await a decision."""
        return len(self._asked)

    @property
    def opened(self) -> int:
        """The number of times the circuit breaker has opened."""
        return self._health.breaker.opened

    def find_breaker_state(self, now: float) -> BreakerState:
        return self._health.breaker.find_state(now)

    def add(self, items: Sequence[Item[LaneT, ValueT]], now: float) -> None:
        """Append items to the queue."""
        if items and not self._ready:
            self._ready_since = now
        number, size_bytes = self._numbers, 0
        for item in items:
            number += 1
            item.number = number
            size_bytes += item.size_bytes
        self._numbers = number
        self.outstanding += len(items)
        self._ready += items
        self._ready_bytes += size_bytes

    def refuse(self, item: Item[LaneT, ValueT], error: str, now: float) -> AskDecision[LaneT, ValueT]:
        """Add an item that cannot be sent at all. It is never tried, and needs a decision."""
        self._numbers += 1
        item.number = self._numbers
        self.outstanding += 1
        item.key = None
        item.attempts = 1
        item.extended = True
        item.deadline = now
        item.state = State.ASKED
        self._asked.add(item)
        return AskDecision((item,), error, False, 1)

    # -- batches ------------------------------------------------------------------------------------------------------

    def take(self, now: float) -> Sequence[Item[LaneT, ValueT]]:
        """Return the batch to send now; empty while a batch is in flight, or if nothing is due."""
        if self._in_flight or now < self._health.paused_until:
            return ()
        limits, max_count = self._limits, self._health.max_count
        self._in_flight = self._parts.take(max_count, limits.max_bytes, self._holds, self._release_key)
        if self._in_flight:
            return self._in_flight
        if not self._probes.has_due(now):
            count = len(self._ready)
            full = count >= max_count or self._ready_bytes >= limits.max_bytes
            if not count or not (full or now >= self._ready_since + limits.linger_seconds):
                return ()
            if not self._holds and count <= max_count and self._ready_bytes <= limits.max_bytes:
                self._in_flight = list(self._ready)
                self._ready.clear()
                self._ready_bytes = 0
                return self._in_flight
        self._in_flight = self._collect(max_count)
        return self._in_flight

    def _collect(self, max_count: int) -> list[Item[LaneT, ValueT]]:
        """Fill a batch with probes first, then with queued items whose keys are not held."""
        limits = self._limits
        batch, full = self._probes.take(max_count, limits.max_bytes, self._release_key)
        if full:
            return batch
        size = sum(item.size_bytes for item in batch)
        while self._ready and len(batch) < max_count:
            item = self._ready[0]
            hold = self._holds.get(item.key) if item.key is not None else None
            if hold is None:
                size += item.size_bytes
                if batch and size > limits.max_bytes:
                    return batch
                batch.append(item)
            else:
                item.state = State.WAITING
                hold.behind.append(item)
            self._ready.popleft()
            self._ready_bytes -= item.size_bytes
        return batch or self._probes.take(max_count, limits.max_bytes, self._release_key)[0]

    @property
    def due(self) -> float | None:
        """The time of the next call to `take` without further input; None: only after the next input."""
        if self._in_flight:
            return None
        paused_until = self._health.paused_until
        probe = self._probes.find_next_due(paused_until)
        times = [] if probe is None else [probe]
        if self._parts:
            times.append(paused_until)
        if self._ready:
            times.append(self._ready_since + self._limits.linger_seconds)
        return max(min(times), paused_until) if times else None

    # -- answers and decisions ----------------------------------------------------------------------------------------

    def note_answers(self, answers: Sequence[RefusedItem | None], now: float, bits: int) -> list[Effect[LaneT, ValueT]]:
        """Process the sink's answers, one per item of the batch in flight; None confirms an item."""
        batch = self._in_flight
        self._health.note_answers(batch, answers, now, bits)
        if not self._holds and not self._abandoned and answers.count(None) == len(batch):
            self._in_flight = []
            self.outstanding -= len(batch)
            if not self._probes:
                self.failing = None
            return [ItemsDelivered(batch)]
        return self._settle(answers, BatchFailures(now, None, bits)) + self.shed(now)

    def shed(self, now: float) -> list[Effect[LaneT, ValueT]]:
        """With `WhenOpen.GIVE_UP`, give up the waiting items while the breaker is open. Call it after `add` too."""
        if self._limits.when_open is WhenOpen.HOLD or self.find_breaker_state(now) is not BreakerState.OPEN:
            return []
        gone = self._forget(lambda item: item.state is not State.ASKED)
        error = self.failing[1] if self.failing is not None else "the circuit breaker is open"
        return [GaveUp(gone, error, False, max(item.attempts for item in gone))] if gone else []

    def note_failure(
        self, error: str, retryable: bool, now: float, bits: int, fault: SendFault = SendFault.SINK
    ) -> list[Effect[LaneT, ValueT]]:
        """Process the failure of a whole batch: none of its items is known to be delivered.

        If the failure can be retried, the queue pauses. If an item may be at fault, the batch is sent in parts, and an
        item that was sent alone is judged. While the sink's target is missing, everything waits and no refusals are
        counted.
        """
        batch = self._in_flight
        failures: BatchFailures[LaneT, ValueT]
        if fault is SendFault.TARGET:
            failures = BatchFailures(now, None, bits)
            failures.again = self._health.pause(now, bits)
            self.failing = (self.failing[0] if self.failing else now, error)
            return self._settle([WholeBatch(error, True, waits=True)] * len(batch), failures)
        if fault.may_be_a_payload and len(batch) > 1:
            self._in_flight = []
            self._abandoned = False
            self._health.doubt(batch)
            self._parts.split(batch)
            return []
        if fault.may_be_a_payload and self._health.blames(batch[0], fault):
            retryable, due = False, None
        else:
            due = self._health.note_failure(retryable, now, bits)
            if due is not None:
                self._parts.note_refusals(now + self._limits.budget_seconds)
            if fault.may_be_a_payload:
                self._probes.let_others_first()
        failures = BatchFailures(now, due, bits, sink_failed=not retryable and not fault.may_be_a_payload)
        return self._settle([WholeBatch(error, retryable)] * len(batch), failures) + self.shed(now)

    def _settle(
        self, answers: Sequence[RefusedItem | None], failures: BatchFailures[LaneT, ValueT]
    ) -> list[Effect[LaneT, ValueT]]:
        batch, self._in_flight = self._in_flight, []
        self._abandoned = False
        delivered: list[Item[LaneT, ValueT]] = []
        for item, answer in zip(batch, answers, strict=True):
            if item.state is State.GONE:
                self._release_key(item)
                failures.again = failures.now
            elif answer is None:
                delivered.append(item)
                self._end(item)
            elif answer.waits and failures.again is not None:
                # If its key is not held, the item that it waited for is done.
                self._wait(item, failures.again if item.key is None else failures.now)
            else:
                self._note_refusal(item, answer, failures)
        if not self._holds and not self._probes and None in answers:
            self.failing = None
        return [*([ItemsDelivered(delivered)] if delivered else []), *failures.yield_effects()]

    def _note_refusal(
        self, item: Item[LaneT, ValueT], answer: RefusedItem, failures: BatchFailures[LaneT, ValueT]
    ) -> None:
        now = failures.again = failures.now
        in_time = now < item.note_refusal(now + self._limits.budget_seconds)
        if answer.retryable:
            self.failing = (self.failing[0] if self.failing else now, answer.error)
        if answer.retryable and in_time and not (item.extended and item.attempts >= item.last_attempt):
            own = now + self._limits.backoff.compute_delay(item.attempts, failures.bits)
            failures.again = own if failures.due is None else failures.due
            self._wait(item, failures.again)
            return
        asked = not (item.extended and (not in_time or item.attempts >= item.last_attempt))
        failures.add(item, answer, asked=asked)
        if not asked:
            self._end(item)
            return
        item.state = State.ASKED
        self._asked.add(item)
        if self._hold(item) is not item:
            self._holds[item.key].asked += 1

    def _wait(self, item: Item[LaneT, ValueT], due: float) -> None:
        item.state = State.WAITING
        if self._hold(item) is item:
            self._probes.add(item, due)

    def _hold(self, item: Item[LaneT, ValueT]) -> Item[LaneT, ValueT]:
        """Let an item hold its key, or wait behind the item that holds it; return the holder."""
        if item.key is None:
            return item
        hold = self._holds.get(item.key)
        if hold is None:
            self._holds[item.key] = HeldKey(item)
            return item
        if hold.head is not item:
            hold.behind.append(item)
        return hold.head

    def note_decision(
        self, ask: AskDecision[LaneT, ValueT], decision: Decision, now: float, bits: int
    ) -> list[Effect[LaneT, ValueT]]:
        """Apply the decision about an `AskDecision`. RETRY ends in `GaveUp` once the second budget is spent."""
        given_up: list[Item[LaneT, ValueT]] = []
        for item in ask.items:
            if item.state is not State.ASKED:
                continue
            self._asked.discard(item)
            hold = self._holds.get(item.key) if item.key is not None else None
            behind = hold is not None and hold.head is not item
            if hold is not None and behind:
                hold.asked -= 1
            assert item.deadline is not None
            if decision is Decision.DROP:
                self._end(item)
            elif item.extended and (now >= item.deadline or item.attempts >= item.last_attempt):
                given_up.append(item)
                self._end(item)
            else:
                if not item.extended:
                    item.extended = True
                    item.deadline = now + self._limits.budget_seconds
                    item.last_attempt = item.attempts + self._limits.max_retries
                item.state = State.WAITING
                if not behind:
                    due = now + self._limits.backoff.compute_delay(item.attempts, bits)
                    self._probes.add(item, due)
        return [GaveUp(given_up, ask.error, ask.oversize, ask.attempts)] if given_up else []

    def _end(self, item: Item[LaneT, ValueT]) -> None:
        item.state = State.GONE
        self.outstanding -= 1
        self._release_key(item)

    def _release_key(self, item: Item[LaneT, ValueT]) -> None:
        """Release the key of an item: either the next item becomes its head, or all of them return to the queue."""
        hold = self._holds.get(item.key) if self._holds and item.key is not None else None
        if hold is None or hold.head is not item:
            return
        behind = hold.behind
        while behind and behind[0].state is State.GONE:
            behind.popleft()
        if behind and hold.asked:
            head = hold.head = behind.popleft()
            if head.state is State.ASKED:
                hold.asked -= 1
            else:
                self._probes.add(head)
            return
        del self._holds[item.key]
        if self._parts and behind:
            self._parts.put_first(list(behind))
            return
        for waiting in reversed(behind):
            if waiting.state is not State.GONE:
                waiting.state = State.QUEUED
                self._ready.appendleft(waiting)
                self._ready_bytes += waiting.size_bytes

    # -- abandoned lanes ----------------------------------------------------------------------------------------------

    def abandon(self, lane: LaneT) -> None:
        """Forget every item of a lane; answers for its items in flight change nothing."""
        self._forget(lambda item: item.lane == lane)
        self._abandoned = bool(self._in_flight)

    def _forget(self, unwanted: Callable[[Item[LaneT, ValueT]], bool]) -> list[Item[LaneT, ValueT]]:
        """End all unwanted items in every part of the queue, and return them, the oldest first."""
        gone: list[Item[LaneT, ValueT]] = []
        heads: list[Item[LaneT, ValueT]] = []
        for item in self.list_items():
            if item.state is State.GONE or not unwanted(item):
                continue
            if item.state is State.ASKED:
                self._asked.discard(item)
                hold = self._holds.get(item.key) if item.key is not None else None
                if hold is not None and hold.head is item:
                    heads.append(item)
                elif hold is not None:
                    hold.asked -= 1
            item.state = State.GONE
            self.outstanding -= 1
            gone.append(item)
        self._ready = deque(item for item in self._ready if item.state is not State.GONE)
        self._ready_bytes = sum(item.size_bytes for item in self._ready)
        for item in heads:
            self._release_key(item)
        return sorted(gone)

    def list_items(self) -> Iterator[Item[LaneT, ValueT]]:
        """Yield every outstanding item; some may occur twice."""
        yield from list(self._asked)
        yield from self._ready
        yield from self._probes
        yield from self._in_flight
        yield from self._parts
        for hold in self._holds.values():
            yield hold.head
            yield from hold.behind
