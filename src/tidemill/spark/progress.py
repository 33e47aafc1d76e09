"""The progress of a pipeline: the sums over its engines, and the status of each."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from tidemill.runtime.link.progress import EngineProgress, Flow, SinkStats
from tidemill.runtime.loop.durations import Durations, sum_durations

MergedT = TypeVar("MergedT")
ValueT = TypeVar("ValueT")

#: How many of the slowest tasks a sum keeps.
SLOWEST = 10


class EngineStatus(msgspec.Struct, frozen=True):
    """A slot and its engine.

    Attributes:
        slot: The number of the slot.
        state: idle, waiting, starting, running, restarting, link lost, cancelled or finished.
        pid: The engine's process id; None before it has connected.
        host: The engine's host.
        starts: How many engines this slot has had.
        silent_seconds: The time since its last beat; None without a link.
        progress: The last progress of the engine.
        past: The sums over earlier engines of the slot; None if there were none.
    """

    slot: int
    state: str
    pid: int | None = None
    host: str | None = None
    starts: int = 0
    silent_seconds: float | None = None
    progress: EngineProgress | None = None
    past: EngineProgress | None = None


class PauseStatus(msgspec.Struct, frozen=True):
    """A pause that a user has requested.

    Attributes:
        partition: The partition of the source topic; None: all.
        until: When the pause ends, in seconds since the epoch.
        left_seconds: The time until then.
        by: The user who requested the pause.
    """

    partition: int | None
    until: float
    left_seconds: float
    by: str


class PipelineProgress(EngineProgress):
    """The sums over all engines, including ended ones.

    Attributes:
        engines: The status of each slot.
        pauses: The pauses that users have requested.
    """

    engines: list[EngineStatus] = msgspec.field(default_factory=list)
    pauses: list[PauseStatus] = msgspec.field(default_factory=list)


#: Counters of an ended engine still count; its gauges do not.
_COUNTED = (
    "consumed",
    "messages_done",
    "tasks_done",
    "tasks_failed",
    "tasks_retried",
    "delivered",
    "dead_lettered",
    "letters_dropped",
    "recorder_dropped",
    "skipped",
    "warnings",
    "gap",
    "cpu_seconds",
    "periodic_runs",
    "periodic_errors",
    "cache_hits",
    "cache_misses",
    "loop_blocks",
    "timeouts",
    "consumer_errors",
    "recreated_partitions",
)
_SINK_COUNTS = (
    "delivered_count",
    "delivered_payloads",
    "error_count",
    "refused",
    "skipped",
    "dead_lettered",
    "breaker_opened",
    "retried",
)
_read_sink_counts = operator.attrgetter(*_SINK_COUNTS)
_DURATIONS = ("attempts", "batches", "queue_waits", "spawns", "loop_lags")
_HELD = (
    "tasks_running",
    "tasks_queued",
    "tasks_retrying",
    "rss_bytes",
    "cache_entries",
    "held",
    "in_flight",
    "in_flight_bytes",
    "uncommitted",
)
#: Read many attributes at once: with a hundred engines, each status line adds up thousands of numbers.
_read_counted, _read_held = operator.attrgetter(*_COUNTED), operator.attrgetter(*_HELD)


class PartitionSums:
    """Merges values per partition, and caches the result until an engine sends changes.

    Between two beats without changes, an engine's snapshots share their mappings, so identical objects have an
    identical merge. The result is shared, too, and must not be changed. Any thread may call this.
    """

    def __init__(self) -> None:
        self._merged: dict[str, tuple[Sequence[object], Any]] = {}

    def of(self, field: str, parts: Sequence[EngineProgress], merge: Callable[[Any], MergedT]) -> MergedT:
        """Return the merge of one field over some engines.

        Args:
            field: The name of the field.
            parts: The engines.
            merge: Called with the values of the field if one of them was replaced since the last call.
        """
        values = [getattr(part, field) for part in parts]
        before, merged = self._merged.get(field, ((), None))
        if not before or len(values) != len(before) or any(map(operator.is_not, values, before)):
            merged = merge(values)
            self._merged[field] = values, merged
        result: MergedT = merged
        return result


def sum_progress(
    past: Sequence[EngineProgress],
    now: Sequence[EngineProgress],
    engines: Sequence[EngineStatus] = (),
    partitions: PartitionSums | None = None,
) -> PipelineProgress:
    """Add up the progress of engines.

    Args:
        past: Ended engines; only their counters count.
        now: Current engines, or the last one of each slot.
        engines: The status of each slot.
        partitions: A cache of merges, for callers that add up the same engines repeatedly.

    Example:
        >>> sum_progress([EngineProgress(consumed=1)], [EngineProgress(consumed=2)]).consumed
        3
    """
    total = PipelineProgress(engines=list(engines))
    every = (*past, *now)
    _add_up(total, _COUNTED, map(_read_counted, every))
    _add_up(total, _HELD, map(_read_held, now))
    sums = partitions or PartitionSums()
    total.committed = sums.of("committed", every, _merge_committed)
    total.flow = sums.of("flow", every, _add_flow)
    for name in _DURATIONS:
        setattr(total, name, sum_durations(map(operator.attrgetter(name), every)))
    hooks: dict[str, list[Durations]] = {}
    for part in every:
        for hook, durations in part.hooks.items():
            hooks.setdefault(hook, []).append(durations)
    total.hooks = {hook: sum_durations(found) for hook, found in hooks.items()}
    total.lag = sums.of("lag", now, _joined)
    total.paused = sorted({name for part in now for name in part.paused})
    total.heads = sums.of("heads", now, _joined)
    total.partitions = sums.of("partitions", now, lambda names: sorted(set().union(*names)))
    for part in now:
        total.waits |= part.waits
    total.sinks = _sum_sinks(every)
    for part in every:
        for kind, count in part.letter_kinds.items():
            total.letter_kinds[kind] = total.letter_kinds.get(kind, 0) + count
    slowest = [task for part in every for task in part.slowest]
    total.slowest = heapq.nlargest(SLOWEST, slowest)
    return total


def _merge_committed(committed: Sequence[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for offsets in committed:
        moved = {name: total[name] for name in total.keys() & offsets.keys()}
        total |= offsets
        for name, offset in moved.items():
            total[name] = max(offset, total[name])
    return total


def _add_flow(parts: Sequence[dict[str, Flow]]) -> dict[str, Flow]:
    total: dict[str, Flow] = {}
    for part in parts:
        # Few partitions have had several engines; the counts of all others are copied unchanged.
        added = {name: _add_counts(total[name], part[name]) for name in total.keys() & part.keys()}
        total |= part
        total |= added
    return total


def _add_counts(one: Flow, other: Flow) -> Flow:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _joined(parts: Sequence[dict[str, ValueT]]) -> dict[str, ValueT]:
    total: dict[str, ValueT] = {}
    for part in parts:
        total |= part
    return total


def _add_up(total: PipelineProgress | SinkStats, names: Sequence[str], rows: Iterable[Sequence[float]]) -> None:
    """Set fields to the sums of the columns; without rows they stay unchanged."""
    for name, column in zip(names, zip(*rows, strict=True), strict=False):
        setattr(total, name, sum(column))


def _sum_sinks(parts: Sequence[EngineProgress]) -> dict[str, SinkStats]:
    found: dict[str, list[SinkStats]] = {}
    for part in parts:
        for path, stats in part.sinks.items():
            found.setdefault(path, []).append(stats)
    return {path: stats[0] if len(stats) == 1 else _add_stats(stats) for path, stats in found.items()}


def _add_stats(parts: Sequence[SinkStats]) -> SinkStats:
    later = max(parts, key=lambda stats: stats.last_error_at or 0.0)
    delivered = [stats.last_delivered_at for stats in parts if stats.last_delivered_at is not None]
    total = SinkStats(
        breaker_state=max(stats.breaker_state for stats in parts),
        sends=sum_durations(stats.sends for stats in parts),
        last_error=later.last_error,
        last_error_at=later.last_error_at,
        last_delivered_at=max(delivered, default=None),
    )
    _add_up(total, _SINK_COUNTS, map(_read_sink_counts, parts))
    return total
