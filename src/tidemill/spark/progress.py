"""What a pipeline says of itself: the sums over its engines, and how each of them stands."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from tidemill.runtime.progress import EngineProgress, SinkStats

#: How many of the slowest tasks a sum keeps.
SLOWEST = 10


class EngineStatus(msgspec.Struct, frozen=True):
    """One slot and its engine.

    Attributes:
        slot: The slot's number.
        state: idle, waiting, starting, running, link lost, cancelled or finished.
        pid: The engine's process, None before its first word.
        host: The engine's host.
        starts: How many engines this slot has had.
        silent_seconds: Since when nothing was heard of it, None without a link.
        progress: The engine's last snapshot.
    """

    slot: int
    state: str
    pid: int | None = None
    host: str | None = None
    starts: int = 0
    silent_seconds: float | None = None
    progress: EngineProgress | None = None


class PipelineProgress(EngineProgress):
    """The sums over all engines, those that are gone included.

    Attributes:
        engines: Each slot.
    """

    engines: list[EngineStatus] = msgspec.field(default_factory=list)


#: What a gone engine had is no more; what it did stays done.
_COUNTED = (
    "consumed",
    "messages_done",
    "tasks_done",
    "tasks_failed",
    "delivered",
    "dead_lettered",
    "letters_dropped",
    "skipped",
    "warnings",
    "gap",
    "cpu_seconds",
    "periodic_runs",
    "periodic_errors",
    "cache_hits",
    "cache_misses",
    "loop_blocks",
)
_SINK_COUNTS = (
    "delivered_count",
    "delivered_payloads",
    "error_count",
    "refused",
    "skipped",
    "dead_lettered",
    "breaker_opened",
)
_HELD = (
    "tasks_running",
    "tasks_queued",
    "tasks_retrying",
    "rss_bytes",
    "cache_entries",
    "held",
    "in_flight",
    "uncommitted",
)


def summed(
    past: Sequence[EngineProgress], now: Sequence[EngineProgress], engines: Sequence[EngineStatus] = ()
) -> PipelineProgress:
    """Add up engines.

    Args:
        past: Engines that are gone: only what they did counts.
        now: Engines that run, or ended last.
        engines: How each slot stands.

    Example:
        >>> summed([EngineProgress(consumed=1)], [EngineProgress(consumed=2)]).consumed
        3
    """
    total = PipelineProgress(engines=list(engines))
    for name in _COUNTED:
        setattr(total, name, sum(getattr(part, name) for part in (*past, *now)))
    for name in _HELD:
        setattr(total, name, sum(getattr(part, name) for part in now))
    committed: dict[str, int] = {}
    for part in (*past, *now):
        moved = {name: committed[name] for name in committed.keys() & part.committed.keys()}
        committed |= part.committed
        for name, offset in moved.items():
            committed[name] = max(offset, committed[name])
    total.committed = committed
    for part in now:
        total.lag |= part.lag
        total.stalled |= part.stalled
    total.paused = sorted({name for part in now for name in part.paused})
    # Names that were in order stay so, which sorts quickly.
    total.partitions = sorted(dict.fromkeys(name for part in now for name in part.partitions))
    total.sinks = _sinks((*past, *now))
    slowest = [task for part in (*past, *now) for task in part.slowest]
    total.slowest = heapq.nlargest(SLOWEST, slowest)
    return total


def _sinks(parts: Sequence[EngineProgress]) -> dict[str, SinkStats]:
    total: dict[str, SinkStats] = {}
    for part in parts:
        for place, stats in part.sinks.items():
            seen = total.get(place)
            total[place] = stats if seen is None else _added(seen, stats)
    return total


def _added(one: SinkStats, other: SinkStats) -> SinkStats:
    later = max(one, other, key=lambda stats: stats.last_error_at or 0.0)
    delivered = [stats.last_delivered_at for stats in (one, other) if stats.last_delivered_at is not None]
    counts = {name: getattr(one, name) + getattr(other, name) for name in _SINK_COUNTS}
    return SinkStats(
        **counts,
        last_error=later.last_error,
        last_error_at=later.last_error_at,
        last_delivered_at=max(delivered, default=None),
    )
