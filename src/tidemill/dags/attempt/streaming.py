"""Runs an attempt that handles the events of a stream: takes them in batches, and keeps each batch once it is handled.

Events of an acknowledged shared stream that an earlier try has not handled come first, with the number of their own
trigger.

Invariants: a batch is kept in one transaction with what the handler emitted and its checkpoint; all its events are of
one trigger. After an exception of the handler no further event is delivered. The attempt leaves its worker when no
event has come for a while.
"""

from __future__ import annotations

import enum
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from tidemill.core.tasks.endings import Idle
from tidemill.dags.arguments import check_duration
from tidemill.dags.attempt.batch_services import BatchServices
from tidemill.dags.attempt.current import is_interrupted
from tidemill.dags.attempt.task_services import (
    NO_WRITES,
    EndingEvent,
    HandledBatch,
    StreamClaim,
    TakenEvents,
    TaskServices,
)
from tidemill.dags.exceptions import DagError, TaskDeferralError, TaskDeferred, TaskFailed, TaskTimeout
from tidemill.runtime.json.codec import decode, encode
from tidemill.triggers.base import TriggerEvent

_MICROSECONDS: Final = 1_000_000
#: The limit of the store for an element and a checkpoint.
_MAX_BYTES: Final = 1 << 20
#: The limit of the elements of a batch, which are sent to the worker in one message.
_MAX_BATCH_BYTES: Final = 32 << 20
#: More events than a batch has room for.
_MAX_EVENTS: Final = 1 << 24
#: The longest wait for events at a worker.
_MAX_SECONDS: Final = 86_400


class DeliveredEvent(TriggerEvent):
    """An event of a stream, as a handler gets it.

    Attributes:
        trigger_run_id: The number of the trigger, which is another one after each deferral.
        sequence_index: The number of the event in the stream, from 0.
        is_last: Whether the trigger had ended when the event was delivered, and no event follows. It may stay False for
            the last event: `on_stream_end` is the end.
    """

    __slots__ = ("is_last", "sequence_index", "trigger_run_id")

    def __init__(
        self, payload: Any, identity: str | None, trigger_run_id: int, sequence_index: int, is_last: bool
    ) -> None:
        super().__init__(payload, identity)
        self.trigger_run_id, self.sequence_index, self.is_last = trigger_run_id, sequence_index, is_last


_Handler = Callable[[Sequence[DeliveredEvent], Any], Any]


class StreamAction(enum.Enum):
    """The values that a handler may return instead of None.

    STOP: no further event is needed; the trigger ends, and the task goes on with `on_stream_end`. See also `pause`.
    """

    STOP = "stop"

    @staticmethod
    def pause(seconds: float | timedelta) -> StreamPause:
        """Return the value that makes the task take no event for some time; meanwhile the trigger goes on."""
        return StreamPause(check_duration("StreamAction.pause", "seconds", seconds))


@dataclass(frozen=True, slots=True)
class StreamPause:
    """A pause of a stream; see `StreamAction.pause`."""

    duration: timedelta


class AttemptIdle(BaseException):
    """Ends an attempt that has handled all events that have arrived; `except Exception` does not catch it."""

    def __init__(self, ending: Idle) -> None:
        super().__init__()
        self.ending = ending


class StreamTaskEnd(BaseException):
    """Ends an attempt as an event of its stream says; `except Exception` does not catch it."""

    def __init__(self, ending: EndingEvent) -> None:
        super().__init__()
        self.ending = ending


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The settings by which a task handles its stream: a part of the stored deferral.

    Attributes:
        method: The method that is called per event, unless the operator has `handle_trigger_events`.
        kwargs: More arguments of that method.
        idle_us: How long the next event may take; None: no limit.
    """

    method: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    idle_us: int | None = None

    def write(self) -> str:
        """Return the encoded plan, which takes the place of the method's arguments."""
        return encode({"method": self.method, "kwargs": self.kwargs, "idle_us": self.idle_us}, "kwargs of the deferral")


def read_plan(text: str) -> StreamPlan:
    """Return a plan that `StreamPlan.write` has encoded."""
    return StreamPlan(**decode(text))


