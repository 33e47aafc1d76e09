"""The triggers of deferred tasks: one triggerer claims them from the store, and reports on them.

Theory of operation. Whenever the doorbell rings, a trigger has ended, or two seconds have passed, the triggerer claims
as many triggers as it has room for, and asks which of its triggers to stop. Storing the first event of a trigger
(`CallEvents`) resumes its task. A trigger that ends without an event is reported as failed, however long the store
takes.

Invariants: a failure is reported until the store has answered; once the session has ended in the store, nothing more is
claimed, and all running triggers are released.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from tidemill.core.errors import RemoteError, TidemillError
from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.core.triggers.task_triggers import ClaimKey, TaskEnd, TaskTriggers
from tidemill.runtime.log.setup import throttle
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.triggerer.tasks.call_events import CallEvents
from tidemill.services.triggerer.tasks.logs import TaskLog, TaskLogs
from tidemill.services.triggerer.tasks.stream_room import StreamRoom
from tidemill.store.calls.call import Call, CallRefusedError, RefusalKind
from tidemill.store.calls.service_calls import BeatSession
from tidemill.store.calls.stream_calls import EndStream
from tidemill.store.calls.trigger_calls import (
    ClaimedTrigger,
    ClaimTriggers,
    FailTrigger,
    HeldTriggers,
    PlaceTriggers,
    ReleaseTriggers,
)
from tidemill.store.calls.worker_calls import OutcomeKind
from tidemill.store.database import StoreClient
from tidemill.store.wire.remote import call_patiently

log = structlog.get_logger(__name__)

A = TypeVar("A")

#: How long an event waits for others. Tasks are waiting, and the store batches calls anyway.
LINGER_SECONDS = 0.002
#: Maximum number of triggers per claim.
CLAIM_COUNT = 500
_LEASE = ServiceLease()


class ServiceSessionEndedError(Exception):
    """The session has ended in the store; other processes may run its triggers."""


class TaskSource:
    """The triggers of deferred tasks; a `TriggerSource`.

    Args:
        calls: The store.
        session: The session that runs them.
        capacity: How many run at once.
        queues: The queues whose triggers are claimed; empty: all.
        logs: The logs of their tasks.
        clock: A monotonic clock, in seconds.
        reserved: Whether to claim only triggers that are reserved for the session.
        grace_seconds: How long a task that a user cleared waits for the cleanup of its trigger.
        lease: The lease of the session: once it has expired, others may run the triggers.
        max_undelivered: The number of undelivered events of a stream above which its trigger waits.

    Attributes:
        name: The name under which streams store their offsets upstream.
        linger_seconds: How long an event waits for others.
        writer: Stores events.
        ended: Set once the store has answered that the session has ended.
        freed: Set when a trigger has ended.
        exhausted: Set once a claim has returned fewer triggers than there was room for.
        triggers: The triggers that are running.
        room: The triggers that wait until their events are handled.
    """

    name = "tasks"
    linger_seconds = LINGER_SECONDS

    def __init__(
        self,
        calls: StoreClient,
        session: int,
        capacity: int,
        queues: tuple[str, ...],
        logs: TaskLogs,
        clock: Callable[[], float] = time.monotonic,
        *,
        reserved: bool = False,
        grace_seconds: float = 5.0,
        lease: ServiceLease = _LEASE,
        max_undelivered: int = 1000,
    ) -> None:
        self._lease = lease
        self._grace_seconds = grace_seconds
        self._calls, self._session, self._queues, self._clock = calls, session, queues, clock
        self._reserved = reserved
        self.ended = asyncio.Event()
        self.freed = asyncio.Event()
        self.exhausted = asyncio.Event()
        self.triggers = TaskTriggers(capacity)
        self.writer = CallEvents(calls, session, self.ended.set, max_undelivered)
        self.room = StreamRoom(calls, max_undelivered)
        self._logs = logs
        self._request = 0
        self._repeated = False
        self._reports: set[asyncio.Task[None]] = set()
        self._given_up: list[ClaimKey] = []
        self._keeps = False
        self._cleaning_up: dict[ClaimKey, asyncio.TimerHandle] = {}
        self._confirmed_at = clock()
        self._confirmation = asyncio.Event()

    # -- claims and stops ---------------------------------------------------------------------------------------

    async def claim(self) -> list[ClaimedTrigger]:
        """Claim as many free triggers as there is room for; return those to start.

        Raises:
            RemoteError: The store cannot be reached; the next call repeats the claim.
            ServiceSessionEndedError: The session has ended.
        """
        room = min(self.triggers.room, CLAIM_COUNT)
        if not room:
            return []
        if not self._repeated:
            self._request += 1
        self._repeated = True
        claimed = await self._ask(ClaimTriggers(self._session, self._request, room, self._queues, self._reserved))
        self._repeated = False
        if len(claimed) < room:
            self.exhausted.set()
        started = set(self.triggers.note_claimed(ClaimKey(one.id, one.token) for one in claimed))
        return [one for one in claimed if (one.id, one.token) in started]

    async def find_stops(self) -> list[tuple[ClaimKey, CancelReason]]:
        """Return the triggers to cancel, with the reasons: their tasks have moved on, or other processes run them.

        Raises:
            RemoteError: The store cannot be reached.
            ServiceSessionEndedError: The session has ended.
        """
        held = self.triggers.held
        if not held:
            return []
        stops = await self._ask(HeldTriggers(self._session, tuple((key.id, key.token) for key in held)))
        found = self.triggers.note_stops([(ClaimKey(stop.id, stop.token), stop.reason) for stop in stops])
        for key, reason in found:
            if reason is CancelReason.USER:
                # Its task waits for the cleanup, but no longer than it would wait for a process.
                late = asyncio.get_running_loop().call_later(self._grace_seconds, self._give_up, key)
                self._cleaning_up[key] = late
        return found

    async def _ask(self, request: Call[A]) -> A:
        try:
            return await self._calls.call(request)
        except CallRefusedError as error:
            if error.kind is RefusalKind.FENCED:
                self.ended.set()
                raise ServiceSessionEndedError from error
            raise

    async def place(self, triggers: Sequence[tuple[int, int, str]]) -> frozenset[int]:
        """Store the stream keys of triggers that start their tasks; return those that another session has to run.

        Args:
            triggers: Their ids, tokens and stream keys.
        """
        try:
            return frozenset(await call_patiently(self._calls, PlaceTriggers(self._session, tuple(triggers))))
        except CallRefusedError as error:
            if error.kind is RefusalKind.FENCED:
                self.ended.set()
            return frozenset(number for number, _, _ in triggers)

    def note_ended(self, key: ClaimKey, end: TaskEnd) -> None:
        """Handle a trigger that has ended: free its slot, and report a released trigger to the store."""
        self.triggers.note_ended(key)
        self.freed.set()
        if (late := self._cleaning_up.pop(key, None)) is not None:
            late.cancel()
        if end is TaskEnd.KILLED or (end is TaskEnd.GIVEN_UP and not self._keeps):
            self._give_up(key)

    def keep_claims(self) -> None:
        """Release nothing from now on: the parent ends the session, and decides about its triggers."""
        self._keeps = True

    def _give_up(self, key: ClaimKey) -> None:
        """Report soon that a trigger may be claimed by others, or that its task need not wait for it any longer."""
        if not self.ended.is_set():
            self._given_up.append(key)
            if len(self._given_up) == 1:
                self._begin(self._release(), "release of triggers")

    async def _release(self) -> None:
        """Release the queued triggers; the end of the session releases the rest."""
        given_up, self._given_up = self._given_up, []
        with contextlib.suppress(TidemillError):
            keys = tuple((key.id, key.token) for key in given_up)
            await call_patiently(self._calls, ReleaseTriggers(self._session, keys))

    # -- reports ------------------------------------------------------------------------------------------------

    def open_log(self, claim: ClaimedTrigger) -> TaskLog:
        return self._logs.open(claim)

    def report_failure(self, claim: ClaimedTrigger, error: str) -> None:
        """Accept the failure of a trigger, to be reported to its task soon."""
        self._begin(self._report(claim, error), "failure of a trigger")

    def report_end(self, claim: ClaimedTrigger) -> None:
        """Accept the end of a stream, to be reported soon."""
        self._begin(self._report(claim, None), "end of a stream")

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        report = asyncio.get_running_loop().create_task(work, name=name)
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _report(self, claim: ClaimedTrigger, error: str | None) -> None:
        """Report the failure of a trigger, or the end of a stream with or without an error."""
        for said in (error, "the trigger failed, and its error cannot be stored; see the log of the triggerer"):
            try:
                if claim.streams:
                    outcome = await call_patiently(self._calls, EndStream(self._session, claim.id, claim.token, said))
                    if outcome is OutcomeKind.FENCED:
                        # A user may have ended its task at this moment; the task waits until the trigger is gone.
                        self._give_up(ClaimKey(claim.id, claim.token))
                else:
                    await call_patiently(self._calls, FailTrigger(self._session, claim.id, claim.token, said or ""))
            except CallRefusedError as refusal:
                # Its task has moved on, or another triggerer runs it.
                log.warning("the store refused the end of a trigger", trigger=claim.id, error=str(refusal))
            except Exception:
                # Without a report its task would wait forever.
                log.exception("cannot store the end of a trigger", trigger=claim.id)
                continue
            return

    # -- start and stop -----------------------------------------------------------------------------------------

    async def beat(self) -> None:
        """Send heartbeats until the session has ended."""
        pause = self._lease.beat_seconds
        lag = 0.0
        while not self.ended.is_set():
            began = self._clock()
            try:
                measures = {"triggers": float(len(self.triggers.held)), "lag_seconds": lag}
                if not await self._calls.call(BeatSession(self._session, measures)):
                    self.ended.set()
                    return
                self._confirmed_at, pause = began, self._lease.beat_seconds
                self._confirmation.set()
            except RemoteError as error:
                throttle(log, 10.0).warning("cannot store the heartbeat of the triggerer; retrying", error=str(error))
                pause = min(1.0, self._lease.beat_seconds)
            except CallRefusedError:
                self.ended.set()
                return
            due = self._clock() + pause
            await asyncio.sleep(pause)
            lag = max(0.0, self._clock() - due)

    async def wait_over(self, seconds: float) -> None:
        """Wait until all claimable triggers have ended, but at most this long after they were claimed."""
        await self.exhausted.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.triggers.is_idle:
                    await self.freed.wait()
                    self.freed.clear()

    async def wait_confirmed(self) -> None:
        """Wait until the store has confirmed, less than half a lease ago, that this session is alive."""
        while self.ended.is_set() or self._clock() - self._confirmed_at > self._lease.seconds / 2:
            self._confirmation.clear()
            await self._confirmation.wait()

    async def close(self, timeout_seconds: float) -> None:
        """Store pending failures and the last log lines, within this time."""
        until = self._clock() + timeout_seconds
        if self._reports:
            await asyncio.wait(set(self._reports), timeout=timeout_seconds)
        for report in set(self._reports):
            report.cancel()
            log.warning("cannot record in the store how a trigger ended; the next triggerer runs it again")
        await self._logs.close(max(0.1, until - self._clock()))
