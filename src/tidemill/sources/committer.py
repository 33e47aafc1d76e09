"""Sends a consumer's offsets to the brokers, and reports the results; used on the consumer's thread only.

Two ways. Between polls commits are asynchronous, one at a time; the answer comes with a poll. Within a rebalance
callback there are no polls, so commits there are synchronous. Those have no time limit, and the client lets no other
thread use the consumer meanwhile; so the coordinator is first sent a request that has one, and until it
answers that, nothing is committed.

Invariant: the result of each commit that is sent is reported, unless the answer never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import confluent_kafka as ck

from tidemill.sources.base import TopicPartition
from tidemill.sources.commit_positions import CommitPositions

#: Receives the result of a commit; without an error it is in effect.
Ended = Callable[[dict[TopicPartition, int], ck.KafkaError | None], None]


class Committer:
    """The commits in flight.

    Args:
        ended: Called with what was committed and how it went.
        positions: Says what is committed for offsets.
    """

    def __init__(self, ended: Ended, positions: CommitPositions) -> None:
        """Start with nothing in flight."""
        self._ended = ended
        self._positions = positions
        self._in_flight: dict[TopicPartition, int] | None = None

    def forget(self, partition: TopicPartition) -> None:
        """Leave a partition out of repeated commits."""
        if self._in_flight is not None:
            self._in_flight.pop(partition, None)

    def send(self, consumer: ck.Consumer, waiting: dict[TopicPartition, int]) -> None:
        """Commit what waits, unless a commit is in flight; the answer comes with a poll."""
        if self._in_flight is not None or not waiting:
            return
        offsets = _take_all(waiting)
        dropped = {tp: offsets.pop(tp) for tp in self._positions.replaced & offsets.keys()}
        if dropped:
            self._ended(dropped, None)
        if not offsets:
            return
        positions = self._positions.make(offsets)
        try:
            consumer.commit(offsets=positions, asynchronous=True)
            self._in_flight = offsets
        except ck.KafkaException as error:
            self._ended(offsets, error.args[0])

    def on_commit(self, error: ck.KafkaError | None, partitions: Sequence[ck.TopicPartition]) -> None:
        """Take the answer to an asynchronous commit; the consumer's `on_commit`."""
        self._in_flight = None
        self._tell({(p.topic, p.partition): p.offset for p in partitions}, error, partitions)

    def send_now(self, consumer: ck.Consumer, waiting: dict[TopicPartition, int], seconds: float) -> None:
        """Commit what waits without a poll, if the coordinator answers within `seconds`.

        What an asynchronous commit took along is committed once more: the answer to that comes with a poll only.
        """
        for partition, offset in (self._in_flight or {}).items():
            waiting.setdefault(partition, offset)
        self._in_flight = None
        if not waiting:
            return
        positions = self._positions.make(waiting)
        if not positions:
            self._ended(_take_all(waiting), None)
            return
        try:
            consumer.committed(positions[:1], timeout=seconds)
        except ck.KafkaException:
            return
        offsets = _take_all(waiting)
        try:
            answer = consumer.commit(offsets=positions, asynchronous=False)
        except ck.KafkaException as error:
            self._ended(offsets, error.args[0])
        else:
            self._tell(offsets, None, answer)

    def _tell(
        self,
        offsets: dict[TopicPartition, int],
        error: ck.KafkaError | None,
        partitions: Sequence[ck.TopicPartition],
    ) -> None:
        failed = error or next((p.error for p in partitions if p.error is not None), None)
        if failed is not None and failed.code() == ck.KafkaError.OFFSET_METADATA_TOO_LARGE:
            self._positions.refused()
        self._ended(offsets, failed)


def _take_all(waiting: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Remove and return what waits."""
    offsets = dict(waiting)
    waiting.clear()
    return offsets
