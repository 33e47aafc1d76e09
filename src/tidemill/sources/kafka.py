"""The Kafka consumer of one engine: a thread that fetches, commits and takes part in the group.

Invariants: only the thread touches the consumer. It makes no decisions about offsets: it commits what it is given,
except for partitions that it does not own. Fetched messages wait in a bounded buffer per partition. A partition is
paused at the broker only when its buffer is full, because a pause discards everything that librdkafka has prefetched.

A partition can be revoked and assigned again while the loop is busy, so each buffer represents one ownership. The
engine pulls from, and commits for, only the ownership that it knows of; calls for an earlier one have no effect.

Membership is static (`group.instance.id`), cooperative-sticky, in the classic protocol. A fenced member keeps fetching
until it finds out, so `_FATAL` and FENCED_INSTANCE_ID end the engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import confluent_kafka as ck
import structlog

from tidemill.config.settings import REVOKE_MARGIN_SECONDS, Settings
from tidemill.runtime.kafka.client import LibraryLog
from tidemill.runtime.kafka.record_headers import read_headers
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.kafka.topic_ids import TopicIds
from tidemill.sources.base import CommitStatus, Fatal, Records, SourceEvents, SourceStatistics, TopicPartition
from tidemill.sources.broker_watch import BrokerWatch
from tidemill.sources.buffer import Buffer, ToldBuffers
from tidemill.sources.commit_positions import list_partitions
from tidemill.sources.flow_control import FlowControl
from tidemill.sources.gaps import examine_holes, note_jump
from tidemill.sources.group_metadata import read_member_id
from tidemill.sources.lag import LagWatch, read_cached_end
from tidemill.sources.membership import leave_group, make_consumer_config
from tidemill.sources.pending_commits import PendingCommits
from tidemill.sources.topic_watch import PartitionStart, TopicWatch, open_topic_ids
from tidemill.sources.transactional_producer import TransactionalProducer

log = structlog.get_logger(__name__)

#: How long one poll waits for a first message, and therefore the longest that a command waits for the thread.
POLL_SECONDS = 0.02
#: The interval of checks for watermarks and unreachable brokers.
CHECK_SECONDS = 1.0
#: How long a rebalance callback may take beyond the revoke timeout; half a second less than the settings reserve
#: (`REVOKE_MARGIN_SECONDS`), so that the next poll is in time.
REVOKE_SECONDS = REVOKE_MARGIN_SECONDS - 0.5
#: How long the thread may take to stop by default.
CLOSE_SECONDS = 30.0


class KafkaSource:
    """A `Source` over one consumer.

    Args:
        settings: The pipeline's settings.
        instance_id: The member's static id, `<group>.<worker>.<slot>`.
        producer: Commits offsets together with records; None: plain commits.
        topic_ids: Returns the topic's id; None: ask the brokers.
    """

    def __init__(
        self,
        settings: Settings,
        instance_id: str,
        producer: TransactionalProducer | None = None,
        topic_ids: TopicIds | None = None,
    ) -> None:
        self._topic = settings.kafka.source_topic
        self._max_poll = settings.kafka.max_poll_records
        self._revoke_seconds = settings.revoke_timeout_seconds
        self._config = make_consumer_config(settings, instance_id)
        # The buffers of the owned partitions; only the thread touches them.
        self._buffers: dict[TopicPartition, Buffer] = {}
        self._told = ToldBuffers()
        self._commands: deque[Callable[[], None]] = deque()
        self._notes: dict[TopicPartition, str] = {}
        self._noted: dict[TopicPartition, str] = {}
        self._fetching = True
        self._leave: bool | None = None
        self._close_by = 0.0
        self._brokers = BrokerWatch(settings.kafka, self._on_fatal)
        self._lag = LagWatch()
        self._flow = FlowControl(self._buffers, settings.executor.max_queued_bytes)
        self._watch = TopicWatch(topic_ids or open_topic_ids(settings.kafka), self._notes)
        self._pending = PendingCommits(
            self._buffers,
            self._lag,
            self._watch.positions,
            producer,
            on_answer=self._brokers.on_answer,
            on_committed=self._on_committed,
            on_fatal=self._on_fatal,
        )
        self._next_check = 0.0
        self._gap = 0
        self._dead = False
        self._joined = False
        self._thread = threading.Thread(target=self._run, name="tidemill-consumer", daemon=True)
        self._ended = threading.Event()

    # -- called by the engine, on the loop ---------------------------------------------------------------------

    def start(self, events: SourceEvents) -> None:
        """Start the thread, which connects and subscribes."""
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def pull(self, partition: TopicPartition, limit: int) -> list[SourceMessage]:
        """Take messages from the partition's buffer."""
        return self._told.pull(partition, limit)

    def buffered(self, partition: TopicPartition) -> int:
        """Return how many messages of the partition can be pulled."""
        return self._told.count(partition)

    def peek(self, partition: TopicPartition) -> SourceMessage | None:
        """Return the next message of the partition that can be pulled."""
        return self._told.peek(partition)

    def commit(self, offsets: Mapping[TopicPartition, int], records: Records | None = None) -> None:
        """Pass offsets to the thread; they replace earlier ones that are not sent yet."""
        owned = [(tp, self._told.get(tp), offset) for tp, offset in offsets.items()]
        self._commands.append(lambda: self._pending.add(owned, records or {}))

    def note(self, partition: TopicPartition, text: str) -> None:
        """Store a text with all further committed offsets of the partition."""
        self._notes[partition] = text

    def noted(self, partition: TopicPartition) -> str:
        """Return the text stored with the offset at which the partition was assigned."""
        return self._noted.get(partition, "")

    def stop_fetching(self) -> None:
        """Pause all partitions and drop their buffers, on the consumer's thread."""
        self._fetching = False

    def statistics(self) -> SourceStatistics:
        """Return the gap, and the lag of owned partitions whose ends are known."""
        return SourceStatistics(self._gap, self._lag.lag, self._brokers.errors, self._watch.recreated)

    def describe_wait(self) -> str | None:
        """Return why no messages arrive, while the brokers are unreachable."""
        return self._brokers.trouble or self._pending.trouble

    def describe_refusal(self) -> str | None:
        """Return why the brokers refuse the member."""
        return self._brokers.join.refusal

    async def close(self, *, leave: bool, seconds: float = CLOSE_SECONDS) -> None:
        """Stop the thread; with `leave`, the group gets the partitions in about a second."""
        self._close_by = time.monotonic() + seconds
        self._leave = leave
        if self._thread.is_alive() and not await asyncio.to_thread(self._ended.wait, seconds):
            log.warning("the consumer did not stop in time; its partitions stay reserved until the session timeout")

    def _tell_assigned(self, buffers: dict[TopicPartition, Buffer]) -> None:
        self._told.update(buffers)
        self._events.on_assigned(list(buffers))

    def _tell_lost(self, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            self._told.pop(tp, None)
        self._events.on_lost(partitions)

    async def _tell_revoked(self, partitions: list[TopicPartition]) -> Mapping[TopicPartition, int]:
        offsets = await self._events.on_revoked(partitions)
        for tp in partitions:
            self._told.pop(tp, None)
        return offsets

    # -- the thread -------------------------------------------------------------------------------------------

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            self._dead = True  # the loop is closed

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.exception("the consumer's thread failed")
            self._tell(self._events.on_fatal, Fatal.FAILED, f"the consumer failed: {error}")
        finally:
            self._ended.set()

    def _work(self) -> None:
        # Before subscribing: the starts of partitions are final only once a predecessor's open transaction has ended.
        if not self._pending.open(lambda: self._leave is not None or self._dead):
            return
        self._consumer = ck.Consumer(
            {**self._config, "error_cb": self._brokers.on_error, "on_commit": self._pending.on_commit},
            logger=LibraryLog(),
        )
        self._consumer.subscribe(
            [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )
        while self._leave is None and not self._dead:
            self._fetch()
            self._check_topic()
            self._restart_replaced()
            self._work_off()
            self._pending.send(self._consumer)
            self._flow.regulate(self._consumer, fetching=self._fetching)
            if time.monotonic() >= self._next_check:
                self._check()
        self._finish(leave=bool(self._leave))

    def _work_off(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _finish(self, *, leave: bool) -> None:
        self._fetching = False
        if self._brokers.trouble is not None:
            leave = False  # the request would not arrive, and the rest of the shutdown needs the time
        else:
            self._check()
        self._pending.finish(self._consumer, self._close_in())
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
        # The partition of the previous record; most neighbours share it.
        topic: Any = None
        partition: Any = None
        buffer: Buffer | None = None
        buffers, now = self._buffers, time.time_ns() // 1000
        for record in records:
            if (error := record.error()) is not None:
                self._brokers.on_record_error(error)
                continue
            # The client's types allow None for all three; a record without an error has them.
            offset: Any = record.offset()
            if record.partition() != partition or record.topic() != topic:
                topic, partition = record.topic(), record.partition()
                buffer = buffers.get((topic, partition))
            if buffer is None or not self._fetching or buffer.closed_at is not None:
                continue  # given up meanwhile, or stopping: its next owner reads it again
            if offset != buffer.expected:
                if offset < buffer.expected:
                    self._check_topic(at_once=True)
                    if (topic, partition) in self._watch.positions.replaced:
                        continue
                if offset < buffer.expected <= read_cached_end(self._consumer, (topic, partition)):
                    continue  # fetched twice
                note_jump(buffer, offset)
            buffer.expected = offset + 1
            key, value = record.key(), record.value()
            headers, headers_error = read_headers(record)
            buffer.messages.append(
                SourceMessage(
                    topic,
                    partition,
                    offset,
                    key,
                    value,
                    headers,
                    record.timestamp()[1],
                    consumed_at=now,
                    headers_error=headers_error,
                )
            )
            buffer.fetched_bytes += (len(key) if key else 0) + (len(value) if value else 0)
            if buffer is not latest:
                latest = buffer
                arrived.add((topic, partition))
        if arrived:
            self._brokers.on_messages()
            self._flow.note_growth(arrived)
            self._tell(self._events.on_messages, arrived)

    def _on_fatal(self, fatal: Fatal, text: str) -> None:
        self._fetching = False
        self._tell(self._events.on_fatal, fatal, text)

    def _on_committed(self, offsets: dict[TopicPartition, int], status: CommitStatus) -> None:
        self._tell(self._events.on_committed, offsets, status)

    def _check(self) -> None:
        """Refresh the lag and the gaps; if the brokers were unreachable, check whether they are back."""
        self._next_check = time.monotonic() + CHECK_SECONDS
        self._lag.look(self._consumer, self._flow.full, time.monotonic(), may_ask=self._brokers.trouble is None)
        self._gap += examine_holes(self._consumer, self._buffers)
        self._brokers.look(self._consumer)

    # -- the group --------------------------------------------------------------------------------------------

    def _on_assign(self, consumer: ck.Consumer, partitions: list[ck.TopicPartition]) -> None:
        self._pending.end_before(consumer, list_partitions(partitions))
        self._begin(consumer, self._watch.find_starts(consumer, partitions))
        self._next_check = 0.0  # update the lag at once
        self._joined = True

    def _begin(self, consumer: ck.Consumer, starts: Mapping[TopicPartition, PartitionStart]) -> None:
        """Take ownership of partitions, and inform the engine."""
        member = read_member_id(consumer.consumer_group_metadata())
        buffers = {tp: Buffer(tp, start.offset, member) for tp, start in starts.items()}
        self._buffers.update(buffers)
        self._noted.update({tp: start.note for tp, start in starts.items()})
        positions = [start.make_position(tp) for tp, start in starts.items()]
        consumer.incremental_assign(positions)
        if positions:
            # librdkafka remembers a pause across a revoke; a partition that was full would never be read again.
            consumer.resume(positions)
        self._brokers.on_joined(has_partitions=bool(positions))
        self._lag.assigned({tp: start.offset for tp, start in starts.items()})
        self._tell(self._tell_assigned, buffers)

    def _check_topic(self, *, at_once: bool = False) -> None:
        for tp in self._watch.close_replaced(self._consumer, self._buffers, at_once=at_once):
            self._lag.forget(tp)

    def _restart_replaced(self) -> None:
        """Restart replaced partitions at the new topic after the fetched messages are done, or the revoke timeout."""
        ended = self._watch.find_ended(self._buffers, self._revoke_seconds)
        if ended and self._leave is None:
            self._hand_back(self._consumer, ended)
            self._consumer.incremental_unassign([ck.TopicPartition(*tp) for tp in ended])
            self._begin(self._consumer, self._watch.restart(ended))

    def _on_revoke(self, consumer: ck.Consumer, partitions: list[ck.TopicPartition]) -> None:
        owned = [tp for tp in list_partitions(partitions) if tp in self._buffers]
        member = read_member_id(consumer.consumer_group_metadata())
        if any(self._buffers[tp].member not in (None, member) for tp in owned):
            # The member was expelled and has rejoined: the partitions already belong to another member.
            self._on_lost(consumer, partitions)
            consumer.incremental_unassign(partitions)
            return
        self._hand_back(consumer, owned)
        consumer.incremental_unassign(partitions)

    def _hand_back(self, consumer: ck.Consumer, owned: list[TopicPartition]) -> None:
        for tp in owned:
            self._buffers[tp].messages = deque()  # replaced, not cleared, because the loop may be taking from it
        if owned and self._leave is None and not self._dead:
            self._finish_work(consumer, owned)
        self._forget(owned)

    def _finish_work(self, consumer: ck.Consumer, owned: list[TopicPartition]) -> None:
        """Let the engine finish the running work of revoked partitions; meanwhile, commit for all without a poll."""
        deadline = time.monotonic() + self._revoke_seconds + REVOKE_SECONDS
        self._pending.give_up(consumer, owned)
        work = asyncio.run_coroutine_threadsafe(self._tell_revoked(owned), self._loop)
        while True:
            over = work.done() or time.monotonic() >= deadline
            self._work_off_now(consumer)
            if over:
                break
            concurrent.futures.wait((work,), POLL_SECONDS)
        if not work.done():
            work.cancel()
            self._tell(self._tell_lost, owned)
            log.warning(
                "revoked partitions were not released in time; their messages will be redelivered", partitions=owned
            )
        elif offsets := work.result():
            deadline = min(deadline, time.monotonic() + REVOKE_SECONDS)
            self._pending.send_last(lambda: self._work_off_now(consumer), offsets, deadline)

    def _work_off_now(self, consumer: ck.Consumer) -> None:
        self._work_off()
        self._pending.send_now(consumer)

    def _on_lost(self, consumer: ck.Consumer, partitions: list[ck.TopicPartition]) -> None:
        lost = list_partitions(partitions)
        self._forget(lost)
        self._tell(self._tell_lost, lost)

    def _forget(self, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            self._buffers.pop(tp, None)
            self._pending.forget(tp)
            self._lag.forget(tp)
            self._flow.forget(tp)
            self._watch.forget(tp)
        self._pending.give_up(self._consumer, partitions)
        self._pending.forget_open(partitions)
