"""Handlers that engines import: a module of tests would bring pytest with it into each."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from tidemill.config.settings import Settings
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ErrorAction, ExecutorTask, PrecomputedResult


class Quiet(Handler[bytes, bytes]):
    drain_seconds = 0.0
    ends: dict[int, str] = {}

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class SlowFirst(Quiet):
    """Slot 0 is slow to be ready; says who was ready when."""

    async def on_ready(self, config: Settings, sinks: Any) -> None:
        with open(self.journal, "a") as file:
            file.write(f"begin {os.getpid()}\n")
            file.flush()
            time.sleep(0.3)
            file.write(f"end {os.getpid()}\n")


class SecondWaits(Quiet):
    """The first that comes, slot 0, is ready at once, the second when a file says so."""

    async def on_ready(self, config: Settings, sinks: Any) -> None:
        folder = Path(self.folder)
        if not (folder / "first").exists():
            (folder / "first").touch()
            return
        (folder / "second").touch()
        while not (folder / "go").exists():
            await asyncio.sleep(0.02)


class Refusing(Quiet):
    async def on_ready(self, config: Settings, sinks: Any) -> None:
        raise RuntimeError("the database is not migrated")


class Mixed(Handler[Any, Any]):
    """Known results, except for every thousandth message: that one fails in a process."""

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        tasks = []
        for message in messages:
            known = None if int(message.value) % 1000 == 0 else PrecomputedResult("x")
            task_id = f"task-{message.value.decode()}"
            tasks.append(
                ExecutorTask(
                    task_id,
                    ("-c", "echo no luck >&2; exit 3"),
                    source_offsets=(message.offset,),
                    binary_path="/bin/sh",
                    precomputed=known,
                )
            )
        return tasks

    async def on_error(self, task: ExecutorTask, error: Any) -> ErrorAction:
        return ErrorAction.SKIP
