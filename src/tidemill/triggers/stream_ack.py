"""A shared stream whose producer is told what was dealt with: tasks that poll, advance and watch the deadlines.

What is decided, `core.stream_group` decides; here it is carried out.

Invariants:
1. `advance` is awaited by one task, one call at a time; after one that raised there is no other.
2. The producer is closed once, after the poll and the last advance have ended, however the stream came to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any

from tidemill.core.bindings import Bindings
from tidemill.core.ledger import Batch
from tidemill.core.stream_group import StreamGroup
from tidemill.core.stream_members import Cause, Forced, LaneReport
from tidemill.triggers.attendance import Attendance
from tidemill.triggers.stream_api import AckTimeout, AdvanceItem, AdvanceOutcome, SharedStreamProducer, StreamEnded
from tidemill.triggers.stream_life import Life, Stream, StreamSettings, close_quietly, overflow_of, wake_all
from tidemill.triggers.subscription import AckSubscription, Bell, Subscription


class AckStream:
    """A stream whose producer is told what was dealt with.

    Args:
        key: What it is known by.
        make_producer: Makes the producer, when the poll begins.
        settings: Its limits.
        on_end: Told, synchronously, when it has ended.
        on_closed: Told when all that it held is closed.
        log: A structlog logger.
        bindings: The numbers of the manager.
    """

    def __init__(
        self,
        key: Hashable,
        make_producer: Callable[[], SharedStreamProducer],
        settings: StreamSettings,
        on_end: Callable[[Stream], None],
        on_closed: Callable[[Stream], None],
        log: Any,
        bindings: Bindings,
    ) -> None:
        """Do nothing yet."""
        self.key = key
        self.subscriptions: dict[Any, Subscription] = {}
        self.group: StreamGroup[Hashable, Any, Any] = StreamGroup(
            max_backlog=settings.max_subscriber_queue,
            ack_timeout_seconds=settings.ack_timeout,
            max_outstanding=settings.max_outstanding,
            bindings=bindings,
            home=self,
        )
        #: Rung when an event may have been resolved.
        self.pump = Bell()
        self._settings = settings
        self._make_producer = make_producer
        self._producer: SharedStreamProducer | None = None
        self._attendance: Attendance | None = None
        self._source: AsyncIterator[Any] | None = None
        self._log = log
        self._on_end = on_end
        self._on_closed = on_closed
        self._waiting: dict[Subscription, None] = {}
        self._room = Bell()
        self._held = False
        self._advancing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._life = Life(key, self._poll, self._close, self._end, log)
        self.start = self._life.start
        self.end: Callable[[], None] = self._life.end
        self.stop = self._life.stop

    def subscribe(self, trigger_id: Any) -> AckSubscription:
        """Let a trigger take part in the events from now on."""
        subscription = AckSubscription(self.group.join(trigger_id), self.group, self._waiting, self.pump)
        self.subscriptions[trigger_id] = subscription
        if self._attendance is not None:
            self._attendance.subscriber_joined(trigger_id)
        return subscription

    def unsubscribe(self, trigger_id: Any) -> None:
        """Let it go; what it never read has failed."""
        subscription = self.subscriptions.pop(trigger_id)
        assert isinstance(subscription, AckSubscription)
        self.group.leave(subscription.member)
        subscription.end.leave()
        self.pump.ring()
        if self._attendance is not None:
            self._attendance.subscriber_left(trigger_id)

    def note_gone(self, trigger_id: Any) -> None:
        """Take that a trigger will not subscribe again."""
        if self._attendance is not None:
            self._attendance.subscriber_gone(trigger_id)

    def note_resolved(self) -> None:
        """Take notice that there may be something to advance."""
        self.pump.ring()

    def hold(self, held: bool) -> None:
        """Pull nothing from the producer as long as it is held."""
        self._held = held
        self._room.ring()

    def report(self) -> list[LaneReport[Hashable]]:
        """Say what each lane waits for."""
        return self.group.report()

    # -- polling

    async def _poll(self) -> None:
        if self._settings.cohort_grace_period > 0:
            await asyncio.sleep(self._settings.cohort_grace_period)
        self._producer = producer = self._make_producer()
        if isinstance(producer, Attendance):
            self._attendance = producer
            for trigger_id in self.subscriptions:
                producer.subscriber_joined(trigger_id)
        self._advancing = asyncio.create_task(self._advance(producer), name=f"shared-stream-advance[{self.key!r}]")
        self._watching = asyncio.create_task(self._watch(), name=f"shared-stream-deadlines[{self.key!r}]")
        await self._wait_for_room()
        group, now, publish = self.group, self._settings.now, self.group.publish
        lane_of = _lane_of(producer)
        waiting, burst = self._waiting, self._settings.burst
        left = burst
        self._source = source = producer.open_stream()
        async for event, payload in source:
            forced = publish(event, payload, lane_of(payload) if lane_of else None, now())
            if forced:
                self._force(forced)
            if waiting:
                # They had their turn since.
                left = burst
                wake_all(waiting)
            left -= 1
            if not left:
                left = burst
                await asyncio.sleep(0)
            if group.full_since is not None or self._held:
                await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        while self.group.full_since is not None or self._held:
            await self._room.wait()

    def _force(self, forced: Sequence[Forced[Any, Any, Any]]) -> None:
        for member, cause, position in forced:
            if cause is Cause.OVERFLOW:
                error: Exception = overflow_of(self.key, member.name, self._settings.max_subscriber_queue)
            else:
                error = AckTimeout(
                    f"trigger {member.name} of the shared stream {self.key!r} did not finish event {position} within "
                    f"{self._settings.ack_timeout} s: it is still on it, or what it derived from it is not stored"
                )
            self._log.warning(
                "a subscriber of a shared stream is forced to fail",
                key=self.key,
                trigger_id=member.name,
                cause=cause.value,
                position=position,
            )
            # Gone from the group, but its trigger has not left yet.
            end = self.subscriptions[member.name].end
            end.failed_at = self._settings.now()
            end.fail(error)
        self.pump.ring()

    # -- deadlines

    async def _watch(self) -> None:
        pause = self._settings.deadline_check_seconds
        while True:
            await asyncio.sleep(pause)
            forced = self.group.expire(self._settings.now())
            if forced:
                self._force(forced)
            elif self.group.outstanding:
                # Those who have left time out too, without anybody to tell.
                self.pump.ring()

    # -- advancing

    async def _advance(self, producer: SharedStreamProducer) -> None:
        """Advance what is resolved until the stream has ended, then what is left of that."""
        group = self.group
        while True:
            ended = self._life.ended
            while (batch := group.take()) is not None:
                if self._attendance is not None:
                    self._tell_failures(self._attendance, batch)
                try:
                    await producer.advance(_items(batch))
                except (Exception, asyncio.CancelledError) as error:
                    self._advance_failed(batch, error)
                    return
                full = group.full_since is not None
                group.settle(batch)
                if full:
                    self._room.ring()
            if ended:
                return
            await self.pump.wait()

    def _tell_failures(self, attendance: Attendance, batch: Batch[Hashable, Any]) -> None:
        for entry in batch.entries:
            if entry.failed:
                attendance.event_failed(entry.item, dict.fromkeys(self.group.who_failed(entry), "it failed"), ())

    def _advance_failed(self, batch: Batch[Hashable, Any], error: BaseException) -> None:
        self._log.error(
            "broker advance failed; the shared stream ends, and the broker will give the events again",
            key=self.key,
            lane=batch.lane,
            events=len(batch.entries),
            exc_info=error,
        )
        if isinstance(error, asyncio.CancelledError):
            error = StreamEnded(f"the advance of the shared stream {self.key!r} was cancelled")
        self._life.end(error)

    # -- the end

    def _end(self, error: BaseException | None) -> None:
        self._on_end(self)
        self.group.close()
        if error is not None:
            for subscription in self.subscriptions.values():
                subscription.end.fail(error)

    async def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._advancing is not None:
            self.pump.ring()
            await asyncio.wait({self._advancing})
        await close_quietly("source", getattr(self._source, "aclose", None), self.key, self._log)
        if self._producer is not None:
            await close_quietly("producer", self._producer.aclose, self.key, self._log)
        self._on_closed(self)


def _lane_of(producer: SharedStreamProducer) -> Callable[[Any], Hashable] | None:
    """Return what tells the lane of an event; None when that would say the same of all."""
    lane_of = producer.get_advance_lane
    return None if getattr(lane_of, "__func__", None) is SharedStreamProducer.get_advance_lane else lane_of


def _items(batch: Batch[Hashable, Any]) -> list[AdvanceItem]:
    """Make what a producer is given of a batch; most outcomes are that of the first, and are one object."""
    acked = batch.entries[0].acked
    clean = AdvanceOutcome(acked, 0, 0)
    new = tuple.__new__  # what `AdvanceItem(...)` does, in half the time
    return [
        new(
            AdvanceItem,
            (
                sent.item,
                clean
                if sent.acked == acked and not sent.failed and not sent.rejected
                else AdvanceOutcome(sent.acked, sent.failed, sent.rejected),
            ),
        )
        for sent in batch.entries
    ]
