"""An engine over scripted parts, driven step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tidemill.config.settings import Settings
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.engine import Engine
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.tasks.resident import build_executor
from tidemill.runtime.identity import Identity
from tidemill.runtime.messages import SourceMessage
from tidemill.runtime.progress import EngineSummary
from tidemill.sources.base import TopicPartition
from tidemill.testing.run import build_scripted_sinks
from tidemill.testing.scripted import ScriptedDeadLetters, ScriptedSource

P0: TopicPartition = ("t", 0)
P1: TopicPartition = ("t", 1)


def message(offset: int, value: bytes | None = b"x", partition: int = 0) -> SourceMessage:
    return SourceMessage("t", partition, offset, None, value)


class Rig:
    """One engine and everything around it."""

    def __init__(self, handler: Handler[Any, Any], messages: list[SourceMessage], **config: Any) -> None:
        self.settings = Settings.model_validate(config)
        self.source = ScriptedSource(messages)
        self.sinks = build_scripted_sinks(self.settings)
        self.letters = ScriptedDeadLetters()
        self.engine = Engine(
            self.settings,
            handler,
            Identity("test", 0, "rig", "g", 1),
            self.source,
            Outbox(self.sinks, self.letters, handler.on_delivery_error, self.settings.delivery),
            self.letters,
            build_executor(self.settings.executor, "rig"),
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

    async def until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)

    async def committed(self, offset: int, partition: TopicPartition = P0) -> None:
        await self.until(lambda: self.source.committed.get(partition) == offset)

    async def settled(self) -> None:
        """Let everything that needs no outside event happen, commits included."""
        await asyncio.sleep(0.25)

    async def end(self) -> EngineSummary:
        self.engine.drain()
        assert self._task is not None
        return await asyncio.wait_for(self._task, 20)


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
