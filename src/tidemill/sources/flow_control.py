"""Pauses partitions at the broker whose buffers are full, and resumes them; used on the consumer's thread only.

A pause discards everything that librdkafka had prefetched, so it is for full buffers only. Only partitions that grew
or are full are looked at: a thousand partitions, of which one has messages, cost what one costs.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Mapping

import confluent_kafka as ck

from tidemill.sources.base import TopicPartition
from tidemill.sources.buffer import Buffer

#: A partition's buffer is full at this many messages, and wants more below a quarter of it.
BUFFER_MESSAGES = 4_000
#: A request that only wakes the client is waited for no longer than this.
WAKE_SECONDS = 0.001


class FlowControl:
    """Which of the owned partitions are paused.

    Args:
        buffers: Of the owned partitions.
        max_bytes: What all of them together may hold.

    Attributes:
        full: The partitions that are paused because they are full.
    """

    def __init__(self, buffers: Mapping[TopicPartition, Buffer], max_bytes: int) -> None:
        """Start with nothing paused."""
        self._buffers = buffers
        self._max_bytes = max_bytes
        self._grown: set[TopicPartition] = set()
        self.full: set[TopicPartition] = set()

    def note_growth(self, partitions: Collection[TopicPartition]) -> None:
        """Note that messages were added to the buffers of these partitions."""
        self._grown |= set(partitions)

    def forget(self, partition: TopicPartition) -> None:
        """Leave out a partition that is no longer owned."""
        self._grown.discard(partition)
        self.full.discard(partition)

    def regulate(self, consumer: ck.Consumer, *, fetching: bool) -> None:
        """Pause partitions whose buffer has become full, resume those that want more; once stopped, pause all."""
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
                    buffer.messages = deque()  # not cleared: the loop may be taking from it
        if not fetching:
            return
        for tp in list(self.full):
            buffer = self._buffers[tp]
            if len(buffer.messages) <= BUFFER_MESSAGES // 4 and buffer.size_bytes <= share // 4:
                _resume(consumer, ck.TopicPartition(*tp))
                buffer.paused = False
                self.full.discard(tp)


def _resume(consumer: ck.Consumer, partition: ck.TopicPartition) -> None:
    """Resume a partition, and wake the client's own thread that fetches from its broker.

    With everything at a broker paused, that thread sleeps for up to a second and a resume does not wake it
    (measured: 460 to 800 ms until the next message, 5 ms with a request behind the resume); the answer of the
    request is not waited for.
    """
    consumer.resume([partition])
    with contextlib.suppress(ck.KafkaException):
        consumer.get_watermark_offsets(partition, timeout=WAKE_SECONDS)
