"""The state of an engine, merged from the statistics of its parts: complete snapshots, and beats with only the changes
since the last one.

Invariant: the cost of a beat depends on the changes since the last one, not on the number of owned partitions. Only the
lag, which the source updates about once a second, is then compared as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from tidemill.deadletters.writer import DeadLetters
from tidemill.pipeline.brake import EngineBrake
from tidemill.pipeline.commits import Commits
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.reports.counters import Counters, Slowest, measure_process
from tidemill.pipeline.services import Services
from tidemill.pipeline.tasks.pool import TaskPool
from tidemill.runtime.link.beats import Beat, PartitionChanges, whole_beat
from tidemill.runtime.link.progress import EngineProgress, PartitionHead
from tidemill.sources.base import Source, SourceStatistics, TopicPartition, name_partition

T = TypeVar("T")


class PartitionStatistics(msgspec.Struct, frozen=True):
    """The owned partitions.

    Attributes:
        names: The names of all; a new list whenever they change.
        paused: The names of those that backpressure holds back.
        tasks_held_back: Tasks that wait for sinks to confirm results of their partition, or for their key.
        size_bytes: The size of the keys and values of messages with unfinished work.
    """

    names: list[str]
    paused: list[str]
    tasks_held_back: int
    size_bytes: int


class Partitions(Protocol):
    """Owns partitions; implemented by the intake."""

    def statistics(self) -> PartitionStatistics:
        """Return the state of the owned partitions."""
        ...


class SnapshotRecorder(Protocol):
    """Counts recorded rows; implemented by `EngineRecorder`."""

    @property
    def rows(self) -> int:
        """The number of rows that were made and not dropped."""

    @property
    def dropped(self) -> int:
        """The number of rows and events that were dropped."""


@dataclass(frozen=True, slots=True)
class ReportingParts:
    """The parts of an engine whose statistics make up its state.

    `brake` is None if none is configured, `recorder` if recording is off.
    """

    source: Source
    partitions: Partitions
    pool: TaskPool
    outbox: Outbox
    letters: DeadLetters
    commits: Commits
    services: Services
    brake: EngineBrake | None
    counters: Counters
    slowest: Slowest
    recorder: SnapshotRecorder | None = None


class Snapshots:
    """Takes an engine's snapshots and beats.

    Args:
        parts: The parts with statistics.
        find_waits: Returns what the engine is waiting for, and why.
        find_heads: Returns the oldest message of each partition; each check makes a new mapping.
    """

    def __init__(
        self,
        parts: ReportingParts,
        find_waits: Callable[[], dict[str, str]],
        find_heads: Callable[[], Mapping[str, PartitionHead]],
    ) -> None:
        self._find_heads = find_heads
        self._sent_heads: Mapping[str, PartitionHead] = {}
        self._parts = parts
        self._find_waits = find_waits
        self._lag: tuple[Mapping[TopicPartition, int], dict[str, int]] = ({}, {})
        self._sent_lag: dict[str, int] = {}
        self._sent_paused: list[str] = []
        self._sent_names: list[str] = []

    def take_whole(self) -> EngineProgress:
        """Return a snapshot with all partitions."""
        source, partitions = self._parts.source.statistics(), self._parts.partitions.statistics()
        return self._merge_whole(source, partitions)

    def _merge_whole(self, source: SourceStatistics, partitions: PartitionStatistics) -> EngineProgress:
        progress = self._merge_counts(source, partitions)
        commits = self._parts.commits.statistics()
        progress.committed, progress.flow = dict(commits.committed), dict(commits.flow)
        progress.lag = self._name_lag(source.lag)
        progress.heads = dict(self._find_heads())
        progress.paused = partitions.paused
        progress.partitions = partitions.names
        return progress

    def take_beat(self, *, whole: bool) -> Beat:
        """Return the next beat; it must be sent, because the next one builds on it.

        Args:
            whole: Include all partitions, because earlier beats were lost.
        """
        parts = self._parts
        source, partitions = parts.source.statistics(), parts.partitions.statistics()
        lag, paused, names = self._name_lag(source.lag), partitions.paused, partitions.names
        heads = self._find_heads()
        if whole:
            beat = whole_beat(self._merge_whole(source, partitions))
            parts.commits.take_moved()
            parts.commits.flow.take_moved()
        else:
            changed, unknown = _find_differences(self._sent_lag, lag)
            moved, gone = _find_differences(self._sent_heads, heads)
            changes = PartitionChanges(
                committed=parts.commits.take_moved(),
                lag=changed,
                lag_unknown=unknown,
                paused=None if paused == self._sent_paused else paused,
                partitions=None if names is self._sent_names else names,
                flow=parts.commits.flow.take_moved(),
                heads=moved,
                heads_gone=gone,
            )
            beat = Beat(self._merge_counts(source, partitions), changes)
        self._sent_lag, self._sent_paused, self._sent_names, self._sent_heads = lag, paused, names, heads
        return beat

    def _merge_counts(self, source: SourceStatistics, partitions: PartitionStatistics) -> EngineProgress:
        """Return a snapshot without data per partition."""
        parts = self._parts
        counters, pool, outbox = parts.counters.statistics(), parts.pool.statistics(), parts.outbox.statistics()
        letters, services, process = parts.letters.statistics(), parts.services.statistics(), measure_process()
        periodic, cache = services.periodic, services.cache
        return EngineProgress(
            consumed=counters.consumed,
            messages_done=counters.messages_done,
            tasks_running=pool.running,
            tasks_queued=pool.queued + partitions.tasks_held_back,
            tasks_retrying=pool.retrying,
            tasks_retried=pool.retried,
            timeouts=pool.timeouts,
            attempts=pool.attempts,
            queue_waits=pool.queue_waits,
            spawns=pool.spawns,
            hooks=services.hooks,
            loop_lags=services.loop_lags,
            consumer_errors=source.errors,
            recreated_partitions=source.recreated,
            tasks_done=counters.tasks_done,
            tasks_failed=counters.tasks_failed,
            delivered=outbox.delivered,
            dead_lettered=letters.written,
            letter_kinds=dict(letters.kinds),
            recorder_dropped=parts.recorder.dropped if parts.recorder is not None else 0,
            recorder_rows=parts.recorder.rows if parts.recorder is not None else 0,
            letters_dropped=letters.dropped,
            skipped=counters.skipped + outbox.skipped,
            warnings=counters.warnings,
            held=parts.brake.statistics().held if parts.brake is not None else 0,
            gap=source.gap,
            waits=self._find_waits(),
            cpu_seconds=process.cpu_seconds,
            rss_bytes=process.rss_bytes,
            slowest=parts.slowest.list_tasks(),
            in_flight=counters.in_flight,
            batches=counters.batches,
            in_flight_bytes=partitions.size_bytes,
            uncommitted=parts.commits.statistics().failed,
            sinks=outbox.sinks,
            periodic_runs=periodic.runs,
            periodic_errors=periodic.errors,
            cache_hits=cache.hits,
            cache_misses=cache.misses,
            cache_entries=cache.entries,
            loop_blocks=services.loop_blocks,
        )

    def _name_lag(self, lag: Mapping[TopicPartition, int]) -> dict[str, int]:
        """Return the lag by partition name; cached, because snapshots are more frequent than updates of the lag."""
        if lag is not self._lag[0]:
            self._lag = lag, {name_partition(partition): count for partition, count in lag.items()}
        return self._lag[1]


def _find_differences(before: Mapping[str, T], now: Mapping[str, T]) -> tuple[dict[str, T], list[str]]:
    """Return the new or changed entries, and the removed names."""
    if now is before:
        return {}, []
    changed = {name: count for name, count in now.items() if before.get(name) != count}
    return changed, [name for name in before if name not in now]
