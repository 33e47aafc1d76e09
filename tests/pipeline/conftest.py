"""An engine over scripted parts, driven step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.until import LIMIT_SECONDS, until

from tidemill.config.settings import Settings
from tidemill.deadletters.writer import DeadLetters
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.engine import Engine
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.recording.letters import RecordedLetters
from tidemill.pipeline.recording.recorder import EngineRecorder
from tidemill.pipeline.tasks.resident import build_executor
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.progress import EngineSummary
from tidemill.sources.base import TopicPartition
from tidemill.testing.run import build_scripted_sinks
from tidemill.testing.scripted import ScriptedDeadLetters, ScriptedSource

P0: TopicPartition = ("t", 0)
P1: TopicPartition = ("t", 1)


def message(offset: int, value: bytes | None = b"x", partition: int = 0) -> SourceMessage:
    return SourceMessage("t", partition, offset, None, value)


#: A timer that is due within this time is waited for.
SOON_SECONDS = 0.25
#: This many turns of the event loop without anything to do mean that nothing goes on.
QUIET_TURNS = 10


def _due_soon() -> list[asyncio.Handle]:
    """Return what the running loop is about to call, but for the watch over the loop itself, which never ends."""
    loop: Any = asyncio.get_running_loop()
    soon = loop.time() + SOON_SECONDS
    timers = [timer for timer in loop._scheduled if not timer.cancelled() and timer.when() < soon]
    return [*loop._ready, *(timer for timer in timers if "BlockWatch" not in repr(timer))]


class Rig:
    """One engine and everything around it."""

    def __init__(self, handler: Handler[Any, Any], messages: list[SourceMessage], **config: Any) -> None:
        self.settings = Settings.model_validate(config)
        self.source = ScriptedSource(messages)
        self.sinks = build_scripted_sinks(self.settings)
        self.letters = ScriptedDeadLetters()
        letters: DeadLetters = self.letters
        self.recorder = EngineRecorder(self.settings.debug) if "debug" in config else None
        if self.recorder is not None:
            letters = RecordedLetters(self.letters, self.recorder)
        self.engine = Engine(
            self.settings,
            handler,
            EngineIdentity("test", 0, "rig", "g", 1),
            self.source,
            Outbox(self.sinks, letters, handler.on_delivery_error, self.settings.delivery),
            letters,
            build_executor(self.settings.executor, "rig"),
            recorder=self.recorder,
        )
        self._task: asyncio.Task[EngineSummary] | None = None

    @property
    def files(self) -> Any:
        return self.sinks["filesystem"]["files"]

    def start(self) -> Rig:
        async def at_once() -> None:
            pass

        self._task = asyncio.ensure_future(self.engine.run(at_once))
        return self

    async def until(self, condition: Callable[[], object], seconds: float = LIMIT_SECONDS) -> None:
        await until(condition, seconds)

    async def committed(self, offset: int, partition: TopicPartition = P0) -> None:
        """Wait until an offset is committed, and the engine knows."""
        await self.until(lambda: self.source.committed.get(partition) == offset)
        await asyncio.sleep(0)  # the source's answer is the next thing that the loop calls

    async def settled(self) -> None:
        """Wait until nothing more happens without an event from outside: what is due soon is done, commits included."""
        quiet = 0
        while quiet < QUIET_TURNS:
            quiet = 0 if _due_soon() else quiet + 1
            await asyncio.sleep(0 if quiet else 0.002)

    async def end(self) -> EngineSummary:
        self.engine.drain()
        assert self._task is not None
        return await asyncio.wait_for(self._task, 30)


@pytest.fixture
async def rig() -> AsyncIterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(handler: Handler[Any, Any], messages: list[SourceMessage], **config: Any) -> Rig:
        rigs.append(Rig(handler, messages, **config))
        return rigs[-1].start()

    yield make
    for each in rigs:
        if each._task is not None and not each._task.done():
            each.engine.settings.executor.drain_timeout_seconds = 0.0
            await each.end()


Gate = Callable[[], Awaitable[None]]
