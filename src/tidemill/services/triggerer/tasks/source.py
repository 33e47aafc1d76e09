"""The triggers of deferred tasks: one triggerer claims them from the store, and reports on them.

Theory of operation. Whenever the doorbell rings, a trigger has ended, or two seconds have passed, the triggerer claims
its share of the triggers that wait, and asks which of its triggers to stop. Storing the first event of a trigger
(`CallEvents`) resumes its task. A trigger that ends without an event is reported as failed, however long the store
takes. A triggerer that runs far more than the others hands triggers over.

Invariants: a failure is reported until the store has answered; once the session has ended in the store, nothing more is
claimed, and all running triggers are released. Without a heartbeat within the lease, and in a trial of a part of a
stream, nothing is acknowledged to a broker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from tidemill.core.errors import RemoteError, TidemillError
from tidemill.core.triggers.fair_share import HeldUnit, TriggererLoad, choose_moves, is_far_above
from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.core.triggers.task_triggers import HAND_OVER, ClaimKey, TaskEnd, TaskTriggers
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.store_clock import read_elapsed_seconds, read_elapsed_us
from tidemill.services.sessions.beats import note_clock
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
    KillCalled,
    ListLoads,
    PlaceTriggers,
    ReleaseTriggers,
)
from tidemill.store.calls.worker_calls import OutcomeKind
from tidemill.store.database import StoreAwayError, StoreClient
from tidemill.store.wire.remote import call_patiently

log = structlog.get_logger(__name__)

A = TypeVar("A")

#: How long an event waits for others. Tasks are waiting, and the store batches calls anyway.
LINGER_SECONDS = 0.002
#: How many triggers are handed over per heartbeat.
_MOVES = 2_000
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
        clock: A monotonic clock, in seconds, that also counts while the machine is suspended, as leases do.
        reserved: Whether to claim only triggers that are reserved for the session.
        acknowledges: Whether events may be acknowledged to brokers at all.
        grace_seconds: How long a task that a user cleared waits for the cleanup of its trigger.
        lease: The lease of the session: once it has expired, others may run the triggers.
        max_undelivered: The number of undelivered events of a stream above which its trigger waits.

    Attributes:
        name: The name under which streams store their offsets upstream.
        linger_seconds: How long an event waits for others.
        writer: Stores events.
        ended: Set once the store has answered that the session has ended.
        freed: Set when a trigger has ended.
        exhausted: Set once a claim has returned fewer triggers than there was room for, or there is no room.
        triggers: The triggers that are running.
        room: The triggers that wait until their events are handled.
        kills: Stopped triggers whose `on_kill` this process has to call, because their triggerer is gone.
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
        clock: Callable[[], float] = read_elapsed_seconds,
        *,
        reserved: bool = False,
        acknowledges: bool = True,
        grace_seconds: float = 5.0,
        lease: ServiceLease = _LEASE,
        max_undelivered: int = 1000,
    ) -> None:
        self._lease = lease
        self._grace_seconds = grace_seconds
        self._calls, self._session, self._queues, self._clock = calls, session, queues, clock
        self._reserved, self._acknowledges = reserved, acknowledges
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
        self._killed: set[ClaimKey] = set()
        self._moving: dict[ClaimKey, str | None] = {}
        self._rests: dict[ClaimKey, float] = {}
        self._move_at = clock() + lease.beat_seconds
        self._kill_at = 0.0
        self.kills: list[ClaimedTrigger] = []
        # The kills that are not reported yet.
        self._calling: set[int] = set()
        self._beats = False
        self._keeps = False
        self._cleaning_up: dict[ClaimKey, asyncio.TimerHandle] = {}
        self._confirmed_at = clock()
        self._confirmation = asyncio.Event()
        self._heard = asyncio.Event()

    # -- claims and stops ---------------------------------------------------------------------------------------

    async def claim(self) -> list[ClaimedTrigger]:
        """Claim the fair share of what waits; return those to start.

        Raises:
            RemoteError: The store cannot be reached; the next call repeats the claim.
            ServiceSessionEndedError: The session has ended.
        """
        room, now = min(self.triggers.room, CLAIM_COUNT), self._clock()
        if not room:
            self.exhausted.set()
            # Stopped triggers whose `on_kill` must be called take no room.
            if not self.triggers.is_over and (self._reserved or now < self._kill_at):
                return []
            self._kill_at = now + self._lease.beat_seconds
        if not self._repeated:
            self._request += 1
        self._repeated = True
        leaving = tuple(sorted({stream for stream in self._moving.values() if stream is not None}))
        held = self.triggers.count
        answer = await self._ask(
            ClaimTriggers(
                self._session,
                self._request,
                room,
                self._queues,
                self._reserved,
                held,
                leaving,
                kills=not self._reserved,
            )
        )
        self._repeated = False
        self.kills += [one for one in answer if one.kill is not None]
        self._calling.update(one.kill for one in answer if one.kill is not None)
        claimed = [one for one in answer if one.kill is None]
        if len(claimed) < room:
            self.exhausted.set()
        started = set(self.triggers.note_claimed(ClaimKey(one.id, one.token) for one in claimed))
        now = self._clock()
        for one in claimed:
            if one.rests_us:
                self._rests[ClaimKey(one.id, one.token)] = now + one.rests_us / 1e6
        return [one for one in claimed if (one.id, one.token) in started]

    async def choose_moves(self, list_units: Callable[[], Sequence[tuple[str | None, ClaimKey]]]) -> list[ClaimKey]:
        """Return the triggers to hand over to triggerers that run far fewer; asked once per heartbeat.

        Args:
            list_units: Returns the triggers that run, with their shared streams.

        Raises:
            RemoteError: The store cannot be reached.
            ServiceSessionEndedError: The session has ended.
        """
        now = self._clock()
        if self._reserved or now < self._move_at:
            return []
        self._move_at = now + self._lease.beat_seconds
        loads = await self._ask(ListLoads(self._session, self._queues))
        others = [TriggererLoad(one.held, one.capacity) for one in loads]
        own = TriggererLoad(self.triggers.count - len(self._moving), self.triggers.capacity)
        if not is_far_above(own, others):
            return []
        self._rests = {key: until for key, until in self._rests.items() if until > now}
        held = set(self.triggers.held)
        units: dict[str | int, list[ClaimKey]] = {}
        for stream, key in list_units():
            units.setdefault(key.id if stream is None else stream, []).append(key)
        free = [
            HeldUnit(name, len(keys))
            for name, keys in units.items()
            if held.issuperset(keys) and self._rests.keys().isdisjoint(keys)
        ]
        chosen = choose_moves(own, others, free, _MOVES)
        moves = [key for name in chosen for key in units[name]]
        self._moving.update((key, name if isinstance(name, str) else None) for name in chosen for key in units[name])
        self.triggers.note_stops((key, HAND_OVER) for key in moves)
        return moves

    def take_kills(self) -> list[ClaimedTrigger]:
        """Return the stopped triggers whose `on_kill` is to be called now."""
        kills, self.kills = self.kills, []
        return kills

    async def report_kill(self, claim: ClaimedTrigger, error: str | None) -> None:
        """Report that `on_kill` of a stopped trigger was called, or why it could not be."""
        assert claim.kill is not None
        with contextlib.suppress(CallRefusedError):
            await call_patiently(self._calls, KillCalled(self._session, claim.kill, error))
        self._calling.discard(claim.kill)
        self.freed.set()

    async def find_stops(self) -> list[tuple[ClaimKey, CancelReason]]:
        """Return the triggers to cancel, with the reasons: their tasks have moved on, or other processes run them.

        Raises:
            RemoteError: The store cannot be reached.
            ServiceSessionEndedError: The session has ended.
        """
        held = self.triggers.held
        if not held:
            return []
        stops = await self._ask(HeldTriggers(self._session, tuple(held)))
        found = self.triggers.note_stops([(ClaimKey(stop.id, stop.token), stop.reason) for stop in stops])
        for key, reason in found:
            if reason is CancelReason.USER:
                # Its task waits for the cleanup, but no longer than it would wait for a process.
                late = asyncio.get_running_loop().call_later(self._grace_seconds, self._give_up_killed, key)
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
        """Store the stream keys of triggers that start their tasks; return those that may not run here.

        Other sessions read their streams, or this one is handing their streams over, and advances them no more.

        Args:
            triggers: Their ids, tokens and stream keys.
        """
        try:
            elsewhere = await call_patiently(self._calls, PlaceTriggers(self._session, tuple(triggers)))
        except CallRefusedError as error:
            if error.kind is RefusalKind.FENCED:
                self.ended.set()
            return frozenset(number for number, _, _ in triggers)
        leaving = set(self._moving.values())
        return frozenset({*elsewhere, *(number for number, _, stream in triggers if stream in leaving)})

    def note_ended(self, key: ClaimKey, end: TaskEnd) -> None:
        """Handle a trigger that has ended: free its slot, and report a released trigger to the store."""
        self.triggers.note_ended(key)
        self.freed.set()
        self._rests.pop(key, None)
        if (late := self._cleaning_up.pop(key, None)) is not None:
            late.cancel()
        if end is TaskEnd.KILLED:
            self._give_up_killed(key)
        elif end is TaskEnd.GIVEN_UP and not self._keeps:
            self._give_up(key)
        else:
            self._moving.pop(key, None)

    def keep_claims(self) -> None:
        """Release nothing from now on: the parent ends the session, and decides about its triggers."""
        self._keeps = True

    def _give_up_killed(self, key: ClaimKey) -> None:
        """Report soon that `on_kill` was called, or is being called for longer than the task waits."""
        self._killed.add(key)
        self._give_up(key)

    def _give_up(self, key: ClaimKey) -> None:
        """Report soon that a trigger may be claimed by others, or that its task need not wait for it any longer."""
        if not self.ended.is_set():
            self._given_up.append(key)
            if len(self._given_up) == 1:
                self._begin(self._release(), "release of triggers")

    async def _release(self) -> None:
        """Release the queued triggers; the end of the session releases the rest."""
        given_up, self._given_up = self._given_up, []
        killed, self._killed = self._killed, set()
        for moves in (False, True):
            keys = [key for key in given_up if (key in self._moving) is moves]
            if keys:
                kills = tuple(key.id for key in keys if key in killed)
                with contextlib.suppress(TidemillError):
                    await call_patiently(
                        self._calls,
                        ReleaseTriggers(self._session, tuple((key.id, key.token) for key in keys), kills, moves),
                    )
            for key in keys:
                self._moving.pop(key, None)

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
                        self._give_up_killed(ClaimKey(claim.id, claim.token))
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
        self._beats = True
        try:
            await self._beat()
        finally:
            self._beats = False

    async def _beat(self) -> None:
        pause = self._lease.beat_seconds
        lag = 0.0
        while not self.ended.is_set():
            began = self._clock()
            try:
                measures = {"triggers": float(self.triggers.running), "lag_seconds": lag}
                asked_us = read_elapsed_us()
                now_us = await self._calls.call(BeatSession(self._session, measures))
                if not now_us:
                    self.ended.set()
                    return
                note_clock(now_us, asked_us)
                self._heard.set()
                self._confirmed_at, pause = began, self._lease.beat_seconds
                self._confirmation.set()
            except RemoteError as error:
                if not isinstance(error, StoreAwayError):
                    throttle(log, 10.0).warning(
                        "cannot store the heartbeat of the triggerer; retrying", error=str(error)
                    )
                pause = min(1.0, self._lease.beat_seconds)
            except CallRefusedError:
                self.ended.set()
                return
            due = self._clock() + pause
            await asyncio.sleep(pause)
            lag = max(0.0, self._clock() - due)

    async def wait_over(self, seconds: float) -> None:
        """Wait until all claimable triggers have ended and all kills are called, but at most this long."""
        await self.exhausted.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._calling or not self.triggers.is_idle:
                    await self.freed.wait()
                    self.freed.clear()

    async def wait_heard(self) -> None:
        """Wait for the first answer to a heartbeat: it brings the time of the store, by which triggers go."""
        await self._heard.wait()

    async def wait_confirmed(self) -> None:
        """Wait until the store has confirmed, less than half a lease ago, that this session is alive."""
        while self.ended.is_set() or self._clock() - self._confirmed_at > self._lease.seconds / 2:
            self._confirmation.clear()
            await self._confirmation.wait()

    async def wait_leased(self) -> bool:
        """Wait until the store has confirmed this session within its lease; False: it will not any more.

        A trial that runs only some triggers of a stream acknowledges nothing: the others must read the same events.
        A heartbeat before the end of the lease keeps others from taking over, so the lease is counted from its start.
        """
        if not self._acknowledges:
            return False
        limit = self._lease.seconds - self._lease.beat_seconds
        while not self.ended.is_set():
            if self._clock() - self._confirmed_at <= limit:
                return True
            if not self._beats:
                return False
            self._confirmation.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._confirmation.wait(), self._lease.beat_seconds)
        return False

    async def close(self, timeout_seconds: float) -> None:
        """Store pending failures and the last log lines, within this time."""
        until = self._clock() + timeout_seconds
        if self._reports:
            await asyncio.wait(set(self._reports), timeout=timeout_seconds)
        for report in set(self._reports):
            report.cancel()
            log.warning("cannot record in the store how a trigger ended; the next triggerer runs it again")
        await self._logs.close(max(0.1, until - self._clock()))
