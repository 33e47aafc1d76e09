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
from typing import TYPE_CHECKING, Any, cast

import msgspec
import structlog

from tidemill.config.delivery_settings import DeliverySettings
from tidemill.config.sink_types import SINK_TYPES, load_class, sink_section
from tidemill.core.delivery.send_items import Decision, Limits, WhenOpen
from tidemill.core.errors import (
    AmbiguousSinkError,
    ConfigError,
    RemoteError,
    SinkNotConfiguredError,
    TidemillError,
    describe_error,
)
from tidemill.core.retry import Backoff
from tidemill.deadletters.making import make_letter
from tidemill.deadletters.writer import DeadLetters, LetterKind, payload_json
from tidemill.pipeline.delivery.idempotency import name_payloads
from tidemill.pipeline.delivery.transaction_buffer import TransactionBuffer
from tidemill.pipeline.delivery.transaction_sender import TransactionSender
from tidemill.pipeline.handler.models import DeliveryAction, DeliveryError, ExecutorTask
from tidemill.pipeline.hooks import Calls, call_hook
from tidemill.pipeline.reports.failure_log import hook_raised
from tidemill.runtime.engine_tasks import EngineTasks
from tidemill.runtime.messages import SourceMessage, place_of
from tidemill.runtime.progress import SinkStats
from tidemill.sinks.base import Sink
from tidemill.sinks.fields import build_type_check
from tidemill.sinks.payloads import CollectResult, CustomPayload
from tidemill.sinks.sending.batch_sender import (
    BatchSender,
    DeliveryLane,
    Entry,
    Failure,
    Question,
    Submission,
)

if TYPE_CHECKING:
    from tidemill.sinks.kafka import KafkaSink

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 30.0
#: Field of `CollectResult`, type of sink, and the class of its payloads; those of custom sinks name their type.
_FIELDS: Sequence[tuple[str, str, type[Any]]] = (
    *((kind.field, kind.name, load_class(kind.payload)) for kind in SINK_TYPES.values()),
    ("custom", "", CustomPayload),
)

DeliveryHook = Callable[[DeliveryError], Awaitable[DeliveryAction]]
#: What stands in front of a sink.
Sender = BatchSender | TransactionSender


class Origin(msgspec.Struct):
    """Where payloads come from, for their order and for letters; all sources are of one partition.

    Attributes:
        sources: The messages.
        task: The task, if it was one.
        size_bytes: What the payloads take, once they are submitted.
        hook: What returned them.
    """

    sources: Sequence[SourceMessage]
    task: ExecutorTask | None = None
    size_bytes: int = 0
    hook: str = ""


class Routed(msgspec.Struct, gc=False):
    """A payload whose sink is known."""

    courier: Sender
    payload: Any


