"""Sends a consumer's offsets to the brokers, and reports the results; used on the consumer's thread only.

Between polls, commits are asynchronous, one in flight; the answer arrives with a poll. Rebalance callbacks do not poll,
so commits there are synchronous. A synchronous commit has no time limit, and the client blocks all other uses of the
consumer meanwhile. So the coordinator is first sent a request that has a time limit, and offsets are committed only
once it answers.

Invariant: the result of each sent commit is reported, unless its answer never arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import confluent_kafka as ck

from tidemill.sources.base import TopicPartition
from tidemill.sources.commit_positions import CommitPositions

#: Receives the result of a commit; None: it succeeded.
Ended = Callable[[dict[TopicPartition, int], ck.KafkaError | None], None]


class Committer:
    """The commits in flight.

    Args:
        ended: Called with the offsets and the result of a commit.
        positions: Turns offsets into positions.
    """

    def __init__(self, ended: Ended, positions: CommitPositions) -> None:
        self._ended = ended
        self._positions = positions
        self._in_flight: dict[TopicPartition, int] | None = None

    def forget(self, partition: TopicPartition) -> None:
        """Exclude a partition from repeated commits."""
        if self._in_flight is not None:
            self._in_flight.pop(partition, None)

    def send(self, consumer: ck.Consumer, waiting: dict[TopicPartition, int]) -> None:
        """Commit the waiting offsets, unless a commit is in flight; the answer arrives with a poll."""
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
        """Handle the answer to an asynchronous commit; the consumer's `on_commit`."""
        self._in_flight = None
        self._tell({(p.topic, p.partition): p.offset for p in partitions}, error, partitions)

    def send_now(self, consumer: ck.Consumer, waiting: dict[TopicPartition, int], seconds: float) -> None:
        """Commit the waiting offsets without a poll, if the coordinator answers within `seconds`.

        Offsets of an asynchronous commit in flight are committed again, because its answer would arrive only with a
        poll.
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
    """Remove and return all entries."""
    offsets = dict(waiting)
    waiting.clear()
    return offsets
