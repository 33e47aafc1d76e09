"""The handler of the failure tests: one process per message, one line per result."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pydantic

import tidemill
from tidemill import (
    CollectResult,
    ExecutorTask,
    FilePayload,
    Handler,
    HttpPayload,
    KafkaPayload,
    MongoPayload,
    PostgresPayload,
    PrecomputedResult,
    RedisPayload,
)


class Job(pydantic.BaseModel):
    n: int
    sleep: float = 0
    bad: bool = False


class Work(Handler[Job, Any]):
    async def arrange(self, messages, pending):
        return [
            ExecutorTask(
                f"{m.partition}-{m.offset}",
                ("-c", f"sleep {m.payload.sleep}; exec cat") if m.payload.sleep else ("-c", "exec cat"),
                source_offsets=(m.offset,),
                binary_path="/bin/sh",
                stdin=m.value,
                metadata={"partition": m.partition, "offset": m.offset, "n": m.payload.n},
            )
            for m in messages
        ]

    async def on_task_complete(self, result):
        return CollectResult(files=[FilePayload(path="out.jsonl", data={**result.task.metadata, "at": time.time()})])


class BlockOnce(Work):
    """Holds up its event loop for good when a message says so, in the first engine that gets it."""

    async def arrange(self, messages, pending):
        for message in messages:
            marker = "blocked-once"
            if message.payload.bad and not os.path.exists(marker):
                with open(marker, "w"):
                    time.sleep(600)
        return await super().arrange(messages, pending)


class Deliver(Handler[Job, Any]):
    """A known result per message, with a key that keeps its order, into each type of sink that there is."""

    async def on_ready(self, config, sinks):
        self.sinks = frozenset(config.sinks.group_by_type())

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(
                f"{m.partition}-{m.offset}",
                source_offsets=(m.offset,),
                precomputed=PrecomputedResult(),
                metadata={"n": m.payload.n, "bad": m.payload.bad},
            )
            for m in messages
        ]

    async def on_task_complete(self, result):
        if result.task.metadata["bad"]:
            raise ValueError("this one is bad")
        outputs = make_outputs(result.task.metadata["n"])
        names = {"filesystem": "files"}
        return CollectResult(**{names.get(kind, kind): outputs[kind] for kind in self.sinks})


def make_outputs(n: int) -> dict[str, list[Any]]:
    """Return what a message is for each type of sink."""
    key, data = f"k{n % 8}", {"n": n}
    row = PostgresPayload(table="latest", data={"id": key, **data}, op="upsert", conflict="id")
    change = {"$set": data, "$push": {"seen": n}}
    return {
        "filesystem": [FilePayload(path="out.jsonl", data=data)],
        "kafka": [KafkaPayload(key=key, data=data)],
        "postgres": [row],
        "mongo": [MongoPayload(collection="latest", data=change, op="upsert", filter={"_id": key})],
        "http": [HttpPayload(data=data, idempotency_key=f"{n}")],
        "redis": [
            RedisPayload(key=f"latest:{key}", data=n),
            RedisPayload(key=f"seen:{key}", data=n, op="push"),
        ],
    }


class DeliverTransformed(Handler[Job, Any]):
    """The same without tasks."""

    async def on_ready(self, config, sinks):
        self.sinks = frozenset(config.sinks.group_by_type())

    async def transform(self, messages):
        if any(m.payload.bad for m in messages):
            raise ValueError("one of these is bad")
        made = [make_outputs(m.payload.n) for m in messages]
        return [[payload for kind in self.sinks for payload in outputs[kind]] for outputs in made]


class InTurn(DeliverTransformed):
    """Writes a second file in hooks of different lengths: in order only if those of a key wait for each other."""

    async def on_message_complete(self, group):
        n = group.source_message.payload.n
        await asyncio.sleep(0.01 * (n // 8 % 3))
        return CollectResult(files=[FilePayload(path="done.jsonl", data={"n": n})])


class StuckOnce(DeliverTransformed):
    """Never returns for a message that says so."""

    async def transform(self, messages):
        if any(m.payload.bad for m in messages):
            with open("stuck", "w"):
                await asyncio.Event().wait()
        return await super().transform(messages)


class Shipped(Work):
    """Says with each result which code made it."""

    async def on_task_complete(self, result):
        row = {**result.task.metadata, "at": time.time(), "pid": os.getpid(), "code": tidemill.__file__}
        return CollectResult(files=[FilePayload(path="out.jsonl", data=row)])


class Transform(Handler[Job, Any]):
    """A line per message without a task; where the work is done is part of it."""

    async def transform(self, messages):
        for message in messages:
            if message.payload.bad:
                raise LookupError("no such customer")
        await asyncio.sleep(0.05)  # or all would be done before an engine is killed
        return [
            FilePayload(path="out.jsonl", data={"partition": m.partition, "offset": m.offset, "n": m.payload.n})
            for m in messages
        ]

    async def on_window_complete(self, results, messages):
        return CollectResult(files=[FilePayload(path="windows.jsonl", data={"n": [m.payload.n for m in messages]})])
