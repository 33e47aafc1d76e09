"""What a pipeline says of itself: the sums over its engines, and how each of them stands."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from tidemill.runtime.progress import EngineProgress

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
_HELD = ("tasks_running", "tasks_queued", "tasks_retrying", "rss_bytes", "cache_entries")


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
        for partition, offset in part.committed.items():
            committed[partition] = max(offset, committed.get(partition, 0))
    total.committed = committed
    for part in now:
        total.lag |= part.lag
        total.stalled |= part.stalled
    total.paused = sorted({name for part in now for name in part.paused})
    total.partitions = sorted({name for part in now for name in part.partitions})
    slowest = [task for part in (*past, *now) for task in part.slowest]
    total.slowest = heapq.nlargest(SLOWEST, slowest)
    return total
