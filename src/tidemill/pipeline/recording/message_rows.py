"""Rows of finished messages: built a batch at a time, kept until most of their commits are known.

Invariants: a row has one value of each column of `messages_schema`; no reference to a message, its value or its tasks
is kept; a clock that is set back keeps no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidemill.core.recorder.commit_times import CommitTimes
from tidemill.pipeline.recording.texts import describe_failure
from tidemill.pipeline.reports.report import FinishedBatch
from tidemill.recorder.schema import MAX_KEY_BYTES, messages_schema
from tidemill.recorder.texts import classify_error, clean_name
from tidemill.sources.base import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa


class MessageRows:
    """The rows of one engine.

    Args:
        commits: When messages were committed.

    Attributes:
        size: How many rows there are.
    """

    def __init__(self, commits: CommitTimes[TopicPartition]) -> None:
        """Start without rows."""
        self._commits = commits
        self._blocks: list[_Block] = []
        self.size = 0

    def add(self, batch: FinishedBatch, now: float) -> None:
        """Add a row per message.

        Args:
            batch: The messages.
            now: A clock that never goes back, in seconds.
        """
        self._blocks.append(_Block(batch, now))
        self.size += len(batch)

    def find_age(self, now: float) -> float:
        """Return how long the oldest row has waited, in seconds; 0 without any."""
        return now - self._blocks[0].added_at if self._blocks else 0.0

    def take(self, until: float) -> TakenRows | None:
        """Remove the rows that were added by a time; return them, or None if there are none."""
        count = sum(1 for block in self._blocks if block.added_at <= until)
        blocks, self._blocks = self._blocks[:count], self._blocks[count:]
        self.size = sum(block.size for block in self._blocks)
        found = TakenRows(blocks, self._commits) if blocks else None
        # A commit comes after its messages: what came before the oldest row that is left is not asked for any more.
        last = max((block.last_resolved_at for block in blocks), default=0)
        oldest = min((block.first_resolved_at for block in self._blocks), default=last)
        self._commits.forget_before(oldest)
        return found


class TakenRows:
    """Rows that are complete; any thread may join them.

    Args:
        blocks: At least one block.
        commits: Looked into now.

    Attributes:
        size: How many rows there are.
    """

    def __init__(self, blocks: Sequence[_Block], commits: CommitTimes[TopicPartition]) -> None:
        """Find the times of their commits."""
        self._blocks = blocks
        self._topics = [topic for block in blocks for topic in block.topics]
        partitions = [partition for block in blocks for partition in block.partitions]
        offsets = [offset for block in blocks for offset in block.offsets]
        self._committed_at = commits.find(_list_places(self._topics, partitions), offsets)
        self.size = len(offsets)

    def join(self) -> pa.RecordBatch:
        """Return the rows as one batch."""
        import pyarrow as pa

        blocks, topics, schema = self._blocks, self._topics, messages_schema()
        joined: dict[str, Any] = {
            name: pa.concat_arrays([block.arrays[name] for block in blocks]) for name in blocks[0].arrays
        }
        joined["committed_at"] = pa.array(self._committed_at, pa.int64())
        is_plain = all(topic.isascii() for topic in set(topics))
        joined["topic"] = encode_words(topics if is_plain else [clean_name(topic) for topic in topics])
        joined["status"] = encode_words([status for block in blocks for status in block.statuses])
        joined["error"] = encode_words([error for block in blocks for error in block.errors])
        return pa.record_batch([joined[name] for name in schema.names], schema=schema)


def _list_places(topics: Sequence[str], partitions: Sequence[int]) -> Sequence[TopicPartition]:
    """Return topic and partition of each row; the same object for the same place, mostly."""
    topic = topics[0]
    if topics.count(topic) < len(topics):
        return list(zip(topics, partitions, strict=True))
    known = {partition: (topic, partition) for partition in set(partitions)}
    return [known[partition] for partition in partitions]


class _Block:
    """The rows of one batch: Arrow arrays, and what needs all rows that go together."""

    __slots__ = (
        "added_at",
        "arrays",
        "errors",
        "first_resolved_at",
        "last_resolved_at",
        "offsets",
        "partitions",
        "size",
        "statuses",
        "topics",
    )

    def __init__(self, batch: FinishedBatch, now: float) -> None:
        messages = batch.messages
        self.added_at = now
        self.size = len(batch)
        self.first_resolved_at = min(batch.resolved_at)
        self.last_resolved_at = max(batch.resolved_at)
        self.topics = [message.topic for message in messages]
        self.partitions = [message.partition for message in messages]
        self.offsets = [message.offset for message in messages]
        self.statuses = batch.statuses
        self.errors = _classify(batch)
        windows = batch.windows
        columns: dict[str, Sequence[Any]] = {
            "partition": self.partitions,
            "offset": self.offsets,
            "key": _cut_keys([message.key for message in messages]),
            "record_at": batch.record_at,
            "consumed_at": [message.consumed_at or None for message in messages],
            "arranged_at": [window.arranged_at for window in windows],
            "tasks_done_at": _find_ends(batch),
            "resolved_at": batch.resolved_at,
            "window": [window.number for window in windows],
            "tasks": batch.tasks,
            "precomputed": _count_precomputed(batch),
            "attempts": batch.attempts,
            "payloads": _count_payloads(batch),
        }
        import pyarrow as pa

        schema = messages_schema()
        self.arrays = {name: pa.array(column, schema.field(name).type) for name, column in columns.items()}


def _cut_keys(keys: list[bytes | None]) -> list[bytes | None]:
    if keys.count(None) == len(keys):
        return keys
    return [key if key is None or len(key) <= MAX_KEY_BYTES else key[:MAX_KEY_BYTES] for key in keys]


def _classify(batch: FinishedBatch) -> list[str | None]:
    """Return the error class of each message that failed."""
    errors = list(batch.rejected)
    for index, run in batch.failed.items():
        if run.error is not None:
            errors[index] = run.failure or describe_failure(run.error)
    if errors.count(None) < len(errors):
        return [None if error is None else classify_error(error) for error in errors]
    return errors


def _find_ends(batch: FinishedBatch) -> list[int | None]:
    """Return when the last task of each message ended; a result that was known has ended with its arrangement."""
    if batch.only_runs is not None:
        return [run.ended_at or window.arranged_at for run, window in zip(batch.only_runs, batch.windows, strict=True)]
    return [
        max((run.ended_at for run in runs), default=0) or window.arranged_at
        for runs, window in zip(batch.runs, batch.windows, strict=True)
    ]


def _count_precomputed(batch: FinishedBatch) -> list[int]:
    if batch.only_runs is not None:
        return [0 if run.task.precomputed is None else 1 for run in batch.only_runs]
    return [sum(run.task.precomputed is not None for run in runs) for runs in batch.runs]


def _count_payloads(batch: FinishedBatch) -> list[int]:
    """Return how many payloads hooks returned for each message by itself."""
    if batch.only_runs is not None:
        counts = [run.payloads for run in batch.only_runs]
    else:
        counts = [sum(run.payloads for run in runs) for runs in batch.runs]
    by_window = [window.payloads for window in batch.windows]
    if by_window.count(None) < len(by_window):
        for index, (payloads, message) in enumerate(zip(by_window, batch.messages, strict=True)):
            if payloads is not None:
                counts[index] += payloads.get(message.offset, 0)
    return counts


def encode_words(words: Sequence[str | None]) -> pa.DictionaryArray:
    """Return words, most of which are the same, as a dictionary and indexes into it."""
    import pyarrow as pa

    first = words[0] if words else None
    if words.count(first) == len(words):
        known = {} if first is None else {first: 0}
        codes: list[int | None] = [None if first is None else 0] * len(words)
    else:
        known = {}
        codes = [None if word is None else known.setdefault(word, len(known)) for word in words]
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(list(known), pa.string()))
