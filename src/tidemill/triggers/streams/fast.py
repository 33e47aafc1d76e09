"""A shared stream without acknowledgements: one task polls and fans out.

`core.streams.fanout` makes the decisions; this module carries them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Any

from tidemill.core.errors import describe_error
from tidemill.core.streams.fanout import Fanout, LogReader
from tidemill.triggers.streams.life import SharedStream, StreamLife, StreamSettings, build_overflow, wake_all
from tidemill.triggers.streams.stream_counts import Incident, IncidentKind
from tidemill.triggers.streams.subscription import FastSubscription, Subscription


class FastStream:
    """A shared stream whose events are not acknowledged.

    Args:
        key: The key of the stream.
        open_source: Opens the source of raw events.
        settings: The limits.
        on_end: Called synchronously when the stream has ended.
        on_closed: Called when all resources are closed.
        log: A structlog logger.
    """

    def __init__(
        self,
        key: Hashable,
        open_source: Callable[[], AsyncIterator[Any]],
        settings: StreamSettings,
        on_end: Callable[[SharedStream, BaseException | None], None],
        on_closed: Callable[[SharedStream], None],
        log: Any,
    ) -> None:
        self.key = key
        self.subscriptions: dict[Any, Subscription] = {}
        self._settings = settings
        self._open_source = open_source
        self._source: AsyncIterator[Any] | None = None
        self._log = log
        self._on_end = on_end
        self._on_closed = on_closed
        self._fanout: Fanout[Any, LogReader[Any]] = Fanout(settings.max_subscriber_queue)
        self._waiting: dict[Subscription, None] = {}
        self._life = StreamLife(key, self._poll, self._close, self._end, log, settings.step_seconds)
        self.start = self._life.start
        self.end: Callable[[], None] = self._life.end
        self.stop = self._life.stop
        self.closed = self._life.closed

    def subscribe(self, trigger_id: Any) -> FastSubscription:
        """Subscribe a trigger to all events from now on."""
        reader: LogReader[Any] = LogReader(trigger_id)
        self._fanout.join(reader)
        subscription = FastSubscription(reader, self._fanout, self._waiting)
        self.subscriptions[trigger_id] = subscription
        return subscription

    def unsubscribe(self, trigger_id: Any) -> None:
        """End the subscription of a trigger."""
        subscription = self.subscriptions.pop(trigger_id)
        assert isinstance(subscription, FastSubscription)
        self._drop(subscription)
        subscription.end.leave()

    def _drop(self, subscription: FastSubscription) -> None:
        if subscription.reader.present:
            self._fanout.leave(subscription.reader)
            subscription.drop()

    async def _poll(self) -> None:
        if self._settings.cohort_grace_period > 0:
            await asyncio.sleep(self._settings.cohort_grace_period)
        fanout, waiting, burst = self._fanout, self._waiting, self._settings.burst
        left = burst
        self._source = source = self._open_source()
        async for event in source:
            # `fanout.publish`, inlined because it runs for every event.
            fanout.items.append(event)
            fanout.room = room = fanout.room - 1
            if not room:
                for reader in fanout.find_late():
                    self._overflow(reader)
            if waiting:
                # The subscribers have had a turn since.
                left = burst
                wake_all(waiting)
            left -= 1
            if not left:
                left = burst
                await asyncio.sleep(0)

    def _overflow(self, reader: LogReader[Any]) -> None:
        subscription = self.subscriptions[reader.name]
        assert isinstance(subscription, FastSubscription)
        self._drop(subscription)
        error = build_overflow(self.key, reader.name, self._settings.max_subscriber_queue)
        counts = self._settings.counts
        counts.find_tally(self.key).forced += 1
        counts.tell(Incident(IncidentKind.OVERFLOW, self.key, reader.name, text=str(error)))
        end = subscription.end
        end.failed_at = self._settings.now()
        end.fail(error)
        self._log.warning("failing a slow subscriber of a shared stream", key=self.key, trigger_id=reader.name)

    def _end(self, error: BaseException | None) -> None:
        self._on_end(self, error)
        if error is not None:
            counts = self._settings.counts
            counts.find_tally(self.key).ended += 1
            counts.tell(Incident(IncidentKind.STREAM_FAILED, self.key, text=describe_error(error)))
        for subscription in self.subscriptions.values():
            assert isinstance(subscription, FastSubscription)
            self._drop(subscription)
            if error is not None:
                subscription.end.fail(error)

    async def _close(self) -> None:
        await self._life.close_step("source", getattr(self._source, "aclose", None))
        self._on_closed(self)
