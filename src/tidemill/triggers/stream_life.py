"""What shared streams of both kinds have in common: their limits, how they start and how they end.

One task polls, and one closes after it.

Invariants:
1. The end is told synchronously (`on_end`), once, before anything is awaited: nobody can join what is not polled.
2. `close` runs once, after the poll has ended; nothing that a waiting caller suffers ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from tidemill.triggers.stream_api import StreamEnded, SubscriberOverflow
from tidemill.triggers.subscription import Subscription

#: How many events are fanned out before the subscribers get a turn, if their source never waits for anything.
_BURST = 512


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The limits of a shared stream, as `SharedStreamManager` describes them."""

    max_subscriber_queue: int
    ack_timeout: float
    cohort_grace_period: float
    max_outstanding: int
    now: Callable[[], float]

    @property
    def burst(self) -> int:
        """How many events may be fanned out at one go: never so many that who keeps up overflows."""
        return max(1, min(_BURST, self.max_subscriber_queue // 2))

    @property
    def deadline_check_seconds(self) -> float:
        """How often deadlines are looked at."""
        return max(0.01, self.ack_timeout / 10)


class Stream(Protocol):
    """A shared stream of either kind, as the manager sees it."""

    key: Hashable
    subscriptions: dict[Any, Subscription]

    def start(self) -> None:
        """Begin to poll, after the grace period."""

    def subscribe(self, trigger_id: Any) -> AsyncIterator[Any]:
        """Let a trigger take part."""

    def unsubscribe(self, trigger_id: Any) -> None:
        """Let it go."""

    def end(self) -> None:
        """End without failing anybody; synchronous."""

    async def stop(self) -> None:
        """End so, and wait until all is closed."""


class Life:
    """Start, end and tasks of a stream, whatever its kind.

    Args:
        key: What the stream is known by.
        poll: What polls, until it is cancelled; a return is a failure.
        close: What is to be done once the poll has ended.
        on_end: Told at once that the stream has ended, with what every subscriber gets, or None if it was stopped.
        log: A structlog logger.
    """

    def __init__(
        self,
        key: Hashable,
        poll: Callable[[], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
        on_end: Callable[[BaseException | None], None],
        log: Any,
    ) -> None:
        """Do nothing yet."""
        self.key = key
        self.ended = False
        self._poll = poll
        self._close = close
        self._on_end = on_end
        self._log = log
        self._polling: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the poll."""
        self._polling = asyncio.create_task(self._run(), name=f"shared-stream-poll[{self.key!r}]")

    def end(self, error: BaseException | None = None) -> None:
        """End the stream; synchronous. What needs to be awaited, a task of its own does.

        Args:
            error: What every subscriber gets; None: nobody gets anything.
        """
        if self.ended:
            return
        self.ended = True
        self._on_end(error)
        if self._polling is not None and self._polling is not asyncio.current_task():
            self._polling.cancel()
        self._closing = asyncio.create_task(self._finish(), name=f"shared-stream-close[{self.key!r}]")

    async def stop(self) -> None:
        """End without failing anybody, and wait until all is closed."""
        self.end()
        if self._closing is not None:
            # Who waits may be cancelled; closing goes on.
            await asyncio.shield(self._closing)

    async def _run(self) -> None:
        try:
            await self._poll()
        except asyncio.CancelledError:
            self.end(StreamEnded(f"the poll of the shared stream {self.key!r} was cancelled"))
            raise
        except Exception as error:
            if not self.ended:
                self._log.exception("the poll of a shared stream failed; all its subscribers fail", key=self.key)
            self.end(error)
        else:
            self.end(
                StreamEnded(
                    f"the poll of the shared stream {self.key!r} returned; it is expected to run for the lifetime of "
                    f"the group: let it wait for ever when there is nothing more"
                )
            )

    async def _finish(self) -> None:
        polling = self._polling
        if polling is not None:
            # `wait` neither raises what the poll raised nor is ended by its being cancelled.
            await asyncio.wait({polling})
        await self._close()


async def close_quietly(what: str, closing: Callable[[], Awaitable[Any]] | None, key: Hashable, log: Any) -> None:
    """Await a closing method, if there is one; log what it raises."""
    if closing is not None:
        try:
            await closing()
        except Exception as error:
            log.warning(f"closing the {what} of a shared stream failed", key=key, exc_info=error)


def wake_all(waiting: dict[Subscription, None]) -> None:
    """Let everybody who waits for an event look."""
    for subscription in waiting:
        subscription.end.wake()
    waiting.clear()


def overflow_of(key: Hashable, trigger_id: Any, queue: int) -> SubscriberOverflow:
    """Say who was too slow for what."""
    return SubscriberOverflow(
        f"trigger {trigger_id} of the shared stream {key!r} is too slow: its queue of unread raw events exceeded "
        f"maxsize={queue}"
    )
