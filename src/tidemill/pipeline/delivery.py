"""The way out of an engine: routes what hooks return to sinks, and releases a result when all of it is settled.

A payload is settled when its sink confirmed it, when `on_delivery_error` chose to skip it, or when its dead letter is
confirmed. Invariants: names are resolved before anything of a result is delivered; `released` is called at most once
per submission, on the loop, never inside `submit`; after `close`, or for an abandoned partition, it is never called.
What to send when is decided by `core.outbox`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog

from tidemill.core.errors import (
    AmbiguousSinkError,
    RemoteError,
    SinkNotConfiguredError,
    TidemillError,
    said,
)
from tidemill.core.outbox_items import Decision, Limits
from tidemill.core.retry import Backoff
from tidemill.pipeline.batcher import (
    Batcher,
    DeliveryLane,
    Entry,
    Failure,
    Question,
    SinkStats,
    Submission,
)
from tidemill.pipeline.hooks import called
from tidemill.pipeline.models import DeliveryAction, DeliveryError, ExecutorTask
from tidemill.runtime.deadletter import DeadLetters, Letter, LetterKind, letter_sources, payload_json, redrives_of
from tidemill.runtime.messages import SourceMessage
from tidemill.sinks.base import Sink
from tidemill.sinks.payloads import CollectResult, FilePayload, KafkaPayload

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 30.0
#: Field of `CollectResult`, type of sink, and the class of its payloads where it is known.
_FIELDS: Sequence[tuple[str, str, type | None]] = (
    ("kafka", "kafka", KafkaPayload),
    ("postgres", "postgres", None),
    ("mongo", "mongo", None),
    ("http", "http", None),
    ("redis", "redis", None),
    ("files", "filesystem", FilePayload),
)

DeliveryHook = Callable[[DeliveryError], Awaitable[DeliveryAction]]


class Origin(msgspec.Struct):
    """Where payloads come from, for their order and for letters; all sources are of one partition."""

    sources: Sequence[SourceMessage]
    task: ExecutorTask | None = None


class Routed(msgspec.Struct, gc=False):
    """A payload whose sink is known."""

    batcher: Batcher
    payload: Any


class Outbox:
    """All sinks of an engine.

    Args:
        sinks: Instances by type and name.
        letters: Where payloads go that nobody takes.
        on_delivery_error: Decides about refused payloads; None: dead letters.
        budget_seconds: How long a payload is tried again before somebody is asked.
        backoff: Between tries.
        connect_seconds: How long sinks may take to connect.
    """

    def __init__(
        self,
        sinks: Mapping[str, Mapping[str, Sink]],
        letters: DeadLetters,
        on_delivery_error: DeliveryHook | None = None,
        *,
        budget_seconds: float = 600.0,
        backoff: Backoff | None = None,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        """Prepare; nothing is connected before `connect`."""
        limits = Limits(budget_seconds=budget_seconds, backoff=backoff or Backoff(0.1, 10.0))
        self._letters = letters
        self._hook = on_delivery_error
        self._connect_seconds = connect_seconds
        self._batchers = {
            kind: {name: Batcher(sink, limits, self._ask, self._gave_up, self._changed) for name, sink in named.items()}
            for kind, named in sinks.items()
        }
        self._all = [batcher for named in self._batchers.values() for batcher in named.values()]
        self._hooks: set[asyncio.Task[None]] = set()
        self._letters_open = 0
        self._idle: asyncio.Event | None = None
        self._closed = False

    # -- counts ------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, SinkStats]:
        """What happened, by the sink's place in the configuration (`sinks.<type>.<name>`)."""
        return {batcher.label: batcher.stats for batcher in self._all}

    @property
    def delivered(self) -> int:
        """Payloads that a sink confirmed."""
        return sum(batcher.stats.delivered_payloads for batcher in self._all)

    @property
    def skipped(self) -> int:
        """Payloads that the hook chose to skip."""
        return sum(batcher.stats.skipped for batcher in self._all)

    def stalled(self) -> dict[str, str]:
        """Return what waits, and why, by the sink's place; 'dead letters' for those."""
        reasons = {batcher.label: batcher.stalled() for batcher in self._all}
        reasons["dead letters"] = self._letters.stalled()
        return {label: reason for label, reason in reasons.items() if reason is not None}

    # -- life --------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect all sinks, in parallel; if one fails, close the others.

        Raises:
            TidemillError: What the first sink that failed said, with its name.
        """
        tasks = [asyncio.ensure_future(self._connect(batcher)) for batcher in self._all]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()
            raise
        for batcher in self._all:
            batcher.start()

    async def _connect(self, batcher: Batcher) -> None:
        try:
            async with asyncio.timeout(self._connect_seconds):
                await batcher.sink.connect()
        except TidemillError:
            raise
        except TimeoutError:
            raise RemoteError(f"{batcher.label}: no connection within {self._connect_seconds:g} s") from None
        except Exception as error:
            raise RemoteError(f"{batcher.label}: {said(error)}") from error

    async def flush(self, deadline_seconds: float) -> None:
        """Wait until nothing is in hand, letters included, or the deadline is over."""
        try:
            async with asyncio.timeout(deadline_seconds):
                while self._letters_open or any(batcher.outstanding for batcher in self._all):
                    self._idle = asyncio.Event()
                    await self._idle.wait()
        except TimeoutError:
            left = sum(batcher.outstanding for batcher in self._all)
            log.warning("deliveries were not done in time", payloads=left, letters=self._letters_open)
        finally:
            self._idle = None

    def abandon(self, lane: DeliveryLane) -> None:
        """Forget the payloads of a partition that was given up; what is in flight may still arrive."""
        for batcher in self._all:
            batcher.abandon(lane)
        self._changed()

    async def close(self) -> None:
        """Give up what is left and close all sinks; errors are logged."""
        self._closed = True
        for task in list(self._hooks):
            task.cancel()
        await asyncio.gather(*self._hooks, return_exceptions=True)
        await asyncio.gather(*(batcher.close() for batcher in self._all))

    def _changed(self) -> None:
        if self._idle is not None:
            self._idle.set()

    # -- in ----------------------------------------------------------------------------------------------------

    def route(self, collect: CollectResult) -> list[Routed]:
        """Resolve the sink of every payload.

        Raises:
            SinkNotConfiguredError: A payload names a sink that does not exist.
            AmbiguousSinkError: A payload names none where there are several.
            TypeError: A field has something that is no payload of its type.
        """
        routed: list[Routed] = []
        for field, kind, payload_class in _FIELDS:
            payloads = getattr(collect, field)
            if not payloads:
                continue
            for payload in payloads:
                if payload_class is not None and not isinstance(payload, payload_class):
                    raise TypeError(
                        f"CollectResult.{field} takes {payload_class.__name__}, not {type(payload).__name__}"
                    )
                routed.append(Routed(self._batcher(kind, getattr(payload, "sink", "")), payload))
        return routed

    def _batcher(self, kind: str, name: str) -> Batcher:
        named = self._batchers.get(kind)
        if not named:
            raise SinkNotConfiguredError(f"no sink of type {kind!r} is configured; add sinks.{kind}.<name>")
        if name:
            batcher = named.get(name)
            if batcher is None:
                raise SinkNotConfiguredError(f"sinks.{kind}.{name} is not configured; there is {_listed(named)}")
            return batcher
        if len(named) > 1:
            raise AmbiguousSinkError(f"several sinks of type {kind!r} are configured, name one: {_listed(named)}")
        return next(iter(named.values()))

    def submit(self, routed: Sequence[Routed], origin: Origin, released: Callable[[], None]) -> None:
        """Deliver; `released` is called once everything is settled."""
        if self._closed:
            return
        if not routed:
            asyncio.get_running_loop().call_soon(released)
            return
        submission = Submission(origin, len(routed), released)
        lane = (origin.sources[0].topic, origin.sources[0].partition) if origin.sources else None
        for each in routed:
            each.batcher.add(each.payload, lane, submission)

    # -- what sinks refuse -------------------------------------------------------------------------------------

    def _ask(self, batcher: Batcher, question: Question) -> None:
        if self._closed:
            return
        if self._hook is None:
            self._drop(batcher, question, DeliveryAction.DLQ)
            return
        task = asyncio.ensure_future(self._asked(self._hook, batcher, question))
        self._hooks.add(task)
        task.add_done_callback(self._hooks.discard)

    async def _asked(self, hook: DeliveryHook, batcher: Batcher, question: Question) -> None:
        error = DeliveryError(
            batcher.sink.name,
            batcher.sink.type,
            question.error,
            [item.value.payload for item in question.items],
            question.attempts,
        )
        try:
            action = DeliveryAction(await called(hook(error)))
        except Exception as raised:
            log.warning(
                "on_delivery_error raised, or returned no DeliveryAction; dead-lettering",
                sink=batcher.label,
                exc_info=raised,
            )
            action = DeliveryAction.DLQ
        if self._closed:
            return
        if action is DeliveryAction.RETRY:
            batcher.decided(question, Decision.RETRY)
        else:
            self._drop(batcher, question, action)

    def _drop(self, batcher: Batcher, question: Question, action: DeliveryAction) -> None:
        # What was abandoned meanwhile belongs to whoever has the partition now.
        items = [item for item in question.items if not item.gone]
        batcher.decided(question, Decision.DROP)
        if action is DeliveryAction.SKIP:
            batcher.stats.skipped += len(items)
            for item in items:
                item.value.submission.settle()
        else:
            self._dead_letter(batcher, items, question.error, question.oversize, question.attempts)
        self._changed()

    def _gave_up(self, batcher: Batcher, failure: Failure) -> None:
        self._dead_letter(batcher, failure.items, failure.error, failure.oversize, failure.attempts)

    def _dead_letter(self, batcher: Batcher, items: Sequence[Entry], error: str, oversize: bool, attempts: int) -> None:
        """Write one letter per submission."""
        by_submission: dict[Submission, list[Any]] = {}
        for item in items:
            by_submission.setdefault(item.value.submission, []).append(item.value.payload)
        for submission, payloads in by_submission.items():
            batcher.stats.dead_lettered += len(payloads)
            self._letters_open += 1
            origin: Origin = submission.origin
            letter = Letter(
                kind=LetterKind.OVERSIZE if oversize else LetterKind.DELIVERY,
                error=error,
                original_payloads=[payload_json(payload) for payload in payloads],
                sink_name=batcher.sink.name,
                sink_type=batcher.sink.type,
                partition=origin.sources[0].partition if origin.sources else None,
                attempt_count=attempts,
                redrives=redrives_of(origin.sources),
                task_id=origin.task.task_id if origin.task else None,
                args=[str(arg) for arg in origin.task.args] if origin.task else [],
                sources=letter_sources(origin.sources),
            )
            self._letters.put(letter, partial(self._letter_written, submission, len(payloads)))

    def _letter_written(self, submission: Submission, count: int) -> None:
        self._letters_open -= 1
        if not self._closed:
            submission.settle(count)
        self._changed()


def payloads_of(collect: CollectResult) -> list[str]:
    """Return the payloads of a result that is not delivered, as JSON for its letter."""
    fields = [getattr(collect, field) for field, _, _ in _FIELDS]
    return [payload_json(payload) for field in fields if isinstance(field, Sequence) for payload in field]


def _listed(named: Mapping[str, object]) -> str:
    return ", ".join(sorted(named))
