"""A handler whose tasks and hooks fail, each in another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.config.settings import Settings
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask
from tidemill.sinks.payloads import CollectResult, KafkaPayload


class Failing(Handler[Any, Any]):
    """Fails as each message says."""

    async def on_startup(self, settings: Settings) -> Settings:
        settings.executor.max_retries = 0
        settings.executor.window_size = 1
        settings.executor.task_timeout_seconds = 30.0
        settings.executor.max_stdout_bytes = 1_000
        return settings

    async def arrange(self, messages: Sequence[Any], pending: Any) -> Any:
        (message,) = messages
        what = message.value.decode()
        if what == "arrange":
            raise ValueError("no such field: total")
        if what == "tasks":
            return "task"
        program, args = {
            "missing": ("no-such-program", []),
            "refused": ("/etc/passwd", []),
            "exit": ("sh", ["-c", "echo 'input is not valid' >&2; exit 3"]),
            "slow": ("sleep", ["60"]),
            "loud": ("sh", ["-c", "yes | head -c 5000"]),
            "payload": ("true", []),
        }[what]
        limit = 0.5 if what == "slow" else None
        return [ExecutorTask(what, args, binary_path=program, timeout_seconds=limit, source_offsets=[message.offset])]

    async def on_task_complete(self, result: Any) -> CollectResult:
        return CollectResult(kafka=[KafkaPayload(data=object())])
