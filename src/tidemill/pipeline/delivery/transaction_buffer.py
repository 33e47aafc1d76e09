"""The records of the next transaction, shared by sinks, dead letters and commits; `core.delivery` decides.

With `kafka.exactly_once` payloads are not sent when a hook returns them. They are staged with their messages, and are
sent only in the transaction that commits these. Until then, staged records count as bytes in flight.
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
    """The owner of a staged record, which receives its outcome."""

    def committed(self, count: int) -> None:
        """Count records that were committed."""

    def refused(self, records: Sequence[StagedRecord]) -> None:
        """Handle records that the brokers will never accept; they are withheld until `again` or `drop`."""


class Position(Protocol):
    """The position of a message."""

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int: ...

    @property
    def offset(self) -> int: ...


class TransactionBuffer:
    """The staged records of each partition.

    Attributes:
        limits: The largest batch that each topic accepts, in bytes, if the brokers reveal it.
        charge: Called with the change of the bytes that a partition has in flight.
        changed: Called when more may be committed than before.
    """

    def __init__(self) -> None:
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
            partition: The partition of the messages.
            offsets: The messages' offsets; a message with several records has its offset several times.
            records: The records.
            size_bytes: The total size of the records.
        """
        self.charge(partition, size_bytes)
        self._records.stage_all(partition, offsets, records)

    def cut(self, partition: TopicPartition, entries: Sequence[LedgerEntry[TopicPartition, int]]) -> int:
        """Return how many of these resolved messages may be committed now."""
        return self._records.find_cut(partition, [entry.item for entry in entries])

    def take(self, partition: TopicPartition, last: int) -> list[Outgoing]:
        """Return the records to send together with the messages up to this offset."""
        return [staged.result for staged in self._records.take(partition, last)]

    def committed(self, partition: TopicPartition) -> None:
        """Drop the records that were taken, because they are committed."""
        records = [staged.result for staged in self._records.settle(partition)]
        size_bytes = sum([record.size_bytes for record in records])
        counts: Counter[RecordOwner] = Counter([record.owner for record in records])
        if size_bytes:
            self.charge(partition, -size_bytes)
        for owner, count in counts.items():
            owner.committed(count)

    def aborted(self, partition: TopicPartition) -> int:
        """Offer the taken records again; the owners decide about records that the brokers reject for good.

        A batch holds records of several partitions, so the source sets the verdicts, for the whole transaction.

        Returns:
            How many records were rejected.
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
        if staged.state is StagedState.UNDECIDED:  # otherwise its partition was given up
            self.charge(staged.lane, -staged.result.size_bytes)
            self._records.drop(staged)
            self.changed()

    def abandon(self, partition: TopicPartition) -> None:
        self._records.abandon(partition)
