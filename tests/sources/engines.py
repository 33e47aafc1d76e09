"""Engines of one topic over a real broker, in this process."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from typing import Any

from tests.until import LIMIT_SECONDS, until

from tidemill.config.settings import Settings
from tidemill.pipeline.build import build_engine
from tidemill.pipeline.engine import Engine
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.link.progress import EngineSummary

#: The drain and what it waits for.
END_SECONDS = 60


class Engines:
    """The engines that read a topic, as members of the group of its name; subclasses say how they are configured."""

    def __init__(self, broker: Any, topic: str, partitions: int) -> None:
        self.broker = broker
        self.topic = topic
        self.partitions = partitions
        broker.create_topic(topic, partitions=partitions)
        self.tasks: list[asyncio.Task[EngineSummary]] = []
        self.engines: list[Engine] = []

    def settings(self, **more: Any) -> Settings:
        raise NotImplementedError

    def start(self, handler: Handler[Any, Any], worker: str = "w", **more: Any) -> Engine:
        engine = build_engine(
            self.settings(**more), handler, EngineIdentity(worker, 0, uuid.uuid4().hex, self.topic, 1)
        )

        async def at_once() -> None:
            pass

        self.engines.append(engine)
        self.tasks.append(asyncio.ensure_future(engine.run(at_once)))
        return engine

    async def until(self, condition: Any, seconds: float = LIMIT_SECONDS) -> None:
        await until(condition, seconds)

    async def committed(self, count: int, seconds: float = LIMIT_SECONDS) -> None:
        """Wait until this many messages of the topic are committed, by whichever engines."""

        def total() -> int:
            ends: Counter[str] = Counter()
            for engine in self.engines:
                for partition, offset in engine.commits.statistics().committed.items():
                    ends[partition] = max(ends[partition], offset)
            return sum(ends.values())

        await self.until(lambda: total() == count, seconds)

    async def end(self) -> list[EngineSummary]:
        for engine in self.engines:
            engine.drain()
        return await asyncio.wait_for(asyncio.gather(*self.tasks), END_SECONDS)
