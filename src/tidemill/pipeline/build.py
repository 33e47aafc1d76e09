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
from tidemill.pipeline.stage import Stage
from tidemill.pipeline.stager import StagedLetters
from tidemill.pipeline.warden import Warden
from tidemill.runtime.deadletter import KafkaDeadLetters
from tidemill.runtime.identity import Identity
from tidemill.sinks.build import build_sinks
from tidemill.sources.kafka import KafkaSource
from tidemill.sources.transactor import Transactor


def build_engine(settings: Settings, handler: Handler[Any, Any], identity: Identity) -> Engine:
    """Return an engine of this pipeline; nothing is connected yet."""
    history = HistoryWriter(Path(settings.history.path), identity) if settings.history.path else None
    stage = Stage() if settings.kafka.exactly_once else None
    letters = KafkaDeadLetters(settings) if stage is None else StagedLetters(settings, stage)
    outbox = Outbox(build_sinks(settings), letters, handler.on_delivery_error, settings.delivery, stage)
    return Engine(
        settings,
        handler,
        identity,
        KafkaSource(settings, identity.instance_id, _transactor(settings, identity, stage)),
        outbox,
        letters,
        build_executor(settings.executor, identity.engine_id),
        history,
        Warden(identity.engine_id),
    )


def _transactor(settings: Settings, identity: Identity, stage: Stage | None) -> Transactor | None:
    if stage is None:
        return None
    # The settings see to it that all sinks have the same.
    overrides = next((sink.client_config for sink in settings.sinks.kafka.values()), {})
    return Transactor(settings.kafka, identity.instance_id, overrides, stage.limits)
