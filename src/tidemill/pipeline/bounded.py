"""A bounded engine: it processes a fixed range of messages and then drains itself.

Invariants: a run is complete only if every message that was read has left the pipeline, including what windows deliver
themselves. Any earlier end leaves `complete` unset, and the outcomes cover only the finished part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any

from tidemill.config.settings import Settings
from tidemill.core.errors import describe_error
from tidemill.core.pipeline.message_stage import MessageStage
from tidemill.core.recorder.outgoing import OutgoingFrames
from tidemill.deadletters.writer import DeadLetters
from tidemill.pipeline.build import build_engine
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.reports.outcomes import Outcomes
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.link.beats import Beat
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, StopReason
from tidemill.sources.bounded import BoundedSource

if TYPE_CHECKING:  # imported lazily: only engines that record load it
    from tidemill.pipeline.recording.recorder import EngineRecorder


def make_bounded_settings(settings: Settings) -> Settings:
    """Return the settings of a bounded run, where a message is done only once its window's payloads are confirmed too.

    A live engine may commit before a window's own payloads are confirmed because it still delivers them later; a
    bounded engine exits. It also commits no offsets to a group, so a transaction would protect nothing: delivery is at
    least once. The outcomes already list what succeeded, so only failures leave rows in the flight recorder.
    """
    settings = settings.model_copy(deep=True)
    settings.executor.commit = "window"
    settings.kafka.exactly_once = False
    settings.debug.probe_enabled = False
    return settings


class BoundedEngine:
    """An engine over a bounded source.

    Args:
        settings: From `make_bounded_settings`.
        handler: The handler.
        identity: The engine's identity.
        source: The messages to process.
        outcomes: The report of finished messages.
    """

    def __init__(
        self,
        settings: Settings,
        handler: Handler[Any, Any],
        identity: EngineIdentity,
        source: BoundedSource,
        outcomes: Outcomes,
    ) -> None:
        self._source = source
        self._outcomes = outcomes
        self._engine = build_engine(settings, handler, identity, source, outcomes, outcomes.letters, _build_recorder)
        if outcomes.letters is not None:
            outcomes.letters.on_error = self._engine.fail
        if self._engine.brake is not None:
            self._engine.brake.fails = True
        outcomes.committed = source.committed
        self._engine.on_idle = self._look
        outcomes.on_error = self._refused
        source.on_end = self._look

    async def run(self, may_subscribe: Callable[[], Awaitable[None]]) -> EngineSummary:
        """Process every message of the source; return early if the engine is drained or fails."""
        summary = await self._engine.run(may_subscribe)
        text = self._refusal
        if summary.reason is not StopReason.DRAINED or text is None:
            return summary
        return EngineSummary(summary.slot, StopReason.FAILED, text, summary.progress)

    @property
    def _refusal(self) -> str | None:
        """The reason why the disk did not store the outcomes or dead letters, if it did not."""
        outcomes = self._outcomes
        if outcomes.letters is not None and outcomes.letters.error is not None:
            return outcomes.letters.error
        if outcomes.error is not None:
            return f"RemoteError: the outcomes cannot be written: {describe_error(outcomes.error)}"
        if outcomes.complete and not outcomes.published:
            return "RemoteError: the outcomes were not written in time; is their disk slow or unavailable?"
        return None

    @property
    def complete(self) -> bool:
        """Whether every message is done and its outcomes are on disk."""
        return self._outcomes.complete and self._refusal is None

    @property
    def letters(self) -> list[str]:
        """The names of the dead-letter files, if dead letters go to files."""
        return self._outcomes.letters.published if self._outcomes.letters is not None else []

    @property
    def records(self) -> OutgoingFrames | None:
        """The frames for the driver to store; None: recording is off."""
        return self._engine.records

    @property
    def live(self) -> None:
        """Always None: bounded runs have no live view."""
        return None

    @property
    def prober(self) -> None:
        """Always None: bounded runs have no probes."""
        return None

    def drain(self, *, keep_membership: bool = False) -> None:
        """Begin an early stop; `keep_membership` has no effect because the engine is in no consumer group."""
        self._engine.drain()

    def fail(self, text: str) -> None:
        """Stop at once."""
        self._engine.fail(text)

    def abandon(self) -> None:
        """Record that this engine is no longer supervised; another engine may already be processing its messages."""
        self._outcomes.in_part = False

    def pause(self, partitions: Collection[int] | None = None) -> None:
        """Stop taking new messages."""
        self._engine.pause(partitions)

    def resume(self) -> None:
        """Take new messages again."""
        self._engine.resume()

    def release(self) -> None:
        """Do nothing: a bounded engine fails where a live engine brakes."""

    def find_message(self, topic: str, partition: int, offset: int) -> MessageStage | None:
        """Return the stage of a message; None: it is not in flight here."""
        return self._engine.find_message(topic, partition, offset)

    def progress(self) -> EngineProgress:
        """Return a complete snapshot."""
        return self._engine.progress()

    def beat(self, *, whole: bool) -> Beat:
        return self._engine.beat(whole=whole)

    def _look(self) -> None:
        done = self._engine.counters.messages_done
        if self._source.ended and self._source.is_empty and done == self._source.taken:
            self._outcomes.complete = True
            self._engine.drain()

    def _refused(self, error: Exception) -> None:
        self._engine.drain()


def _build_recorder(settings: Settings, letters: DeadLetters) -> tuple[EngineRecorder, DeadLetters]:
    """Return a recorder that stores failures only, and the dead letters wrapped so that it sees them."""
    from tidemill.pipeline.recording.choice import FAILURES
    from tidemill.pipeline.recording.letters import RecordedLetters
    from tidemill.pipeline.recording.recorder import EngineRecorder

    recorder = EngineRecorder(settings.debug, choice=FAILURES)
    return recorder, RecordedLetters(letters, recorder)
