"""The handlers that the benchmarks run."""

from __future__ import annotations

import os
from typing import Any

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


class Cat(Handler[Any, Any]):
    """One `cat` per message, its output into a file."""

    async def arrange(self, messages, pending):
        return [ExecutorTask(f"{m.partition}-{m.offset}", source_offsets=(m.offset,), stdin=m.value) for m in messages]

    async def on_task_complete(self, result):
        return CollectResult(files=[FilePayload(path="out.jsonl", data=result.stdout_bytes)])


class Known(Handler[Any, Any]):
    """A known result per message, into a file."""

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(
                f"{m.partition}-{m.offset}",
                source_offsets=(m.offset,),
                precomputed=PrecomputedResult(m.value),
            )
            for m in messages
        ]

    async def on_task_complete(self, result):
        return CollectResult(files=[FilePayload(path="out.jsonl", data=result.stdout_bytes)])


class Transform(Handler[Any, Any]):
    """A line per message into a file, without tasks."""

    async def transform(self, messages):
        return [FilePayload(path="out.jsonl", data=m.value) for m in messages]


class KnownTopic(Known):
    """A known result per message, into a topic."""

    async def on_task_complete(self, result):
        return CollectResult(kafka=[KafkaPayload(key=result.task.task_id, data=result.stdout_bytes)])


class Sleepy(Handler[Any, Any]):
    """`cat` per message into a topic, with the engine that ran it; a message that says so takes three seconds."""

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(
                f"{m.partition}-{m.offset}",
                ("-c", "sleep 3; cat") if m.value.startswith(b"slow") else (),
                source_offsets=(m.offset,),
                binary_path="/bin/sh" if m.value.startswith(b"slow") else "/bin/cat",
                stdin=m.value,
            )
            for m in messages
        ]

    async def on_task_complete(self, result):
        return CollectResult(kafka=[KafkaPayload(data=b"%s|%d" % (result.stdout_bytes, os.getpid()))])


class Stuck(Handler[Any, Any]):
    """Tasks that never end, so that messages queue."""

    async def arrange(self, messages, pending):
        with open("arranged", "a") as counted:
            counted.write(f"{len(messages)}\n")
        return [
            ExecutorTask(f"{m.partition}-{m.offset}", ("600",), source_offsets=(m.offset,), binary_path="sleep")
            for m in messages
        ]


class KnownRecord(Known):
    """A known result per message, into a file, as what a table, a collection or an endpoint gets of it."""

    async def on_task_complete(self, result):
        data = {"id": result.task.task_id, "line": result.stdout}
        return CollectResult(files=[FilePayload(path="out.jsonl", data=data)])


class KnownRow(Known):
    """A known result per message, into a table."""

    async def on_task_complete(self, result):
        data = {"id": result.task.task_id, "line": result.stdout}
        return CollectResult(postgres=[PostgresPayload(table="lines", data=data, op="upsert", conflict="id")])


class KnownDocument(Known):
    """A known result per message, into a collection."""

    async def on_task_complete(self, result):
        data = {"_id": result.task.task_id, "line": result.stdout}
        return CollectResult(mongo=[MongoPayload(collection="lines", data=data)])


class KnownRequest(Known):
    """A known result per message, to an endpoint."""

    async def on_task_complete(self, result):
        data = {"id": result.task.task_id, "line": result.stdout}
        return CollectResult(http=[HttpPayload(data=data, idempotency_key=result.task.task_id)])


class KnownKey(Known):
    """A known result per message, under a key."""

    async def on_task_complete(self, result):
        return CollectResult(redis=[RedisPayload(key=result.task.task_id, data=result.stdout_bytes)])
