"""The transactional producer of one engine: results, dead letters and offsets in one transaction.

Lives on the consumer's thread, the only one that may ask the consumer for its place in the group. One transaction at a
time; `core.delivery.transaction` says which call comes next. No call waits longer than `CALL_SECONDS`, so that the
thread keeps polling while the brokers are away; the same call is then repeated.

Handing the offsets over is the one call that may not return: librdkafka ignores its time limit, and waits forever
if the group's coordinator went away (its issues 5456 and 5511; 2.16). So it has a thread of its own, and if it
hangs the producer is replaced: nothing of its transaction was committed, and the new one's start aborts it.

A transaction keeps the place in the group (`sources.place`) that was current when it began: brokers reject its offsets
once partitions may belong to another member. It is then aborted, and what is still owned is committed again. Giving up
a partition aborts an open transaction with its offset, unless the brokers have accepted that already.

A request with offsets that got no answer may still arrive, and would count for the producer's next transaction: within
one generation it has the same place and the same producer epoch. So the producer is replaced after one; the start of
the new one aborts what is open and raises the epoch. The client also repeats requests about a transaction's offsets
and end by itself, without reporting it, and the first copy may still arrive. A repeated one takes at least the client's
pause (`RETRY_SECONDS`), so the producer is replaced after every such call that took nearly as long.

The transactional id is the engine's member id: a producer that starts under it fences the previous one, and the brokers
abort what that one left open before they tell the new one where its partitions begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import confluent_kafka as ck
import structlog

from tidemill.config.kafka_settings import KafkaSettings
from tidemill.core.delivery.transaction import Call, End, Fence, Transaction, TransactionAnswer, judge_fence
from tidemill.runtime.kafka_client import BackgroundCall, LibraryLog, describe_client_error, scrub
from tidemill.runtime.log import throttle
from tidemill.runtime.producer import make_producer_config
from tidemill.sources.base import Fatal, Outgoing, TopicPartition
from tidemill.sources.outgoing_records import OutgoingRecords, RecordRefusedError
from tidemill.sources.place import is_member, read_member_id
from tidemill.sources.transaction_errors import classify_error, is_fenced, is_rebalance, may_still_arrive

log = structlog.get_logger(__name__)

CALL_SECONDS = 1.0
#: A call waits at least this long, however little time is left.
_SHORTEST_SECONDS = 0.05
#: The call that hands offsets over has hung after this long.
HANG_SECONDS = 10.0
#: Brokers give up a transaction that is open for this long; records are given up after 30 s, so an outage ends in an
#: abort and not in this.
TRANSACTION_SECONDS = 60.0
#: A batch that fills within this time is sent whole; a commit does not wait for it.
_LINGER_MS = 5

_EXPELLED = (
    "the group expelled this engine while it was stopped, and admitted it again as a new member; what it has in flight "
    "is another member's"
)

#: The client's pause before it repeats a request, a fifth of it at random; and how long a call takes that did so.
RETRY_SECONDS = 0.5
REPEATED_SECONDS = 0.35
#: Requests of these count for the producer's next transaction if they arrive only then.
_REPEATABLE = frozenset({Call.OFFSETS, Call.COMMIT, Call.ABORT})


def _make_positions(offsets: Mapping[TopicPartition, int]) -> list[ck.TopicPartition]:
    return [ck.TopicPartition(*tp, offset) for tp, offset in offsets.items()]


class TransactionalProducer:
    """One producer and its open transaction.

    Args:
        kafka: The `kafka` section.
        transactional_id: Its id; earlier producers with it are fenced.
        overrides: The sinks' own client settings.
        limits: The largest batch that each topic takes, in bytes; read when it is opened.
    """

    def __init__(
        self, kafka: KafkaSettings, transactional_id: str, overrides: Mapping[str, Any], limits: Sequence[int]
    ) -> None:
        """Connect nothing; `open` does."""
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
        self._place: Any = None
        self._members: Collection[bytes | None] = ()
        self._began = 0.0
        self._deadline: float | None = None
        self._handing: BackgroundCall | None = None
        self._replaced = False
        self._call_began = 0.0
        self._may_be_repeated = False
        self._given_up = False
        self._rebalanced = False
        #: Why it makes no progress, while it makes none.
        self.trouble: str | None = None
        #: How it ended for good: fenced or failed, and why.
        self.fatal: tuple[Fatal, str] | None = None

    @property
    def busy(self) -> bool:
        """Whether a transaction is open."""
        return self._transaction is not None

    def open(self, ended: Callable[[], bool]) -> None:
        """Connect, fence the previous owner of the id, and end what it left open; waits for the brokers.

        Args:
            ended: Tells that the result is no longer needed.
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
            offsets: What is committed.
            records: What goes out with it.
            members: The member ids that its partitions were assigned to; None: not known.
            make_positions: Returns what is committed for offsets, when they are handed over.
        """
        self._make_positions = make_positions
        self._members = members
        self._transaction = Transaction(offsets)
        self._records.begin(records)
        self._began = self._call_began = time.monotonic()
        self._given_up = self._rebalanced = False

    def step(self, consumer: ck.Consumer) -> tuple[End, dict[TopicPartition, int]] | None:
        """Continue until the transaction ends or a call has to be repeated; return how it ended, and its offsets."""
        while (transaction := self._transaction) is not None and self.fatal is None:
            call = transaction.call
            answer = self._ask(partial(self._carry_out, call, consumer), consumer)
            end = transaction.note_answer(answer)
            if transaction.call is not call or end is not None:
                self._call_ended(call)
            if end is not None:
                return self._end(end)
            if transaction.call is Call.ABORT is not call:
                self._say_aborted()
            if answer is TransactionAnswer.AGAIN:
                return None
        return None

    def give_up(
        self, consumer: ck.Consumer, partitions: Collection[TopicPartition], seconds: float
    ) -> list[tuple[End, dict[TopicPartition, int]]]:
        """End an open transaction with offsets of partitions that belong, or soon will, to another member.

        It is committed if the brokers have accepted its offsets, else aborted. If that takes longer than `seconds`,
        `step` continues it. Does not poll the consumer.

        Returns:
            How it ended, and its offsets; empty if none was open with these partitions, or it did not end in time.
        """
        transaction = self._transaction
        if transaction is None or not transaction.holds(partitions):
            return []
        end = transaction.give_up(partitions)
        self._given_up = True
        if transaction.call is Call.ABORT:
            throttle(log, 10.0).info("a transaction is aborted, since partitions of it were given up")
        return [self._end(end)] if end is not None else self.finish(consumer, seconds)

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """Leave partitions that are no longer owned out of the report of an open transaction's end.

        They may be owned again by then, with other work.
        """
        if self._transaction is not None:
            self._transaction.forget(partitions)

    def end_before(
        self, consumer: ck.Consumer, partitions: Collection[TopicPartition], seconds: float
    ) -> list[tuple[End, dict[TopicPartition, int]]]:
        """End a transaction that was open when these partitions were given up, now that they are assigned again.

        Until it ends, brokers do not say where they begin.
        """
        transaction = self._transaction
        if transaction is None or transaction.lanes.isdisjoint(partitions):
            return []
        return self.finish(consumer, seconds)

    def _call_ended(self, call: Call) -> None:
        now = time.monotonic()
        if call in _REPEATABLE and now - self._call_began >= REPEATED_SECONDS:
            self._may_be_repeated = True
        self._call_began = now

    def _say_aborted(self) -> None:
        if self._rebalanced:
            throttle(log, 10.0).info("a transaction is aborted and will be repeated, since the group rebalanced")
        else:
            throttle(log, 10.0).warning("a transaction is aborted and will be repeated", error=self.trouble)

    def _end(self, end: End) -> tuple[End, dict[TopicPartition, int]]:
        assert self._transaction is not None
        offsets = self._transaction.offsets
        self._records.judge()
        self._transaction = None
        if end is End.FATAL:
            self._end_for_good(f"the transactional producer failed: {self.trouble}")
        elif end is End.COMMITTED or self._given_up:
            self.trouble = None
        return end, offsets

    def _find_seconds_left(self) -> float:
        """Return how long a call may wait."""
        if self._deadline is None:
            return CALL_SECONDS
        return min(CALL_SECONDS, max(_SHORTEST_SECONDS, self._deadline - time.monotonic()))

    def _carry_out(self, call: Call, consumer: ck.Consumer) -> TransactionAnswer:
        if call is Call.BEGIN:
            return self._begin(consumer)
        if call is Call.SEND:
            return self._records.send(self._producer, self._find_seconds_left)
        if call is Call.OFFSETS:
            return self._hand_over()
        if call is Call.ABORT:
            return self._abort()
        self._producer.commit_transaction(self._find_seconds_left())
        return TransactionAnswer.DONE

    def _begin(self, consumer: ck.Consumer) -> TransactionAnswer:
        place: Any = consumer.consumer_group_metadata()
        if not is_member(place):
            return TransactionAnswer.AGAIN  # its partitions are lost; the consumer's callback says so in a moment
        if any(member not in (None, read_member_id(place)) for member in self._members):
            # Another member may have them by now, and nothing says since when: only a new start gets partitions again.
            self._end_for_good(_EXPELLED)
            return TransactionAnswer.FATAL
        self._place = place
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
            # A longer limit than ours: the client's own would end in an abort that leaves the epoch as it is.
            call = partial(self._producer.send_offsets_to_transaction, positions, self._place, TRANSACTION_SECONDS)
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
        log.warning("the call that hands offsets over hangs; its producer is replaced")
        self._handing = None
        self._replace()
        return TransactionAnswer.ABORT

    def _replace(self) -> None:
        # The last reference to the old one goes on another thread: it waits there for the client's own threads.
        old = [self._producer]
        self._producer = self._make_producer()
        BackgroundCall("tidemill-old-producer", old.clear)
        self._replaced = True

    def _abort(self) -> TransactionAnswer:
        """Abort, after the answer to offsets that are being handed over: a producer makes one call at a time.

        The answer itself does not matter: what was accepted is aborted, too.
        """
        if self._handing is not None:
            try:
                if self._wait_for_hand_over(self._handing) is TransactionAnswer.AGAIN:
                    return TransactionAnswer.AGAIN
            except ck.KafkaException as error:
                log.debug("offsets of a transaction that is aborted were rejected", error=describe_client_error(error))
        if self._start_replacement():
            self._call_began = time.monotonic()  # what came before is of an earlier epoch
            self._may_be_repeated = False
        else:
            self._producer.abort_transaction(self._find_seconds_left())
        return TransactionAnswer.DONE

    def _start_replacement(self) -> bool:
        """Let a new producer raise the epoch and abort what the old one left open; return whether there is one."""
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
        except BaseException as raised:  # of any type: what the call did is unknown, so nothing may follow it
            log.exception("an unexpected error in a transaction")
            self.trouble = scrub(f"{type(raised).__name__}: {raised}", self._config)
            return TransactionAnswer.FATAL

    def _fence(self, error: ck.KafkaError, consumer: ck.Consumer | None) -> None:
        fenced_member = error.code() == ck.KafkaError.FENCED_INSTANCE_ID
        if fenced_member and consumer is not None and self._has_left(consumer):
            # Its instance id is another member's now, which is itself: who took its place would end the consumer, too.
            self._end_for_good(_EXPELLED)
            return
        replaced = fenced_member or judge_fence(time.monotonic() - self._began, TRANSACTION_SECONDS) is Fence.REPLACED
        if replaced and self.fatal is None:
            self.fatal = Fatal.FENCED, f"its transactions were taken over: {self.trouble}"

    def _has_left(self, consumer: ck.Consumer) -> bool:
        """Tell whether the client has become another member since the transaction began, or is about to."""
        place: Any = consumer.consumer_group_metadata()
        return not is_member(place) or read_member_id(place) != read_member_id(self._place)

    def _end_for_good(self, text: str) -> None:
        if self.fatal is None:
            self.fatal = Fatal.FAILED, text

    def _on_error(self, error: ck.KafkaError) -> None:
        text = scrub(error.str(), self._config)
        throttle(log, 10.0).warning("Kafka producer", client="transactions", error=text)

    def finish(self, consumer: ck.Consumer, seconds: float) -> list[tuple[End, dict[TopicPartition, int]]]:
        """End an open transaction, committed or not, within `seconds`; return how, if it ended."""
        self._deadline = time.monotonic() + seconds
        try:
            while self.busy and self.fatal is None and time.monotonic() < self._deadline:
                ended = self.step(consumer)
                if ended is not None:
                    return [ended]
            return []
        finally:
            self._deadline = None
