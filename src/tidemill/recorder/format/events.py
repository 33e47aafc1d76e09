"""Rare events that are recorded one by one: failures, retries, rebalances and operators' actions."""

from __future__ import annotations

import enum

import msgspec


class EventKind(enum.StrEnum):
    """The kind of an event."""

    TASK_FAILED = "task_failed"
    TASK_RETRY = "task_retry"
    TASK_REPLACED = "task_replaced"
    SINK_ERROR = "sink_error"
    SINK_SKIPPED = "sink_skipped"
    DEAD_LETTERED = "dead_lettered"
    ASSIGNED = "assigned"
    REVOKED = "revoked"
    PAUSED = "paused"
    RESUMED = "resumed"
    ENGINE_STARTED = "engine_started"
    ENGINE_LOST = "engine_lost"
    ENGINE_ENDED = "engine_ended"
    LOOP_BLOCK = "loop_block"
    PERIODIC_RUN = "periodic_run"
    PARTITION_STALLED = "partition_stalled"
    ACTION = "action"
    RUN_STARTED = "run_started"
    RUN_ENDED = "run_ended"
    TRIGGER_STARTED = "trigger_started"
    TRIGGER_RESTARTED = "trigger_restarted"
    TRIGGER_ENDED = "trigger_ended"
    TRIGGER_FAILED = "trigger_failed"
    TRIGGER_HANDED_OVER = "trigger_handed_over"
    ACK_TIMEOUT = "ack_timeout"
    OVERFLOW = "overflow"
    REJECTED = "rejected"
    SEAT_ENDED = "seat_ended"
    ADVANCE_FAILED = "advance_failed"
    STREAM_FAILED = "stream_failed"


#: Events of triggers and their streams; in these, `task_id` is the trigger's name.
OF_TRIGGERS = frozenset(kind for kind in EventKind if kind.name.startswith("TRIGGER_")) | {
    EventKind.ACK_TIMEOUT,
    EventKind.OVERFLOW,
    EventKind.REJECTED,
    EventKind.SEAT_ENDED,
}

#: Events of normal operation; their texts are reasons, not errors, and have no error class.
ORDINARY = frozenset(
    {
        EventKind.ASSIGNED,
        EventKind.REVOKED,
        EventKind.PAUSED,
        EventKind.RESUMED,
        EventKind.ENGINE_STARTED,
        EventKind.ACTION,
        EventKind.RUN_STARTED,
        EventKind.TRIGGER_STARTED,
        EventKind.TRIGGER_RESTARTED,
        EventKind.TRIGGER_ENDED,
        EventKind.TRIGGER_HANDED_OVER,
    }
)


class RecordedEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A recorded event.

    Attributes:
        at_us: The time in UTC microseconds since the epoch.
        kind: The kind of the event.
        topic: The topic of the message or partition concerned; None if there is none.
        partition: The partition, likewise.
        offset: The offset, likewise; the first offset if a task has several messages. A dead letter gets an event for
            each of its messages, and only the first carries an error class.
        task_id: The task's id; in a trigger host's recording, the trigger's name.
        sink: The sink's path in the configuration ("sinks.kafka.out"); in a trigger host's recording, the shared
            stream.
        text: The error or the reason, with secrets masked, up to `schema.MAX_ERROR_CHARS` characters.
        error_class: The class by which failures are grouped: `core.deadletters.letter_stats.generalize_error`.
        data: Other facts, for example the attempt, the number of letters or the user who acted.
    """

    at_us: int
    kind: EventKind
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    task_id: str | None = None
    sink: str | None = None
    text: str = ""
    error_class: str = ""
    data: dict[str, str | int | float] = {}
