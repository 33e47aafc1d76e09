"""Builds an engine from its real parts: Kafka, the configured sinks, processes, history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.config.settings import Settings
from tidemill.deadletters.writer import DeadLetters
from tidemill.pipeline.delivery.modes import AtLeastOnce, DeliveryMode, ExactlyOnce
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.engine import Engine
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.reports.history import HistoryWriter
from tidemill.pipeline.reports.report import Report
from tidemill.pipeline.tasks.resident import build_executor
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.process.kept_warden import KeptWarden
from tidemill.runtime.process.warden import Warden
from tidemill.sinks.build import build_sinks
from tidemill.sources.base import Source
from tidemill.sources.kafka import KafkaSource

if TYPE_CHECKING:  # imported lazily: only engines that record load it
    from tidemill.pipeline.recording.recorder import EngineRecorder

#: Takes the settings and the dead letters; returns a recorder, and the dead letters wrapped so that it sees them.
RecorderMaker = Callable[[Settings, DeadLetters], "tuple[EngineRecorder, DeadLetters]"]


def build_engine(
    settings: Settings,
    handler: Handler[Any, Any],
    identity: EngineIdentity,
    source: Source | None = None,
    report: Report | None = None,
    letters: DeadLetters | None = None,
    make_recorder: RecorderMaker | None = None,
) -> Engine:
    """Return an engine of this pipeline; nothing is connected yet.

    Args:
        settings: The validated configuration.
        handler: The handler.
        identity: The engine's identity.
        source: Where messages come from; None: the topic, as a member of the consumer group.
        report: Where finished messages are reported; None: the history, if one is configured.
        letters: Where dead letters go; None: the dead-letter topic.
        make_recorder: Makes the recorder if `debug.enabled` is set; None: one that records everything.
    """
    mode: DeliveryMode = ExactlyOnce() if settings.kafka.exactly_once else AtLeastOnce()
    letters, recorder = letters or mode.make_letters(settings), None
    if settings.debug.enabled:
        recorder, letters = (make_recorder or _build_recorder)(settings, letters)
    sinks, group = build_sinks(settings), settings.kafka.consumer_group
    outbox = Outbox(sinks, letters, handler.on_delivery_error, settings.delivery, mode, group=group)
    return Engine(
        settings,
        handler,
        identity,
        source or KafkaSource(settings, identity.instance_id, mode.make_producer(settings, identity)),
        outbox,
        letters,
        build_executor(settings.executor, identity.engine_id),
        report or build_history(settings, identity),
        KeptWarden(Warden(identity.engine_id)),
        recorder,
    )


def _build_recorder(settings: Settings, letters: DeadLetters) -> tuple[EngineRecorder, DeadLetters]:
    """Return a recorder of everything, and the dead letters wrapped so that it sees them."""
    from tidemill.pipeline.recording.letters import RecordedLetters
    from tidemill.pipeline.recording.recorder import EngineRecorder

    recorder = EngineRecorder(settings.debug)
    return recorder, RecordedLetters(letters, recorder)


def build_history(settings: Settings, identity: EngineIdentity) -> HistoryWriter | None:
    """Return a history writer if `history.path` is configured."""
    return HistoryWriter(Path(settings.history.path), identity) if settings.history.path else None
