"""The two promises about delivery, at least once and exactly once, and everything in which they differ.

At least once, a result goes to its sink at once, and its messages are committed when the sink has confirmed it. Exactly
once (`kafka.exactly_once`), a result waits in a buffer and goes out, or not at all, in the transaction that commits its
messages. The mode is chosen when an engine is built; nothing else knows which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import structlog

from tidemill.config.delivery_settings import DeliverySettings
from tidemill.config.settings import Settings
from tidemill.core.delivery.send_items import Limits, WhenOpen
from tidemill.core.errors import ConfigError
from tidemill.core.ledger import LedgerEntry
from tidemill.core.retry import Backoff
from tidemill.deadletters.writer import DeadLetters, KafkaDeadLetters
from tidemill.pipeline.delivery.transaction_buffer import TransactionBuffer
from tidemill.pipeline.delivery.transaction_sender import TransactionSender
from tidemill.pipeline.delivery.transactional_letters import TransactionalDeadLetters
from tidemill.runtime.deadline import Deadline
from tidemill.runtime.identity import Identity
from tidemill.sinks.base import Sink
from tidemill.sinks.sending.batch_sender import BatchSender
from tidemill.sinks.sending.sender import Sender
from tidemill.sinks.sending.submission import Failure, Question
from tidemill.sources.base import Outgoing, TopicPartition
from tidemill.sources.transactional_producer import TransactionalProducer

if TYPE_CHECKING:
    from tidemill.sinks.kafka import KafkaSink

log = structlog.get_logger(__name__)

#: The last transaction of revoked partitions may take this long.
LAST_TRANSACTION_SECONDS = 5.0

Ask = Callable[[Sender, Question], None]
GaveUp = Callable[[Sender, Failure], None]
#: Returns how many of these resolved messages of a partition may be committed now.
Cut = Callable[[TopicPartition, Sequence[LedgerEntry[TopicPartition, int]]], int]


class LastCommits(Protocol):
    """What a mode needs of the commits of partitions that are given up."""

    def surrender(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return what must be committed of them, and forget them."""

    async def finish(self, partitions: Collection[TopicPartition]) -> None:
        """Commit everything that is ready of them; return when that is confirmed."""


class DeliveryMode(Protocol):
    """How results get out, and what may be committed meanwhile."""

    @property
    def waits_for_sinks(self) -> bool:
        """Whether results wait for their sinks, so that too many of them hold up messages and tasks.

        What waits for a transaction instead may wait for the very tasks that would be held up.
        """

    @property
    def binds_windows(self) -> bool:
        """Whether what a window's own hook returns goes out with its messages, so that these wait for it."""

    @property
    def cut(self) -> Cut | None:
        """Limits what is committed of what is resolved; None: nothing does."""

    def make_sender(
        self, sink: Sink, settings: DeliverySettings, ask: Ask, gave_up: GaveUp, settled: Callable[[], None]
    ) -> Sender:
        """Return what stands in front of a sink.

        Raises:
            ConfigError: The sink cannot be part of this mode.
        """
        ...

    def make_letters(self, settings: Settings) -> DeadLetters:
        """Return what writes to the dead-letter topic."""
        ...

    def make_producer(self, settings: Settings, identity: Identity) -> TransactionalProducer | None:
        """Return what commits in transactions; None: commits are plain ones."""

    def attach(self, charge: Callable[[TopicPartition, int], None], changed: Callable[[], None]) -> None:
        """Connect the mode to its engine.

        Args:
            charge: Called with the bytes that a partition has more, or fewer, waiting for its transaction.
            changed: Called when more may be committed than before.
        """

    def take(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, Sequence[Outgoing]]:
        """Return what goes out together with a commit of these next offsets."""
        ...

    def committed(self, partition: TopicPartition) -> None:
        """Forget what went out with the commit of a partition."""

    def failed(self, partitions: Collection[TopicPartition]) -> bool:
        """Offer again what was to go out with a commit; return whether the next try has to wait longer."""
        ...

    @property
    def last_commit_seconds(self) -> float:
        """How long `surrender` may take."""

    async def surrender(
        self, commits: LastCommits, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, int]:
        """Return what the source still has to commit of partitions that are given up; end by the deadline."""
        ...

    def abandon(self, partition: TopicPartition) -> None:
        """Forget a partition that was given up."""


