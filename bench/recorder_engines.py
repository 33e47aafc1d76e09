"""What the flight recorder costs a whole engine: `python -m bench.recorder_engines [known|resident]`, JSON lines out.

Two engines in one process, one of which is recorded, get messages from memory in turn and write into files. CPU time
per message is that of the process, so without Kafka's client, driver and copies of a resident program, and what the
machine does beside it weighs on both alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.handlers import Cat, Known
from bench.harness import chosen, report
from bench.pipeline import ECHO

from tidemill.config.settings import Settings
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.engine import Engine
from tidemill.pipeline.recording.recorder import EngineRecorder
from tidemill.pipeline.tasks.resident import build_executor
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.build import build_sinks
from tidemill.testing.scripted import ScriptedDeadLetters, ScriptedSource

ROUNDS = 12
PARTITIONS = 4
PROGRAM = {"args": ["-I", "-S", "-c", ECHO], "send_ahead": 16}
RESIDENT = {"binary_path": sys.executable, "mode": "resident", "resident": PROGRAM}


class Side:
    """An engine, and where its messages come from."""

    def __init__(self, handler: Any, records: bool, folder: Path, executor: dict[str, Any]) -> None:
        settings = Settings.model_validate(
            {
                "sinks": {"filesystem": {"out": {"base_path": str(folder)}}},
                "kafka": {"brokers": "x:1", "source_topic": "t", "consumer_group": "g"},
                "debug": {"enabled": records},
                "executor": executor,
            }
        )
        self.recorder = EngineRecorder(settings.debug) if records else None
        self.fed = 0
        self.recorded = 0
        letters = ScriptedDeadLetters()
        self.source = ScriptedSource(self.make(PARTITIONS))
        outbox = Outbox(build_sinks(settings), letters, handler.on_delivery_error, settings.delivery)
        name = "recorded" if records else "plain"
        tasks = build_executor(settings.executor, f"bench-{name}")
        identity = EngineIdentity("bench", 0, name, "g", 1)
        self.engine = Engine(settings, handler, identity, self.source, outbox, letters, tasks, recorder=self.recorder)

    def make(self, count: int) -> list[SourceMessage]:
        now, first = time.time_ns() // 1000, self.fed
        self.fed += count
        return [
            SourceMessage(
                "t",
                n % PARTITIONS,
                n // PARTITIONS,
                None,
                b"%07d " % n + b"x" * 89,
                (),
                now // 1000 + n // 50,
                consumed_at=now + n // 100,
            )
            for n in range(first, first + count)
        ]

    async def work(self, count: int, ahead: int) -> float:
        """Let messages go through, so many at a time; returns the seconds of CPU time, what is recorded included."""
        messages, done = self.make(count), self.fed - count
        began = time.process_time()
        for start in range(0, count, ahead):
            self.source.feed(*messages[start : start + ahead])
            messages[start : start + ahead] = [None] * ahead  # type: ignore[list-item]  # they are the engine's now
            await self.wait(done + start - ahead)
        await self.wait(self.fed)
        if self.recorder is not None:
            self.engine.context.finished.flush()  # type: ignore[union-attr]
            self.recorder._pack_messages(float("inf"))
            self.recorder._pack_tasks()
            await self.recorder._wait_for_threads()
            while (frame := self.recorder.frames.take_next()) is not None:
                self.recorded += frame.count if frame.table == "messages" else 0
                self.recorder.frames.note_stored(frame.seq)
        return time.process_time() - began

    async def wait(self, count: int) -> None:
        while any(self.source.committed.get(("t", n), 0) * PARTITIONS < count for n in range(PARTITIONS)):
            await asyncio.sleep(0.001)


async def compare(name: str, handler: Any, count: int, ahead: int, executor: dict[str, Any]) -> None:
    """Measure rounds in turn; all that went through has to be recorded."""

    async def at_once() -> None: ...

    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder:
        sides = [Side(handler(), on, Path(folder) / str(on), executor) for on in (False, True)]
        running = [asyncio.ensure_future(side.engine.run(at_once)) for side in sides]
        gc.freeze()
        gc.set_threshold(200_000, 20, 20)  # as in an engine
        for side in sides:
            await side.wait(PARTITIONS)
            await side.work(count, ahead)
        spent = [[await side.work(count, ahead) / count * 1e6 for side in sides] for _ in range(ROUNDS)]
        for side in sides:
            side.engine.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*running), 30)
    assert sides[1].recorded == sides[1].fed, (sides[1].recorded, sides[1].fed)
    report(
        bench=f"recorder engines, {name}",
        plain_us=statistics.median(plain for plain, _ in spent),
        recorded_us=statistics.median(recorded for _, recorded in spent),
        more_us=statistics.median(recorded - plain for plain, recorded in spent),
        load=os.getloadavg()[0],
    )


if __name__ == "__main__":
    measures = {"known": (Known, 10_000, 2_000, {}), "resident": (Cat, 3_000, 500, RESIDENT)}
    for name in chosen(measures):
        asyncio.run(compare(name, *measures[name]))
