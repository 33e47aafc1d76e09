"""Runs triggers side by side on one event loop, stores their events, and shares their streams.

Theory of operation. Each trigger runs in a task of its own. Triggers with equal keys share one stream
(`tidemill.triggers.streams`). Events go to the group commit of the store, which confirms them to the streams once they
are durable. While the store is unreachable, the clock of all deadlines is paused and producers are not pulled. The
host's source (`trigger_source`) supplies the triggers and records their outcomes: it is a list, or the deferred tasks.

Invariants: all triggers of a key that start together are subscribed before the first poll of that key; a trigger's
failure affects no other trigger. Everything belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import structlog

from tidemill.config.sections.triggerer_settings import TriggererSettings
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

#: A trigger that was forced to fail its stream is cancelled if it has not ended after this many seconds.
FORCED_SECONDS = 30.0
LOOK_SECONDS = 1.0  # how often forced failures are checked
#: How often triggers that ignore a cancellation are looked for; the cancellation is repeated after half a minute.
REPEAT_SECONDS = 5.0
#: A write that takes longer counts as an outage.
OUTAGE_SECONDS = 1.0
#: At shutdown: how long outstanding stream events may take to finish, and fired events to be stored.
DRAIN_SECONDS = 5.0
STORE_SECONDS = 10.0
#: At shutdown: how long triggers may take to end.
END_SECONDS = 65.0
#: Number of triggers created or started before the loop gets its turn.
_BURST = 256


class HostedTrigger(Protocol):
    """A trigger on a host.

    Attributes:
        reason: Why it was cancelled; None: it was not.
    """

    reason: CancelReason | None

    @property
    def name(self) -> str:
        """The trigger's name, unique on its host."""

    def create(self) -> None:
        """Create the trigger; if that fails, the run ends with the error."""

    def route(self) -> None:
        """Subscribe the trigger to its shared stream, if it has one. Synchronous."""

    def start(self) -> asyncio.Task[None]: ...

    def cancel(self, reason: CancelReason) -> None: ...

    def cancel_again(self, now: float) -> None:
        """Repeat a cancellation that the trigger's code ignores; `now` is read from the host's monotonic clock."""


R = TypeVar("R", bound=HostedTrigger)


class TriggerHost(Generic[R]):
    """Runs triggers on one event loop.

    Args:
        source: Supplies the triggers and takes the reports about them.
        settings: The section `triggerer`.
        clock: A monotonic clock, in seconds.
        book: Statistics that outlive this host; None: use new ones.

    Attributes:
        runs: The triggers that run or wait to restart, by name.
        making: The trigger whose constructor or stream key is being called; None: no such call is under way.
        manager: The shared streams.
        events: The group commit that stores events.
        event_log: Logs stored events.
        stopping: Whether the host is stopping; if so, it ends the streams once everything is stored.
        book: Statistics for metrics, pages and recordings.
    """

    def __init__(
        self,
        source: TriggerSource,
        settings: TriggererSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        book: HostBook | None = None,
    ) -> None:
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
            may_advance=source.wait_leased,
            counts=book.counts,
        )
        # An outage must be noticed long before a subscriber's acknowledgement times out.
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
        # All tasks share one callback and one context, because thousands of triggers may be waiting.
        self._on_done, self._context = self._forget, contextvars.copy_context()
        self._idle = asyncio.Event()

    def now(self) -> float:
        """Return the time that deadlines use, in seconds; it is paused while the store is unreachable."""
        return self._clock.read(self._monotonic())

    def report(self) -> list[StreamReport]:
        """Return the state of the shared streams, with ages relative to `now`."""
        return self.manager.report()

    async def wait_idle(self) -> None:
        """Wait until no trigger is running or waiting to restart."""
        while self.runs:
            self._idle.clear()
            await self._idle.wait()

    # -- start and stop ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start storing events and watching the loop."""
        self.events.start()
        self._watch.start()
        self._looking = asyncio.get_running_loop().create_task(self._look(), name="trigger host")

    async def create(self, runs: Iterable[R]) -> None:
        """Create triggers, yielding to the loop now and then."""
        for count, run in enumerate(runs):
            self.making = run
            run.create()
            self.making = None
            if count % _BURST == _BURST - 1:
                await asyncio.sleep(0)

    def route(self, runs: Iterable[R]) -> None:
        """Subscribe created triggers; all that share a key are subscribed before its first poll."""
        for run in runs:
            self.making = run
            run.route()
            self.making = None
            self.runs[run.name] = run

    async def run_all(self, runs: Sequence[R]) -> None:
        """Start all runs even if interrupted, so that each of them ends properly."""
        started = 0
        try:
            while started < len(runs):
                await asyncio.sleep(0)
                started = self._run_some(runs, started, started + _BURST)
        finally:
            self._run_some(runs, started, len(runs))

    def leave_behind(self, runs: Iterable[R]) -> None:
        """Forget the given triggers that have not ended."""
        for run in runs:
            if self.runs.get(run.name) is run:
                del self.runs[run.name]
        if not self.runs:
            self._idle.set()

    def begin_stop(self) -> None:
        """Stop pulling producers."""
        self.stopping = True
        self.manager.hold()

    async def stop(self, reason: CancelReason) -> int:
        """End all triggers, store their events, and advance the streams past resolved ones.

        Returns:
            How many events may not be stored because the store does not work.
        """
        self.begin_stop()
        if reason is CancelReason.HAND_OVER:
            # Nothing more would be stored, and others may read the streams.
            self.manager.abandon_all()
        else:
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
        # Advances only what is stored by now.
        await self.manager.stop_all()
        await self._source.close(max(0.1, until - time.monotonic()))
        self._watch.close()
        return unconfirmed

    # -- internals --------------------------------------------------------------------------------------------

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
        # A host that is stopping must not pull producers again, even if the store recovers.
        if standing is ProducerStanding.OPEN and not self.stopping:
            self.manager.release()
        else:
            self.manager.hold()

    async def _wait_drained(self) -> None:
        """Wait briefly until fanned-out events are resolved and stored."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline and self.events.standing is ProducerStanding.OPEN:
            if not self.events.pending and not any(report.outstanding for report in self.manager.report()):
                return
            await asyncio.sleep(0.02)

    async def _wait_ended(self) -> None:
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=END_SECONDS)
        for name in self.runs:
            log.error("a trigger does not end; it is left behind", trigger=name)

    async def _look(self) -> None:
        """Cancel triggers that were forced to fail and did not end, and repeat ignored cancellations."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self.look_once()
            except Exception:
                log.exception("the check of the triggers failed; this is a bug in tidemill")

    def look_once(self) -> None:
        """Run the checks that are due once a second."""
        self.event_log.flush(self._monotonic())
        if (now := self._monotonic()) >= self._repeat_at:
            self._repeat_at = now + REPEAT_SECONDS
            # Nearly all triggers only wait, so call nothing for those that were not cancelled.
            for run in [run for run in self.runs.values() if run.reason is not None]:
                run.cancel_again(now)
        self.book.look(self.manager)
        stream_now = self.now()
        for name, failed_at in self.manager.list_forced().items():
            forced = self.runs.get(name)
            if forced is not None and forced.reason is None and stream_now - failed_at >= FORCED_SECONDS:
                log.error("a trigger failed its shared stream and does not end; cancelling it", trigger=name)
                forced.cancel(CancelReason.TIMEOUT)
