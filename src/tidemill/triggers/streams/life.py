"""What shared streams of both kinds have in common: limits, start and end.

One task polls, and another one closes the stream after it.

Invariants:
1. The end is reported synchronously (`on_end`), once, before anything is awaited: nothing can join a stream that is
   not polled.
2. `close` runs once, after the poll has ended; cancelling a caller that waits for it does not end it.
3. No step of the end takes longer than `STEP_SECONDS`: one that hangs is cancelled, named in the log, and left behind.
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

#: How many events are fanned out before the subscribers get a turn, if the source never waits for anything.
_BURST = 512
#: How long a broker that does not answer may hold up each step of the end; producers give up after 5 s themselves.
STEP_SECONDS: Final = 15.0
#: How long a step that is cancelled after that may take to end.
_CANCEL_SECONDS: Final = 1.0
#: How often seats and deadlines are checked while there are seats.
_SEAT_CHECK_SECONDS: Final = 0.5


async def at_once() -> None:
    """Wait for nothing."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The limits of a shared stream, as `SharedStreamManager` describes them."""

    max_subscriber_queue: int
    ack_timeout: float
    cohort_grace_period: float
    max_outstanding: int
    now: Callable[[], float]
    seat_seconds: float = 0.0
    step_seconds: float = STEP_SECONDS
    may_open: Callable[[], Awaitable[None]] = at_once
    counts: StreamCounts = field(default_factory=StreamCounts)

    @property
    def burst(self) -> int:
        """How many events may be fanned out in a row: never enough to overflow a subscriber that keeps up."""
        return max(1, min(_BURST, self.max_subscriber_queue // 2))

    @property
    def deadline_check_seconds(self) -> float:
        """How often deadlines are checked."""
        return max(0.01, self.ack_timeout / 10)

    @property
    def seat_check_seconds(self) -> float:
        """How often seats are checked, where there are any."""
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


class Stream(Protocol):
    """A shared stream of either kind, as the manager sees it."""

    key: Hashable
    subscriptions: dict[Any, Subscription]

    def start(self, before: Callable[[], Awaitable[None]] | None = None) -> None:
        """Begin to poll, after the grace period."""

    def subscribe(self, trigger_id: Any) -> AckSubscription | FastSubscription:
        """Subscribe a trigger."""

    def unsubscribe(self, trigger_id: Any) -> None:
        """End the subscription of a trigger."""

    def end(self) -> None:
        """End without failing anybody; synchronous."""

    async def stop(self) -> None:
        """End without failing anybody, and wait until everything is closed."""

    async def closed(self) -> None:
        """Wait until everything is closed, if it has ended."""


class Life:
    """The start, the end and the tasks of a stream of either kind.

    Args:
        key: The key of the stream.
        poll: Polls until it is cancelled; returning is a failure.
        close: Called once the poll has ended.
        on_end: Called at once when the stream has ended, with the error for all subscribers, or None if it was stopped.
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
        """Start nothing yet."""
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
        """Start the poll.

        Args:
            before: Awaited first: the close of an earlier stream over the same upstream.
        """
        self._before = before
        self._polling = asyncio.create_task(self._run(), name=f"shared-stream-poll[{self.key!r}]")

    def end(self, error: BaseException | None = None) -> None:
        """End the stream; synchronous. What has to be awaited is left to a task.

        Args:
            error: What every subscriber gets; None: nothing.
        """
        if self.ended:
            return
        self.ended = True
        self._on_end(error)
        if self._polling is not None:
            # Also when the poll itself calls: the event that it fanned out may have ended the last seat.
            self._polling.cancel()
        self._closing = asyncio.create_task(self._finish(), name=f"shared-stream-close[{self.key!r}]")

    async def stop(self) -> None:
        """End without failing anybody, and wait until everything is closed."""
        self.end()
        if self._closing is not None:
            # The caller may be cancelled; closing continues.
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
                self._log.exception("the poll of a shared stream failed; all its subscribers fail", key=self.key)
            self.end(error)
        else:
            self.end(
                StreamEnded(
                    f"the poll of the shared stream {self.key!r} returned; it is expected to run for the lifetime of "
                    f"the group: let it wait forever when there is nothing more"
                )
            )

    async def closed(self) -> None:
        """Wait until a stream that has ended is closed."""
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _finish(self) -> None:
        if self._polling is not None:
            await self.join("poll", self._polling)
        await self._close()

    async def join(self, what: str, task: asyncio.Task[Any]) -> None:
        """Wait for a task of the stream; one that takes too long is cancelled, and left behind if it does not notice.

        What it raises is not raised here.
        """
        # `wait` neither raises what the task raised nor ends when the task is cancelled.
        await asyncio.wait({task}, timeout=self._step_seconds)
        if not task.done():
            self._log.error(
                "a step of the end of a shared stream hangs; it is cancelled, and the stream ends without it",
                key=self.key,
                step=what,
                seconds=self._step_seconds,
            )
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_SECONDS)

    async def close_step(self, what: str, closing: Callable[[], Awaitable[Any]] | None) -> None:
        """Await a closing method, if there is one, for as long as a step may take; log what it raises."""
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
    """Return the error of a subscriber that was too slow."""
    return SubscriberOverflow(
        f"trigger {trigger_id} of the shared stream {key!r} is too slow: its queue of unread raw events exceeded "
        f"maxsize={queue}"
    )
