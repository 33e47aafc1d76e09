"""Actions of users on the engines of a running pipeline: pause and resume, release brakes, restart one engine.

`core.supervision` makes all decisions, and the link's loop carries them out. The functions for users may be called from
any other thread and wait for that loop, which is never busy for long. Invariant: every engine that connects is told
what is paused, and each pause ends by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import structlog

from tidemill.core.errors import UserActionError
from tidemill.core.supervision import slot_events
from tidemill.core.supervision.pauses import MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS, Pause, Pauses
from tidemill.core.supervision.slot_limits import SlotState
from tidemill.runtime.link import frames
from tidemill.runtime.link.frames import Command, ReleaseFrame
from tidemill.runtime.link.progress import brake_name
from tidemill.runtime.link.server import LinkServer
from tidemill.spark.live.supervised_slot import SupervisedSlot
from tidemill.spark.progress import PauseStatus

log = structlog.get_logger(__name__)

#: How long to wait for the link's loop, which is never busy for long.
CALL_SECONDS = 3.0
AnswerT = TypeVar("AnswerT")


class EngineActions(Protocol):
    """The engines, for use on the link's loop; see `Supervisor`."""

    def tell_pauses(self) -> None:
        """Tell all engines what is paused."""

    def send_to_slot(self, slot: SupervisedSlot, command: Command) -> None:
        """Send a command to the engine of a slot, if it is connected."""

    def feed(self, slot: SupervisedSlot, event: slot_events.Input) -> None:
        """Feed an event to a slot."""


class UserActions:
    """Carries out the actions of users.

    Args:
        engines: The engines.
        partitions: The number of partitions of the source topic; None if unknown.
    """

    def __init__(self, engines: EngineActions, partitions: int | None) -> None:
        self._engines = engines
        self._partitions = partitions
        self._pauses = Pauses()
        self._timer: asyncio.TimerHandle | None = None
        self._server: LinkServer | None = None
        self._slots: Sequence[SupervisedSlot] = ()
        #: Called on the loop when a pause has begun (True) or ended (False).
        self.on_pause: Callable[[Pause, bool], None] = lambda pause, begun: None

    def attach(self, server: LinkServer, slots: Sequence[SupervisedSlot]) -> None:
        """Connect to the link and the slots."""
        self._server, self._slots = server, slots

    # -- any thread ------------------------------------------------------------------------------------------

    def pause(self, seconds: float, partition: int | None, by: str) -> None:
        """Make engines take no new messages for a time; messages in flight continue.

        Args:
            seconds: The duration of the pause.
            partition: The partition of the source topic; None: all.
            by: The user who requested the pause.

        Raises:
            UserActionError: The partition does not exist, or the duration is out of bounds.
            RemoteError: The link is closing, or does not respond.
        """
        if seconds > MAX_PAUSE_SECONDS:
            raise UserActionError(f"a pause can be at most 7 days, not {seconds:g} s; to stop for longer, drain")
        if not seconds >= MIN_PAUSE_SECONDS:
            raise UserActionError(f"a pause must be at least 1 s, not {seconds:g} s; to end one, resume")
        if partition is not None and not self._is_known(partition):
            count = f"; it has {self._partitions}" if self._partitions is not None else ""
            raise UserActionError(f"the source topic has no partition {partition}{count}")
        self._call(lambda: self._pause(Pause(partition, self._loop.time() + seconds, by)))

    def _is_known(self, partition: int) -> bool:
        owned = (slot.progress.partitions for slot in self._slots if slot.progress is not None)
        # The topic may have gained partitions since the start.
        return 0 <= partition < (self._partitions or 2**31) or any(
            name.endswith(f"/{partition}") for names in owned for name in names
        )

    def resume(self, partition: int | None) -> int:
        """End the pause of a partition, or all pauses; return the number of pauses ended.

        Raises:
            UserActionError: The partition is paused only because all are.
            RemoteError: The link is closing, or does not respond.
        """
        if partition is not None and self._pauses.is_whole:
            raise UserActionError("all partitions are paused, not only this one; resume all of them")
        return self._call(lambda: self._resume(partition))

    def release(self) -> list[dict[str, Any]]:
        """Release the brakes that engines last reported, and return how many messages each one held.

        Raises:
            RemoteError: The link is closing, or does not respond.
        """
        return self._call(self._release)

    def restart(self, number: int) -> None:
        """Drain the engine of a slot and start another one that takes over its partitions.

        Raises:
            UserActionError: The slot does not exist, or its engine is not running.
            RemoteError: The link is closing, or does not respond.
        """
        if not 0 <= number < len(self._slots):
            raise UserActionError(f"there is no engine {number}; use 0 to {len(self._slots) - 1}")
        state = self._call(lambda: self._restart(self._slots[number]))
        if state is not SlotState.RUNNING:
            raise UserActionError(f"engine {number} cannot be restarted now: it is {state}; try again later")

    def list_pauses(self) -> list[PauseStatus]:
        """Return the pauses, with the time left for each."""
        if self._server is None:
            return []
        now, wall = self._loop.time(), time.time()
        return [
            PauseStatus(pause.partition, round(wall + pause.until - now, 1), max(0.0, pause.until - now), pause.by)
            for pause in self._pauses.all
        ]

    # -- on the loop -----------------------------------------------------------------------------------------

    @property
    def command(self) -> Command:
        """The command that tells an engine what is paused."""
        if self._pauses.is_whole:
            return frames.PauseFrame()
        partitions = self._pauses.partitions
        return frames.PauseFrame(partitions) if partitions else frames.ResumeFrame()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        assert self._server is not None
        return self._server.loop

    def _call(self, action: Callable[[], AnswerT]) -> AnswerT:
        assert self._server is not None

        async def run() -> AnswerT:
            return action()

        return self._server.call(run(), CALL_SECONDS)

    def _pause(self, pause: Pause) -> None:
        self._pauses.pause(pause)
        what = "all partitions" if pause.partition is None else f"partition {pause.partition}"
        log.info(f"{what} paused on request", by=pause.by, seconds=round(pause.until - self._loop.time()))
        self.on_pause(pause, True)
        self._tell()

    def _resume(self, partition: int | None) -> int:
        ended = self._pauses.resume(partition)
        self._end(ended)
        return len(ended)

    def _end(self, ended: Sequence[Pause]) -> None:
        for pause in ended:
            what = "all partitions are" if pause.partition is None else f"partition {pause.partition} is"
            log.info(f"{what} no longer paused", paused_by=pause.by)
            self.on_pause(pause, False)
        self._tell()

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._pauses.due
        self._timer = None if due is None else self._loop.call_at(due, self._tick)
        self._engines.tell_pauses()

    def _tick(self) -> None:
        self._timer = None
        # A timer may fire early by the resolution of the clock.
        self._end(self._pauses.tick(self._loop.time() + 0.01))

    def _release(self) -> list[dict[str, Any]]:
        told = []
        for slot in self._slots:
            if slot.progress is not None and brake_name(slot.number) in slot.progress.waits:
                self._engines.send_to_slot(slot, ReleaseFrame())
                told.append({"slot": slot.number, "held": slot.progress.held})
        return told

    def _restart(self, slot: SupervisedSlot) -> SlotState:
        state = slot.machine.state
        self._engines.feed(slot, slot_events.RestartRequested())
        return state
