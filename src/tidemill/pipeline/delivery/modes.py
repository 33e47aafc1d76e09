"""The two delivery guarantees, at least once and exactly once, and all differences between them.

At least once: a result goes to its sink immediately, and its messages are committed when the sink has confirmed it.
Exactly once (`kafka.exactly_once`): a result waits in a buffer for the transaction that also commits its messages. The
mode is chosen when an engine is built; no other code depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import structlog

from tidemill.config.sections.delivery_settings import DeliverySettings
from tidemill.config.settings import Settings
from tidemill.core.delivery.send_items import SendLimits, WhenOpen
from tidemill.core.errors import ConfigError
from tidemill.core.ledger import LedgerEntry
from tidemill.core.retry import Backoff
from tidemill.deadletters.writer import DeadLetters, KafkaDeadLetters
from tidemill.pipeline.delivery.transaction_buffer import TransactionBuffer
from tidemill.pipeline.delivery.transaction_sender import TransactionSender
from tidemill.pipeline.delivery.transactional_letters import TransactionalDeadLetters
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.loop.deadline import Deadline
from tidemill.sinks.base import Sink
from tidemill.sinks.sending.batch_sender import BatchSender
from tidemill.sinks.sending.sender import Sender
from tidemill.sinks.sending.submission import Failure, Question
from tidemill.sources.base import Outgoing, TopicPartition
from tidemill.sources.transactional_producer import TransactionalProducer

if TYPE_CHECKING:
    from tidemill.sinks.kafka import KafkaSink

log = structlog.get_logger(__name__)

#: The time limit of the last transaction of revoked partitions.
LAST_TRANSACTION_SECONDS = 5.0

Ask = Callable[[Sender, Question], None]
GaveUp = Callable[[Sender, Failure], None]
#: Returns how many of these resolved messages of a partition may be committed now.
Cut = Callable[[TopicPartition, Sequence[LedgerEntry[TopicPartition, int]]], int]


class LastCommits(Protocol):
    """How a mode commits partitions that are being given up."""

    def surrender(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offsets to commit for the partitions, and forget the partitions."""

    async def finish(self, partitions: Collection[TopicPartition]) -> None:
        """Commit everything that is ready of the partitions, and wait for the confirmation."""


class DeliveryMode(Protocol):
    """How results are delivered, and how that limits commits."""

    @property
    def waits_for_sinks(self) -> bool:
        """Whether results wait for their sinks, so that a backlog holds back messages and tasks.

        A backlog that waits for a transaction must not, because it may wait for the very tasks that would be held back.
        """

    @property
    def binds_windows(self) -> bool:
        """Whether payloads of `on_window_complete` are committed with the window's messages, which wait for them."""

    @property
    def cut(self) -> Cut | None:
        """Limits the commit of resolved messages; None: no limit."""

    def make_sender(
        self, sink: Sink, settings: DeliverySettings, ask: Ask, gave_up: GaveUp, settled: Callable[[], None]
    ) -> Sender:
        """Return the sender of a sink.

        Raises:
            ConfigError: The mode does not support the sink.
        """
        ...

    def make_letters(self, settings: Settings) -> DeadLetters:
        """Return the writer of the dead-letter topic."""
        ...

    def make_producer(self, settings: Settings, identity: EngineIdentity) -> TransactionalProducer | None:
        """Return the producer that commits in transactions; None: commits are plain ones."""

    def attach(self, charge: Callable[[TopicPartition, int], None], changed: Callable[[], None]) -> None:
        """Connect the mode to its engine.

        Args:
            charge: Called with a change of the bytes that a partition has staged for its transaction.
            changed: Called when more may be committed than before.
        """

    def take(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, Sequence[Outgoing]]:
        """Return the records to send together with a commit of these next offsets."""
        ...

    def committed(self, partition: TopicPartition) -> None:
        """Drop the records that were sent with a partition's commit."""

    def failed(self, partitions: Collection[TopicPartition]) -> bool:
        """Offer the records of a failed commit again; return whether the next try needs a longer delay."""
        ...

    @property
    def last_commit_seconds(self) -> float:
        """The time limit of `surrender`."""

    async def surrender(
        self, commits: LastCommits, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, int]:
        """Return the offsets that the source still has to commit for partitions that are given up, by the deadline."""
        ...

    def abandon(self, partition: TopicPartition) -> None:
        """Forget a partition that was given up."""


