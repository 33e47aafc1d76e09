"""Builds an engine with its real parts: Kafka, the configured sinks, processes, history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.config.settings import Settings
from tidemill.deadletters.writer import DeadLetters, KafkaDeadLetters
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.delivery.transaction_buffer import TransactionBuffer
from tidemill.pipeline.delivery.transaction_sender import TransactionalDeadLetters
from tidemill.pipeline.engine import Engine
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.reports.history import HistoryWriter
from tidemill.pipeline.reports.report import Report
from tidemill.pipeline.tasks.resident import build_executor
from tidemill.runtime.identity import Identity
from tidemill.runtime.kept_warden import KeptWarden
from tidemill.runtime.warden import Warden
from tidemill.sinks.build import build_sinks
from tidemill.sources.base import Source
from tidemill.sources.kafka import KafkaSource
from tidemill.sources.transactional_producer import TransactionalProducer


def build_engine(
    settings: Settings,
    handler: Handler[Any, Any],
    identity: Identity,
    source: Source | None = None,
    report: Report | None = None,
    letters: DeadLetters | None = None,
) -> Engine:
    """Return an engine of this pipeline; nothing is connected yet.

    Args:
        settings: The validated configuration.
        handler: The handler.
        identity: Who the engine is.
        source: Where messages come from; None: the topic, as a member of the group.
        report: Where finished messages are reported; None: the history, if one is configured.
        letters: Where dead letters go; None: the dead-letter topic.
    """
    stage = TransactionBuffer() if settings.kafka.exactly_once else None
    if letters is None:
        letters = KafkaDeadLetters(settings) if stage is None else TransactionalDeadLetters(settings, stage)
    sinks, group = build_sinks(settings), settings.kafka.consumer_group
    outbox = Outbox(sinks, letters, handler.on_delivery_error, settings.delivery, stage, group=group)
    return Engine(
        settings,
        handler,
        identity,
        source or KafkaSource(settings, identity.instance_id, _transactor(settings, identity, stage)),
        outbox,
        letters,
        build_executor(settings.executor, identity.engine_id),
        report or build_history(settings, identity),
        KeptWarden(Warden(identity.engine_id)),
    )


def build_history(settings: Settings, identity: Identity) -> HistoryWriter | None:
    """Return what writes the history, if one is configured."""
    return HistoryWriter(Path(settings.history.path), identity) if settings.history.path else None


def _transactor(
    settings: Settings, identity: Identity, stage: TransactionBuffer | None
) -> TransactionalProducer | None:
    if stage is None:
        return None
    # The settings see to it that all sinks have the same.
    overrides: dict[str, Any] = next((sink.client_config for sink in settings.sinks.kafka.values()), {})
    return TransactionalProducer(settings.kafka, identity.instance_id, overrides, stage.limits)
