"""Snapshots: every number of every part is in them, and a beat has what changed since the one before."""

from __future__ import annotations

from typing import Any

from tidemill.deadletters.writer import LetterStatistics
from tidemill.pipeline.brake import BrakeStatistics
from tidemill.pipeline.commits import Commits, CommitStatistics
from tidemill.pipeline.delivery.modes import AtLeastOnce
from tidemill.pipeline.delivery.outbox import OutboxStatistics
from tidemill.pipeline.handler.cache import CacheStatistics
from tidemill.pipeline.handler.periodic import PeriodicStatistics
from tidemill.pipeline.reports.counters import CounterStatistics, Slowest
from tidemill.pipeline.reports.snapshots import PartitionStatistics, ReportingParts, Snapshots
from tidemill.pipeline.services import ServiceStatistics
from tidemill.pipeline.tasks.pool import PoolStatistics
from tidemill.runtime.link.beats import apply_beat
from tidemill.runtime.link.progress import UNSENT, EngineProgress, PartitionHead, SinkStats
from tidemill.runtime.loop.durations import Durations
from tidemill.sources.base import SourceStatistics
from tidemill.testing.scripted import ScriptedSource

HEADS = {"t/0": PartitionHead(40, 41.0, 42.0, "task", "task a has been running for 43 s", 44)}


class Part:
    """Reports what it is given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def statistics(self) -> Any:
        return self.value


def make_parts(**other: Any) -> Any:
    parts: dict[str, Any] = {
        "source": Part(SourceStatistics(gap=1, lag={("t", 0): 2}, errors=35, recreated=39)),
        "partitions": Part(PartitionStatistics(names=["t/0"], paused=["t/0"], tasks_held_back=3, size_bytes=34)),
        "pool": Part(PoolStatistics(4, 5, 6, 27, 28, Durations([29], 30.0), Durations([36]), Durations([37]))),
        "outbox": Part(OutboxStatistics(delivered=7, skipped=8, sinks={"sinks.kafka.out": SinkStats(7)})),
        "letters": Part(LetterStatistics(written=9, kinds={"task": 9}, dropped=10)),
        "commits": Part(CommitStatistics(committed={"t/0": 11}, failed=12, flow={"t/0": (31, 32, 33)})),
        "services": Part(
            ServiceStatistics(
                PeriodicStatistics(13, 14),
                CacheStatistics(15, 16, 17),
                18,
                {"arrange": Durations([38])},
                Durations([39]),
            )
        ),
        "brake": Part(BrakeStatistics(held=19)),
        "counters": Part(CounterStatistics(20, 21, 22, 23, 24, 25, 26, Durations([45]))),
        "slowest": Slowest(),
    }
    return ReportingParts(**{**parts, **other})


def test_a_snapshot_has_every_number_of_every_part() -> None:
    progress = Snapshots(make_parts(), lambda: {"kafka": "is away"}, lambda: HEADS).take_whole()
    assert (progress.cpu_seconds > 0, progress.rss_bytes > 0) == (True, True)
    progress.cpu_seconds = progress.rss_bytes = 0
    assert progress == EngineProgress(
        consumed=20,
        messages_done=21,
        tasks_running=4,
        tasks_queued=5 + 3,
        tasks_retrying=6,
        tasks_retried=27,
        in_flight_bytes=34,
        timeouts=28,
        attempts=Durations([29], 30.0),
        queue_waits=Durations([36]),
        spawns=Durations([37]),
        hooks={"arrange": Durations([38])},
        loop_lags=Durations([39]),
        consumer_errors=35,
        recreated_partitions=39,
        flow={"t/0": (31, 32, 33)},
        tasks_done=22,
        tasks_failed=23,
        delivered=7,
        dead_lettered=9,
        letters_dropped=10,
        letter_kinds={"task": 9},
        skipped=24 + 8,
        warnings=25,
        held=19,
        gap=1,
        committed={"t/0": 11},
        lag={"t/0": 2},
        paused=["t/0"],
        waits={"kafka": "is away"},
        partitions=["t/0"],
        periodic_runs=13,
        periodic_errors=14,
        cache_hits=15,
        cache_misses=16,
        cache_entries=17,
        loop_blocks=18,
        sinks={"sinks.kafka.out": SinkStats(7)},
        in_flight=26,
        batches=Durations([45]),
        uncommitted=12,
        heads=HEADS,
    )


def test_without_a_brake_nothing_is_held() -> None:
    assert Snapshots(make_parts(brake=None), dict, dict).take_whole().held == 0


def test_a_beat_has_what_changed_since_the_one_before() -> None:
    commits = Commits(ScriptedSource(), lambda partition, count: None, AtLeastOnce())
    source = Part(SourceStatistics(0, {("t", 0): 2, ("t", 1): 5}))
    partitions = Part(PartitionStatistics(["t/0", "t/1"], [], 0, 0))
    heads = [HEADS]
    snapshots = Snapshots(make_parts(commits=commits, source=source, partitions=partitions), dict, lambda: heads[-1])
    seen = apply_beat(snapshots.take_beat(whole=True), EngineProgress())
    assert (seen.lag, seen.committed) == ({"t/0": 2, "t/1": 5}, {})

    commits.note_committed(("t", 1), 6)
    source.value = SourceStatistics(0, {("t", 0): 2, ("t", 1): 4})
    changed = snapshots.take_beat(whole=False)
    assert (changed.changes.committed, changed.changes.lag, changed.changes.partitions) == (
        {"t/1": 6},
        {"t/1": 4},
        None,
    )
    partitions.value = PartitionStatistics(["t/1"], ["t/1"], 0, 0)
    source.value = SourceStatistics(0, {("t", 1): 4})
    left = snapshots.take_beat(whole=False)
    assert (left.changes.lag_unknown, left.changes.paused, left.changes.partitions) == (["t/0"], ["t/1"], ["t/1"])
    seen = apply_beat(left, apply_beat(changed, seen))
    assert (seen.lag, seen.committed, seen.partitions) == ({"t/1": 4}, {"t/1": 6}, ["t/1"])


def test_a_beat_has_what_holds_a_partition_only_when_that_changes() -> None:
    held, later = HEADS["t/0"], PartitionHead(50, 51.0, None, "", "", 0)
    commits = Commits(ScriptedSource(), lambda partition, count: None, AtLeastOnce())
    heads = [{"t/0": held, "t/1": held}]
    snapshots = Snapshots(make_parts(commits=commits), dict, lambda: heads[-1])
    seen = apply_beat(snapshots.take_beat(whole=True), EngineProgress())
    assert seen.heads == {"t/0": held, "t/1": held}
    nothing = snapshots.take_beat(whole=False)
    assert (nothing.changes.heads, nothing.changes.heads_gone) == ({}, [])
    assert apply_beat(nothing, seen).heads is seen.heads
    heads.append({"t/1": later})
    moved = snapshots.take_beat(whole=False)
    assert (moved.changes.heads, moved.changes.heads_gone) == ({"t/1": later}, ["t/0"])
    assert apply_beat(moved, seen).heads == {"t/1": later}
    assert seen.heads.keys() == {"t/0", "t/1"}, "any thread may read what was there before"
    assert moved.without_texts().changes.heads == {"t/1": later}
    heads.append({"t/0": held})
    assert snapshots.take_beat(whole=True).without_texts().changes.heads["t/0"].text == UNSENT
