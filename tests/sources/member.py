"""One engine as a process of its own, without Spark: to be killed, stopped and continued.

    python -m tests.sources.member '{"settings": {...}, "worker": "w1"}'

SIGTERM drains it. Its patience with a slow coordinator is shorter than in production, so that more happens in a test.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

from tests import prepared

from tidemill.config.settings import Settings
from tidemill.pipeline.build import build_engine
from tidemill.pipeline.delivery import modes
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask, PrecomputedResult
from tidemill.runtime.identity import EngineIdentity
from tidemill.sinks.payloads import CollectResult, KafkaPayload
from tidemill.sources import transactional_producer


class Copy(Handler[Any, Any]):
    """Every message into the topic, keyed by its partition."""

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(
                f"{m.partition}-{m.offset}",
                source_offsets=[m.offset],
                metadata={"value": m.value.decode(), "partition": m.partition},
                precomputed=PrecomputedResult(),
            )
            for m in messages
        ]

    async def on_task_complete(self, result):
        await asyncio.sleep(0.001)
        data = result.task.metadata["value"].encode()
        return CollectResult(kafka=[KafkaPayload(key=str(result.task.metadata["partition"]), data=data)])


class Transform(Handler[Any, Any]):
    """The same without tasks."""

    async def transform(self, messages):
        return [KafkaPayload(key=str(m.partition), data=m.value) for m in messages]


class MemberProcess:
    """Such a process, seen from the test."""

    def __init__(self, folder: Path, worker: str, settings: dict[str, Any]) -> None:
        self.worker = worker
        self.log_path = folder / f"{worker}.log"
        with self.log_path.open("ab") as log:
            self.process = prepared.start(
                ["tests.sources.member", json.dumps({"settings": settings, "worker": worker})],
                code=prepared.MODULE,
                cwd=folder,
                env=os.environ,
                stdout=log,
                stderr=log,
            )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End it as a crash does."""
        if self.alive:
            self.process.kill()
        self.process.wait(60)


async def _run(settings: Settings, worker: str) -> int:
    engine = build_engine(
        settings, Copy(), EngineIdentity(worker, 0, uuid.uuid4().hex, settings.kafka.consumer_group, 1)
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, engine.drain)

    async def at_once() -> None:
        pass

    summary = await engine.run(at_once)
    print("ended:", summary.reason.value, summary.error, flush=True)
    return 0


def main() -> None:
    """Run the engine that the argument describes."""
    given = json.loads(sys.argv[1])
    transactional_producer.HANG_SECONDS = 3.0
    modes.LAST_TRANSACTION_SECONDS = 1.0
    asyncio.run(_run(Settings.model_validate(given["settings"]), given["worker"]))


if __name__ == "__main__":
    main()
