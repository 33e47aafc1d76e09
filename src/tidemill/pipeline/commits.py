"""The ledger's shell: offers the contiguous resolved prefix of every partition to the source for a commit.

At most one commit per partition is in flight; a failed one is offered again with what joined it; the answer to a
commit of an earlier ownership of the partition changes nothing. What the delivery mode keeps for its messages goes
out with a commit, and it goes no further than the mode allows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from tidemill.core.ledger import Batch, Ledger, LedgerEntry
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.pipeline.delivery.modes import DeliveryMode
from tidemill.runtime.progress import Flow
from tidemill.sources.base import CommitStatus, Records, TopicPartition, name_partition

#: Commits are collected for this long.
COLLECT_SECONDS = 0.1
#: After failures in a row, the next try waits longer.
BACKOFF = Backoff(0.2, 5.0)


class Committer(Protocol):
    """What carries commits out: a source."""

    def commit(self, offsets: Mapping[TopicPartition, int], records: Records | None = None) -> None:
        """Commit, with these records or not at all; the end is reported to `Commits.ended`."""


class CommitStatistics(msgspec.Struct, frozen=True):
    """How far commits got.

    Attributes:
        committed: The next offset of each partition by name, as this engine committed it; changes with it.
        failed: At the end: how many finished messages could not be committed, and will be reprocessed.
        flow: How many messages of each partition were taken, committed, and given up; changes with it.
    """

    committed: Mapping[str, int]
    failed: int
    flow: Mapping[str, Flow]


class PartitionFlow:
    """How many messages of each partition were taken, committed, and given up uncommitted, since the engine started.

    Attributes:
        totals: The counts by the partition's name; changes with every call.
    """

    __slots__ = ("_moved", "totals")

    def __init__(self) -> None:
        """Start without any."""
        self.totals: dict[str, Flow] = {}
        self._moved: dict[str, Flow] = {}

    def add(self, name: str, taken: int = 0, committed: int = 0, given_up: int = 0) -> None:
        """Count messages of a partition."""
        before = self.totals.get(name, (0, 0, 0))
        self.totals[name] = self._moved[name] = (before[0] + taken, before[1] + committed, before[2] + given_up)

    def take_moved(self) -> dict[str, Flow]:
        """Return what changed since the last call."""
        moved, self._moved = self._moved, {}
        return moved


class Commits:
    """What may be committed, and what is.

    Args:
        source: Carries commits out.
        settled: Called with a partition and the number of messages that a confirmed commit passed.
        mode: Says what may be committed, and what goes out with it.
    """

    def __init__(self, source: Committer, settled: Callable[[TopicPartition, int], None], mode: DeliveryMode) -> None:
        """Start with nothing outstanding."""
        self._mode = mode
        self._failures = 0
        self._source = source
        self._settled = settled
        self._ledger: Ledger[TopicPartition, int] = Ledger()
        self._in_flight: dict[TopicPartition, Batch[TopicPartition, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._committed: dict[str, int] = {}
        self._moved: dict[str, int] = {}
        self._failed = 0
        #: Called with each partition and its next offset when a commit is confirmed.
        self.on_committed: Callable[[TopicPartition, int], None] | None = None
        #: How many messages of each partition passed.
        self.flow = PartitionFlow()

    def statistics(self) -> CommitStatistics:
        """Return how far commits got."""
        return CommitStatistics(self._committed, self._failed, self.flow.totals)

    def open_all(self, partition: TopicPartition, offsets: Sequence[int]) -> list[LedgerEntry[TopicPartition, int]]:
        """Note messages that were taken."""
        return self._ledger.open_all(partition, offsets)

    def open(self, partition: TopicPartition, offset: int) -> LedgerEntry[TopicPartition, int]:
        """Note a message that was taken."""
        return self._ledger.open(partition, offset)

    def resolve(self, entry: LedgerEntry[TopicPartition, int]) -> None:
        """Note that a message left the pipeline; a commit follows within `COLLECT_SECONDS`."""
        self._ledger.resolve(entry)
        if self._timer is None:
            self.send_soon()

    def resolve_all(self, entries: Sequence[LedgerEntry[TopicPartition, int]]) -> None:
        """Note that messages left the pipeline together; see `resolve`."""
        self._ledger.accept_all(entries)
        if self._timer is None:
            self.send_soon()

    def find_unresolved(self, partition: TopicPartition) -> list[int]:
        """Return the offsets of a partition's messages that did not leave the pipeline."""
        queue = self._ledger.queues.get(partition)
        return [] if queue is None else [entry.item for entry in queue.entries if entry.pending]

    def find_entry(self, partition: TopicPartition, offset: int) -> LedgerEntry[TopicPartition, int] | None:
        """Return the entry of a message whose commit is not confirmed; costs by how many are before it."""
        queue = self._ledger.queues.get(partition)
        return None if queue is None else next((entry for entry in queue.entries if entry.item == offset), None)

    def find_offset(self, partition: TopicPartition, position: int) -> int | None:
        """Return the offset of the entry with this position, if it is not settled."""
        queue = self._ledger.queues.get(partition)
        entries = () if queue is None else queue.entries
        return next((entry.item for entry in entries if entry.position == position), None)

    def find_head(self, partition: TopicPartition) -> LedgerEntry[TopicPartition, int] | None:
        """Return the oldest message of a partition whose commit is not confirmed."""
        return self._ledger.find_head(partition)

    def find_first_unresolved(self, partition: TopicPartition) -> int | None:
        """Return the first message of a partition that did not leave the pipeline."""
        queue = self._ledger.queues.get(partition)
        return None if queue is None else next((entry.item for entry in queue.entries if entry.pending), None)

    def list_heads(self) -> dict[TopicPartition, LedgerEntry[TopicPartition, int]]:
        """Return the oldest message of each partition whose commit is not confirmed."""
        return {partition: queue.entries[0] for partition, queue in self._ledger.queues.items() if queue.entries}

    def send_soon(self) -> None:
        """Offer what is ready within `COLLECT_SECONDS`, or later after failures."""
        if self._timer is None:
            delay = COLLECT_SECONDS
            if self._failures:
                delay += BACKOFF.compute_delay(self._failures, random.getrandbits(JITTER_BITS))
            self._timer = asyncio.get_running_loop().call_later(delay, self.send)

    def send(self) -> None:
        """Offer what is ready now."""
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
        """Take the end of a commit."""
        failed: list[TopicPartition] = []
        for partition, offset in offsets.items():
            batch = self._in_flight.get(partition)
            if batch is None or batch.entries[-1].item + 1 != offset:
                continue  # from an earlier ownership
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
        """Return what must be committed of partitions that are about to be given up, and forget them."""
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
        """Note the next offset of a partition, for snapshots."""
        name = name_partition(partition)
        self._committed[name] = self._moved[name] = offset

    def take_moved(self) -> dict[str, int]:
        """Return what was committed since the last call, by names."""
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
        """Commit everything that is ready; returns when it is confirmed. The caller bounds the time.

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
        """Return how many finished messages could not be committed in time."""
        queues = self._ledger.queues.values()
        self._failed = sum(not entry.pending for queue in queues for entry in queue.entries)
        return self._failed

    def close(self) -> None:
        """Send nothing more unless `send` is called."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
