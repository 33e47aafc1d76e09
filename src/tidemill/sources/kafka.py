"""The Kafka consumer of one engine: a thread that fetches, commits and takes part in the group.

Invariants: only the thread touches the consumer. It never decides about offsets: it commits what it is told, after
dropping what it does not own. What it fetched waits in a bounded buffer per partition; only when that is full is the
partition paused at the broker's side, because a pause throws away everything that librdkafka had prefetched.

A partition can go and come back while the loop is busy, so a buffer stands for one ownership: the engine pulls from,
and commits for, only the ownership that it was told of; what it still says about an earlier one changes nothing.

Membership is static (`group.instance.id`), cooperative-sticky, in the classic protocol. A member fenced by another
goes on fetching until it is told, so `_FATAL` and FENCED_INSTANCE_ID end the engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import confluent_kafka as ck
import structlog

from tidemill.config.settings import REVOKE_MARGIN_SECONDS, Settings
from tidemill.core.delivery.transaction import End
from tidemill.runtime.kafka_client import LibraryLog
from tidemill.runtime.log import limited
from tidemill.runtime.messages import Header, SourceMessage
from tidemill.sources.base import CommitStatus, Fatal, Outgoing, Records, SourceEvents, TopicPartition
from tidemill.sources.buffer import Buffer
from tidemill.sources.committer import Committer
from tidemill.sources.gaps import count_deleted
from tidemill.sources.lag import LagWatch
from tidemill.sources.membership import consumer_config, leave_group
from tidemill.sources.place import member_of
from tidemill.sources.transactional_producer import TransactionalProducer

log = structlog.get_logger(__name__)

#: A partition's buffer is full at this many messages, and wants more below a quarter of it.
BUFFER_MESSAGES = 4_000
#: One poll waits this long for a first message, and so a command waits at most this long for the thread.
POLL_SECONDS = 0.02
#: How often watermarks and an unreachable broker are looked at.
CHECK_SECONDS = 1.0
#: A request that only wakes the client is waited for no longer than this.
WAKE_SECONDS = 0.001
#: Beyond the revoke timeout, a rebalance callback may take this long; half a second less than what the settings count
#: on (`REVOKE_MARGIN_SECONDS`), so that the next poll comes in time.
REVOKE_SECONDS = REVOKE_MARGIN_SECONDS - 0.5
#: Within a rebalance callback, the coordinator has to answer this fast to be sent a commit.
ANSWER_SECONDS = 0.5
#: A commit of what partitions leave behind is tried again after this long.
COMMIT_AGAIN_SECONDS = 0.2
#: At the end, a transaction that is open may take this long to be committed or aborted.
TRANSACTION_END_SECONDS = 5.0
#: An open transaction may take this long to end before its partitions are given up; after that it ends behind them.
GIVE_UP_SECONDS = 1.0
#: The thread may take this long to end, if nobody says how long.
CLOSE_SECONDS = 30.0

_AGAIN = frozenset(
    {
        ck.KafkaError.REBALANCE_IN_PROGRESS,
        ck.KafkaError.ILLEGAL_GENERATION,
        ck.KafkaError.UNKNOWN_MEMBER_ID,
    }
)
_NO_ANSWER = ck.KafkaError(ck.KafkaError._TIMED_OUT)
#: A commit within a rebalance callback that failed so fails again.
_FINAL = _AGAIN | {ck.KafkaError.FENCED_INSTANCE_ID, ck.KafkaError._FATAL}


class KafkaSource:
    """A `Source` over one consumer.

    Args:
        settings: The pipeline's settings.
        instance_id: The member's static id, `<group>.<worker>.<slot>`.
        transactor: Commits offsets together with records, if that is wanted.
    """

    def __init__(self, settings: Settings, instance_id: str, transactor: TransactionalProducer | None = None) -> None:
        """Prepare; nothing is connected before `start`."""
        self._transactor = transactor
        self._over = False
        self._topic = settings.kafka.source_topic
        self._max_poll = settings.kafka.max_poll_records
        self._max_bytes = settings.executor.max_queued_bytes
        self._revoke_seconds = settings.revoke_timeout_seconds
        self._config = consumer_config(settings, instance_id)
        # Of the partitions that are ours; only the thread touches it.
        self._buffers: dict[TopicPartition, Buffer] = {}
        # Of those that the engine was told of; only the loop touches it.
        self._told: dict[TopicPartition, Buffer] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._to_commit: dict[TopicPartition, int] = {}
        self._to_send: dict[TopicPartition, Sequence[Outgoing]] = {}
        self._notes: dict[TopicPartition, str] = {}
        self._noted: dict[TopicPartition, str] = {}
        self._committer = Committer(self._commit_ended, self._notes)
        self._commit_error: ck.KafkaError | None = None
        self._fetching = True
        self._leave: bool | None = None
        self._close_by = 0.0
        self._lag = LagWatch()
        # Whose buffers grew since they were looked at, and which are paused because they are full.
        self._grown: set[TopicPartition] = set()
        self._full: set[TopicPartition] = set()
        self._next_check = 0.0
        self._stalled: str | None = None
        self._gap = 0
        self._dead = False
        self._joined = False
        self._thread = threading.Thread(target=self._run, name="tidemill-consumer", daemon=True)
        self._ended = threading.Event()

    # -- the engine's side, on the loop -----------------------------------------------------------------------

    def start(self, events: SourceEvents) -> None:
        """Start the thread, which connects and subscribes."""
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def pull(self, partition: TopicPartition, limit: int) -> list[SourceMessage]:
        """Take messages out of the partition's buffer."""
        buffer = self._told.get(partition)
        if buffer is None:
            return []
        messages = buffer.messages
        taken = [messages.popleft() for _ in range(min(limit, len(messages)))]
        buffer.pulled_bytes += sum(message.size_bytes for message in taken)
        return taken

    def buffered(self, partition: TopicPartition) -> int:
        """Return how many messages of the partition can be pulled."""
        buffer = self._told.get(partition)
        return len(buffer.messages) if buffer is not None else 0

    def commit(self, offsets: Mapping[TopicPartition, int], records: Records | None = None) -> None:
        """Hand offsets to the thread; those not yet sent are replaced by later ones."""
        owned = [(tp, self._told.get(tp), offset) for tp, offset in offsets.items()]
        self._commands.append(lambda: self._note_commits(owned, records or {}))

    def note(self, partition: TopicPartition, text: str) -> None:
        """Keep a text beside the offsets of the partition that are committed from now on."""
        self._notes[partition] = text

    def noted(self, partition: TopicPartition) -> str:
        """Return the text beside the offset from which the partition was assigned."""
        return self._noted.get(partition, "")

    def stop_fetching(self) -> None:
        """Let the thread pause everything and drop what it has."""
        self._fetching = False

    def lag(self) -> Mapping[TopicPartition, int]:
        """Return the end minus what is committed, per owned partition of which the brokers have told."""
        return self._lag.lag

    @property
    def gap(self) -> int:
        """How many messages the broker had deleted before they were read."""
        return self._gap

    def stalled(self) -> str | None:
        """Say why nothing comes, while the brokers are unreachable."""
        trouble = self._transactor.trouble if self._transactor is not None else None
        return self._stalled or (f"transactions: {trouble}" if trouble else None)

    async def close(self, *, leave: bool, seconds: float = CLOSE_SECONDS) -> None:
        """End the thread; with `leave` the group has the partitions in about a second."""
        self._close_by = time.monotonic() + seconds
        self._leave = leave
        if self._thread.is_alive() and not await asyncio.to_thread(self._ended.wait, seconds):
            log.warning("the consumer did not end in time; its partitions stay reserved for the session timeout")

    def _assigned(self, buffers: dict[TopicPartition, Buffer]) -> None:
        self._told.update(buffers)
        self._events.on_assigned(list(buffers))

    def _lost(self, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            self._told.pop(tp, None)
        self._events.on_lost(partitions)

    async def _revoked(self, partitions: list[TopicPartition]) -> Mapping[TopicPartition, int]:
        offsets = await self._events.on_revoked(partitions)
        for tp in partitions:
            self._told.pop(tp, None)
        return offsets

    # -- the thread -------------------------------------------------------------------------------------------

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self._dead = True  # the loop is closed: nobody is there to be told

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.exception("the consumer's thread failed")
            self._tell(self._events.on_fatal, Fatal.FAILED, f"the consumer failed: {error}")
        finally:
            self._ended.set()

    def _work(self) -> None:
        if self._transactor is not None:
            # First of all: where partitions begin is certain only once what a predecessor left open is ended.
            self._transactor.open(lambda: self._leave is not None or self._dead)
            if self._is_over():
                return
        self._consumer = ck.Consumer(
            {**self._config, "error_cb": self._on_error, "on_commit": self._committer.on_commit}, logger=LibraryLog()
        )
        self._consumer.subscribe(
            [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )
        while self._leave is None and not self._dead:
            self._fetch()
            self._work_off()
            self._regulate()
            if time.monotonic() >= self._next_check:
                self._check()
        self._finish(leave=bool(self._leave))

    def _work_off(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._send_commits()

    def _finish(self, *, leave: bool) -> None:
        self._fetching = False
        if self._stalled is not None:
            leave = False  # nobody would hear it, and the time for it is somebody else's
        else:
            self._check()
        if self._transactor is not None:
            self._transactor.finish(self._consumer, min(TRANSACTION_END_SECONDS, self._close_in()))
        if leave:
            leave_group(self._consumer, lambda: self._joined, self._close_in())
        self._consumer.close()

    def _close_in(self) -> float:
        return max(0.0, self._close_by - time.monotonic())

    def _fetch(self) -> None:
        first = self._consumer.poll(POLL_SECONDS)
        if first is None:
            return
        records = [first]
        if self._max_poll > 1:
            records += self._consumer.consume(self._max_poll - 1, 0)
        arrived: set[TopicPartition] = set()
        latest: Buffer | None = None
        buffers = self._buffers
        for record in records:
            if (error := record.error()) is not None:
                self._on_record_error(error)
                continue
            # The client's types allow None for all three; a record without an error has them.
            topic: Any = record.topic()
            partition: Any = record.partition()
            offset: Any = record.offset()
            buffer = buffers.get((topic, partition))
            if buffer is None or not self._fetching:
                continue  # given up meanwhile, or stopping: whoever owns it next reads it again
            if offset != buffer.expected:
                if offset < buffer.expected <= self._end_of(topic, partition):
                    continue  # fetched twice
                self._on_jump(buffer, offset)
            buffer.expected = offset + 1
            message = SourceMessage(
                topic,
                partition,
                offset,
                record.key(),
                record.value(),
                _headers(record.headers()),
                record.timestamp()[1],
            )
            buffer.messages.append(message)
            buffer.fetched_bytes += message.size_bytes
            if buffer is not latest:
                latest = buffer
                arrived.add((topic, partition))
        if arrived:
            self._stalled = None
            self._grown |= arrived
            self._tell(self._events.on_messages, arrived)

    def _on_record_error(self, error: ck.KafkaError) -> None:
        code = error.code()
        if code in (ck.KafkaError._FATAL, ck.KafkaError.FENCED_INSTANCE_ID):
            self._fence(error.str())
        elif code == ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
            self._stalled = f"topic {self._topic!r} does not exist any more; create it again or stop the pipeline"
            limited(log, 10.0).warning("the source topic is missing", topic=self._topic)
        elif code != ck.KafkaError._PARTITION_EOF:
            limited(log, 10.0).warning("consumer error", error=error.str())

    def _fence(self, text: str) -> None:
        self._fetching = False
        self._tell(self._events.on_fatal, Fatal.FENCED, text)

    def _on_jump(self, buffer: Buffer, offset: int) -> None:
        """Note a jump of a partition's offsets; `_count_gaps` finds out later whether messages were deleted."""
        if buffer.expected < 0:
            return
        if offset > buffer.expected:
            buffer.holes.append((buffer.expected, offset))
            return
        log.warning(
            "the topic ends before the committed offset; reading it again from where it begins",
            partition=buffer.name,
            committed=buffer.expected,
            first=offset,
        )

    def _count_gaps(self, topic: str, partition: int, buffer: Buffer) -> None:
        deleted = count_deleted(self._consumer, topic, partition, buffer.holes, 1.0)
        if deleted is not None:
            buffer.holes = []
            self._gap += deleted

    def _end_of(self, topic: str, partition: int) -> int:
        """Return the end of the partition as the last fetch saw it; a topic that was made anew ends earlier."""
        try:
            return int(self._consumer.get_watermark_offsets(ck.TopicPartition(topic, partition), cached=True)[1])
        except ck.KafkaException:
            return -1

    def _note_commits(self, offsets: Sequence[tuple[TopicPartition, Buffer | None, int]], records: Records) -> None:
        for tp, buffer, offset in offsets:
            if buffer is not None and self._buffers.get(tp) is buffer:
                self._to_commit[tp] = offset
                self._to_send[tp] = records.get(tp, ())

    def _send_commits(self) -> None:
        if self._transactor is not None:
            self._transact(self._transactor)
            return
        self._committer.send(self._consumer, self._to_commit)

    def _transact(self, transactor: TransactionalProducer) -> None:
        """Go on with the open transaction, or begin one with everything that waits."""
        if not transactor.busy and self._to_commit:
            offsets, self._to_commit = self._to_commit, {}
            records, self._to_send = self._to_send, {}
            members = frozenset(self._buffers[tp].member for tp in offsets if tp in self._buffers)
            transactor.begin(offsets, [record for each in records.values() for record in each], members)
        ended = transactor.step(self._consumer)
        if ended is not None:
            self._transacted(*ended)
        self._is_over()

    def _transacted(self, end: End, offsets: dict[TopicPartition, int]) -> None:
        if end is End.COMMITTED:
            self._lag.committed(offsets)
        status = CommitStatus.DONE if end is End.COMMITTED else CommitStatus.AGAIN
        self._tell(self._events.on_committed, offsets, status)

    def _is_over(self) -> bool:
        """Tell the engine once if the transactor is at its end."""
        fatal = self._transactor.fatal if self._transactor is not None else None
        if fatal is not None and not self._over:
            self._over = True
            self._fetching = False
            self._tell(self._events.on_fatal, *fatal)
        return fatal is not None

    def _commit_ended(self, offsets: dict[TopicPartition, int], error: ck.KafkaError | None) -> None:
        self._commit_error = error
        if error is None:
            self._stalled = None
            self._lag.committed(offsets)
            self._tell(self._events.on_committed, offsets, CommitStatus.DONE)
            return
        code = error.code()
        if code in (ck.KafkaError.FENCED_INSTANCE_ID, ck.KafkaError._FATAL):
            self._tell(self._events.on_committed, offsets, CommitStatus.FENCED)
            self._fence(error.str())
            return
        if code not in _AGAIN:
            limited(log, 10.0).warning("a commit failed and is tried again", error=error.str())
        self._tell(self._events.on_committed, offsets, CommitStatus.AGAIN)

    def _regulate(self) -> None:
        """Pause partitions whose buffer has become full, resume those that want more; once stopped, pause all."""
        share = self._max_bytes // max(1, len(self._buffers))
        grown, self._grown = (self._grown if self._fetching else self._buffers.keys() - self._full), set()
        for tp in grown:
            buffer = self._buffers.get(tp)
            if buffer is None or buffer.paused:
                continue
            if len(buffer.messages) >= BUFFER_MESSAGES or buffer.size_bytes >= share or not self._fetching:
                self._consumer.pause([ck.TopicPartition(*tp)])
                buffer.paused = True
                self._full.add(tp)
                if not self._fetching:
                    buffer.messages = deque()  # not cleared: the loop may be taking from it
        if not self._fetching:
            return
        for tp in list(self._full):
            buffer = self._buffers[tp]
            if len(buffer.messages) <= BUFFER_MESSAGES // 4 and buffer.size_bytes <= share // 4:
                self._resume(ck.TopicPartition(*tp))
                buffer.paused = False
                self._full.discard(tp)

    def _resume(self, partition: ck.TopicPartition) -> None:
        """Resume a partition, and wake the client's own thread that fetches from its broker.

        With everything at a broker paused, that thread sleeps for up to a second and a resume does not wake it
        (measured: 460 to 800 ms until the next message, 5 ms with a request behind the resume); the answer of the
        request is not waited for.
        """
        self._consumer.resume([partition])
        with contextlib.suppress(ck.KafkaException):
            self._consumer.get_watermark_offsets(partition, timeout=WAKE_SECONDS)

    def _check(self) -> None:
        """Refresh the lag and the gaps; while the brokers are unreachable, find out whether they are back."""
        self._next_check = time.monotonic() + CHECK_SECONDS
        self._lag.look(self._consumer, self._full, time.monotonic(), may_ask=self._stalled is None)
        for (topic, partition), buffer in list(self._buffers.items()):
            if buffer.holes:
                self._count_gaps(topic, partition, buffer)
        if self._stalled is not None:
            try:
                topic = self._consumer.list_topics(self._topic, timeout=0.5).topics[self._topic]
            except ck.KafkaException:
                return
            if topic.error is not None and topic.error.code() == ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
                return
            log.info("the brokers answer again, and have the topic")
            self._stalled = None

    def _on_error(self, error: ck.KafkaError) -> None:
        if error.code() == ck.KafkaError._FATAL:
            self._fence(error.str())
        elif error.code() in (ck.KafkaError._ALL_BROKERS_DOWN, ck.KafkaError._TRANSPORT):
            if error.code() == ck.KafkaError._ALL_BROKERS_DOWN:
                self._stalled = f"no broker is reachable ({self._config['bootstrap.servers']}); waiting for one"
            limited(log, 10.0).warning("the brokers are not reachable; the pipeline waits", error=error.str())
        else:
            limited(log, 10.0).warning("client error", error=error.str())

    # -- the group --------------------------------------------------------------------------------------------

    def _on_assign(self, consumer: ck.Consumer, partitions: list[ck.TopicPartition]) -> None:
        committed: dict[TopicPartition, int] = {}
        member = member_of(consumer.consumer_group_metadata())
        if self._transactor is not None:
            for ended in self._transactor.end_before(consumer, _names(partitions), TRANSACTION_END_SECONDS):
                self._transacted(*ended)
        for position in partitions:
            self._noted.pop((position.topic, position.partition), None)
        if partitions:
            try:
                for position in consumer.committed(partitions, timeout=10.0):
                    committed[position.topic, position.partition] = position.offset if position.error is None else -1
                    self._noted[position.topic, position.partition] = position.metadata or ""
            except ck.KafkaException as error:
                log.warning("committed offsets are not known; gaps cannot be told", error=str(error))
        buffers = {tp: Buffer(tp, committed.get(tp, -1), member) for tp in _names(partitions)}
        self._buffers.update(buffers)
        consumer.incremental_assign(partitions)
        if partitions:
            # librdkafka keeps a pause over a revoke: what was full when it went would never be read again.
            consumer.resume(partitions)
        self._lag.assigned({tp: committed.get(tp, -1) for tp in buffers})
        self._next_check = 0.0  # the lag is to be known at once
        self._joined = True
        self._tell(self._assigned, buffers)

    def _on_revoke(self, consumer: ck.Consumer, partitions: list[ck.TopicPartition]) -> None:
        owned = [tp for tp in _names(partitions) if tp in self._buffers]
        member = member_of(consumer.consumer_group_metadata())
        if any(self._buffers[tp].member not in (None, member) for tp in owned):
            # It was expelled and has joined anew: they are somebody else's already.
            self._on_lost(consumer, partitions)
            consumer.incremental_unassign(partitions)
            return
        for tp in owned:
            self._buffers[tp].messages = deque()  # not cleared: the loop may be taking from it
        if owned and self._leave is None and not self._dead:
            self._finish_work(consumer, owned)
        self._forget(owned)
        consumer.incremental_unassign(partitions)

    def _finish_work(self, consumer: ck.Consumer, owned: list[TopicPartition]) -> None:
        """Let the engine finish what runs of revoked partitions; commit for all meanwhile, without a poll."""
        deadline = time.monotonic() + self._revoke_seconds + REVOKE_SECONDS
        self._give_up(owned)
        work = asyncio.run_coroutine_threadsafe(self._revoked(owned), self._loop)
        while True:
            over = work.done() or time.monotonic() >= deadline
            self._work_off_now(consumer)
            if over:
                break
            concurrent.futures.wait((work,), POLL_SECONDS)
        if not work.done():
            work.cancel()
            self._tell(self._lost, owned)
            log.warning(
                "revoked partitions were not given up in time; their messages are redelivered", partitions=owned
            )
        elif offsets := work.result():
            self._commit_last(consumer, offsets, deadline)

    def _work_off_now(self, consumer: ck.Consumer) -> None:
        while self._commands:
            self._commands.popleft()()
        if self._transactor is not None:
            self._transact(self._transactor)
        else:
            self._committer.send_now(consumer, self._to_commit, ANSWER_SECONDS)

    def _commit_last(self, consumer: ck.Consumer, offsets: Mapping[TopicPartition, int], deadline: float) -> None:
        """Commit what partitions leave behind, before somebody else begins there."""
        deadline = min(deadline, time.monotonic() + REVOKE_SECONDS)
        while True:
            self._commit_error = _NO_ANSWER
            self._to_commit.update(offsets)
            self._work_off_now(consumer)
            error = self._commit_error
            if error is None or error.code() in _FINAL or time.monotonic() + COMMIT_AGAIN_SECONDS >= deadline:
                break
            time.sleep(COMMIT_AGAIN_SECONDS)
        if error is not None:
            text = "the last commit of revoked partitions failed; their messages are redelivered"
            log.warning(text, error=error.str())

    def _on_lost(self, consumer: ck.Consumer, partitions: list[ck.TopicPartition]) -> None:
        lost = _names(partitions)
        self._forget(lost)
        self._tell(self._lost, lost)

    def _forget(self, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            self._buffers.pop(tp, None)
            self._to_commit.pop(tp, None)
            self._to_send.pop(tp, None)
            self._committer.forget(tp)
            self._lag.forget(tp)
            self._grown.discard(tp)
            self._full.discard(tp)
        self._give_up(partitions)
        if self._transactor is not None:
            self._transactor.forget(partitions)

    def _give_up(self, partitions: list[TopicPartition]) -> None:
        if self._transactor is not None:
            for ended in self._transactor.give_up(self._consumer, partitions, GIVE_UP_SECONDS):
                self._transacted(*ended)
            self._is_over()


def _names(partitions: Sequence[ck.TopicPartition]) -> list[TopicPartition]:
    return [(p.topic, p.partition) for p in partitions]


def _headers(headers: Any) -> tuple[Header, ...]:
    return tuple(headers) if headers else ()
