"""Decides how far each lane of a log may be committed, and which offsets are redelivered.

A log (a Kafka partition) stores only one number per lane, the commit floor: all offsets below it are done. A lane's
offsets are admitted in order, delivered to the current subscribers, and resolved in any order. An offset that all
subscribers read and none failed is clean. Any other offset holds the floor while it waits for the subscribers that
failed it or left it unread, and is then redelivered from memory to all subscribers. An offset that was rejected, or
failed too often, is dead-lettered, and done once the letter is confirmed. Redelivery from memory needs no seek, which
would discard the prefetched messages and read all clean ones again.

Invariants:
1. The floor never passes an offset that is not done, and never moves back; so no commit does.
2. A clean offset is never redelivered. Clean offsets above the floor are kept as intervals, at most one more than there
   are open offsets, which are bounded (`wants`), besides those that a past commit recorded.
3. An offset that is not clean ends clean or dead-lettered, or `find_overdue` returns it.
4. A delivery is resolved once; one that was redelivered since, or whose lane was revoked, changes nothing.
5. Only a failure or a reject leads to a dead letter. An offset left unread is redelivered as often as necessary.
6. Every redelivery backs off, longer with each failure, and with each consecutive time it was left unread.

A delivery waits for the return of every subscriber that failed it and has left, or has yet to leave. It does not wait
for a subscriber that has left permanently, and is not redelivered because of it to subscribers that accepted it. Times
are seconds of one clock; `bits` are 32 random bits. The cost of every call is proportional to what it changes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

from tidemill.core.streams.lane_offsets import LaneOffsets
from tidemill.core.streams.redelivery_items import (
    Commit,
    OffsetDelivery,
    Overdue,
    RedeliveryLimits,
    RedeliveryVerdict,
    SkipReason,
    WaitingDelivery,
)

LaneT = TypeVar("LaneT", bound=Hashable)
HeldT = TypeVar("HeldT")


class Redelivery(Generic[LaneT, HeldT]):
    """The lanes of one log, and their offsets that are not done.

    Example:
        >>> log: Redelivery[str, bytes] = Redelivery()
        >>> log.assign("a")
        >>> first, second = log.admit("a", 7, b"x"), log.admit("a", 8, b"y")
        >>> assert isinstance(first, OffsetDelivery) and isinstance(second, OffsetDelivery)
        >>> log.resolve(second, RedeliveryVerdict.CLEAN, 0.0, 0)
        False
        >>> log.take_commits()
        [Commit(lane='a', floor=7, clean=((8, 9),), failures=())]
        >>> log.resolve(first, RedeliveryVerdict.FAILED, 0.0, 0)
        False
        >>> [given.offset for given in log.take(0.0)]
        [7]
    """

    def __init__(self, limits: RedeliveryLimits | None = None) -> None:
        self._limits = limits or RedeliveryLimits()
        self._lanes: dict[LaneT, LaneOffsets[LaneT, HeldT]] = {}
        self._number = 0
        self._open_bytes = 0
        self._dirty: dict[LaneT, None] = {}
        # The numbers of deliveries that are not done, oldest first.
        self._numbers: dict[int, None] = {}
        # Present subscribers, with the number at which they last left; absent ones and those that left permanently,
        # with the number at which they left.
        self._present: dict[Hashable, int] = {}
        self._absent: dict[Hashable, int] = {}
        self._gone: dict[Hashable, int] = {}
        self._prune_above = 64
        self._joined = 0
        self._timers: list[tuple[float, int, WaitingDelivery[LaneT, HeldT]]] = []
        self._held_up: deque[WaitingDelivery[LaneT, HeldT]] = deque()
        self._missing: dict[Hashable, list[WaitingDelivery[LaneT, HeldT]]] = {}
        # The deliveries that wait because of each subscriber.
        self._concerns: dict[Hashable, set[WaitingDelivery[LaneT, HeldT]]] = {}
        # Deliveries that wait for any subscriber to join.
        self._unseen: list[WaitingDelivery[LaneT, HeldT]] = []

    # -- lanes --------------------------------------------------------------------------------------------------------

    def assign(self, lane: LaneT, past: Commit[LaneT] | None = None) -> None:
        """Start a lane at its beginning.

        Args:
            lane: The lane; if it is already assigned, its state is forgotten.
            past: Its last commit, if known.
        """
        self.revoke(lane)
        self._lanes[lane] = LaneOffsets(past)

    def revoke(self, lane: LaneT) -> None:
        """Forget a lane and its open offsets; the lane's next reader gets them."""
        state = self._lanes.pop(lane, None)
        self._dirty.pop(lane, None)
        if state is not None:
            for delivery in state.open.values():
                self._stop_waiting(delivery)
                self._open_bytes -= delivery.size_bytes
                del self._numbers[delivery.number]

    def wants(self, lane: LaneT) -> bool:
        """Return whether more offsets of a lane may be admitted."""
        state = self._lanes.get(lane)
        limits = self._limits
        return state is not None and len(state.open) < limits.max_open and self._open_bytes < limits.max_open_bytes

    def admit(
        self, lane: LaneT, offset: int, held: HeldT, size_bytes: int = 0
    ) -> OffsetDelivery[LaneT, HeldT] | SkipReason:
        """Admit the next offset of a lane; offsets that were skipped before it do not exist."""
        state = self._lanes.get(lane)
        if state is None:
            return SkipReason.FOREIGN
        if state.read < 0:
            state.begin(offset)
        if offset < state.read:
            return SkipReason.STALE
        state.reach(offset)
        if offset < state.floor or offset in state.clean:
            self._dirty[lane] = None
            return SkipReason.CLEAN
        return self._deliver(state, lane, offset, held, size_bytes, state.failures.get(offset, 0))

    def _deliver(
        self,
        state: LaneOffsets[LaneT, HeldT],
        lane: LaneT,
        offset: int,
        held: HeldT,
        size_bytes: int,
        failures: int,
        unread: int = 0,
    ) -> OffsetDelivery[LaneT, HeldT]:
        self._number = number = self._number + 1
        delivery = OffsetDelivery(lane, offset, held, size_bytes, number, failures, unread)
        state.open[offset] = delivery
        self._open_bytes += size_bytes
        self._numbers[number] = None
        return delivery

    # -- outcomes -----------------------------------------------------------------------------------------------------

    def resolve(
        self,
        delivery: OffsetDelivery[LaneT, HeldT],
        verdict: RedeliveryVerdict,
        now: float,
        bits: int,
        awaited: Collection[Hashable] = (),
        accepted: bool = False,
    ) -> bool:
        """Record the outcome of a delivery.

        Args:
            delivery: A result of `admit` or `take`.
            verdict: The outcome.
            now: The current time.
            bits: 32 random bits for the backoff.
            awaited: The subscribers that failed it or left it unread.
            accepted: Whether any subscriber accepted it.

        Returns:
            Whether it is to be dead-lettered; call `note_lettered` when the letter is confirmed.
        """
        state = self._lanes.get(delivery.lane)
        if delivery.resolved or state is None or state.open.get(delivery.offset) is not delivery:
            return False
        delivery.resolved = True
        if verdict is RedeliveryVerdict.CLEAN:
            self._finish(state, delivery)
            return False
        if verdict is RedeliveryVerdict.REJECTED:
            return True
        if verdict in (RedeliveryVerdict.UNREAD, RedeliveryVerdict.UNSEEN):
            delivery.unread += 1
        else:
            delivery.unread = 0
            delivery.failures += 1
            state.failures[delivery.offset] = delivery.failures
            self._dirty[delivery.lane] = None
            if delivery.failures > self._limits.max_redeliveries:
                return True
        concerns = {subscriber for subscriber in awaited if subscriber not in self._gone}
        if accepted and awaited and not concerns:
            self._finish(state, delivery)
            return False
        waiting = self._wait(delivery, verdict, now, bits, awaited)
        waiting.concerns, waiting.accepted = concerns, accepted
        for subscriber in concerns:
            self._concerns.setdefault(subscriber, set()).add(waiting)
        return False

    def note_lettered(self, delivery: OffsetDelivery[LaneT, HeldT]) -> None:
        """Record that the dead letter of a delivery is confirmed."""
        state = self._lanes.get(delivery.lane)
        if state is not None and state.open.get(delivery.offset) is delivery:
            self._finish(state, delivery)

    def _finish(self, state: LaneOffsets[LaneT, HeldT], delivery: OffsetDelivery[LaneT, HeldT]) -> None:
        self._close(state, delivery)
        state.failures.pop(delivery.offset, None)
        state.mark_done(delivery.offset, delivery.offset + 1)
        self._dirty[delivery.lane] = None

    def _close(self, state: LaneOffsets[LaneT, HeldT], delivery: OffsetDelivery[LaneT, HeldT]) -> None:
        self._stop_waiting(delivery)
        del state.open[delivery.offset]
        del self._numbers[delivery.number]
        self._open_bytes -= delivery.size_bytes

    def take_commits(self) -> list[Commit[LaneT]]:
        """Return one commit for each lane that has changed since the last call."""
        dirty, self._dirty = self._dirty, {}
        found = []
        for lane in dirty:
            state = self._lanes[lane]
            failures = sorted(state.failures.items()) if state.failures else ()
            found.append(Commit(lane, state.floor, state.clean.list_pairs(), tuple(failures)))
        return found

    def offer_again(self, lane: LaneT) -> None:
        """Include a lane in the next `take_commits` again, because its commit failed."""
        state = self._lanes.get(lane)
        if state is not None and state.read >= 0:
            self._dirty[lane] = None

    # -- subscribers --------------------------------------------------------------------------------------------------

    def note_joined(self, subscriber: Hashable) -> None:
        """Record that a subscriber joined, for the first time or again."""
        if subscriber in self._present:
            return
        self._number += 1
        self._joined = self._number
        self._present[subscriber] = self._absent.pop(subscriber, 0) or self._gone.pop(subscriber, 0)
        unseen, self._unseen = self._unseen, []
        for waiting in unseen:
            waiting.anybody = False
            self._schedule(waiting)
        self._note_found(subscriber)

    def note_left(self, subscriber: Hashable) -> None:
        """Record that a subscriber left and may come back."""
        if self._present.pop(subscriber, None) is None:
            return
        self._number += 1
        self._absent[subscriber] = self._number
        self._prune()

    def note_gone(self, subscriber: Hashable) -> None:
        """Record that a subscriber left permanently. If it comes back nevertheless, it joins as a new one."""
        self.note_left(subscriber)
        number = self._absent.pop(subscriber, 0)
        if number:
            self._gone[subscriber] = number
        for waiting in self._concerns.pop(subscriber, ()):
            waiting.concerns.discard(subscriber)
            if waiting.accepted and not waiting.concerns:
                delivery = waiting.delivery
                self._finish(self._lanes[delivery.lane], delivery)
        self._note_found(subscriber)

    def _prune(self) -> None:
        """Forget subscribers that left before the oldest delivery that is not done: they cannot have failed it."""
        if len(self._absent) + len(self._gone) > self._prune_above:
            oldest = next(iter(self._numbers), self._number + 1)
            self._absent = {name: number for name, number in self._absent.items() if number > oldest}
            self._gone = {name: number for name, number in self._gone.items() if number > oldest}
            self._prune_above = max(64, 2 * (len(self._absent) + len(self._gone)))

    def _note_found(self, subscriber: Hashable) -> None:
        for waiting in self._missing.pop(subscriber, ()):
            waiting.missing.discard(subscriber)
            self._schedule(waiting)

    def _is_expected(self, subscriber: Hashable, delivery: OffsetDelivery[LaneT, HeldT]) -> bool:
        """Return whether a subscriber that failed a delivery, or left it unread, still has to come back."""
        left = self._present.get(subscriber)
        return subscriber in self._absent if left is None else left <= delivery.number

    # -- redeliveries -------------------------------------------------------------------------------------------------

    def _wait(
        self,
        delivery: OffsetDelivery[LaneT, HeldT],
        verdict: RedeliveryVerdict,
        now: float,
        bits: int,
        awaited: Collection[Hashable],
    ) -> WaitingDelivery[LaneT, HeldT]:
        delay = self._limits.backoff.compute_delay(delivery.unread or delivery.failures, bits)
        waiting = delivery.waiting = WaitingDelivery(delivery, now + delay, now + self._limits.wait_seconds)
        waiting.missing = {subscriber for subscriber in awaited if self._is_expected(subscriber, delivery)}
        for subscriber in waiting.missing:
            self._missing.setdefault(subscriber, []).append(waiting)
        if verdict is RedeliveryVerdict.UNSEEN and self._joined <= delivery.number:
            waiting.anybody = True
            self._unseen.append(waiting)
        if waiting.held_up:
            self._held_up.append(waiting)
        else:
            self._schedule(waiting)
        return waiting

    def _stop_waiting(self, delivery: OffsetDelivery[LaneT, HeldT]) -> None:
        if delivery.waiting is not None:
            for subscriber in delivery.waiting.concerns:
                concerned = self._concerns[subscriber]
                concerned.discard(delivery.waiting)
                if not concerned:
                    del self._concerns[subscriber]
            delivery.waiting = None

    def _schedule(self, waiting: WaitingDelivery[LaneT, HeldT]) -> None:
        if not waiting.held_up:
            heapq.heappush(self._timers, (waiting.due, waiting.delivery.number, waiting))

    def _is_live(self, waiting: WaitingDelivery[LaneT, HeldT]) -> bool:
        delivery = waiting.delivery
        state = self._lanes.get(delivery.lane)
        return state is not None and state.open.get(delivery.offset) is delivery

    def take(self, now: float, limit: int = 100) -> list[OffsetDelivery[LaneT, HeldT]]:
        """Take the offsets to redeliver now; each becomes a new delivery."""
        found: list[OffsetDelivery[LaneT, HeldT]] = []
        while self._timers and self._timers[0][0] <= now and len(found) < limit:
            waiting = heapq.heappop(self._timers)[2]
            if not self._is_live(waiting):
                continue
            old = waiting.delivery
            state = self._lanes[old.lane]
            self._close(state, old)
            found.append(self._deliver(state, old.lane, old.offset, old.held, old.size_bytes, old.failures, old.unread))
        return found

    def find_overdue(self, now: float) -> Overdue[LaneT, HeldT] | None:
        """Return an offset whose subscribers did not come back in time, or None."""
        first = self._find_first_held_up()
        if first is None or now < first.deadline:
            return None
        return Overdue(first.delivery, frozenset(first.missing))

    @property
    def due(self) -> float | None:
        """The time of the next call to `take` or `find_overdue` without input; None: only after the next input."""
        first = self._find_first_held_up()
        times = [first.deadline] if first is not None else []
        if self._timers:
            times.append(self._timers[0][0])
        return min(times) if times else None

    def _find_first_held_up(self) -> WaitingDelivery[LaneT, HeldT] | None:
        while self._held_up and not (self._held_up[0].held_up and self._is_live(self._held_up[0])):
            self._held_up.popleft()
        return self._held_up[0] if self._held_up else None

    @property
    def open(self) -> int:
        """The number of offsets that are admitted and not done, including those that wait."""
        return len(self._numbers)

    def __contains__(self, lane: object) -> bool:
        return lane in self._lanes
