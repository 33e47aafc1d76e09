"""What one sink is sent next: batches, retries, who waits behind whom, whom to ask, and when to give up.

Theory of operation. Items stand in one line in the order they came. At most one batch is in flight; what comes
meanwhile makes up the next one. An item that is refused and may be tried again *holds* its key: the items of that
key behind it wait, and once its back-off is over it goes alone, as a probe; when it is through, those behind it
return to the head of the line together. Items without a key hold nothing. When the sink as a whole fails, the whole
line pauses; after some failures in a row its circuit breaker opens, and the first item sent afterwards goes alone.
An item that cannot be tried again, or for too long, is asked about, and holds its key until decided. One that the sink
did not try because one before it in the batch was refused waits behind that one; nothing is counted of it.

Invariants, each a property test:
1. Every item ends exactly once: delivered, given up, dropped by a decision, or abandoned with its lane.
2. Items of one key are delivered in the order they came, as far as the sink itself keeps the order in a batch.
3. No more than one batch is in flight; memory is O(outstanding).
4. An item is tried no longer than twice the budget, counted from its first refusal; the second time only because
   a decision asked for it, and no more than `max_retries` times.
5. An item that was never tried is never asked about, and its budget does not begin.
6. While the breaker is not closed, at most one item is in flight; with `WhenOpen.GIVE_UP` nothing waits for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic

from tidemill.core.breaker import Breaker, BreakerState
from tidemill.core.outbox_items import (
    Ask,
    Decision,
    Delivered,
    Effect,
    Failures,
    GaveUp,
    Hold,
    Item,
    LaneT,
    Limits,
    Refused,
    State,
    ValueT,
    WhenOpen,
    WholeBatch,
)


class SendQueue(Generic[LaneT, ValueT]):
    """The line in front of one sink.

    Call `take` after every input and whenever `due` comes; a batch that it returns is in flight until `answered` or
    `failed`. All times are seconds of one monotonic clock; `bits` are 32 random bits.
    """

    def __init__(self, limits: Limits) -> None:
        """Start empty."""
        self._limits = limits
        self._breaker = Breaker(limits.breaker_failures, limits.breaker_seconds)
        self._ready: deque[Item[LaneT, ValueT]] = deque()
        self._ready_bytes = 0
        self._ready_since = 0.0
        # A heap: of what is tried again, the oldest goes first.
        self._probes: list[Item[LaneT, ValueT]] = []
        self._later: list[tuple[float, Item[LaneT, ValueT]]] = []
        self._holds: dict[Hashable, Hold[LaneT, ValueT]] = {}
        self._asked: set[Item[LaneT, ValueT]] = set()
        self._in_flight: list[Item[LaneT, ValueT]] = []
        self._paused_until = 0.0
        self._failures = 0
        self._numbers = 0
        self._abandoned = False
        #: Items that did not end yet.
        self.outstanding = 0
        #: Since when something is refused, and the last error; None while nothing is.
        self.failing: tuple[float, str] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a batch is with the sink."""
        return bool(self._in_flight)

    @property
    def asked(self) -> int:
        """How many items somebody has to decide about."""
        return len(self._asked)

    @property
    def opened(self) -> int:
        """How often the circuit breaker opened."""
        return self._breaker.opened

    def breaker(self, now: float) -> BreakerState:
        """Return what the circuit breaker lets through at this time."""
        return self._breaker.state(now)

    def add(self, item: Item[LaneT, ValueT], now: float) -> None:
        """Put an item at the end of the line."""
        if not self._ready:
            self._ready_since = now
        self._enter(item)
        self._ready.append(item)
        self._ready_bytes += item.size_bytes

    def refuse(self, item: Item[LaneT, ValueT], error: str, now: float) -> Ask[LaneT, ValueT]:
        """Take an item that cannot be sent at all: it is asked about once, and never tried."""
        self._enter(item)
        item.key = None
        item.attempts = 1
        item.extended = True
        item.deadline = now
        item.state = State.ASKED
        self._asked.add(item)
        return Ask((item,), error, False, 1)

    def _enter(self, item: Item[LaneT, ValueT]) -> None:
        self._numbers += 1
        item.number = self._numbers
        self.outstanding += 1

    # -- what to send -----------------------------------------------------------------------------------------

    def take(self, now: float) -> Sequence[Item[LaneT, ValueT]]:
        """Return the batch to send now; empty while one is in flight, or nothing is to be sent yet."""
        if self._in_flight or now < self._paused_until:
            return ()
        limits = self._limits
        max_count = limits.max_count if self._breaker.until is None else 1
        while self._later and self._later[0][0] <= now:
            heapq.heappush(self._probes, heapq.heappop(self._later)[1])
        if not self._probes:
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
        """Fill a batch with probes first, then with those of the line whose key is not held."""
        limits = self._limits
        batch: list[Item[LaneT, ValueT]] = []
        size = 0
        while self._probes and len(batch) < max_count:
            item = self._probes[0]
            if item.state is State.GONE:
                heapq.heappop(self._probes)
                self._passed(item)
                continue
            size += item.size_bytes
            if batch and size > limits.max_bytes:
                return batch
            batch.append(heapq.heappop(self._probes))
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
        return batch

    @property
    def due(self) -> float | None:
        """When `take` is worth a call if nothing else happens before; None: not before something does."""
        if self._in_flight:
            return None
        times = []
        if self._probes:
            times.append(self._paused_until)
        if self._later:
            times.append(self._later[0][0])
        if self._ready:
            times.append(self._ready_since + self._limits.linger_seconds)
        return max(min(times), self._paused_until) if times else None

    # -- what became of it ------------------------------------------------------------------------------------

    def answered(self, answers: Sequence[Refused | None], now: float, bits: int) -> list[Effect[LaneT, ValueT]]:
        """Take the sink's answers, one per item of the batch in flight, None where it is confirmed."""
        self._failures = 0
        batch = self._in_flight
        self._judge(answers, now, bits)
        if not self._holds and not self._abandoned and answers.count(None) == len(batch):
            self._in_flight = []
            self.outstanding -= len(batch)
            if not self._later and not self._probes:
                self.failing = None
            return [Delivered(batch)]
        return self._settle(answers, Failures(now, None, bits)) + self.shed(now)

    def _judge(self, answers: Sequence[Refused | None], now: float, bits: int) -> None:
        """Tell the breaker how an answer went.

        It is a failure if nothing in it says that the sink works. While the breaker is closed, an item that is only
        tried again proves nothing: the refusal may be its own, and must not hold up the others.
        """
        if not all(answer is not None and (answer.retryable or answer.waits) for answer in answers):
            self._breaker.succeeded()
            return
        tried = (item for item, answer in zip(self._in_flight, answers, strict=True) if answer and not answer.waits)
        if self._breaker.until is not None or any(item.attempts == 0 for item in tried):
            self._open(now, bits)

    def _open(self, now: float, bits: int) -> None:
        self._breaker.failed(now, bits)
        if self._breaker.until is not None:
            self._paused_until = max(self._paused_until, self._breaker.until)

    def shed(self, now: float) -> list[Effect[LaneT, ValueT]]:
        """Give up what waits while the breaker is open, if that is what is wanted; call it after `add` too."""
        if self._limits.when_open is WhenOpen.HOLD or self._breaker.state(now) is not BreakerState.OPEN:
            return []
        gone = self._forget(lambda item: item.state is not State.ASKED)
        error = self.failing[1] if self.failing is not None else "the circuit breaker is open"
        return [GaveUp(gone, error, False, max(item.attempts for item in gone))] if gone else []

    def failed(self, error: str, retryable: bool, now: float, bits: int) -> list[Effect[LaneT, ValueT]]:
        """Take that nothing of the batch in flight is known to be delivered; if it can be retried, the line pauses."""
        due = None
        if retryable:
            self._failures += 1
            self._paused_until = now + self._limits.backoff.delay(self._failures, bits)
            self._open(now, bits)
            due = self._paused_until
        else:
            self._breaker.succeeded()
        answers = [WholeBatch(error, retryable)] * len(self._in_flight)
        return self._settle(answers, Failures(now, due, bits)) + self.shed(now)

    def _settle(
        self, answers: Sequence[Refused | None], failures: Failures[LaneT, ValueT]
    ) -> list[Effect[LaneT, ValueT]]:
        batch, self._in_flight = self._in_flight, []
        self._abandoned = False
        delivered: list[Item[LaneT, ValueT]] = []
        for item, answer in zip(batch, answers, strict=True):
            if item.state is State.GONE:
                self._passed(item)
                failures.again = failures.now
            elif answer is None:
                delivered.append(item)
                self._end(item)
            elif answer.waits and failures.again is not None:
                # If its key is not held, the one that it waited for has ended.
                self._wait(item, failures.again if item.key is None else failures.now)
            else:
                self._refused(item, answer, failures)
        if not self._holds and not self._later and not self._probes and None in answers:
            self.failing = None
        return [*([Delivered(delivered)] if delivered else []), *failures.effects()]

    def _refused(self, item: Item[LaneT, ValueT], answer: Refused, failures: Failures[LaneT, ValueT]) -> None:
        now = failures.again = failures.now
        item.attempts += 1
        if item.deadline is None:
            item.deadline = now + self._limits.budget_seconds
        in_time = now < item.deadline
        if answer.retryable:
            self.failing = (self.failing[0] if self.failing else now, answer.error)
        if answer.retryable and in_time and not (item.extended and item.attempts >= item.last_attempt):
            own = now + self._limits.backoff.delay(item.attempts, failures.bits)
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
            heapq.heappush(self._later, (due, item))

    def _hold(self, item: Item[LaneT, ValueT]) -> Item[LaneT, ValueT]:
        """Let an item hold its key, or stand behind the one that does; return the one that does."""
        if item.key is None:
            return item
        hold = self._holds.get(item.key)
        if hold is None:
            self._holds[item.key] = Hold(item)
            return item
        if hold.head is not item:
            hold.behind.append(item)
        return hold.head

    def decided(
        self, ask: Ask[LaneT, ValueT], decision: Decision, now: float, bits: int
    ) -> list[Effect[LaneT, ValueT]]:
        """Take the answer to `Ask`: RETRY is carried out within the budget, or ends in `GaveUp`."""
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
                    due = now + self._limits.backoff.delay(item.attempts, bits)
                    heapq.heappush(self._later, (due, item))
        return [GaveUp(given_up, ask.error, ask.oversize, ask.attempts)] if given_up else []

    def _end(self, item: Item[LaneT, ValueT]) -> None:
        item.state = State.GONE
        self.outstanding -= 1
        self._passed(item)

    def _passed(self, item: Item[LaneT, ValueT]) -> None:
        """Let go of the key that an item held: the next one becomes its head, or all return to the line."""
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
                heapq.heappush(self._probes, head)
            return
        del self._holds[item.key]
        for waiting in reversed(behind):
            if waiting.state is not State.GONE:
                waiting.state = State.QUEUED
                self._ready.appendleft(waiting)
                self._ready_bytes += waiting.size_bytes

    # -- lanes given up ---------------------------------------------------------------------------------------

    def abandon(self, lane: LaneT) -> None:
        """Forget every item of a lane; what the sink says of those in flight changes nothing."""
        self._forget(lambda item: item.lane == lane)
        self._abandoned = bool(self._in_flight)

    def _forget(self, unwanted: Callable[[Item[LaneT, ValueT]], bool]) -> list[Item[LaneT, ValueT]]:
        """End items wherever they are, and return them, the oldest first."""
        gone: list[Item[LaneT, ValueT]] = []
        heads: list[Item[LaneT, ValueT]] = []
        for item in self._everything():
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
            self._passed(item)
        return sorted(gone)

    def _everything(self) -> Iterator[Item[LaneT, ValueT]]:
        """Yield every item in hand, some of them twice."""
        yield from list(self._asked)
        yield from self._ready
        yield from self._probes
        yield from self._in_flight
        for _, item in self._later:
            yield item
        for hold in self._holds.values():
            yield hold.head
            yield from hold.behind
