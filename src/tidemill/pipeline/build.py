"""Builds an engine with its real parts: Kafka, the configured sinks, processes, history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.config.settings import Settings
from tidemill.pipeline.delivery import Outbox
from tidemill.pipeline.engine import Engine
from tidemill.pipeline.handler import Handler
from tidemill.pipeline.history import HistoryWriter
from tidemill.pipeline.resident import build_executor
from tidemill.pipeline.warden import Warden
from tidemill.runtime.deadletter import KafkaDeadLetters
from tidemill.runtime.identity import Identity
from tidemill.sinks.base import Sink
from tidemill.sources.kafka import KafkaSource


def build_engine(settings: Settings, handler: Handler[Any, Any], identity: Identity) -> Engine:
    """Return an engine of this pipeline; nothing is connected yet."""
    history = HistoryWriter(Path(settings.history.path), identity) if settings.history.path else None
    letters = KafkaDeadLetters(settings)
    outbox = Outbox(build_sinks(settings), letters, handler.on_delivery_error)
    return Engine(
        settings,
        handler,
        identity,
        KafkaSource(settings, identity.instance_id),
        outbox,
        letters,
        build_executor(settings.executor, identity.engine_id),
        history,
        Warden(identity.engine_id),
    )


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
