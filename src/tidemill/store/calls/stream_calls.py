"""The calls about streams: attempts take and keep events, triggerers end streams.

Invariants: a batch that was kept is never given again. Values of users are texts of `runtime.json.codec`.
"""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import Call, Listed, answered_by
from tidemill.store.calls.trigger_calls import EventEnding
from tidemill.store.calls.worker_calls import OutcomeKind


class StreamEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event of a stream. `sequence_index`: its number in the stream, from 0."""

    sequence_index: int
    payload: str
    identity: str | None
    created_us: int


class StreamWant(msgspec.Struct, frozen=True, array_like=True):
    """A request for the events of a stream from number `after` on, at most `limit`."""

    trigger: int
    after: int
    limit: int = 100


class StreamBatch(msgspec.Struct, frozen=True):
    """The next events of a stream.

    Attributes:
        trigger: The trigger.
        events: The events, in order; a batch of more than 8 MiB has one.
        ended: Whether no event follows them.
        error: The error of the trigger, if the stream has ended with one.
        left: The number of events that have arrived and follow them.
        ending: How the task ends now, if an event says so.
    """

    trigger: int
    events: tuple[StreamEvent, ...] = ()
    ended: bool = False
    error: str | None = None
    left: int = 0
    ending: EventEnding | None = None


@answered_by("dags.streams.batches:take_events", reads=True)
class TakeEvents(Call[tuple[StreamBatch, ...]], frozen=True):
    """Return the events of streams that have arrived, at once; a stream without new events has an empty batch.

    So has a stream whose task has filled the backlog of a map, until half of it is taken.

    Attributes:
        wants: The streams.
        wait_us: How long the worker waits for an event of an attempt's stream before it answers; the store never waits.
    """

    wants: tuple[StreamWant, ...]
    wait_us: int = 0


@answered_by("dags.streams.batches:keep_batch")
class KeepBatch(Call[None], frozen=True):
    """Store that an attempt has handled events, together with what it derived from them.

    Attributes:
        task: The task.
        epoch: The epoch of the attempt.
        trigger: The trigger.
        handled: The number of events of the stream that are handled.
        number: The number of this batch among all that were kept of the stream, from 1; a repetition changes nothing.
        emitted: The encoded elements, each with its identity, if it has one.
        xcoms: Keys and encoded values.
        checkpoint: The encoded value to begin from in another try; None keeps the stored one.
        stops: Whether the attempt needs no further event: the trigger ends, and the stream with it.
        lists: Whether everything that the task has emitted becomes its result, as a list.
        current: The trigger of the attempt's own stream, if the events are those of an earlier one.
        final: Whether the stream has ended, and the elements are the last ones; they are stored once per stream, even
            if the attempt is lost and another one emits them again.
        states: Keys and encoded values of the task state; None removes a value.
        clears_state: Whether all other values of the task state are removed.
    """

    task: int
    epoch: int
    trigger: int
    handled: int
    number: int
    emitted: tuple[tuple[str, str | None], ...] = ()
    xcoms: tuple[tuple[str, str], ...] = ()
    checkpoint: str | None = None
    stops: bool = False
    lists: bool = False
    current: int | None = None
    final: bool = False
    states: tuple[tuple[str, str | None], ...] = ()
    clears_state: bool = False


@answered_by("sessions.stream_ends:end_stream")
class EndStream(Call[OutcomeKind], frozen=True):
    """Report that the trigger of a stream returned, or raised `error`; see `FailTrigger`."""

    session: int
    trigger: int
    token: int
    error: str | None = None


class EventEnvelope(msgspec.Struct, frozen=True):
    """An event of a task's trigger, for display.

    Attributes:
        trigger_run_id: The id of the trigger.
        sequence_index: Its number among the events of the trigger, from 0.
        payload: The first 2,000 characters of the encoded payload.
        identity: Its identity; None: it has none.
        created_us: When it fired.
        is_last: Whether the stream has ended, and no event follows.
    """

    trigger_run_id: int
    sequence_index: int
    payload: str
    identity: str | None
    created_us: int
    is_last: bool


@answered_by("dags.views.stream_abouts:list_task_events", reads=True)
class ListTaskEvents(Call[Listed[EventEnvelope]], frozen=True):
    """Return the events of a task's latest trigger, newest first; `after`: the `next` of the previous page."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    after: str | None = None
    limit: int = 100
