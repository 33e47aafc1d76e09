"""A subscriber's end of a shared stream: the async iterator that its filter pulls raw events from.

Pulling an event moves past the one before; nothing else is required of a filter. What is there to be read is taken
from the log without a switch to the loop; a pull waits only when nothing is there. After a failure every pull raises it
again; after leaving, the iterator has ended; `stop_all` ends nothing: a pull then waits until it is cancelled.

`__anext__` is a coroutine per delivery, the price of an iterator that any task may drive; so it does as little as
possible, and the rest is in `_next`. An `async for` never sees what it awaits, so where many read what is not
acknowledged, it awaits futures that are made once for all of them (`_Ahead`).
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
from tidemill.core.streams.members import Member, Refusal, Sent
from tidemill.triggers.streams.async_for import is_async_for
from tidemill.triggers.streams.bell import Bell

#: From this many subscribers on, a future per event costs less than a coroutine per delivery.
_MANY: Final = 3


class End:
    """How a subscription waits and how it ends; the part that fast and acking subscriptions share."""

    __slots__ = ("_future", "_traceback", "error", "failed_at", "left")

    def __init__(self) -> None:
        """Start open."""
        self._future: asyncio.Future[None] | None = None
        self._traceback: TracebackType | None = None
        self.error: BaseException | None = None
        self.failed_at: float | None = None
        self.left = False

    def fail(self, error: BaseException) -> None:
        """Make every pull raise an error from now on; the first error counts."""
        if self.error is None:
            self.error = error
            self._traceback = error.__traceback__
            self.wake()

    def leave(self) -> None:
        """Make every pull end the iteration."""
        self.left = True
        self.wake()

    def check(self) -> None:
        """Raise the error, or end the iteration, if the subscription has ended."""
        if self.error is not None:
            # It is raised in many tasks, maybe often: each time with its original traceback.
            raise self.error.with_traceback(self._traceback)
        if self.left:
            raise StopAsyncIteration

    def wake(self) -> None:
        """Let a waiting pull look again."""
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
    """What both kinds of subscription have in common."""

    @property
    def end(self) -> End:
        """How it waits and ends."""

    @property
    def taken(self) -> int:
        """How many events it has read."""

    def fail_held(self, error: str | None) -> None:
        """Fail the event that it is on."""


class FastSubscription:
    """A subscriber of a stream that is not acknowledged.

    Args:
        reader: Its position in the log.
        log: That log.
        waiting: It adds itself here to be woken by the next event.
    """

    __slots__ = ("_ahead", "_from", "_log", "_unread", "_waiting", "end", "reader")

    def __init__(
        self, reader: LogReader[Any], log: Fanout[Any, LogReader[Any]], waiting: dict[Subscription, None]
    ) -> None:
        """Start at the current position."""
        self.reader = reader
        self._unread = reader.unread
        self._ahead: _Ahead | None = None
        self.end = End()
        self._log = log
        self._waiting = waiting
        self._from = reader.position

    @property
    def taken(self) -> int:
        """How many events it has read."""
        return self.reader.position - self._from

    def fail_held(self, error: str | None) -> None:
        """Do nothing: nothing is acknowledged here."""
        return

    def __aiter__(self) -> FastSubscription | _Ahead:
        """Return itself; for an `async for` over what many subscribers read, what costs less per event."""
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
        """Wait until there is something to read."""
        if _CURRENT.get() is not None:
            _CURRENT.set(None)
        # What was read ahead ends before the chunk does.
        while not (length_hint(self.reader.unread) or self._log.load_more(self.reader)):
            self.end.check()
            self._waiting[self] = None
            await self.end.wait()

    async def read_ahead(self, ahead: _Ahead) -> Any:
        """Return the next raw event, and take those after it ahead."""
        await self._wait_unread()
        futures = self.reader.take_all(_build_futures)
        futures.reverse()
        first = futures.pop()
        ahead[1:] = futures
        self._unread = ahead.yield_events()
        return first.result()

    def drop(self) -> None:
        """Discard what is unread."""
        self._unread = iter(())
        if self._ahead is not None:
            del self._ahead[1:]


class _Ahead(list[Any]):
    """What a subscriber has taken ahead, as futures that are done, last first; the iterator of an `async for`.

    A delivery is then `list.pop`, and the `await` of a future that is done: no code of ours runs. The first element is
    the list itself: to await it is to take more.
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
        """Return how many events there are."""
        return max(0, super().__len__() - 1)

    def yield_events(self) -> Iterator[Any]:
        """Take the events one by one."""
        while len(self):
            yield self.pop().result()


