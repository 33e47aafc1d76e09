"""What an engine says of itself: whole snapshots, and the beats that tell only what changed since the one before.

Invariant: a beat costs by what moved since the last one, not by how many partitions the engine owns; only what the
source looks at about once a second, the lag, is compared as a whole then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidemill.pipeline.reports.counters import process_usage
from tidemill.pipeline.reports.report import stalled_of
from tidemill.runtime.beats import Beat, PartitionChanges, whole_beat
from tidemill.runtime.progress import EngineProgress
from tidemill.sources.base import TopicPartition, name_of

if TYPE_CHECKING:
    from tidemill.pipeline.engine import Engine


class Snapshots:
    """Makes an engine's snapshots and beats.

    Args:
        engine: Which one.
    """

    def __init__(self, engine: Engine) -> None:
        """Start with nothing told."""
        self._engine = engine
        self._lag: tuple[Mapping[TopicPartition, int], dict[str, int]] = ({}, {})
        self._told_lag: dict[str, int] = {}
        self._told_paused: list[str] = []
        self._told_names: list[str] = []

    def whole(self) -> EngineProgress:
        """Return a snapshot with all partitions."""
        progress = self._counts()
        progress.committed = dict(self._engine.commits.named)
        progress.lag = self._named_lag()
        progress.paused = self._engine.intake.paused
        progress.partitions = self._engine.intake.names
        return progress

    def beat(self, *, whole: bool) -> Beat:
        """Return the next beat; it has to be sent, since the next one builds on it.

        Args:
            whole: Tell of all partitions: what was told before is lost.
        """
        lag, paused, names = self._named_lag(), self._engine.intake.paused, self._engine.intake.names
        if whole:
            beat = whole_beat(self.whole())
            self._engine.commits.take_moved()
        else:
            changed, unknown = _differences(self._told_lag, lag)
            counts = self._counts()
            changes = PartitionChanges(
                committed=self._engine.commits.take_moved(),
                lag=changed,
                lag_unknown=unknown,
                paused=None if paused == self._told_paused else paused,
                partitions=None if names is self._told_names else names,
            )
            beat = Beat(counts, changes)
        self._told_lag, self._told_paused, self._told_names = lag, paused, names
        return beat

    def _named_lag(self) -> dict[str, int]:
        """Return the lag by names; a source looks at it about once a second, a snapshot is taken more often."""
        lag = self._engine.source.lag()
        if lag is not self._lag[0]:
            self._lag = lag, {name_of(partition): count for partition, count in lag.items()}
        return self._lag[1]

    def _counts(self) -> EngineProgress:
        engine = self._engine
        counters, pool, intake, outbox = engine.counters, engine.pool, engine.intake, engine.outbox
        cpu_seconds, rss_bytes = process_usage()
        return EngineProgress(
            consumed=counters.consumed,
            messages_done=counters.messages_done,
            tasks_running=pool.running,
            tasks_queued=pool.queued + intake.held_back,
            tasks_retrying=pool.retrying,
            tasks_done=counters.tasks_done,
            tasks_failed=counters.tasks_failed,
            delivered=outbox.delivered,
            dead_lettered=engine.letters.written,
            letters_dropped=engine.letters.dropped,
            skipped=counters.skipped + outbox.skipped,
            warnings=counters.warnings,
            held=engine.brake.held if engine.brake is not None else 0,
            gap=engine.source.gap,
            stalled=stalled_of(engine),
            cpu_seconds=cpu_seconds,
            rss_bytes=rss_bytes,
            slowest=engine.slowest.rows(),
            in_flight=intake.in_flight,
            uncommitted=engine.commits.failed,
            sinks=outbox.stats,
            **engine.services.counts(),
        )


def _differences(before: dict[str, int], now: dict[str, int]) -> tuple[dict[str, int], list[str]]:
    """Return what is new or other than before, and what is there no more."""
    if now is before:
        return {}, []
    changed = {name: count for name, count in now.items() if before.get(name) != count}
    return changed, [name for name in before if name not in now]
