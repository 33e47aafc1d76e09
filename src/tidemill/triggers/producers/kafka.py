"""A shared stream over one Kafka topic: what every subscriber is done with is committed, what failed is given again.

Raw events are `SourceMessage`s; a lane is a partition. The consumer lives on its own thread (`sources.kafka`) with a
bounded buffer per partition, so a stream that is not pulled never leaves its group; what is decided about offsets is
decided by `core.redelivery`, this module only connects the two and the dead-letter topic.

Invariants: nothing is committed that is not clean or dead-lettered and confirmed; an event that failed, or was left
unread, is given again only when those who did that take part again or are gone for good, and if that takes too long the
stream ends and the broker gives it again; only failures and rejects lead to dead letters; `advance` waits for nothing,
so that no lane waits for another. Clean offsets above the floor, and how often others failed, are kept as a note beside
the committed offset: the next producer of the group goes on there.

The manager of the stream has to call the methods of `SubscriberObserver`. While it does not pull (its store is away,
too much is outstanding) the time for redeliveries stands still.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import structlog

from tidemill.config.redaction import redact_text
from tidemill.config.settings import Settings
from tidemill.core.errors import FencedError, RemoteError, TidemillError
from tidemill.core.streams.offset_metadata import decode_note, encode_note
from tidemill.core.streams.redelivery import Redelivery
from tidemill.core.streams.redelivery_items import Commit, Delivery, RedeliveryLimits, Skip, judge_outcome
from tidemill.deadletters.writer import DeadLetters, KafkaDeadLetters
from tidemill.runtime.messages import SourceMessage
from tidemill.sources.base import CommitStatus, Fatal, NotedSource, TopicPartition
from tidemill.sources.kafka import KafkaSource
from tidemill.triggers.producers.kafka_blame import Blame, absence_text, letter_of
from tidemill.triggers.producers.kafka_member import kafka_claim as kafka_claim
from tidemill.triggers.producers.kafka_member import member_id
from tidemill.triggers.shared_stream import AdvanceItem, AdvanceOutcome, SharedStreamProducer

log = structlog.get_logger(__name__)

#: Commits of so long are made together.
COMMIT_SECONDS = 0.05
#: At the end: how long letters and commits on their way are waited for, each.
SETTLE_SECONDS = 5.0
#: A pull that comes later than this after the last one lets the time for redeliveries stand still meanwhile.
PAUSE_SECONDS = 1.0
_PULL_MESSAGES = 64
_SHOWN_CHARACTERS = 100
_NOBODY = Blame()

Event = Delivery[TopicPartition, SourceMessage]


class AbsentSubscriberError(TidemillError):
    """An event cannot be given again, because a trigger that failed it, or left it unread, did not return in time."""


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
        brokers: host:port of one or more brokers, with commas.
        topic: The topic to read; it has to exist.
        group: The consumer group, one per kind of stream.
        dlq_topic: Where rejected and failed events go; '' means `<topic>_dlq`, made if it does not exist.
        max_redeliveries: How often a failed event is given again.
        client_config: Passed to librdkafka, for example for security.

    Example:
        >>> producer = kafka_stream("localhost:9092", "orders", "order-triggers")
    """
    kafka = {"brokers": brokers, "source_topic": topic, "consumer_group": group, "client_config": client_config or {}}
    settings = Settings.model_validate({"kafka": kafka, "dlq": {"topic": dlq_topic}})
    return KafkaStreamProducer(settings, RedeliveryLimits(max_redeliveries=max_redeliveries))