@dataclass(frozen=True, slots=True)
class StreamCursor:
    """`context["stream"]` in the `execute` of an operator that handles streams.

    Attributes:
        cursor: The last checkpoint of an earlier try; None: there is none.
    """

    cursor: Any = None


def read_cursor(checkpoint: str | None) -> StreamCursor:
    """Return the cursor at which a try may begin its stream."""
    return StreamCursor(None if checkpoint is None else decode(checkpoint))


class EventStream:
    """The stream of an attempt: `context["stream"]`.

    Attributes:
        trigger_run_id: The number of the trigger of the events that are handled.
        cursor: The last checkpoint, also of an earlier attempt or try; None: there is none.
        index: The index of the event that is handled, or of the first one of the batch; None after the last event.
    """

    def __init__(self, claim: StreamClaim) -> None:
        self.trigger_run_id = claim.trigger
        self.cursor: Any = None if claim.checkpoint is None else decode(claim.checkpoint)
        self.index: int | None = None
        self._emitted: list[tuple[str, str | None]] = []
        self._size = 0
        self._checkpoint: str | None = None

    def emit(self, element: Any, identity: str | None = None) -> None:
        """Add an element to the output of the task, and thus to the tasks that are mapped over it.

        The elements of a batch are stored with it, once.

        Args:
            element: The element; any value that can be encoded as JSON, of at most 1 MiB.
            identity: A stable id: an element with an id that the task has emitted before is left out.
        """
        text = encode(element, "an emitted element")
        self._size += _check_size("an emitted element", text)
        if self._size > _MAX_BATCH_BYTES:
            raise TaskFailed(
                f"the elements of a batch have more than {_MAX_BATCH_BYTES:,} bytes; set a smaller stream_max_events, "
                "or emit references"
            )
        if identity is not None and not isinstance(identity, str):
            raise TypeError(f"the identity of an element must be a str, not {type(identity).__name__}")
        self._emitted.append((text, identity))

    def checkpoint(self, value: Any) -> None:
        """Store a value with the batch, from which another try may begin; see `cursor`."""
        text = encode(value, "the checkpoint")
        _check_size("the checkpoint", text)
        self._checkpoint = text
        self.cursor = value

    @property
    def has_news(self) -> bool:
        """Whether something was emitted, or a checkpoint was set, since the last call of `take`."""
        return bool(self._emitted) or self._checkpoint is not None

    def take(self) -> tuple[tuple[tuple[str, str | None], ...], str | None]:
        """Return what has been emitted since the last call, and the last checkpoint."""
        emitted, checkpoint = tuple(self._emitted), self._checkpoint
        self._emitted, self._size, self._checkpoint = [], 0, None
        return emitted, checkpoint


def _check_size(what: str, text: str) -> int:
    if (size := len(text.encode("utf-8", "replace"))) > _MAX_BYTES:
        raise TaskFailed(f"{what} has {size:,} bytes; at most {_MAX_BYTES:,} are stored; emit a reference")
    return size


def _read_most(task: Any) -> int:
    """Return the largest number of events in a batch."""
    most = task.stream_max_events
    if type(most) is not int or most < 1:
        raise DagError(f"task {task.task_id!r}: stream_max_events must be a whole number of at least 1, not {most!r}")
    return min(most, _MAX_EVENTS)


def _read_seconds(task: Any, name: str) -> float:
    """Return an attribute of the operator that is a number of seconds."""
    seconds = getattr(task, name)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _MAX_SECONDS:
        raise DagError(
            f"task {task.task_id!r}: {name} must be a number of seconds from 0 to {_MAX_SECONDS:,}, not {seconds!r}"
        )
    return float(seconds)


@dataclass(slots=True)
class _Position:
    """The progress through the events of a trigger. `kept`: the number of batches."""

    trigger: int
    handled: int
    kept: int


