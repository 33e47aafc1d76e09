"""The ledger's shell: passes the contiguous resolved prefix of every partition to the source for a commit.

At most one commit per partition is in flight. A failed commit is retried together with the messages that joined the
prefix since. The answer to a commit from an earlier ownership of the partition changes nothing. Records that the
delivery mode staged for the messages are sent with their commit, and no commit goes further than the mode allows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from tidemill.core.ledger import Ledger, LedgerBatch, LedgerEntry
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.pipeline.delivery.modes import DeliveryMode
from tidemill.runtime.link.progress import Flow
from tidemill.sources.base import CommitStatus, Records, TopicPartition, name_partition

#: How long commits are collected before they are sent.
COLLECT_SECONDS = 0.1
#: The wait before the next try after consecutive failures.
BACKOFF = Backoff(0.2, 5.0)


class CommitTarget(Protocol):
    """Carries out commits; implemented by sources."""

    def commit(self, offsets: Mapping[TopicPartition, int], records: Records | None = None) -> None:
        """Commit the offsets and send the records atomically; the source reports the result to `Commits.ended`."""


class CommitStatistics(msgspec.Struct, frozen=True):
    """Progress of commits.

    Attributes:
        committed: The next offset of each partition by name, as this engine committed it; a live view.
        failed: Finished messages that could not be committed before the engine stopped and will be reprocessed.
        flow: How many messages of each partition were taken, committed and given up; a live view.
    """

    committed: Mapping[str, int]
    failed: int
    flow: Mapping[str, Flow]


class PartitionFlow:
    """Counts of each partition's messages since the engine started: taken, committed, and given up uncommitted.

    Attributes:
        totals: The counts by the partition's name; a live view.
    """

    __slots__ = ("_moved", "totals")

    def __init__(self) -> None:
        self.totals: dict[str, Flow] = {}
        self._moved: dict[str, Flow] = {}

    def add(self, name: str, taken: int = 0, committed: int = 0, given_up: int = 0) -> None:
        before = self.totals.get(name, (0, 0, 0))
        self.totals[name] = self._moved[name] = (before[0] + taken, before[1] + committed, before[2] + given_up)

    def take_moved(self) -> dict[str, Flow]:
        """Return the counts that changed since the last call."""
        moved, self._moved = self._moved, {}
        return moved


class Commits:
    """The commits of an engine.

    Args:
        source: Carries out commits.
        settled: Called with a partition and the number of messages that a confirmed commit passed.
        mode: Limits commits, and adds the records that are sent with them.
    """

    def __init__(
        self, source: CommitTarget, settled: Callable[[TopicPartition, int], None], mode: DeliveryMode
    ) -> None:
        self._mode = mode
        self._failures = 0
        self._source = source
        self._settled = settled
        self._ledger: Ledger[TopicPartition, int] = Ledger()
        self._in_flight: dict[TopicPartition, LedgerBatch[TopicPartition, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._committed: dict[str, int] = {}
        self._moved: dict[str, int] = {}
        self._failed = 0
        #: Called with each partition and its next offset when a commit is confirmed.
        self.on_committed: Callable[[TopicPartition, int], None] | None = None
        #: Counts of taken, committed and given-up messages.
        self.flow = PartitionFlow()

    def statistics(self) -> CommitStatistics:
        return CommitStatistics(self._committed, self._failed, self.flow.totals)

    def open_all(self, partition: TopicPartition, offsets: Sequence[int]) -> list[LedgerEntry[TopicPartition, int]]:
        """Add messages that were taken."""
        return self._ledger.open_all(partition, offsets)

    def open(self, partition: TopicPartition, offset: int) -> LedgerEntry[TopicPartition, int]:
        """Add a message that was taken."""
        return self._ledger.open(partition, offset)

    def resolve(self, entry: LedgerEntry[TopicPartition, int]) -> None:
        """Record that a message left the pipeline; a commit follows within `COLLECT_SECONDS`."""
        self._ledger.resolve(entry)
        if self._timer is None:
            self.send_soon()

    def resolve_all(self, entries: Sequence[LedgerEntry[TopicPartition, int]]) -> None:
        """Record that messages left the pipeline together; see `resolve`."""
        self._ledger.accept_all(entries)
        if self._timer is None:
            self.send_soon()

    def find_unresolved(self, partition: TopicPartition) -> list[int]:
        """Return the offsets of a partition's messages that have not left the pipeline."""
        queue = self._ledger.queues.get(partition)
        return [] if queue is None else [entry.item for entry in queue.entries if entry.pending]

    def find_entry(self, partition: TopicPartition, offset: int) -> LedgerEntry[TopicPartition, int] | None:
        """Return the entry of a message whose commit is not confirmed; takes time linear in the entries before it."""
        queue = self._ledger.queues.get(partition)
        return None if queue is None else next((entry for entry in queue.entries if entry.item == offset), None)

    def find_offset(self, partition: TopicPartition, position: int) -> int | None:
        """Return the offset of the entry with this position; None: it is settled."""
        queue = self._ledger.queues.get(partition)
        entries = () if queue is None else queue.entries
        return next((entry.item for entry in entries if entry.position == position), None)

    def find_head(self, partition: TopicPartition) -> LedgerEntry[TopicPartition, int] | None:
        """Return the oldest message of a partition whose commit is not confirmed."""
        return self._ledger.find_head(partition)

    def find_first_unresolved(self, partition: TopicPartition) -> int | None:
        """Return the first message of a partition that has not left the pipeline."""
        queue = self._ledger.queues.get(partition)
        return None if queue is None else next((entry.item for entry in queue.entries if entry.pending), None)

    def list_heads(self) -> dict[TopicPartition, LedgerEntry[TopicPartition, int]]:
        """Return the oldest message of each partition whose commit is not confirmed."""
        return {partition: queue.entries[0] for partition, queue in self._ledger.queues.items() if queue.entries}

    def send_soon(self) -> None:
        """Schedule a commit in `COLLECT_SECONDS`, or later after failures."""
        if self._timer is None:
            delay = COLLECT_SECONDS
            if self._failures:
                delay += BACKOFF.compute_delay(self._failures, random.getrandbits(JITTER_BITS))
            self._timer = asyncio.get_running_loop().call_later(delay, self.send)

    def send(self) -> None:
        """Commit the resolved prefixes now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        offsets = self._collect()
        if offsets:
            self._source.commit(offsets, self._mode.take(offsets))

    def _collect(self) -> dict[TopicPartition, int]:
        offsets = {}
        for batch in self._ledger.take_all(self._mode.cut):
            self._in_flight[batch.lane] = batch
            offsets[batch.lane] = batch.entries[-1].item + 1
        return offsets

    def ended(self, offsets: Mapping[TopicPartition, int], status: CommitStatus) -> None:
        """Handle the result of a commit."""
        failed: list[TopicPartition] = []
        for partition, offset in offsets.items():
            batch = self._in_flight.get(partition)
            if batch is None or batch.entries[-1].item + 1 != offset:
                continue  # it belongs to an earlier ownership
            del self._in_flight[partition]
            if status is CommitStatus.DONE:
                self._failures = 0
                self._ledger.settle(batch)
                self._mode.committed(partition)
                self.note_committed(partition, offset)
                if self.on_committed is not None:
                    self.on_committed(partition, offset)
                self.flow.add(name_partition(partition), committed=len(batch.entries))
                self._settled(partition, len(batch.entries))
            else:
                self._ledger.retry(batch)
                failed.append(partition)
        if status is not CommitStatus.DONE:
            self._failures = self._failures + 1 if self._mode.failed(failed) else 0
        self._changed.set()
        if self._ledger.total:
            self.send_soon()

    def surrender(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offsets to commit for partitions that are about to be given up, and forget these partitions."""
        theirs = set(partitions)
        for partition in theirs & self._in_flight.keys():
            self._ledger.retry(self._in_flight.pop(partition))
        offsets = self._collect()
        last = {partition: offsets.pop(partition) for partition in theirs & offsets.keys()}
        for partition in last:
            batch = self._in_flight[partition]
            self._ledger.settle(batch)
            self.flow.add(name_partition(partition), committed=len(batch.entries))
        if offsets:
            self._source.commit(offsets)
        for partition in theirs:
            self.abandon(partition)
        for partition, offset in last.items():
            self.note_committed(partition, offset)
        return last

    def note_committed(self, partition: TopicPartition, offset: int) -> None:
        """Store the next offset of a partition for snapshots."""
        name = name_partition(partition)
        self._committed[name] = self._moved[name] = offset

    def take_moved(self) -> dict[str, int]:
        """Return the offsets that were committed since the last call, by partition name."""
        moved, self._moved = self._moved, {}
        return moved

    def abandon(self, partition: TopicPartition) -> None:
        """Forget a partition: late resolutions and answers change nothing."""
        self._in_flight.pop(partition, None)
        if (queue := self._ledger.queues.get(partition)) is not None:
            self.flow.add(name_partition(partition), given_up=len(queue.entries))
        self._ledger.abandon(partition)
        self._mode.abandon(partition)
        self._changed.set()

    async def finish(self, partitions: Collection[TopicPartition] | None = None) -> None:
        """Commit everything that is ready and wait for the confirmation. The caller limits the time.

        Args:
            partitions: Wait for these only; None: for all.
        """
        self.send()
        while self._in_flight and (partitions is None or not self._in_flight.keys().isdisjoint(partitions)):
            self._changed.clear()
            await self._changed.wait()
            if not self._in_flight or partitions is not None:
                self.send()

    def give_up(self) -> int:
        """Count the finished messages that could not be committed in time."""
        queues = self._ledger.queues.values()
        self._failed = sum(not entry.pending for queue in queues for entry in queue.entries)
        return self._failed

    def close(self) -> None:
        """Cancel the scheduled commit; from now on only `send` commits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
