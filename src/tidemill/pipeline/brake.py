"""The shell of `core.brake` in an engine (`executor.max_failure_ratio`): holds what fails, and tries it again.

Invariants: while the brake is on, the intake takes nothing but the one message that is to be tried; a message that is
held is unresolved, so no commit passes it, and neither a drain nor a revoke waits for it; bounded engines fail instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tidemill.config.redaction import redact_text
from tidemill.core.errors import TooManyFailuresError, describe_error
from tidemill.core.pipeline.brake import TRIAL_SECONDS, Again, Brake, Effect, Hold, Off, On, TakeOne, Write
from tidemill.sources.base import Fatal

if TYPE_CHECKING:
    from tidemill.pipeline.engine import Engine
    from tidemill.pipeline.partition import OwnedPartition
    from tidemill.pipeline.window import WindowRun

#: Of what a failure says, this much is told.
_TEXT_LENGTH = 300
#: The cause of a failure whose letter a user wanted.
_RELEASED = "released"


class Case:
    """A failure that would be dead-lettered.

    Attributes:
        window: Whose it is.
        indexes: The messages that are dead-lettered with it.
        offsets: The messages that are not resolved while it is held.
        again: Runs again what failed.
        write: Writes the letter, and goes on with what comes after it.
        is_window: Whether it is the hook of the window that failed.
        is_held: Whether it is held now.
    """

    __slots__ = ("again", "indexes", "is_held", "is_window", "offsets", "window", "write")

    def __init__(
        self,
        window: WindowRun,
        indexes: Sequence[int],
        again: Callable[[], None],
        write: Callable[[], None],
        *,
        is_window: bool = False,
    ) -> None:
        """Keep what there is to do."""
        self.is_held = False
        self.is_window = is_window
        self.window = window
        self.indexes = indexes or range(len(window.messages))
        self.again = again
        self.write = write
        # Of a window that commits as a whole, nothing is resolved before all of it is.
        stuck: Sequence[int] = self.indexes
        if window.held_for_window:
            stuck = range(len(window.messages))
        elif is_window:
            stuck = ()
        self.offsets = [window.messages[index].offset for index in stuck]


class EngineBrake:
    """The brake of one engine.

    Args:
        engine: The engine.
        max_ratio: `executor.max_failure_ratio`.
    """

    def __init__(self, engine: Engine, max_ratio: float) -> None:
        """Start off."""
        self._engine = engine
        self._max_ratio = max_ratio
        self._brake: Brake[OwnedPartition, Case] = Brake(max_ratio)
        self._timer: asyncio.TimerHandle | None = None
        self._why = ""
        #: Whether the engine fails when the brake comes on, instead of waiting.
        self.fails = False

    @property
    def held(self) -> int:
        """How many messages are held."""
        return self._brake.held

    # -- what windows tell ------------------------------------------------------------------------------------

    def failed(self, cause: str, text: str, case: Case) -> None:
        """Hear of a failure that would be dead-lettered: it is written or held.

        Args:
            cause: What failed with what, in a few words that are the same for equal failures.
            text: What was said.
            case: What to do about it.
        """
        window = case.window
        for index in case.indexes:
            window.causes[index] = cause
        first = (window.lane, window.messages[case.indexes[0]].offset)
        text = " ".join(redact_text(text).split())
        if len(text) > _TEXT_LENGTH:
            text = f"{text[: _TEXT_LENGTH // 2]} ... {text[-_TEXT_LENGTH // 2 :]}"
        self._apply(self._brake.failed(first, text, case))

    def ended(self, window: WindowRun, index: int) -> None:
        """Hear that the tasks and the hook of a message are over, or that it gets no task."""
        message, cause = (window.lane, window.messages[index].offset), window.causes.get(index)
        if cause is _RELEASED:
            return
        if self._brake.is_on and len(window.messages) == 1 and self._engine.has.on_window_complete:
            return  # nobody waits for others here: it is tried with its window
        self._apply(self._brake.finished(message, cause, self._now()))

    def window_ended(self, window: WindowRun) -> None:
        """Hear that the hook of a window ended well."""
        self._apply(self._brake.succeeded((window.lane, window.messages[0].offset)))

    def window_failed(self, window: WindowRun, spoiled: int) -> None:
        """Hear that the hook of a window failed, with how many messages that had ended well."""
        if window.causes[0] is not _RELEASED:
            self._apply(self._brake.spoiled(spoiled, window.causes[0], self._now()))

    def taken(self, lane: OwnedPartition, offset: int) -> None:
        """Hear which message was taken to be tried."""
        self._brake.taken((lane, offset))

    def abandon(self, lane: OwnedPartition) -> None:
        """Forget what is held of a partition that was given up."""
        self._brake.abandon(lane)
        lane.held.clear()

    # -- what users and the engine want ---------------------------------------------------------------------------

    def release(self) -> None:
        """Dead-letter what is held, and begin anew; without effect while the brake is off."""
        held = self.held
        if self._brake.is_on:
            self._engine.log.warning("the brake is released by a user; what was held is dead-lettered", held=held)
            self._apply(self._brake.release())

    def stalled(self) -> str | None:
        """Say what failed and how often; None while the brake is off."""
        if not self._brake.is_on:
            return None
        text = f"{self._said()}; {self.held} message{'s' if self.held != 1 else ''} held"
        if self._brake.due is not None:
            text += f", the next is tried in {max(0.0, self._brake.due - self._now()):.0f} s"
        return f"{text} (tidemill release dead-letters them)"

    def close(self) -> None:
        """Try nothing more; what is held is left uncommitted."""
        if self.held:
            self._engine.log.warning("messages that the brake held are left for the next run", held=self.held)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- effects ------------------------------------------------------------------------------------------------

    def _apply(self, effects: Sequence[Effect[Case]]) -> None:
        for effect in effects:
            match effect:
                case On():
                    self._on()
                case Off():
                    self._engine.log.info("the brake is off: messages are taken again")
                    self._engine.intake.brake(False)
                case TakeOne():
                    self._engine.intake.take_one()
                case Hold(case):
                    self._hold(case)
                case Again(case):
                    self._let_go(case)
                    for index in case.indexes:
                        case.window.causes.pop(index, None)
                    case.again()
                case Write(case):
                    if case.is_held:
                        self._let_go(case)
                        # By a user's word: it says nothing more about the deployment.
                        case.window.causes.update(dict.fromkeys(case.indexes, _RELEASED))
                    case.write()
        if self._timer is None and self._brake.due is not None and not self.fails:
            self._timer = asyncio.get_running_loop().call_at(self._brake.due, self._tick)

    def _on(self) -> None:
        self._why = self._said()
        if self.fails:
            error = TooManyFailuresError(
                f"{self._why}: more than executor.max_failure_ratio ({self._max_ratio:g}) allows; mend that and run it "
                "again, or set another ratio"
            )
            self._engine.on_fatal(Fatal.FAILED, describe_error(error))
            return
        self._engine.log.error(
            "the brake is on: no new messages are taken, and what fails is held; tidemill release dead-letters it",
            why=self._why,
            max_failure_ratio=self._max_ratio,
            next_trial_seconds=TRIAL_SECONDS,
        )
        self._engine.intake.brake(True)

    def _said(self) -> str:
        standing = self._brake.standing()
        text = f"{standing.failed} of the last {standing.of} messages failed"
        if standing.times < standing.failed:
            text += f", {standing.times} of them"
        return f"{text} with {standing.cause} (last: {standing.last})"

    def _hold(self, case: Case) -> None:
        lane = case.window.lane
        for offset in case.offsets:
            lane.held[offset] = lane.held.get(offset, 0) + 1
        lane.windows -= case.is_window
        case.is_held = True
        self._engine.count_stuck(lane)

    def _let_go(self, case: Case) -> None:
        """Count a case out that was held."""
        lane = case.window.lane
        case.is_held = False
        lane.windows += case.is_window
        for offset in case.offsets:
            lane.held[offset] -= 1
            if not lane.held[offset]:
                del lane.held[offset]
        self._engine.count_stuck(lane)

    def _tick(self) -> None:
        self._timer = None
        if not self._brake.is_on:
            return
        self._apply(self._brake.tick(self._now()))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def brake_of(engine: Engine) -> EngineBrake | None:
    """Return the brake of an engine, if it is to have one."""
    max_ratio = engine.settings.executor.max_failure_ratio
    return None if max_ratio is None else EngineBrake(engine, max_ratio)
