"""Rows of finished messages: built per batch, and held until most of their commits are known.

Invariants: a row has one value for each column of `messages_schema`. No reference to a message, its value or its tasks
is held. A clock that is set back delays no row.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from tidemill.core.recorder.commit_times import CommitTimes
from tidemill.pipeline.recording.texts import describe_failure
from tidemill.pipeline.reports.columns import convert_timestamps
from tidemill.pipeline.reports.parts import (
    COUNTS,
    LONGS,
    Numbers,
    Part,
    join_parts,
    pack_bytes,
    pack_words,
    spread,
    spread_words,
)
from tidemill.pipeline.reports.report import FinishedBatch, Stretch
from tidemill.recorder.format.recordable_text import classify_error, clean_name
from tidemill.recorder.format.schema import MAX_KEY_BYTES, messages_schema
from tidemill.sources.base import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa


class MessageRows:
    """The message rows of one engine.

    Args:
        commits: When messages were committed.

    Attributes:
        size: The number of current rows.
    """

    def __init__(self, commits: CommitTimes[TopicPartition]) -> None:
        self._commits = commits
        self._blocks: list[_Block] = []
        self.size = 0

    def add(self, batch: FinishedBatch, now: float) -> None:
        """Add one row per message.

        Args:
            batch: The messages.
            now: The time of a monotonic clock, in seconds.
        """
        self._blocks.append(_Block(batch, now))
        self.size += len(batch)

    def find_age(self, now: float) -> float:
        """Return the age of the oldest row in seconds; 0 without rows."""
        return now - self._blocks[0].added_at if self._blocks else 0.0

    def take(self, until: float) -> TakenRows | None:
        """Remove and return the rows that were added up to this time; None if there are none."""
        count = sum(1 for block in self._blocks if block.added_at <= until)
        blocks, self._blocks = self._blocks[:count], self._blocks[count:]
        self.size = sum(block.size for block in self._blocks)
        found = TakenRows(blocks, self._commits) if blocks else None
        # A message is committed after it leaves, so commits before the oldest remaining row are no longer needed.
        last = max((block.last_resolved_at for block in blocks), default=0)
        oldest = min((block.first_resolved_at for block in self._blocks), default=last)
        self._commits.forget_before(oldest)
        return found


class TakenRows:
    """Complete rows; any thread may join them.

    Args:
        blocks: At least one block.
        commits: The commit times; read only during construction.

    Attributes:
        size: The number of current rows.
    """

    def __init__(self, blocks: Sequence[_Block], commits: CommitTimes[TopicPartition]) -> None:
        """Look up the commit times of the rows."""
        self._blocks = blocks
        self._committed_at: list[int | None] = []
        for block in blocks:
            for topic_partition, offsets in block.stretches:
                self._committed_at += commits.find(topic_partition, offsets)
        self.size = len(self._committed_at)

    def join(self) -> pa.RecordBatch:
        """Return the rows as one batch."""
        import pyarrow as pa
        import pyarrow.compute as pc

        schema = messages_schema()
        joined = {
            field.name: join_parts([block.parts[field.name] for block in self._blocks], field.type)
            for field in schema
            if field.name != "committed_at"
        }
        joined["record_at"] = convert_timestamps(joined["record_at"])
        joined["resolved_at"] = pc.divide(joined["resolved_at"], 1000)
        joined["committed_at"] = join_parts([LONGS.pack(self._committed_at)], pa.int64())
        return pa.record_batch([joined[name] for name in schema.names], schema=schema)


class _Block:
    """The rows of one batch, packed; record times and results are converted when blocks are joined.

    Attributes:
        parts: The columns of `messages_schema` by name, except for the commit times.
        stretches: The rows in order, grouped into runs of one partition: the partition, and the offsets.
    """

    __slots__ = ("added_at", "first_resolved_at", "last_resolved_at", "parts", "size", "stretches")

    def __init__(self, batch: FinishedBatch, now: float) -> None:
        self.added_at = now
        self.size = len(batch)
        self.first_resolved_at, self.last_resolved_at = min(batch.resolved_ns) // 1000, max(batch.resolved_ns) // 1000
        self.stretches = list(_divide(batch.stretches, batch.offsets))
        consumed, arranged = batch.consumed_at, [stretch.window.arranged_at for stretch in batch.stretches]
        arranged_at = LONGS.spread(arranged, batch.sizes)
        self.parts: dict[str, Part] = {
            **batch.parts,
            "topic": spread_words([clean_name(stretch.topic_partition[0]) for stretch in batch.stretches], batch.sizes),
            "key": _cut_keys(batch),
            "consumed_at": LONGS.pack(consumed if all(consumed) else [at or None for at in consumed]),
            "arranged_at": arranged_at,
            "tasks_done_at": _pack_ends(batch, arranged, arranged_at),
            "window": LONGS.spread([stretch.window.number for stretch in batch.stretches], batch.sizes),
            "precomputed": COUNTS.pack(batch.sum_up(operator.attrgetter("is_known"))),
            "payloads": COUNTS.pack(_count_payloads(batch)),
            "error": pack_words(_classify(batch)),
        }


def _divide(stretches: Iterable[Stretch], offsets: list[int]) -> Iterator[tuple[TopicPartition, list[int]]]:
    """Yield groups of neighbouring rows of one partition: the partition, and the offsets."""
    start = 0
    for topic_partition, group in itertools.groupby(stretches, operator.attrgetter("topic_partition")):
        end = start + sum(stretch.size for stretch in group)
        yield topic_partition, offsets[start:end]
        start = end


def _cut_keys(batch: FinishedBatch) -> Part:
    if max(map(len, filter(None, batch.keys)), default=0) <= MAX_KEY_BYTES:
        return batch.parts["key"]
    return pack_bytes([None if key is None else key[:MAX_KEY_BYTES] for key in batch.keys])


def _classify(batch: FinishedBatch) -> Sequence[str | None]:
    """Return the error class of each message; None: it did not fail."""
    if not batch.failed and batch.rejected.count(None) == len(batch):
        return batch.rejected
    errors = list(batch.rejected)
    for index, flight in batch.failed.items():
        if flight.error is not None:
            errors[index] = flight.failure or describe_failure(flight.error)
    return [None if error is None else classify_error(error) for error in errors]


def _pack_ends(batch: FinishedBatch, arranged: Sequence[int | None], arranged_at: Numbers) -> Numbers:
    """Return when the last task of each message ended; a precomputed result ends when its window is arranged."""
    ends = batch.ended_at
    if not any(ends):
        return arranged_at
    if all(ends):
        return LONGS.pack(ends)
    return LONGS.pack([end or at for end, at in zip(ends, spread(arranged, batch.sizes), strict=True)])


def _count_payloads(batch: FinishedBatch) -> list[int]:
    """Return how many payloads hooks returned for each single message."""
    counts = batch.sum_up(operator.attrgetter("payloads"))
    end = 0
    for _, window, count in batch.stretches:
        start, end = end, end + count
        if window.payloads_each:
            counts[start:end] = [window.payloads_each] * count  # such a window has no tasks
        if window.payloads is not None:
            for index in range(start, end):
                counts[index] += window.payloads.get(batch.offsets[index], 0)
    return counts
