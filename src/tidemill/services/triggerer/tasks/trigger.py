"""Runs the trigger of one deferred task until its first event is stored, which resumes the task, or to its end.

`core.triggers.task_triggers` decides how the task continues when its trigger ends.

Invariants:

1. Any error of a trigger or its class fails its task alone: `run` raises nothing.
2. The trigger is asked for one event only. Until that event is stored, its raw event counts as unresolved.
3. `cleanup` runs after every run that began. `on_kill` runs before it only when a user cleared, marked or cancelled the
   task, here or on a new instance after the triggerer was lost. Both have a time limit.
4. A failure is reported after the trigger has cleaned up, and only if the trigger ended by itself: a trigger whose
   tasks were cancelled by others is released, and runs again.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from tidemill.core.tasks.instance import format_instance
from tidemill.core.triggers.event_plan import EventRefusal, EventRefused, EventStored, StoreOutcome
from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.core.triggers.task_triggers import ClaimKey, TaskEnd, decide_end
from tidemill.dags.triggers.stream_key import write_key
from tidemill.services.triggerer.hosting.ending import RefusedEventError, explain_fault, run_step
from tidemill.services.triggerer.hosting.loading import (
    TriggerError,
    create_trigger,
    encode_ending,
    encode_payload,
    read_identity,
)
from tidemill.services.triggerer.hosting.run_services import EventTarget
from tidemill.services.triggerer.hosting.stream_membership import StreamMembership
from tidemill.services.triggerer.hosting.trigger_loop import RUN
from tidemill.services.triggerer.tasks.logs import TaskLog
from tidemill.services.triggerer.tasks.output import SINK, make_logger
from tidemill.services.triggerer.tasks.starts import StartRenderer
from tidemill.services.triggerer.tasks.stream_room import StreamRoom
from tidemill.store.calls.task_calls import MAX_XCOM_BYTES
from tidemill.store.calls.trigger_calls import ClaimedTrigger
from tidemill.triggers.base import BaseTaskEndEvent, BaseTrigger
from tidemill.triggers.shared_stream import SharedStreamManager

log = structlog.get_logger(__name__)

#: Time limit, in seconds, of each of `on_kill`, `cleanup` and the end of the trigger's own generator.
END_SECONDS = 30.0
_NO_EVENT = object()
#: How long a stream whose event is refused because it was stopped waits for the reason.
REASON_SECONDS = 10.0
#: The most events of a stream that are being stored.
_MAX_UNSTORED = 256


@dataclass(frozen=True, slots=True)
class TriggerOwner:
    """The task that a trigger belongs to: its `task_instance`.

    Attributes:
        dag_id: The DAG.
        run_id: The run.
        task_id: The task.
        map_index: The index of a mapped task; -1: it is not mapped.
        try_number: The number of the try, from 1.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    try_number: int


@dataclass(frozen=True, slots=True)
class TaskTriggerServices:
    """The host's services for a run.

    Attributes:
        manager: The shared streams.
        events: The store for events.
        is_stopping: Returns whether the host is stopping; if so, it ends the streams once everything is stored.
        note_stored: Called with the trigger's name, the outcome and the identity of a stored event.
        report_failure: Called with the claim and the error of a failed trigger.
        report_end: Called with the claim of a stream that has returned, after its last event is stored.
        note_ended: Called when a run has ended and cleaned up.
        open_log: Returns the log of the task of a claim.
        room: Where a stream waits while too many of its events are undelivered.
        serve: Provides variables and connections to the block.
        mask: Masks secrets in a text, including those given to triggers.
    """

    manager: SharedStreamManager
    events: EventTarget
    is_stopping: Callable[[], bool]
    note_stored: Callable[[str, StoreOutcome, str | None], None]
    report_failure: Callable[[ClaimedTrigger, str], None]
    report_end: Callable[[ClaimedTrigger], None]
    note_ended: Callable[[ClaimKey, TaskEnd], None]
    open_log: Callable[[ClaimedTrigger], TaskLog]
    room: StreamRoom
    serve: Callable[[], AbstractContextManager[None]]
    mask: Callable[[str], str]


