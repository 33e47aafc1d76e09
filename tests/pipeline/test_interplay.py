"""Where features meet: key order with the brake, and a stop with hooks that do not end."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from tests.pipeline.conftest import P0, message
from tests.pipeline.test_key_order import keyed, known

from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask


class Mixed(Handler[Any, Any]):
    """Lets the brake on; then a task of 56 fails while its other one waits for the key of 55, which runs."""

    def __init__(self):
        self.go, self.finish = asyncio.Event(), asyncio.Event()
        self.done, self.cancelled = [], []

    async def arrange(self, messages, pending):
        return [*(known(str(n), n) for n in range(53)), known("55", 55), known("56", 56), known("both", 56, 57)]

    async def on_task_complete(self, result):
        name = result.task.task_id
        try:
            if name == "55":
                await self.finish.wait()
            elif name == "56":
                await self.go.wait()
                raise LookupError("late")
            elif name != "both":
                raise LookupError("broken")
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        self.done.append(name)


async def test_a_drain_waits_for_what_runs_although_a_held_message_waits_for_a_key_too(rig):
    handler, keys = Mixed(), {55: "k", 56: "h", 57: "k"}
    run = rig(
        handler,
        [keyed(n, keys.get(n)) for n in range(58)],
        executor={"order_by": "key", "max_failure_ratio": 0.5, "window_size": 58, "drain_timeout_seconds": 5},
    )
    await run.until(lambda: "brake of engine 0" in run.engine.progress().waits)
    handler.go.set()
    await run.until(lambda: 56 in run.engine.intake.partitions[P0].held)
    lane = run.engine.intake.partitions[P0]
    assert lane.busy, f"{lane.unresolved} unresolved, {lane.stuck} stuck"
    asyncio.get_running_loop().call_later(0.5, handler.finish.set)
    await run.end()
    assert handler.cancelled == []
    assert "55" in handler.done


class Deaf(Handler[Any, Any]):
    """Ignores being cancelled."""

    ends = False

    async def arrange(self, messages, pending):
        return [ExecutorTask("p", ["60"], binary_path="sleep", source_offsets=[1]), known("0", 0)]

    async def on_task_complete(self, result):
        while True:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                if self.ends:
                    raise


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_hook_that_ignores_its_cancellation_does_not_keep_the_rest_of_the_stop(rig):
    handler = Deaf()
    run = rig(handler, [message(0), message(1)], executor={"drain_timeout_seconds": 0.2})
    await run.until(lambda: run.engine.context.pool.statistics().running == 1)
    await run.settled()
    seconds_left, close = [], run.source.close

    async def closing(*, leave, seconds=30.0):
        seconds_left.append(seconds)
        await close(leave=leave)

    run.source.close = closing
    pids = [each.pid for each in run.engine.executor._processes]
    assert pids
    await run.end()
    handler.ends = True
    assert not [pid for pid in pids if lives(pid)]
    assert seconds_left[0] > 0.5
