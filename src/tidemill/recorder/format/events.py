"""What is recorded one by one, because it is rare: failures, retries, rebalances, actions of people."""

from __future__ import annotations

import enum

import msgspec


class EventKind(enum.StrEnum):
    """What happened."""

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


#: What happens to triggers and their streams: `task_id` is a trigger's name.
OF_TRIGGERS = frozenset(kind for kind in EventKind if kind.name.startswith("TRIGGER_")) | {
    EventKind.ACK_TIMEOUT,
    EventKind.OVERFLOW,
    EventKind.REJECTED,
    EventKind.SEAT_ENDED,
}

#: What happens when all is well: the texts are reasons, not errors, and have no class.
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
    """One thing that happened.

    Attributes:
        at_us: When, in UTC microseconds since the epoch.
        kind: What.
        topic: Where it happened, if to a message or a partition; None otherwise.
        partition: Likewise.
        offset: Likewise; of a task with several messages, the first one. A dead letter has an event for each of its
            messages, of which only the first has an error class.
        task_id: The task it happened to; of a trigger host, the trigger.
        sink: The sink's place in the configuration ("sinks.kafka.out"); of a trigger host, the shared stream.
        text: The error or the reason, secrets masked, up to `schema.MAX_ERROR_CHARS`.
        error_class: By which failures are grouped: `core.deadletters.letter_stats.generalize_error`.
        data: Other facts: the attempt, the number of letters, who did it.
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
