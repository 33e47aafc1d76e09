"""Runs one trigger: makes it, lets it wait, has its events stored, and cleans up after it, as often as it restarts.

What follows an end, `core.trigger_life` decides.

Invariants:
1. Whatever a trigger does, or its class, is its own failure: nothing leaves `run` but the cancellation of the host.
2. A trigger counts as finished only when all its events are stored.
3. `cleanup` runs after every run, `on_kill` before it when a user cancelled; both are bounded.
4. An event is encoded, then bound to the raw event it was derived from, before anything is awaited.
5. The raw event that a trigger is on when its run ends otherwise than by finishing fails at once; it is blamed on the
   trigger only if the trigger raised or was too late. An event that the store refuses is blamed on the trigger in its
   own raw event and in no other, and not at all when another host has claimed the trigger.
6. A trigger that runs again keeps its seat in its stream; one that is gone for good is released from all it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any

import structlog

from tidemill.config.redaction import redact_text
from tidemill.core.errors import describe_error
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.triggers.event_plan import Refusal, Refused, StoreOutcome
from tidemill.core.triggers.group_commit import Standing
from tidemill.core.triggers.lifecycle import BACKOFF, CancelReason, Ending, EndVerdict, Next, Restart, TriggerLife
from tidemill.services.triggerer.loading import TriggerError, identity_of, make_trigger, payload_of
from tidemill.services.triggerer.run_services import RunServices
from tidemill.services.triggerer.state_writer import StateChange
from tidemill.store.records import TriggerSpec, TriggerState
from tidemill.triggers.base import BaseEventTrigger, BaseTrigger
from tidemill.triggers.shared_stream import Routed, route
from tidemill.triggers.streams.subscription import AckSubscription

log = structlog.get_logger(__name__)

#: `on_kill`, `cleanup` and the end of the trigger's own generator may take this many seconds, each.
END_SECONDS = 30.0
#: A trigger that never waits gives the loop back after this many events.
_BURST = 64

_STATES = {
    EndVerdict.FINISHED: TriggerState.FINISHED,
    EndVerdict.FAILED: TriggerState.FAILED,
    EndVerdict.CANCELLED: TriggerState.CANCELLED,
}
#: Why a run is cancelled that goes on elsewhere, or later.
_ELSEWHERE = (CancelReason.HAND_OVER, CancelReason.SHUTDOWN)


class RefusedEventError(TriggerError):
    """The store refuses an event; its raw event has failed, and the one that its trigger is on now may be another."""


class TriggerRun:
    """One trigger on this host.

    Args:
        place: Its host.
        spec: What it is; `continued` says what it goes on with.
        number: Its id in the store.
        token: That of the claim under which it runs.
        continued: Classpath and kwargs to make it of, where they differ from the spec's: an earlier run wrote them.
        backoff: The bounds of the pauses before restarts.
        clock: Seconds, monotonic.

    Attributes:
        spec: What it is.
        key: The shared stream it takes part in, if it does.
        fired: How many events this run has fired.
        reason: Why it was cancelled.
        seat: The shared stream in which it keeps its seat, if it does.
    """

    __slots__ = (
        "_abandoned",
        "_alive",
        "_asked_at",
        "_clock",
        "_continued",
        "_fault",
        "_life",
        "_number",
        "_open",
        "_pending",
        "_place",
        "_routed",
        "_since",
        "_stored",
        "_stored_error",
        "_succeeded",
        "_task",
        "_token",
        "_trigger",
        "_waits",
        "fired",
        "key",
        "reason",
        "seat",
        "spec",
    )

    def __init__(
        self,
        place: RunServices,
        spec: TriggerSpec,
        number: int,
        token: int,
        continued: tuple[str, str] | None = None,
        *,
        backoff: Backoff = BACKOFF,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Do nothing yet."""
        self.spec = spec
        self.key: Hashable | None = None
        self.seat: Hashable | None = None
        self.fired = 0
        self.reason: CancelReason | None = None
        self._place = place
        self._number = number
        self._token = token
        self._continued = continued
        self._clock = clock
        self._life = TriggerLife(Restart(spec.restart), backoff)
        self._trigger: BaseTrigger | None = None
        self._routed: Routed | None = None
        self._task: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self._pending = 0
        self._stored: asyncio.Future[None] | None = None
        self._alive = True
        self._since = 0.0
        # In the trigger's own code, and not in what follows it.
        self._waits = False
        # Where a cancellation may reach it: not before its task has begun, nor while it cleans up.
        self._open = False
        self._asked_at = 0.0
        self._abandoned = False
        self._succeeded = False
        # The error that the store has of it while it runs.
        self._stored_error: str | None = None

    # -- from outside -----------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Its id in the store."""
        return self._number

    @property
    def trigger(self) -> BaseTrigger | None:
        """The trigger of the current run, while there is one."""
        return self._trigger

    def make(self) -> None:
        """Make the trigger; what goes wrong is kept, and is how the first run ends."""
        name = self.spec.name
        if self._continued is not None:
            try:
                self._trigger = make_trigger(name, *self._continued)
            except TriggerError as error:
                log.warning(
                    "a trigger cannot be created from what serialize() returned earlier; it starts over as listed",
                    trigger=name,
                    error=str(error),
                )
                self._continued = None
            else:
                return
        try:
            self._trigger = make_trigger(name, self.spec.classpath, self.spec.kwargs)
        except TriggerError as error:
            self._fault = error

    def go_on_with(self, classpath: str, kwargs: str) -> None:
        """Make it of this when it has failed: what it was written down as."""
        self._continued = (classpath, kwargs)

    def route(self) -> None:
        """Subscribe it to its stream, if it shares one; synchronous, so that all of a key are there before a poll."""
        if self._trigger is None or self.reason is not None:
            return
        try:
            routed = self._routed = route(self._place.manager, self.spec.name, self._trigger)
            self.key = routed.key
        except (Exception, SystemExit) as error:
            self._fault = error
            # It may have been subscribed before its filter raised.
            with contextlib.suppress(Exception, SystemExit):
                self.key = self._trigger.shared_stream_key() if isinstance(self._trigger, BaseEventTrigger) else None
            if self.key is None:
                return
        self.leave_seat(unless=self.key)

    def leave_seat(self, unless: Hashable | None = None) -> None:
        """Give its seat up, unless that is in a certain stream: it takes part in another one, or in none."""
        seat, self.seat = self.seat, None
        if seat is not None and seat != unless:
            self._place.manager.note_gone(self.spec.name, seat)

    def start(self) -> asyncio.Task[None]:
        """Start running."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self.spec.name)
        return self._task

    def relist(self, spec: TriggerSpec) -> None:
        """Take that its restart is another one, and nothing else."""
        self.spec = spec
        self._life.restart = Restart(spec.restart)

    def cancel(self, reason: CancelReason, *, succeeded: bool = False) -> None:
        """Ask it to end; the first reason counts, but a timeout gives way: it alone lets a trigger run again.

        Args:
            reason: Why.
            succeeded: Whether another one takes its place, and its seat.
        """
        if self.reason in (None, CancelReason.TIMEOUT) and self.reason is not reason and self._alive:
            self.reason = reason
            self._succeeded = succeeded
            self._asked_at = self._clock()
            if self._open and self._task is not None:
                self._task.cancel(reason.value)

    def insist(self, now: float) -> None:
        """Ask it again, if its own code has not ended for long; `now` is that of its clock."""
        if self._asked_at and self._waits and self._task is not None and now - self._asked_at >= END_SECONDS:
            log.error("a trigger does not end when it is cancelled; it is asked again", trigger=self.spec.name)
            self._asked_at = now
            self._task.cancel((self.reason or CancelReason.TIMEOUT).value)

    async def ended(self, timeout_seconds: float) -> None:
        """Wait until it has ended for good; one that does not is left behind, without its stream."""
        if self._task is None:
            return
        await asyncio.wait([self._task], timeout=timeout_seconds)
        if not self._task.done():
            log.error("a trigger does not end; it is left behind", trigger=self.spec.name)
            self._abandoned = True
            if self._succeeded or self.reason in _ELSEWHERE:
                self._fail_held(None)
            self._leave(for_good=True)
            if self.reason is not CancelReason.HAND_OVER:
                reason = self.reason.value if self.reason is not None else None
                self._place.mark(StateChange(self._number, self._token, TriggerState.CANCELLED, reason))

    # -- its life ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._since = self._clock()
            ending = Ending.RETURNED
            self._waits = self._open = True
            try:
                await self._events()
            except asyncio.CancelledError as error:
                ending = Ending.RAISED
                self._fault = self._fault or error
            except BaseException as error:
                ending = Ending.RAISED
                self._fault = error
            self._waits = self._open = False
            reason = self.reason
            following = await self._finish(self._decide(ending), reason)
            if not await self._begins_anew(following):
                self._alive = False
                return
            self.make()
            # The next look at the reason is in `_events`: what was made is cleaned up whatever happens here.
            with contextlib.suppress(asyncio.CancelledError):
                await self._place.note_made([self])
            self.route()

    async def _events(self) -> None:
        """Let the trigger run, and hand over its events, until it ends."""
        if self.reason is not None:
            return
        if self._fault is not None:
            raise self._fault
        assert self._routed is not None
        place, subscription = self._place, self._routed.subscription
        bind = subscription.bind if isinstance(subscription, AckSubscription) else _bind_nothing
        add, events = place.events.add, place.events
        number, token, left = self._number, self._token, _BURST
        async for event in self._routed.events:
            if self.reason is not None:
                return  # it was asked to end, and fires nevertheless
            # Nothing is bound to what cannot be stored.
            payload, identity = payload_of(event), identity_of(event)
            add(number, token, payload, identity, partial(self._settle, bind()))
            self._pending += 1
            self.fired += 1
            if events.standing is not Standing.OPEN:
                await events.wait_open()
            left -= 1
            if not left:
                left = _BURST
                await asyncio.sleep(0)

    def _settle(self, seq: int | None, outcome: StoreOutcome) -> None:
        """Take that an event is stored, or never will be."""
        self._pending -= 1
        if not isinstance(outcome, Refused):
            if seq is not None:
                self._place.manager.confirm_persisted((seq,))
        else:
            self._refused(seq, outcome)
        if self._stored is not None and not self._pending and not self._stored.done():
            self._stored.set_result(None)

    def _refused(self, seq: int | None, outcome: Refused) -> None:
        fault = RefusedEventError(f"an event is refused by the store: {outcome.reason.value}. {outcome.detail}")
        fenced = outcome.reason is Refusal.FENCED
        if seq is not None:
            self._place.manager.refuse_persisted((seq,), None if fenced else describe_error(fault))
        if fenced:
            self._place.note_fenced()
            self.cancel(CancelReason.HAND_OVER)
        elif self._fault is None:
            self._fault = fault
            if self._waits and self._task is not None:
                self._task.cancel("an event is refused by the store")

    def _decide(self, ending: Ending) -> Next:
        bits = random.getrandbits(JITTER_BITS)
        if self.reason is not None:
            return self._life.cancelled(self.reason, bits)
        subscription = self._routed.subscription if self._routed is not None else None
        taken = subscription.taken if subscription is not None else 0
        return self._life.ended(ending, self.fired, self._clock() - self._since, bits, taken)

    async def _finish(self, following: Next, reason: CancelReason | None) -> Next:
        """Let go of everything, write down what became of it, and return what follows.

        Args:
            following: What follows, unless an event is refused yet.
            reason: Why it was cancelled, if that is how it ended; another reason may come meanwhile.
        """
        trigger, routed = self._trigger, self._routed
        self._let_go(following, reason)
        if routed is not None:
            await self._bounded("the end of its generator", getattr(routed.events, "aclose", _nothing))
        if trigger is not None and reason is CancelReason.USER:
            await self._bounded("on_kill", trigger.on_kill)
        if trigger is not None:
            await self._bounded("cleanup", trigger.cleanup)
        if following.verdict is EndVerdict.FINISHED:
            await self._all_stored()
            if self._fault is not None:
                following, reason = self._decide(Ending.RAISED), self.reason
        self._trigger = self._routed = None
        self._leave(for_good=following.pause_seconds is None)
        unsure = following.verdict is EndVerdict.FINISHED and self._pending
        # The last word has another host, or nobody yet, or the call that left this one behind.
        if not (self.reason is CancelReason.HAND_OVER or unsure or self._abandoned or following.pause_seconds == 0):
            self._report(following, reason)
        return following

    def _let_go(self, following: Next, reason: CancelReason | None) -> None:
        """Fail the raw event that it is on, unless it has finished, and leave its stream or keep a seat there."""
        finished = following.verdict is EndVerdict.FINISHED
        comes_back = self._succeeded or following.pause_seconds is not None
        if not finished and (comes_back or reason in _ELSEWHERE):
            fault = self._fault if reason is None and not isinstance(self._fault, RefusedEventError) else None
            self._fail_held(describe_error(fault) if fault is not None else None)
        if comes_back or (finished and reason is None):
            # Until it is known whether it runs again, nothing is to pass it by.
            self._keep_seat()
        else:
            self._leave(for_good=True)

    def _fail_held(self, error: str | None) -> None:
        """Fail the raw event that it is on; without an error it was interrupted, and is not blamed."""
        if self._routed is not None and self._routed.subscription is not None:
            self._routed.subscription.fail_held(error)

    def _keep_seat(self) -> None:
        key, self.key = self.key, None
        if key is not None:
            self._place.manager.keep_seat(self.spec.name, key)
            self.seat = key

    def _leave(self, *, for_good: bool) -> None:
        """Leave its shared stream, or its seat there, unless somebody comes back to that."""
        manager, name, reason = self._place.manager, self.spec.name, self.reason
        key = self.key if self.key is not None else self.seat
        if key is None or self._place.stopping:
            return
        if self._succeeded:
            self._keep_seat()
        elif reason is CancelReason.HAND_OVER:
            manager.hand_over(name, key)
            self.key = self.seat = None
        elif for_good:
            manager.note_gone(name, key)
            self.key = self.seat = None

    def _report(self, following: Next, reason: CancelReason | None) -> None:
        error = None
        if following.verdict is EndVerdict.FAILED:
            fault = self._fault or TriggerError("the trigger ended without having fired an event")
            if reason is CancelReason.TIMEOUT:
                fault = TriggerError("the trigger failed its shared stream, and did not end for 30 s; it was cancelled")
            error = _told(fault)
            pause = following.pause_seconds
            log.error(
                "a trigger failed",
                trigger=self.spec.name,
                classpath=self.spec.classpath,
                restarts_in_seconds=round(pause, 1) if pause is not None else None,
                error=error,
            )
        elif reason is not CancelReason.SHUTDOWN:
            log.info("a trigger ended", trigger=self.spec.name, verdict=following.verdict.value, reason=reason)
        said = reason.value if reason is not None else None
        self._place.mark(StateChange(self._number, self._token, _STATES[following.verdict], said, error))

    async def _begins_anew(self, following: Next) -> bool:
        """Wait for the next run; tell whether there is one."""
        if following.pause_seconds is None:
            return False
        if self.reason is CancelReason.TIMEOUT:
            self.reason = None
            self._asked_at = 0.0
        error = self._fault
        self._open = True
        if self.reason is None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(following.pause_seconds)
        if self.reason is not None:
            self._leave(for_good=True)
            if self.reason is not CancelReason.HAND_OVER:
                self._place.mark(StateChange(self._number, self._token, TriggerState.CANCELLED, self.reason.value))
            return False
        text = _told(error) if error is not None else None
        if following.pause_seconds or text != self._stored_error:
            # One that begins again at once, event by event, has been running all the time.
            self._stored_error = text
            self._place.mark(StateChange(self._number, self._token, TriggerState.RUNNING, None, text))
        self._fault = None
        self.fired = 0
        if following.anew:
            self._continued = None
        return True

    async def _all_stored(self) -> None:
        self._open = True
        while self._pending and self.reason is None:
            self._stored = asyncio.get_running_loop().create_future()
            # Cancelled, it waits no longer: the next host runs it again.
            with contextlib.suppress(asyncio.CancelledError):
                await self._stored
        self._open = False

    async def _bounded(self, what: str, step: Callable[[], Awaitable[Any]]) -> None:
        try:
            async with asyncio.timeout(END_SECONDS):
                await step()
        except TimeoutError:
            log.exception("a trigger does not end", trigger=self.spec.name, step=what, seconds=END_SECONDS)
        except asyncio.CancelledError:
            log.warning("a step of a trigger's end was cancelled", trigger=self.spec.name, step=what)
        except (Exception, SystemExit):
            log.exception("a step of a trigger's end failed", trigger=self.spec.name, step=what)


def _told(fault: BaseException) -> str:
    return redact_text("".join(traceback.format_exception(fault)))


async def _nothing() -> None:
    return


def _bind_nothing() -> None:
    return
