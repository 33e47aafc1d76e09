"""A shared stream with acknowledgements: it polls the producer, tells it the outcomes, and enforces the deadlines.

`core.streams.group` makes the decisions; this module and `advancer` carry them out.

Invariants:
1. The producer is closed once, after the poll and the last advance have ended, however the stream ended.
2. Where seats are kept, the producer is pulled only while a subscriber is present.
3. When the poll fails, subscribers can still finish their current event: events that they move past in that time are
   advanced. Where seats are kept, this also holds for the last subscriber that leaves.
4. An exception in a task of the stream ends the stream and fails every subscriber.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterable, Sequence
from typing import Any, Final

from tidemill.core.errors import describe_error
from tidemill.core.streams.group import StreamGroup
from tidemill.core.streams.lane_counts import LaneCount, count_lanes
from tidemill.core.streams.members import Forced, LaneReport, SeatEndCause, SentEvent
from tidemill.core.streams.pending_events import PendingEvents
from tidemill.triggers.stream_api import (
    LIST_NAME,
    UPSTREAM_COUNTS,
    AckTimeout,
    SharedStreamProducer,
    SubscriberObserver,
)
from tidemill.triggers.streams.advancer import Advancer
from tidemill.triggers.streams.bell import WakeBell
from tidemill.triggers.streams.life import SharedStream, StreamLife, StreamSettings, build_overflow, wake_all
from tidemill.triggers.streams.stream_counts import Incident, IncidentKind
from tidemill.triggers.streams.subscription import AckSubscription, Subscription

#: After the poll has ended, how long subscribers may take to finish their current events and have the results stored.
DRAIN_SECONDS: Final = 5.0
_SEAT_ENDS: Final = (SeatEndCause.SEAT_TIMEOUT, SeatEndCause.SEAT_FULL)


class AckStream:
    """A shared stream whose events are acknowledged.

    Args:
        key: The key of the stream.
        make_producer: Creates the producer when the poll begins.
        settings: The limits.
        on_end: Called synchronously when the stream has ended.
        on_closed: Called when all resources are closed.
        on_deserted: Called when the last seat has ended and no subscriber is left.
        log: A structlog logger.
        pending_events: The numbering of pending events, shared by all streams of the manager.
        list_name: The value of `LIST_NAME` while the producer is created.
    """

    def __init__(
        self,
        key: Hashable,
        make_producer: Callable[[], SharedStreamProducer],
        settings: StreamSettings,
        on_end: Callable[[SharedStream, BaseException | None], None],
        on_closed: Callable[[SharedStream], None],
        on_deserted: Callable[[SharedStream], None],
        log: Any,
        pending_events: PendingEvents,
        list_name: str = "",
    ) -> None:
        self.key = key
        self.subscriptions: dict[Any, Subscription] = {}
        self.group: StreamGroup[Hashable, Any, Any] = StreamGroup(settings.limits, pending_events, self)
        self._settings = settings
        self._make_producer = make_producer
        self._producer: SharedStreamProducer | None = None
        self._observer: SubscriberObserver | None = None
        self._source: AsyncIterator[Any] | None = None
        self._log = log
        self._on_end = on_end
        self._on_closed = on_closed
        self._on_deserted = on_deserted
        self._list_name = list_name
        self._waiting: dict[Subscription, None] = {}
        # The subscribed triggers that have not failed, and so can read.
        self._live: set[Any] = set()
        self._room = WakeBell()
        self._deadlines = WakeBell()
        self._held = False
        self._advancer = Advancer(key, self.group, self._room, self.abandon, log, settings.counts, settings.may_advance)
        #: Rung when an event may have been resolved.
        self.pump = self._advancer.pump
        self._advancing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._life = StreamLife(key, self._poll, self._close, self._end, log, settings.step_seconds)
        self.start = self._life.start
        self.end: Callable[[], None] = self._life.end
        self.stop = self._life.stop
        self.closed = self._life.closed

    def subscribe(self, trigger_id: Any) -> AckSubscription:
        """Subscribe a trigger: in its seat, if it has one, or else to all events from now on."""
        seat = self.group.find_seat(trigger_id)
        if seat is not None:
            self.group.resume(seat, self._settings.now())
        member = seat or self.group.join(trigger_id)
        subscription = AckSubscription(member, self.group, self._waiting, self.pump, self._note_rejected)
        self.subscriptions[trigger_id] = subscription
        self._live.add(trigger_id)
        self._room.ring()
        if self._observer is not None and seat is None:
            self._observer.subscriber_joined(trigger_id)
        return subscription

    def unsubscribe(self, trigger_id: Any) -> None:
        """End the subscription of a trigger; events that it never read count as failed."""
        subscription = self._drop(trigger_id)
        self.group.leave(subscription.member)
        if (seat := self.group.find_seat(trigger_id)) is not None:
            # The trigger was forced to fail, and has held a seat since.
            self.group.leave(seat)
        self._note_left(trigger_id)

    def keep_seat(self, trigger_id: Any) -> None:
        """End the subscription of a trigger that will return; events published in the meantime wait in its seat."""
        subscription = self._drop(trigger_id)
        now = self._settings.now()
        if subscription.member.present:
            self.group.suspend(subscription.member, now)
            self._note_seated(trigger_id)
        elif (seat := self.group.find_seat(trigger_id)) is not None:
            # The trigger was forced to fail, and has held a seat since.
            self.group.keep_seat(seat, now + self._settings.seat_seconds)

    def release(self, trigger_id: Any) -> None:
        """Remove a trigger for good: no event waits for it or fails because of it."""
        members = [self._drop(trigger_id).member] if trigger_id in self.subscriptions else []
        if (seat := self.group.find_seat(trigger_id)) is not None:
            members.append(seat)
        for member in members:
            self.group.release(member)
        if members:
            self._note_left(trigger_id)
        if self._observer is not None:
            self._observer.subscriber_gone(trigger_id)

    def _drop(self, trigger_id: Any) -> AckSubscription:
        subscription = self.subscriptions.pop(trigger_id)
        assert isinstance(subscription, AckSubscription)
        self._live.discard(trigger_id)
        subscription.end.leave()
        return subscription

    def _note_rejected(self, trigger_id: Any, sent: SentEvent[Hashable, Any, Any]) -> None:
        self._settings.counts.tell(
            Incident(IncidentKind.REJECTED, self.key, trigger_id, sent.lane, sent.position, "it rejected the event")
        )

    def _note_left(self, trigger_id: Any) -> None:
        self.pump.ring()
        if self._observer is not None:
            self._observer.subscriber_left(trigger_id)

    def _note_seated(self, trigger_id: Any) -> None:
        self._note_left(trigger_id)
        if self._observer is not None:
            self._observer.subscriber_joined(trigger_id)
        self._deadlines.ring()

    def note_resolved(self) -> None:
        """Wake the advancer, because an event may have been resolved."""
        self.pump.ring()

    def hold(self, held: bool) -> None:
        """Stop pulling from the producer if `held`, or else resume."""
        self._held = held
        self._room.ring()

    def report(self, lanes: Iterable[Hashable] | None = None) -> list[LaneReport[Hashable]]:
        """Return what each lane waits for, or only the given lanes, which must not be empty."""
        return self.group.report(lanes)

    def count_lanes(self) -> list[LaneCount[Hashable]]:
        """Return the progress of each lane, without the subscribers that it waits for."""
        return count_lanes(self.group.ledger)

    # -- polling

    async def _poll(self) -> None:
        if self._settings.cohort_grace_period > 0:
            await asyncio.sleep(self._settings.cohort_grace_period)
        LIST_NAME.set(self._list_name)
        UPSTREAM_COUNTS.set(self._settings.counts.upstream)
        self._producer = producer = self._make_producer()
        if isinstance(producer, SubscriberObserver):
            self._observer = producer
            for trigger_id in self.group.members:
                producer.subscriber_joined(trigger_id)
        self._advancing = self._start_task("advance", self._advancer.run(producer, self._observer))
        self._watching = self._start_task("deadlines", self._watch())
        await self._wait_for_room()
        await self._settings.may_open()
        group, now, publish = self.group, self._settings.now, self.group.publish
        lane_of = _find_lane_function(producer)
        waiting, live, burst = self._waiting, self._live, self._settings.burst
        left = burst
        self._source = source = producer.open_stream()
        async for event, payload in source:
            forced = publish(event, payload, lane_of(payload) if lane_of else None, now())
            if forced:
                self._force(forced)
            if waiting:
                # The subscribers have had a turn since.
                left = burst
                wake_all(waiting)
            left -= 1
            if not left:
                left = burst
                await asyncio.sleep(0)
            if group.full_since is not None or self._held or not live:
                await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        while self.group.full_since is not None or self._held or self._has_only_seats():
            await self._room.wait()

    def _has_only_seats(self) -> bool:
        """Return whether all triggers are away and expected to return."""
        return not self._live and self._settings.seat_seconds > 0

    def _start_task(self, what: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task of the stream; an exception in it ends the stream."""

        async def watched() -> None:
            try:
                await work
            except (Exception, SystemExit) as error:
                self._log.exception(
                    "a task of a shared stream failed; failing all its subscribers", key=self.key, task=what
                )
                self._life.end(error)

        return asyncio.create_task(watched(), name=f"shared-stream-{what}[{self.key!r}]")

    def _force(self, forced: Sequence[Forced[Any, Any, Any]]) -> None:
        for member, cause, position in forced:
            if cause in _SEAT_ENDS:
                self._end_seat(member.name, cause)
                continue
            kind = IncidentKind.OVERFLOW if cause is SeatEndCause.OVERFLOW else IncidentKind.ACK_TIMEOUT
            if cause is SeatEndCause.OVERFLOW:
                error: Exception = build_overflow(self.key, member.name, self._settings.max_subscriber_queue)
            else:
                error = AckTimeout(
                    f"trigger {member.name} of the shared stream {self.key!r} did not finish event {position} within "
                    f"{self._settings.ack_timeout} s: it is still processing it, or derived events are not stored"
                )
            self._log.warning(
                "failing a subscriber of a shared stream",
                key=self.key,
                trigger_id=member.name,
                cause=cause.value,
                position=position,
            )
            counts = self._settings.counts
            counts.find_tally(self.key).forced += 1
            counts.tell(Incident(kind, self.key, member.name, None, position, str(error)))
            # The member has left the group, but its trigger has not unsubscribed yet.
            self._live.discard(member.name)
            end = self.subscriptions[member.name].end
            end.failed_at = self._settings.now()
            end.fail(error)
            if self.group.find_seat(member.name) is not None:
                self._note_seated(member.name)
        self.pump.ring()

    def _end_seat(self, trigger_id: Any, cause: SeatEndCause) -> None:
        self._log.warning(
            "a trigger did not return to its shared stream in time and loses its seat; events that waited for it are "
            "not acknowledged",
            key=self.key,
            trigger_id=trigger_id,
            cause=cause.value,
        )
        incident = Incident(IncidentKind.SEAT_ENDED, self.key, trigger_id, text=cause.value)
        self._settings.counts.tell(incident)
        self._note_left(trigger_id)
        if not self.group.members:
            self._on_deserted(self)

    # -- deadlines

    async def _watch(self) -> None:
        settings = self._settings
        while True:
            pause = settings.seat_check_seconds if self.group.has_seats else settings.deadline_check_seconds
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._deadlines.wait()
            forced = self.group.expire(settings.now())
            if forced:
                self._force(forced)
            elif self.group.outstanding:
                # Members that have left can time out too, but have no subscription to notify.
                self.pump.ring()

    # -- the end

    def _end(self, error: BaseException | None) -> None:
        self._on_end(self, error)
        # Otherwise subscribers may still resolve the events that they hold (invariant 3).
        if self._advancer.abandoned or (error is None and not self._settings.seat_seconds):
            self.group.close()
        else:
            self.group.stop_reading()
        if error is not None:
            counts = self._settings.counts
            counts.find_tally(self.key).ended += 1
            counts.tell(Incident(IncidentKind.STREAM_FAILED, self.key, text=describe_error(error)))
            for subscription in self.subscriptions.values():
                subscription.end.fail(error)

    async def _close(self) -> None:
        await self._advancer.drain(min(DRAIN_SECONDS, self._settings.ack_timeout))
        self.group.close()
        if self._watching is not None:
            self._watching.cancel()
        if self._advancing is not None:
            self._advancer.finish()
            await self._life.join("advance", self._advancing)
        # Whatever is still in the ledger will not be advanced any more; the broker redelivers it.
        tally = self._settings.counts.find_tally(self.key)
        for lane in count_lanes(self.group.ledger):
            left = tally.find_lane(lane.lane)
            left.given_up += lane.outstanding
            left.given_up_resolved += lane.resolved
        await self._life.close_step("source", getattr(self._source, "aclose", None))
        if self._producer is not None:
            await self._life.close_step("producer", self._producer.aclose)
        self._on_closed(self)

    def abandon(self, error: BaseException) -> None:
        """End at once, synchronously, without advancing any more events.

        Args:
            error: The error for every subscriber.
        """
        self._advancer.abandon()
        self._life.end(error)

    def stop_advancing(self) -> None:
        """Advance no more events, synchronously; subscribers may go on."""
        self._advancer.abandon()
        self.pump.ring()

    def cut_short(self) -> None:
        """Give up all unfinished events, synchronously; for a stream that has already ended."""
        self.group.close()
        self._advancer.cut_short()


def _find_lane_function(producer: SharedStreamProducer) -> Callable[[Any], Hashable] | None:
    """Return the function that finds the lane of an event; None if all events share one lane."""
    lane_of = producer.get_advance_lane
    return None if getattr(lane_of, "__func__", None) is SharedStreamProducer.get_advance_lane else lane_of
