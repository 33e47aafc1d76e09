"""A shared stream over one Kafka topic: offsets that every subscriber has resolved are committed, failures redelivered.

Raw events are `SourceMessage`s; a lane is a partition. The consumer runs on its own thread (`sources.kafka`) with a
bounded buffer per partition, so it stays in its group even while the stream is not pulled. `core.streams.redelivery`
decides about offsets; this module connects it to the consumer and the dead-letter topic.

Invariants: an offset is committed only if its event is clean, or its dead letter is confirmed. An event that failed or
was left unread is redelivered only when the subscribers concerned have returned or are gone for good; if that takes too
long, the stream ends and the broker redelivers the event. Only failures, rejects and unreadable headers lead to dead
letters. `advance` never waits, so no lane waits for another. Clean offsets above the floor, and failure counts, are
committed as metadata of the offset, so that the group's next producer continues from them.

The manager of the stream must call the methods of `SubscriberObserver`. While it does not pull (the store is
unreachable, or too many events are outstanding), the clock for redeliveries is paused.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import FencedError, RemoteError, TidemillError
from tidemill.core.streams.offset_metadata import encode_metadata
from tidemill.core.streams.redelivery import Redelivery
from tidemill.core.streams.redelivery_items import (
    OffsetDelivery,
    RedeliveryLimits,
    RedeliveryVerdict,
    SkipReason,
    judge_outcome,
)
from tidemill.deadletters.letter import Letter
from tidemill.deadletters.writer import DeadLetters, KafkaDeadLetters
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sources.base import CommitStatus, Fatal, NotedSource, TopicPartition
from tidemill.sources.kafka import KafkaSource
from tidemill.triggers.producers.kafka_blame import (
    DeliveryBlame,
    build_letter,
    build_unreadable_letter,
    describe_absence,
)
from tidemill.triggers.producers.kafka_member import build_member_id
from tidemill.triggers.producers.kafka_member import kafka_claim as kafka_claim
from tidemill.triggers.producers.kafka_past import PastCommits
from tidemill.triggers.shared_stream import AdvanceItem, SharedStreamProducer
from tidemill.triggers.stream_api import UPSTREAM_COUNTS, UpstreamCounts

log = structlog.get_logger(__name__)

#: Commits within this many seconds are combined.
COMMIT_SECONDS = 0.05
#: How long closing waits for letters in flight, and then for commits in flight.
SETTLE_SECONDS = 5.0
#: Time beyond this between two pulls does not count for redeliveries.
PAUSE_SECONDS = 1.0
_PULL_MESSAGES = 64
_NOBODY = DeliveryBlame()

Event = OffsetDelivery[TopicPartition, SourceMessage]


class AbsentSubscriberError(TidemillError):
    """An event cannot be redelivered, because a trigger that failed it or left it unread did not return in time."""


def kafka_stream(
    brokers: str,
    topic: str,
    group: str,
    *,
    dlq_topic: str = "",
    max_redeliveries: int = 5,
    client_config: Mapping[str, Any] | None = None,
) -> KafkaStreamProducer:
    """Return a producer for `create_shared_stream_producer`.

    Args:
        brokers: One or more `host:port`, separated by commas.
        topic: The topic to read; it must exist.
        group: The consumer group; use one per kind of stream.
        dlq_topic: The topic for rejected and failed events; '' means `<topic>_dlq`, which is created if missing.
        max_redeliveries: How often to redeliver a failed event.
        client_config: Settings for librdkafka, for example for security.

    Example:
        >>> producer = kafka_stream("localhost:9092", "orders", "order-triggers")
    """
    kafka = {"brokers": brokers, "source_topic": topic, "consumer_group": group, "client_config": client_config or {}}
    settings = Settings.model_validate({"kafka": kafka, "dlq": {"topic": dlq_topic}})
    return KafkaStreamProducer(settings, RedeliveryLimits(max_redeliveries=max_redeliveries))


class KafkaStreamProducer(SharedStreamProducer):
    """One consumer of one topic, for one shared stream.

    Args:
        settings: `kafka` selects the topic, `dlq` the dead-letter topic. `worker_name_env` names this host, which
            matters only outside of trigger lists.
        limits: The limits for redeliveries; by default the defaults of `RedeliveryLimits`.
        source: Replaces the Kafka consumer.
        letters: Replaces the dead-letter topic.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        settings: Settings,
        limits: RedeliveryLimits | None = None,
        *,
        source: NotedSource | None = None,
        letters: DeadLetters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; the stream connects when it is opened."""
        self._limits = limits or RedeliveryLimits()
        self._source = source or KafkaSource(settings, build_member_id(settings))
        self._letters = letters or KafkaDeadLetters(settings)
        self._clock = clock
        self._counts = UPSTREAM_COUNTS.get() or UpstreamCounts()
        self._redelivery: Redelivery[TopicPartition, SourceMessage] = Redelivery(self._limits)
        self._lanes: deque[TopicPartition] = deque()
        self._pulled: deque[SourceMessage] = deque()
        self._blame: dict[int, DeliveryBlame] = {}
        self._error: TidemillError | None = None
        self._started = False
        self._wake = asyncio.Event()
        self._paused_seconds = 0.0
        self._given_at: float | None = None
        self._commit_timer: asyncio.TimerHandle | None = None
        self._sent: dict[TopicPartition, int] = {}
        self._writing: set[int] = set()
        self._settled = asyncio.Event()
        self._past = PastCommits()

    # -- called by the manager ------------------------------------------------------------------------------------

    async def open_stream(self) -> AsyncIterator[tuple[SourceMessage, Event]]:
        """Connect, and yield messages with the deliveries that `advance` expects back.

        Raises:
            AbsentSubscriberError: A trigger that failed an event or left it unread did not return in time.
            FencedError: Another process reads under this member id.
            ConfigError: The dead-letter topic cannot be used.
            RemoteError: The brokers refuse, or the topic was deleted and created again.
        """
        self._started = True
        await self._letters.open()
        self._source.start(self)
        while True:
            self._check()
            delivery = self._take_next()
            if delivery is None:
                await self._wait_for_events()
                continue
            self._given_at = self._clock()
            yield delivery.held, delivery
            self._paused_seconds += self._count_paused()
            self._given_at = None

    def get_advance_lane(self, broker_payload: Event) -> TopicPartition:
        """Return the topic and the partition."""
        return broker_payload.lane

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Process outcomes: commit clean events soon, redeliver or dead-letter others.

        Raises:
            FencedError: Another process reads under this member id.
            RemoteError: The consumer failed.
        """
        if self._error is not None:
            raise self._error
        now = self._read_clock()
        for delivery, outcome in batch:
            blame = self._blame.pop(delivery.number, _NOBODY)
            ended = judge_outcome(*outcome, unread=blame.left_unread)
            bits = random.getrandbits(32)
            if self._redelivery.resolve(delivery, ended, now, bits, blame.names, outcome.acked > 0):
                self._write(delivery, build_letter(delivery, outcome, blame))
        self._wake.set()
        self._commit_soon()

    async def aclose(self) -> None:
        """Wait briefly for letters and commits in flight, then leave the group, unless this member was replaced."""
        if not self._started:
            return
        if self._error is None:
            await self._wait_until(lambda: not self._writing)
            self._commit()
            await self._wait_until(lambda: not self._sent)
        if self._commit_timer is not None:
            self._commit_timer.cancel()
        # A replaced member must not leave, because the request would remove its replacement.
        await self._source.close(leave=self._error is None)
        await self._letters.close()

    def describe_wait(self) -> str | None:
        """Return what the stream is waiting for, if that is known."""
        source = self._source
        return self._letters.describe_wait() or source.describe_refusal() or source.describe_wait()

    # -- SubscriberObserver -------------------------------------------------------------------------------------------

    def subscriber_joined(self, trigger_id: Hashable) -> None:
        self._redelivery.note_joined(trigger_id)
        self._wake.set()

    def subscriber_left(self, trigger_id: Hashable) -> None:
        self._redelivery.note_left(trigger_id)

    def subscriber_gone(self, trigger_id: Hashable) -> None:
        self._redelivery.note_gone(trigger_id)
        self._wake.set()
        self._commit_soon()

    def event_failed(
        self, broker_payload: Event, failures: Mapping[Hashable, str], unread: Collection[Hashable]
    ) -> None:
        blame = self._blame.setdefault(broker_payload.number, DeliveryBlame())
        blame.failures.update(failures)
        blame.unread.update(unread)

    # -- the next event ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        overdue = self._redelivery.find_overdue(self._read_clock())
        if overdue is not None:
            raise AbsentSubscriberError(describe_absence(overdue, self._limits.wait_seconds))

    def _take_next(self) -> Event | None:
        # Take one delivery at a time: joins and leaves are numbered by the same counter, so the order must be exact.
        if again := self._redelivery.take(self._read_clock(), 1):
            self._counts.redelivered += 1
            return again[0]
        while (message := self._pull()) is not None:
            lane = (message.topic, message.partition)
            found = self._redelivery.admit(lane, message.offset, message, message.size_bytes)
            if isinstance(found, OffsetDelivery):
                if message.headers_error is None:
                    return found
                self._redelivery.resolve(found, RedeliveryVerdict.REJECTED, self._read_clock(), 0)
                self._write(found, build_unreadable_letter(message, message.headers_error))
            if found is SkipReason.STALE:
                # The source already drops duplicate fetches, so an old offset means that the topic was created again.
                raise RemoteError(
                    f"topic {message.topic!r}, partition {message.partition} went back to offset {message.offset}: "
                    f"the topic was deleted and created again; the stream restarts from that offset"
                )
        return None

    def _pull(self) -> SourceMessage | None:
        # Rotate, so that a busy partition does not starve the others.
        for _ in range(len(self._lanes)):
            if self._pulled:
                break
            lane = self._lanes[0]
            self._lanes.rotate(-1)
            if self._redelivery.wants(lane):
                self._pulled.extend(self._source.pull(lane, _PULL_MESSAGES))
        return self._pulled.popleft() if self._pulled else None

    async def _wait_for_events(self) -> None:
        due = self._redelivery.due
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - self._read_clock())):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _count_paused(self) -> float:
        if self._given_at is None:
            return 0.0
        return max(0.0, self._clock() - self._given_at - PAUSE_SECONDS)

    def _read_clock(self) -> float:
        """Return the time in seconds, excluding pauses between pulls."""
        return self._clock() - self._paused_seconds - self._count_paused()

    # -- letters and commits ----------------------------------------------------------------------------------

    def _write(self, delivery: Event, letter: Letter) -> None:
        self._writing.add(delivery.number)

        def note_confirmed() -> None:
            self._counts.add_letter(letter.kind.value)
            self._writing.discard(delivery.number)
            self._redelivery.note_lettered(delivery)
            self._wake.set()
            self._settled.set()
            self._commit_soon()

        self._letters.put(letter, note_confirmed)

    def _commit_soon(self) -> None:
        if self._commit_timer is None:
            self._commit_timer = asyncio.get_running_loop().call_later(COMMIT_SECONDS, self._commit)

    def _commit(self) -> None:
        if self._commit_timer is not None:
            self._commit_timer.cancel()
            self._commit_timer = None
        offsets = self._take_floors()
        if offsets and self._error is None:
            self._sent.update(offsets)
            self._source.commit(offsets)

    def _take_floors(self) -> dict[TopicPartition, int]:
        offsets = {}
        for commit in self._redelivery.take_commits():
            self._source.note(commit.lane, encode_metadata(commit))
            offsets[commit.lane] = commit.floor
        return offsets

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                while not condition():
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            log.warning("closing a stream before all letters and commits are confirmed; events will be redelivered")

    # -- called by the source ---------------------------------------------------------------------------------

    def on_messages(self, partitions: Collection[TopicPartition]) -> None:
        self._wake.set()

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._forget(partitions)
        for lane in partitions:
            self._redelivery.assign(lane, self._past.read(lane, self._source.noted(lane)))
            self._lanes.append(lane)
        self._wake.set()

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the offsets to commit; the next reader of the partitions redelivers outstanding events."""
        # Commits in flight may be lost with the partitions, so commit their floors again.
        for lane in partitions:
            self._redelivery.offer_again(lane)
        floors = self._take_floors()
        # The floors of partitions that stay are left to the next regular commit.
        kept = [lane for lane in floors if lane not in partitions]
        for lane in kept:
            del floors[lane]
            self._redelivery.offer_again(lane)
        self._forget(partitions)
        return floors

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._forget(partitions)

    def _forget(self, partitions: Sequence[TopicPartition]) -> None:
        gone = set(partitions)
        for lane in gone:
            self._redelivery.revoke(lane)
            self._sent.pop(lane, None)
        self._lanes = deque(lane for lane in self._lanes if lane not in gone)
        self._pulled = deque(m for m in self._pulled if (m.topic, m.partition) not in gone)
        self._settled.set()

    def on_committed(self, offsets: Mapping[TopicPartition, int], status: CommitStatus) -> None:
        for lane, offset in offsets.items():
            if status is CommitStatus.DONE:
                if self._sent.get(lane) == offset:
                    del self._sent[lane]
            elif lane in self._redelivery:
                self._redelivery.offer_again(lane)
        if status is CommitStatus.AGAIN:
            self._commit_soon()
        self._settled.set()

    def on_fatal(self, fatal: Fatal, text: str) -> None:
        if fatal is Fatal.FENCED:
            text = (
                f"another process reads this stream under the same member id ({text}): it has taken over this list, or "
                f"runs the same trigger outside of a list; run the trigger once, or give it its own consumer group"
            )
            self._error = FencedError(text)
        else:
            self._error = RemoteError(text)
        self._wake.set()
        self._settled.set()
