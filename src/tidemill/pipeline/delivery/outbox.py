"""The exit of an engine: routes hooks' payloads to sinks, and releases a result when all its payloads are settled.

A payload is settled when its sink has confirmed it, when `on_delivery_error` has skipped it, or when its dead letter is
confirmed. Invariants: all sink names of a result are resolved before any of it is delivered. `released` is called at
most once per submission, on the loop, never inside `submit`; after `close`, or for an abandoned partition, it is never
called. `core.delivery.send_queue` decides what to send when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog

from tidemill.config.sections.delivery_settings import DeliverySettings
from tidemill.core.delivery.send_items import Decision
from tidemill.deadletters.letter import Letter, LetterKind
from tidemill.deadletters.payloads import encode_payload
from tidemill.deadletters.writer import DeadLetters
from tidemill.pipeline.delivery.idempotency import name_payloads
from tidemill.pipeline.delivery.modes import AtLeastOnce, DeliveryMode
from tidemill.pipeline.delivery.routing import Origin, RoutedPayload, Router
from tidemill.pipeline.handler.models import DeliveryAction, DeliveryError
from tidemill.pipeline.hooks import HookCalls, begin_hook, call_hook, check_returned, log_hook_error
from tidemill.runtime.kafka.source_message import MessageSpan, span_messages
from tidemill.runtime.link.progress import SinkStats
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sinks.base import Sink, SinksByName
from tidemill.sinks.sending.delivery_batch import BatchPart
from tidemill.sinks.sending.sender import Sender, connect_sender
from tidemill.sinks.sending.submission import DeliveryLane, Entry, Failure, Question, Submission

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 30.0
DeliveryHook = Callable[[DeliveryError], Awaitable[DeliveryAction]]


class OutboxStatistics(msgspec.Struct, frozen=True):
    """Counts of payloads.

    Attributes:
        delivered: Payloads that a sink confirmed.
        skipped: Payloads that the hook skipped.
        sinks: The statistics of each sink, by its key in the configuration (`sinks.<type>.<name>`).
    """

    delivered: int
    skipped: int
    sinks: dict[str, SinkStats]


class Outbox:
    """All sinks of an engine.

    Args:
        sinks: Sinks by type and name.
        letters: Dead letters for refused payloads.
        on_delivery_error: Decides about refused payloads; None: dead-letter them.
        settings: Retry limits and circuit breakers.
        mode: The delivery guarantee; None: at least once.
        connect_seconds: The time limit for connecting the sinks.
        group: The consumer group, for idempotency keys.
    """

    def __init__(
        self,
        sinks: Mapping[str, Mapping[str, Sink]],
        letters: DeadLetters,
        on_delivery_error: DeliveryHook | None = None,
        settings: DeliverySettings | None = None,
        mode: DeliveryMode | None = None,
        *,
        connect_seconds: float = CONNECT_SECONDS,
        group: str = "",
    ) -> None:
        """Prepare; nothing is connected before `connect`."""
        self._settings = settings or DeliverySettings()
        self.mode = mode or AtLeastOnce()
        self._letters = letters
        self._hook = on_delivery_error
        self._connect_seconds = connect_seconds
        self._senders = {
            kind: {name: self._make_sender(sink) for name, sink in named.items()} for kind, named in sinks.items()
        }
        #: Finds the sinks of payloads.
        self.router = Router(self._senders)
        self.route, self.route_one = self.router.route, self.router.route_one
        self._all = [sender for named in self._senders.values() for sender in named.values()]
        self._group = group
        self._names = any(sender.sink.takes_idempotency_key for sender in self._all)
        #: Runs its tasks; an engine sets its own.
        self.tasks = EngineTasks()
        #: Registers running calls of its hook; an engine sets its own.
        self.calls: HookCalls | None = None
        self._hooks: set[asyncio.Task[None]] = set()
        self._letters_open = 0
        self._idle: asyncio.Event | None = None
        self._closed = False

    def _make_sender(self, sink: Sink) -> Sender:
        return self.mode.make_sender(sink, self._settings, self._ask, self._gave_up, self._changed)

    # -- reports -----------------------------------------------------------------------------------------------

    def statistics(self) -> OutboxStatistics:
        sinks = {
            sender.label: msgspec.structs.replace(sender.stats, sends=sender.stats.sends.copy()) for sender in self._all
        }
        return OutboxStatistics(
            sum(stats.delivered_payloads for stats in sinks.values()),
            sum(stats.skipped for stats in sinks.values()),
            sinks,
        )

    def list_waiting(self) -> dict[tuple[str, int], list[tuple[str, int, int]]]:
        """Return, by partition, the sinks that results wait for, each with the first and last offset of a result."""
        found: dict[tuple[str, int], list[tuple[str, int, int]]] = {}
        for sender in self._all:
            for submission in sender.list_waiting():
                sources = submission.origin.sources
                if sources:
                    lane = (sources[0].topic, sources[0].partition)
                    found.setdefault(lane, []).append((sender.label, sources[0].offset, sources[-1].offset))
        return found

    def name_sinks(self) -> SinksByName:
        """Return the sinks for `Handler.on_ready`."""
        return SinksByName(
            {f"{kind}.{name}": sender.sink for kind, named in self._senders.items() for name, sender in named.items()}
        )

    def describe_wait(self) -> dict[str, str]:
        """Return what is waiting, and why, by the sink's configuration key, or 'dead letters'."""
        reasons = {sender.label: sender.describe_wait() for sender in self._all}
        reasons["dead letters"] = self._letters.describe_wait()
        return {label: reason for label, reason in reasons.items() if reason is not None}

    # -- life cycle --------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect all sinks, in parallel; if one fails, close the others.

        Raises:
            TidemillError: The error of the first sink that failed; its text names the sink.
        """
        tasks = [asyncio.ensure_future(connect_sender(sender, self._connect_seconds)) for sender in self._all]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()
            raise
        for sender in self._all:
            sender.start(self.tasks)

    async def flush(self, deadline_seconds: float) -> None:
        """Wait until nothing is in flight, including letters, or the deadline has passed."""
        try:
            async with asyncio.timeout(deadline_seconds):
                while self._letters_open or any(sender.outstanding for sender in self._all):
                    self._idle = asyncio.Event()
                    await self._idle.wait()
        except TimeoutError:
            left = sum(sender.outstanding for sender in self._all)
            log.warning("deliveries did not finish before the deadline", payloads=left, letters=self._letters_open)
        finally:
            self._idle = None

    def abandon(self, lane: DeliveryLane) -> None:
        """Forget the payloads of a partition that was given up; those in flight may still arrive."""
        for sender in self._all:
            sender.abandon(lane)
        self._changed()

    async def close(self) -> None:
        """Drop the remaining payloads and close all sinks; errors are logged."""
        self._closed = True
        await self.tasks.stop(*self._hooks)
        await asyncio.gather(*(sender.close() for sender in self._all))

    def _changed(self) -> None:
        if self._idle is not None:
            self._idle.set()

    # -- deliveries --------------------------------------------------------------------------------------------

    def submit(self, routed: Sequence[RoutedPayload], origin: Origin, released: Callable[[], None]) -> None:
        """Deliver payloads; `released` is called once all are settled."""
        if self._closed:
            return
        if not routed:
            asyncio.get_running_loop().call_soon(released)
            return
        if self._names:
            name_payloads(routed, origin, self._group)
        submission = Submission(origin, len(routed), released)
        lane = (origin.sources[0].topic, origin.sources[0].partition) if origin.sources else None
        for each in routed:
            each.sender.add(each.payload, lane, submission)

    def submit_part(self, part: BatchPart, routed: Sequence[RoutedPayload]) -> None:
        """Deliver one or more payloads of one part of a batch."""
        if self._closed:
            return
        if self._names:
            name_payloads(routed, part, self._group)
        lane = (part.message.topic, part.message.partition)
        for each in routed:
            each.sender.add(each.payload, lane, part)

    def submit_run(self, parts: Sequence[BatchPart], routed: Sequence[Sequence[RoutedPayload]]) -> None:
        """Deliver the payloads of a batch; `routed` has the payloads of each part."""
        if self._closed:
            return
        first = parts[0].message
        lane = (first.topic, first.partition)
        by_sender: dict[Sender, list[tuple[Any, BatchPart]]] = {}
        for part, payloads in zip(parts, routed, strict=True):
            if self._names:
                name_payloads(payloads, part, self._group)
            for each in payloads:
                if (chosen := by_sender.get(each.sender)) is None:
                    chosen = by_sender[each.sender] = []
                chosen.append((each.payload, part))
        for sender, chosen in by_sender.items():
            sender.add_all(chosen, lane)

    # -- refused payloads --------------------------------------------------------------------------------------

    def _ask(self, sender: Sender, question: Question) -> None:
        if self._closed:
            return
        if self._hook is None:
            self._drop(sender, question, DeliveryAction.DLQ)
            return
        task = self.tasks.run("on_delivery_error", self._ask_hook(self._hook, sender, question))
        self._hooks.add(task)
        task.add_done_callback(self._hooks.discard)

    async def _ask_hook(self, hook: DeliveryHook, sender: Sender, question: Question) -> None:
        error = DeliveryError(
            sender.sink.name,
            sender.sink.type,
            question.error,
            [item.value.payload for item in question.items],
            question.attempts,
        )
        try:
            returned = await call_hook(begin_hook(hook, error), self.calls, "on_delivery_error", _locate, question)
            action = check_returned(DeliveryAction, returned)
        except Exception as raised:
            event = "on_delivery_error raised, or did not return a DeliveryAction; the payloads are dead-lettered"
            log_hook_error(log, "on_delivery_error", raised, event, sink=sender.label)
            action = DeliveryAction.DLQ
        if self._closed:
            return
        if action is DeliveryAction.RETRY:
            sender.decided(question, Decision.RETRY)
        else:
            self._drop(sender, question, action)

    def _drop(self, sender: Sender, question: Question, action: DeliveryAction) -> None:
        # Items that were abandoned meanwhile belong to the engine that owns the partition now.
        items = [item for item in question.items if not item.gone]
        sender.decided(question, Decision.DROP)
        if action is DeliveryAction.SKIP:
            sender.stats.skipped += len(items)
            for item in items:
                item.value.submission.settle()
        else:
            self._dead_letter(sender, items, question.error, question.oversize, question.attempts)
        self._changed()

    def _gave_up(self, sender: Sender, failure: Failure) -> None:
        self._dead_letter(sender, failure.items, failure.error, failure.oversize, failure.attempts)

    def _dead_letter(self, sender: Sender, items: Sequence[Entry], error: str, oversize: bool, attempts: int) -> None:
        """Write one letter per submission."""
        by_submission: dict[Submission | BatchPart, list[Any]] = {}
        for item in items:
            by_submission.setdefault(item.value.submission, []).append(item.value.payload)
        for submission, payloads in by_submission.items():
            sender.stats.dead_lettered += len(payloads)
            self._letters_open += 1
            origin: Origin | BatchPart = submission.origin
            letter = Letter.about(
                origin.sources,
                LetterKind.OVERSIZE if oversize else LetterKind.DELIVERY,
                error,
                attempts=attempts,
                payloads=[encode_payload(payload) for payload in payloads],
                sink=(sender.sink.type, sender.sink.name),
                task_id=origin.task.task_id if origin.task else None,
                args=origin.task.args if origin.task else (),
            )
            self._letters.put(letter, partial(self._letter_written, submission, len(payloads)))

    def _letter_written(self, submission: Submission | BatchPart, count: int) -> None:
        self._letters_open -= 1
        if not self._closed:
            submission.settle(count)
        self._changed()


def _locate(question: Question) -> MessageSpan:
    return span_messages(question.items[0].value.submission.origin.sources) if question.items else MessageSpan()
