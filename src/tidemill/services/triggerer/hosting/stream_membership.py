"""The part that a trigger has in its shared stream, over all its runs: a subscription while it runs, else a seat."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Hashable

from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent
from tidemill.triggers.shared_stream import SharedStreamManager, route
from tidemill.triggers.streams.subscription import AckSubscription, FastSubscription


class StreamMembership:
    """Where the events of one trigger come from.

    Args:
        manager: The shared streams of the host.
        name: The trigger's.
        seat: The key of the stream in which the trigger that it replaces kept a seat.

    Attributes:
        events: The events of the current run; None while there is none.
        subscription: The current run's end of its stream, if it shares one.
        seat: The key of the stream in which it keeps a seat, if it does.
    """

    __slots__ = ("_key", "_manager", "_name", "events", "seat", "subscription")

    def __init__(self, manager: SharedStreamManager, name: str, seat: Hashable | None) -> None:
        """Take part in nothing yet."""
        self._manager = manager
        self._name = name
        # The stream that it is subscribed to.
        self._key: Hashable | None = None
        self.seat = seat
        self.events: AsyncIterator[TriggerEvent] | None = None
        self.subscription: AckSubscription | FastSubscription | None = None

    @property
    def taken(self) -> int:
        """How many raw events the current run has taken from its stream."""
        return self.subscription.taken if self.subscription is not None else 0

    @property
    def bind(self) -> Callable[[], int | None]:
        """Binds what the run has derived to the raw event that it is on, if that is acknowledged."""
        return self.subscription.bind if isinstance(self.subscription, AckSubscription) else _bind_nothing

    def join(self, trigger: BaseTrigger) -> None:
        """Subscribe a trigger to its stream, if it shares one.

        Raises:
            Exception: What its filter raised; it may have been subscribed before.
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
            fault: What was raised before it began; it is raised again.
            reason: Why it was cancelled.
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
        """Fail the raw event that it is on; without an error it was interrupted, and is not blamed."""
        if self.subscription is not None:
            self.subscription.fail_held(error)

    def end_run(self) -> None:
        """Forget where the events of the current run came from."""
        self.events = self.subscription = None

    def keep_seat(self) -> None:
        """Unsubscribe, and keep the seat for the next run or for the trigger that replaces this one."""
        key, self._key = self._key, None
        if key is not None:
            self._manager.keep_seat(self._name, key)
            self.seat = key

    def hand_over(self) -> None:
        """Leave the stream, or the seat there, to the process that has claimed the trigger."""
        if (key := self._take_key()) is not None:
            self._manager.hand_over(self._name, key)

    def leave(self) -> None:
        """Leave the stream, or the seat there, for good."""
        if (key := self._take_key()) is not None:
            self._manager.note_gone(self._name, key)

    def _take_key(self) -> Hashable | None:
        key = self._key if self._key is not None else self.seat
        self._key = self.seat = None
        return key


async def yield_nothing() -> AsyncIterator[TriggerEvent]:
    """Yield no event."""
    return
    yield


def _bind_nothing() -> None:
    return
