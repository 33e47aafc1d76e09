"""A Kafka sink under `kafka.exactly_once`: payloads are staged instead of sent.

`TransactionSender` replaces `BatchSender`. A payload is settled as soon as it is staged: from then on it is bound to
its messages, which cannot be committed without it. `on_delivery_error` decides about payloads that the brokers refuse;
until then their messages are withheld.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.core.delivery.send_items import AskDecision, Decision, GaveUp, Item, State
from tidemill.core.errors import InvariantError, escape_surrogates
from tidemill.pipeline.delivery.transaction_buffer import StagedRecord, TransactionBuffer
from tidemill.runtime.link.progress import SinkStats
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.log.user_code import explain_error
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sinks.base import Encoded
from tidemill.sinks.sending.delivery_batch import BatchPart, settle_all
from tidemill.sinks.sending.sender import Sender
from tidemill.sinks.sending.submission import DeliveryLane, Entry, Failure, Question, QueuedPayload, Submission
from tidemill.sources.base import Outgoing

if TYPE_CHECKING:
    from tidemill.sinks.kafka import KafkaSink

log = structlog.get_logger(__name__)


class TransactionSender:
    """One Kafka sink whose payloads are committed together with their messages' offsets.

    Args:
        sink: The topic, and the encoding of payloads.
        buffer: Where records wait for their transaction.
        max_retries: How often a refused payload is retried on request.
        ask: Called with questions about refused payloads; answered by `decided`.
        gave_up: Called with payloads that are not retried.
        settled: Called after payloads were settled.
    """

    def __init__(
        self,
        sink: KafkaSink,
        buffer: TransactionBuffer,
        max_retries: int,
        ask: Callable[[Sender, Question], None],
        gave_up: Callable[[Sender, Failure], None],
        settled: Callable[[], None],
    ) -> None:
        self.sink = sink
        self.stats = SinkStats()
        self._buffer = buffer
        self._max_retries = max_retries
        self._ask = ask
        self._gave_up = gave_up
        self._settled = settled
        self._limit: int | None = None
        # Payloads that await a decision, each with its staged record if it was staged.
        self._asked: dict[Entry, StagedRecord | None] = {}

    @property
    def label(self) -> str:
        """The sink's key in the configuration."""
        return f"sinks.{self.sink.type}.{self.sink.name}"

    @property
    def outstanding(self) -> int:
        """The number of payloads that await a decision."""
        return len(self._asked)

    async def connect(self) -> None:
        """Check that the topic exists; the source owns the producer."""
        self._limit = await self.sink.look_up()
        if self._limit is not None:
            self._buffer.limits.append(self._limit)

    def start(self, tasks: EngineTasks) -> None:
        """Attach the sender to the running loop."""
        self._loop = asyncio.get_running_loop()

    def add(self, payload: Any, lane: DeliveryLane, submission: Submission | BatchPart) -> None:
        """Stage a payload; if it can never be sent, ask about it in a later turn of the loop."""
        encoded = self._encode(payload, lane, submission)
        if encoded is None:
            return
        if not submission.origin.sources:
            raise InvariantError(f"{self.label}: a result without messages cannot be part of a transaction")
        self._buffer.put(submission.origin.sources, self._make_record(payload, encoded, submission))
        self._loop.call_soon(submission.settle)

    def add_all(self, payloads: Sequence[tuple[Any, BatchPart]], lane: DeliveryLane) -> None:
        """Stage payloads of a batch, in order; see `add`."""
        offsets: list[int] = []
        records: list[Outgoing] = []
        staged: list[BatchPart] = []
        size_bytes = 0
        for payload, part in payloads:
            encoded = self._encode(payload, lane, part)
            if encoded is not None:
                offsets.append(part.message.offset)
                records.append(self._make_record(payload, encoded, part))
                staged.append(part)
                size_bytes += encoded.size_bytes
        if staged:
            assert lane is not None  # the partition of the messages
            self._buffer.put_all(lane, offsets, records, size_bytes)
            self._loop.call_soon(settle_all, staged)

    def _encode(self, payload: Any, lane: DeliveryLane, submission: Submission | BatchPart) -> Encoded | None:
        """Return a payload's wire form; None if it can never be sent and `on_delivery_error` decides about it."""
        try:
            encoded = self.sink.encode(payload)
        except BaseException as error:  # encoding a user's data can raise any exception
            self._refuse(payload, lane, submission, explain_error(error, "encode"), oversize=False)
            return None
        if self._limit is not None and encoded.size_bytes > self._limit:
            text = f"topic {self.sink.topic} accepts up to {self._limit} bytes; the payload has {encoded.size_bytes}"
            self._refuse(payload, lane, submission, text, oversize=True)
            return None
        return encoded

    def _make_record(self, payload: Any, encoded: Encoded, submission: Submission | BatchPart) -> Outgoing:
        queued, body = QueuedPayload(payload, encoded, submission), encoded.body
        if len(body) == 2:
            return Outgoing(self.sink.topic, body[0], body[1], self, queued)
        key, value, headers, partition, timestamp = body
        return Outgoing(
            self.sink.topic, key, value, self, queued, headers=headers, partition=partition, timestamp=timestamp
        )

    def _refuse(
        self, payload: Any, lane: DeliveryLane, submission: Submission | BatchPart, text: str, *, oversize: bool
    ) -> None:
        item: Entry = Item(lane, None, 0, QueuedPayload(payload, None, submission))
        item.state = State.ASKED
        self._asked[item] = None
        self._note_error(text, 1)
        self._loop.call_soon(self._ask, self, AskDecision((item,), text, oversize, 1))

    # -- outcomes ---------------------------------------------------------------------------------------------

    def committed(self, count: int) -> None:
        """Count records that were committed."""
        self.stats.delivered_count += 1
        self.stats.delivered_payloads += count
        self.stats.last_delivered_at = time.time()

    def refused(self, records: Sequence[StagedRecord]) -> None:
        """Ask what to do about records that the brokers will never accept, or give them up after enough retries."""
        for staged in records:
            record = staged.result
            queued: QueuedPayload = record.ref
            error = record.error or ""
            # Its own submission is already settled. A new one represents the decision and releases the messages.
            submission = Submission(queued.submission.origin, 1, partial(self._buffer.drop, staged))
            item: Entry = Item(staged.lane, None, 0, QueuedPayload(queued.payload, queued.encoded, submission))
            self._note_error(error, 1)
            if record.attempts > self._max_retries:
                item.state = State.GONE
                self._gave_up(self, GaveUp((item,), error, record.oversize, record.attempts))
            else:
                item.state = State.ASKED
                self._asked[item] = staged
                self._ask(self, AskDecision((item,), error, record.oversize, record.attempts))

    def decided(self, question: Question, decision: Decision) -> None:
        """Carry out a decision; the caller settles dropped payloads."""
        for item in question.items:
            if item not in self._asked:
                continue
            staged = self._asked.pop(item)
            item.state = State.GONE
            if decision is Decision.RETRY and staged is not None:
                self.stats.retried += 1
                self._buffer.again(staged)
            elif decision is Decision.RETRY:
                self._gave_up(self, GaveUp((item,), question.error, question.oversize, question.attempts))
        self._settled()

    def abandon(self, lane: DeliveryLane) -> None:
        """Forget the open questions about a partition."""
        for item in [item for item in self._asked if item.lane == lane]:
            del self._asked[item]
            item.state = State.GONE

    def _note_error(self, text: str, count: int) -> None:
        stats = self.stats
        stats.error_count += 1
        stats.refused += count
        stats.last_error = escape_surrogates(text)[:2000]
        stats.last_error_at = time.time()
        throttle(log, 10.0).warning("a sink refused payloads", sink=self.label, payloads=count, error=text[:2000])

    def list_waiting(self) -> Iterable[Submission | BatchPart]:
        """Return the submissions that await a decision."""
        return dict.fromkeys(item.value.submission for item in self._asked)

    def describe_wait(self) -> str | None:
        """Return the number of payloads that await a decision; None if it is 0."""
        return f"{len(self._asked)} payloads are waiting for on_delivery_error" if self._asked else None

    async def close(self) -> None:
        self._asked.clear()
