"""Dead letters under `kafka.exactly_once`: staged, and written in the transaction that commits their messages.

Invariant: a letter is committed together with the offsets of its messages, or neither is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import structlog

from tidemill.config.settings import Settings
from tidemill.core.delivery.pending_records import StagedState
from tidemill.deadletters.letter import Letter, LetterKind, encode_letter
from tidemill.deadletters.writer import RECORD_OVERHEAD_BYTES, LetterStatistics, prepare_letter_topic
from tidemill.pipeline.delivery.transaction_buffer import StagedRecord, TransactionBuffer
from tidemill.runtime.kafka.client import make_client_config
from tidemill.runtime.log.setup import throttle
from tidemill.sources.base import Outgoing

log = structlog.get_logger(__name__)


class TransactionalDeadLetters:
    """Dead letters that are committed together with the offsets of their messages.

    Args:
        settings: The pipeline's settings.
        buffer: Where they wait for their transaction.
    """

    def __init__(self, settings: Settings, buffer: TransactionBuffer) -> None:
        """Prepare; nothing is connected before `open`."""
        self._topic = settings.dlq_topic
        self._admin_config = make_client_config(settings.kafka, settings.dlq_brokers, {})
        self._buffer = buffer
        self._limit = 1_000_000
        self._failing: str | None = None
        self._owners: dict[LetterKind, _OfKind] = {}
        self._written = 0
        self._kinds: Counter[str] = Counter()

    async def open(self) -> None:
        """Check that the topic exists, or create it.

        Raises:
            ConfigError: It does not exist and may not be created.
            RemoteError: The brokers do not answer.
        """
        limit = await asyncio.to_thread(prepare_letter_topic, self._topic, self._admin_config)
        if limit is not None:
            self._limit = limit
            self._buffer.limits.append(limit)

    def put(self, letter: Letter, done: Callable[[], None]) -> None:
        """Stage a letter; `done` is called in a later turn of the loop."""
        body = encode_letter(letter, self._limit - RECORD_OVERHEAD_BYTES)
        owner = self._owners.setdefault(letter.kind, _OfKind(self, letter.kind))
        self._buffer.put(letter.sources, Outgoing(self._topic, None, body, owner, letter))
        asyncio.get_running_loop().call_soon(done)

    def committed(self, kind: LetterKind, count: int) -> None:
        """Count letters that were committed."""
        self._written += count
        self._kinds[kind.value] += count
        self._failing = None

    def refused(self, records: Sequence[StagedRecord]) -> None:
        """Retry letters indefinitely; shrink those that were refused for their size."""
        for staged in records:
            record = staged.result
            self._failing = record.error
            throttle(log, 10.0).error("a dead letter was refused; retrying", topic=self._topic, error=record.error)
            if record.oversize and record.value is not None:
                before = record.size_bytes
                record.value = encode_letter(record.ref, len(record.value) * 3 // 4)
                self._buffer.charge(staged.lane, record.size_bytes - before)
            if staged.state is StagedState.UNDECIDED:
                self._buffer.again(staged)

    def statistics(self) -> LetterStatistics:
        """Return how many letters were committed; none is ever dropped."""
        return LetterStatistics(self._written, self._kinds)

    def describe_wait(self) -> str | None:
        """Return why letters are waiting; None: no letter waits."""
        return None if self._failing is None else f"dead letters are waiting for topic {self._topic}: {self._failing}"

    async def close(self) -> None:
        """Do nothing: there are no resources to close."""


class _OfKind:
    """The owner of the staged letters of one kind, so that committed letters are counted by kind."""

    def __init__(self, letters: TransactionalDeadLetters, kind: LetterKind) -> None:
        self._letters = letters
        self._kind = kind

    def committed(self, count: int) -> None:
        self._letters.committed(self._kind, count)

    def refused(self, records: Sequence[StagedRecord]) -> None:
        self._letters.refused(records)
