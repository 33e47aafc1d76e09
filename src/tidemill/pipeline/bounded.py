"""An engine that ends by itself: it is drained when everything that its source had is done, and is complete only then.

Invariants: a run is complete only if each message that was read left the pipeline, what windows deliver by themselves
included; whatever ends it sooner leaves `complete` unset, and its outcomes cover only what was done.
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
from tidemill.runtime.beats import Beat
from tidemill.runtime.identity import Identity
from tidemill.runtime.progress import EngineProgress, EngineSummary, StopReason
from tidemill.sources.bounded import BoundedSource

if TYPE_CHECKING:  # loaded only where something is recorded
    from tidemill.pipeline.recording.recorder import EngineRecorder


def make_bounded_settings(settings: Settings) -> Settings:
    """Return the settings of a bounded run: a message is done when what its window delivers is confirmed too.

    A live engine may commit before a window's own payloads are confirmed and still deliver them; a bounded one ends.
    It commits nothing to a group either, so there is nothing to hold together in a transaction: results are
    delivered at least once. Its outcomes are the record of what went well: only failures leave rows in the flight
    recorder.
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
        identity: Who the engine is.
        source: What to work on.
        outcomes: Where to report.
    """

    def __init__(
        self,
        settings: Settings,
        handler: Handler[Any, Any],
        identity: Identity,
        source: BoundedSource,
        outcomes: Outcomes,
    ) -> None:
        """Wire the parts; nothing is connected yet."""
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
        """Work until everything is done, or the engine is drained or has ended."""
        summary = await self._engine.run(may_subscribe)
        text = self._refusal
        if summary.reason is not StopReason.DRAINED or text is None:
            return summary
        return EngineSummary(summary.slot, StopReason.FAILED, text, summary.progress)

    @property
    def _refusal(self) -> str | None:
        """What the disk refused or did not write in time."""
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
        """Whether everything is done, and its outcomes are written."""
        return self._outcomes.complete and self._refusal is None

    @property
    def letters(self) -> list[str]:
        """The names of the files that its dead letters are in, where they are in files."""
        return self._outcomes.letters.published if self._outcomes.letters is not None else []

    @property
    def records(self) -> OutgoingFrames | None:
        """What the driver is to store; None: nothing is recorded."""
        return self._engine.records

    @property
    def live(self) -> None:
        """Nobody watches a bounded run."""
        return None

    @property
    def prober(self) -> None:
        """A bounded run probes nothing."""
        return None

    def drain(self, *, keep_place: bool = False) -> None:
        """Begin an early end; it has no place in a group."""
        self._engine.drain()

    def fail(self, text: str) -> None:
        """End at once."""
        self._engine.fail(text)

    def abandon(self) -> None:
        """Note that this engine is no longer supervised: another one may already be doing the rest of its work."""
        self._outcomes.in_part = False

    def pause(self, partitions: Collection[int] | None = None) -> None:
        """Take no new messages."""
        self._engine.pause(partitions)

    def resume(self) -> None:
        """Take messages again."""
        self._engine.resume()

    def release(self) -> None:
        """Do nothing: a bounded engine does not brake, it fails."""

    def find_message(self, topic: str, partition: int, offset: int) -> MessageStage | None:
        """Return where a message is; None: it is not open here."""
        return self._engine.find_message(topic, partition, offset)

    def progress(self) -> EngineProgress:
        """Return a whole snapshot."""
        return self._engine.progress()

    def beat(self, *, whole: bool) -> Beat:
        """Return the next beat for the driver."""
        return self._engine.beat(whole=whole)

    def _look(self) -> None:
        done = self._engine.counters.messages_done
        if self._source.ended and self._source.is_empty and done == self._source.taken:
            self._outcomes.complete = True
            self._engine.drain()

    def _refused(self, error: Exception) -> None:
        self._engine.drain()


def _build_recorder(settings: Settings, letters: DeadLetters) -> tuple[EngineRecorder, DeadLetters]:
    """Return what records the failures of an engine, and letters that are recorded."""
    from tidemill.pipeline.recording.choice import FAILURES
    from tidemill.pipeline.recording.letters import RecordedLetters
    from tidemill.pipeline.recording.recorder import EngineRecorder

    recorder = EngineRecorder(settings.debug, choice=FAILURES)
    return recorder, RecordedLetters(letters, recorder)
