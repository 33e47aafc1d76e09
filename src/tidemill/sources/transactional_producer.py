"""The transactional producer of one engine: results, dead letters and offsets in one transaction.

It lives on the consumer's thread, the only thread that may ask the consumer for its group metadata. One transaction is
open; `core.delivery.transaction` decides which call comes next. No call waits longer than `CALL_SECONDS`, so that the
thread keeps polling while the brokers are unreachable; the same call is then repeated.

The call that sends the offsets is the only one that may never return: librdkafka ignores its time limit, and waits
forever if the group's coordinator disappeared (its issues 5456 and 5511; version 2.16). So this call has a thread of
its own. If it hangs, the producer is replaced: nothing of its transaction was committed, and the start of the new
producer aborts it.

A transaction keeps the group metadata (`sources.group_metadata`) that was current when it began: brokers reject its
offsets once partitions may belong to another member. It is then aborted, and the offsets that are still owned are
committed again. Giving up a partition aborts an open transaction with its offset, unless the brokers have already
accepted the offset.

An unanswered request with offsets may still arrive, and would count for the producer's next transaction, because within
one generation both have the same group metadata and the same producer epoch. So the producer is replaced after such a
request; the start of the new one aborts the open transaction and raises the epoch. The client also repeats requests
with a transaction's offsets or end by itself, without reporting it, and the first copy may still arrive. A repetition
takes at least the client's backoff (`RETRY_SECONDS`), so the producer is replaced after every such call that took
nearly as long.

The transactional id is the engine's member id. A producer that starts with it fences the previous one, and the brokers
abort the previous one's open transaction before they reveal where the partitions begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import confluent_kafka as ck
import structlog

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.delivery.transaction import (
    Fence,
    ProducerCall,
    Transaction,
    TransactionAnswer,
    TransactionEnd,
    judge_fence,
)
from tidemill.runtime.kafka.client import BackgroundCall, LibraryLog, describe_client_error, scrub
from tidemill.runtime.kafka.producer import make_producer_config
from tidemill.runtime.log.setup import throttle
from tidemill.sources.base import Fatal, Outgoing, TopicPartition
from tidemill.sources.group_metadata import is_member, read_member_id
from tidemill.sources.outgoing_records import OutgoingRecords, RecordRefusedError
from tidemill.sources.transaction_errors import classify_error, is_fenced, is_rebalance, may_still_arrive

log = structlog.get_logger(__name__)

CALL_SECONDS = 1.0
#: The minimum time that a call waits, however little time is left.
_SHORTEST_SECONDS = 0.05
#: The call that sends the offsets counts as hung after this time.
HANG_SECONDS = 10.0
#: The time after which brokers abort an open transaction. Records expire after 30 s, so an outage ends in an abort by
#: the producer first.
TRANSACTION_SECONDS = 60.0
#: Batches are sent after this time, or when they are full; a commit does not wait for it.
_LINGER_MS = 5

_EXPELLED = (
    "the group expelled this engine while it was stopped, and admitted it as a new member; its work in flight belongs "
    "to another member"
)

#: The client's backoff before it repeats a request, with a jitter of a fifth, and the minimum time of a repeated call.
RETRY_SECONDS = 0.5
REPEATED_SECONDS = 0.35
#: Calls whose requests count for the producer's next transaction if they arrive late.
_REPEATABLE = frozenset({ProducerCall.OFFSETS, ProducerCall.COMMIT, ProducerCall.ABORT})


def _make_positions(offsets: Mapping[TopicPartition, int]) -> list[ck.TopicPartition]:
    return [ck.TopicPartition(*tp, offset) for tp, offset in offsets.items()]


class TransactionalProducer:
    """One producer and its open transaction.

    Args:
        kafka: The `kafka` section.
        transactional_id: Its id; earlier producers with it are fenced.
        overrides: The sinks' own client settings.
        limits: The largest batch that each topic accepts, in bytes; read by `open`.
    """

    def __init__(
        self, kafka: KafkaSettings, transactional_id: str, overrides: Mapping[str, Any], limits: Sequence[int]
    ) -> None:
        self._config = make_producer_config(
            kafka,
            "",
            {
                "linger.ms": _LINGER_MS,
                **overrides,
                "transactional.id": transactional_id,
                "transaction.timeout.ms": int(TRANSACTION_SECONDS * 1000),
                "delivery.report.only.error": True,
                "retry.backoff.ms": int(RETRY_SECONDS * 1000),
            },
        )
        self._limits = limits
        self._transaction: Transaction[TopicPartition] | None = None
        self._records = OutgoingRecords(self._config)
        self._group_metadata: Any = None
        self._members: Collection[bytes | None] = ()
        self._began = 0.0
        self._deadline: float | None = None
        self._handing: BackgroundCall | None = None
        self._replaced = False
        self._call_began = 0.0
        self._may_be_repeated = False
        self._given_up = False
        self._rebalanced = False
        #: Why it makes no progress; None: it does.
        self.trouble: str | None = None
        #: How it failed for good (fenced or failed), and why.
        self.fatal: tuple[Fatal, str] | None = None

    @property
    def busy(self) -> bool:
        """Whether a transaction is open."""
        return self._transaction is not None

    def open(self, ended: Callable[[], bool]) -> None:
        """Connect, fence the previous owner of the id, and end its open transaction; waits for the brokers.

        Args:
            ended: Returns whether the result is no longer needed.
        """
        if self._limits:
            self._config["message.max.bytes"] = max(1_000, min(max(self._limits), 1_000_000_000))
            self._config.setdefault("batch.size", max(1, min(*self._limits, 1_000_000)))
        self._producer = self._make_producer()
        while not ended() and self.fatal is None:
            answer = self._ask(lambda: self._producer.init_transactions(CALL_SECONDS))
            if answer is TransactionAnswer.DONE:
                return
            if answer is not TransactionAnswer.AGAIN:
                self._end_for_good(f"no transactions: {self.trouble}")

    def _make_producer(self) -> ck.Producer:
        return ck.Producer({**self._config, "error_cb": self._on_error}, logger=LibraryLog())

    def begin(
        self,
        offsets: dict[TopicPartition, int],
        records: list[Outgoing],
        members: Collection[bytes | None] = (),
        make_positions: Callable[[Mapping[TopicPartition, int]], list[ck.TopicPartition]] = _make_positions,
    ) -> None:
        """Begin a transaction; `step` carries it out.

        Args:
            offsets: The offsets to commit.
            records: The records to send with them.
            members: The member ids that its partitions were assigned to; None: unknown.
            make_positions: Turns offsets into positions, when they are sent.
        """
        self._make_positions = make_positions
        self._members = members
        self._transaction = Transaction(offsets)
        self._records.begin(records)
        self._began = self._call_began = time.monotonic()
        self._given_up = self._rebalanced = False

    def step(self, consumer: ck.Consumer) -> tuple[TransactionEnd, dict[TopicPartition, int]] | None:
        """Continue until the transaction ends or a call must be repeated; return how it ended, and its offsets."""
        while (transaction := self._transaction) is not None and self.fatal is None:
            call = transaction.call
            answer = self._ask(partial(self._carry_out, call, consumer), consumer)
            end = transaction.note_answer(answer)
            if transaction.call is not call or end is not None:
                self._call_ended(call)
            if end is not None:
                return self._end(end)
            if transaction.call is ProducerCall.ABORT is not call:
                self._say_aborted()
            if answer is TransactionAnswer.AGAIN:
                return None
        return None

    def give_up(
        self, consumer: ck.Consumer, partitions: Collection[TopicPartition], seconds: float
    ) -> list[tuple[TransactionEnd, dict[TopicPartition, int]]]:
        """End an open transaction with offsets of partitions that belong, or soon will, to another member.

        It is committed if the brokers have accepted its offsets, otherwise aborted. If that takes longer than
        `seconds`, `step` continues it. Does not poll the consumer.

        Returns:
            How it ended, and its offsets; empty if none was open with these partitions, or it did not end in time.
        """
        transaction = self._transaction
        if transaction is None or not transaction.holds(partitions):
            return []
        end = transaction.give_up(partitions)
        self._given_up = True
        if transaction.call is ProducerCall.ABORT:
            throttle(log, 10.0).info("a transaction is aborted because some of its partitions were given up")
        return [self._end(end)] if end is not None else self.finish(consumer, seconds)

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """Exclude partitions that are no longer owned from the report of an open transaction's end.

        They may be owned again by then, with other work.
        """
        if self._transaction is not None:
            self._transaction.forget(partitions)

    def end_before(
        self, consumer: ck.Consumer, partitions: Collection[TopicPartition], seconds: float
    ) -> list[tuple[TransactionEnd, dict[TopicPartition, int]]]:
        """End a transaction that was open when these partitions were given up, because they are assigned again.

        Until it ends, brokers do not reveal where the partitions begin.
        """
        transaction = self._transaction
        if transaction is None or transaction.lanes.isdisjoint(partitions):
            return []
        return self.finish(consumer, seconds)

    def _call_ended(self, call: ProducerCall) -> None:
        now = time.monotonic()
        if call in _REPEATABLE and now - self._call_began >= REPEATED_SECONDS:
            self._may_be_repeated = True
        self._call_began = now

    def _say_aborted(self) -> None:
        if self._rebalanced:
            throttle(log, 10.0).info("a transaction is aborted and will be retried because the group rebalanced")
        else:
            throttle(log, 10.0).warning("a transaction is aborted and will be retried", error=self.trouble)

    def _end(self, end: TransactionEnd) -> tuple[TransactionEnd, dict[TopicPartition, int]]:
        assert self._transaction is not None
        offsets = self._transaction.offsets
        self._records.judge()
        self._transaction = None
        if end is TransactionEnd.FATAL:
            self._end_for_good(f"the transactional producer failed: {self.trouble}")
        elif end is TransactionEnd.COMMITTED or self._given_up:
            self.trouble = None
        return end, offsets

    def _find_seconds_left(self) -> float:
        """Return how long a call may wait."""
        if self._deadline is None:
            return CALL_SECONDS
        return min(CALL_SECONDS, max(_SHORTEST_SECONDS, self._deadline - time.monotonic()))

    def _carry_out(self, call: ProducerCall, consumer: ck.Consumer) -> TransactionAnswer:
        if call is ProducerCall.BEGIN:
            return self._begin(consumer)
        if call is ProducerCall.SEND:
            return self._records.send(self._producer, self._find_seconds_left)
        if call is ProducerCall.OFFSETS:
            return self._hand_over()
        if call is ProducerCall.ABORT:
            return self._abort()
        self._producer.commit_transaction(self._find_seconds_left())
        return TransactionAnswer.DONE

    def _begin(self, consumer: ck.Consumer) -> TransactionAnswer:
        metadata: Any = consumer.consumer_group_metadata()
        if not is_member(metadata):
            return TransactionAnswer.AGAIN  # its partitions are lost; the consumer's callback follows in a moment
        if any(member not in (None, read_member_id(metadata)) for member in self._members):
            # Another member may own them, and it is unknown since when; only a restart gets partitions again.
            self._end_for_good(_EXPELLED)
            return TransactionAnswer.FATAL
        self._group_metadata = metadata
        if self._may_be_repeated:
            log.debug("a call took long enough to have been repeated; the producer is replaced")
            self._replace()
            self._may_be_repeated = False
        self._start_replacement()
        self._producer.begin_transaction()
        return TransactionAnswer.DONE

    def _hand_over(self) -> TransactionAnswer:
        if self._handing is None:
            assert self._transaction is not None
            offsets = self._transaction.offsets
            positions = self._make_positions(offsets)
            if not positions:
                return TransactionAnswer.DONE
            # A longer limit than ours: the client's own timeout would end in an abort that does not raise the epoch.
            call = partial(
                self._producer.send_offsets_to_transaction, positions, self._group_metadata, TRANSACTION_SECONDS
            )
            self._handing = BackgroundCall("tidemill-offsets", call)
        return self._wait_for_hand_over(self._handing)

    def _wait_for_hand_over(self, handing: BackgroundCall) -> TransactionAnswer:
        if handing.ended.wait(self._find_seconds_left()):
            self._handing = None
            if handing.error is None:
                return TransactionAnswer.DONE
            if may_still_arrive(handing.error):
                self._replace()
            raise handing.error
        self.trouble = "no answer about the offsets"
        if time.monotonic() - handing.began < HANG_SECONDS:
            return TransactionAnswer.AGAIN
        log.warning("the call that sends offsets hangs; its producer is replaced")
        self._handing = None
        self._replace()
        return TransactionAnswer.ABORT

    def _replace(self) -> None:
        # Release the last reference to the old producer on another thread, because that waits for the client's threads.
        old = [self._producer]
        self._producer = self._make_producer()
        BackgroundCall("tidemill-old-producer", old.clear)
        self._replaced = True

    def _abort(self) -> TransactionAnswer:
        """Abort, after the answer to offsets in flight: a producer makes one call at a time.

        The answer itself is irrelevant, because accepted offsets are aborted, too.
        """
        if self._handing is not None:
            try:
                if self._wait_for_hand_over(self._handing) is TransactionAnswer.AGAIN:
                    return TransactionAnswer.AGAIN
            except ck.KafkaException as error:
                log.debug(
                    "the brokers rejected offsets of a transaction that is being aborted",
                    error=describe_client_error(error),
                )
        if self._start_replacement():
            self._call_began = time.monotonic()  # earlier calls belong to an earlier epoch
            self._may_be_repeated = False
        else:
            self._producer.abort_transaction(self._find_seconds_left())
        return TransactionAnswer.DONE

    def _start_replacement(self) -> bool:
        """Let a new producer, if there is one, raise the epoch and abort the old transaction; return whether it did."""
        if not self._replaced:
            return False
        self._producer.init_transactions(self._find_seconds_left())
        self._replaced = False
        return True

    def _ask(
        self, call: Callable[[], TransactionAnswer | None], consumer: ck.Consumer | None = None
    ) -> TransactionAnswer:
        try:
            return call() or TransactionAnswer.DONE
        except RecordRefusedError as refused:
            self.trouble = refused.record_error or self.trouble or refused.text
            return TransactionAnswer.ABORT
        except ck.KafkaException as raised:
            error = raised.args[0]
            self.trouble = scrub(describe_client_error(raised), self._config)
            if is_fenced(error):
                self._fence(error, consumer)
            answer = classify_error(error)
            if answer is TransactionAnswer.ABORT:
                self._rebalanced = is_rebalance(error)
            return answer
        except BaseException as raised:  # of any type: the effect of the call is unknown, so no call may follow
            log.exception("an unexpected error in a transaction")
            self.trouble = scrub(f"{type(raised).__name__}: {raised}", self._config)
            return TransactionAnswer.FATAL

    def _fence(self, error: ck.KafkaError, consumer: ck.Consumer | None) -> None:
        fenced_member = error.code() == ck.KafkaError.FENCED_INSTANCE_ID
        if fenced_member and consumer is not None and self._has_left(consumer):
            # The instance id now belongs to the client itself as a new member; a successor would have ended the
            # consumer, too.
            self._end_for_good(_EXPELLED)
            return
        replaced = fenced_member or judge_fence(time.monotonic() - self._began, TRANSACTION_SECONDS) is Fence.REPLACED
        if replaced and self.fatal is None:
            self.fatal = Fatal.FENCED, f"another producer has taken over its transactional id: {self.trouble}"

    def _has_left(self, consumer: ck.Consumer) -> bool:
        """Return whether the client has become another member since the transaction began, or is about to."""
        metadata: Any = consumer.consumer_group_metadata()
        return not is_member(metadata) or read_member_id(metadata) != read_member_id(self._group_metadata)

    def _end_for_good(self, text: str) -> None:
        if self.fatal is None:
            self.fatal = Fatal.FAILED, text

    def _on_error(self, error: ck.KafkaError) -> None:
        text = scrub(error.str(), self._config)
        throttle(log, 10.0).warning("Kafka producer", client="transactions", error=text)

    def finish(self, consumer: ck.Consumer, seconds: float) -> list[tuple[TransactionEnd, dict[TopicPartition, int]]]:
        """End an open transaction, committed or not, within `seconds`; return its end if it ended."""
        self._deadline = time.monotonic() + seconds
        try:
            while self.busy and self.fatal is None and time.monotonic() < self._deadline:
                ended = self.step(consumer)
                if ended is not None:
                    return [ended]
            return []
        finally:
            self._deadline = None
