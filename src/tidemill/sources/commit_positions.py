"""Builds the positions to commit: offset, topic id and note of each partition; used on the consumer's thread only.

Invariant: no offset of a replaced topic is committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import confluent_kafka as ck
import structlog

from tidemill.core.topic_identity import TopicIdentity, add_mark
from tidemill.sources.base import TopicPartition

log = structlog.get_logger(__name__)


def list_partitions(positions: Sequence[ck.TopicPartition]) -> list[TopicPartition]:
    """Return the partitions of the client's positions."""
    return [(position.topic, position.partition) for position in positions]


class CommitPositions:
    """Turns offsets into positions for the client.

    Args:
        identity: The topic that each partition is read from.
        notes: Texts to store with offsets; read at each commit.
    """

    def __init__(self, identity: TopicIdentity[TopicPartition], notes: Mapping[TopicPartition, str]) -> None:
        self._identity = identity
        self._notes = notes
        self._takes_notes = self._takes_ids = True
        #: Partitions whose topic was replaced, until they are read from the beginning of the new one.
        self.replaced: set[TopicPartition] = set()

    def make(self, offsets: Mapping[TopicPartition, int]) -> list[ck.TopicPartition]:
        """Return the positions to commit, without partitions whose topic was replaced."""
        return [
            ck.TopicPartition(*tp, offset, self._describe(tp))
            for tp, offset in offsets.items()
            if tp not in self.replaced
        ]

    def refused(self) -> None:
        """Store less with offsets from now on, because the brokers refused the metadata as too large."""
        if self._takes_notes:
            self._takes_notes = False
        elif self._takes_ids:
            self._takes_ids = False
            log.warning("the brokers refuse metadata with offsets; a recreated topic may go unnoticed")

    def _describe(self, partition: TopicPartition) -> str:
        note = self._notes.get(partition, "") if self._takes_notes else ""
        return add_mark(self._identity.find_id(partition), note) if self._takes_ids else note
