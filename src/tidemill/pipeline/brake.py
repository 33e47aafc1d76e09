"""The shell of `core.pipeline.brake` (`executor.max_failure_ratio`): holds what fails, and tries it again.

Invariants: while the brake is on, the engine takes nothing but the one message that is to be tried; a message that is
held is unresolved, so no commit passes it, and neither a drain nor a revoke waits for it; bounded engines fail instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from typing import Any, Protocol

import msgspec

from tidemill.config.redaction import redact_text
from tidemill.core.errors import TooManyFailuresError, describe_error
from tidemill.core.pipeline.brake import TRIAL_SECONDS, Again, Brake, Effect, Hold, Off, On, TakeOne, Write

#: This much of a failure's text is shown.
_TEXT_LENGTH = 300
#: The cause of a failure whose letter a user wanted.
_RELEASED = "released"


class HoldingPartition(Hashable, Protocol):
    """An owned partition, as the brake sees it."""

    def hold(self, offsets: Sequence[int], *, is_window: bool) -> None:
        """Count a failure that is held: its messages are stuck, or the window's own hook is not waited for."""

    def unhold(self, offsets: Sequence[int], *, is_window: bool) -> None:
        """Count a failure that is no longer held."""


class Case:
    """A failure that would be dead-lettered.

    Args:
        partition: Whose it is.
        offsets: The messages that are dead-lettered with it.
        stuck: Those that stay unresolved while it is held.
        causes: What failed of the messages of its window, by index; written by the brake.
        indexes: The indexes of its messages there.
        again: Runs again what failed.
        write: Writes the letter, and goes on with what comes after it.
        is_window: Whether it is the hook of the window that failed.

    Attributes:
        is_held: Whether it is held now.
    """

    __slots__ = ("again", "causes", "indexes", "is_held", "is_window", "offsets", "partition", "stuck", "write")

    def __init__(
        self,
        partition: HoldingPartition,
        offsets: Sequence[int],
        stuck: Sequence[int],
        causes: MutableMapping[int, str],
        indexes: Sequence[int],
        again: Callable[[], None],
        write: Callable[[], None],
        *,
        is_window: bool = False,
    ) -> None:
        """Keep what there is to do."""
        self.is_held = False
        self.is_window = is_window
        self.partition = partition
        self.offsets = offsets
        self.stuck = stuck
        self.causes = causes
        self.indexes = indexes
        self.again = again
        self.write = write


class BrakeStatistics(msgspec.Struct, frozen=True):
    """What the brake holds.

    Attributes:
        held: How many messages.
    """

    held: int