def _build_futures(events: Sequence[Any]) -> list[asyncio.Future[Any]]:
    """Return a future for each event that is done."""
    future, loop = asyncio.Future, asyncio.get_running_loop()
    futures: list[asyncio.Future[Any]] = [future(loop=loop) for _ in events]
    for each, event in zip(futures, events, strict=True):
        each.set_result(event)
    return futures


class AckSubscription:
    """A subscriber of a stream that is acknowledged.

    Args:
        member: Its member of the group.
        group: The group.
        waiting: It adds itself here to be woken by the next event.
        pump: Rung when it has moved.
        note_rejected: Called with the member's name and each event that it rejects.
    """

    __slots__ = ("_from", "_group", "_note_rejected", "_pump", "_waiting", "bind", "end", "member")

    def __init__(
        self,
        member: Member[Any, Any, Any],
        group: StreamGroup[Any, Any, Any],
        waiting: dict[Subscription, None],
        pump: Bell,
        note_rejected: Callable[[Any, Sent[Any, Any, Any]], None],
    ) -> None:
        """Start at the current position."""
        self._note_rejected = note_rejected
        self.member = member
        self.end = End()
        self._group = group
        self._waiting = waiting
        self._pump = pump
        self._from = member.position
        #: Makes the event that it is on wait for what was derived from it; see `PendingEvents.bind_pending_event`.
        self.bind: Callable[[], int | None] = partial(group.bind, member)

    @property
    def taken(self) -> int:
        """How many events it has read."""
        return self.member.position - self._from

    def __aiter__(self) -> AckSubscription | _AckLoop:
        """Return itself, or what costs less where nobody sees what is awaited."""
        return _AckLoop(self, self.member, self._pump) if is_async_for(sys._getframe(1)) else self

    def __anext__(self) -> Coroutine[Any, Any, Any]:
        """Return what moves past the event that it is on, and returns the next one.

        Who calls this can reject that event, whichever task awaits it: `asyncio.wait_for` starts one.
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

    async def take_later(self) -> Sent[Any, Any, Any]:
        """Wait until there is an event to be read, and be on it."""
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
        """Fail the event that it is on, at once; what it moved past is acked once stored, and fails if that is refused.

        Args:
            error: Why; None: it was interrupted through no fault of its own.
        """
        self._group.fail_held(self.member, error)
        self._pump.ring()

    def reject(self, sent: Sent[Any, Any, Any]) -> Refusal:
        """Reject an event, if it is still on it."""
        refusal = self._group.reject(self.member, sent)
        if refusal is Refusal.REJECTED:
            self._note_rejected(self.member.name, sent)
        self._pump.ring()
        return refusal


class _AckLoop:
    """What an `async for` reads an `AckSubscription` by."""

    __slots__ = ("_member", "_pump", "_subscription")

    def __init__(self, subscription: AckSubscription, member: Member[Any, Any, Any], pump: Bell) -> None:
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
            # The task that drives the filter, and the tasks that it starts from here, can reject this event.
            _set_current((self._subscription, sent))
            if not self._pump.rung:
                self._pump.ring()
            return sent.event
        sent = await self._subscription.take_later()
        _set_current((self._subscription, sent))
        return sent.event


class _Request:
    """A call of `__anext__`: it is known to who made it, and answered in whichever task awaits it."""

    __slots__ = ("sent", "subscription")

    def __init__(self, subscription: AckSubscription, sent: Sent[Any, Any, Any] | None) -> None:
        self.subscription = subscription
        self.sent = sent


#: The subscription that the running filter reads from, and the event that it is on; a task that it started keeps those
#: of its start. A pair in one variable costs less than two variables; all of it costs a sixth of a delivery.
_CURRENT: ContextVar[tuple[AckSubscription, Sent[Any, Any, Any]] | _Request | None] = ContextVar(
    "tidemill_event", default=None
)
_set_current = _CURRENT.set


def find_current() -> tuple[AckSubscription, Sent[Any, Any, Any]] | None:
    """Return the subscription that the calling filter reads from, and the event that it is on, if there is one."""
    current = _CURRENT.get()
    if isinstance(current, _Request):
        return None if current.sent is None else (current.subscription, current.sent)
    return current
