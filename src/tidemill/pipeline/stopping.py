"""The stop of an engine, by one deadline: drain, commit, release everything, leave the group.

The deadline is the drain timeout and `END_SECONDS`, counted from the word to stop, whatever is away by then: what does
not end in time is left to the end of the process. What is not finished or not committed is redelivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from tidemill.pipeline.tasks.process import TaskExecutor
from tidemill.runtime.kept_warden import KeptWarden

if TYPE_CHECKING:
    from tidemill.pipeline.engine import Engine, Report

#: Beyond the drain timeout. The driver needs the rest of 5 s to end Spark.
END_SECONDS = 2.5
#: Of that, what closing sinks and leaving the group may take when commits took all the time before.
CLOSE_SECONDS = 0.8
#: Hooks may take this long to end once they are cancelled.
HOOK_SECONDS = 1.0
#: Hooks that have not returned for this long are named at the end of the drain timeout.
UNRETURNED_SECONDS = 1.0
#: A step that comes too late still gets this long.
LATE_SECONDS = 0.3


class Stopping:
    """One stop of one engine.

    Args:
        engine: Whose.
        executor: What runs its processes.
        report: Where finished messages are reported, if anywhere.
        warden: Cleans up after this process if it is killed.
    """

    def __init__(
        self, engine: Engine, executor: TaskExecutor, report: Report | None, warden: KeptWarden | None
    ) -> None:
        """Begin to count the time."""
        self._engine = engine
        self._executor = executor
        self._report = report
        self._warden = warden
        self._loop = asyncio.get_running_loop()
        self._drained_by = self._loop.time() + engine.settings.executor.drain_timeout_seconds
        self._ended_by = self._drained_by + END_SECONDS

    async def run(self) -> None:
        """Drain unless the end is a failure; then release everything, whatever goes wrong on the way."""
        engine = self._engine
        await self._tried("periodic hooks", engine.services.stop_periodic())
        if engine.subscribed and not engine.failed:
            await self._tried("drain", self._drain())
        engine.intake.stop()
        for lane in engine.intake.lanes.values():
            lane.close()
            engine.outbox.abandon(lane.partition)
        if engine.brake is not None:
            engine.brake.close()
        commits = engine.subscribed and not engine.failed
        # What was committed does not wait for what is killed.
        await asyncio.gather(
            self._tried("hooks and tasks", self._end_work()),
            self._tried("last commit", self._last_commit()) if commits else asyncio.sleep(0),
        )
        if engine.subscribed and not engine.failed:
            await self._tried("on_revoke", self._gave_up())
        await self._tried("services", engine.services.close())
        await asyncio.gather(
            self._tried("sinks", engine.outbox.close()),
            self._tried("dead letters", engine.letters.close()),
            self._tried("report", self._report.close()) if self._report is not None else asyncio.sleep(0),
        )
        if self._warden is not None:
            self._warden.close()
        if engine.subscribed:
            seconds = self._left() - LATE_SECONDS / 3
            await self._tried("consumer", engine.source.close(leave=not engine.failed, seconds=seconds))

    def _left(self) -> float:
        return max(LATE_SECONDS, self._ended_by - self._loop.time())

    async def _tried(self, what: str, step: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._left()):
                await step
        except TimeoutError:
            self._engine.log.warning("a step of the stop did not end in time and is left", step=what)
        except Exception:
            self._engine.log.exception("a step of the stop failed", step=what)

    async def _drain(self) -> None:
        engine = self._engine
        engine.intake.stop()
        engine.source.stop_fetching()
        try:
            async with asyncio.timeout_at(self._drained_by):
                await engine.idle()
        except TimeoutError:
            left = sum(lane.unresolved for lane in engine.intake.lanes.values())
            engine.log.warning(
                "the drain timeout is over; what is left is redelivered",
                messages=left,
                **({"hooks": unreturned} if (unreturned := engine.hooks.calls.unreturned(UNRETURNED_SECONDS)) else {}),
            )
        await engine.outbox.flush(max(0.0, self._drained_by - self._loop.time()))

    async def _end_work(self) -> None:
        try:
            async with asyncio.timeout(HOOK_SECONDS):
                await self._engine.hooks.close()
        except TimeoutError:
            self._engine.log.warning("hooks did not end when they were cancelled, and are left")
        seconds = max(0.0, self._left() - CLOSE_SECONDS)
        await self._engine.pool.close(min(self._engine.settings.executor.term_grace_seconds, seconds))

    async def _last_commit(self) -> None:
        engine = self._engine
        try:
            async with asyncio.timeout_at(self._ended_by - CLOSE_SECONDS):
                await engine.commits.finish()
        except TimeoutError:
            engine.commits.give_up()
            engine.log.warning(
                "the last commits failed; finished messages will be reprocessed",
                messages=engine.commits.failed,
                reason=engine.source.stalled() or "no answer from the brokers",
            )
        engine.commits.close()

    async def _gave_up(self) -> None:
        engine = self._engine
        if engine.intake.lanes:
            await engine.partition_hook("on_revoke", list(engine.intake.lanes))
