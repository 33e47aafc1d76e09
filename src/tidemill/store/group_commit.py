"""Stores the events of many triggers in few transactions: the asyncio shell of `core.triggers.group_commit`.

A trigger host uses three parts of an `EventStore`: `add`; `wait_open`, which it awaits before it pulls the next event;
and `on_standing`, which tells it when to suspend deadlines. The core makes all decisions; one asyncio task writes one
batch at a time.

Invariants: `done` is called once per event, in order, on the loop, and only after the outcome of the event is known. An
event whose outcome is `Stored` or `Duplicate` is on disk. While the database is unreachable, `done` is not called and
no event fails. An event whose `done` was not called before shutdown is unconfirmed, though it may be stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import structlog

from tidemill.core.errors import RemoteError
from tidemill.core.retry import JITTER_BITS
from tidemill.core.triggers.event_plan import EventRefusal, EventRefused, NewEvent, StoreOutcome
from tidemill.core.triggers.group_commit import CommitLimits, GroupCommit, GroupCommitBatch, ProducerStanding
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.store_clock import STORE_CLOCK

log = structlog.get_logger(__name__)

Done = Callable[[StoreOutcome], None]

#: The approximate memory overhead of an event besides its payload.
_EVENT_BYTES = 200
#: The minimum interval between log entries about an outage.
_LOG_SECONDS = 10.0


class EventWriter(Protocol):
    """Stores batches of events; implemented by `database_events.DatabaseEvents`."""

    async def store(self, events: tuple[NewEvent, ...]) -> Sequence[StoreOutcome]:
        """Store events durably and return their outcomes, in the same order.

        Args:
            events: The events, in the order in which they fired. After a failed attempt the same tuple is passed again;
                events that the failed attempt stored are not stored twice.

        Raises:
            RemoteError: The attempt failed; the events may or may not have been stored.
        """


class _Entry(NamedTuple):
    event: NewEvent
    done: Done


class EventStore:
    """Stores events by group commit.

    Args:
        writer: Stores each batch.
        on_standing: Called on the loop whenever the standing changes.
        limits: When to write a batch, and how much may be pending.

    Example:
        >>> async def host(database, trigger_id, token):
        ...     events = EventStore(DatabaseEvents(database))
        ...     events.start()
        ...     events.add(trigger_id, token, '{"n": 1}', None, print)
        ...     await events.close(5.0)
    """

    def __init__(
        self,
        writer: EventWriter,
        on_standing: Callable[[ProducerStanding], None] | None = None,
        limits: CommitLimits | None = None,
    ) -> None:
        self._writer = writer
        self._on_standing = on_standing
        self._machine: GroupCommit[_Entry] = GroupCommit(limits or CommitLimits())
        self._reported = ProducerStanding.OPEN
        self._down_since = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._idle: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        # The events of the last batch; a retry passes the same tuple object.
        self._given: tuple[GroupCommitBatch[_Entry], tuple[NewEvent, ...]] | None = None

    @property
    def standing(self) -> ProducerStanding:
        """Whether producers may continue."""
        return self._machine.standing

    @property
    def pending(self) -> int:
        """The number of events whose `done` has not been called."""
        return self._machine.pending

    def start(self) -> None:
        """Start the writing task in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="store events")

    def add(
        self,
        trigger_id: int,
        token: int,
        payload: str,
        identity: str | None,
        done: Done,
        ending: str | None = None,
    ) -> None:
        """Accept an event; if the database is idle, it is written together with others within 20 ms.

        This method never waits and never refuses an event because of backlog: the caller awaits `wait_open` before it
        creates the next event. An event that cannot be stored gets an outcome that says so.

        Args:
            trigger_id: The trigger that fired it.
            token: The token of the claim under which it fired (`claim_triggers`). The transaction that would store the
                event refuses a stale token (FENCED).
            payload: JSON text that passes `content.check_payload`.
            identity: Identifies repeated events of this trigger; must pass `content.check_identity`. None: the event
                has no identity.
            done: Called once on the loop with the outcome.
            ending: How the event ends the task that waits for it, encoded; None: it does not.
        """
        event = NewEvent(trigger_id, token, payload, identity, STORE_CLOCK.now_us(), ending)
        size_bytes = len(payload) + len(ending or "") + _EVENT_BYTES
        self._machine.add(_Entry(event, done), size_bytes, self._loop.time())
        if self._idle is not None and self._timer is None:
            self._wake_up()
        if self._machine.standing is not self._reported:
            self._report_standing()

    async def wait_open(self) -> None:
        """Wait until the next event may be created: the database is reachable and the backlog is below its limit."""
        await self._open.wait()

    async def wait_settled(self) -> None:
        """Wait until `done` has been called for every added event, however long an outage takes."""
        while self._machine.pending:
            if self._empty is None:
                self._empty = self._loop.create_future()
            await asyncio.shield(self._empty)

    async def close(self, timeout_seconds: float) -> int:
        """Write the pending events, then stop; the database stays open.

        Args:
            timeout_seconds: The time limit for writing.

        Returns:
            The number of events left unconfirmed.
        """
        task, self._task = self._task, None
        if task is not None:
            self._machine.drain()
            self._wake_up()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    await self.wait_settled()
            task.cancel()
            await asyncio.wait([task])
        return self._machine.pending

    # -- the task ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            batch = self._machine.take(self._loop.time())
            if batch is None:
                await self._sleep()
            else:
                await self._write(batch)
                self._report_standing()

    async def _sleep(self) -> None:
        due = self._machine.due
        self._idle = self._loop.create_future()
        self._timer = self._loop.call_at(due, self._wake_up) if due is not None else None
        try:
            await self._idle
        finally:
            self._idle = None
            if self._timer is not None:
                self._timer.cancel()

    def _wake_up(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _write(self, batch: GroupCommitBatch[_Entry]) -> None:
        overdue = self._loop.call_at(self._machine.due or 0.0, self._note_overdue)
        try:
            outcomes = await self._writer.store(self._find_events(batch))
        except RemoteError as error:
            self._note_failure(error)
        except Exception as error:  # a bug in tidemill: keep the events and log the bug
            throttle(log, _LOG_SECONDS).error("events cannot be stored; this is a bug in tidemill", exc_info=True)
            self._note_failure(RemoteError(f"{type(error).__name__}: {error}"))
        else:
            self._given = None
            self._machine.note_committed()
            for (entry, _), outcome in zip(batch.items, outcomes, strict=True):
                _call(entry.done, outcome)
            self._settle()
        finally:
            overdue.cancel()

    def _find_events(self, batch: GroupCommitBatch[_Entry]) -> tuple[NewEvent, ...]:
        if self._given is None or self._given[0] is not batch:
            self._given = (batch, tuple(entry.event for entry, _ in batch.items))
        return self._given[1]

    def _note_failure(self, error: RemoteError) -> None:
        now = self._loop.time()
        if error.retryable:
            self._machine.note_unreachable(now, random.getrandbits(JITTER_BITS))
            throttle(log, _LOG_SECONDS).warning(
                "cannot write to the store; events are waiting", events=self._machine.pending, error=str(error)
            )
            return
        alone = self._machine.note_refused(now)
        if alone is not None:
            for entry, _ in alone.items:
                _call(entry.done, EventRefused(EventRefusal.CONTENT, str(error)))
            self._settle()

    def _settle(self) -> None:
        if self._empty is not None and not self._machine.pending:
            self._empty.set_result(None)
            self._empty = None

    def _note_overdue(self) -> None:
        """Update the standing when a write has taken too long."""
        self._machine.take(self._loop.time())
        if self._machine.standing is ProducerStanding.DOWN:
            throttle(log, _LOG_SECONDS).warning(
                "the store does not answer; events are waiting", events=self._machine.pending
            )
        self._report_standing()

    def _report_standing(self) -> None:
        before, standing = self._reported, self._machine.standing
        if standing is before:
            return
        self._reported = standing
        if standing is ProducerStanding.OPEN:
            self._open.set()
        else:
            self._open.clear()
        if standing is ProducerStanding.DOWN:
            self._down_since = self._loop.time()
        elif before is ProducerStanding.DOWN:
            seconds = round(self._loop.time() - self._down_since, 3)
            log.info("the store accepts writes again", after_seconds=seconds)
        if self._on_standing is not None:
            self._on_standing(standing)


def _call(done: Done, outcome: StoreOutcome) -> None:
    try:
        done(outcome)
    except Exception:
        # A callback that raises must not prevent the remaining callbacks.
        log.exception("the confirmation of an event failed; this is a bug in tidemill")
