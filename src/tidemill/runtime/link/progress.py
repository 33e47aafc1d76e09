"""An engine's report of its state: counters for status lines, and the summary at its end."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

import msgspec

from tidemill.core.errors import escape_surrogates
from tidemill.runtime.loop.durations import Durations


class StopReason(enum.StrEnum):
    """Why an engine ended."""

    DRAINED = "drained"
    FENCED = "fenced"
    CONFIG = "config"
    FAILED = "failed"


#: The name in `waits` for a consumer group whose brokers do not let the engine read.
GROUP_NAME = "consumer group"


def brake_name(slot: int) -> str:
    """Return the name in `waits` for the brake of a slot's engine."""
    return f"brake of engine {slot}"


#: The prefix of stalled partitions' names in `waits`.
_PARTITION_PREFIX = "partition "


def name_stalled_partition(partition: str) -> str:
    """Return the name in `waits` for a stalled partition."""
    return f"{_PARTITION_PREFIX}{partition}"


def find_stalled_partitions(waits: Iterable[str]) -> set[str]:
    """Return the stalled partitions.

    Example:
        >>> find_stalled_partitions(["kafka", "partition orders/3"])
        {'orders/3'}
    """
    return {name.removeprefix(_PARTITION_PREFIX) for name in waits if name.startswith(_PARTITION_PREFIX)}


def list_waits(waits: Mapping[str, str]) -> Mapping[str, str]:
    """Return what an engine waits for, without stalled partitions, which the engine logs itself."""
    return {name: text for name, text in waits.items() if not name.startswith(_PARTITION_PREFIX)}


#: How many messages of a partition were fetched, committed, and given up uncommitted.
Flow = tuple[int, int, int]


class PartitionHead(msgspec.Struct, frozen=True, array_like=True):
    """The message that holds a partition: the oldest one whose commit is not confirmed.

    Attributes:
        offset: The message's offset; without an open message, the offset of the first one that waits to be fetched.
        since: Since when it holds the partition, in seconds since the epoch, to about a second.
        written_at: When it was written to its topic, to the precision of its batch; None if unknown.
        stage: What it waits for, in the terms of `core.pipeline.message_stage.Stage`; '' if the partition moves.
        text: The same for people, without times.
        buffered: How many messages of the partition wait to be fetched.
    """

    offset: int
    since: float
    written_at: float | None
    stage: str
    text: str
    buffered: int


class SinkStats(msgspec.Struct):
    """The statistics of one sink of an engine.

    Attributes:
        delivered_count: Batches with at least one confirmed payload.
        delivered_payloads: Payloads confirmed.
        error_count: Answers that refused payloads, and batches that failed as a whole.
        refused: Payloads refused, counted each time.
        skipped: Payloads that the hook chose to skip.
        dead_lettered: Payloads that were dead-lettered.
        breaker_opened: How often the circuit breaker opened.
        breaker_state: The breaker's state: 0 closed, 1 half-open, 2 open.
        sends: How long the sink took for batches.
        retried: Payloads that were sent again.
        last_error: The last refusal.
        last_delivered_at: The last confirmation, in seconds since the epoch.
        last_error_at: The last refusal, in seconds since the epoch.
    """

    delivered_count: int = 0
    delivered_payloads: int = 0
    error_count: int = 0
    refused: int = 0
    skipped: int = 0
    dead_lettered: int = 0
    breaker_opened: int = 0
    breaker_state: int = 0
    sends: Durations = msgspec.field(default_factory=Durations)
    retried: int = 0
    last_error: str | None = None
    last_delivered_at: float | None = None
    last_error_at: float | None = None


