"""What goes out in the next transaction, shared by sinks, dead letters and commits; `core.delivery` decides.

With `kafka.exactly_once` nothing is sent when a hook returns it. It is staged with its messages and goes out, or not
at all, in the transaction that commits them. What is staged counts as bytes in flight until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from tidemill.core.delivery.pending_records import PendingRecords, Staged, StagedState
from tidemill.core.delivery.transaction import RecordVerdict
from tidemill.core.ledger import LedgerEntry
from tidemill.sources.base import Outgoing, TopicPartition

StagedRecord = Staged[TopicPartition, Outgoing]


class RecordOwner(Protocol):
    """What staged a record, and is told what became of it."""

    def committed(self, count: int) -> None:
        """This many records were committed."""

    def refused(self, records: Sequence[StagedRecord]) -> None:
        """The brokers will never take these; they are withheld until `again` or `drop`."""


class Position(Protocol):
    """Where a message is."""

    @property
    def topic(self) -> str:
        """Its topic."""

    @property
    def partition(self) -> int:
        """Its partition."""

    @property
    def offset(self) -> int:
        """Its offset."""


class TransactionBuffer:
    """What waits for its transaction, per partition.

    Attributes:
        limits: The largest batch that each topic takes, in bytes, as far as the brokers tell.
        charge: Called with the bytes that a partition has more, or fewer, in flight.
        changed: Called when more may go than before.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._records: PendingRecords[TopicPartition, Outgoing] = PendingRecords()
        self.limits: list[int] = []
        self.charge: Callable[[TopicPartition, int], None] = lambda partition, size_bytes: None
        self.changed: Callable[[], None] = lambda: None

    def put(self, sources: Sequence[Position], record: Outgoing) -> StagedRecord:
        """Stage a record for its messages, which are of one partition."""
        partition = (sources[0].topic, sources[0].partition)
        offsets = [source.offset for source in sources]
        self.charge(partition, record.size_bytes)
        return self._records.stage(partition, min(offsets), max(offsets), record)

    def put_all(
        self, partition: TopicPartition, offsets: Sequence[int], records: Sequence[Outgoing], size_bytes: int
    ) -> None:
        """Stage records of one message each, in order.

        Args:
            partition: Where the messages are.
            offsets: Their offsets; a message with several records has its offset several times.
            records: The records.
            size_bytes: The bytes of all of them.
        """
        self.charge(partition, size_bytes)
        self._records.stage_all(partition, offsets, records)

    def cut(self, partition: TopicPartition, entries: Sequence[LedgerEntry[TopicPartition, int]]) -> int:
        """Return how many of these resolved messages may be committed now."""
        return self._records.find_cut(partition, [entry.item for entry in entries])

    def take(self, partition: TopicPartition, last: int) -> list[Outgoing]:
        """Return what goes out together with the messages up to this offset."""
        return [staged.result for staged in self._records.take(partition, last)]

    def committed(self, partition: TopicPartition) -> None:
        """Forget what was taken: it is committed."""
        records = [staged.result for staged in self._records.settle(partition)]
        size_bytes = sum([record.size_bytes for record in records])
        counts: Counter[RecordOwner] = Counter([record.owner for record in records])
        if size_bytes:
            self.charge(partition, -size_bytes)
        for owner, count in counts.items():
            owner.committed(count)

    def aborted(self, partition: TopicPartition) -> int:
        """Offer what was taken again; the owners decide about records that brokers reject for good.

        A batch holds records of several partitions, so the source gives the verdicts, over the whole transaction.

        Returns:
            How many records were to blame.
        """
        blamed = 0
        refused: dict[RecordOwner, list[StagedRecord]] = {}
        for staged in self._records.retry(partition):
            record = staged.result
            verdict, record.verdict = record.verdict, None
            if verdict is None:
                continue
            blamed += 1
            if verdict is RecordVerdict.ISOLATED:
                record.isolated = True
                record.error = None
            else:
                record.attempts += 1
                self._records.withhold(staged)
                refused.setdefault(record.owner, []).append(staged)
        for owner, records in refused.items():
            owner.refused(records)
        return blamed

    def again(self, staged: StagedRecord) -> None:
        """Offer a withheld record again, in a batch of its own."""
        staged.result.isolated = True
        staged.result.error = None
        self._records.allow(staged)
        self.changed()

    def drop(self, staged: StagedRecord) -> None:
        """Commit a withheld record's messages without it."""
        if staged.state is StagedState.UNDECIDED:  # else its partition was given up
            self.charge(staged.lane, -staged.result.size_bytes)
            self._records.drop(staged)
            self.changed()

    def abandon(self, partition: TopicPartition) -> None:
        """Forget a partition."""
        self._records.abandon(partition)
