"""How far each owned partition is behind: Kafka's lag, the end of the partition minus what is committed.

Used on the consumer's thread only; `lag` may be read from anywhere. Ends come with what is fetched, without a request.
Where nothing is fetched, because a partition was just assigned or is paused, the brokers are asked: one request for all
such partitions, with a short time limit. A partition without a committed offset counts from its beginning. One for
which the brokers have not answered is not in `lag`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import confluent_kafka as ck

from tidemill.sources.base import TopicPartition

#: The ends of paused partitions are asked for this often.
ASK_AGAIN_SECONDS = 5.0
#: A request may hold up the consumer's thread for this long.
ANSWER_SECONDS = 0.5
#: In a request for the offset at a time, these stand for the end and the beginning (Kafka's ListOffsets).
_LATEST, _EARLIEST = -1, -2


class LagWatch:
    """The lag of all owned partitions.

    Attributes:
        lag: Per partition; replaced as a whole, never changed.
    """

    def __init__(self) -> None:
        """Start without partitions."""
        self.lag: Mapping[TopicPartition, int] = {}
        self._positions: dict[TopicPartition, int | None] = {}
        self._ends: dict[TopicPartition, int] = {}
        self._ask_at = 0.0

    def assigned(self, committed: Mapping[TopicPartition, int]) -> None:
        """Add partitions with their committed offsets, negative where there is none."""
        for partition, offset in committed.items():
            self._positions[partition] = offset if offset >= 0 else None

    def forget(self, partition: TopicPartition) -> None:
        """Leave a partition out."""
        self._positions.pop(partition, None)
        self._ends.pop(partition, None)

    def committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note committed offsets."""
        for partition, offset in offsets.items():
            if partition in self._positions:
                self._positions[partition] = offset

    def look(self, consumer: ck.Consumer, paused: Iterable[TopicPartition], now: float, *, may_ask: bool) -> None:
        """Refresh the lag.

        Args:
            consumer: Whose partitions these are.
            paused: What is not fetched.
            now: Seconds of a monotonic clock.
            may_ask: Whether the brokers may be asked.
        """
        held = set(paused)
        for partition in self._positions:
            high = read_cached_end(consumer, partition)
            if high >= 0:
                self._ends[partition] = max(high, self._ends.get(partition, 0)) if partition in held else high
        if may_ask:
            self._ask(consumer, held, now)
        self.lag = {
            partition: max(0, self._ends[partition] - position)
            for partition, position in self._positions.items()
            if position is not None and partition in self._ends
        }

    def _ask(self, consumer: ck.Consumer, held: Collection[TopicPartition], now: float) -> None:
        unknown = {partition for partition in self._positions if partition not in self._ends}
        if held and now >= self._ask_at:
            self._ask_at = now + ASK_AGAIN_SECONDS
            unknown |= self._positions.keys() & held
        self._ends |= _ask_offsets(consumer, _LATEST, unknown)
        unstarted = [partition for partition, position in self._positions.items() if position is None]
        self._positions |= _ask_offsets(consumer, _EARLIEST, unstarted)


def read_cached_end(consumer: ck.Consumer, partition: TopicPartition) -> int:
    """Return the end of a partition as the last fetch saw it; negative: not known."""
    try:
        return int(consumer.get_watermark_offsets(ck.TopicPartition(*partition), cached=True)[1])
    except ck.KafkaException:
        return -1


def _ask_offsets(
    consumer: ck.Consumer, moment: int, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, int]:
    """Return the beginning or the end of partitions, as far as the brokers say."""
    if not partitions:
        return {}
    asked = [ck.TopicPartition(*partition, moment) for partition in partitions]
    try:
        answers = consumer.offsets_for_times(asked, timeout=ANSWER_SECONDS)
    except ck.KafkaException:
        return {}
    return {(p.topic, p.partition): p.offset for p in answers if p.error is None and p.offset >= 0}
