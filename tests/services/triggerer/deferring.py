"""Defers tasks in a real store, as a worker would, and looks at what became of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Deferral
from tidemill.runtime.json.codec import encode_sorted
from tidemill.store.calls.instance_calls import ListTasks, TaskRecord
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.setting_calls import SetPool
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt
from tidemill.store.database import StoreClient

TIME_DELTA = "tidemill.triggers.builtin.temporal.TimeDeltaTrigger"
#: Reports of one turn.
_TURN = 500


class Deferring:
    """A run of tasks that defer.

    Attributes:
        player: Plays scheduler and worker.
        run: The run.
        resumed: The attempts that were claimed after their deferral, by task.
        resumed_at: When, by `time.time`.
    """

    def __init__(self, store: StoreClient) -> None:
        self.player = Player(store)
        self.run: RunRecord
        self.resumed: dict[str, ClaimedAttempt] = {}
        self.resumed_at: dict[str, float] = {}

    async def defer(
        self, tasks_to_defer: int, classpath: str = TIME_DELTA, /, timeout_us: int | None = None, **kwargs: Any
    ) -> None:
        """Defer this many tasks, t0, t1 ..., to triggers of a class."""
        await self.player.begin()
        tasks = [task(f"t{n}", pool="wide", retries=0) for n in range(tasks_to_defer)]
        await self.player.store.call(SetPool("wide", 1_000_000))
        self.run = await self.player.create(dag(*tasks))
        deferral = Deferral(classpath, encode_sorted(kwargs), "resume", timeout_us=timeout_us)
        left = tasks_to_defer
        while left:
            attempts = await self.player.claim(_TURN)
            new = [one for one in attempts if one.resume is None]
            self._note_resumed([one for one in attempts if one.resume is not None])
            await self.player.turn(*[AttemptReport(one.task, one.epoch, deferral) for one in new])
            left -= len(new)

    async def take_resumed(self) -> int:
        """Claim what has been resumed, and return how many attempts that are."""
        attempts = await self.player.claim(_TURN)
        self._note_resumed(attempts)
        return len(attempts)

    def _note_resumed(self, attempts: Sequence[ClaimedAttempt]) -> None:
        now = time.time()
        for one in attempts:
            assert one.resume is not None, f"{one.task_id} begins again"
            assert one.task_id not in self.resumed, f"{one.task_id} was resumed twice"
            self.resumed[one.task_id] = one
            self.resumed_at[one.task_id] = now

    async def failed(self) -> list[TaskRecord]:
        """Return the tasks that have failed."""
        return list((await self.player.store.call(ListTasks(self.run.dag_id, self.run.run_id, ("failed",)))).rows)

    async def wait_resumed(self, count: int, seconds: float = 60.0) -> None:
        """Wait until this many tasks have been resumed in all, and none has failed."""
        deadline = time.monotonic() + seconds
        while len(self.resumed) < count:
            if not await self.take_resumed():
                failed = await self.failed()
                assert not failed, (failed[0].task_id, failed[0].error)
                assert time.monotonic() < deadline, f"{len(self.resumed)} of {count} tasks were resumed"
                await asyncio.sleep(0.02)
        assert not await self.failed()
