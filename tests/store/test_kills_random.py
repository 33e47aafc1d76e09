"""Random cancels, hand-overs, shutdowns and losses: `on_kill` is called once for each user action, and only then.

`TIDEMILL_KILLS=1000` has that many random actions.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import count

import pytest
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Deferral
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.calls.instance_calls import ClearTasks
from tidemill.store.calls.service_calls import BeginSession, EndSession, LoseSession, TrialKind
from tidemill.store.calls.trigger_calls import (
    ClaimTriggers,
    ClearDeaths,
    FindSuspects,
    FiredEvent,
    HeldTriggers,
    KillCalled,
    ReleaseTriggers,
    StoreEvents,
)
from tidemill.store.calls.worker_calls import AttemptReport
from tidemill.store.database import Database

TASKS = 5
ACTIONS = int(os.environ.get("TIDEMILL_KILLS", "30"))


class Triggerer:
    """A triggerer that does what the real one does, without running triggers."""

    def __init__(self, site: Site) -> None:
        self.site, self.session = site, 0
        self.held: dict[int, int] = {}

    async def begin(self, trial: TrialKind = TrialKind.NONE) -> None:
        self.held.clear()
        self.session = await self.site.store.call(
            BeginSession("triggerer", "t", "machine", "boot", 17, ("default",), 9, trial=trial)
        )

    async def claim(self) -> None:
        call = ClaimTriggers(self.session, next(self.site.requests), 9, ("default",), held=len(self.held), kills=True)
        for one in await self.site.store.call(call):
            if one.kill is not None:
                self.site.kills[one.id] += 1
                assert await self.site.store.call(KillCalled(self.session, one.kill))
            else:
                self.held[one.id] = one.token
                self.site.ran[one.task] = one.id

    async def call_fatal_kills(self) -> None:
        """Claim what was lost with a triggerer, in sessions for that."""
        while (await self.site.store.call(FindSuspects(("default",)))).kills:
            await self.begin(TrialKind.KILLS)
            await self.claim()

    async def look(self) -> None:
        stops = await self.site.store.call(HeldTriggers(self.session, tuple(self.held.items())))
        killed = tuple(one.id for one in stops if one.reason == "user")
        self.site.kills.update(killed)
        released = tuple((one.id, self.held.pop(one.id)) for one in stops)
        await self.site.store.call(ReleaseTriggers(self.session, released, killed))

    async def hand_over(self) -> None:
        if self.held:
            one = self.site.chance.choice(sorted(self.held))
            await self.site.store.call(ReleaseTriggers(self.session, ((one, self.held.pop(one)),), moves=True))

    async def fire(self) -> None:
        if self.held:
            one = self.site.chance.choice(sorted(self.held))
            event = FiredEvent(one, self.held[one], "1", None, 0)
            await self.site.store.call(StoreEvents(self.session, next(self.site.requests), (event,)))

    async def stop(self) -> None:
        await self.site.store.call(EndSession(self.session))
        await self.begin()

    async def die(self) -> None:
        lost = tuple(self.held)
        await self.site.store.call(LoseSession(self.session))
        # No trigger kills its triggerer here.
        await self.site.store.call(ClearDeaths(lost))
        await self.begin()


class Site:
    """A run whose tasks are deferred again and again.

    Attributes:
        ran: The last trigger of each task that a triggerer has claimed.
        kills: How often `on_kill` of each trigger was called.
        stopped: The triggers that users have stopped after they had run.
    """

    def __init__(self, database: Database, seed: int) -> None:
        self.store, self.player, self.chance = database, Player(database), random.Random(seed)
        self.requests = count(1)
        self.ran: dict[int, int] = {}
        self.kills: Counter[int] = Counter()
        self.stopped: set[int] = set()
        self.triggerers = [Triggerer(self) for _ in range(3)]

    async def begin(self) -> None:
        await self.player.begin()
        self.run = await self.player.create(dag(*[task(f"t{n}", retries=99) for n in range(TASKS)]))
        for one in self.triggerers:
            await one.begin()

    async def defer(self) -> None:
        for attempt in await self.player.claim():
            self.ran.pop(attempt.task, None)
            report = AttemptReport(attempt.task, attempt.epoch, Deferral("package.Class", "{}", "resume"))
            await self.player.turn(report)

    async def clear(self) -> None:
        tasks = await self.player.tasks(self.run)
        one = self.chance.choice([tasks[name] for name in sorted(tasks)])
        if one.state == TaskState.DEFERRED.value and one.id in self.ran:
            self.stopped.add(self.ran.pop(one.id))
        await self.store.call(ClearTasks(self.run.dag_id, self.run.run_id, (one.task_id,), "tester"))


@pytest.mark.parametrize("seed", [1])
async def test_on_kill_is_called_for_user_actions_only_and_once_for_each(database: Database, seed: int):
    site = Site(database, seed)
    await site.begin()
    actions = ["claim", "look", "hand_over", "fire", "stop", "die"]
    for _ in range(ACTIONS):
        await site.defer()
        for _ in range(site.chance.randrange(4)):
            await getattr(site.chance.choice(site.triggerers), site.chance.choice(actions))()
        await site.clear()
    for _ in range(2):
        for one in site.triggerers:
            await one.look()
            await one.claim()
    await Triggerer(site).call_fatal_kills()
    assert site.kills == Counter(site.stopped)
    assert len(site.stopped) > ACTIONS // 10