class StreamRun:
    """An attempt that handles events until the stream ends, pauses, or has no event for a while.

    Args:
        task: The operator.
        plan: How it handles its stream.
        claim: The stream.
        context: The context of the attempt; gets `stream`.
        services: The access to the store.
        read_clock: Returns the seconds of a clock that never goes back.
        sleep: Waits for some seconds.
        lists: Whether a list of what was emitted is the result of the task, because nothing else can read it.
    """

    def __init__(
        self,
        task: Any,
        plan: StreamPlan,
        claim: StreamClaim,
        context: Any,
        services: TaskServices,
        read_clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        lists: bool = False,
    ) -> None:
        self._most, self._max_wait = _read_most(task), _read_seconds(task, "stream_max_wait")
        self._task, self._plan, self._services, self._lists = task, plan, services, lists
        self._writes = services if isinstance(services, BatchServices) else None
        self._context, self._read_clock, self._sleep = context, read_clock, sleep
        self._own, self._carried = _Position(claim.trigger, claim.handled, claim.kept), claim.carried
        self._earlier = [_Position(one.trigger, one.handled, one.kept) for one in claim.earlier]
        self._stream = context["stream"] = EventStream(claim)
        self._linger = _read_seconds(task, "stream_linger")
        if plan.idle_us is not None:
            self._linger = min(self._linger, plan.idle_us / _MICROSECONDS)

    def run(self) -> Any:
        """Handle events; return the value that `on_stream_end` returned.

        Raises:
            AttemptIdle: No event has come for a while, or the task pauses.
            StreamTaskEnd: An event ends the task.
            TaskDeferralError: The trigger failed, or ended without an event.
        """
        try:
            return self._run()
        finally:
            # What a handler wrote before it failed is dropped. Later writes, like the XComs of an event that ends the
            # task, belong to no batch.
            if self._writes is not None:
                self._writes.release()

    def _run(self) -> Any:
        handle = self._find_handler()
        for earlier in self._earlier:
            if self._handle_earlier(handle, earlier):
                return self._finish()
        while True:
            self._check_interrupted()
            began = self._read_clock()
            batch, events = self._take(self._own, self._linger)
            waited = self._read_clock() - began
            if self._handle(handle, self._own, events):
                return self._finish()
            if batch.ended:
                return self._end(batch)
            if not events:
                raise AttemptIdle(Idle(self._find_idle(waited)))

    def _handle_earlier(self, handle: _Handler, earlier: _Position) -> bool:
        """Handle the events of an earlier try; return whether no further event is needed."""
        wait = 0.0
        while True:
            self._check_interrupted()
            batch, events = self._take(earlier, wait)
            if self._handle(handle, earlier, events):
                return True
            if not events and not batch.left:
                return False
            if not events and wait:
                # They wait for a map with a full backlog.
                raise AttemptIdle(Idle(self._plan.idle_us))
            wait = 0.0 if events else self._linger

    def _handle(self, handle: _Handler, position: _Position, events: Sequence[DeliveredEvent]) -> bool:
        """Handle and keep events; return whether no further event is needed."""
        for part in self._split(events):
            self._check_interrupted()
            self._stream.trigger_run_id, self._stream.index = position.trigger, part[0].sequence_index
            try:
                action = handle(part, self._context)
            except TaskDeferred:
                # The trigger would be stopped, and what it has acknowledged would come no more.
                raise TaskFailed(
                    "the method that handles the stream deferred in the middle of it; the stream goes on by itself. "
                    "Return StreamAction.STOP and defer in on_stream_end, or call the first defer with streaming=False"
                ) from None
            # Checked first: a coroutine, for example, has handled nothing.
            self._check_action(action)
            stops = action is StreamAction.STOP
            self._keep(position, part[-1].sequence_index + 1, stops=stops)
            if stops:
                return True
            if isinstance(action, StreamPause):
                self._pause(action)
        return False

    def _check_interrupted(self) -> None:
        if is_interrupted():
            raise TaskTimeout("the handler has ignored that its attempt was interrupted")

    def _end(self, batch: TakenEvents) -> Any:
        """End the stream after its last event."""
        if batch.ending is not None:
            raise StreamTaskEnd(batch.ending)
        if batch.error is not None:
            raise TaskDeferralError(batch.error.rstrip().rpartition("\n")[2])
        # A try that begins from a checkpoint, or with events of an earlier one, may find that nothing is left.
        is_empty = not self._own.handled and not self._carried and self._stream.cursor is None
        if is_empty and not self._task.allow_empty_stream:
            raise TaskDeferralError(
                "the stream ended without an event; set allow_empty_stream on the operator if that may happen"
            )
        return self._finish()

    def _split(self, events: Sequence[DeliveredEvent]) -> Iterable[Sequence[DeliveredEvent]]:
        """Return the parts of a batch that are handled and kept together: all of it, or each event of a method."""
        if not self._task.handles_streams:
            return [(event,) for event in events]
        return [events] if events else []

    def _find_idle(self, waited_seconds: float) -> int | None:
        """Return how much longer the next event may take."""
        idle_us = self._plan.idle_us
        return None if idle_us is None else max(0, idle_us - int(waited_seconds * _MICROSECONDS))

    def _find_handler(self) -> _Handler:
        if self._task.handles_streams:
            handler: _Handler = self._task.handle_trigger_events
            return handler
        method = getattr(self._task, self._plan.method, None)
        if not callable(method):
            raise DagError(
                f"task {self._task.task_id!r}: {type(self._task).__name__} has no method {self._plan.method!r} to "
                "handle the stream with, and no handle_trigger_events"
            )

        def call(events: Sequence[DeliveredEvent], context: Any) -> Any:
            """Handle one event; whatever the method returns is an element."""
            (event,) = events
            result = method(context, **{**self._plan.kwargs, "event": event.payload})
            if isinstance(result, StreamAction | StreamPause) or inspect.iscoroutine(result):
                return result
            if result is not None:
                self._stream.emit(result)
            return None

        return call

    def _take(self, position: _Position, wait_seconds: float) -> tuple[TakenEvents, list[DeliveredEvent]]:
        """Return the next batch, and its events as the handler gets them."""
        most, wait = self._most, self._max_wait
        batch = self._services.take_events(position.trigger, position.handled, most, wait_seconds)
        if wait > 0 and position is self._own and batch.events and len(batch.events) < most and not batch.ended:
            self._sleep(wait)
            batch = self._services.take_events(position.trigger, position.handled, most, 0.0)
        last = len(batch.events) - 1
        ends = position is self._own and batch.ended and batch.error is None and batch.ending is None
        events = [
            DeliveredEvent(
                decode(one.payload),
                one.identity,
                position.trigger,
                one.sequence_index,
                ends and number == last,
            )
            for number, one in enumerate(batch.events)
        ]
        if not events:
            self._stream.index = None
        return batch, events

    def _keep(
        self, position: _Position, handled: int, *, stops: bool = False, lists: bool = False, final: bool = False
    ) -> None:
        emitted, checkpoint = self._stream.take()
        position.kept += 1
        batch = HandledBatch(
            position.trigger,
            handled,
            position.kept,
            emitted,
            checkpoint,
            stops=stops,
            lists=lists,
            current=None if position is self._own else self._own.trigger,
            final=final,
            writes=NO_WRITES if self._writes is None else self._writes.take(),
        )
        self._services.keep_batch(batch)
        position.handled = handled

    def _check_action(self, action: Any) -> None:
        if action is None or action is StreamAction.STOP or isinstance(action, StreamPause):
            return
        if inspect.iscoroutine(action):
            action.close()
            raise TaskFailed("the method that handles the stream is an `async def`; make it a plain method")
        raise TaskFailed(
            f"handle_trigger_events returned {type(action).__name__}; return None, StreamAction.STOP or "
            "StreamAction.pause(seconds), and use context['stream'].emit for elements"
        )

    def _pause(self, pause: StreamPause) -> None:
        """Take no event for some time.

        Raises:
            AttemptIdle: It is longer than the linger.
        """
        seconds = pause.duration.total_seconds()
        if seconds > self._linger:
            raise AttemptIdle(Idle(self._plan.idle_us, int(seconds * _MICROSECONDS)))
        self._sleep(seconds)

    def _finish(self) -> Any:
        self._stream.trigger_run_id, self._stream.index = self._own.trigger, None
        try:
            result = self._task.on_stream_end(self._context)
        except TaskDeferred:
            self._keep_end(lists=False)
            raise
        self._keep_end(lists=self._lists and result is None)
        return result

    def _keep_end(self, *, lists: bool) -> None:
        """Store what was derived after the last event."""
        if lists or self._stream.has_news or (self._writes is not None and self._writes.has_writes):
            self._keep(self._own, self._own.handled, lists=lists, final=True)
