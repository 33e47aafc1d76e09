"""A shared stream over one SQS queue: messages that every subscriber has resolved are deleted, SQS redelivers the rest.

Raw events are `SqsMessage`s. On a FIFO queue a lane is a message group; on other queues every message is a lane of its
own, so a slow one delays no other. A message stays invisible to other consumers while it is pending here
(`core.triggers.leases`). One that failed or was never read is left to its visibility timeout; SQS counts its deliveries
and moves it away if the queue has a `RedrivePolicy`. A rejected message is sent to another queue.

Invariants: a message is deleted only if it is clean, or if the other queue has confirmed the rejected copy. `advance`
never waits: deletions are collected, and retried until they succeed or the visibility timeout of the message passes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import structlog

from tidemill.core.errors import ConfigError, RemoteError, describe_error
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.streams.redelivery_items import RedeliveryVerdict, judge_outcome
from tidemill.core.triggers.leases import Leases
from tidemill.runtime.log.setup import throttle
from tidemill.triggers.producers.backlog import Backlog
from tidemill.triggers.producers.sqs_client import (
    SqsCallError,
    SqsDelivery,
    SqsMessage,
    SqsQueue,
    SqsSettings,
    open_client,
    open_queue,
    read_delivery,
)
from tidemill.triggers.shared_stream import AdvanceItem, SharedStreamProducer
from tidemill.triggers.stream_api import UPSTREAM_COUNTS, UpstreamCounts

log = structlog.get_logger(__name__)

#: The maximum time for which SQS allows a message to stay invisible.
MAX_HELD_SECONDS = 12 * 3600.0
#: How long closing waits for deletions and rejects in flight.
SETTLE_SECONDS = 5.0
#: The maximum number of messages per call.
BATCH = 10
_BACKOFF = Backoff(0.2, 30.0)
_LOG_SECONDS = 60.0


def sqs_stream(queue: str, **settings: Any) -> SqsStreamProducer:
    """Return a producer for `create_shared_stream_producer`.

    Args:
        queue: The name or URL of the queue; it must exist.
        settings: Further fields of `SqsSettings`.

    Example:
        >>> producer = sqs_stream("orders", reject_queue="orders-rejected", region="eu-central-1")
    """
    return SqsStreamProducer(SqsSettings(queue=queue, **settings))


class SqsStreamProducer(SharedStreamProducer):
    """One poll of one queue, for one shared stream.

    Args:
        settings: The queue, and how to read it.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, settings: SqsSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare; the stream connects when it is opened."""
        self._settings = settings
        self._clock = clock
        self._counts = UPSTREAM_COUNTS.get() or UpstreamCounts()
        self._leases = Leases(settings.visibility_seconds, MAX_HELD_SECONDS)
        self._leased = asyncio.Event()
        self._numbers = itertools.count()
        #: Messages that are kept invisible; `_unseen` has the messages that have not been yielded yet.
        self._pending: dict[int, SqsDelivery] = {}
        self._unseen: dict[int, SqsDelivery] = {}
        self._to_delete: Backlog[SqsDelivery] = Backlog()
        self._rejected: Backlog[SqsDelivery] = Backlog()
        self._stack = AsyncExitStack()
        self._queue: SqsQueue | None = None
        self._reject_queue: SqsQueue | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._error: Exception | None = None
        self._failing: dict[str, str] = {}

    # -- called by the manager ------------------------------------------------------------------------------------

    async def open_stream(self) -> AsyncIterator[tuple[SqsMessage, SqsDelivery]]:
        """Connect, and yield messages with the deliveries that `advance` expects back.

        Raises:
            ConfigError: A queue does not exist, or the client is not installed.
            RemoteError: SQS failed in a way that a retry cannot change.
        """
        queue = await self._open()
        failures = 0
        while True:
            self._check()
            asked = self._clock()
            try:
                found = await queue.receive(BATCH, self._settings.wait_seconds, self._settings.visibility_seconds)
            except SqsCallError as fault:
                failures = await self._retry(fault, failures, "receiving")
                continue
            failures = self._note_success("receiving")
            for held in [self._hold(queue, one, asked) for one in found]:
                self._check()
                del self._unseen[held.number]
                self._counts.redelivered += held.message.receive_count > 1
                yield held.message, held

    def get_advance_lane(self, broker_payload: SqsDelivery) -> Hashable:
        """Return the message group of a FIFO queue, or a lane for this message alone."""
        group = broker_payload.message.group_id
        return broker_payload.number if group is None else group

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        """Process outcomes: delete clean messages, move rejected ones, leave others to their visibility timeout.

        Raises:
            RemoteError: The stream has failed.
        """
        self._check()
        for held, outcome in batch:
            ended = judge_outcome(*outcome)
            if ended is RedeliveryVerdict.CLEAN:
                self._to_delete.add(held)
            elif ended is RedeliveryVerdict.REJECTED and self._reject_queue is not None:
                self._rejected.add(held)
            else:
                self._release(held)
                if ended is RedeliveryVerdict.REJECTED:
                    throttle(log, _LOG_SECONDS).warning(
                        "a message was rejected, but there is no reject_queue; SQS will redeliver it",
                        queue=held.message.queue,
                    )

    async def aclose(self) -> None:
        """Wait briefly for deletions and rejects in flight, and return messages that were not yielded."""
        tasks, self._tasks = self._tasks, []
        if tasks and self._error is None:
            await self._flush()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks and self._queue is not None:
            await self._return_unseen(self._queue)
        await self._stack.aclose()

    def describe_wait(self) -> str | None:
        """Return what the stream is waiting for, if that is known."""
        return "; ".join(self._failing.values()) or None

    # -- connecting and failing -------------------------------------------------------------------------------

    async def _open(self) -> SqsQueue:
        failures = 0
        while True:
            try:
                client = await open_client(self._stack, self._settings)
                self._queue = queue = await open_queue(client, self._settings.queue)
                if self._settings.reject_queue:
                    self._reject_queue = await open_queue(client, self._settings.reject_queue)
            except SqsCallError as fault:
                if fault.missing:
                    raise ConfigError(f"{fault}; create the queue, or configure another one") from fault
                await self._stack.aclose()
                failures = await self._retry(fault, failures, "connecting")
            else:
                break
        self._note_success("connecting")
        for work in (self._renew(queue), self._delete(queue), self._move()):
            self._tasks.append(asyncio.create_task(self._supervise(work), name=f"sqs[{queue.name}]"))
        return queue

    async def _supervise(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            # The next pull or advance raises the error.
            self._error = error
            log.warning("a stream over SQS failed", queue=self._settings.queue, error=describe_error(error))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _retry(self, fault: SqsCallError, failures: int, doing: str, most_seconds: float = 30.0) -> int:
        """Wait before the next attempt, and return the number of failures so far.

        Raises:
            RemoteError: A retry cannot help.
        """
        if not fault.passing:
            raise RemoteError(f"{fault}; the stream ends", retryable=False) from fault
        self._failing[doing] = f"{doing}: {fault}"
        throttle(log, _LOG_SECONDS).warning(
            "SQS failed; retrying the call", queue=self._settings.queue, doing=doing, error=str(fault)
        )
        await asyncio.sleep(min(most_seconds, _BACKOFF.compute_delay(failures + 1, random.getrandbits(JITTER_BITS))))
        return failures + 1

    def _note_success(self, doing: str) -> int:
        if self._failing:
            self._failing.pop(doing, None)
        return 0

    # -- messages held ------------------------------------------------------------------------------------------

    def _hold(self, queue: SqsQueue, found: Mapping[str, Any], asked: float) -> SqsDelivery:
        held = read_delivery(queue, next(self._numbers), found)
        self._pending[held.number] = self._unseen[held.number] = held
        self._leases.hold(held.number, asked)
        self._leased.set()
        return held

    def _release(self, held: SqsDelivery) -> None:
        self._leases.release(held.number)
        del self._pending[held.number]

    async def _renew(self, queue: SqsQueue) -> None:
        """Keep pending messages invisible."""
        failures = 0
        while True:
            await self._wait_until_due()
            self._note_lost()
            asked = self._clock()
            entries = [self._pending[number] for number in self._leases.list_due(asked, BATCH)]
            if not entries:
                continue
            fault = SqsCallError("SQS did not extend all messages of a batch")
            try:
                partly = await queue.extend(entries, self._settings.visibility_seconds)
            except SqsCallError as error:
                fault = error
            else:
                self._note_extended(entries, partly.refused | partly.failed, partly.refused, asked)
                if not partly.failed:
                    failures = self._note_success("extending")
                    continue
            failures = await self._retry(fault, failures, "extending", self._settings.visibility_seconds / 10)

    def _note_extended(
        self, entries: Sequence[SqsDelivery], left_out: frozenset[int], refused: frozenset[int], asked: float
    ) -> None:
        for held in entries:
            if held.number not in left_out:
                self._leases.note_renewed(held.number, asked)
            elif held.number in refused:
                # The message was deleted in the meantime, or received by another consumer.
                self._leases.release(held.number)

    async def _wait_until_due(self) -> None:
        while (due := self._leases.due) is None:
            self._leased.clear()
            await self._leased.wait()
        await asyncio.sleep(max(0.0, due - self._clock()))

    def _note_lost(self) -> None:
        lost = self._leases.give_up(self._clock())
        if lost:
            log.warning(
                "the visibility timeout of messages has expired; SQS will redeliver them",
                queue=self._settings.queue,
                messages=len(lost),
            )

    async def _return_unseen(self, queue: SqsQueue) -> None:
        unseen = list(self._unseen.values())
        if unseen:
            try:
                async with asyncio.timeout(SETTLE_SECONDS):
                    await queue.extend(unseen, 0)
            except (SqsCallError, TimeoutError) as error:
                log.info("unread messages stay invisible until their timeout", queue=queue.name, error=str(error))

    # -- settled messages --------------------------------------------------------------------------------------

    async def _delete(self, queue: SqsQueue) -> None:
        """Delete messages that are clean or were moved."""
        failures = 0
        while True:
            batch = await self._to_delete.wait_first(BATCH)
            fault = SqsCallError("SQS did not delete all messages of a batch")
            try:
                partly = await queue.delete(batch)
            except SqsCallError as error:
                fault = error
            else:
                done = [held for held in batch if held.number not in partly.failed]
                for held in done:
                    self._release(held)
                self._to_delete.remove(done)
                if partly.refused:
                    log.warning("messages were redelivered before they could be deleted", queue=queue.name)
                if not partly.failed:
                    failures = self._note_success("deleting")
                    continue
            failures = await self._retry(fault, failures, "deleting")

    async def _move(self) -> None:
        """Send rejected messages to their queue, then mark them for deletion."""
        failures = 0
        while True:
            (held,) = await self._rejected.wait_first(1)
            assert self._reject_queue is not None
            try:
                await self._reject_queue.send(held)
            except SqsCallError as fault:
                # Retry forever: the message stays in its queue until the other queue accepts the copy.
                failures = await self._retry(SqsCallError(str(fault)), failures, "moving a rejected message")
                continue
            failures = self._note_success("moving a rejected message")
            self._counts.add_letter("rejected")
            self._to_delete.add(held)
            self._rejected.remove([held])

    async def _flush(self) -> None:
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._rejected.wait_empty()
                await self._to_delete.wait_empty()
        except TimeoutError:
            log.warning("closing a stream before all deletions are confirmed", queue=self._settings.queue)
