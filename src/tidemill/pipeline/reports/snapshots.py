"""The state of an engine: whole snapshots, and beats with only what changed since the one before.

Invariant: a beat costs by what moved since the last one, not by how many partitions the engine owns; only the lag,
which the source looks at about once a second, is compared as a whole then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tidemill.pipeline.commits import Commits
from tidemill.runtime.beats import Beat, PartitionChanges, whole_beat
from tidemill.runtime.progress import EngineProgress
from tidemill.sources.base import Source, TopicPartition, name_of


class PartitionNames(Protocol):
    """The owned partitions, as far as they are shown."""

    @property
    def names(self) -> list[str]:
        """The names of all of them; the list is replaced when they change."""

    @property
    def paused(self) -> list[str]:
        """The names of those that backpressure holds."""


class Snapshots:
    """Takes an engine's snapshots and beats.

    Args:
        source: Knows the lag.
        commits: Know what is committed.
        partitions: The owned partitions.
        count: Returns a snapshot without anything by partition.
    """

    def __init__(
        self, source: Source, commits: Commits, partitions: PartitionNames, count: Callable[[], EngineProgress]
    ) -> None:
        """Start with nothing sent."""
        self._source = source
        self._commits = commits
        self._partitions = partitions
        self._count = count
        self._lag: tuple[Mapping[TopicPartition, int], dict[str, int]] = ({}, {})
        self._sent_lag: dict[str, int] = {}
        self._sent_paused: list[str] = []
        self._sent_names: list[str] = []

    def whole(self) -> EngineProgress:
        """Return a snapshot with all partitions."""
        progress = self._count()
        progress.committed = dict(self._commits.named)
        progress.lag = self._named_lag()
        progress.paused = self._partitions.paused
        progress.partitions = self._partitions.names
        return progress

    def beat(self, *, whole: bool) -> Beat:
        """Return the next beat; it has to be sent, since the next one builds on it.

        Args:
            whole: Include all partitions: what was sent before is lost.
        """
        lag, paused, names = self._named_lag(), self._partitions.paused, self._partitions.names
        if whole:
            beat = whole_beat(self.whole())
            self._commits.take_moved()
        else:
            changed, unknown = _differences(self._sent_lag, lag)
            changes = PartitionChanges(
                committed=self._commits.take_moved(),
                lag=changed,
                lag_unknown=unknown,
                paused=None if paused == self._sent_paused else paused,
                partitions=None if names is self._sent_names else names,
            )
            beat = Beat(self._count(), changes)
        self._sent_lag, self._sent_paused, self._sent_names = lag, paused, names
        return beat

    def _named_lag(self) -> dict[str, int]:
        """Return the lag by names; a source looks at it about once a second, a snapshot is taken more often."""
        lag = self._source.lag()
        if lag is not self._lag[0]:
            self._lag = lag, {name_of(partition): count for partition, count in lag.items()}
        return self._lag[1]


def _differences(before: dict[str, int], now: dict[str, int]) -> tuple[dict[str, int], list[str]]:
    """Return what is new or has changed, and what is no longer there."""
    if now is before:
        return {}, []
    changed = {name: count for name, count in now.items() if before.get(name) != count}
    return changed, [name for name in before if name not in now]