class KafkaStreamProducer(SharedStreamProducer):
    """One consumer of one topic, for one shared stream.

    Args:
        settings: `kafka` says what to read, `dlq` where letters go. `worker_name_env` says who this host is, which
            counts where no list of triggers is run.
        limits: How often and how long; the defaults are those of `RedeliveryLimits`.
        source: Instead of a Kafka consumer.
        letters: Instead of the dead-letter topic.
        clock: Seconds, monotonic.
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
        """Prepare; nothing is connected before the stream is opened."""
        self._limits = limits or RedeliveryLimits()
        self._source = source or KafkaSource(settings, member_id(settings))
        self._letters = letters or KafkaDeadLetters(settings)
        self._clock = clock
        self._log: Redelivery[TopicPartition, SourceMessage] = Redelivery(self._limits)
        self._lanes: deque[TopicPartition] = deque()
        self._pulled: deque[SourceMessage] = deque()
        self._blame: dict[int, Blame] = {}
        self._error: TidemillError | None = None
        self._started = False
        self._wake = asyncio.Event()
        self._stood_seconds = 0.0
        self._given_at: float | None = None
        self._commit_timer: asyncio.TimerHandle | None = None
        self._sent: dict[TopicPartition, int] = {}
        self._writing: set[int] = set()
        self._settled = asyncio.Event()
        # Whose note was reported as unreadable.
        self._unreadable: set[TopicPartition] = set()

    # -- the manager's side -----------------------------------------------------------------------------------

    async def open_stream(self) -> AsyncIterator[tuple[SourceMessage, Event]]:
        """Connect, and yield messages with what `advance` wants back.

        Raises:
            AbsentSubscriberError: A trigger that failed an event, or left it unread, did not return in time.
            FencedError: Another process reads under this member's id.
            ConfigError: The dead-letter topic cannot be used.
            RemoteError: The brokers refuse, or the topic was created again.
        """
        self._started = True
        await self._letters.open()
        self._source.start(self)
        while True:
            self._check()
            delivery = self._next()
            if delivery is None:
                await self._rest()
                continue
            self._given_at = self._clock()
            yield delivery.held, delivery
            self._stood_seconds += self._standing()
            self._given_at = None

    def get_advance_lane(self, broker_payload: Event) -> TopicPartition:
        """Return the topic and the partition."""
        return broker_payload.lane

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Take outcomes: clean ones are committed soon, others are given again or dead-lettered.

        Raises:
            FencedError: Another process reads under this member's id.
            RemoteError: The consumer failed.
        """
        if self._error is not None:
            raise self._error
        now = self._time()
        for delivery, outcome in batch:
            blame = self._blame.pop(delivery.number, _NOBODY)
            ended = judge_outcome(*outcome, unread=blame.left_unread)
            bits = random.getrandbits(32)
            if self._log.resolve(delivery, ended, now, bits, blame.names, outcome.acked > 0):
                self._write(delivery, outcome, blame)
        self._wake.set()
        self._commit_soon()

    async def aclose(self) -> None:
        """Wait a little for letters and commits on their way, and leave the group, if this is still its member."""
        if not self._started:
            return
        if self._error is None:
            await self._until(lambda: not self._writing)
            self._commit()
            await self._until(lambda: not self._sent)
        if self._commit_timer is not None:
            self._commit_timer.cancel()
        # A member that was replaced would leave in the name of the one that replaced it.
        await self._source.close(leave=self._error is None)
        await self._letters.close()

    def stalled(self) -> str | None:
        """Say why nothing comes or goes, if that is known."""
        return self._letters.stalled() or self._source.stalled()

    # -- SubscriberObserver -------------------------------------------------------------------------------------------

    def subscriber_joined(self, trigger_id: Hashable) -> None:
        """See `SubscriberObserver`."""
        self._log.joined(trigger_id)
        self._wake.set()

    def subscriber_left(self, trigger_id: Hashable) -> None:
        """See `SubscriberObserver`."""
        self._log.left(trigger_id)

    def subscriber_gone(self, trigger_id: Hashable) -> None:
        """See `SubscriberObserver`."""
        self._log.gone(trigger_id)
        self._wake.set()
        self._commit_soon()

    def event_failed(
        self, broker_payload: Event, failures: Mapping[Hashable, str], unread: Collection[Hashable]
    ) -> None:
        """See `SubscriberObserver`."""
        blame = self._blame.setdefault(broker_payload.number, Blame())
        blame.failures.update(failures)
        blame.unread.update(unread)

    # -- what is given next -----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        overdue = self._log.overdue(self._time())
        if overdue is not None:
            raise AbsentSubscriberError(absence_text(overdue, self._limits.wait_seconds))

    def _next(self) -> Event | None:
        # One at a time, and numbered when it is given: who joins or leaves is numbered by the same count.
        again = self._log.take(self._time(), 1)
        if again:
            return again[0]
        while (message := self._pull()) is not None:
            lane = (message.topic, message.partition)
            found = self._log.admit(lane, message.offset, message, message.size_bytes)
            if isinstance(found, Delivery):
                return found
            if found is Skip.STALE:
                # The source drops what it fetched twice.
                raise RemoteError(
                    f"topic {message.topic!r}, partition {message.partition} went back to offset {message.offset}: "
                    f"the topic was created again; the stream ends and begins again there"
                )
        return None

    def _pull(self) -> SourceMessage | None:
        for _ in range(len(self._lanes)):
            if self._pulled:
                break
            lane = self._lanes[0]
            self._lanes.rotate(-1)
            if self._log.wants(lane):
                self._pulled.extend(self._source.pull(lane, _PULL_MESSAGES))
        return self._pulled.popleft() if self._pulled else None

    async def _rest(self) -> None:
        due = self._log.due()
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - self._time())):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _standing(self) -> float:
        if self._given_at is None:
            return 0.0
        return max(0.0, self._clock() - self._given_at - PAUSE_SECONDS)

    def _time(self) -> float:
        """Seconds, without those in which nothing was pulled."""
        return self._clock() - self._stood_seconds - self._standing()

    # -- letters and commits ----------------------------------------------------------------------------------

    def _write(self, delivery: Event, outcome: AdvanceOutcome, blame: Blame) -> None:
        self._writing.add(delivery.number)

        def confirmed() -> None:
            self._writing.discard(delivery.number)
            self._log.lettered(delivery)
            self._wake.set()
            self._settled.set()
            self._commit_soon()

        self._letters.put(letter_of(delivery, outcome, blame), confirmed)

    def _commit_soon(self) -> None:
        if self._commit_timer is None:
            self._commit_timer = asyncio.get_running_loop().call_later(COMMIT_SECONDS, self._commit)

    def _commit(self) -> None:
        if self._commit_timer is not None:
            self._commit_timer.cancel()
            self._commit_timer = None
        offsets = self._floors()
        if offsets and self._error is None:
            self._sent.update(offsets)
            self._source.commit(offsets)

    def _floors(self) -> dict[TopicPartition, int]:
        offsets = {}
        for commit in self._log.commits():
            self._source.note(commit.lane, encode_note(commit))
            offsets[commit.lane] = commit.floor
        return offsets

    async def _until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                while not condition():
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            log.warning("a stream ends with letters or commits that are not confirmed; events will be given again")

    # -- the source's side ------------------------------------------------------------------------------------

    def on_messages(self, partitions: Collection[TopicPartition]) -> None:
        """See `SourceEvents`."""
        self._wake.set()

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """See `SourceEvents`."""
        self._forget(partitions)
        for lane in partitions:
            self._log.assign(lane, self._past(lane))
            self._lanes.append(lane)
        self._wake.set()

    def _past(self, lane: TopicPartition) -> Commit[TopicPartition] | None:
        text = self._source.noted(lane)
        past = decode_note(lane, text)
        if text and past is None and lane not in self._unreadable:
            self._unreadable.add(lane)
            topic, partition = lane
            log.warning(
                "the note beside a committed offset cannot be read: all events from that offset on are given again, "
                "and their failures are counted from 0",
                topic=topic,
                partition=partition,
                note=redact_text(text[:_SHOWN_CHARACTERS]),
            )
        return past

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Give the floors to commit; what is outstanding is given again by the next reader of the partitions."""
        for lane in partitions:
            self._log.again(lane)
        floors = self._floors()
        kept = [lane for lane in floors if lane not in partitions]
        for lane in kept:
            del floors[lane]
            self._log.again(lane)
        self._forget(partitions)
        return floors

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """See `SourceEvents`."""
        self._forget(partitions)

    def _forget(self, partitions: Sequence[TopicPartition]) -> None:
        gone = set(partitions)
        for lane in gone:
            self._log.revoke(lane)
            self._sent.pop(lane, None)
        self._lanes = deque(lane for lane in self._lanes if lane not in gone)
        self._pulled = deque(m for m in self._pulled if (m.topic, m.partition) not in gone)
        self._settled.set()

    def on_committed(self, offsets: Mapping[TopicPartition, int], status: CommitStatus) -> None:
        """See `SourceEvents`."""
        for lane, offset in offsets.items():
            if status is CommitStatus.DONE:
                if self._sent.get(lane) == offset:
                    del self._sent[lane]
            elif lane in self._log:
                self._log.again(lane)
        if status is CommitStatus.AGAIN:
            self._commit_soon()
        self._settled.set()

    def on_fatal(self, fatal: Fatal, text: str) -> None:
        """See `SourceEvents`."""
        if fatal is Fatal.FENCED:
            text = (
                f"another process reads this stream under the same member id ({text}): it has taken this list over, or "
                f"runs the same trigger outside of a list; run it once, or give it a consumer group of its own"
            )
            self._error = FencedError(text)
        else:
            self._error = RemoteError(text)
        self._wake.set()
        self._settled.set()
