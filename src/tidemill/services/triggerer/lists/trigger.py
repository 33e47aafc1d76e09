"""Runs one trigger, as often as it restarts: creates it, waits for its events, has them stored, and cleans up.

`core.triggers.lifecycle` decides what follows an end.

Invariants:

1. Any error of a trigger or its class fails that trigger alone: `run` raises nothing but the cancellation of the host.
2. A trigger counts as finished only when all its events are stored.
3. `cleanup` runs after every run, and `on_kill` before it if a user cancelled; both have a time limit.
4. An event is encoded, then bound to the raw event it was derived from, before anything is awaited.
5. If a run ends without finishing, the raw event being processed fails at once. The trigger is blamed only if it raised
   or timed out. An event that the store refuses is blamed on the trigger in its own raw event and no other, and not at
   all if another host has claimed the trigger.
6. A trigger that restarts keeps its seat in its stream; one that ends for good releases everything it holds.
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

#: Time limit, in seconds, of each of `on_kill`, `cleanup` and the end of the trigger's own generator.
END_SECONDS = 30.0
#: A trigger that never waits yields to the loop after this many events.
_BURST = 64

#: Reasons for cancelling a run that continues elsewhere or later.
_ELSEWHERE = (CancelReason.HAND_OVER, CancelReason.SHUTDOWN)


class ListTrigger:
    """One trigger on this host.

    Args:
        services: The services of its host.
        spec: Its entry in the list.
        number: Its id in the store.
        token: The token of the claim under which it runs.
        serialized: Classpath and kwargs left by an earlier run, if they differ from the spec's; the trigger is created
            from them.
        seat: The key of the stream in which the replaced trigger kept a seat; None: it kept none.
        backoff: The bounds of the pauses before restarts.
        clock: A monotonic clock, in seconds.

    Attributes:
        spec: Its entry in the list.
        number: Its id in the store.
        disturbed: Whether another trigger has cancelled a task that this run may be waiting for.
        fired: How many events it has fired, over all of its runs.
        reason: Why it was cancelled; None: it was not.
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
        self._life: TriggerLife | None = None  # None once it has ended
        self._trigger: BaseTrigger | None = None
        self._task: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self.fired = self._pending = self._fired_before = 0
        self._stored: asyncio.Future[None] | None = None
        self._alive = True
        self._since = 0.0
        self._waits = False  # in the trigger's own code, not in the steps after it
        # Whether a cancellation may interrupt the task: not before it has begun, nor during cleanup.
        self._interruptible = False
        self._cancelled_at = 0.0
        self._abandoned = self.disturbed = False
        self._succeeded = False
        self._stored_error: str | None = None  # its error in the store while it runs

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def seat(self) -> Hashable | None:
        """The key of the shared stream in which it keeps its seat; None: it keeps none."""
        return self._stream.seat

    def create(self) -> None:
        """Create the trigger; if that fails, the first run ends with the error."""
        try:
            self._trigger = self._factory.create()
        except BaseException as error:  # its constructor may also raise KeyboardInterrupt
            self._fault = error

    def serialize(self) -> dict[int, str]:
        """Return the serialized trigger for the store, by its id; empty if the list entry suffices."""
        text = None if self._trigger is None else self._factory.remember(self._trigger)
        return {} if text is None else {self.number: text}

    def route(self) -> None:
        """Subscribe the trigger to its shared stream, if any.

        Synchronous, so that all triggers of a key subscribe before its first poll.
        """
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
        """Replace its entry by one that differs only in `restart`."""
        self.spec = spec
        if self._life is not None:
            self._life.restart = Restart(spec.restart)

    def cancel(self, reason: CancelReason, *, succeeded: bool = False) -> None:
        """End the trigger. The first reason wins, except that any reason replaces a timeout, which would restart it.

        Args:
            reason: Why.
            succeeded: Whether another trigger takes over its name and its seat.
        """
        if self.reason in (None, CancelReason.TIMEOUT) and self.reason is not reason and self._alive:
            self.reason = reason
            self._succeeded = succeeded
            self._cancelled_at = self._clock()
            if self._interruptible and self._task is not None:
                self._task.cancel(reason.value)

    def cancel_again(self, now: float) -> None:
        """Repeat a cancellation that the trigger's code has ignored for long; `now` is read from its clock."""
        if self._cancelled_at and self._waits and self._task is not None and now - self._cancelled_at >= END_SECONDS:
            log.error("a trigger ignores its cancellation; cancelling it again", trigger=self.spec.name)
            self._cancelled_at = now
            self._task.cancel((self.reason or CancelReason.TIMEOUT).value)

    def blame(self, error: str) -> None:
        """Fail this run, because its code harms other triggers; a run that has ended is not changed."""
        log.error("a trigger disturbs the others; failing it", trigger=self.spec.name, error=error)
        self._fail(TriggerError(error))

    async def wait_ended(self, timeout_seconds: float) -> None:
        """Wait until the trigger has ended for good; abandon it at the timeout, after it left its stream."""
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
                # Thousands of triggers wait here: a separate coroutine would take more memory.
                bind, left = self._stream.bind, _BURST
                async for event in self._stream.open_events(self._fault, self.reason):
                    if self.reason is not None:
                        break  # it was cancelled and still fires
                    # An event that cannot be encoded must not be bound.
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
            # `open_events` checks the reason next: the created trigger is cleaned up whatever happens here.
            with contextlib.suppress(asyncio.CancelledError):
                await services.keep_serialized(self.serialize())
            self.route()

    def _settle(self, seq: int | None, identity: str | None, outcome: StoreOutcome) -> None:
        """Handle the store's outcome of an event."""
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
        """End the run with an error, unless it already has one."""
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
        """Clean up after a run, report its outcome, and return what follows.

        Args:
            following: What follows, unless the store still refuses an event.
            reason: Why the run was cancelled (None: it was not); another reason may arrive meanwhile.
        """
        name, trigger, close = self.spec.name, self._trigger, getattr(self._stream.events, "aclose", None)
        self._leave_run(following, reason)
        if close is not None:
            await run_step(name, "the end of its generator", close, END_SECONDS)
        if trigger is not None and reason is CancelReason.USER:
            await run_step(name, "on_kill", trigger.on_kill, END_SECONDS)
        if trigger is not None:
            await run_step(name, "cleanup", trigger.cleanup, END_SECONDS)
        # The store may still refuse an event, which turns the end into a failure.
        if following.verdict is EndVerdict.FINISHED:
            await self._wait_stored()
            if self._fault is not None:
                following, reason = self._decide(TriggerEnding.RAISED), self.reason
        self._trigger = None
        self._stream.end_run()
        self._leave(for_good=following.pause_seconds is None)
        unsure = following.verdict is EndVerdict.FINISHED and self._pending
        # No report if another host owns the trigger, the outcome is open, or `wait_ended` has already reported it.
        if not (self.reason is CancelReason.HAND_OVER or unsure or self._abandoned or following.pause_seconds == 0):
            change = report_ending(self.spec, self.number, self._token, following, reason, self._fault)
            self._services.report_state(change)
            self._services.triggers.note_ended(self, following, change.reason, change.error)
        elif self.reason is CancelReason.HAND_OVER:
            self._services.triggers.note_handed_over(self)
        return following

    def _leave_run(self, following: Next, reason: CancelReason | None) -> None:
        """Fail the current raw event unless the run has finished, then leave the stream or keep a seat in it."""
        finished = following.verdict is EndVerdict.FINISHED
        comes_back = self._succeeded or following.pause_seconds is not None
        if not finished and (comes_back or reason in _ELSEWHERE):
            fault = self._fault if reason is None and not isinstance(self._fault, RefusedEventError) else None
            self._stream.fail_held(describe_error(fault) if fault is not None else None)
        if comes_back or (finished and reason is None):
            # It must not miss events before it is certain whether it restarts.
            self._stream.keep_seat()
        else:
            self._leave()

    def _leave(self, *, for_good: bool = True) -> None:
        """Leave the shared stream, or the seat in it, unless this trigger or its successor needs it again."""
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
        """Wait for the next run; return whether there is one."""
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
            # A trigger that restarts at once after each event counts as running throughout.
            self._stored_error = text
            self._services.report_state(StateChange(self.number, self._token, TriggerState.RUNNING, error=text))
        self._fault, self.disturbed = None, False
        self._fired_before = self.fired
        if following.from_start:
            self._factory.forget()
        return True

    async def _wait_stored(self) -> None:
        """Wait until the outcome of all its events is known.

        A cancellation ends the wait: the next host runs the trigger again.
        """
        self._interruptible = True
        while self._pending and self.reason is None:
            self._stored = asyncio.get_running_loop().create_future()
            with contextlib.suppress(asyncio.CancelledError):
                await self._stored
        self._interruptible = False
