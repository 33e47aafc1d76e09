"""The lag of each owned partition, as Kafka defines it: the end of the partition minus its committed offset.

Used on the consumer's thread only; `lag` may be read on any thread. Fetched data includes the ends, so these need no
request. For partitions without fetches, because they were just assigned or are paused, one request with a short time
limit asks for the ends of all. A partition without a committed offset counts from its beginning. A partition whose end
is not known yet is not in `lag`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import confluent_kafka as ck

from tidemill.sources.base import TopicPartition

#: How often the ends of paused partitions are requested.
ASK_AGAIN_SECONDS = 5.0
#: How long a request may block the consumer's thread.
ANSWER_SECONDS = 0.5
#: Special timestamps that stand for the end and the beginning (Kafka's ListOffsets).
_LATEST, _EARLIEST = -1, -2


class LagWatch:
    """The lag of all owned partitions.

    Attributes:
        lag: The lag of each partition; replaced as a whole, never modified.
    """

    def __init__(self) -> None:
        self.lag: Mapping[TopicPartition, int] = {}
        self._positions: dict[TopicPartition, int | None] = {}
        self._ends: dict[TopicPartition, int] = {}
        self._ask_at = 0.0

    def assigned(self, committed: Mapping[TopicPartition, int]) -> None:
        """Add partitions with their committed offsets (negative: there is none)."""
        for partition, offset in committed.items():
            self._positions[partition] = offset if offset >= 0 else None

    def forget(self, partition: TopicPartition) -> None:
        """Remove a partition."""
        self._positions.pop(partition, None)
        self._ends.pop(partition, None)

    def committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Record committed offsets."""
        for partition, offset in offsets.items():
            if partition in self._positions:
                self._positions[partition] = offset

    def look(self, consumer: ck.Consumer, paused: Iterable[TopicPartition], now: float, *, may_ask: bool) -> None:
        """Refresh the lag.

        Args:
            consumer: The consumer of the partitions.
            paused: The partitions that are not fetched.
            now: A monotonic time in seconds.
            may_ask: Whether requests to the brokers are allowed.
        """
        held = set(paused)
        for partition in self._positions:
            high = read_cached_end(consumer, partition)
            if high >= 0:
                # The cached end of a paused partition is as old as its last fetch; a requested end may be newer.
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
    """Return the end of a partition as of the last fetch; negative: unknown."""
    try:
        return int(consumer.get_watermark_offsets(ck.TopicPartition(*partition), cached=True)[1])
    except ck.KafkaException:
        return -1


def _ask_offsets(
    consumer: ck.Consumer, moment: int, partitions: Collection[TopicPartition]
) -> dict[TopicPartition, int]:
    """Return the beginnings or ends of partitions, as far as the brokers answer."""
    if not partitions:
        return {}
    asked = [ck.TopicPartition(*partition, moment) for partition in partitions]
    try:
        answers = consumer.offsets_for_times(asked, timeout=ANSWER_SECONDS)
    except ck.KafkaException:
        return {}
    return {(p.topic, p.partition): p.offset for p in answers if p.error is None and p.offset >= 0}
