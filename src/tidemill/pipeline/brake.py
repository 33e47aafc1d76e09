"""The shell of `core.pipeline.brake` (`executor.max_failure_ratio`): holds failures and retries them.

Invariants: while the brake is on, the engine takes only the one message of the next trial. A held message is
unresolved, so no commit passes it; drains and revokes do not wait for it. Bounded engines fail instead of braking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from typing import Any, Protocol

import msgspec

from tidemill.config.redaction import redact_text
from tidemill.core.errors import TooManyFailuresError, describe_error
from tidemill.core.pipeline.brake import TRIAL_SECONDS, Again, Brake, Effect, HoldCase, Off, On, TakeOne, Write

#: Longer failure texts are cut in the middle to this many characters.
_TEXT_LENGTH = 300
#: The cause of a failure that was dead-lettered because a user released the brake.
_RELEASED = "released"


class HoldingPartition(Hashable, Protocol):
    """The brake's view of an owned partition."""

    def hold(self, offsets: Sequence[int], *, is_window: bool) -> None:
        """Count a held failure: its messages are stuck, or (`is_window`) a shutdown need not wait for the window's
        hook.
        """

    def unhold(self, offsets: Sequence[int], *, is_window: bool) -> None:
        """Stop counting a failure that is no longer held."""


class Case:
    """A failure that would be dead-lettered.

    Args:
        partition: The partition of its messages.
        offsets: The messages that the letter would contain.
        stuck: The messages that stay unresolved while the failure is held.
        causes: The causes of failure of the messages in the window, by index; the brake updates them.
        indexes: The indexes of this failure's messages in the window.
        again: Retries the failed task or hook.
        write: Writes the letter and continues with the message.
        is_window: Whether the window's hook failed.

    Attributes:
        is_held: Whether the brake holds it now.
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
    """Counts of the brake.

    Attributes:
        held: How many messages are held.
    """

    held: int


class EngineBrake:
    """The brake of one engine.

    Args:
        max_ratio: `executor.max_failure_ratio`.
        log: The engine's logger.
        braked: Called with True to stop taking messages, with False to take them again.
        take_one: Called when one message is to be taken for a trial; the intake then calls `taken`.
        fail: Ends the engine.
        has_window_hook: Whether the handler has `on_window_complete`.
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
        return BrakeStatistics(self._brake.held)

    # -- called by windows ------------------------------------------------------------------------------------

    def failed(self, cause: str, text: str, case: Case) -> None:
        """Accept a failure that would be dead-lettered; depending on the brake it is written or held.

        Args:
            cause: The failed step and its error in a few words; equal failures have equal causes.
            text: The failure's text.
            case: What to retry or write.
        """
        for index in case.indexes:
            case.causes[index] = cause
        text = " ".join(redact_text(text).split())
        if len(text) > _TEXT_LENGTH:
            text = f"{text[: _TEXT_LENGTH // 2]} ... {text[-_TEXT_LENGTH // 2 :]}"
        self._apply(self._brake.note_failure((case.partition, case.offsets[0]), text, case))

    def ended(self, partition: HoldingPartition, offset: int, cause: str | None, *, is_alone: bool) -> None:
        """Record that the tasks and the hook of a message have ended, or that the message has no task.

        Args:
            partition: The partition of the message.
            offset: The offset of the message.
            cause: The cause of its failure; None: it succeeded.
            is_alone: Whether the window has no other message.
        """
        if cause is _RELEASED:
            return
        if self._brake.is_on and is_alone and self._has_window_hook:
            return  # the trial ends with the hook of its window
        self._apply(self._brake.note_finished((partition, offset), cause, self._now()))

    def window_ended(self, partition: HoldingPartition, offset: int) -> None:
        """Record that the hook of a window succeeded; `offset` is the offset of its first message."""
        self._apply(self._brake.note_success((partition, offset)))

    def window_failed(self, cause: str, spoiled: int) -> None:
        """Record that the hook of a window failed; `spoiled` of its messages had succeeded until then."""
        if cause is not _RELEASED:
            self._apply(self._brake.note_window_failure(spoiled, cause, self._now()))

    def taken(self, partition: HoldingPartition, offset: int) -> None:
        """Record which message was taken for the trial."""
        self._brake.note_taken((partition, offset))

    def abandon(self, partition: HoldingPartition) -> None:
        """Forget the held failures of a partition that was given up."""
        self._brake.abandon(partition)

    # -- called by users and the engine ------------------------------------------------------------------------------

    def release(self) -> None:
        """Dead-letter everything that is held and reset the brake; no effect while the brake is off."""
        held = self._brake.held
        if self._brake.is_on:
            self._log.warning("a user released the brake; the held messages are dead-lettered", held=held)
            self._apply(self._brake.release())

    def describe_wait(self) -> str | None:
        """Return what failed and how often; None while the brake is off."""
        if not self._brake.is_on:
            return None
        held = self._brake.held
        text = f"{self._describe()}; {held} message{'s' if held != 1 else ''} held"
        if self._brake.due is not None:
            text += f", next retry in {max(0.0, self._brake.due - self._now()):.0f} s"
        return f"{text} (tidemill release dead-letters them)"

    def close(self) -> None:
        """Stop the trials; held messages stay uncommitted."""
        if held := self._brake.held:
            self._log.warning("messages held by the brake are left for the next run", held=held)
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
                case HoldCase(case):
                    self._hold(case)
                case Again(case):
                    self._unhold(case)
                    for index in case.indexes:
                        case.causes.pop(index, None)
                    case.again()
                case Write(case):
                    if case.is_held:
                        self._unhold(case)
                        # A user's decision says nothing about whether the deployment works: it does not count as a
                        # failure.
                        case.causes.update(dict.fromkeys(case.indexes, _RELEASED))
                    case.write()
        if self._timer is None and self._brake.due is not None and not self.fails:
            self._timer = asyncio.get_running_loop().call_at(self._brake.due, self._tick)

    def _on(self) -> None:
        self._why = self._describe()
        if self.fails:
            error = TooManyFailuresError(
                f"{self._why}: more than executor.max_failure_ratio ({self._max_ratio:g}) allows; fix the cause and "
                "run it again, or raise the ratio"
            )
            self._fail(describe_error(error))
            return
        self._log.error(
            "the brake is on: no messages are taken and failed ones are held; tidemill release dead-letters them",
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
