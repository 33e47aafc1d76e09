"""Runs triggers side by side on one event loop, stores their events, and shares their streams.

Theory of operation. Each trigger runs in a task of its own. Those with an equal key share one stream
(`tidemill.triggers.streams`). Events go to the group commit of the store, which confirms them to the streams once they
are durable. While the store cannot be reached, the clock of all deadlines stands still and no producer is pulled. Where
the triggers come from, and what becomes of them, is known to the host's source (`trigger_source`): a list, or the tasks
that have deferred.

Invariants: all triggers of a key that are started together are subscribed before that key is polled for the first time;
a trigger's failure is its own. Everything belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import structlog

from tidemill.config.triggerer_settings import TriggererSettings
from tidemill.core.triggers.group_commit import CommitLimits, ProducerStanding
from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.core.triggers.pausable_clock import PausableClock
from tidemill.services.triggerer.hosting.event_log import HostEventLog
from tidemill.services.triggerer.hosting.host_book import HostBook
from tidemill.services.triggerer.hosting.loop_watch import watch_loop
from tidemill.services.triggerer.hosting.trigger_source import TriggerSource
from tidemill.store.group_commit import EventStore
from tidemill.triggers.shared_stream import SharedStreamManager, StreamReport

log = structlog.get_logger(__name__)

#: A trigger that was forced to fail its stream and has not ended after this many seconds is cancelled.
FORCED_SECONDS = 30.0
LOOK_SECONDS = 1.0  # how often that is checked
#: How often it is checked whether a trigger ignores its cancellation, which is repeated after half a minute.
REPEAT_SECONDS = 5.0
#: A write that takes longer counts as an outage.
OUTAGE_SECONDS = 1.0
#: At a stop: how long outstanding events of streams may take to finish, and events to be stored.
DRAIN_SECONDS = 5.0
STORE_SECONDS = 10.0
#: And how long triggers may take to end.
END_SECONDS = 65.0
#: Triggers that are created or started before the loop gets its turn.
_BURST = 256


class HostedTrigger(Protocol):
    """A trigger on a host.

    Attributes:
        reason: Why it was cancelled.
    """

    reason: CancelReason | None

    @property
    def name(self) -> str:
        """Its name, unique on its host."""

    def create(self) -> None:
        """Create the trigger; if that fails, its run ends with the error."""

    def route(self) -> None:
        """Subscribe it to its stream, if it shares one; synchronous."""

    def start(self) -> asyncio.Task[None]:
        """Start running."""

    def cancel(self, reason: CancelReason) -> None:
        """End it."""

    def cancel_again(self, now: float) -> None:
        """Repeat a cancellation that its own code has ignored for long; `now` is that of its clock."""


R = TypeVar("R", bound=HostedTrigger)


class TriggerHost(Generic[R]):
    """Triggers on one event loop.

    Args:
        source: Where they come from.
        settings: `triggerer`.
        clock: A monotonic clock, in seconds.
        book: What happens is noted there; None: in a book of its own.

    Attributes:
        runs: The triggers that run, or wait to run again, by name.
        making: The trigger whose constructor or stream key is being called; None: no such call is under way.
        manager: Their shared streams.
        events: Where their events go.
        event_log: Where it is noted what was stored.
        stopping: Whether it is stopping: then it ends the streams once everything is stored.
        book: What happens.
    """

    def __init__(
        self,
        source: TriggerSource,
        settings: TriggererSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        book: HostBook | None = None,
    ) -> None:
        """Start nothing yet."""
        self._source = source
        self.book = book = book or HostBook()
        book.is_started = False
        self._monotonic, self._clock = clock, PausableClock()
        self.manager = SharedStreamManager(
            max_subscriber_queue=settings.shared_stream_subscriber_queue_size,
            ack_timeout=settings.shared_stream_ack_timeout,
            cohort_grace_period=settings.shared_stream_cohort_grace_period,
            max_outstanding=settings.shared_stream_max_outstanding,
            now=self.now,
            seat_seconds=settings.seat_seconds,
            list_name=source.name,
            may_open=source.wait_confirmed,
            counts=book.counts,
        )
        # An outage has to be noticed long before it makes a subscriber too late.
        outage_seconds = min(OUTAGE_SECONDS, settings.shared_stream_ack_timeout / 4)
        limits = CommitLimits(linger_seconds=source.linger_seconds, outage_seconds=outage_seconds)
        self.events = EventStore(source.writer, self._on_standing, limits)
        self.event_log = HostEventLog(clock())
        self.runs: dict[str, R] = {}
        self.making: R | None = None
        self.stopping = False
        self._watch = watch_loop(settings.block_threshold_seconds, self.runs, book.lags)
        self._looking: asyncio.Task[None] | None = None
        self._repeat_at = -math.inf
        self._tasks: dict[asyncio.Task[None], R] = {}
        # One callback in one context serves all tasks: thousands of triggers only wait.
        self._on_done, self._context = self._forget, contextvars.copy_context()
        self._idle = asyncio.Event()

    def now(self) -> float:
        """Return the time of the deadlines, in seconds; it stands still while the store cannot be reached."""
        return self._clock.read(self._monotonic())

    def report(self) -> list[StreamReport]:
        """Return what the shared streams are doing, in the time of `now`."""
        return self.manager.report()

    async def wait_idle(self) -> None:
        """Wait until no trigger is left to run."""
        while self.runs:
            self._idle.clear()
            await self._idle.wait()

    # -- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Store events, and watch the loop, from now on."""
        self.events.start()
        self._watch.start()
        self._looking = asyncio.get_running_loop().create_task(self._look(), name="trigger host")

    async def create(self, runs: Iterable[R]) -> None:
        """Create triggers."""
        for count, run in enumerate(runs):
            self.making = run
            run.create()
            self.making = None
            if count % _BURST == _BURST - 1:
                await asyncio.sleep(0)

    def route(self, runs: Iterable[R]) -> None:
        """Subscribe triggers that were created; all that share a key are there before its first poll."""
        for run in runs:
            self.making = run
            run.route()
            self.making = None
            self.runs[run.name] = run

    async def run_all(self, runs: Sequence[R]) -> None:
        """Start all runs, even if this is interrupted, so that each of them ends properly."""
        started = 0
        try:
            while started < len(runs):
                await asyncio.sleep(0)
                started = self._run_some(runs, started, started + _BURST)
        finally:
            self._run_some(runs, started, len(runs))

    def leave_behind(self, runs: Iterable[R]) -> None:
        """Forget those of these triggers that have not ended."""
        for run in runs:
            if self.runs.get(run.name) is run:
                del self.runs[run.name]
        if not self.runs:
            self._idle.set()

    def begin_stop(self) -> None:
        """Pull no producer any more."""
        self.stopping = True
        self.manager.hold()

    async def stop(self, reason: CancelReason) -> int:
        """End all triggers, store what they fired, and advance what is resolved.

        Returns:
            How many events may not be stored, because the store does not work.
        """
        self.begin_stop()
        if reason is not CancelReason.HAND_OVER:  # nothing more would be stored
            await self._wait_drained()
        for run in self.runs.values():
            run.cancel(reason)
        await self._wait_ended()
        if self._looking is not None:
            self._looking.cancel()
        until = time.monotonic() + STORE_SECONDS
        unconfirmed = await self.events.close(STORE_SECONDS)
        if unconfirmed:
            log.warning("events may not be stored; their brokers will redeliver them", events=unconfirmed)
        self.event_log.flush(self._monotonic(), last=True)
        # What is stored by now is advanced, and nothing else.
        await self.manager.stop_all()
        await self._source.close(max(0.1, until - time.monotonic()))
        self._watch.close()
        return unconfirmed

    # -- inside -----------------------------------------------------------------------------------------------

    def _run_some(self, runs: Sequence[R], first: int, behind: int) -> int:
        for run in runs[first:behind]:
            task = run.start()
            self._tasks[task] = run
            task.add_done_callback(self._on_done, context=self._context)
        return behind

    def _forget(self, task: asyncio.Task[None]) -> None:
        run = self._tasks.pop(task)
        if self.runs.get(run.name) is run:
            del self.runs[run.name]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the run of a trigger failed; this is a bug in tidemill", trigger=run.name, exc_info=error)
        if not self.runs:
            self._idle.set()

    def _on_standing(self, standing: ProducerStanding) -> None:
        now = self._monotonic()
        if standing is ProducerStanding.DOWN:
            self._clock.hold(now)
        else:
            self._clock.release(now)
        # A host that is stopping does not pull producers again, even if the store is back.
        if standing is ProducerStanding.OPEN and not self.stopping:
            self.manager.release()
        else:
            self.manager.hold()

    async def _wait_drained(self) -> None:
        """Wait a moment for events that are fanned out to be dealt with and stored."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline and self.events.standing is ProducerStanding.OPEN:
            if not self.events.pending and not any(report.outstanding for report in self.manager.report()):
                return
            await asyncio.sleep(0.02)

    async def _wait_ended(self) -> None:
        """Wait for the triggers to end."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=END_SECONDS)
        for name in self.runs:
            log.error("a trigger does not end; it is left behind", trigger=name)

    async def _look(self) -> None:
        """Cancel triggers that were forced to fail and do not end, and repeat cancellations that were ignored."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self.look_once()
            except Exception:
                log.exception("the check of the triggers failed; this is a bug in tidemill")

    def look_once(self) -> None:
        """Do what is to be done once a second."""
        self.event_log.flush(self._monotonic())
        if (now := self._monotonic()) >= self._repeat_at:
            self._repeat_at = now + REPEAT_SECONDS
            # Nearly all of them only wait: nothing is called for each.
            for run in [run for run in self.runs.values() if run.reason is not None]:
                run.cancel_again(now)
        self.book.look(self.manager)
        stream_now = self.now()
        for name, failed_at in self.manager.list_forced().items():
            forced = self.runs.get(name)
            if forced is not None and forced.reason is None and stream_now - failed_at >= FORCED_SECONDS:
                log.error("a trigger failed its shared stream and does not end; it is cancelled", trigger=name)
                forced.cancel(CancelReason.TIMEOUT)