class EngineBrake:
    """The brake of one engine.

    Args:
        max_ratio: `executor.max_failure_ratio`.
        log: The engine's.
        has_window_hook: Whether the handler has `on_window_complete`.
        braked: Called with True when nothing new is to be taken, with False when messages are taken again.
        take_one: Called when one new message is to be taken nevertheless; `taken` is told which.
        fail: Ends the engine.
    """

    def __init__(
        self,
        max_ratio: float,
        log: Any,
        braked: Callable[[bool], None],
        take_one: Callable[[], None],
        fail: Callable[[str], None],
        *,
        has_window_hook: bool,
    ) -> None:
        """Start with the brake off."""
        self._max_ratio = max_ratio
        self._log = log
        self._braked = braked
        self._take_one = take_one
        self._fail = fail
        self._has_window_hook = has_window_hook
        self._brake: Brake[HoldingPartition, Case] = Brake(max_ratio)
        self._timer: asyncio.TimerHandle | None = None
        self._why = ""
        #: Whether the engine fails when the brake comes on, instead of waiting.
        self.fails = False

    def statistics(self) -> BrakeStatistics:
        """Return what is held now."""
        return BrakeStatistics(self._brake.held)

    # -- called by windows ------------------------------------------------------------------------------------

    def failed(self, cause: str, text: str, case: Case) -> None:
        """Take a failure that would be dead-lettered: it is written or held.

        Args:
            cause: What failed with what, in a few words that are the same for equal failures.
            text: The failure's text.
            case: What to do about it.
        """
        for index in case.indexes:
            case.causes[index] = cause
        text = " ".join(redact_text(text).split())
        if len(text) > _TEXT_LENGTH:
            text = f"{text[: _TEXT_LENGTH // 2]} ... {text[-_TEXT_LENGTH // 2 :]}"
        self._apply(self._brake.note_failure((case.partition, case.offsets[0]), text, case))

    def ended(self, partition: HoldingPartition, offset: int, cause: str | None, *, is_alone: bool) -> None:
        """Note that the tasks and the hook of a message are over, or that it gets no task.

        Args:
            partition: Whose message.
            offset: Which.
            cause: What failed of it, None if nothing did.
            is_alone: Whether it is the only one of its window.
        """
        if cause is _RELEASED:
            return
        if self._brake.is_on and is_alone and self._has_window_hook:
            return  # it is tried together with its window
        self._apply(self._brake.note_finished((partition, offset), cause, self._now()))

    def window_ended(self, partition: HoldingPartition, offset: int) -> None:
        """Note that the hook of a window ended well; `offset`: of its first message."""
        self._apply(self._brake.note_success((partition, offset)))

    def window_failed(self, cause: str, spoiled: int) -> None:
        """Note that the hook of a window failed, with how many messages that had ended well."""
        if cause is not _RELEASED:
            self._apply(self._brake.note_window_failure(spoiled, cause, self._now()))

    def taken(self, partition: HoldingPartition, offset: int) -> None:
        """Note which message was taken to be tried."""
        self._brake.note_taken((partition, offset))

    def abandon(self, partition: HoldingPartition) -> None:
        """Forget what is held of a partition that was given up."""
        self._brake.abandon(partition)

    # -- what users and the engine want ---------------------------------------------------------------------------

    def release(self) -> None:
        """Dead-letter what is held, and start over; without effect while the brake is off."""
        held = self._brake.held
        if self._brake.is_on:
            self._log.warning("the brake is released by a user; what was held is dead-lettered", held=held)
            self._apply(self._brake.release())

    def describe_stall(self) -> str | None:
        """Return what failed and how often; None while the brake is off."""
        if not self._brake.is_on:
            return None
        held = self._brake.held
        text = f"{self._describe()}; {held} message{'s' if held != 1 else ''} held"
        if self._brake.due is not None:
            text += f", the next is tried in {max(0.0, self._brake.due - self._now()):.0f} s"
        return f"{text} (tidemill release dead-letters them)"

    def close(self) -> None:
        """Stop trying; what is held is left uncommitted."""
        if held := self._brake.held:
            self._log.warning("messages that the brake held are left for the next run", held=held)
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
                    self._log.info("the brake is off: messages are taken again")
                    self._braked(False)
                case TakeOne():
                    self._take_one()
                case Hold(case):
                    self._hold(case)
                case Again(case):
                    self._unhold(case)
                    for index in case.indexes:
                        case.causes.pop(index, None)
                    case.again()
                case Write(case):
                    if case.is_held:
                        self._unhold(case)
                        # A user decided: it says nothing more about the deployment.
                        case.causes.update(dict.fromkeys(case.indexes, _RELEASED))
                    case.write()
        if self._timer is None and self._brake.due is not None and not self.fails:
            self._timer = asyncio.get_running_loop().call_at(self._brake.due, self._tick)

    def _on(self) -> None:
        self._why = self._describe()
        if self.fails:
            error = TooManyFailuresError(
                f"{self._why}: more than executor.max_failure_ratio ({self._max_ratio:g}) allows; mend that and run it "
                "again, or set another ratio"
            )
            self._fail(describe_error(error))
            return
        self._log.error(
            "the brake is on: no new messages are taken, and what fails is held; tidemill release dead-letters it",
            why=self._why,
            max_failure_ratio=self._max_ratio,
            next_trial_seconds=TRIAL_SECONDS,
        )
        self._braked(True)

    def _describe(self) -> str:
        standing = self._brake.summarize()
        text = f"{standing.failed} of the last {standing.of} messages failed"
        if standing.times < standing.failed:
            text += f", {standing.times} of them"
        return f"{text} with {standing.cause} (last: {standing.last})"

    @staticmethod
    def _hold(case: Case) -> None:
        case.is_held = True
        case.partition.hold(case.stuck, is_window=case.is_window)

    @staticmethod
    def _unhold(case: Case) -> None:
        case.is_held = False
        case.partition.unhold(case.stuck, is_window=case.is_window)

    def _tick(self) -> None:
        self._timer = None
        if not self._brake.is_on:
            return
        self._apply(self._brake.tick(self._now()))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