class EngineProgress(msgspec.Struct):
    """A snapshot of one engine.

    Attributes:
        consumed: Messages taken from the source.
        messages_done: Messages that left the pipeline (delivered, skipped or dead-lettered).
        tasks_running: Processes that are running.
        tasks_queued: Tasks that wait to run.
        tasks_retrying: Tasks that wait for their next attempt.
        tasks_retried: Attempts that failed and were followed by another one.
        tasks_done: Tasks that succeeded.
        tasks_failed: Tasks that failed for good.
        delivered: Payloads that a sink confirmed.
        dead_lettered: Letters that the broker confirmed.
        letter_kinds: Confirmed letters by kind: parse, task, hook ...
        recorder_dropped: Rows and events that were recorded, and lost before they were stored.
        recorder_rows: Rows that were recorded and not dropped: stored, on their way, or still in the engine.
        letters_dropped: Letters that were given up, by `dlq.on_send_failure: drop`.
        skipped: Failures and payloads that a hook chose to skip.
        warnings: Harmless mistakes of handlers (a duplicate task id, foreign offsets).
        held: Messages that the brake holds.
        gap: Messages that the broker had deleted before they were read.
        committed: The next offset per "topic/partition", as committed by this engine.
        lag: Kafka's lag per "topic/partition", the end minus the committed offset; unknown lags are left out.
        paused: Partitions held by backpressure.
        waits: By name, what waits for an outside cause, and the reason.
        partitions: The owned partitions, as "topic/partition".
        cpu_seconds: CPU time of the engine's process and its ended children.
        rss_bytes: Resident memory of the engine's process.
        slowest: The slowest tasks so far: (seconds, task id, label).
        periodic_runs: Calls of periodic hooks that began.
        periodic_errors: Calls of periodic hooks that raised.
        cache_hits: Reads of the handler's cache that found a value.
        cache_misses: Reads of the handler's cache that found no value.
        cache_entries: Values in the cache's memory.
        loop_blocks: How often a call blocked the event loop for too long.
        sinks: The statistics of each sink, by its section in the configuration ("sinks.kafka.out").
        in_flight: Messages taken from the source that have not left the pipeline.
        in_flight_bytes: The keys and values of those that have unfinished work.
        uncommitted: At the end of a drain, finished messages whose commit failed; they will be reprocessed.
        timeouts: Attempts of tasks that timed out.
        attempts: How long attempts of tasks ran.
        queue_waits: How long tasks waited in the queue for a free executor, before each attempt.
        spawns: How long it took to start an attempt's process, or to give the task to a resident one.
        batches: How long windows took, from their first message until the hooks of all of their messages had run.
        hooks: How long calls of the handler's hooks took, by hook.
        loop_lags: How late the event loop was, four times per `executor.block_seconds`.
        consumer_errors: Errors that Kafka's client reported.
        recreated_partitions: Partitions read from their beginning because their topic had been created again.
        flow: Per "topic/partition", the messages that were taken, committed, and given up uncommitted.
        heads: Per "topic/partition", the message that holds it; partitions without work are left out.
    """

    consumed: int = 0
    messages_done: int = 0
    tasks_running: int = 0
    tasks_queued: int = 0
    tasks_retrying: int = 0
    tasks_retried: int = 0
    tasks_done: int = 0
    tasks_failed: int = 0
    delivered: int = 0
    dead_lettered: int = 0
    letter_kinds: dict[str, int] = {}
    recorder_dropped: int = 0
    recorder_rows: int = 0
    letters_dropped: int = 0
    skipped: int = 0
    warnings: int = 0
    held: int = 0
    gap: int = 0
    committed: dict[str, int] = {}
    lag: dict[str, int] = {}
    paused: list[str] = []
    waits: dict[str, str] = {}
    partitions: list[str] = []
    cpu_seconds: float = 0.0
    rss_bytes: int = 0
    slowest: list[tuple[float, str, str]] = []
    periodic_runs: int = 0
    periodic_errors: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_entries: int = 0
    loop_blocks: int = 0
    sinks: dict[str, SinkStats] = {}
    in_flight: int = 0
    in_flight_bytes: int = 0
    uncommitted: int = 0
    timeouts: int = 0
    attempts: Durations = msgspec.field(default_factory=Durations)
    queue_waits: Durations = msgspec.field(default_factory=Durations)
    spawns: Durations = msgspec.field(default_factory=Durations)
    batches: Durations = msgspec.field(default_factory=Durations)
    hooks: dict[str, Durations] = {}
    loop_lags: Durations = msgspec.field(default_factory=Durations)
    consumer_errors: int = 0
    recreated_partitions: int = 0
    flow: dict[str, Flow] = {}
    heads: dict[str, PartitionHead] = {}


class EngineSummary(msgspec.Struct):
    """An engine's report at its end."""

    slot: int
    reason: StopReason
    error: str | None = None
    progress: EngineProgress = msgspec.field(default_factory=EngineProgress)


#: Replaces a text that cannot be sent.
UNSENT = "(this text cannot be sent)"
#: An engine's final error is sent up to this length.
MAX_ERROR_CHARS = 20_000


def without_text(head: PartitionHead) -> PartitionHead:
    """Return the head of a partition without its details."""
    return msgspec.structs.replace(head, text=UNSENT if head.text else "")


def without_texts(progress: EngineProgress) -> EngineProgress:
    """Return a snapshot that can always be sent, with only numbers and names."""
    return msgspec.structs.replace(
        progress,
        waits={escape_surrogates(name)[:200]: UNSENT for name in progress.waits},
        slowest=[(seconds, UNSENT, "") for seconds, _, _ in progress.slowest],
        sinks={
            name: msgspec.structs.replace(stats, last_error=stats.last_error and UNSENT)
            for name, stats in progress.sinks.items()
        },
        heads={name: without_text(head) for name, head in progress.heads.items()},
    )


def drop_summary_texts(summary: EngineSummary) -> EngineSummary:
    """Return a summary that can always be sent; its error is made encodable and shortened."""
    error = None if summary.error is None else escape_surrogates(summary.error)[:MAX_ERROR_CHARS]
    return msgspec.structs.replace(summary, error=error, progress=without_texts(summary.progress))
