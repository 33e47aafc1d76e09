"""Runs one trigger: creates it, lets it wait, has its events stored, and cleans up after it, as often as it restarts.

`core.triggers.lifecycle` decides what follows an end.

Invariants:
1. Whatever a trigger does, or its class, is its own failure: nothing leaves `run` but the cancellation of the host.
2. A trigger counts as finished only when all its events are stored.
3. `cleanup` runs after every run, `on_kill` before it when a user cancelled; both are bounded.
4. An event is encoded, then bound to the raw event it was derived from, before anything is awaited.
5. The raw event that a trigger is on when its run ends without finishing fails at once; it is blamed on the trigger
   only if the trigger raised or was too late. An event that the store refuses is blamed on the trigger in its own raw
   event and in no other, and not at all when another host has claimed the trigger.
6. A trigger that runs again keeps its seat in its stream; one that is gone for good is released from all it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import time
from collections.abc import Callable, Hashable
from functools import partial

import structlog

from tidemill.core.errors import describe_error
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.triggers.event_plan import EventRefusal, EventRefused, StoreOutcome
from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.core.triggers.lifecycle import (
    BACKOFF,
    CancelReason,
    EndVerdict,
    Next,
    Restart,
    TriggerEnding,
    TriggerLife,
)
from tidemill.services.triggerer.hosting.ending import RefusedEventError, format_fault, report_ending, run_step
from tidemill.services.triggerer.hosting.loading import TriggerError, encode_payload, read_identity
from tidemill.services.triggerer.hosting.run_services import ListTriggerServices
from tidemill.services.triggerer.hosting.state_change import StateChange
from tidemill.services.triggerer.hosting.stream_membership import StreamMembership
from tidemill.services.triggerer.hosting.trigger_loop import RUN
from tidemill.services.triggerer.lists.trigger_factory import TriggerFactory
from tidemill.store.records import TriggerSpec, TriggerState
from tidemill.triggers.base import BaseTrigger

log = structlog.get_logger(__name__)

#: `on_kill`, `cleanup` and the end of the trigger's own generator may take this many seconds, each.
END_SECONDS = 30.0
#: A trigger that never waits yields to the loop after this many events.
_BURST = 64

#: Why a run is cancelled that continues elsewhere, or later.
_ELSEWHERE = (CancelReason.HAND_OVER, CancelReason.SHUTDOWN)


class ListTrigger:
    """One trigger on this host.

    Args:
        services: What its host offers.
        spec: Its entry in the list.
        number: Its id in the store.
        token: That of the claim under which it runs.
        serialized: Classpath and kwargs to create it from, where they differ from the spec's: an earlier run left them.
        seat: The key of the stream in which the trigger that it replaces kept a seat.
        backoff: The bounds of the pauses before restarts.
        clock: Seconds, monotonic.

    Attributes:
        spec: Its entry in the list.
        number: Its id in the store.
        disturbed: Whether another trigger has cancelled a task that this run may wait for.
        fired: How many events it has fired, over all of its runs.
        reason: Why it was cancelled.
    """

    __slots__ = (
        "_abandoned",
        "_alive",
        "_backoff",
        "_cancelled_at",
        "_clock",
        "_factory",
        "_fault",
        "_fired_before",
        "_interruptible",
        "_life",
        "_pending",
        "_services",
        "_since",
        "_stored",
        "_stored_error",
        "_stream",
        "_succeeded",
        "_task",
        "_token",
        "_trigger",
        "_waits",
        "disturbed",
        "fired",
        "number",
        "reason",
        "spec",
    )

    def __init__(
        self,
        services: ListTriggerServices,
        spec: TriggerSpec,
        number: int,
        token: int,
        serialized: tuple[str, str] | None = None,
        seat: Hashable | None = None,
        *,
        backoff: Backoff = BACKOFF,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.number = number
        self.reason: CancelReason | None = None
        self._services = services
        self._token = token
        self._clock = clock
        self._factory = TriggerFactory(spec, serialized)
        self._stream = StreamMembership(services.manager, spec.name, seat)
        self._backoff = backoff
        self._life: TriggerLife | None = None  # while it has not ended
        self._trigger: BaseTrigger | None = None
        self._task: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self.fired = self._pending = self._fired_before = 0
        self._stored: asyncio.Future[None] | None = None
        self._alive = True
        self._since = 0.0
        self._waits = False  # in the trigger's own code, and not in what follows it
        # Where a cancellation may reach it: not before its task has begun, nor while it cleans up.
        self._interruptible = False
        self._cancelled_at = 0.0
        self._abandoned = self.disturbed = False
        self._succeeded = False
        self._stored_error: str | None = None  # the error that the store has of it while it runs

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def seat(self) -> Hashable | None:
        """The key of the shared stream in which it keeps its seat, if it does."""
        return self._stream.seat

    def create(self) -> None:
        """Create the trigger; if that fails, the first run ends with the error."""
        try:
            self._trigger = self._factory.create()
        except BaseException as error:  # its constructor may raise KeyboardInterrupt, too
            self._fault = error

    def serialize(self) -> dict[int, str]:
        """Return what the store is to keep of the trigger, by its id; empty if the list already says it all."""
        text = None if self._trigger is None else self._factory.remember(self._trigger)
        return {} if text is None else {self.number: text}

    def route(self) -> None:
        """Subscribe it to its stream, if it shares one; synchronous, so that all of a key are there before a poll."""
        if self._trigger is None or self.reason is not None:
            return
        try:
            self._stream.join(self._trigger)
        except BaseException as error:  # KeyboardInterrupt would end the loop of all triggers
            self._fault = error

    def start(self) -> asyncio.Task[None]:
        context = contextvars.copy_context()
        context.run(RUN.set, self)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self.spec.name, context=context)
        return self._task

    def relist(self, spec: TriggerSpec) -> None:
        """Take on an entry that differs in nothing but its restart."""
        self.spec = spec
        if self._life is not None:
            self._life.restart = Restart(spec.restart)

    def cancel(self, reason: CancelReason, *, succeeded: bool = False) -> None:
        """End it; the first reason counts, except that any other replaces a timeout, after which it would run again.

        Args:
            reason: Why.
            succeeded: Whether another trigger takes its name, and its seat.
        """
        if self.reason in (None, CancelReason.TIMEOUT) and self.reason is not reason and self._alive:
            self.reason = reason
            self._succeeded = succeeded
            self._cancelled_at = self._clock()
            if self._interruptible and self._task is not None:
                self._task.cancel(reason.value)

    def cancel_again(self, now: float) -> None:
        """Repeat a cancellation that its own code has ignored for long; `now` is that of its clock."""
        if self._cancelled_at and self._waits and self._task is not None and now - self._cancelled_at >= END_SECONDS:
            log.error("a trigger does not end when it is cancelled; it is cancelled again", trigger=self.spec.name)
            self._cancelled_at = now
            self._task.cancel((self.reason or CancelReason.TIMEOUT).value)

    def blame(self, error: str) -> None:
        """Fail this run, because its code did what harms other triggers; one that is over has nothing left to fail."""
        log.error("a trigger harms others", trigger=self.spec.name, error=error)
        self._fail(TriggerError(error))

    async def wait_ended(self, timeout_seconds: float) -> None:
        """Wait until it has ended for good; one that does not is left behind, without its stream."""
        if self._task is None:
            return
        await asyncio.wait([self._task], timeout=timeout_seconds)
        if not self._task.done():
            log.error("a trigger does not end; it is left behind", trigger=self.spec.name)
            self._abandoned = True
            if self._succeeded or self.reason in _ELSEWHERE:
                self._stream.fail_held(None)
            self._leave()
            self._report_cancelled(self.reason or CancelReason.USER)

    async def _run(self) -> None:
        services = self._services
        while True:
            self._since = self._clock()
            services.triggers.note_started(self)
            ending = TriggerEnding.RETURNED
            self._waits = self._interruptible = True
            try:
                # Thousands of triggers wait here: a coroutine of its own would take more memory.
                bind, left = self._stream.bind, _BURST
                async for event in self._stream.open_events(self._fault, self.reason):
                    if self.reason is not None:
                        break  # it was cancelled and still fires
                    # What cannot be stored is not bound.
                    payload, identity = encode_payload(event), read_identity(event)
                    done = partial(self._settle, bind(), identity)
                    services.events.add(self.number, self._token, payload, identity, done)
                    self._pending += 1
                    self.fired += 1
                    if services.events.standing is not ProducerStanding.OPEN:
                        await services.events.wait_open()
                    left -= 1
                    if not left:
                        left = _BURST
                        await asyncio.sleep(0)
            except asyncio.CancelledError as error:
                ending = TriggerEnding.DISTURBED if self.disturbed and self._fault is None else TriggerEnding.RAISED
                self._fault = self._fault or error
            except BaseException as error:
                ending = TriggerEnding.RAISED
                self._fault = error
            self._waits = self._interruptible = False
            if not await self._wait_for_restart(await self._finish(self._decide(ending), self.reason)):
                self._alive = False
                return
            self.create()
            # `open_events` looks at the reason next: what was created is cleaned up whatever happens here.
            with contextlib.suppress(asyncio.CancelledError):
                await services.keep_serialized(self.serialize())
            self.route()

    def _settle(self, seq: int | None, identity: str | None, outcome: StoreOutcome) -> None:
        """Note that an event is stored, or never will be."""
        self._pending -= 1
        if not isinstance(outcome, EventRefused):
            self._services.note_stored(self.spec.name, outcome, identity)
            if seq is not None:
                self._services.manager.confirm_persisted((seq,))
        else:
            self._note_refused(seq, outcome)
        if self._stored is not None and not self._pending and not self._stored.done():
            self._stored.set_result(None)

    def _note_refused(self, seq: int | None, outcome: EventRefused) -> None:
        fault = RefusedEventError(f"an event is refused by the store: {outcome.reason.value}. {outcome.detail}")
        fenced = outcome.reason is EventRefusal.FENCED
        if seq is not None:
            self._services.manager.refuse_persisted((seq,), None if fenced else describe_error(fault))
        if fenced:
            self._services.note_fenced()
            self.cancel(CancelReason.HAND_OVER)
        else:
            self._fail(fault)

    def _fail(self, fault: TriggerError) -> None:
        """End the run with an error, unless it has one."""
        if self._fault is None:
            self._fault = fault
            if self._waits and self._task is not None:
                self._task.cancel(str(fault))

    def _decide(self, ending: TriggerEnding) -> Next:
        bits = random.getrandbits(JITTER_BITS)
        if self._life is None:
            self._life = TriggerLife(Restart(self.spec.restart), self._backoff)
        if self.reason is not None:
            return self._life.decide_cancelled(self.reason, bits)
        return self._life.decide_ended(
            ending, self.fired - self._fired_before, self._clock() - self._since, bits, self._stream.taken
        )

    async def _finish(self, following: Next, reason: CancelReason | None) -> Next:
        """Clean up after a run, report what became of it, and return what follows.

        Args:
            following: What follows, unless an event is refused yet.
            reason: Why it was cancelled, if that is how it ended; another reason may come meanwhile.
        """
        name, trigger, close = self.spec.name, self._trigger, getattr(self._stream.events, "aclose", None)
        self._leave_run(following, reason)
        if close is not None:
            await run_step(name, "the end of its generator", close, END_SECONDS)
        if trigger is not None and reason is CancelReason.USER:
            await run_step(name, "on_kill", trigger.on_kill, END_SECONDS)
        if trigger is not None:
            await run_step(name, "cleanup", trigger.cleanup, END_SECONDS)
        if following.verdict is EndVerdict.FINISHED:
            await self._wait_stored()
            if self._fault is not None:
                following, reason = self._decide(TriggerEnding.RAISED), self.reason
        self._trigger = None
        self._stream.end_run()
        self._leave(for_good=following.pause_seconds is None)
        unsure = following.verdict is EndVerdict.FINISHED and self._pending
        # The last word belongs to another host, or to nobody yet, or to the call that left this one behind.
        if not (self.reason is CancelReason.HAND_OVER or unsure or self._abandoned or following.pause_seconds == 0):
            change = report_ending(self.spec, self.number, self._token, following, reason, self._fault)
            self._services.report_state(change)
            self._services.triggers.note_ended(self, following, change.reason, change.error)
        elif self.reason is CancelReason.HAND_OVER:
            self._services.triggers.note_handed_over(self)
        return following

    def _leave_run(self, following: Next, reason: CancelReason | None) -> None:
        """Fail the raw event that it is on, unless it has finished, and leave its stream or keep a seat there."""
        finished = following.verdict is EndVerdict.FINISHED
        comes_back = self._succeeded or following.pause_seconds is not None
        if not finished and (comes_back or reason in _ELSEWHERE):
            fault = self._fault if reason is None and not isinstance(self._fault, RefusedEventError) else None
            self._stream.fail_held(describe_error(fault) if fault is not None else None)
        if comes_back or (finished and reason is None):
            # Until it is known whether it runs again, it must not miss anything.
            self._stream.keep_seat()
        else:
            self._leave()

    def _leave(self, *, for_good: bool = True) -> None:
        """Leave its shared stream, or its seat there, unless somebody comes back to that."""
        if self._services.is_stopping():
            return
        if self._succeeded:
            self._stream.keep_seat()
        elif self.reason is CancelReason.HAND_OVER:
            self._stream.hand_over()
        elif for_good:
            self._stream.leave()

    def _report_cancelled(self, reason: CancelReason) -> None:
        if reason is CancelReason.HAND_OVER:
            self._services.triggers.note_handed_over(self)
            return
        self._services.triggers.note_cancelled(self, reason.value)
        self._services.report_state(StateChange(self.number, self._token, TriggerState.CANCELLED, reason.value))

    async def _wait_for_restart(self, following: Next) -> bool:
        """Wait for the next run; tell whether there is one."""
        if following.pause_seconds is None:
            return False
        if self.reason is CancelReason.TIMEOUT:
            self.reason = None
            self._cancelled_at = 0.0
        error = self._fault
        self._interruptible = True
        if self.reason is None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(following.pause_seconds)
        if self.reason is not None:
            self._leave()
            self._report_cancelled(self.reason)
            return False
        text = format_fault(error) if error is not None else None
        if following.pause_seconds or text != self._stored_error:
            # One that begins again at once, event by event, has been running all the time.
            self._stored_error = text
            self._services.report_state(StateChange(self.number, self._token, TriggerState.RUNNING, error=text))
        self._fault, self.disturbed = None, False
        self._fired_before = self.fired
        if following.from_start:
            self._factory.forget()
        return True

    async def _wait_stored(self) -> None:
        """Wait until the outcome of all its events is known; a cancellation ends the wait: the next host runs it."""
        self._interruptible = True
        while self._pending and self.reason is None:
            self._stored = asyncio.get_running_loop().create_future()
            with contextlib.suppress(asyncio.CancelledError):
                await self._stored
        self._interruptible = False
