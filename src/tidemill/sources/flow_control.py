"""Pauses partitions with full buffers at the broker, and resumes them; used on the consumer's thread only.

A pause discards everything that librdkafka has prefetched, so only partitions with full buffers are paused. Only
partitions that have grown or are full are checked: of a thousand partitions, idle ones cost nothing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Mapping

import confluent_kafka as ck

from tidemill.sources.base import TopicPartition
from tidemill.sources.buffer import Buffer

#: A partition's buffer is full at this many messages; it is resumed below a quarter of that.
BUFFER_MESSAGES = 4_000
#: The time limit of a request that only wakes the client.
WAKE_SECONDS = 0.001


class FlowControl:
    """Pauses and resumes the owned partitions.

    Args:
        buffers: The buffers of the owned partitions.
        max_bytes: The limit of all buffers together.

    Attributes:
        full: The partitions that are paused because they are full.
    """

    def __init__(self, buffers: Mapping[TopicPartition, Buffer], max_bytes: int) -> None:
        self._buffers = buffers
        self._max_bytes = max_bytes
        self._grown: set[TopicPartition] = set()
        self.full: set[TopicPartition] = set()

    def note_growth(self, partitions: Collection[TopicPartition]) -> None:
        """Record that messages were added to the buffers of these partitions."""
        self._grown |= set(partitions)

    def forget(self, partition: TopicPartition) -> None:
        """Forget a partition that is no longer owned."""
        self._grown.discard(partition)
        self.full.discard(partition)

    def regulate(self, consumer: ck.Consumer, *, fetching: bool) -> None:
        """Pause partitions whose buffers are full, and resume those with room; without `fetching`, pause all."""
        share = self._max_bytes // max(1, len(self._buffers))
        grown, self._grown = (self._grown if fetching else self._buffers.keys() - self.full), set()
        for tp in grown:
            buffer = self._buffers.get(tp)
            if buffer is None or buffer.paused:
                continue
            if len(buffer.messages) >= BUFFER_MESSAGES or buffer.size_bytes >= share or not fetching:
                consumer.pause([ck.TopicPartition(*tp)])
                buffer.paused = True
                self.full.add(tp)
                if not fetching:
                    buffer.messages = deque()  # replaced, not cleared, because the loop may be taking from it
        if not fetching:
            return
        for tp in list(self.full):
            buffer = self._buffers[tp]
            if len(buffer.messages) <= BUFFER_MESSAGES // 4 and buffer.size_bytes <= share // 4:
                _resume(consumer, ck.TopicPartition(*tp))
                buffer.paused = False
                self.full.discard(tp)


def _resume(consumer: ck.Consumer, partition: ck.TopicPartition) -> None:
    """Resume a partition, and wake the client's thread that fetches from its broker.

    If everything at a broker is paused, that thread sleeps for up to a second, and a resume does not wake it (measured:
    460 to 800 ms until the next message; 5 ms with a request behind the resume). The answer is not awaited.
    """
    consumer.resume([partition])
    with contextlib.suppress(ck.KafkaException):
        consumer.get_watermark_offsets(partition, timeout=WAKE_SECONDS)
