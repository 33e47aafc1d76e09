"""The metrics of a pipeline, from the state that its engines send to the driver.

Invariants: counters of a slot include all its earlier engines, so they never decrease when an engine is replaced;
gauges are those of the current engine. This module runs only when metrics are requested.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from tidemill.deadletters.letter import LetterKind
from tidemill.runtime.link.progress import EngineProgress, SinkStats, find_stalled_partitions
from tidemill.runtime.loop.durations import DURATION_BOUNDS, Durations
from tidemill.runtime.metrics.definitions import Definition, Kind
from tidemill.runtime.metrics.families import Distribution, Family, Sample
from tidemill.spark.progress import EngineStatus, PipelineProgress, sum_progress

#: The prefix of a sink's path in the configuration.
_SINKS = "sinks."


@dataclass(frozen=True, slots=True)
class EngineView:
    """The state of one slot for metrics.

    Attributes:
        name: The value of the label `engine`.
        status: The slot.
        total: The sums over all engines of the slot.
        now: The progress of the current engine; empty if there is none.
        at: The current time, in seconds since the epoch.
    """

    name: str
    status: EngineStatus
    total: EngineProgress
    now: EngineProgress
    at: float


Read = Callable[[EngineView], Iterable[Sample]]


def _count(field: str) -> Read:
    return lambda view: [((view.name,), getattr(view.total, field))]


def _gauge(field: str) -> Read:
    return lambda view: [((view.name,), getattr(view.now, field))]


def _count_at_sinks(field: str) -> Read:
    def read(view: EngineView) -> Iterator[Sample]:
        for path, stats in view.total.sinks.items():
            yield (view.name, path.removeprefix(_SINKS)), getattr(stats, field)

    return read


def _by_partition(view: EngineView, values: Mapping[str, float]) -> list[Sample]:
    return [((view.name, partition), value) for partition, value in values.items()]


def _read_breakers(view: EngineView) -> list[Sample]:
    states = dict.fromkeys(view.total.sinks, 0) | {path: stats.breaker_state for path, stats in view.now.sinks.items()}
    return [((view.name, path.removeprefix(_SINKS)), state) for path, state in states.items()]


def _read_send_durations(view: EngineView) -> list[Sample]:
    return [
        ((view.name, path.removeprefix(_SINKS)), _convert(stats.sends))
        for path, stats in view.total.sinks.items()
        if stats.sends.counts
    ]


def _convert(durations: Durations) -> Distribution:
    return Distribution(DURATION_BOUNDS, durations.counts, durations.seconds)


def _histogram(field: str) -> Read:
    def read(view: EngineView) -> list[Sample]:
        durations: Durations = getattr(view.total, field)
        return [((view.name,), _convert(durations))] if durations.counts else []

    return read


def _read_hook_durations(view: EngineView) -> list[Sample]:
    return [((view.name, hook), _convert(durations)) for hook, durations in view.total.hooks.items()]


def _read_uncommitted(view: EngineView) -> list[Sample]:
    flow = view.now.flow
    open_messages = {name: taken - committed - given_up for name, (taken, committed, given_up) in flow.items()}
    return [((view.name, partition), open_messages.get(partition, 0)) for partition in view.now.partitions]


def _read_stalled(view: EngineView) -> list[Sample]:
    stalled = find_stalled_partitions(view.now.waits)
    return [((view.name, partition), int(partition in stalled)) for partition in view.now.partitions]


def _read_queue_sizes(view: EngineView) -> list[Sample]:
    heads = view.now.heads
    return [((view.name, name), heads[name].buffered if name in heads else 0) for name in view.now.partitions]


def _read_ages(view: EngineView) -> list[Sample]:
    """Read the age of the oldest open message: 0 without one; omitted if the age is unknown."""
    ages: list[Sample] = []
    for name in view.now.partitions:
        head = view.now.heads.get(name)
        if head is None:
            ages.append(((view.name, name), 0.0))
        elif head.written_at is not None:
            ages.append(((view.name, name), max(0.0, view.at - head.written_at)))
    return ages


def _counter(name: str, text: str, *labels: str) -> Definition:
    return Definition(name, Kind.COUNTER, text, ("engine", *labels))


def _gauge_of(name: str, text: str, *labels: str) -> Definition:
    return Definition(name, Kind.GAUGE, text, ("engine", *labels))


def _histogram_of(name: str, text: str, *labels: str) -> Definition:
    return Definition(name, Kind.HISTOGRAM, text, ("engine", *labels))


WORKER = Definition(
    "worker_info",
    Kind.INFO,
    "The worker: the value is always 1.",
    ("worker_id", "version", "consumer_group"),
)
POOL_MAX = _gauge_of("executor_pool_max", "How many tasks may run at once.")

#: All metrics of engines, with the function that reads each.
ENGINE_METRICS: tuple[tuple[Definition, Read], ...] = (
    (
        _gauge_of("engine_running", "1: the engine is running; 0: it is starting, being replaced, or has ended."),
        lambda view: [((view.name,), view.status.state == "running")],
    ),
    (
        _counter("engine_starts_total", "How often an engine was started in this slot."),
        lambda view: [((view.name,), view.status.starts)],
    ),
    (
        _counter("executor_tasks_total", "Tasks that ended: succeeded, or failed after all attempts.", "status"),
        lambda view: [
            ((view.name, "succeeded"), view.total.tasks_done),
            ((view.name, "failed"), view.total.tasks_failed),
        ],
    ),
    (
        _counter("messages_consumed_total", "Messages that were read.", "partition"),
        lambda view: _by_partition(view, {name: counts[0] for name, counts in view.total.flow.items()}),
    ),
    (
        _counter("offsets_committed_total", "Messages whose offsets were committed.", "partition"),
        lambda view: _by_partition(view, {name: counts[1] for name, counts in view.total.flow.items()}),
    ),
    (
        _gauge_of("uncommitted", "Messages that were read but whose offsets are not committed.", "partition"),
        _read_uncommitted,
    ),
    (
        _histogram_of("executor_duration_seconds", "Duration of task attempts."),
        _histogram("attempts"),
    ),
    (
        _histogram_of(
            "batch_duration_seconds",
            "Duration of windows, from their first message until the hooks of all their messages had run.",
        ),
        _histogram("batches"),
    ),
    (
        _histogram_of("queue_wait_seconds", "How long tasks waited in the queue for a free executor."),
        _histogram("queue_waits"),
    ),
    (
        _histogram_of("spawn_seconds", "Time to start a process, or to hand the task to a resident one."),
        _histogram("spawns"),
    ),
    (
        _histogram_of("handler_duration_seconds", "Duration of calls to the handler's hooks.", "hook"),
        _read_hook_durations,
    ),
    (
        _histogram_of(
            "loop_lag_seconds", "How late the event loop was, measured four times per `executor.block_seconds`."
        ),
        _histogram("loop_lags"),
    ),
    (_counter("consumer_errors_total", "Errors that Kafka's client reported."), _count("consumer_errors")),
    (
        _counter("recreated_partitions_total", "Partitions read from the beginning because their topic was recreated."),
        _count("recreated_partitions"),
    ),
    (_counter("executor_timeouts_total", "Attempts that were killed at their timeout."), _count("timeouts")),
    (_gauge_of("executor_pool_active", "Tasks that are running."), _gauge("tasks_running")),
    (
        _counter("task_retries_total", "Attempts that failed and were followed by another one."),
        _count("tasks_retried"),
    ),
    (
        _gauge_of("offset_lag", "The partition's end minus its committed offset, in messages.", "partition"),
        lambda view: _by_partition(view, view.now.lag),
    ),
    (
        _gauge_of(
            "lag_seconds",
            "Age of the oldest message that is not finished and committed, to about a second and the precision of the "
            "batch that was read; 0: there is none.",
            "partition",
        ),
        _read_ages,
    ),
    (
        _gauge_of("partition_queue_size", "Messages that were read and wait for capacity in the engine.", "partition"),
        _read_queue_sizes,
    ),
    (
        _gauge_of("partition_stalled", "1: the partition is stalled; 0: it is not, or has no work.", "partition"),
        _read_stalled,
    ),
    (
        _gauge_of("assigned_partitions", "Partitions that the engine owns."),
        lambda view: [((view.name,), len(view.now.partitions))],
    ),
    (
        _gauge_of("backpressure_active", "1: at least one partition waits for capacity; 0: none does."),
        lambda view: [((view.name,), bool(view.now.paused))],
    ),
    (
        _counter("sink_payloads_delivered_total", "Payloads that the sink confirmed.", "sink"),
        _count_at_sinks("delivered_payloads"),
    ),
    (
        _counter(
            "sink_deliver_errors_total", "Batches that failed, and responses that refused at least one payload.", "sink"
        ),
        _count_at_sinks("error_count"),
    ),
    (
        _histogram_of("sink_deliver_duration_seconds", "Time that a sink took for a batch, confirmed or not.", "sink"),
        _read_send_durations,
    ),
    (
        _counter("sink_delivery_retries_total", "Payloads that were sent again after a refusal.", "sink"),
        _count_at_sinks("retried"),
    ),
    (
        _gauge_of("sink_breaker_state", "The circuit breaker: 0 closed, 1 half-open, 2 open.", "sink"),
        _read_breakers,
    ),
    (
        _counter("sink_deliveries_skipped_total", "Payloads that `on_delivery_error` chose to skip.", "sink"),
        _count_at_sinks("skipped"),
    ),
    (
        _counter("sink_dlq_messages_total", "Payloads that were dead-lettered.", "sink"),
        _count_at_sinks("dead_lettered"),
    ),
    (
        _gauge_of("in_flight_messages", "Messages that were read and have not left the pipeline."),
        _gauge("in_flight"),
    ),
    (
        _gauge_of("in_flight_bytes", "Keys and values of messages with unfinished work."),
        _gauge("in_flight_bytes"),
    ),
    (
        _counter("dead_letters_total", "Dead letters that the broker confirmed, by kind of failure.", "kind"),
        lambda view: [((view.name, kind), count) for kind, count in view.total.letter_kinds.items()],
    ),
    (
        _counter("letters_dropped_total", "Dead letters that were given up (`dlq.on_send_failure: drop`)."),
        _count("letters_dropped"),
    ),
    (
        _counter("recorder_dropped_total", "Rows and events that were recorded but lost before they were stored."),
        _count("recorder_dropped"),
    ),
    (_counter("cache_hits_total", "Reads of the handler's cache that found a value."), _count("cache_hits")),
    (_counter("cache_misses_total", "Reads of the handler's cache that found none."), _count("cache_misses")),
)

#: All metrics of a pipeline.
DEFINITIONS: tuple[Definition, ...] = (WORKER, POOL_MAX, *(definition for definition, _ in ENGINE_METRICS))


class PipelineMetrics:
    """Collects the metrics of a pipeline, on any thread.

    Args:
        worker: The values of the labels of `worker_info`.
        max_executors: Returns how many tasks an engine may run at once.
        progress: Returns the sums over all engines, and the progress of each.
        sinks: The paths of all sinks in the configuration.
        clock: Returns the time in seconds since the epoch.
    """

    def __init__(
        self,
        worker: tuple[str, str, str],
        max_executors: Callable[[], int],
        progress: Callable[[], PipelineProgress],
        sinks: Iterable[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._worker = worker
        self._max_executors = max_executors
        self._clock = clock
        self._progress = progress
        # A counter must exist from the start, or `rate` would miss its first increase.
        self._zero = EngineProgress(
            sinks={path: SinkStats() for path in sinks}, letter_kinds={kind.value: 0 for kind in LetterKind}
        )

    def collect(self) -> Iterator[Family]:
        """Yield all current metrics; the samples of each are read when it is written."""
        at = self._clock()
        views = [self._view(status, at) for status in self._progress().engines]
        most = self._max_executors()
        yield Family(WORKER, [(self._worker, 1)])
        yield Family(POOL_MAX, [((view.name,), most) for view in views])
        for definition, read in ENGINE_METRICS:
            yield Family(definition, itertools.chain.from_iterable(map(read, views)))

    def _view(self, status: EngineStatus, at: float) -> EngineView:
        now, zero = status.progress or EngineProgress(), self._zero
        if status.past is None:  # nothing to add up
            sinks, kinds = zero.sinks | now.sinks, zero.letter_kinds | now.letter_kinds
            total = msgspec.structs.replace(now, sinks=sinks, letter_kinds=kinds)
        else:
            total = sum_progress([zero, status.past], [now])
        return EngineView(str(status.slot), status, total, now, at)
