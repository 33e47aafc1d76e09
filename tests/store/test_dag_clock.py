"""The clock of the store is set by an hour, either way, at any moment of the life of tasks; on both databases."""

from __future__ import annotations

import pytest
from tests.store.dags import Player, dag, encode, task

from tidemill.core.tasks.endings import Deferral, Failure, Success
from tidemill.core.tasks.structure import ScheduleStructure
from tidemill.store.calls.instance_calls import TaskHistory
from tidemill.store.calls.run_calls import ListRuns, RunRecord
from tidemill.store.calls.service_calls import StoreFile
from tidemill.store.calls.trigger_calls import ClaimTriggers, FiredEvent, StoreEvents
from tidemill.store.database import Database

HOUR_US = 3_600_000_000
#: 2026-06-01 12:00:30 UTC.
NOON_US = 1_780_315_230_000_000


class Clock:
    """The clock of the store; `now_us` may be set."""

    def __init__(self, now_us: int) -> None:
        self.now_us = now_us

    def read(self, connection: object) -> int:
        """Return the time, which is a millisecond later than the last time that was returned."""
        self.now_us += 1_000
        return self.now_us


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(NOON_US)
    for module in ("context", "engines.call_batches"):
        monkeypatch.setattr(f"tidemill.store.{module}.read_now", clock.read)
    # Nor is the time of a statement about sessions taken.
    monkeypatch.setattr("tidemill.store.context.CallContext.note_now", lambda context, now_us: None)
    return clock


@pytest.fixture
async def player(clock: Clock, database: Database) -> Player:
    return await Player(database).begin()


class Life:
    """A run of three tasks, one after the other: the first one fails once, the second one defers."""

    def __init__(self, player: Player, clock: Clock, name: str) -> None:
        self.player, self.clock, self.name = player, clock, name
        self.run: RunRecord
        #: What happens, in order; each step does what can be done at once.
        self.steps = (self.create, self.fail, self.retry, self.defer, self.claim_trigger, self.fire, self.resume)

    async def create(self) -> None:
        tasks = task("a", retries=1, retry_delay_us=60_000_000), task("b", "a"), task("c", "b")
        self.run = await self.player.create(dag(*tasks, id=self.name))

    async def fail(self) -> None:
        await self.player.report(await self.player.claim_one(), Failure("the first time"))

    async def retry(self) -> None:
        attempts = await self.player.claim()
        if not attempts:  # what waits for a time waits for the clock
            due_us = (await self.player.schedule()).next_due_us
            assert due_us is not None
            self.clock.now_us = due_us
            attempts = await self.player.claim()
        assert [one.try_number for one in attempts] == [2]
        await self.player.report(attempts[0], Success())

    async def defer(self) -> None:
        trigger = Deferral("some.Trigger", "{}", "resume", timeout_us=4 * HOUR_US)
        await self.player.report(await self.player.claim_one(), trigger)

    async def claim_trigger(self) -> None:
        self.triggerer = await self.player.begin_service("triggerer")
        (self.claimed,) = await self.player.store.call(ClaimTriggers(self.triggerer, 1, 10))

    async def fire(self) -> None:
        event = FiredEvent(self.claimed.id, self.claimed.token, "1", None, self.clock.now_us)
        (outcome,) = await self.player.store.call(StoreEvents(self.triggerer, 1, (event,)))
        assert outcome.kind == "stored"

    async def resume(self) -> None:
        attempt = await self.player.claim_one()
        assert attempt.resume is not None
        await self.player.report(attempt, Success())

    async def check(self) -> None:
        """Fail unless each task has succeeded once, and nothing happened to it afterwards."""
        assert (await self.player.run(self.run)).state == "success"
        for name in "abc":
            history = await self.player.store.call(TaskHistory(self.run.dag_id, self.run.run_id, name))
            states = [row.after for row in history.rows]
            assert (states.count("success"), states[-1]) == (1, "success")


@pytest.mark.parametrize("set_by_us", [HOUR_US, -HOUR_US])
async def test_whenever_the_clock_is_set_each_task_of_a_run_ends_once(
    player: Player, clock: Clock, set_by_us: int
) -> None:
    for moment in range(8):
        life = Life(player, clock, f"dag{moment}")
        for number, step in enumerate(life.steps):
            if number == moment:
                clock.now_us += set_by_us
            await step()
        attempt = await player.claim_one()
        if moment == len(life.steps):  # while an attempt runs
            clock.now_us += set_by_us
        await player.report(attempt, Success())
        await life.check()
        assert (await player.schedule()).next_due_us is None


async def test_what_is_due_at_a_time_that_comes_twice_or_is_left_out_runs_once(player: Player, clock: Clock) -> None:
    schedule = ScheduleStructure("cron", cron="0 * * * *", start_us=NOON_US)
    await player.store.call(StoreFile("dag.py", "d", structures=(encode(dag(task("a"), schedule=schedule)),)))
    begin_us = clock.now_us
    # In minutes after noon.
    for minute in (1, 61, 2, 59, 61, 121, 181 + 30, 150, 211, 241):
        clock.now_us = begin_us + minute * 60_000_000
        await player.schedule()
        await player.play()

    runs = (await player.store.call(ListRuns("dag"))).rows
    hours = [(run.logical_us - NOON_US + 30_000_000) / HOUR_US for run in reversed(runs) if run.logical_us is not None]
    assert hours == [1, 2, 3, 4]
    assert {run.state for run in runs} == {"success"}
