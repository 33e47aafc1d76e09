"""One slot of a running pipeline, as the supervisor sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from tidemill.core.supervision import slot_events
from tidemill.core.supervision.slot import Slot
from tidemill.core.supervision.slot_events import EngineEnding
from tidemill.core.supervision.slot_limits import SlotLimits
from tidemill.runtime.link.frames import HelloFrame
from tidemill.runtime.link.progress import EngineProgress, EngineSummary
from tidemill.spark.live.jobs import JobThread
from tidemill.spark.progress import EngineStatus, sum_progress


class SupervisedSlot:
    """A slot with the supervisor's state for it; changed on the link's loop only, read from any thread.

    Invariant: the sum of `past` and `progress` in a status never decreases when an engine is replaced: both change
    together, and the last progress of an engine is added to `past` before the next engine counts.
    """

    def __init__(self, number: int, limits: SlotLimits, jobs: JobThread) -> None:
        self.number = number
        self.machine = Slot(number, limits)
        self.jobs = jobs
        self.links: dict[int, int] = {}  # run token -> link
        self.last_run_token = 0
        self.hello: HelloFrame | None = None
        # The sums over earlier engines, and the progress of the current one, in one object so that readers see both
        # together.
        self._done: tuple[EngineProgress | None, EngineProgress | None] = (None, None)
        self._counted_token = 0
        self.summary: EngineSummary | None = None
        self.withheld: slot_events.JobEnded | None = None
        self.starts = 0
        self.subscribed = self.ready = False
        self.ended: EngineEnding | None = None
        self.last_seen = 0.0
        self.timer: asyncio.TimerHandle | None = None

    def renew(self, limits: SlotLimits) -> None:
        """Prepare for engines with new code; earlier engines still count in the sums."""
        if self.timer is not None:
            self.timer.cancel()
        self.machine = self.machine.renew(limits)
        self.withheld = self.timer = self.ended = None
        self.ready = False

    def set_timer(
        self, loop: asyncio.AbstractEventLoop, feed: Callable[[SupervisedSlot, slot_events.Input], None]
    ) -> None:
        """Schedule the next tick. An earlier timer stays, so beats, which only postpone the tick, set no new timer."""
        due = self.machine.due
        if self.timer is not None:
            if due is not None and self.timer.when() <= due:
                return
            self.timer.cancel()
        self.timer = None if due is None else loop.call_at(due, self._tick, loop, feed)

    def _tick(self, loop: asyncio.AbstractEventLoop, feed: Callable[[SupervisedSlot, slot_events.Input], None]) -> None:
        self.timer, due = None, self.machine.due
        if due is not None and loop.time() < due:
            self.set_timer(loop, feed)
        else:
            feed(self, slot_events.Tick())

    @property
    def progress(self) -> EngineProgress | None:
        """The last progress of the current engine."""
        return self._done[1]

    @progress.setter
    def progress(self, progress: EngineProgress) -> None:
        self._done = (self._done[0], progress)

    def retire_engine(self) -> None:
        """Add the progress of the current engine to the past, because another engine replaces it."""
        past, progress = self._done
        if progress is not None:
            self._done = (sum_progress([part for part in (past, progress) if part is not None], []), None)

    def admit(self, run_token: int, hello: HelloFrame) -> None:
        """Set the engine of this slot: a new one, or the current one on another connection."""
        if run_token != self._counted_token:
            self.retire_engine()
            self._counted_token = run_token
        self.hello = hello

    @property
    def link(self) -> int | None:
        """The link of the current engine."""
        return self.links.get(self.machine.run_token or 0)

    def status(self, now: float) -> EngineStatus:
        """Return the status of the slot."""
        past, progress = self._done
        return EngineStatus(
            slot=self.number,
            state=str(self.machine.state),
            pid=self.hello.pid if self.hello is not None else None,
            host=self.hello.host if self.hello is not None else None,
            starts=self.starts,
            silent_seconds=now - self.last_seen if self.link is not None else None,
            progress=progress,
            past=past,
        )


class LinkedCaller(msgspec.Struct, frozen=True):
    """An engine on a link."""

    slot: SupervisedSlot
    run_token: int
    hello: HelloFrame
