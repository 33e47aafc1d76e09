"""The waiting commits, with or without records in a transaction; used on the consumer's thread only.

It makes no decisions about offsets: it commits what it is given, except for partitions that are not owned, and reports
the results. Later offsets replace waiting ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import confluent_kafka as ck
import structlog

from tidemill.core.delivery.transaction import TransactionEnd
from tidemill.runtime.log.setup import throttle
from tidemill.sources.base import CommitStatus, Fatal, Outgoing, Records, TopicPartition
from tidemill.sources.buffer import Buffer
from tidemill.sources.commit_positions import CommitPositions
from tidemill.sources.committer import Committer
from tidemill.sources.lag import LagWatch
from tidemill.sources.transactional_producer import TransactionalProducer

log = structlog.get_logger(__name__)

#: Within a rebalance callback, offsets are sent only if the coordinator answers this fast.
ANSWER_SECONDS = 0.5
#: The delay before a failed last commit of revoked partitions is retried.
COMMIT_AGAIN_SECONDS = 0.2
#: At the end, how long an open transaction may take to be committed or aborted.
TRANSACTION_END_SECONDS = 5.0
#: How long an open transaction may take to end before its partitions are given up; after that it ends in the
#: background.
GIVE_UP_SECONDS = 1.0

_AGAIN = frozenset(
    {
        ck.KafkaError.REBALANCE_IN_PROGRESS,
        ck.KafkaError.ILLEGAL_GENERATION,
        ck.KafkaError.UNKNOWN_MEMBER_ID,
    }
)
_NO_ANSWER = ck.KafkaError(ck.KafkaError._TIMED_OUT)
#: Errors after which a retry within a rebalance callback would fail again.
_FINAL = _AGAIN | {ck.KafkaError.FENCED_INSTANCE_ID, ck.KafkaError._FATAL}


class PendingCommits:
    """The commits of one consumer.

    Args:
        buffers: The buffers of the owned partitions.
        lag: Receives the committed offsets.
        positions: Turns offsets into positions.
        producer: Commits offsets together with records; None: plain commits.
        on_answer: Called when the brokers have accepted a plain commit.
        on_committed: Called with the result of a commit.
        on_fatal: Called once no commit can succeed any more.
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
        """Why transactions make no progress; None: they do."""
        trouble = self._producer.trouble if self._producer is not None else None
        return f"transactions: {trouble}" if trouble else None

    def open(self, ended: Callable[[], bool]) -> bool:
        """Open the transactional producer, if there is one; return whether commits are possible.

        Args:
            ended: Returns whether the result is no longer needed.
        """
        if self._producer is None:
            return True
        self._producer.open(ended)
        return not self._is_over()

    def on_commit(self, error: ck.KafkaError | None, partitions: Sequence[ck.TopicPartition]) -> None:
        """Handle the answer to an asynchronous commit; the consumer's `on_commit`."""
        self._committer.on_commit(error, partitions)

    def finish(self, consumer: ck.Consumer, seconds: float) -> None:
        """End an open transaction, before the consumer closes."""
        if self._producer is not None:
            self._producer.finish(consumer, min(TRANSACTION_END_SECONDS, seconds))

    def end_before(self, consumer: ck.Consumer, partitions: Collection[TopicPartition]) -> None:
        """End a transaction that was open when these partitions were given up, because they are assigned again."""
        if self._producer is not None:
            for ended in self._producer.end_before(consumer, partitions, TRANSACTION_END_SECONDS):
                self._tell_transacted(*ended)

    def forget(self, partition: TopicPartition) -> None:
        """Drop the waiting commits of a partition that is no longer owned."""
        self._to_commit.pop(partition, None)
        self._to_send.pop(partition, None)
        self._committer.forget(partition)

    def forget_open(self, partitions: Collection[TopicPartition]) -> None:
        """Exclude partitions from the report of an open transaction's end."""
        if self._producer is not None:
            self._producer.forget(partitions)

    def add(self, offsets: Sequence[tuple[TopicPartition, Buffer | None, int]], records: Records) -> None:
        """Add offsets to commit; offsets of an earlier ownership of a partition are dropped.

        Args:
            offsets: For each partition the buffer that represents its ownership, and the offset.
            records: The records to send with them.
        """
        for tp, buffer, offset in offsets:
            if buffer is not None and self._buffers.get(tp) is buffer:
                self._to_commit[tp] = buffer.settled = offset
                self._to_send[tp] = records.get(tp, ())

    def send(self, consumer: ck.Consumer) -> None:
        """Commit the waiting offsets, between two polls of the consumer."""
        if self._producer is not None:
            self._transact(self._producer, consumer)
            return
        self._committer.send(consumer, self._to_commit)

    def send_now(self, consumer: ck.Consumer) -> None:
        """Commit the waiting offsets within a rebalance callback, which does not poll."""
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

    def _tell_transacted(self, end: TransactionEnd, offsets: dict[TopicPartition, int]) -> None:
        if end is TransactionEnd.COMMITTED:
            self._lag.committed(offsets)
        status = CommitStatus.DONE if end is TransactionEnd.COMMITTED else CommitStatus.AGAIN
        self._on_committed(offsets, status)

    def _is_over(self) -> bool:
        """Return whether the transactional producer has failed for good; inform the engine once."""
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
            throttle(log, 10.0).warning("a commit failed; retrying", error=error.str())
        self._on_committed(offsets, CommitStatus.AGAIN)

    def send_last(self, send: Callable[[], None], offsets: Mapping[TopicPartition, int], deadline: float) -> None:
        """Commit the last offsets of revoked partitions, before another member starts there.

        Args:
            send: Runs the thread's other commands, and calls `send_now`.
            offsets: The offsets to commit.
            deadline: The `time.monotonic()` until which a failed commit is retried.
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
            text = "the last commit of revoked partitions failed; their messages will be redelivered"
            log.warning(text, error=error.str())

    def give_up(self, consumer: ck.Consumer, partitions: Collection[TopicPartition]) -> None:
        """End an open transaction with offsets of partitions that belong, or soon will, to another member."""
        if self._producer is not None:
            for ended in self._producer.give_up(consumer, partitions, GIVE_UP_SECONDS):
                self._tell_transacted(*ended)
            self._is_over()
