"""Stores the events of many triggers in few transactions: the shell around `core.triggers.group_commit`.

A trigger host uses three parts of an `EventStore`: `add`, `wait_open`, which it awaits before it pulls the next event,
and `on_standing`, which tells it when to hold deadlines. All decisions are made by the core; one asyncio task writes
one batch at a time.

Invariants: `done` is called once per event, in order, on the loop, and only when the outcome of the event is known;
with `Stored` or `Duplicate` the event is on disk. While the database cannot be reached, `done` is not called, and no
event fails. An event whose `done` was not called before the end was not confirmed, though it may be stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import structlog

from tidemill.core.errors import RemoteError
from tidemill.core.retry import JITTER_BITS
from tidemill.core.triggers.event_plan import NewEvent, Refusal, Refused, StoreOutcome
from tidemill.core.triggers.group_commit import Batch, CommitLimits, GroupCommit, Standing
from tidemill.runtime.log.setup import throttle

log = structlog.get_logger(__name__)

Done = Callable[[StoreOutcome], None]

#: The approximate memory that an event takes besides its payload.
_EVENT_BYTES = 200
#: An outage is logged at most once in this many seconds.
_LOG_SECONDS = 10.0


class EventWriter(Protocol):
    """What stores a batch of events; `database_events.DatabaseEvents` is one."""

    async def store(self, events: tuple[NewEvent, ...]) -> Sequence[StoreOutcome]:
        """Store events, and return what became of each; durably.

        Args:
            events: In the order in which they fired. When an attempt has failed, the same tuple is given again;
                whatever the failed attempt has stored is not stored twice.

        Raises:
            RemoteError: They were not stored, or may have been.
        """


class _Entry(NamedTuple):
    event: NewEvent
    done: Done


class EventStore:
    """Stores events by group commit.

    Args:
        writer: What stores a batch of them.
        on_standing: Called on the loop whenever the standing changes.
        limits: When to write, and how much may wait.

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
        on_standing: Callable[[Standing], None] | None = None,
        limits: CommitLimits | None = None,
    ) -> None:
        """Start with nothing pending; `start` begins to write."""
        self._writer = writer
        self._on_standing = on_standing
        self._machine: GroupCommit[_Entry] = GroupCommit(limits or CommitLimits())
        self._reported = Standing.OPEN
        self._down_since = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._idle: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._empty: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        # The events of the last batch, which are the same object when it is retried.
        self._given: tuple[Batch[_Entry], tuple[NewEvent, ...]] | None = None

    @property
    def standing(self) -> Standing:
        """Whether producers may continue."""
        return self._machine.standing

    @property
    def pending(self) -> int:
        """How many events wait for their `done` to be called."""
        return self._machine.pending

    def start(self) -> None:
        """Start writing, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="store events")

    def add(self, trigger_id: int, token: int, payload: str, identity: str | None, done: Done) -> None:
        """Accept an event; it is written with others within 20 ms, if the database is idle.

        Never waits, and never refuses because of what is pending: the caller awaits `wait_open` before it creates the
        next event. An event that cannot be stored gets an outcome that says so.

        Args:
            trigger_id: The trigger that fired it.
            token: The token of the claim under which it fired (`claim_triggers`); an old one is refused (FENCED) in the
                transaction that would store the event.
            payload: JSON text that `content.check_payload` accepts.
            identity: Identifies a repeated event of this trigger; `content.check_identity` must accept it. None: it has
                no identity.
            done: Called once on the loop with the outcome.
        """
        event = NewEvent(trigger_id, token, payload, identity, time.time_ns() // 1000)
        self._machine.add(_Entry(event, done), len(payload) + _EVENT_BYTES, self._loop.time())
        if self._idle is not None and self._timer is None:
            self._wake_up()
        if self._machine.standing is not self._reported:
            self._report_standing()

    async def wait_open(self) -> None:
        """Wait until the next event may be created: the database can be reached, and not too much waits for it."""
        await self._open.wait()

    async def wait_settled(self) -> None:
        """Wait until `done` was called for everything that was added, however long an outage takes."""
        while self._machine.pending:
            if self._empty is None:
                self._empty = self._loop.create_future()
            await asyncio.shield(self._empty)

    async def close(self, timeout_seconds: float) -> int:
        """Write what is pending, then stop; the database stays open.

        Args:
            timeout_seconds: How long writing may take.

        Returns:
            How many events were left unconfirmed.
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

    async def _write(self, batch: Batch[_Entry]) -> None:
        stalled = self._loop.call_at(self._machine.due or 0.0, self._note_stall)
        try:
            outcomes = await self._writer.store(self._find_events(batch))
        except RemoteError as error:
            self._note_failure(error)
        except Exception as error:  # a bug in tidemill; the events are kept, and the log says so
            throttle(log, _LOG_SECONDS).error("events cannot be stored; this is a bug in tidemill", exc_info=True)
            self._note_failure(RemoteError(f"{type(error).__name__}: {error}"))
        else:
            self._given = None
            self._machine.note_committed()
            for (entry, _), outcome in zip(batch.items, outcomes, strict=True):
                _call(entry.done, outcome)
            self._settle()
        finally:
            stalled.cancel()

    def _find_events(self, batch: Batch[_Entry]) -> tuple[NewEvent, ...]:
        if self._given is None or self._given[0] is not batch:
            self._given = (batch, tuple(entry.event for entry, _ in batch.items))
        return self._given[1]

    def _note_failure(self, error: RemoteError) -> None:
        now = self._loop.time()
        if error.retryable:
            self._machine.note_unreachable(now, random.getrandbits(JITTER_BITS))
            throttle(log, _LOG_SECONDS).warning(
                "the store cannot be written to; events wait", events=self._machine.pending, error=str(error)
            )
            return
        alone = self._machine.note_refused(now)
        if alone is not None:
            for entry, _ in alone.items:
                _call(entry.done, Refused(Refusal.CONTENT, str(error)))
            self._settle()

    def _settle(self) -> None:
        if self._empty is not None and not self._machine.pending:
            self._empty.set_result(None)
            self._empty = None

    def _note_stall(self) -> None:
        """Note that a write has not been answered for too long."""
        self._machine.take(self._loop.time())
        if self._machine.standing is Standing.DOWN:
            throttle(log, _LOG_SECONDS).warning("the store does not answer; events wait", events=self._machine.pending)
        self._report_standing()

    def _report_standing(self) -> None:
        before, standing = self._reported, self._machine.standing
        if standing is before:
            return
        self._reported = standing
        if standing is Standing.OPEN:
            self._open.set()
        else:
            self._open.clear()
        if standing is Standing.DOWN:
            self._down_since = self._loop.time()
        elif before is Standing.DOWN:
            seconds = round(self._loop.time() - self._down_since, 3)
            log.info("the store can be written to again", after_seconds=seconds)
        if self._on_standing is not None:
            self._on_standing(standing)


def _call(done: Done, outcome: StoreOutcome) -> None:
    try:
        done(outcome)
    except Exception:
        # One that raises must not keep the others from being called.
        log.exception("the confirmation of an event failed; this is a bug in tidemill")
