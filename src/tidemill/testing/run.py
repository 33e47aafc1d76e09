"""Runs a handler over messages in this process, without Kafka and Spark; tasks run as real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tidemill.config.sections.sink_settings import FilesystemSinkSettings, KafkaSinkSettings
from tidemill.config.settings import Settings
from tidemill.core.errors import HandlerError, TidemillError
from tidemill.deadletters.letter import Letter
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.engine import Engine
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorError, ExecutorResult
from tidemill.pipeline.reports.report import FinishedBatch
from tidemill.pipeline.tasks.resident import build_executor
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.progress import EngineSummary, StopReason
from tidemill.runtime.log.setup import configured_for_people
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sinks.base import Sink
from tidemill.sinks.build import build_sink
from tidemill.sources.base import TopicPartition
from tidemill.spark.preflight import make_handler
from tidemill.testing.scripted import ScriptedDeadLetters, ScriptedSink, ScriptedSource

Message = SourceMessage | bytes | str | Mapping[str, Any] | None


class MessageOutcome(msgspec.Struct):
    """The outcome of one message.

    Attributes:
        message: The message, parsed.
        results: The results of its successful tasks.
        errors: The errors of its tasks that failed for good.
        rejected: Why the message was dead-lettered before any task; None if it was not.
    """

    message: SourceMessage
    results: list[ExecutorResult]
    errors: list[ExecutorError]
    rejected: str | None

    @property
    def succeeded(self) -> bool:
        """Whether the message was not rejected and none of its tasks failed."""
        return self.rejected is None and not self.errors


class HandlerRun(msgspec.Struct):
    """The result of running a handler.

    Attributes:
        outcomes: One outcome per message, in the order of completion.
        payloads: The payloads for each sink, by "type.name" as in the configuration.
        dead_letters: The dead letters, in order.
        summary: The summary of the engine.
    """

    outcomes: list[MessageOutcome]
    payloads: dict[str, list[Any]]
    dead_letters: list[Letter]
    summary: EngineSummary


class _Report:
    """Collects outcomes instead of writing a history."""

    needs_messages = True

    def __init__(self) -> None:
        self.outcomes: list[MessageOutcome] = []
        self.tasks = EngineTasks()

    def take(self, batch: FinishedBatch) -> None:
        rows = zip(batch.resolved_ns, batch.messages, batch.flights, batch.rejected, strict=True)
        # A batch lists messages that finished together after those that finished alone; restore the order by time.
        for _, message, runs, rejected in sorted(rows, key=lambda row: row[0]):
            results = [run.result for run in runs if run.result is not None]
            errors = [run.error for run in runs if run.error is not None and not run.replaced]
            self.outcomes.append(MessageOutcome(message, results, errors, rejected))

    async def close(self) -> None:
        pass


def run_handler(
    handler: Handler[Any, Any] | type[Handler[Any, Any]],
    messages: Iterable[Message],
    config: Settings | Mapping[str, Any] | None = None,
    *,
    timeout_seconds: float = 60.0,
) -> HandlerRun:
    """Run a handler over messages until all of them are finished.

    Args:
        handler: The handler, or its class.
        messages: Values (bytes, a string, a dict to encode as JSON, or None for a tombstone), or whole messages.
        config: Settings, or the same as a dict; without sinks in it, there are one Kafka sink and one file sink.
        timeout_seconds: How long the run may take.

    Raises:
        HandlerError: The hooks of the handler cannot be called, or it did not start or not finish in time.
        TidemillError: The configuration is invalid.
    """
    return asyncio.run(run_handler_async(handler, messages, config, timeout_seconds=timeout_seconds))


async def run_handler_async(
    handler: Handler[Any, Any] | type[Handler[Any, Any]],
    messages: Iterable[Message],
    config: Settings | Mapping[str, Any] | None = None,
    *,
    timeout_seconds: float = 60.0,
) -> HandlerRun:
    """Run a handler like `run_handler`, inside a running event loop."""
    settings = config if isinstance(config, Settings) else Settings.model_validate(dict(config or {}))
    with configured_for_people(settings.logging):
        return await _run(handler, messages, settings, timeout_seconds)


async def _run(
    handler: Handler[Any, Any] | type[Handler[Any, Any]],
    messages: Iterable[Message],
    settings: Settings,
    timeout_seconds: float,
) -> HandlerRun:
    instance = make_handler(handler)
    settings = await instance.on_startup(settings) or settings
    sources = [_to_message(value, index) for index, value in enumerate(messages)]
    ends: dict[TopicPartition, int] = {}
    for message in sources:
        ends[message.topic, message.partition] = message.offset + 1

    def drain_at_end(offsets: Mapping[TopicPartition, int]) -> None:
        if all(source.committed.get(partition) == end for partition, end in ends.items()):
            engine.drain()

    source = ScriptedSource(sources, drain_at_end)
    sinks = build_scripted_sinks(settings)
    letters = ScriptedDeadLetters()
    report = _Report()
    engine = Engine(
        settings,
        instance,
        EngineIdentity("test", 0, "test", settings.kafka.consumer_group, 1),
        source,
        Outbox(sinks, letters, instance.on_delivery_error, settings.delivery),
        letters,
        build_executor(settings.executor, "test"),
        report,
    )
    if engine.brake is not None:
        engine.brake.fails = True
    if not sources:
        engine.drain()
    try:
        async with asyncio.timeout(timeout_seconds):
            summary = await engine.run(_start_at_once)
    except TimeoutError:
        raise HandlerError(f"the handler did not finish {len(sources)} messages in {timeout_seconds} s") from None
    if summary.reason is not StopReason.DRAINED:
        raise TidemillError(f"the engine ended: {summary.reason.value}: {summary.error}")
    payloads = {
        f"{kind}.{name}": sink.payloads
        for kind, named in sinks.items()
        for name, sink in named.items()
        if isinstance(sink, ScriptedSink)
    }
    return HandlerRun(report.outcomes, payloads, letters.letters, summary)


def build_scripted_sinks(settings: Settings) -> dict[str, dict[str, Sink]]:
    """Return a scripted sink for each configured sink; without any, return one for Kafka and one for files.

    The real sinks encode the payloads, so a payload that a real sink would reject is rejected here, too. If a real sink
    cannot be created because its client is not installed, only generic checks apply.
    """
    if settings.sinks.is_empty():
        settings = settings.model_copy(deep=True)
        settings.sinks.kafka = {"kafka": KafkaSinkSettings(topic="results")}
        settings.sinks.filesystem = {"files": FilesystemSinkSettings(base_path=".")}
    return {
        kind: {name: ScriptedSink(name, kind, real=_build_real_sink(settings, kind, name)) for name in named}
        for kind, named in settings.sinks.group_by_type().items()
    }


def _build_real_sink(settings: Settings, kind: str, name: str) -> Sink | None:
    try:
        return build_sink(settings, kind, name)
    except TidemillError:
        return None


async def _start_at_once() -> None:
    pass


def _to_message(value: Message, index: int) -> SourceMessage:
    if isinstance(value, SourceMessage):
        return value
    if isinstance(value, str):
        value = value.encode()
    elif isinstance(value, Mapping):
        value = msgspec.json.encode(value)
    return SourceMessage("input-events", 0, index, None, value)
