"""Shared streams: many triggers, one poll, and a broker that advances only when all triggers have resolved an event.

`SharedStreamManager` has one stream per key. The stream of a class that overrides `create_shared_stream_producer` is
acknowledged: the producer learns, per lane and in order, which events every subscriber has resolved and which derived
events are stored. The stream of a class that overrides `open_shared_stream` is only read. Filters see the same raw
events in both cases.

Invariants:
1. A key is present only while its stream is polled; it is removed before anything is awaited.
2. The stream is created from the first subscriber's class and serialized kwargs; classpaths are not imported.
3. `bind_pending_event` never returns the same number twice.

All calls belong to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, Final

import structlog

from tidemill.core.streams.lane_counts import LaneCount
from tidemill.core.streams.pending_events import PendingEvents
from tidemill.triggers.base import BaseEventTrigger, is_acknowledged
from tidemill.triggers.stream_api import StreamEnded
from tidemill.triggers.streams.ack import AckStream
from tidemill.triggers.streams.fast import FastStream
from tidemill.triggers.streams.life import STEP_SECONDS, SharedStream, StreamSettings, always, at_once
from tidemill.triggers.streams.report import StreamReport, report_stream
from tidemill.triggers.streams.stream_counts import StreamCounts
from tidemill.triggers.streams.subscription import AckSubscription, FastSubscription

#: How many raw events a subscriber may leave unread.
DEFAULT_SUBSCRIBER_QUEUE_MAX: Final = 1024


class SharedStreamManager:
    """The shared streams of a process.

    Args:
        log: A logger of structlog or of the standard library; None: one named after this module.
        max_subscriber_queue: How many raw events a subscriber may leave unread before it fails.
        ack_timeout: How many seconds a subscriber may hold an event, counted from its fan-out, before it fails.
        cohort_grace_period: How many seconds a new stream waits for more subscribers before it polls.
        max_outstanding: How many events of a stream may wait to be advanced before the producer is no longer pulled.
        now: A monotonic clock; deadlines do not run while it is paused.
        seat_seconds: How long `keep_seat` keeps a trigger's seat in an acknowledged stream. 0, as in Airflow: a
            subscriber that leaves takes part in no later event, and is not expected to return after its stream has
            ended.
        list_name: The value of `LIST_NAME` for the producers.
        step_seconds: How long each step of the end of a stream may take.
        may_open: Awaited before a producer's stream is opened; returns when this process may read from the upstream.
        may_advance: Awaited before a producer is told to advance; returns when this process may acknowledge events, or
            False if it may not any more.
        counts: Where events are counted; None: in a new object.
    """

    def __init__(
        self,
        *,
        log: Any = None,
        max_subscriber_queue: int = DEFAULT_SUBSCRIBER_QUEUE_MAX,
        ack_timeout: float = 300.0,
        cohort_grace_period: float = 0.0,
        max_outstanding: int = 100_000,
        now: Callable[[], float] = time.monotonic,
        seat_seconds: float = 0.0,
        list_name: str = "",
        step_seconds: float = STEP_SECONDS,
        may_open: Callable[[], Awaitable[None]] = at_once,
        may_advance: Callable[[], Awaitable[bool]] = always,
        counts: StreamCounts | None = None,
        _now: Callable[[], float] | None = None,
    ) -> None:
        if log is None:
            log = structlog.get_logger(__name__)
        elif isinstance(log, logging.Logger):
            log = structlog.wrap_logger(log)
        self._log = log
        self._settings = StreamSettings(
            max_subscriber_queue,
            ack_timeout,
            cohort_grace_period,
            max_outstanding,
            # The name that Airflow's own tests use.
            _now or now,
            seat_seconds,
            step_seconds,
            may_open,
            counts or StreamCounts(),
            may_advance,
        )
        self._list_name = list_name
        self._pending_events = PendingEvents()
        # Bound directly, because they are called for every trigger event; they are documented where they are defined.
        self.bind_pending_event = self._pending_events.bind_pending_event
        self.confirm_persisted = self._pending_events.confirm_persisted
        self.refuse_persisted = self._pending_events.refuse_persisted
        self._groups: dict[Hashable, SharedStream] = {}
        # Streams that have ended but are not closed yet.
        self._closing: dict[SharedStream, None] = {}
        # By key: triggers that are expected to return, with the deadline, while no stream exists to keep their seats.
        self._seats: dict[Hashable, dict[Any, float]] = {}
        # Triggers that have not yet left a stream that failed under them, with the time of the failure.
        self._stranded: dict[tuple[Hashable, Any], float] = {}
        self._held = False

    def subscribe(
        self, *, trigger_id: Any, trigger: BaseEventTrigger, key: Hashable
    ) -> AckSubscription | FastSubscription:
        """Subscribe a trigger to the stream of a key; the first subscriber starts the stream.

        Returns:
            The raw events from now on, after those that waited in the trigger's seat, if it has one.

        Raises:
            ValueError: The key is None.
            RuntimeError: The trigger is already subscribed.
        """
        if key is None:
            raise ValueError("the key of a shared stream must not be None; a trigger without a key runs by itself")
        self._stranded.pop((key, trigger_id), None)
        stream = self._groups.get(key)
        if stream is None:
            stream = self._make(trigger, key)
            stream.start(self._closed_before(key))
            self._groups[key] = stream
        elif trigger_id in stream.subscriptions:
            raise RuntimeError(f"trigger {trigger_id} is already subscribed to the shared stream {key!r}")
        return stream.subscribe(trigger_id)

    async def unsubscribe(self, trigger_id: Any, key: Hashable) -> None:
        """End the subscription of a trigger; if it was the last one, end the stream and wait until it is closed.

        Unknown triggers and keys are ignored.
        """
        self._stranded.pop((key, trigger_id), None)
        stream = self._groups.get(key)
        if stream is None or trigger_id not in stream.subscriptions:
            return
        stream.unsubscribe(trigger_id)
        self._end_deserted(stream)
        await stream.closed()

    def fail_held(self, trigger_id: Any, key: Hashable, error: str | None) -> None:
        """Fail the current event of a trigger at once.

        Events that the trigger has moved past are acked once their derived events are stored, and fail if the store
        refuses them. Unknown triggers and keys are ignored.

        Args:
            trigger_id: The trigger.
            key: The key of its stream.
            error: The reason; None if the trigger was interrupted through no fault of its own and is not to be blamed.
        """
        stream = self._groups.get(key)
        if stream is not None and trigger_id in stream.subscriptions:
            stream.subscriptions[trigger_id].fail_held(error)

    def keep_seat(self, trigger_id: Any, key: Hashable) -> None:
        """End the subscription of a trigger that will return; events published within `seat_seconds` wait for it.

        Its current event counts as moved past; call `fail_held` first if it was not. Streams without acknowledgements
        have no seats.
        """
        self._stranded.pop((key, trigger_id), None)
        stream = self._groups.get(key)
        if stream is None:
            # The stream failed under its subscribers.
            if (seats := self._seats.get(key)) is not None and trigger_id in seats:
                seats[trigger_id] = self._compute_seat_end()
        elif trigger_id in stream.subscriptions:
            if isinstance(stream, AckStream) and self._settings.seat_seconds > 0:
                stream.keep_seat(trigger_id)
            else:
                stream.unsubscribe(trigger_id)
                self._end_deserted(stream)
        elif isinstance(stream, AckStream) and (seat := stream.group.find_seat(trigger_id)) is not None:
            # The stream failed under its subscribers, and another subscriber has restarted it.
            stream.group.keep_seat(seat, self._compute_seat_end())

    def hand_over(self, trigger_id: Any, key: Hashable) -> None:
        """Release a trigger that another process has claimed; its stream ends at once and advances no more events.

        All triggers of a key belong to one process. Without this trigger, later events would be advanced although it
        has not seen them, so the other subscribers get an error and subscribe to the next stream.
        """
        stream = self._groups.get(key)
        if isinstance(stream, AckStream):
            stream.abandon(
                StreamEnded(
                    f"another process has claimed trigger {trigger_id} of the shared stream {key!r}, so the stream "
                    f"ends here; the broker redelivers events that are not acknowledged"
                )
            )
        elif stream is not None and trigger_id in stream.subscriptions:
            stream.unsubscribe(trigger_id)
            self._end_deserted(stream)
        self._forget_seat(trigger_id, key)

    def note_gone(self, trigger_id: Any, key: Hashable) -> None:
        """Remove a trigger that will not subscribe to a key again: it finished, was removed, or will not be restarted.

        It releases all events that it holds: it no longer counts in any outcome, and no event is redelivered because of
        it.
        """
        stream = self._forget_seat(trigger_id, key)
        if stream is None:
            return
        if isinstance(stream, AckStream):
            stream.release(trigger_id)
        elif trigger_id in stream.subscriptions:
            stream.unsubscribe(trigger_id)
        self._end_deserted(stream)

    def stop_advancing(self, key: Hashable) -> None:
        """Stop advancing a stream whose triggers all move to another process.

        They leave one after another; otherwise the last ones would acknowledge events that the first ones have not
        read.
        """
        stream = self._groups.get(key)
        if isinstance(stream, AckStream):
            stream.stop_advancing()

    def abandon_all(self) -> None:
        """Advance no more events of any stream: other processes may read them."""
        for stream in [*self._groups.values(), *self._closing]:
            if isinstance(stream, AckStream):
                stream.stop_advancing()

    async def stop_all(self) -> None:
        """End all streams, and wait until they are closed; no subscriber fails."""
        streams = [*self._groups.values(), *self._closing]
        for stream in streams:
            stream.end()
            if isinstance(stream, AckStream):
                stream.cut_short()
        await asyncio.gather(*(stream.stop() for stream in streams))

    def hold(self) -> None:
        """Stop pulling producers until `release`: the store is unreachable. The caller must also pause the clock."""
        self._hold(True)

    def release(self) -> None:
        """Resume pulling producers."""
        self._hold(False)

    def list_forced(self) -> dict[Any, float]:
        """Return the triggers that were forced to fail and have not left, with the time by the manager's clock.

        This includes triggers whose stream has failed.
        """
        stranded = {name: failed_at for (_, name), failed_at in self._stranded.items()}
        return stranded | {
            name: one.end.failed_at
            for stream in self._groups.values()
            for name, one in stream.subscriptions.items()
            if one.end.failed_at is not None
        }

    @property
    def streams(self) -> Mapping[Hashable, SharedStream]:
        """The streams that are being polled, by key."""
        return self._groups

    def count_lanes(self) -> dict[Hashable, list[LaneCount[Hashable]]]:
        """Return the progress of the lanes of each acknowledged stream, by key."""
        return {key: stream.count_lanes() for key, stream in self._groups.items() if isinstance(stream, AckStream)}

    def count_failed(self) -> int:
        """Return the number of streams that have failed and have not been restarted."""
        keys = {key for key, _ in self._stranded} | self._seats.keys()
        return sum(key not in self._groups for key in keys)

    def report(self) -> list[StreamReport]:
        """Return a report on each stream: its subscribers, failures and lanes."""
        return [report_stream(stream) for stream in self._groups.values()]

    def _hold(self, held: bool) -> None:
        self._held = held
        for stream in self._groups.values():
            if isinstance(stream, AckStream):
                stream.hold(held)

    def _compute_seat_end(self) -> float:
        return self._settings.now() + self._settings.seat_seconds

    def _forget_seat(self, trigger_id: Any, key: Hashable) -> SharedStream | None:
        """Stop expecting a trigger to return; return the stream of the key."""
        self._stranded.pop((key, trigger_id), None)
        if (seats := self._seats.get(key)) is not None:
            seats.pop(trigger_id, None)
            if not seats:
                del self._seats[key]
        return self._groups.get(key)

    def _end_deserted(self, stream: SharedStream) -> None:
        """End a stream that has no subscribers and expects none to return."""
        if self._groups.get(stream.key) is not stream or stream.subscriptions:
            return
        if isinstance(stream, AckStream) and stream.group.members:
            return
        stream.end()

    def _closed_before(self, key: Hashable) -> Callable[[], Awaitable[None]] | None:
        """Return a function that waits until earlier streams of a key are closed: an upstream allows one poll only."""
        before = [stream for stream in self._closing if stream.key == key]
        if not before:
            return None

        async def closed() -> None:
            for stream in before:
                await stream.closed()

        return closed

    def _make(self, trigger: BaseEventTrigger, key: Hashable) -> SharedStream:
        cls = type(trigger)
        _, kwargs = trigger.serialize()
        if not is_acknowledged(cls):
            return FastStream(
                key,
                lambda: cls.open_shared_stream(kwargs),
                self._settings,
                self._note_end,
                self._note_closed,
                self._log,
            )
        stream = AckStream(
            key,
            lambda: cls.create_shared_stream_producer(kwargs),
            self._settings,
            self._note_end,
            self._note_closed,
            self._end_deserted,
            self._log,
            self._pending_events,
            self._list_name,
        )
        stream.hold(self._held)
        for earlier in self._closing:
            # From here on, the trigger names of this key refer to members of the new stream.
            if earlier.key == key and isinstance(earlier, AckStream) and not self._settings.seat_seconds:
                earlier.cut_short()
        self._pending_events.open(key, stream.group.members)
        now = self._settings.now()
        for name, until in self._seats.pop(key, {}).items():
            if until > now:
                stream.group.add_seat(name, until)
            else:
                self._log.warning(
                    "a trigger did not return to its shared stream in time and loses its seat; the stream restarts "
                    "without it",
                    key=key,
                    trigger_id=name,
                )
        return stream

    def _note_end(self, stream: SharedStream, error: BaseException | None) -> None:
        if self._groups.get(stream.key) is stream:
            del self._groups[stream.key]
            if error is not None:
                now = self._settings.now()
                for name, one in stream.subscriptions.items():
                    self._stranded[stream.key, name] = now if one.end.failed_at is None else one.end.failed_at
            if error is not None and isinstance(stream, AckStream) and self._settings.seat_seconds > 0:
                # All subscribers are expected to return, unless the manager is told otherwise.
                until = self._compute_seat_end()
                self._seats[stream.key] = stream.group.list_seats() | dict.fromkeys(stream.subscriptions, until)
        self._closing[stream] = None

    def _note_closed(self, stream: SharedStream) -> None:
        del self._closing[stream]
        if isinstance(stream, AckStream):
            self._pending_events.close(stream.key, stream.group.members)