class Outbox:
    """All sinks of an engine.

    Args:
        sinks: Instances by type and name.
        letters: Where payloads go that nobody takes.
        on_delivery_error: Decides about refused payloads; None: dead letters.
        settings: How long to try again, and what a circuit breaker does.
        stage: With it, nothing is sent but staged for the transaction of its messages; all sinks are Kafka then.
        connect_seconds: How long sinks may take to connect.
        group: The consumer group, for the names of payloads.
    """

    def __init__(
        self,
        sinks: Mapping[str, Mapping[str, Sink]],
        letters: DeadLetters,
        on_delivery_error: DeliveryHook | None = None,
        settings: DeliverySettings | None = None,
        stage: TransactionBuffer | None = None,
        *,
        connect_seconds: float = CONNECT_SECONDS,
        group: str = "",
    ) -> None:
        """Prepare; nothing is connected before `connect`."""
        self._settings = settings or DeliverySettings()
        self.stage = stage
        self._letters = letters
        self._hook = on_delivery_error
        self._connect_seconds = connect_seconds
        self._couriers = {
            kind: {name: self._courier(sink) for name, sink in named.items()} for kind, named in sinks.items()
        }
        self._all = [courier for named in self._couriers.values() for courier in named.values()]
        self._group = group
        self._names = any(courier.sink.takes_idempotency_key for courier in self._all)
        #: Where its tasks run; an engine sets its own.
        self.tasks = EngineTasks()
        #: Where its hook is noted while it runs; an engine sets its own.
        self.calls: Calls | None = None
        self._hooks: set[asyncio.Task[None]] = set()
        self._letters_open = 0
        self._idle: asyncio.Event | None = None
        self._closed = False

    def _courier(self, sink: Sink) -> Sender:
        limits = limits_of(self._settings)
        if self.stage is None:
            return BatchSender(sink, limits, self._settings.timeout_seconds, self._ask, self._gave_up, self._changed)
        if sink.type != "kafka":
            raise ConfigError(f"{sink.place}: with kafka.exactly_once all sinks have to be Kafka")
        return TransactionSender(
            cast("KafkaSink", sink), self.stage, limits.max_retries, self._ask, self._gave_up, self._changed
        )

    # -- counts ------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> dict[str, SinkStats]:
        """What happened, by the sink's place in the configuration (`sinks.<type>.<name>`)."""
        return {courier.label: msgspec.structs.replace(courier.stats) for courier in self._all}

    @property
    def delivered(self) -> int:
        """Payloads that a sink confirmed."""
        return sum(courier.stats.delivered_payloads for courier in self._all)

    @property
    def skipped(self) -> int:
        """Payloads that the hook chose to skip."""
        return sum(courier.stats.skipped for courier in self._all)

    @property
    def pg_pool(self) -> Any:
        """The connection pool of the first PostgreSQL sink, once it is connected; None without one."""
        courier = next(iter(self._couriers.get("postgres", {}).values()), None)
        return getattr(courier.sink, "pool", None) if courier is not None else None

    def stalled(self) -> dict[str, str]:
        """Return what waits, and why, by the sink's place; 'dead letters' for those."""
        reasons = {courier.label: courier.stalled() for courier in self._all}
        reasons["dead letters"] = self._letters.stalled()
        return {label: reason for label, reason in reasons.items() if reason is not None}

    # -- life --------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect all sinks, in parallel; if one fails, close the others.

        Raises:
            TidemillError: What the first sink that failed said, with its name.
        """
        tasks = [asyncio.ensure_future(self._connect(courier)) for courier in self._all]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()
            raise
        for courier in self._all:
            courier.start(self.tasks)

    async def _connect(self, courier: Sender) -> None:
        try:
            async with asyncio.timeout(self._connect_seconds):
                await courier.connect()
        except TidemillError:
            raise
        except TimeoutError:
            raise RemoteError(f"{courier.label}: no connection within {self._connect_seconds:g} s") from None
        except Exception as error:
            raise RemoteError(f"{courier.label}: {describe_error(error)}") from error

    async def flush(self, deadline_seconds: float) -> None:
        """Wait until nothing is in hand, letters included, or the deadline is over."""
        try:
            async with asyncio.timeout(deadline_seconds):
                while self._letters_open or any(courier.outstanding for courier in self._all):
                    self._idle = asyncio.Event()
                    await self._idle.wait()
        except TimeoutError:
            left = sum(courier.outstanding for courier in self._all)
            log.warning("deliveries were not done in time", payloads=left, letters=self._letters_open)
        finally:
            self._idle = None

    def abandon(self, lane: DeliveryLane) -> None:
        """Forget the payloads of a partition that was given up; what is in flight may still arrive."""
        for courier in self._all:
            courier.abandon(lane)
        self._changed()

    async def close(self) -> None:
        """Give up what is left and close all sinks; errors are logged."""
        self._closed = True
        await self.tasks.stop(*self._hooks)
        await asyncio.gather(*(courier.close() for courier in self._all))

    def _changed(self) -> None:
        if self._idle is not None:
            self._idle.set()

    # -- in ----------------------------------------------------------------------------------------------------

    def route(self, collect: CollectResult) -> list[Routed]:
        """Resolve the sink of every payload.

        Raises:
            SinkNotConfiguredError: A payload names a sink that does not exist.
            AmbiguousSinkError: A payload names none where there are several.
            TypeError: A field has something that is no payload of its type, or a payload's field has another type.
        """
        routed: list[Routed] = []
        for field, kind, payload_class in _FIELDS:
            payloads = getattr(collect, field)
            if not payloads:
                continue
            if not isinstance(payloads, Sequence) or isinstance(payloads, (str, bytes)):
                raise TypeError(
                    f"CollectResult.{field} takes a list of {payload_class.__name__}, not {type(payloads).__name__}"
                )
            check = build_type_check(payload_class)
            for payload in payloads:
                if not isinstance(payload, payload_class):
                    raise TypeError(
                        f"CollectResult.{field} takes {payload_class.__name__}, not {type(payload).__name__}"
                    )
                check(payload)
                routed.append(Routed(self._courier_of(kind or payload.type, payload.sink), payload))
        return routed

    def _courier_of(self, kind: str, name: str) -> Sender:
        named = self._couriers.get(kind)
        place = sink_section(kind or "<type>")
        if not named:
            raise SinkNotConfiguredError(f"no sink of type {kind!r} is configured; add {place}.<name>")
        if name:
            courier = named.get(name)
            if courier is None:
                raise SinkNotConfiguredError(f"{place}.{name} is not configured; there is {_listed(named)}")
            return courier
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
        if self._names:
            name_payloads(routed, origin, self._group)
        submission = Submission(origin, len(routed), released)
        lane = (origin.sources[0].topic, origin.sources[0].partition) if origin.sources else None
        for each in routed:
            each.courier.add(each.payload, lane, submission)

    # -- what sinks refuse -------------------------------------------------------------------------------------

    def _ask(self, courier: Sender, question: Question) -> None:
        if self._closed:
            return
        if self._hook is None:
            self._drop(courier, question, DeliveryAction.DLQ)
            return
        task = self.tasks.run("on_delivery_error", self._asked(self._hook, courier, question))
        self._hooks.add(task)
        task.add_done_callback(self._hooks.discard)

    async def _asked(self, hook: DeliveryHook, courier: Sender, question: Question) -> None:
        error = DeliveryError(
            courier.sink.name,
            courier.sink.type,
            question.error,
            [item.value.payload for item in question.items],
            question.attempts,
        )
        try:
            action = DeliveryAction(await call_hook(hook(error), self.calls, "on_delivery_error", _place, question))
        except Exception as raised:
            event = "on_delivery_error raised, or returned no DeliveryAction; dead-lettering"
            hook_raised(log, "on_delivery_error", raised, event, sink=courier.label)
            action = DeliveryAction.DLQ
        if self._closed:
            return
        if action is DeliveryAction.RETRY:
            courier.decided(question, Decision.RETRY)
        else:
            self._drop(courier, question, action)

    def _drop(self, courier: Sender, question: Question, action: DeliveryAction) -> None:
        # What was abandoned meanwhile belongs to whoever has the partition now.
        items = [item for item in question.items if not item.gone]
        courier.decided(question, Decision.DROP)
        if action is DeliveryAction.SKIP:
            courier.stats.skipped += len(items)
            for item in items:
                item.value.submission.settle()
        else:
            self._dead_letter(courier, items, question.error, question.oversize, question.attempts)
        self._changed()

    def _gave_up(self, courier: Sender, failure: Failure) -> None:
        self._dead_letter(courier, failure.items, failure.error, failure.oversize, failure.attempts)

    def _dead_letter(self, courier: Sender, items: Sequence[Entry], error: str, oversize: bool, attempts: int) -> None:
        """Write one letter per submission."""
        by_submission: dict[Submission, list[Any]] = {}
        for item in items:
            by_submission.setdefault(item.value.submission, []).append(item.value.payload)
        for submission, payloads in by_submission.items():
            courier.stats.dead_lettered += len(payloads)
            self._letters_open += 1
            origin: Origin = submission.origin
            letter = make_letter(
                LetterKind.OVERSIZE if oversize else LetterKind.DELIVERY,
                error,
                origin.sources,
                attempts=attempts,
                payloads=[payload_json(payload) for payload in payloads],
                sink=(courier.sink.type, courier.sink.name),
                task_id=origin.task.task_id if origin.task else None,
                args=origin.task.args if origin.task else (),
            )
            self._letters.put(letter, partial(self._letter_written, submission, len(payloads)))

    def _letter_written(self, submission: Submission, count: int) -> None:
        self._letters_open -= 1
        if not self._closed:
            submission.settle(count)
        self._changed()


def _place(question: Question) -> tuple[str, str]:
    return place_of(question.items[0].value.submission.origin.sources) if question.items else ("", "")


def limits_of(settings: DeliverySettings) -> Limits:
    """Return what the configuration says about trying again; batch sizes are each sink's own."""
    backoff, breaker = settings.retry_backoff, settings.breaker
    return Limits(
        budget_seconds=settings.max_seconds,
        backoff=Backoff(backoff.initial_seconds, backoff.max_seconds, backoff.multiplier),
        max_retries=settings.max_retries,
        breaker_failures=breaker.failures,
        breaker_seconds=breaker.open_seconds,
        when_open=WhenOpen.HOLD if breaker.when_open == "hold" else WhenOpen.GIVE_UP,
    )


def payloads_of(collect: CollectResult) -> list[str]:
    """Return the payloads of a result that is not delivered, as JSON for its letter."""
    fields = [getattr(collect, field) for field, _, _ in _FIELDS]
    return [payload_json(payload) for field in fields if isinstance(field, Sequence) for payload in field]


def _listed(named: Mapping[str, object]) -> str:
    return ", ".join(sorted(named))
