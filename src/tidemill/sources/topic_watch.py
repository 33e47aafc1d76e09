"""Watches whether a topic is still the one that its partitions were assigned from; used on the consumer's thread only.

The topic's id is requested at every assignment, after every jump back, and regularly in between; `core.topic_identity`
compares.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import confluent_kafka as ck
import structlog

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.topic_identity import TopicIdentity, split_mark
from tidemill.runtime.kafka.client import make_client_config
from tidemill.runtime.kafka.topic_ids import TopicIds
from tidemill.sources.base import TopicPartition, name_partitions
from tidemill.sources.buffer import Buffer
from tidemill.sources.commit_positions import CommitPositions

log = structlog.get_logger(__name__)

#: How long an assignment waits for committed offsets.
COMMITTED_SECONDS = 10.0
#: How long an assignment, or a jump back, waits for the topic's id.
ASK_SECONDS = 5.0
#: The minimum time between two requests after jumps back.
ASK_AGAIN_SECONDS = 1.0


def open_topic_ids(kafka: KafkaSettings) -> TopicIds:
    """Return a client that requests the id of the source topic."""
    return TopicIds(make_client_config(kafka, kafka.brokers, {}), kafka.source_topic)


class PartitionStart(NamedTuple):
    """The position at which reading of a partition starts.

    Attributes:
        offset: The committed offset; negative if there is none, or if it belongs to a replaced topic of the same name.
        note: The text stored with the offset.
        replaced: Whether the committed offset belongs to a replaced topic, so that the partition is read from its
            beginning.
    """

    offset: int
    note: str = ""
    replaced: bool = False

    def make_position(self, partition: TopicPartition) -> ck.TopicPartition:
        """Return the client's position: the beginning, or a lookup of the committed offset."""
        return ck.TopicPartition(*partition, ck.OFFSET_BEGINNING if self.replaced else ck.OFFSET_INVALID)


class TopicWatch:
    """The identity of one topic.

    Args:
        ids: Requests the topic's id.
        notes: Texts to store with offsets.

    Attributes:
        positions: Builds the positions to commit.
        recreated: How often a partition was read from its beginning because its topic had been recreated.
    """

    def __init__(self, ids: TopicIds, notes: Mapping[TopicPartition, str]) -> None:
        self._ids = ids
        self._identity: TopicIdentity[TopicPartition] = TopicIdentity()
        self.positions = CommitPositions(self._identity, notes)
        self.recreated = 0
        self._now: str | None = None
        self._ask_at = 0.0

    def find_starts(
        self, consumer: ck.Consumer, partitions: list[ck.TopicPartition]
    ) -> dict[TopicPartition, PartitionStart]:
        """Return the starts of partitions that are being assigned."""
        if not partitions:
            return {}
        committed = partitions
        try:
            committed = consumer.committed(partitions, timeout=COMMITTED_SECONDS)
        except ck.KafkaException as error:
            log.warning("cannot read committed offsets; deleted messages will not be counted", error=str(error))
        self._now, starts = self._ids.ask(ASK_SECONDS), {}
        for position in committed:
            tp = (position.topic, position.partition)
            marked, note = split_mark(position.metadata or "")
            known = position.error is None and position.offset >= 0
            same = self._identity.assign(tp, marked if known else None, self._now)
            offset = position.offset if position.error is None else -1
            starts[tp] = PartitionStart(offset, note) if same else PartitionStart(-1, replaced=True)
        self._say_replaced([tp for tp, start in starts.items() if start.replaced])
        return starts

    def forget(self, partition: TopicPartition) -> None:
        """Stop watching a partition."""
        self._identity.forget(partition)
        self.positions.replaced.discard(partition)

    def close_replaced(
        self, consumer: ck.Consumer, buffers: Mapping[TopicPartition, Buffer], *, at_once: bool
    ) -> list[TopicPartition]:
        """Stop fetching partitions whose topic was deleted and recreated; return these, each once.

        Args:
            consumer: The consumer of the partitions.
            buffers: The buffers of all its partitions.
            at_once: Whether to wait for the topic's id, unless it was requested a moment ago.
        """
        if not at_once:
            now = self._ids.look()
        elif time.monotonic() >= self._ask_at:
            now = self._ids.ask(ASK_SECONDS)
            self._ask_at = time.monotonic() + ASK_AGAIN_SECONDS
        else:
            return []
        replaced = [tp for tp in self._identity.find_replaced(now) if tp not in self.positions.replaced]
        if replaced:
            self._now = now
            self.positions.replaced.update(replaced)
            for tp in replaced:
                buffers[tp].closed_at = time.monotonic()
            consumer.pause([ck.TopicPartition(*tp) for tp in replaced])
            self._say_replaced(replaced)
        return replaced

    def find_ended(self, buffers: Mapping[TopicPartition, Buffer], seconds: float) -> list[TopicPartition]:
        """Return the replaced partitions whose fetched messages are all done.

        Args:
            buffers: The buffers of all partitions.
            seconds: The time limit for messages that were pulled.
        """
        due = time.monotonic() - seconds
        return [
            tp
            for tp in self.positions.replaced
            if (buffer := buffers[tp]).is_settled or (not buffer.messages and (buffer.closed_at or 0.0) < due)
        ]

    def restart(self, replaced: Sequence[TopicPartition]) -> dict[TopicPartition, PartitionStart]:
        """Return the starts of partitions from `find_ended` in the new topic."""
        for tp in replaced:
            self._identity.assign(tp, None, self._now)
        return {tp: PartitionStart(-1, replaced=True) for tp in replaced}

    def _say_replaced(self, partitions: Sequence[TopicPartition]) -> None:
        if partitions:
            self.recreated += len(partitions)
            log.warning(
                "the topic was deleted and recreated; it is read from its beginning once the fetched messages are done",
                partitions=name_partitions(partitions),
            )