class TaskTrigger:
    """The trigger of one deferred task, on this host; a `HostedRun`.

    Args:
        services: The services of its host.
        claim: The trigger.
        clock: A monotonic clock, in seconds.

    Attributes:
        claim: The trigger.
        disturbed: Whether another trigger has cancelled a task that this one may be waiting for.
        key: Identifies the claim.
        name: A display name, unique on this host.
        reason: Why it was cancelled; None: it was not.
    """

    __slots__ = (
        "_alive",
        "_cancelled_at",
        "_clock",
        "_context",
        "_fault",
        "_interruptible",
        "_log",
        "_outcome",
        "_returned",
        "_services",
        "_stream",
        "_task",
        "_trigger",
        "claim",
        "disturbed",
        "key",
        "name",
        "reason",
    )

    def __init__(
        self, services: TaskTriggerServices, claim: ClaimedTrigger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.claim = claim
        self.key = ClaimKey(claim.id, claim.token)
        self.name = describe_claim(claim)
        self.reason: CancelReason | None = None
        self._services = services
        self._clock = clock
        self._log = services.open_log(claim)
        # All code of the trigger runs in this context, which identifies its output.
        self._context = contextvars.copy_context()
        self._context.run(SINK.set, self._log)
        self._context.run(RUN.set, self)
        self._stream = StreamMembership(services.manager, self.name, None)
        self._trigger: BaseTrigger | None = None
        self._task: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self._outcome: StoreOutcome | None = None
        #: Whether a stream has ended by itself, and its last event is stored.
        self._returned = False
        self._alive = True
        # Whether a cancellation may interrupt the task: not before it has begun, nor during cleanup.
        self._interruptible = False
        self._cancelled_at = 0.0
        self.disturbed = False

    # -- calls of the host ------------------------------------------------------------------------------------

    async def render(self, renderer: StartRenderer) -> None:
        """Render the templates of a trigger that starts its task; if that fails, its run ends with the error."""
        try:
            kwargs = await renderer.render(self.claim)
            self.claim = msgspec.structs.replace(self.claim, kwargs=kwargs)
        except TriggerError as error:
            self._fault = error

    def find_stream_key(self) -> str | None:
        """Return the key of the shared stream of a trigger that starts its task, if the store does not know it yet."""
        trigger = self._trigger
        if trigger is None or self.claim.start is None or self.claim.stream_key is not None:
            return None
        try:
            find_key = getattr(trigger, "shared_stream_key", None)
            key = None if find_key is None else self._context.run(find_key)
            return None if key is None else write_key(key)
        except BaseException as error:  # KeyboardInterrupt would end the loop of all triggers
            self._fault = error
            return None

    def create(self) -> None:
        """Create the trigger; if that fails, its run ends with the error."""
        if self._fault is not None:
            return
        try:
            self._trigger = self._context.run(self._create)
        except BaseException as error:  # its constructor may also raise KeyboardInterrupt
            self._fault = error

    def route(self) -> None:
        """Subscribe the trigger to its shared stream, if any.

        Synchronous, so that all triggers of a key subscribe before its first poll.
        """
        if self._trigger is None or self.reason is not None or self._fault is not None:
            return
        try:
            self._context.run(self._stream.join, self._trigger)
        except BaseException as error:  # KeyboardInterrupt would end the loop of all triggers
            self._fault = error

    def start(self) -> asyncio.Task[None]:
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(), name=self.name, context=self._context)
        return self._task

    def start_kill(self) -> asyncio.Task[str | None]:
        """Call `on_kill` and `cleanup` of a created trigger that does not run; return why it could not be created."""
        return asyncio.get_running_loop().create_task(self._kill(), name=self.name, context=self._context)

    def cancel(self, reason: CancelReason) -> None:
        """End the trigger; the first reason wins."""
        if self.reason is None and self._alive:
            self.reason = reason
            self._cancelled_at = self._clock()
            if self._interruptible and self._task is not None:
                self._task.cancel(reason.value)

    def hand_over(self) -> None:
        """End the trigger together with all others of its stream: another triggerer runs them."""
        self._stream.stop_advancing()
        self.cancel(CancelReason.HAND_OVER)

    def cancel_again(self, now: float) -> None:
        """Repeat a cancellation that the trigger's code has ignored for long; `now` is read from its clock."""
        if self._interruptible and self.reason is not None and now - self._cancelled_at >= END_SECONDS:
            log.error("a trigger ignores its cancellation; cancelling it again", trigger=self.name)
            self._cancelled_at = now
            assert self._task is not None
            self._task.cancel(self.reason.value)

    def blame(self, error: str) -> None:
        """Fail the trigger, because its code harms other triggers; a run that has ended is not changed."""
        log.error("a trigger disturbs the others; failing it", trigger=self.name, error=error)
        if self._interruptible and self.reason is None and self._task is not None:
            self._fault = self._fault or TriggerError(error)
            self._task.cancel(error)

    # -- the run ----------------------------------------------------------------------------------------------

    def _create(self) -> BaseTrigger:
        claim = self.claim
        with self._services.serve():
            trigger = create_trigger(self.name, claim.classpath, claim.kwargs)
        trigger.trigger_id = claim.id
        trigger.task_instance = TriggerOwner(
            claim.dag_id, claim.run_id, claim.task_id, claim.map_index, claim.try_number
        )
        trigger._task_log = make_logger(self._log)
        return trigger

    async def _run(self) -> None:
        with self._services.serve():
            self._interruptible = True
            try:
                if self.reason is None:
                    await (self._stream_events() if self.claim.streams else self._wait_for_event())
            except asyncio.CancelledError as error:
                if self.disturbed and self._fault is None:
                    self.reason = self.reason or CancelReason.HAND_OVER
                self._fault = self._fault or error
            except BaseException as error:
                self._fault = self._fault or error
            self._interruptible = False
            end = TaskEnd.RESUMED if self._returned else decide_end(self.reason, self._outcome)
            try:
                await self._finish(end)
                self._log.finish()
            except Exception:
                log.exception("the end of a trigger failed; this is a bug in tidemill", trigger=self.name)
                if end is TaskEnd.FAILED:  # otherwise its task would wait forever
                    self._services.report_failure(self.claim, "the trigger failed; see the log of the triggerer")
        self._alive = False
        self._services.note_ended(self.key, end)

    async def _kill(self) -> str | None:
        trigger = self._trigger
        if trigger is None:
            fault = self._fault or TriggerError("the trigger cannot be created")
            error = explain_fault(_cut_frames(fault), self._services.mask)
            self._log.write("error", f"on_kill of the trigger cannot be called: {error}")
        else:
            error = None
            with self._services.serve():
                await run_step(self.name, "on_kill", trigger.on_kill, END_SECONDS)
                await run_step(self.name, "cleanup", trigger.cleanup, END_SECONDS)
        self._log.finish()
        self._alive = False
        return error

    async def _wait_for_event(self) -> None:
        """Run the trigger until its first event is stored.

        Raises:
            TriggerError: It fired no event, or one that cannot be stored.
        """
        if self._fault is not None:
            raise self._fault
        assert self._stream.events is not None
        event = await anext(aiter(self._stream.events), _NO_EVENT)
        if event is _NO_EVENT:
            raise TriggerError("the trigger ended without having fired an event; yield one before it returns")
        outcome = await self._fire(event)
        self._outcome = outcome
        _check_stored(outcome)

    async def _stream_events(self) -> None:
        """Run the trigger to its end, or to an event that ends the task, and store each event.

        At most `_MAX_UNSTORED` events are under way. The trigger waits at its `yield` while too many of its events are
        undelivered.

        Raises:
            TriggerError: An event cannot be stored.
        """
        if self._fault is not None:
            raise self._fault
        assert self._stream.events is not None
        room, undelivered = self._services.room, 0
        under_way: deque[asyncio.Future[StoreOutcome]] = deque()
        try:
            async for event in self._stream.events:
                under_way.append(self._fire(event))
                if isinstance(event, BaseTaskEndEvent):
                    break
                while under_way and (under_way[0].done() or len(under_way) >= _MAX_UNSTORED):
                    undelivered = await self._note_streamed(await under_way.popleft(), undelivered)
                if undelivered + len(under_way) > room.max_undelivered:
                    while under_way:
                        undelivered = await self._note_streamed(await under_way.popleft(), undelivered)
                    if undelivered > room.max_undelivered:
                        undelivered = await room.wait(self.claim.id)
        except BaseException:
            # The events before an error are delivered, so they are stored before the end of the stream is.
            if under_way and self.reason is None:
                await asyncio.wait(under_way)
            raise
        while under_way:
            await self._note_streamed(await under_way.popleft(), undelivered)
        self._returned = True

    async def _note_streamed(self, outcome: StoreOutcome, undelivered: int) -> int:
        """Return the number of undelivered events of the stream, as far as known."""
        if isinstance(outcome, EventRefused):
            if outcome.reason is not EventRefusal.CONTENT:
                # The trigger was stopped. It is cancelled soon, and the reason says whether its `on_kill` runs.
                await asyncio.sleep(REASON_SECONDS)
            self._outcome = outcome
        _check_stored(outcome)
        return outcome.undelivered if isinstance(outcome, EventStored) else undelivered

    def _fire(self, event: Any) -> asyncio.Future[StoreOutcome]:
        """Have an event stored; return its outcome to come.

        Raises:
            TriggerError: It cannot be encoded, or is too large.
        """
        payload, identity = encode_payload(event), read_identity(event)
        ending = encode_ending(event, self._services.mask)
        if (size := len(payload.encode("utf-8", "replace"))) > MAX_XCOM_BYTES:
            raise TriggerError(
                f"the payload of its event is {size:,} bytes long; at most {MAX_XCOM_BYTES:,} are stored; "
                "yield a reference"
            )
        seq = self._stream.bind()
        stored: asyncio.Future[StoreOutcome] = asyncio.get_running_loop().create_future()
        self._services.events.add(
            self.claim.id,
            self.claim.token,
            payload,
            identity,
            lambda outcome: self._settle(stored, seq, identity, outcome),
            ending,
        )
        return stored

    def _settle(
        self, stored: asyncio.Future[StoreOutcome], seq: int | None, identity: str | None, outcome: StoreOutcome
    ) -> None:
        """Handle the store's outcome of an event."""
        manager = self._services.manager
        if self._alive and self._interruptible and not self.claim.streams:
            self._outcome = outcome
        if not isinstance(outcome, EventRefused):
            self._services.note_stored(self.name, outcome, identity)
            if seq is not None:
                manager.confirm_persisted((seq,))
        elif seq is not None:
            manager.refuse_persisted((seq,), None)
        if not stored.done():
            stored.set_result(outcome)
        if self.claim.streams and isinstance(outcome, EventRefused) and outcome.reason is EventRefusal.CONTENT:
            self._end_refused(outcome)

    def _end_refused(self, outcome: EventRefused) -> None:
        """End a stream whose event cannot be stored, however long its next `yield` may take."""
        if self._alive and self._interruptible and self.reason is None and self._fault is None:
            self._outcome, self._fault = outcome, _describe_refusal(outcome)
            assert self._task is not None
            self._task.cancel("its event is refused by the store")

    async def _finish(self, end: TaskEnd) -> None:
        """Leave the stream, clean up, and report the outcome."""
        trigger, close = self._trigger, getattr(self._stream.events, "aclose", None)
        self._leave(end)
        if close is not None:
            await run_step(self.name, "the end of its generator", close, END_SECONDS)
        if trigger is not None and end is TaskEnd.KILLED:
            await run_step(self.name, "on_kill", trigger.on_kill, END_SECONDS)
        if trigger is not None:
            await run_step(self.name, "cleanup", trigger.cleanup, END_SECONDS)
        self._trigger = None
        self._stream.end_run()
        if end is TaskEnd.FAILED:
            error = explain_fault(
                _cut_frames(self._fault or TriggerError("the trigger ended without an event")), self._services.mask
            )
            self._log.write("error", f"the trigger failed: {error}")
            log.error("the trigger of a task failed", trigger=self.name, classpath=self.claim.classpath, error=error)
            self._services.report_failure(self.claim, error)
            return
        if self._returned:
            self._services.report_end(self.claim)
        about = {} if self.reason is None else {"reason": self.reason.value}
        log.debug("the trigger of a task ended", trigger=self.name, end=end.value, **about)

    def _leave(self, end: TaskEnd) -> None:
        """Leave the stream, unless it ends with the host. A released trigger gets its raw event again."""
        if end is TaskEnd.RESUMED:
            # Otherwise nobody would have accepted what resumed the last task, and the next one would get it again.
            self._stream.move_past()
        if end is TaskEnd.GIVEN_UP:
            self._stream.fail_held(None)
        if not self._services.is_stopping():
            # A handover would end the stream for the triggers of other tasks.
            self._stream.leave()


def _check_stored(outcome: StoreOutcome) -> None:
    """Raise an error if an event was refused."""
    if isinstance(outcome, EventRefused):
        raise _describe_refusal(outcome)


def _describe_refusal(outcome: EventRefused) -> RefusedEventError:
    return RefusedEventError(f"its event is refused by the store: {outcome.reason.value}. {outcome.detail}")


def _cut_frames(fault: BaseException) -> BaseException:
    """Remove the leading frames of this module from an error's traceback."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return fault.with_traceback(trace)


def describe_claim(claim: ClaimedTrigger) -> str:
    """Return a display name. It contains the ids, because an earlier trigger of the task may still be cleaning up."""
    task = format_instance(claim.task_id, claim.map_index)
    return f"{claim.dag_id}.{task} of {claim.run_id}, trigger {claim.id}/{claim.token}"
