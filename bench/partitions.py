"""What an engine's own work costs with many partitions, JSON lines out: `python -m bench.partitions`.

One partition has a message at a time, the others are idle. `turn` is what the loop does for one message from its
arrival until it is done, `beat` what the engine says of itself four times a second, encoded, decoded and applied, and
`status` what the driver makes of two engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from bench.harness import report

from tidemill.cli.terminal.status_text import format_status
from tidemill.config.settings import Settings
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.engine import Engine
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.tasks.resident import build_executor
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.beats import Beat, apply_beat
from tidemill.runtime.link.progress import EngineProgress
from tidemill.sources.base import SourceStatistics
from tidemill.spark.progress import EngineStatus, PartitionSums, sum_progress
from tidemill.spark.run_state import RunPhase, RunState
from tidemill.testing.run import build_scripted_sinks
from tidemill.testing.scripted import ScriptedDeadLetters, ScriptedSource

MESSAGES = 2_000


class Nothing(Handler[Any, Any]):
    """No task per message."""

    async def arrange(self, messages: Any, pending: Any) -> list[Any]:
        return []


def seconds_each(call: Callable[[], object], times: int) -> float:
    """Return what a call takes, on average."""
    start = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - start) / times


def part_of(beat: EngineProgress, half: int) -> EngineProgress:
    """Return what one of two engines would say that share the partitions."""
    names = beat.partitions[half::2]
    owned = set(names)
    return EngineProgress(
        partitions=names,
        lag={name: count for name, count in beat.lag.items() if name in owned},
        committed={name: offset for name, offset in beat.committed.items() if name in owned},
    )


async def measure(partitions: int) -> None:
    """Report the costs with so many partitions."""
    settings = Settings()
    source = ScriptedSource([SourceMessage("t", n, 0, None, b"x") for n in range(partitions)])
    letters = ScriptedDeadLetters()
    handler = Nothing()
    engine = Engine(
        settings,
        handler,
        EngineIdentity("bench", 0, "bench", "g", 1),
        source,
        Outbox(build_scripted_sinks(settings), letters, handler.on_delivery_error, settings.delivery),
        letters,
        build_executor(settings.executor, "bench"),
    )

    async def at_once() -> None:
        pass

    running = asyncio.ensure_future(engine.run(at_once))
    while len(source.committed) < partitions:
        await asyncio.sleep(0.01)
    engine.commits.send = lambda: None  # type: ignore[method-assign]  # commits are collected; they are not what is measured
    cpu = time.process_time()
    for offset in range(1, MESSAGES + 1):
        source.feed(SourceMessage("t", 0, offset, None, b"x"))
        while engine.counters.messages_done < partitions + offset:
            await asyncio.sleep(0)
    turn = (time.process_time() - cpu) / MESSAGES
    lag = {("t", n): n for n in range(partitions)}
    statistics = SourceStatistics(0, lag)
    source.statistics = lambda: statistics  # type: ignore[method-assign]  # as with Kafka: the same until it is looked at again
    seen = apply_beat(engine.beat(whole=True), EngineProgress())

    def send_beat() -> int:
        """Take a beat in which one partition moved to the other side of the link; return its size."""
        nonlocal seen
        engine.commits.note_committed(("t", 0), MESSAGES)
        encoded = msgspec.msgpack.encode(engine.beat(whole=False))
        seen = apply_beat(msgspec.msgpack.decode(encoded, type=Beat), seen)
        return len(encoded)

    beat_bytes = send_beat()
    beat = seconds_each(send_beat, 200)
    halves = [part_of(engine.progress(), n) for n in range(2)]
    statuses = [EngineStatus(n, "running", progress=half) for n, half in enumerate(halves)]
    sums = PartitionSums()
    state = RunState(RunPhase.RUNNING)

    def show_status() -> str:
        """Say how two engines stand, of which one has committed something."""
        halves[0].committed = dict(halves[0].committed)
        return format_status(state, sum_progress((), halves, statuses, sums), 0.0, 120)

    status = seconds_each(show_status, 200)
    report(
        partitions=partitions,
        turn_us=turn * 1e6,
        beat_us=beat * 1e6,
        status_us=status * 1e6,
        beat_bytes=beat_bytes,
    )
    del engine.commits.send
    engine.drain()
    await running


if __name__ == "__main__":
    for count in (1, 4, 100, 1_000):
        asyncio.run(measure(count))
