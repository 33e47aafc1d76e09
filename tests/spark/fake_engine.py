"""An engine without Kafka, for tests of the supervision: counts until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from tidemill.config.settings import Settings
from tidemill.core.pipeline.message_stage import MessageStage, OpenStage
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.link.beats import Beat, whole_beat
from tidemill.runtime.link.live_tasks import LiveState, LiveTask
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, StopReason


class FakeLive:
    """Says while it is watched that one task runs."""

    def __init__(self) -> None:
        self.until = 0.0

    def renew(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds

    def take_state(self) -> LiveState | None:
        task = LiveTask(0, "task-1", "", 1, "topic", 0, 17, 1.0)
        return LiveState(8, [task], [], 0, 0, [], 0, [], []) if time.monotonic() < self.until else None


class FakeEngine:
    """Behaves as the attributes of its handler say."""

    def __init__(self, settings: Settings, handler: Handler[Any, Any], identity: EngineIdentity) -> None:
        self.settings = settings
        self.handler = handler
        self.identity = identity
        self.consumed = 0
        self.subscribed = False
        self.paused = False
        self.stop = asyncio.Event()
        self.fault: str | None = None
        self.records = None
        self.live = FakeLive()
        self.prober = None

    def beat(self, *, whole: bool) -> Beat:
        return whole_beat(self.progress())

    def progress(self) -> EngineProgress:
        name = f"topic/{self.identity.slot}"
        return EngineProgress(
            consumed=self.consumed,
            paused=[name] if self.paused else [],
            partitions=[name] if self.subscribed else [],
        )

    async def run(self, may_subscribe: Callable[[], Awaitable[None]]) -> EngineSummary:
        slot = self.identity.slot
        try:
            await self.handler.on_ready(self.settings, None)
        except Exception as error:
            return EngineSummary(slot, StopReason.FAILED, f"HandlerError: {error}", self.progress())
        await may_subscribe()
        self.subscribed = True
        ends = getattr(self.handler, "ends", {}).get(slot)
        if ends is not None:
            return EngineSummary(slot, StopReason(ends), f"it was told to be {ends}", self.progress())
        while not self.stop.is_set():
            self.consumed += not self.paused
            await asyncio.sleep(0.01)
        if self.fault is not None:
            return EngineSummary(slot, StopReason.FAILED, self.fault, self.progress())
        await asyncio.sleep(getattr(self.handler, "drain_seconds", 0.0))
        return EngineSummary(slot, StopReason.DRAINED, None, self.progress())

    def find_message(self, topic: str, partition: int, offset: int) -> MessageStage | None:
        if (topic, partition) != ("topic", self.identity.slot):
            return None
        return MessageStage(stage=OpenStage.TASK, task_id=f"task-{offset}", seconds=3.0, pid=os.getpid())

    def drain(self, *, keep_membership: bool = False) -> None:
        self.stop.set()

    def fail(self, text: str) -> None:
        self.fault = text
        self.stop.set()

    def pause(self, partitions: Collection[int] | None = None) -> None:
        self.paused = partitions is None or self.identity.slot in partitions

    def resume(self) -> None:
        self.paused = False

    def release(self) -> None:
        pass


def build(settings: Settings, handler: Handler[Any, Any], identity: EngineIdentity) -> FakeEngine:
    return FakeEngine(settings, handler, identity)


def build_exiting(settings: Settings, handler: Handler[Any, Any], identity: EngineIdentity) -> FakeEngine:
    raise SystemExit(3)


def build_dying(settings: Settings, handler: Handler[Any, Any], identity: EngineIdentity) -> FakeEngine:
    os._exit(9)


def build_dying_once(settings: Settings, handler: Handler[Any, Any], identity: EngineIdentity) -> FakeEngine:
    try:
        os.mkdir(handler.folder)  # type: ignore[attr-defined]
    except FileExistsError:
        return FakeEngine(settings, handler, identity)
    os._exit(9)
