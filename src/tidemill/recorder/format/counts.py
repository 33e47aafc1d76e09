"""Counts per second: differences between the sums over all engines, which the driver computes anyway."""

from __future__ import annotations

import msgspec

from tidemill.core.recorder.counting import (
    add_buckets,
    find_changed,
    seconds_between_partitions,
    subtract_buckets,
    subtract_count,
)
from tidemill.runtime.link.progress import EngineProgress, Flow, SinkStats

_COUNTED = ("consumed", "messages_done", "tasks_done", "tasks_failed", "tasks_retried", "delivered", "dead_lettered")
_NO_FLOW: Flow = (0, 0, 0)


class PartitionCounts(msgspec.Struct, array_like=True):
    """The counts of a partition.

    Attributes:
        consumed: Messages consumed.
        committed: Messages committed.
        committed_to: The committed offset (the next one to read) at the end of the interval; None: unknown.
        lag: The lag at the end of the interval; None: unknown.
    """

    consumed: int = 0
    committed: int = 0
    committed_to: int | None = None
    lag: int | None = None


class SinkCounts(msgspec.Struct, array_like=True):
    """The counts of a sink; `send_counts` are batches by duration, in the buckets of
    `runtime.loop.durations.DURATION_BOUNDS`.
    """

    delivered: int = 0
    errors: int = 0
    send_counts: list[int] = []
    send_seconds: float = 0.0


class LaneCounts(msgspec.Struct, array_like=True):
    """The counts of a lane of a shared stream."""

    broadcast: int = 0
    resolved: int = 0
    advanced: int = 0


class Counts(msgspec.Struct, omit_defaults=True):
    """The counts of an interval of `seconds` seconds that begins at `at`, in seconds since the epoch.

    Attributes:
        lag: The lag of all partitions at the end; None: unknown.
        in_flight: The messages in flight at the end.
        attempt_counts: Attempts of tasks by duration, in the buckets of `runtime.loop.durations.DURATION_BOUNDS`.
        partitions: By "topic/partition". With many partitions, only some seconds have them.
        sinks: By the sink's path in the configuration.
        lanes: A trigger host's lanes, by `name_stream_lane`.
    """

    at: int
    seconds: int = 1
    consumed: int = 0
    messages_done: int = 0
    tasks_done: int = 0
    tasks_failed: int = 0
    tasks_retried: int = 0
    delivered: int = 0
    dead_lettered: int = 0
    committed: int = 0
    lag: int | None = None
    in_flight: int = 0
    attempt_counts: list[int] = []
    attempt_seconds: float = 0.0
    partitions: dict[str, PartitionCounts] = {}
    sinks: dict[str, SinkCounts] = {}
    lanes: dict[str, LaneCounts] = {}

    def add(self, later: Counts) -> None:
        """Add the counts of a later interval."""
        for name in (*_COUNTED, "committed", "attempt_seconds"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.lag = self.lag if later.lag is None else later.lag
        self.in_flight = later.in_flight
        self.attempt_counts = add_buckets(self.attempt_counts, later.attempt_counts)
        for name, counts in later.partitions.items():
            known = self.partitions.get(name, PartitionCounts())
            self.partitions[name] = PartitionCounts(
                known.consumed + counts.consumed,
                known.committed + counts.committed,
                known.committed_to if counts.committed_to is None else counts.committed_to,
                known.lag if counts.lag is None else counts.lag,
            )
        for name, lane in later.lanes.items():
            earlier = self.lanes.get(name, LaneCounts())
            self.lanes[name] = LaneCounts(
                earlier.broadcast + lane.broadcast,
                earlier.resolved + lane.resolved,
                earlier.advanced + lane.advanced,
            )
        for name, sink in later.sinks.items():
            past = self.sinks.get(name, SinkCounts())
            self.sinks[name] = SinkCounts(
                past.delivered + sink.delivered,
                past.errors + sink.errors,
                add_buckets(past.send_counts, sink.send_counts),
                past.send_seconds + sink.send_seconds,
            )


def add_workers(counts: Counts, other: Counts) -> None:
    """Add another worker's counts of the same interval."""
    lag = [each for each in (counts.lag, other.lag) if each is not None]
    in_flight = counts.in_flight + other.in_flight
    counts.add(other)
    counts.lag, counts.in_flight = (sum(lag) if lag else None), in_flight


def name_stream_lane(stream: str, lane: str) -> str:
    """Return the key under which a lane of a stream is counted."""
    return f"{stream}\t{lane}"


class CountSampler:
    """Computes counts as differences between successive sums."""

    def __init__(self) -> None:
        self._before = EngineProgress()
        self._flow: dict[str, Flow] = {}
        self._committed: dict[str, int] = {}
        self._partitions_at = 0

    def take(self, now: EngineProgress, at: int, *, last: bool = False) -> Counts:
        """Return the counts since the last call.

        Args:
            now: The sums over all engines. The sampler keeps this object, so the caller must not change it afterwards.
            at: Seconds since the epoch.
            last: Whether this is the last call, which counts partitions even if they were counted a moment ago.
        """
        before, self._before = self._before, now
        counts = Counts(at, in_flight=now.in_flight, lag=sum(now.lag.values()) if now.lag else None)
        for name in _COUNTED:
            setattr(counts, name, subtract_count(getattr(now, name), getattr(before, name)))
        counts.attempt_counts = subtract_buckets(now.attempts.counts, before.attempts.counts)
        counts.attempt_seconds = max(0.0, now.attempts.seconds - before.attempts.seconds)
        counts.sinks = {
            name: _subtract_sink(stats, before.sinks.get(name, SinkStats()))
            for name, stats in now.sinks.items()
            if stats != before.sinks.get(name)
        }
        past = before.flow
        counts.committed = sum(subtract_count(flow[1], past.get(name, _NO_FLOW)[1]) for name, flow in now.flow.items())
        if last or abs(at - self._partitions_at) >= seconds_between_partitions(len(now.flow)):
            self._partitions_at = at
            counts.partitions = self._take_partitions(now)
        return counts

    def _take_partitions(self, now: EngineProgress) -> dict[str, PartitionCounts]:
        moved = dict.fromkeys([*find_changed(now.flow, self._flow), *find_changed(now.committed, self._committed)])
        found = {}
        for name in moved:
            flow, past = now.flow.get(name, _NO_FLOW), self._flow.get(name, _NO_FLOW)
            found[name] = PartitionCounts(
                subtract_count(flow[0], past[0]),
                subtract_count(flow[1], past[1]),
                now.committed.get(name),
                now.lag.get(name),
            )
        self._flow, self._committed = now.flow, now.committed
        return found


def _subtract_sink(now: SinkStats, before: SinkStats) -> SinkCounts:
    return SinkCounts(
        subtract_count(now.delivered_payloads, before.delivered_payloads),
        subtract_count(now.error_count, before.error_count),
        subtract_buckets(now.sends.counts, before.sends.counts),
        max(0.0, now.sends.seconds - before.sends.seconds),
    )