class AtLeastOnce:
    """Results go to their sinks at once; their messages are committed when these have confirmed them."""

    waits_for_sinks = True
    binds_windows = False
    last_commit_seconds = 0.0
    cut: Cut | None = None

    def make_sender(
        self, sink: Sink, settings: DeliverySettings, ask: Ask, gave_up: GaveUp, settled: Callable[[], None]
    ) -> Sender:
        """Return a sender that batches."""
        return BatchSender(sink, make_limits(settings), settings.timeout_seconds, ask, gave_up, settled)

    def make_letters(self, settings: Settings) -> DeadLetters:
        """Return a writer with a producer of its own."""
        return KafkaDeadLetters(settings)

    def make_producer(self, settings: Settings, identity: Identity) -> None:
        """Return None: commits are plain ones."""

    def attach(self, charge: Callable[[TopicPartition, int], None], changed: Callable[[], None]) -> None:
        """Ignore both: nothing waits here."""

    def take(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, Sequence[Outgoing]]:
        """Return nothing: everything went out before."""
        return {}

    def committed(self, partition: TopicPartition) -> None:
        """Do nothing."""

    def failed(self, partitions: Collection[TopicPartition]) -> bool:
        """Return False: a plain commit can be tried again at once."""
        return False

    async def surrender(
        self, commits: LastCommits, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, int]:
        """Leave the last commit to the source."""
        return commits.surrender(partitions)

    def abandon(self, partition: TopicPartition) -> None:
        """Do nothing: what is in flight may still arrive."""


class ExactlyOnce:
    """Results wait in a buffer for the transaction that commits their messages; all sinks are Kafka."""

    waits_for_sinks = False
    binds_windows = True

    def __init__(self) -> None:
        """Start with an empty buffer."""
        self._buffer = TransactionBuffer()

    @property
    def last_commit_seconds(self) -> float:
        """How long the last transaction may take."""
        return LAST_TRANSACTION_SECONDS

    @property
    def cut(self) -> Cut | None:
        """Goes no further than whole transactions do."""
        return self._buffer.cut

    def make_sender(
        self, sink: Sink, settings: DeliverySettings, ask: Ask, gave_up: GaveUp, settled: Callable[[], None]
    ) -> Sender:
        """Return a sender that puts payloads into the buffer.

        Raises:
            ConfigError: It is not a Kafka sink.
        """
        if sink.type != "kafka":
            raise ConfigError(f"{sink.place}: with kafka.exactly_once all sinks have to be Kafka")
        kafka = cast("KafkaSink", sink)
        return TransactionSender(kafka, self._buffer, settings.max_retries, ask, gave_up, settled)

    def make_letters(self, settings: Settings) -> DeadLetters:
        """Return a writer that puts letters into the buffer."""
        return TransactionalDeadLetters(settings, self._buffer)

    def make_producer(self, settings: Settings, identity: Identity) -> TransactionalProducer:
        """Return the producer of the engine's transactions."""
        # The settings see to it that all sinks have the same.
        overrides: dict[str, Any] = next((sink.client_config for sink in settings.sinks.kafka.values()), {})
        return TransactionalProducer(settings.kafka, identity.instance_id, overrides, self._buffer.limits)

    def attach(self, charge: Callable[[TopicPartition, int], None], changed: Callable[[], None]) -> None:
        """Connect the buffer to its engine."""
        self._buffer.charge = charge
        self._buffer.changed = changed

    def take(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, Sequence[Outgoing]]:
        """Return what is in the buffer for the messages before these offsets."""
        return {partition: self._buffer.take(partition, offset - 1) for partition, offset in offsets.items()}

    def committed(self, partition: TopicPartition) -> None:
        """Forget what was taken out of the buffer: it is out."""
        self._buffer.committed(partition)

    def failed(self, partitions: Collection[TopicPartition]) -> bool:
        """Put back what was taken; the next try waits longer, unless single records are to blame."""
        # Those go by themselves the next time, or wait for a decision; everything else takes its time to recover.
        blamed = sum(self._buffer.aborted(partition) for partition in partitions)
        return not blamed

    async def surrender(
        self, commits: LastCommits, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, int]:
        """Commit them with their last transaction, here; nothing is left to the source."""
        try:
            async with deadline.limit(self.last_commit_seconds):
                await commits.finish(partitions)
        except TimeoutError:
            log.warning("the last transaction of revoked partitions did not end; their messages are redelivered")
        return {}

    def abandon(self, partition: TopicPartition) -> None:
        """Forget what is in the buffer for a partition."""
        self._buffer.abandon(partition)


def make_limits(settings: DeliverySettings) -> Limits:
    """Return what the configuration says about retries; batch sizes are each sink's own."""
    backoff, breaker = settings.retry_backoff, settings.breaker
    return Limits(
        budget_seconds=settings.max_seconds,
        backoff=Backoff(backoff.initial_seconds, backoff.max_seconds, backoff.multiplier),
        max_retries=settings.max_retries,
        breaker_failures=breaker.failures,
        breaker_seconds=breaker.open_seconds,
        when_open=WhenOpen.HOLD if breaker.when_open == "hold" else WhenOpen.GIVE_UP,
    )
