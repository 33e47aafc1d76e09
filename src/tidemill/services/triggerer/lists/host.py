"""Hosts the triggers of a list: starts them, changes to another list, and stops.

Theory of operation. `source` registers the triggers of the list in the store and claims them; the `TriggerHost` runs
them side by side.

Invariants: a finished trigger does not run again unless its restart is `always`; start, reload and stop exclude each
other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence

import structlog

from tidemill.config.sections.triggerer_settings import TriggererSettings
from tidemill.core.retry import Backoff
from tidemill.core.triggers.lifecycle import BACKOFF, CancelReason
from tidemill.runtime.process.malloc import trim_memory
from tidemill.services.triggerer.hosting.host import END_SECONDS, TriggerHost
from tidemill.services.triggerer.hosting.host_book import HostBook
from tidemill.services.triggerer.hosting.run_services import ListTriggerServices
from tidemill.services.triggerer.lists.reload import Changes, compare_lists, find_serialized
from tidemill.services.triggerer.lists.sessions import Ownership
from tidemill.services.triggerer.lists.source import ListSource
from tidemill.services.triggerer.lists.trigger import ListTrigger
from tidemill.services.triggerer.lists.turns import Turns
from tidemill.store.database import Database
from tidemill.store.group_commit import EventStore
from tidemill.store.records import TriggerRecord, TriggerSpec
from tidemill.triggers.shared_stream import SharedStreamManager, StreamReport

log = structlog.get_logger(__name__)

_NO_SEATS: Mapping[str, Hashable] = {}


class ListHost:
    """The triggers of one list, on one event loop.

    Args:
        database: The store, open for writing.
        settings: The section `triggerer`.
        ownership: The session in which the list runs; it has been acquired.
        backoff: The bounds of the pauses before a trigger restarts.
        clock: A monotonic clock, in seconds.
        book: Statistics that outlive this host; None: use new ones.

    Attributes:
        tokens: The tokens of all claimed triggers, by their ids.
        host: Runs the triggers.
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
        self._source = source = ListSource(database, ownership)
        self.host: TriggerHost[ListTrigger] = TriggerHost(source, settings, clock=clock, book=book)
        self._book = book = self.host.book
        self._backoff, self._monotonic = backoff, clock
        self._runs = self.host.runs
        self.tokens: dict[int, int] = {}
        self._services = ListTriggerServices(
            self.host.manager,
            self.host.events,
            is_stopping=lambda: self.stopping,
            note_stored=self.host.event_log.note,
            note_fenced=source.note_fenced,
            report_state=source.report_state,
            triggers=book.triggers,
            keep_serialized=source.keep_serialized,
        )
        self._known: dict[str, TriggerSpec] = {}
        self._turns = Turns()
        self._stopping: asyncio.Task[int] | None = None

    @property
    def manager(self) -> SharedStreamManager:
        return self.host.manager

    @property
    def events(self) -> EventStore:
        """The group commit that stores events."""
        return self.host.events

    @property
    def disowned(self) -> bool:
        """Whether the store has reported that another process owns triggers of this host."""
        return self._source.disowned

    @property
    def stopping(self) -> bool:
        """Whether the host is stopping; if so, it ends the streams once everything is stored."""
        return self._stopping is not None

    @property
    def running(self) -> int:
        """The number of triggers that run or wait to restart."""
        return len(self._runs)

    def now(self) -> float:
        """Return the time that deadlines use, in seconds; it is paused while the store is unreachable."""
        return self.host.now()

    def report(self) -> list[StreamReport]:
        """Return the state of the shared streams, with ages relative to `now`."""
        return self.host.report()

    # -- start and stop ---------------------------------------------------------------------------------------

    async def start(self, specs: Sequence[TriggerSpec]) -> None:
        """Start the triggers of a list; return once they run.

        Raises:
            HostStopsError: The host was stopped first.
            ConfigError: The list cannot run alongside another list.
            SessionEndedError: Another process has taken the list over.
        """
        await self._turns.take(lambda: self._start(specs), "start of the trigger host")

    async def reload(self, specs: Sequence[TriggerSpec]) -> Changes:
        """Switch to another list: end removed triggers (reason: user), replace changed ones, start new ones.

        Raises:
            HostStopsError: The host was stopped first.
            ConfigError: The list cannot run alongside another list; the old one stays in effect.
            SessionEndedError: Another process has taken the list over.
        """
        return await self._turns.take(lambda: self._reload(specs), "reload of the trigger host")

    async def stop(self, reason: CancelReason = CancelReason.SHUTDOWN) -> int:
        """End all triggers, store their events, and advance the streams past resolved ones; the database stays open.

        A start or reload in progress is interrupted. A second call waits for the first; cancelling a call does not
        cancel the stop.

        Returns:
            How many events may not be stored because the store does not work.
        """
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(reason), name="stop of the trigger host")
        return await asyncio.shield(self._stopping)

    def hand_over(self, taken: Mapping[int, int]) -> None:
        """End the runs of triggers that another session has claimed.

        Args:
            taken: The tokens under which they ran here, by their ids.
        """
        gone = {number for number, token in taken.items() if self.tokens.get(number) == token}
        for number in gone:
            del self.tokens[number]
        for run in self._runs.values():
            if run.number in gone:
                self._source.disowned = True
                log.warning("another host has claimed a trigger; handing it over", trigger=run.spec.name)
                run.cancel(CancelReason.HAND_OVER)

    async def wait_idle(self) -> None:
        """Wait until no trigger is running or waiting to restart."""
        await self.host.wait_idle()

    # -- internals --------------------------------------------------------------------------------------------

    async def _start(self, specs: Sequence[TriggerSpec]) -> None:
        self.host.start()
        await self._add(specs)
        await self._source.forget_unlisted(specs)
        self._book.is_started = True

    async def _reload(self, specs: Sequence[TriggerSpec]) -> Changes:
        listed = {spec.name: spec for spec in specs}
        changes = compare_lists(self._known, listed)
        new, replaced = ([listed[name] for name in names] for names in (changes.started, changes.replaced))
        await self._source.reserve(new, replaced)
        ended = [*changes.removed, *changes.replaced]
        ending = [run for name in ended if (run := self._runs.get(name)) is not None]
        await self._end(ending, listed)
        if ended:
            await self._source.forget_unlisted(specs)
            await self._source.release([self._known[name] for name in ended], specs)
        for name in changes.removed:
            del self._known[name]
        self._book.triggers.keep_only(listed)
        changed = [name for name, spec in listed.items() if (old := self._known.get(name)) and old != spec]
        for name in changed:
            if (running := self._runs.get(name)) is not None:
                running.relist(listed[name])
        # A replacing trigger takes over the seat, so that it misses no event.
        seats = {run.spec.name: run.seat for run in ending if run.seat is not None}
        await self._add([listed[name] for name in (*changed, *changes.started)], seats)
        return changes

    async def _end(self, runs: Sequence[ListTrigger], listed: Container[str]) -> None:
        """End triggers that were removed from the list or replaced in it; return once the store has their states."""
        for run in runs:
            run.cancel(CancelReason.USER, succeeded=run.spec.name in listed)
        await asyncio.gather(*(run.wait_ended(END_SECONDS) for run in runs))
        self.host.leave_behind(runs)
        await self._source.settle()

    async def _stop(self, reason: CancelReason) -> int:
        self.host.begin_stop()
        await self._turns.close()
        return await self.host.stop(reason)

    async def _add(self, specs: Sequence[TriggerSpec], seats: Mapping[str, Hashable] = _NO_SEATS) -> None:
        """Register, claim and run triggers.

        Args:
            specs: The triggers; running ones are left alone.
            seats: The stream keys in which replaced triggers kept their seats, by name.
        """
        if not specs:
            return
        records, tokens = await self._source.claim(specs, self._runs)
        self.tokens.update(tokens)
        self._known.update((spec.name, spec) for spec in specs)
        self._book.triggers.note_listed(records)
        runs = [
            self._build_run(record, tokens[record.id], seats.get(record.spec.name))
            for record in records
            if record.id in tokens
        ]
        ended_before = len(records) - len(runs)
        del records  # release their memory before creating the triggers
        await self.host.create(runs)
        await self._source.keep_serialized({number: text for run in runs for number, text in run.serialize().items()})
        # No await until all triggers are routed.
        self.host.route(runs)
        for name, key in seats.items():
            if name not in self._runs:
                self.manager.note_gone(name, key)
        await self.host.run_all(runs)
        trim_memory()  # registering thousands of triggers takes a few megabytes temporarily
        log.info("triggers started", started=len(runs), ended_before=ended_before)

    def _build_run(self, record: TriggerRecord, token: int, seat: Hashable | None) -> ListTrigger:
        return ListTrigger(
            self._services,
            record.spec,
            record.id,
            token,
            find_serialized(record),
            seat,
            backoff=self._backoff,
            clock=self._monotonic,
        )
