"""Hosts triggers: runs all of a list side by side, stores their events, and shares their streams.

Theory of operation. The triggers of the list are registered in the store and claimed; each runs in a task of its own
(`run`). Those with an equal key share one stream (`tidemill.triggers.streams`). Events go to the group commit
of the store, which confirms them to the streams once they are durable. While the store cannot be reached, the clock of
all deadlines stands still and no producer is pulled.

Invariants: all triggers of a key are subscribed before that key is polled for the first time; a trigger's failure is
its own; a finished trigger does not run again unless its restart is `always`; start, reload and stop exclude each
other. Everything belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from functools import partial

import structlog
from sqlalchemy import Connection

from tidemill.config.triggerer_settings import TriggererSettings
from tidemill.core.retry import Backoff
from tidemill.core.triggers.group_commit import CommitLimits, Standing
from tidemill.core.triggers.lifecycle import BACKOFF, CancelReason
from tidemill.core.triggers.pausable_clock import PausableClock
from tidemill.services.triggerer.admission import Admission
from tidemill.services.triggerer.event_log import EventLog
from tidemill.services.triggerer.host_book import HostBook
from tidemill.services.triggerer.listing import Changes, compare_lists, find_serialized, should_run
from tidemill.services.triggerer.loop_watch import watch_loop
from tidemill.services.triggerer.run import TriggerRun
from tidemill.services.triggerer.run_services import RunServices
from tidemill.services.triggerer.serialized import keep_serialized
from tidemill.services.triggerer.sessions import Ownership
from tidemill.services.triggerer.state_writer import StateWriter
from tidemill.services.triggerer.turns import Turns
from tidemill.store.database import Database
from tidemill.store.group_commit import EventStore
from tidemill.store.queries.triggers import claim_triggers, register_triggers
from tidemill.store.records import TriggerRecord, TriggerSpec
from tidemill.triggers.shared_stream import SharedStreamManager, StreamReport

log = structlog.get_logger(__name__)

#: A trigger that was forced to fail its stream and has not ended after this many seconds is cancelled.
FORCED_SECONDS = 30.0
LOOK_SECONDS = 1.0  # how often that is checked
#: A write that takes longer counts as an outage.
STALL_SECONDS = 1.0
#: At a stop: how long outstanding events of streams may take to finish, and events to be stored.
DRAIN_SECONDS = 5.0
STORE_SECONDS = 10.0
#: And how long triggers may take to end.
END_SECONDS = 65.0
#: Triggers that are created or started before the loop gets its turn.
_BURST = 256
_NO_SEATS: Mapping[str, Hashable] = {}


class TriggerHost:
    """The triggers of one list, on one event loop.

    Args:
        database: The store, open for writing.
        settings: `triggerer`.
        ownership: The session in which the list is run; it has been acquired.
        backoff: The bounds of the pauses before a trigger runs again.
        clock: A monotonic clock, in seconds.
        book: What happens is noted there; None: in a book of its own.

    Attributes:
        tokens: The tokens of all triggers that were claimed, by their ids.
    """

    def __init__(
        self,
        database: Database,
        settings: TriggererSettings,
        ownership: Ownership,
        *,
        backoff: Backoff = BACKOFF,
        clock: Callable[[], float] = time.monotonic,
        book: HostBook | None = None,
    ) -> None:
        """Start nothing yet."""
        self._database, self._ownership = database, ownership
        self._book = book = book or HostBook()
        book.is_started = False
        self._admission = Admission(database, ownership)
        self._backoff = backoff
        self._monotonic, self._clock = clock, PausableClock()
        self.tokens: dict[int, int] = {}
        self.manager = SharedStreamManager(
            max_subscriber_queue=settings.shared_stream_subscriber_queue_size,
            ack_timeout=settings.shared_stream_ack_timeout,
            cohort_grace_period=settings.shared_stream_cohort_grace_period,
            max_outstanding=settings.shared_stream_max_outstanding,
            now=self.now,
            seat_seconds=settings.seat_seconds,
            list_name=ownership.list_name,
            may_open=ownership.wait_confirmed,
            counts=book.counts,
        )
        # An outage has to be noticed long before it makes a subscriber too late.
        stall_seconds = min(STALL_SECONDS, settings.shared_stream_ack_timeout / 4)
        self.events = EventStore(database, self._on_standing, CommitLimits(stall_seconds=stall_seconds))
        self._states = StateWriter(database)
        self._keep_serialized = partial(keep_serialized, database, ownership)
        self._event_log = EventLog(clock())
        report, is_stopping, note = self._states.put, lambda: self.stopping, self._event_log.note
        fenced, keep = self._note_fenced, self._keep_serialized
        self._services = RunServices(self.manager, self.events, is_stopping, note, fenced, report, book.triggers, keep)
        self._runs: dict[str, TriggerRun] = {}
        #: Whether the store has reported that another process owns triggers of this host.
        self.disowned = False
        self._known: dict[str, TriggerSpec] = {}
        self._watch = watch_loop(settings.block_threshold_seconds, self._runs, book.lags)
        self._looking: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle, self._turns = asyncio.Event(), Turns()
        self._stopping: asyncio.Task[int] | None = None

    def now(self) -> float:
        """Return the time of the deadlines, in seconds; it stands still while the store cannot be reached."""
        return self._clock.read(self._monotonic())

    @property
    def stopping(self) -> bool:
        """Whether it is stopping: then it ends the streams once everything is stored."""
        return self._stopping is not None

    @property
    def running(self) -> int:
        """How many triggers run, or wait to run again."""
        return len(self._runs)

    # -- life -------------------------------------------------------------------------------------------------

    async def start(self, specs: Sequence[TriggerSpec]) -> None:
        """Run the triggers of a list; return when they run.

        Raises:
            HostStopsError: The host was stopped before that.
            ConfigError: The list cannot be run beside another one.
            SessionEndedError: Another process has taken the list over.
        """
        await self._turns.take(lambda: self._start(specs), "start of the trigger host")

    async def reload(self, specs: Sequence[TriggerSpec]) -> Changes:
        """Change to another list: what is gone ends (reason: user), what differs is replaced, what is new starts.

        Raises:
            HostStopsError: The host was stopped before that was done.
            ConfigError: The list cannot be run beside another one; the old one stays in effect.
            SessionEndedError: Another process has taken the list over.
        """
        return await self._turns.take(lambda: self._reload(specs), "reload of the trigger host")

    async def stop(self, reason: CancelReason = CancelReason.SHUTDOWN) -> int:
        """End all triggers, store what they fired, and advance what is resolved; the database stays open.

        A start or reload in progress is interrupted. A second call waits for the first one; cancelling a call does not
        end the stop.

        Returns:
            How many events may not be stored, because the store does not work.
        """
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(reason), name="stop of the trigger host")
        return await asyncio.shield(self._stopping)

    def hand_over(self, taken: Mapping[int, int]) -> None:
        """End the runs of triggers that another session has claimed.

        Args:
            taken: The tokens that they had here, by their ids.
        """
        gone = {number for number, token in taken.items() if self.tokens.get(number) == token}
        for number in gone:
            del self.tokens[number]
        for run in self._runs.values():
            if run.number in gone:
                self.disowned = True
                log.warning("another host has claimed a trigger; it is handed over", trigger=run.spec.name)
                run.cancel(CancelReason.HAND_OVER)

    async def wait_idle(self) -> None:
        """Wait until no trigger is left to run."""
        while self._runs:
            self._idle.clear()
            await self._idle.wait()

    def report(self) -> list[StreamReport]:
        """Return what the shared streams are doing, in the time of `now`."""
        return self.manager.report()

    # -- inside -----------------------------------------------------------------------------------------------

    async def _start(self, specs: Sequence[TriggerSpec]) -> None:
        self.events.start()
        self._watch.start()
        self._looking = asyncio.get_running_loop().create_task(self._look(), name="trigger host")
        await self._add(specs)
        await self._admission.forget_unlisted(specs)
        self._book.is_started = True

    async def _reload(self, specs: Sequence[TriggerSpec]) -> Changes:
        listed = {spec.name: spec for spec in specs}
        changes = compare_lists(self._known, listed)
        new, replaced = ([listed[name] for name in names] for names in (changes.started, changes.replaced))
        await self._admission.reserve(new, replaced)
        ended = [*changes.removed, *changes.replaced]
        ending = [run for name in ended if (run := self._runs.get(name)) is not None]
        await self._end(ending, listed)
        if ended:
            await self._admission.forget_unlisted(specs)
            await self._admission.release([self._known[name] for name in ended], specs)
        for name in changes.removed:
            del self._known[name]
        self._book.triggers.keep_only(listed)
        changed = [name for name, spec in listed.items() if (old := self._known.get(name)) and old != spec]
        for name in changed:
            if (running := self._runs.get(name)) is not None:
                running.relist(listed[name])
        seats = {run.spec.name: run.seat for run in ending if run.seat is not None}
        await self._add([listed[name] for name in (*changed, *changes.started)], seats)
        return changes

    async def _end(self, runs: Sequence[TriggerRun], listed: Container[str]) -> None:
        """End triggers that were removed from the list or replaced in it, until the store says so."""
        for run in runs:
            run.cancel(CancelReason.USER, succeeded=run.spec.name in listed)
        await asyncio.gather(*(run.wait_ended(END_SECONDS) for run in runs))
        for run in runs:
            if self._runs.get(run.spec.name) is run:  # left behind
                del self._runs[run.spec.name]
        if not self._runs:
            self._idle.set()
        await self._states.settled()

    async def _stop(self, reason: CancelReason) -> int:
        self.manager.hold()
        await self._turns.close()
        if reason is not CancelReason.HAND_OVER:  # nothing more would be stored
            await self._wait_drained()
        for run in self._runs.values():
            run.cancel(reason)
        await self._wait_ended()
        if self._looking is not None:
            self._looking.cancel()
        until = time.monotonic() + STORE_SECONDS
        unconfirmed = await self.events.close(STORE_SECONDS)
        if unconfirmed:
            log.warning("events may not be stored; their brokers will redeliver them", events=unconfirmed)
        self._event_log.flush(self._monotonic(), last=True)
        # What is stored by now is advanced, and nothing else.
        await self.manager.stop_all()
        try:
            async with asyncio.timeout(max(0.1, until - time.monotonic())):
                await self._states.settled()
        except TimeoutError:
            log.warning(
                "the last states of triggers could not be stored; the next host will find them running",
                reports=await self._states.close(),
            )
        self._watch.close()
        return unconfirmed

    async def _add(self, specs: Sequence[TriggerSpec], seats: Mapping[str, Hashable] = _NO_SEATS) -> None:
        """Register, claim and run triggers.

        Args:
            specs: The triggers; those that run already are left alone.
            seats: The streams in which those that they replace kept their seats.
        """
        if not specs:
            return
        now_us, list_name = time.time_ns() // 1000, self._ownership.list_name

        def take(connection: Connection) -> tuple[list[TriggerRecord], dict[int, int]]:
            records = register_triggers(connection, specs, list_name, now_us)
            wanted = [record.id for record in records if record.spec.name not in self._runs and should_run(record)]
            return records, claim_triggers(connection, wanted, self._ownership.session_id, now_us)

        records, tokens = await self._admission.write(specs, take)
        self.tokens.update(tokens)
        self._known.update((spec.name, spec) for spec in specs)
        self._book.triggers.note_listed(records)
        runs = [
            TriggerRun(
                self._services,
                record.spec,
                record.id,
                tokens[record.id],
                find_serialized(record),
                seats.get(record.spec.name),
                backoff=self._backoff,
                clock=self._monotonic,
            )
            for record in records
            if record.id in tokens
        ]
        for count, run in enumerate(runs):
            run.create()
            if count % _BURST == _BURST - 1:
                await asyncio.sleep(0)
        await self._keep_serialized({number: text for run in runs for number, text in run.serialize().items()})
        # Nothing is awaited while they are routed: all that share a key are there before its first poll.
        for run in runs:
            run.route()
            self._runs[run.spec.name] = run
        for name, key in seats.items():
            if name not in self._runs:
                self.manager.note_gone(name, key)
        await self._run_all(runs)
        log.info("triggers started", started=len(runs), ended_before=len(records) - len(runs))

    async def _run_all(self, runs: Sequence[TriggerRun]) -> None:
        """Start all runs, even if this is interrupted, so that each of them ends properly."""
        started = 0
        try:
            while started < len(runs):
                await asyncio.sleep(0)
                started = self._run_some(runs, started, started + _BURST)
        finally:
            self._run_some(runs, started, len(runs))

    def _run_some(self, runs: Sequence[TriggerRun], first: int, behind: int) -> int:
        for run in runs[first:behind]:
            task = run.start()
            self._tasks.add(task)
            task.add_done_callback(lambda task, run=run: self._forget(task, run))  # type: ignore[misc]
        return behind

    def _note_fenced(self) -> None:
        """Beat now: the store has refused an event, because another process owns its trigger."""
        self.disowned = True
        self._ownership.check()

    def _forget(self, task: asyncio.Task[None], run: TriggerRun) -> None:
        self._tasks.discard(task)
        if self._runs.get(run.spec.name) is run:
            del self._runs[run.spec.name]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the run of a trigger failed; this is a bug in tidemill", trigger=run.spec.name, exc_info=error)
        if not self._runs:
            self._idle.set()

    def _on_standing(self, standing: Standing) -> None:
        now = self._monotonic()
        if standing is Standing.DOWN:
            self._clock.hold(now)
        else:
            self._clock.release(now)
        # A host that is stopping does not pull producers again, even if the store is back.
        if standing is Standing.OPEN and self._stopping is None:
            self.manager.release()
        else:
            self.manager.hold()

    async def _wait_drained(self) -> None:
        """Wait a moment for events that are fanned out to be dealt with and stored."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline and self.events.standing is Standing.OPEN:
            if not self.events.pending and not any(report.outstanding for report in self.manager.report()):
                return
            await asyncio.sleep(0.02)

    async def _wait_ended(self) -> None:
        """Wait for the triggers to end."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=END_SECONDS)
        for name in self._runs:
            log.error("a trigger does not end; it is left behind", trigger=name)

    async def _look(self) -> None:
        """Cancel triggers that were forced to fail and do not end, and repeat cancellations that were ignored."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self._look_once()
            except Exception:
                log.exception("the check of the triggers failed; this is a bug in tidemill")

    def _look_once(self) -> None:
        self._event_log.flush(self._monotonic())
        for run in list(self._runs.values()):
            run.cancel_again(self._monotonic())
        self._book.look(self.manager)
        now = self.now()
        for name, failed_at in self.manager.list_forced().items():
            forced = self._runs.get(name)
            if forced is not None and forced.reason is None and now - failed_at >= FORCED_SECONDS:
                log.error("a trigger failed its shared stream and does not end; it is cancelled", trigger=name)
                forced.cancel(CancelReason.TIMEOUT)
