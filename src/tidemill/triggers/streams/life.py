"""The part that both kinds of shared streams have in common: limits, start and end.

One task polls; another closes the stream afterwards.

Invariants:
1. The end is reported synchronously (`on_end`), once, before anything is awaited, so nothing can join a stream that is
   no longer polled.
2. `close` runs once, after the poll has ended; cancelling a caller that waits for it does not cancel it.
3. No step of the end takes longer than `STEP_SECONDS`: a step that hangs is cancelled, logged, and left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from tidemill.core.streams.members import StreamLimits
from tidemill.triggers.stream_api import StreamEnded, SubscriberOverflow
from tidemill.triggers.streams.stream_counts import StreamCounts
from tidemill.triggers.streams.subscription import AckSubscription, FastSubscription, Subscription

#: How many events are fanned out before the subscribers get a turn, if the source never waits.
_BURST = 512
#: How long an unresponsive broker may delay each step of the end; producers themselves give up after 5 s.
STEP_SECONDS: Final = 15.0
#: How long a step may take to end after it was cancelled.
_CANCEL_SECONDS: Final = 1.0
#: How often seats and deadlines are checked while there are seats.
_SEAT_CHECK_SECONDS: Final = 0.5


async def at_once() -> None:
    """Return at once."""


async def always() -> bool:
    """Return True."""
    return True


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The limits of a shared stream; `SharedStreamManager` documents them."""

    max_subscriber_queue: int
    ack_timeout: float
    cohort_grace_period: float
    max_outstanding: int
    now: Callable[[], float]
    seat_seconds: float = 0.0
    step_seconds: float = STEP_SECONDS
    may_open: Callable[[], Awaitable[None]] = at_once
    counts: StreamCounts = field(default_factory=StreamCounts)
    may_advance: Callable[[], Awaitable[bool]] = always

    @property
    def burst(self) -> int:
        """The number of events to fan out in a row, low enough never to overflow a subscriber that keeps up."""
        return max(1, min(_BURST, self.max_subscriber_queue // 2))

    @property
    def deadline_check_seconds(self) -> float:
        """The interval at which deadlines are checked."""
        return max(0.01, self.ack_timeout / 10)

    @property
    def seat_check_seconds(self) -> float:
        """The interval at which seats are checked while there are any."""
        return min(self.deadline_check_seconds, _SEAT_CHECK_SECONDS, max(0.01, self.seat_seconds / 10))

    @property
    def limits(self) -> StreamLimits:
        """The limits of the group."""
        return StreamLimits(
            self.max_subscriber_queue,
            self.ack_timeout,
            self.max_outstanding,
            self.seat_seconds,
            min(5.0, self.seat_seconds),
        )


class SharedStream(Protocol):
    """A shared stream of either kind, as the manager uses it."""

    key: Hashable
    subscriptions: dict[Any, Subscription]

    def start(self, before: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start polling after the grace period; `before` is awaited first."""

    def subscribe(self, trigger_id: Any) -> AckSubscription | FastSubscription: ...

    def unsubscribe(self, trigger_id: Any) -> None: ...

    def end(self) -> None:
        """End the stream, synchronously, without failing any subscriber."""

    async def stop(self) -> None:
        """End the stream without failing any subscriber, and wait until all resources are closed."""

    async def closed(self) -> None:
        """If the stream has ended, wait until all resources are closed."""


class StreamLife:
    """The start, the end and the tasks of a stream of either kind.

    Args:
        key: The key of the stream.
        poll: Polls until it is cancelled; returning is a failure.
        close: Called once the poll has ended.
        on_end: Called at once when the stream has ended, with the error for all subscribers; None if it was stopped.
        log: A structlog logger.
        step_seconds: How long one step of the end may take.
    """

    def __init__(
        self,
        key: Hashable,
        poll: Callable[[], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
        on_end: Callable[[BaseException | None], None],
        log: Any,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        self.key = key
        self.ended = False
        self._step_seconds = step_seconds
        self._before: Callable[[], Awaitable[None]] | None = None
        self._poll = poll
        self._close = close
        self._on_end = on_end
        self._log = log
        self._polling: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def start(self, before: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start polling.

        Args:
            before: Awaited first: the close of an earlier stream over the same upstream.
        """
        self._before = before
        self._polling = asyncio.create_task(self._run(), name=f"shared-stream-poll[{self.key!r}]")

    def end(self, error: BaseException | None = None) -> None:
        """End the stream, synchronously; steps that must be awaited run in a task.

        Args:
            error: The error for every subscriber; None: end without an error.
        """
        if self.ended:
            return
        self.ended = True
        self._on_end(error)
        if self._polling is not None:
            # This may run inside the poll itself: the event that it fanned out may have ended the last seat.
            self._polling.cancel()
        self._closing = asyncio.create_task(self._finish(), name=f"shared-stream-close[{self.key!r}]")

    async def stop(self) -> None:
        """End the stream without failing any subscriber, and wait until all resources are closed."""
        self.end()
        if self._closing is not None:
            # Closing continues even if the caller is cancelled.
            await asyncio.shield(self._closing)

    async def _run(self) -> None:
        try:
            if self._before is not None:
                await self._before()
            await self._poll()
        except asyncio.CancelledError:
            self.end(StreamEnded(f"the poll of the shared stream {self.key!r} was cancelled"))
            raise
        except (Exception, SystemExit) as error:
            if not self.ended:
                self._log.exception("the poll of a shared stream failed; failing all its subscribers", key=self.key)
            self.end(error)
        else:
            self.end(
                StreamEnded(
                    f"the poll of the shared stream {self.key!r} returned; it is expected to run for the lifetime of "
                    f"the group; when there are no more events, wait forever instead of returning"
                )
            )

    async def closed(self) -> None:
        """If the stream has ended, wait until it is closed."""
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _finish(self) -> None:
        if self._polling is not None:
            await self.join("poll", self._polling)
        await self._close()

    async def join(self, what: str, task: asyncio.Task[Any]) -> None:
        """Wait for a task of the stream; cancel it if it takes too long, and leave it behind if it ignores that.

        Exceptions of the task are not raised here.
        """
        # `wait` does not raise the task's exception, and does not cancel the task if the caller is cancelled.
        await asyncio.wait({task}, timeout=self._step_seconds)
        if not task.done():
            self._log.error(
                "closing a shared stream hangs; cancelling the step and continuing without it",
                key=self.key,
                step=what,
                seconds=self._step_seconds,
            )
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_SECONDS)

    async def close_step(self, what: str, closing: Callable[[], Awaitable[Any]] | None) -> None:
        """Await a close method, if there is one, for at most the time of one step; log exceptions."""
        if closing is None:
            return

        async def step() -> None:
            try:
                await closing()
            except (Exception, SystemExit) as error:
                self._log.warning(f"closing the {what} of a shared stream failed", key=self.key, exc_info=error)

        await self.join(f"close of the {what}", asyncio.create_task(step(), name=f"shared-stream-{what}[{self.key!r}]"))


def wake_all(waiting: dict[Subscription, None]) -> None:
    """Wake every subscription that waits for an event."""
    for subscription in waiting:
        subscription.end.wake()
    waiting.clear()


def build_overflow(key: Hashable, trigger_id: Any, queue: int) -> SubscriberOverflow:
    """Return the error for a subscriber that was too slow."""
    return SubscriberOverflow(
        f"trigger {trigger_id} of the shared stream {key!r} is too slow: its queue of unread raw events exceeded "
        f"maxsize={queue}"
    )
