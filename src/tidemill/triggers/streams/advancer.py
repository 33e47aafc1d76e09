"""Tells the producer of a shared stream which events its subscribers have resolved, lane by lane.

Invariants: one task awaits `advance`, one call at a time; there is no call after one that raised, or after the stream
was abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from tidemill.core.errors import describe_error
from tidemill.core.ledger import LedgerBatch
from tidemill.core.streams.group import StreamGroup
from tidemill.triggers.stream_api import (
    AdvanceItem,
    AdvanceOutcome,
    SharedStreamProducer,
    StreamEnded,
    SubscriberObserver,
)
from tidemill.triggers.streams.bell import WakeBell
from tidemill.triggers.streams.life import always
from tidemill.triggers.streams.stream_counts import Incident, IncidentKind, LaneTally, StreamCounts

#: The number of lanes whose tallies are cached, to avoid building their names again.
_KNOWN_LANES = 1_024


class Advancer:
    """Advances the resolved events of one stream.

    Args:
        key: The key of the stream.
        group: Decides which events are resolved.
        room: Rung when the group is no longer full.
        on_failed: Called when `advance` raised, with the error for every subscriber.
        log: A structlog logger.
        counts: Where advanced events are counted.
        may_advance: Returns when events may be advanced; False: they may not any more.

    Attributes:
        pump: Rung when an event may have been resolved.
    """

    def __init__(
        self,
        key: Hashable,
        group: StreamGroup[Hashable, Any, Any],
        room: WakeBell,
        on_failed: Callable[[BaseException], None],
        log: Any,
        counts: StreamCounts,
        may_advance: Callable[[], Awaitable[bool]] = always,
    ) -> None:
        self._may_advance = may_advance
        self.pump = WakeBell()
        self._key = key
        self._group = group
        self._room = room
        self._on_failed = on_failed
        self._log = log
        self._counts = counts
        self._tally = counts.find_tally(key)
        self._lanes: dict[Hashable, LaneTally] = {}
        self._drained = WakeBell()
        # No further event will be advanced.
        self._abandoned = False
        # No further event can be resolved.
        self._final = False

    @property
    def abandoned(self) -> bool:
        """Whether advancing has stopped for good."""
        return self._abandoned

    async def run(self, producer: SharedStreamProducer, observer: SubscriberObserver | None) -> None:
        """Advance resolved events until `finish` is called, then advance the rest and return."""
        group = self._group
        while True:
            final = self._final
            while not self._abandoned and (batch := group.take()) is not None:
                if not await self._may_advance() or self._abandoned:
                    self.abandon()
                    return
                if observer is not None:
                    self._report_failures(observer, batch)
                try:
                    await producer.advance(_build_items(batch))
                except (Exception, SystemExit, asyncio.CancelledError) as error:
                    self._fail(batch, error)
                    return
                full = group.full_since is not None
                self._count(batch)
                group.settle(batch)
                if full:
                    self._room.ring()
            if final:
                return
            self._drained.ring()
            await self.pump.wait()

    def _count(self, batch: LedgerBatch[Hashable, Any]) -> None:
        entries, tally = batch.entries, self._tally
        self._counts.advanced += len(entries)
        tally.advanced += len(entries)
        lane = self._lanes.get(batch.lane)
        if lane is None:
            if len(self._lanes) >= _KNOWN_LANES:
                self._lanes.clear()
            lane = self._lanes[batch.lane] = tally.find_lane(batch.lane)
        lane.advanced += len(entries)
        if self._group.failures:
            tally.failed += sum(entry.failed > 0 for entry in entries)
            tally.rejected += sum(entry.rejected > 0 for entry in entries)

    def finish(self) -> None:
        """Make `run` return once all events resolved so far are advanced."""
        self._final = True
        self.pump.ring()

    def abandon(self) -> None:
        """Stop advancing for good."""
        self._abandoned = True
        self._drained.ring()

    def cut_short(self) -> None:
        """Make `drain` check again, because the group was closed."""
        self._drained.ring()

    async def drain(self, timeout_seconds: float) -> None:
        """Wait until subscribers have finished their current events and stored the results, or until the timeout."""
        until = asyncio.get_running_loop().time() + timeout_seconds
        while self._group.busy and not self._abandoned and asyncio.get_running_loop().time() < until:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._drained.wait()

    def _report_failures(self, observer: SubscriberObserver, batch: LedgerBatch[Hashable, Any]) -> None:
        for entry in batch.entries:
            if entry.failed or entry.rejected:
                blame = self._group.blame(entry)
                observer.event_failed(entry.item, blame.failures, blame.unread)

    def _fail(self, batch: LedgerBatch[Hashable, Any], error: BaseException) -> None:
        self._log.error(
            "broker advance failed; ending the shared stream, the broker will redeliver the events",
            key=self._key,
            lane=batch.lane,
            events=len(batch.entries),
            exc_info=error,
        )
        self._counts.tell(Incident(IncidentKind.ADVANCE_FAILED, self._key, lane=batch.lane, text=describe_error(error)))
        if isinstance(error, asyncio.CancelledError):
            error = StreamEnded(f"the advance of the shared stream {self._key!r} was cancelled")
        self._on_failed(error)


def _build_items(batch: LedgerBatch[Hashable, Any]) -> list[AdvanceItem]:
    """Return the items of a batch for the producer; most outcomes equal the first one and share one object."""
    acked = batch.entries[0].acked
    clean = AdvanceOutcome(acked, 0, 0)
    new = tuple.__new__  # creates an `AdvanceItem` in half the time of its constructor
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
