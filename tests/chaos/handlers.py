"""The handler of the failure tests: one process per message, one line per result."""

from __future__ import annotations

import os
import time
from typing import Any

import pydantic

import tidemill
from tidemill import CollectResult, ExecutorTask, FilePayload, Handler, KafkaPayload, PrecomputedResult


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


class Deliver(Handler[Job, Any]):
    """A known result per message, with a key that keeps its order, into whatever sinks there are."""

    async def on_ready(self, config, pg_pool):
        self.files, self.kafka = bool(config.sinks.filesystem), bool(config.sinks.kafka)

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
        n = result.task.metadata["n"]
        if result.task.metadata["bad"]:
            raise ValueError("this one is bad")
        return CollectResult(
            files=[FilePayload(path="out.jsonl", data={"n": n})] if self.files else [],
            kafka=[KafkaPayload(key=f"k{n % 8}", data={"n": n})] if self.kafka else [],
        )


class Shipped(Work):
    """Says with each result which code made it."""

    async def on_task_complete(self, result):
        row = {**result.task.metadata, "at": time.time(), "pid": os.getpid(), "code": tidemill.__file__}
        return CollectResult(files=[FilePayload(path="out.jsonl", data=row)])
