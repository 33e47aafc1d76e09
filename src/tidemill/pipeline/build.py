"""Builds an engine with its real parts: Kafka, the configured sinks, processes, history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.config.settings import Settings
from tidemill.pipeline.delivery import Outbox
from tidemill.pipeline.engine import Engine, Report
from tidemill.pipeline.handler import Handler
from tidemill.pipeline.history import HistoryWriter
from tidemill.pipeline.resident import build_executor
from tidemill.pipeline.warden import Warden
from tidemill.runtime.deadletter import KafkaDeadLetters
from tidemill.runtime.identity import Identity
from tidemill.sinks.base import Sink
from tidemill.sources.base import Source
from tidemill.sources.kafka import KafkaSource


def build_engine(
    settings: Settings,
    handler: Handler[Any, Any],
    identity: Identity,
    source: Source | None = None,
    report: Report | None = None,
) -> Engine:
    """Return an engine of this pipeline; nothing is connected yet.

    Args:
        settings: The validated configuration.
        handler: The handler.
        identity: Who the engine is.
        source: Where messages come from; None: the topic, as a member of the group.
        report: Where finished messages are reported; None: the history, if one is configured.
    """
    letters = KafkaDeadLetters(settings)
    outbox = Outbox(build_sinks(settings), letters, handler.on_delivery_error)
    return Engine(
        settings,
        handler,
        identity,
        source or KafkaSource(settings, identity.instance_id),
        outbox,
        letters,
        build_executor(settings.executor, identity.engine_id),
        report or build_history(settings, identity),
        Warden(identity.engine_id),
    )


def build_history(settings: Settings, identity: Identity) -> HistoryWriter | None:
    """Return what writes the history, if one is configured."""
    return HistoryWriter(Path(settings.history.path), identity) if settings.history.path else None


def build_sinks(settings: Settings) -> dict[str, dict[str, Sink]]:
    """Return the configured sinks by type and name; imports only those that are configured."""
    sinks: dict[str, dict[str, Sink]] = {}
    if settings.sinks.kafka:
        from tidemill.sinks.kafka import KafkaSink

        sinks["kafka"] = {
            name: KafkaSink(name, section, settings.kafka) for name, section in settings.sinks.kafka.items()
        }
    if settings.sinks.filesystem:
        from tidemill.sinks.files import FilesystemSink

        sinks["filesystem"] = {
            name: FilesystemSink(name, section) for name, section in settings.sinks.filesystem.items()
        }
    return sinks