class AtLeastOnce:
    """Results go to their sinks immediately; messages are committed when the sinks have confirmed their results."""

    waits_for_sinks = True
    binds_windows = False
    last_commit_seconds = 0.0
    cut: Cut | None = None

    def make_sender(
        self, sink: Sink, settings: DeliverySettings, ask: Ask, gave_up: GaveUp, settled: Callable[[], None]
    ) -> Sender:
        """Return a sender that sends batches."""
        return BatchSender(sink, make_limits(settings), settings.timeout_seconds, ask, gave_up, settled)

    def make_letters(self, settings: Settings) -> DeadLetters:
        """Return a writer with a producer of its own."""
        return KafkaDeadLetters(settings)

    def make_producer(self, settings: Settings, identity: EngineIdentity) -> None:
        """Return None: commits are plain ones."""

    def attach(self, charge: Callable[[TopicPartition, int], None], changed: Callable[[], None]) -> None:
        """Ignore both callbacks, because nothing is staged."""

    def take(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, Sequence[Outgoing]]:
        """Return no records, because results were already sent."""
        return {}

    def committed(self, partition: TopicPartition) -> None:
        """Do nothing: no records are staged."""

    def failed(self, partitions: Collection[TopicPartition]) -> bool:
        """Return False: a plain commit can be retried at once."""
        return False

    async def surrender(
        self, commits: LastCommits, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, int]:
        """Leave the last commit to the source."""
        return commits.surrender(partitions)

    def abandon(self, partition: TopicPartition) -> None:
        """Do nothing: payloads in flight may still arrive."""


class ExactlyOnce:
    """Results wait in a buffer for the transaction that commits their messages; all sinks are Kafka."""

    waits_for_sinks = False
    binds_windows = True

    def __init__(self) -> None:
        self._buffer = TransactionBuffer()

    @property
    def last_commit_seconds(self) -> float:
        """The time limit of the last transaction."""
        return LAST_TRANSACTION_SECONDS

    @property
    def cut(self) -> Cut | None:
        """Limits commits to whole transactions."""
        return self._buffer.cut

    def make_sender(
        self, sink: Sink, settings: DeliverySettings, ask: Ask, gave_up: GaveUp, settled: Callable[[], None]
    ) -> Sender:
        """Return a sender that puts payloads into the buffer.

        Raises:
            ConfigError: The sink is not a Kafka sink.
        """
        if sink.type != "kafka":
            raise ConfigError(f"{sink.section}: with kafka.exactly_once all sinks must be Kafka")
        kafka = cast("KafkaSink", sink)
        return TransactionSender(kafka, self._buffer, settings.max_retries, ask, gave_up, settled)

    def make_letters(self, settings: Settings) -> DeadLetters:
        """Return a writer that puts letters into the buffer."""
        return TransactionalDeadLetters(settings, self._buffer)

    def make_producer(self, settings: Settings, identity: EngineIdentity) -> TransactionalProducer:
        """Return the producer of the engine's transactions."""
        # The settings ensure that all sinks have the same overrides.
        overrides: dict[str, Any] = next((sink.client_config for sink in settings.sinks.kafka.values()), {})
        return TransactionalProducer(settings.kafka, identity.instance_id, overrides, self._buffer.limits)

    def attach(self, charge: Callable[[TopicPartition, int], None], changed: Callable[[], None]) -> None:
        """Connect the buffer to its engine."""
        self._buffer.charge = charge
        self._buffer.changed = changed

    def take(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, Sequence[Outgoing]]:
        """Return the buffered records of the messages before these offsets."""
        return {partition: self._buffer.take(partition, offset - 1) for partition, offset in offsets.items()}

    def committed(self, partition: TopicPartition) -> None:
        """Drop the records that were committed."""
        self._buffer.committed(partition)

    def failed(self, partitions: Collection[TopicPartition]) -> bool:
        """Put the records of a failed commit back; return False if single records were to blame."""
        # Blamed records are sent separately next time, or wait for a decision; other failures need time to recover.
        blamed = sum(self._buffer.aborted(partition) for partition in partitions)
        return not blamed

    async def surrender(
        self, commits: LastCommits, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, int]:
        """Commit the partitions in their last transaction, here; the source has nothing left to commit."""
        try:
            async with deadline.limit(self.last_commit_seconds):
                await commits.finish(partitions)
        except TimeoutError:
            log.warning("the last transaction of revoked partitions timed out; their messages will be redelivered")
        return {}

    def abandon(self, partition: TopicPartition) -> None:
        """Forget the buffered records of a partition."""
        self._buffer.abandon(partition)


def make_limits(settings: DeliverySettings) -> SendLimits:
    """Return the configured retry limits; batch sizes belong to each sink."""
    backoff, breaker = settings.retry_backoff, settings.breaker
    return SendLimits(
        budget_seconds=settings.max_seconds,
        backoff=Backoff(backoff.initial_seconds, backoff.max_seconds, backoff.multiplier),
        max_retries=settings.max_retries,
        breaker_failures=breaker.failures,
        breaker_seconds=breaker.open_seconds,
        when_open=WhenOpen.HOLD if breaker.when_open == "hold" else WhenOpen.GIVE_UP,
    )
