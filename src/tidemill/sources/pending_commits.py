"""What is to be committed, with or without records in a transaction; used on the consumer's thread only.

It never decides about offsets: it commits what it is given, drops what is not owned, and reports the results. Offsets
that wait are replaced by later ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import confluent_kafka as ck
import structlog

from tidemill.core.delivery.transaction import End
from tidemill.runtime.log import throttle
from tidemill.sources.base import CommitStatus, Fatal, Outgoing, Records, TopicPartition
from tidemill.sources.buffer import Buffer
from tidemill.sources.commit_positions import CommitPositions
from tidemill.sources.committer import Committer
from tidemill.sources.lag import LagWatch
from tidemill.sources.transactional_producer import TransactionalProducer

log = structlog.get_logger(__name__)

#: Within a rebalance callback, the coordinator has to answer this fast to be sent a commit.
ANSWER_SECONDS = 0.5
#: A commit of what partitions leave behind is retried after this long.
COMMIT_AGAIN_SECONDS = 0.2
#: At the end, a transaction that is open may take this long to be committed or aborted.
TRANSACTION_END_SECONDS = 5.0
#: An open transaction may take this long to end before its partitions are given up; after that it ends behind them.
GIVE_UP_SECONDS = 1.0

_AGAIN = frozenset(
    {
        ck.KafkaError.REBALANCE_IN_PROGRESS,
        ck.KafkaError.ILLEGAL_GENERATION,
        ck.KafkaError.UNKNOWN_MEMBER_ID,
    }
)
_NO_ANSWER = ck.KafkaError(ck.KafkaError._TIMED_OUT)
#: A commit within a rebalance callback with such an error would fail again.
_FINAL = _AGAIN | {ck.KafkaError.FENCED_INSTANCE_ID, ck.KafkaError._FATAL}


class PendingCommits:
    """The commits of one consumer.

    Args:
        buffers: Of the owned partitions.
        lag: Notified of what is committed.
        positions: Says what is committed for offsets.
        producer: Commits offsets together with records, if that is wanted.
        on_answer: Called when brokers have accepted a commit without a transaction.
        on_committed: Called when a commit has ended.
        on_fatal: Called once no commit can succeed.
    """

    def __init__(
        self,
        buffers: Mapping[TopicPartition, Buffer],
        lag: LagWatch,
        positions: CommitPositions,
        producer: TransactionalProducer | None,
        *,
        on_answer: Callable[[], None],
        on_committed: Callable[[dict[TopicPartition, int], CommitStatus], None],
        on_fatal: Callable[[Fatal, str], None],
    ) -> None:
        """Start with nothing to commit."""
        self._buffers = buffers
        self._lag = lag
        self._producer = producer
        self._on_answer = on_answer
        self._on_committed = on_committed
        self._on_fatal = on_fatal
        self._over = False
        self._to_commit: dict[TopicPartition, int] = {}
        self._to_send: dict[TopicPartition, Sequence[Outgoing]] = {}
        self._committer = Committer(self._on_commit_ended, positions)
        self._positions = positions
        self._commit_error: ck.KafkaError | None = None

    @property
    def trouble(self) -> str | None:
        """Why transactions make no progress, while they make none."""
        trouble = self._producer.trouble if self._producer is not None else None
        return f"transactions: {trouble}" if trouble else None

    def open(self, ended: Callable[[], bool]) -> bool:
        """Open the transactional producer, if there is one; return whether commits are possible.

        Args:
            ended: Tells that the result is no longer needed.
        """
        if self._producer is None:
            return True
        self._producer.open(ended)
        return not self._is_over()

    def on_commit(self, error: ck.KafkaError | None, partitions: Sequence[ck.TopicPartition]) -> None:
        """Take the answer to an asynchronous commit; the consumer's `on_commit`."""
        self._committer.on_commit(error, partitions)

    def finish(self, consumer: ck.Consumer, seconds: float) -> None:
        """End an open transaction, at the end of the consumer."""
        if self._producer is not None:
            self._producer.finish(consumer, min(TRANSACTION_END_SECONDS, seconds))

    def end_before(self, consumer: ck.Consumer, partitions: Collection[TopicPartition]) -> None:
        """End a transaction that was open when these partitions were given up, now that they are assigned again."""
        if self._producer is not None:
            for ended in self._producer.end_before(consumer, partitions, TRANSACTION_END_SECONDS):
                self._tell_transacted(*ended)

    def forget(self, partition: TopicPartition) -> None:
        """Commit nothing more for a partition that is no longer owned."""
        self._to_commit.pop(partition, None)
        self._to_send.pop(partition, None)
        self._committer.forget(partition)

    def forget_open(self, partitions: Collection[TopicPartition]) -> None:
        """Leave partitions out of the report of an open transaction's end."""
        if self._producer is not None:
            self._producer.forget(partitions)

    def add(self, offsets: Sequence[tuple[TopicPartition, Buffer | None, int]], records: Records) -> None:
        """Add what is to be committed; what belongs to an earlier ownership of a partition is dropped.

        Args:
            offsets: For each partition the buffer that stands for its ownership, and the offset.
            records: What goes out with them.
        """
        for tp, buffer, offset in offsets:
            if buffer is not None and self._buffers.get(tp) is buffer:
                self._to_commit[tp] = buffer.settled = offset
                self._to_send[tp] = records.get(tp, ())

    def send(self, consumer: ck.Consumer) -> None:
        """Send what waits, between two polls of the consumer."""
        if self._producer is not None:
            self._transact(self._producer, consumer)
            return
        self._committer.send(consumer, self._to_commit)

    def send_now(self, consumer: ck.Consumer) -> None:
        """Send what waits, within a rebalance callback, which does not poll."""
        if self._producer is not None:
            self._transact(self._producer, consumer)
        else:
            self._committer.send_now(consumer, self._to_commit, ANSWER_SECONDS)

    def _transact(self, producer: TransactionalProducer, consumer: ck.Consumer) -> None:
        """Continue the open transaction, or begin one with everything that waits."""
        if not producer.busy and self._to_commit:
            offsets, self._to_commit = self._to_commit, {}
            records, self._to_send = self._to_send, {}
            members = frozenset(self._buffers[tp].member for tp in offsets if tp in self._buffers)
            outgoing = [record for each in records.values() for record in each]
            producer.begin(offsets, outgoing, members, self._positions.make)
        ended = producer.step(consumer)
        if ended is not None:
            self._tell_transacted(*ended)
        self._is_over()

    def _tell_transacted(self, end: End, offsets: dict[TopicPartition, int]) -> None:
        if end is End.COMMITTED:
            self._lag.committed(offsets)
        status = CommitStatus.DONE if end is End.COMMITTED else CommitStatus.AGAIN
        self._on_committed(offsets, status)

    def _is_over(self) -> bool:
        """Tell the engine once if the transactional producer has failed for good."""
        fatal = self._producer.fatal if self._producer is not None else None
        if fatal is not None and not self._over:
            self._over = True
            self._on_fatal(*fatal)
        return fatal is not None

    def _on_commit_ended(self, offsets: dict[TopicPartition, int], error: ck.KafkaError | None) -> None:
        self._commit_error = error
        if error is None:
            self._on_answer()
            self._lag.committed(offsets)
            self._on_committed(offsets, CommitStatus.DONE)
            return
        code = error.code()
        if code in (ck.KafkaError.FENCED_INSTANCE_ID, ck.KafkaError._FATAL):
            self._on_committed(offsets, CommitStatus.FENCED)
            self._on_fatal(Fatal.FENCED, error.str())
            return
        if code not in _AGAIN:
            throttle(log, 10.0).warning("a commit failed and is tried again", error=error.str())
        self._on_committed(offsets, CommitStatus.AGAIN)

    def send_last(self, send: Callable[[], None], offsets: Mapping[TopicPartition, int], deadline: float) -> None:
        """Commit what revoked partitions leave behind, before another member begins there.

        Args:
            send: Carries out what else is to be done on this thread, and calls `send_now`.
            offsets: What is committed.
            deadline: The `time.monotonic()` until which a commit that fails is sent again.
        """
        while True:
            self._commit_error = _NO_ANSWER
            self._to_commit.update(offsets)
            send()
            error = self._commit_error
            if error is None or error.code() in _FINAL or time.monotonic() + COMMIT_AGAIN_SECONDS >= deadline:
                break
            time.sleep(COMMIT_AGAIN_SECONDS)
        if error is not None:
            text = "the last commit of revoked partitions failed; their messages are redelivered"
            log.warning(text, error=error.str())

    def give_up(self, consumer: ck.Consumer, partitions: Collection[TopicPartition]) -> None:
        """End an open transaction with offsets of partitions that belong, or soon will, to another member."""
        if self._producer is not None:
            for ended in self._producer.give_up(consumer, partitions, GIVE_UP_SECONDS):
                self._tell_transacted(*ended)
            self._is_over()
