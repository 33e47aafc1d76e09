"""A subscription to a shared stream: the async iterator from which a filter pulls raw events.

Pulling an event moves past the previous one; a filter need not do anything else. Available events are read from the log
without switching to the loop; a pull waits only when there is none. After a failure every pull raises the same error;
after leaving, the iteration has ended. `stop_all` does not end the iteration: a pull then waits until it is cancelled.

`__anext__` must be a coroutine, because any task may drive the iterator. That costs one coroutine per delivery, so it
does as little as possible and leaves the rest to `_next`. An `async for` never exposes the awaited object; if many
subscribers read an unacknowledged stream, it awaits futures that they all share (`_Ahead`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from operator import length_hint
from types import TracebackType
from typing import Any, Final, Protocol

from tidemill.core.streams.fanout import Fanout, LogReader
from tidemill.core.streams.group import StreamGroup
from tidemill.core.streams.members import Member, RejectOutcome, SentEvent
from tidemill.triggers.streams.async_for import is_async_for
from tidemill.triggers.streams.bell import WakeBell

#: From this number of subscribers on, one future per event is cheaper than one coroutine per delivery.
_MANY: Final = 3


class SubscriptionEnd:
    """How a subscription waits and ends; shared by both kinds of subscriptions."""

    __slots__ = ("_future", "_traceback", "error", "failed_at", "left")

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self._traceback: TracebackType | None = None
        self.error: BaseException | None = None
        self.failed_at: float | None = None
        self.left = False

    def fail(self, error: BaseException) -> None:
        """Make every further pull raise an error; the first error wins."""
        if self.error is None:
            self.error = error
            self._traceback = error.__traceback__
            self.wake()

    def leave(self) -> None:
        """Make every further pull end the iteration."""
        self.left = True
        self.wake()

    def check(self) -> None:
        """Raise the error or end the iteration if the subscription has ended."""
        if self.error is not None:
            # Many tasks may raise this error, repeatedly; restore its original traceback each time.
            raise self.error.with_traceback(self._traceback)
        if self.left:
            raise StopAsyncIteration

    def wake(self) -> None:
        """Make a waiting pull check again."""
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self) -> None:
        """Wait for `wake`."""
        if self._future is not None:
            raise RuntimeError("two tasks pull from the same subscription of a shared stream at once")
        self._future = asyncio.get_running_loop().create_future()
        try:
            await self._future
        finally:
            self._future = None


class Subscription(Protocol):
    """The interface of both kinds of subscriptions."""

    @property
    def end(self) -> SubscriptionEnd:
        """How the subscription waits and ends."""

    @property
    def taken(self) -> int:
        """The number of events read."""

    def fail_held(self, error: str | None) -> None:
        """Fail the current event."""

    def move_past(self) -> None:
        """Move past the current event without requesting another one."""


class FastSubscription:
    """A subscription to a stream without acknowledgements.

    Args:
        reader: The position in the log.
        log: The log.
        waiting: The subscription adds itself here to be woken by the next event.
    """

    __slots__ = ("_ahead", "_from", "_log", "_unread", "_waiting", "end", "reader")

    def __init__(
        self, reader: LogReader[Any], log: Fanout[Any, LogReader[Any]], waiting: dict[Subscription, None]
    ) -> None:
        self.reader = reader
        self._unread = reader.unread
        self._ahead: _Ahead | None = None
        self.end = SubscriptionEnd()
        self._log = log
        self._waiting = waiting
        self._from = reader.position

    @property
    def taken(self) -> int:
        """The number of events read."""
        return self.reader.position - self._from

    def fail_held(self, error: str | None) -> None:
        """Do nothing, because events are not acknowledged here."""
        return

    def move_past(self) -> None:
        """Do nothing, because events are not acknowledged here."""
        return

    def __aiter__(self) -> FastSubscription | _Ahead:
        """Return this iterator, or a cheaper one for an `async for` if many subscribers read the stream."""
        if self._log.size < _MANY or not is_async_for(sys._getframe(1)):
            return self
        if self._ahead is None:
            self.reader.ahead = self._ahead = _Ahead(self)
        return self._ahead

    async def __anext__(self) -> Any:
        """Return the next raw event."""
        for event in self._unread:
            return event
        return await self._next()

    async def _next(self) -> Any:
        await self._wait_unread()
        self._unread = self.reader.unread
        return next(self._unread)

    async def _wait_unread(self) -> None:
        """Wait until there is an event to read."""
        if _CURRENT.get() is not None:
            _CURRENT.set(None)
        # `reader.unread` may be exhausted by reading ahead before the chunk of the log is.
        while not (length_hint(self.reader.unread) or self._log.load_more(self.reader)):
            self.end.check()
            self._waiting[self] = None
            await self.end.wait()

    async def read_ahead(self, ahead: _Ahead) -> Any:
        """Return the next raw event, and prepare the following ones in `ahead`."""
        await self._wait_unread()
        futures = self.reader.take_all(_build_futures)
        futures.reverse()
        first = futures.pop()
        ahead[1:] = futures
        self._unread = ahead.yield_events()
        return first.result()

    def drop(self) -> None:
        """Discard all unread events."""
        self._unread = iter(())
        if self._ahead is not None:
            del self._ahead[1:]


class _Ahead(list[Any]):
    """Events that a subscriber has read ahead, as finished futures in reverse order; the iterator for an `async for`.

    A delivery is then a `list.pop` and an `await` of a finished future, without running any of our code. The first
    element is the list itself; awaiting it reads more events.
    """

    __slots__ = ("_subscription",)

    def __init__(self, subscription: FastSubscription) -> None:
        super().__init__((self,))
        self._subscription = subscription

    __anext__ = list.pop

    def __aiter__(self) -> _Ahead:
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        self.append(self)
        return self._subscription.read_ahead(self).__await__()

    def __len__(self) -> int:
        """Return the number of events."""
        return max(0, super().__len__() - 1)

    def yield_events(self) -> Iterator[Any]:
        """Remove and yield the events one by one."""
        while len(self):
            yield self.pop().result()


def _build_futures(events: Sequence[Any]) -> list[asyncio.Future[Any]]:
    """Return a finished future for each event."""
    future, loop = asyncio.Future, asyncio.get_running_loop()
    futures: list[asyncio.Future[Any]] = [future(loop=loop) for _ in events]
    for each, event in zip(futures, events, strict=True):
        each.set_result(event)
    return futures


class AckSubscription:
    """A subscription to a stream with acknowledgements.

    Args:
        member: The subscriber's member of the group.
        group: The group.
        waiting: The subscription adds itself here to be woken by the next event.
        pump: Rung when the subscriber has moved past an event.
        note_rejected: Called with the member's name and each event that it rejects.
    """

    __slots__ = ("_from", "_group", "_note_rejected", "_pump", "_waiting", "bind", "end", "member")

    def __init__(
        self,
        member: Member[Any, Any, Any],
        group: StreamGroup[Any, Any, Any],
        waiting: dict[Subscription, None],
        pump: WakeBell,
        note_rejected: Callable[[Any, SentEvent[Any, Any, Any]], None],
    ) -> None:
        self._note_rejected = note_rejected
        self.member = member
        self.end = SubscriptionEnd()
        self._group = group
        self._waiting = waiting
        self._pump = pump
        self._from = member.position
        #: Makes the current event wait for an event derived from it; see `PendingEvents.bind_pending_event`.
        self.bind: Callable[[], int | None] = partial(group.bind, member)

    @property
    def taken(self) -> int:
        """The number of events read."""
        return self.member.position - self._from

    def __aiter__(self) -> AckSubscription | _AckLoop:
        """Return this iterator, or a cheaper one for an `async for`, which never exposes the awaited object."""
        return _AckLoop(self, self.member, self._pump) if is_async_for(sys._getframe(1)) else self

    def __anext__(self) -> Coroutine[Any, Any, Any]:
        """Return a coroutine that moves past the current event and returns the next one.

        The caller of this method can reject that event, whichever task awaits the coroutine; `asyncio.wait_for` starts
        one.
        """
        request = _Request(self, self.member.window)
        _set_current(request)
        return self._answer(request)

    async def _answer(self, request: _Request) -> Any:
        sent = next(self.member.unread, None)
        if sent is None:
            sent = await self.take_later()
        else:
            if self.member.newest:
                self.member.carry()
            self.member.window = sent
            self._pump.ring()
        request.sent = sent
        _set_current(request)
        return sent.event

    async def take_later(self) -> SentEvent[Any, Any, Any]:
        """Wait for an event, and make it the current one."""
        group, member = self._group, self.member
        while not group.load_more(member):
            self._pump.ring()
            self.end.check()
            self._waiting[self] = None
            await self.end.wait()
        self._pump.ring()
        member.window = sent = next(member.unread)
        return sent

    def fail_held(self, error: str | None) -> None:
        """Fail the current event at once; events moved past are acked once stored, and fail if the store refuses them.

        Args:
            error: The reason; None if the subscriber was interrupted through no fault of its own.
        """
        self._group.fail_held(self.member, error)
        self._pump.ring()

    def move_past(self) -> None:
        """Move past the current event: it is acked once its derived events are stored."""
        self._group.move_past(self.member)
        self._pump.ring()

    def reject(self, sent: SentEvent[Any, Any, Any]) -> RejectOutcome:
        """Reject an event if it is still the current one."""
        refusal = self._group.reject(self.member, sent)
        if refusal is RejectOutcome.REJECTED:
            self._note_rejected(self.member.name, sent)
        self._pump.ring()
        return refusal


class _AckLoop:
    """The iterator of an `AckSubscription` for an `async for`."""

    __slots__ = ("_member", "_pump", "_subscription")

    def __init__(self, subscription: AckSubscription, member: Member[Any, Any, Any], pump: WakeBell) -> None:
        self._subscription = subscription
        self._member = member
        self._pump = pump

    def __aiter__(self) -> _AckLoop:
        return self

    async def __anext__(self) -> Any:
        member = self._member
        for sent in member.unread:
            if member.newest:
                member.carry()
            member.window = sent
            # The task that drives the filter, and tasks that it starts from here on, can reject this event.
            _set_current((self._subscription, sent))
            if not self._pump.rung:
                self._pump.ring()
            return sent.event
        sent = await self._subscription.take_later()
        _set_current((self._subscription, sent))
        return sent.event


class _Request:
    """A call of `__anext__`: bound to its caller's context, and answered in whichever task awaits it."""

    __slots__ = ("sent", "subscription")

    def __init__(self, subscription: AckSubscription, sent: SentEvent[Any, Any, Any] | None) -> None:
        self.subscription = subscription
        self.sent = sent


#: The subscription that the running filter reads from, and its current event; a task started by the filter keeps the
#: values from its start. One variable with a pair is cheaper than two variables; setting it takes a sixth of the time
#: of a delivery.
_CURRENT: ContextVar[tuple[AckSubscription, SentEvent[Any, Any, Any]] | _Request | None] = ContextVar(
    "tidemill_event", default=None
)
_set_current = _CURRENT.set


def find_current() -> tuple[AckSubscription, SentEvent[Any, Any, Any]] | None:
    """Return the subscription that the calling filter reads from, and its current event; None outside of a filter."""
    current = _CURRENT.get()
    if isinstance(current, _Request):
        return None if current.sent is None else (current.subscription, current.sent)
    return current
