"""Handlers of the bounded runs' tests."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pydantic

from tidemill import CollectResult, ExecutorTask, FilePayload, Handler, PrecomputedResult


class Job(pydantic.BaseModel):
    n: int
    sleep: float = 0
    fail: bool = False


class Known(Handler[Job, Any]):
    """A known result per message, into a file."""

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(
                f"{m.partition}-{m.offset}",
                source_offsets=(m.offset,),
                precomputed=PrecomputedResult(),
                metadata={"n": m.payload.n},
            )
            for m in messages
        ]

    async def on_task_complete(self, result):
        return CollectResult(files=[FilePayload(path="out.jsonl", data=result.task.metadata)])


class Slow(Known):
    """A process of some milliseconds per message."""

    seconds = "0.02"

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(
                f"{m.partition}-{m.offset}",
                (self.seconds,),
                source_offsets=(m.offset,),
                binary_path="sleep",
                metadata={"n": m.payload.n},
            )
            for m in messages
        ]


class Slower(Slow):
    """A longer run, which is not over before a busy machine has looked at it."""

    seconds = "0.4"


class Flawed(Known):
    """A known result per message, but for those that are to fail."""

    async def arrange(self, messages, pending):
        tasks = await super().arrange(messages, pending)
        return [
            ExecutorTask(task.task_id, ("-c", "exit 3"), source_offsets=task.source_offsets, binary_path="/bin/sh")
            if message.payload.fail
            else task
            for task, message in zip(tasks, messages, strict=True)
        ]


class Shuffled(Known):
    """Results that take their time, so that only an order keeps them in order."""

    async def on_task_complete(self, result):
        await asyncio.sleep(random.random() * 0.02)
        return await super().on_task_complete(result)


class Broken(Known):
    """A deployment that lacks something."""

    async def on_task_complete(self, result):
        raise LookupError("no such table")


class Unready(Known):
    async def on_ready(self, config, sinks):
        raise LookupError("no such table")


class Lined(Handler[Job, Any]):
    """A line per message, without tasks, but for those that are to fail."""

    async def transform(self, messages):
        for message in messages:
            if message.payload.fail:
                raise LookupError("no such customer")
        return [FilePayload(path="out.jsonl", data={"n": message.payload.n}) for message in messages]
