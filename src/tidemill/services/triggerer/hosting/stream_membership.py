"""A trigger's membership in its shared stream: a subscription while it runs, a seat between runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Hashable

from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent
from tidemill.triggers.shared_stream import SharedStreamManager, route
from tidemill.triggers.streams.subscription import AckSubscription, FastSubscription


class StreamMembership:
    """The source of one trigger's events, over all of its runs.

    Args:
        manager: The shared streams of the host.
        name: The trigger's name.
        seat: The key of the stream in which the replaced trigger kept a seat; None: it kept none.

    Attributes:
        events: The events of the current run; None between runs.
        subscription: The current run's subscription; None: it shares no stream.
        seat: The key of the stream in which the trigger keeps a seat; None: it keeps none.
    """

    __slots__ = ("_key", "_manager", "_name", "events", "seat", "subscription")

    def __init__(self, manager: SharedStreamManager, name: str, seat: Hashable | None) -> None:
        self._manager = manager
        self._name = name
        # The stream it is subscribed to.
        self._key: Hashable | None = None
        self.seat = seat
        self.events: AsyncIterator[TriggerEvent] | None = None
        self.subscription: AckSubscription | FastSubscription | None = None

    @property
    def taken(self) -> int:
        """The number of raw events that the current run has taken from its stream."""
        return self.subscription.taken if self.subscription is not None else 0

    @property
    def bind(self) -> Callable[[], int | None]:
        """Binds a derived event to the current raw event, if the stream is acknowledged."""
        return self.subscription.bind if isinstance(self.subscription, AckSubscription) else _bind_nothing

    def join(self, trigger: BaseTrigger) -> None:
        """Subscribe a trigger to its stream, if it shares one.

        Raises:
            Exception: The filter's error; the trigger may already have been subscribed.
        """
        try:
            routed = route(self._manager, self._name, trigger)
            self._key, self.events, self.subscription = routed.key, routed.events, routed.subscription
        except (Exception, SystemExit):
            with contextlib.suppress(Exception, SystemExit):
                self._key = trigger.shared_stream_key() if isinstance(trigger, BaseEventTrigger) else None
            if self._key is not None:
                self._give_up_other_seat()
            raise
        self._give_up_other_seat()

    def open_events(self, fault: BaseException | None, reason: CancelReason | None) -> AsyncIterator[TriggerEvent]:
        """Return the events of the current run; none if it was cancelled before it began.

        Args:
            fault: The error that was raised before the run began; it is raised again.
            reason: Why the run was cancelled.
        """
        if reason is not None:
            return yield_nothing()
        if fault is not None:
            raise fault
        assert self.events is not None
        return self.events

    def _give_up_other_seat(self) -> None:
        seat, self.seat = self.seat, None
        if seat is not None and seat != self._key:
            self._manager.note_gone(self._name, seat)

    def fail_held(self, error: str | None) -> None:
        """Fail the raw event being processed. Without an error the trigger was interrupted, and is not blamed."""
        if self.subscription is not None:
            self.subscription.fail_held(error)

    def move_past(self) -> None:
        """Accept the raw event being processed: the trigger has fired for it, and requests no other one."""
        if self.subscription is not None:
            self.subscription.move_past()

    def end_run(self) -> None:
        """Drop the event source of the current run."""
        self.events = self.subscription = None

    def keep_seat(self) -> None:
        """Unsubscribe, and keep the seat for the next run or for the replacing trigger."""
        key, self._key = self._key, None
        if key is not None:
            self._manager.keep_seat(self._name, key)
            self.seat = key

    def hand_over(self) -> None:
        """Leave the stream, or the seat in it, to the process that has claimed the trigger."""
        if (key := self._take_key()) is not None:
            self._manager.hand_over(self._name, key)

    def stop_advancing(self) -> None:
        """Acknowledge nothing more of the stream, because all its triggers are handed over."""
        if self._key is not None:
            self._manager.stop_advancing(self._key)

    def leave(self) -> None:
        """Leave the stream, or give up the seat in it, for good."""
        if (key := self._take_key()) is not None:
            self._manager.note_gone(self._name, key)

    def _take_key(self) -> Hashable | None:
        key = self._key if self._key is not None else self.seat
        self._key = self.seat = None
        return key


async def yield_nothing() -> AsyncIterator[TriggerEvent]:
    return
    yield


def _bind_nothing() -> None:
    return
