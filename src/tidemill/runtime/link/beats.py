"""The beat that an engine sends four times a second: all its counts, and only the changes of its partitions.

A beat over a thousand partitions with one active costs the same as a beat over one. Invariants: a connection's first
beat covers all partitions, and each later one builds on all before it, so a receiver that applies them in order has the
engine's state. A beat that is taken from an engine is sent, or the connection is closed.
"""

from __future__ import annotations

import msgspec

from tidemill.runtime.link.progress import EngineProgress, Flow, PartitionHead, without_text, without_texts


class PartitionChanges(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an engine's partitions differ from its earlier beats.

    Attributes:
        whole: Whether the changes replace everything that was sent before.
        committed: Committed offsets that moved, by "topic/partition".
        lag: Lags that changed.
        lag_unknown: The partitions whose lag is no longer known.
        paused: All partitions that backpressure holds; None if unchanged.
        partitions: All partitions that the engine owns; None if unchanged.
        flow: Counts of messages that changed.
        heads: The messages that hold partitions, where they changed.
        heads_gone: Partitions that no message holds any more.
    """

    whole: bool = False
    committed: dict[str, int] = {}
    lag: dict[str, int] = {}
    lag_unknown: list[str] = []
    paused: list[str] | None = None
    partitions: list[str] | None = None
    flow: dict[str, Flow] = {}
    heads: dict[str, PartitionHead] = {}
    heads_gone: list[str] = []


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The engine is alive; this is its state.

    Attributes:
        counts: A snapshot without anything per partition.
        changes: The changes of the partitions.
    """

    counts: EngineProgress
    changes: PartitionChanges

    def without_texts(self) -> Beat:
        """Return a beat that can always be sent, with only numbers and names."""
        heads = {name: without_text(head) for name, head in self.changes.heads.items()}
        return Beat(without_texts(self.counts), msgspec.structs.replace(self.changes, heads=heads))


def whole_beat(progress: EngineProgress) -> Beat:
    """Return the beat for a whole snapshot."""
    changes = PartitionChanges(
        True,
        progress.committed,
        progress.lag,
        paused=progress.paused,
        partitions=progress.partitions,
        flow=progress.flow,
        heads=progress.heads,
    )
    counts = msgspec.structs.replace(progress, committed={}, lag={}, paused=[], partitions=[], flow={}, heads={})
    return Beat(counts, changes)


def apply_beat(beat: Beat, before: EngineProgress) -> EngineProgress:
    """Return the snapshot that results from applying a beat to the previous one.

    Unchanged parts are the same objects as before; `before` itself is never changed, so any thread may read it.
    """
    changes, counts = beat.changes, beat.counts
    if changes.whole:
        before = EngineProgress()
    counts.committed = before.committed | changes.committed if changes.committed else before.committed
    counts.flow = before.flow | changes.flow if changes.flow else before.flow
    counts.lag = before.lag
    if changes.lag or changes.lag_unknown:
        counts.lag = before.lag | changes.lag
        for name in changes.lag_unknown:
            counts.lag.pop(name, None)
    counts.heads = before.heads
    if changes.heads or changes.heads_gone:
        counts.heads = before.heads | changes.heads
        for name in changes.heads_gone:
            counts.heads.pop(name, None)
    counts.paused = before.paused if changes.paused is None else changes.paused
    counts.partitions = before.partitions if changes.partitions is None else changes.partitions
    return counts
