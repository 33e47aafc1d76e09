"""Triggerers over one store are stopped and lost, and hand triggers over, while users clear and mark tasks at random.

`on_kill` is called for each user action on a trigger that has run, and never otherwise; once, unless the triggerer that
has called it is lost before the store knows. The triggerers are the objects that run in services;
`tests.store.test_kills_random` plays them by calls alone.

KILLS_SEED=7 pytest -s --nightly tests/services/triggerer/test_kills_random.py
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.size import sized
from tests.store.dags import Player, dag, task
from tests.until import until

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.sections.triggerer_settings import TriggererSettings
from tidemill.core.tasks.endings import Deferral
from tidemill.core.tasks.task_row import TaskState
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.triggerer.hosting import host as host_module
from tidemill.services.triggerer.tasks.folder_code import FolderCode
from tidemill.services.triggerer.tasks.host import TaskHost
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks, TaskRecord
from tidemill.store.calls.service_calls import BeginSession, LoseSession, TrialKind
from tidemill.store.calls.trigger_calls import ClaimTriggers, ClearDeaths, FindSuspects, KillCalled, ReleaseTriggers
from tidemill.store.calls.worker_calls import AttemptReport
from tidemill.store.database import Database
from tidemill.triggers.base import BaseTrigger, TriggerEvent

ACTIONS = sized(25, 1_000)
SEED = int(os.environ.get("KILLS_SEED", "0")) or random.randrange(1_000_000)
TASKS = 6
#: The instances of each trigger that has run, one after the other.
RUNNING: dict[int, list[Waiting]] = {}
#: How often `on_kill` of each trigger was called.
KILLS: Counter[int] = Counter()
#: The triggers whose calls of `on_kill` the store knows of, and those for which it was called nevertheless.
KNOWN: set[int] = set()
AGAIN: set[int] = set()
#: The sessions that observers have ended.
LOST: set[int] = set()


class Waiting(BaseTrigger):
    """Waits until the test has it fire."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.test_kills_random.Waiting", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        RUNNING.setdefault(self.trigger_id, []).append(self)
        await self.go.wait()
        yield TriggerEvent("fired")

    async def on_kill(self) -> None:
        KILLS[self.trigger_id] += 1
        if self.trigger_id in KNOWN:
            AGAIN.add(self.trigger_id)


class Link:
    """A triggerer's access to the store; remembers its session, and counts its claims."""

    def __init__(self, store: Database) -> None:
        self._store = store
        self.session = self.claims = 0
        self._kills: dict[int, int] = {}

    label = "a store"

    @property
    def doorbell(self) -> Any:
        return self._store.doorbell

    async def close(self) -> None:
        return

    async def call(self, request: Any) -> Any:
        answer = await self._store.call(request)
        if isinstance(request, BeginSession):
            self.session = answer
        if isinstance(request, ClaimTriggers):
            self.claims += 1
            self._kills.update((one.kill, one.id) for one in answer if one.kill is not None)
        if isinstance(request, ReleaseTriggers) and request.session not in LOST:
            KNOWN.update(request.killed)
        if isinstance(request, KillCalled) and request.session not in LOST:
            KNOWN.add(self._kills[request.kill])
        return answer


class Triggerer:
    """One triggerer; it is started again whenever it has ended."""

    def __init__(self, store: Database, folder: Path, number: int) -> None:
        self._store, self._folder, self._number = store, folder, number
        self.start()

    def start(self) -> None:
        """Start it under another session."""
        self.link = Link(self._store)
        self._host = self._make()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._host.run(self._stop))

    def _make(self) -> TaskHost:
        about, code, secrets = self._build_session(), FolderCode(self._folder), KnownSecrets()
        lease = ServiceLease(60.0)
        return TaskHost(self.link, TriggererSettings(), about, code, 65_536, secrets, grace_seconds=60.0, lease=lease)

    def _build_session(self, trial: TrialKind = TrialKind.NONE) -> BeginSession:
        return BeginSession("triggerer", f"t{self._number}", "machine", "boot", 17, ("default",), 100, trial=trial)

    async def call_lost_kills(self) -> None:
        """Call `on_kill` of triggers whose triggerers were lost before, as a process does that its parent starts."""
        while (await self._store.call(FindSuspects(("default",)))).kills:
            session = await self._store.call(self._build_session(TrialKind.KILLS))
            await self._make().try_out(session, 60.0, asyncio.Event())
            await self._store.call(LoseSession(session, is_death=False))

    async def stop(self) -> None:
        """Stop it in order."""
        self._stop.set()
        await self._task

    async def shut_down(self) -> None:
        """Stop it in order, and start another one."""
        await self.stop()
        self.start()

    async def crash(self) -> None:
        """End it without a word to the store; an observer finds it dead."""
        await until(lambda: self.link.session)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._lose()
        self.start()

    async def fence(self) -> None:
        """Have an observer take it for dead although it runs: it ends its session, and begins another one."""
        await until(lambda: self.link.session)
        await self._lose()

    async def _lose(self) -> None:
        LOST.add(self.link.session)
        await self._store.call(LoseSession(self.link.session))
        # No trigger kills its triggerer here.
        await self._store.call(ClearDeaths(tuple(RUNNING)))

    async def hand_over(self, chance: random.Random) -> None:
        """Have a trigger run elsewhere, as one far above the others does."""
        if self._host.host is not None and (runs := sorted(self._host.host.runs.items())):
            chance.choice(runs)[1].hand_over()


class Site:
    """A run whose tasks are deferred again and again, and triggerers.

    Attributes:
        stopped: The triggers that users have stopped after they had run.
        did: How often each kind of action was done.
    """

    def __init__(self, store: Database, folder: Path) -> None:
        self.store, self.player, self.chance = store, Player(store), random.Random(SEED)
        self.triggerers = [Triggerer(store, folder, number) for number in range(3)]
        self.stopped: set[int] = set()
        self.did: Counter[str] = Counter()

    async def begin(self) -> None:
        await self.player.begin()
        self.run = await self.player.create(dag(*[task(f"t{n}", retries=99) for n in range(TASKS)]))

    async def defer(self) -> None:
        """Have every task that can run defer."""
        for attempt in await self.player.claim():
            deferral = Deferral(Waiting().serialize()[0], "{}", "resume")
            await self.player.turn(AttemptReport(attempt.task, attempt.epoch, deferral))

    async def act(self) -> None:
        """Do something that is no user action."""
        one = self.chance.choice(self.triggerers)
        name = self.chance.choice(["hand_over", "hand_over", "shut_down", "crash", "fence", "fire"])
        self.did[name] += 1
        if name == "hand_over":
            await one.hand_over(self.chance)
        elif name == "fire":
            await self._fire()
        else:
            await getattr(one, name)()

    async def _choose(self) -> tuple[TaskRecord, int | None]:
        """Return a task, and its trigger if it waits for one, which has run then."""
        tasks = await self.player.tasks(self.run)
        one = tasks[self.chance.choice(sorted(tasks))]
        if one.state != TaskState.DEFERRED.value:
            return one, None
        trigger = await self.store.read(lambda connection: _find_trigger(connection, one.id))
        await until(lambda: trigger in RUNNING)
        return one, trigger

    async def _fire(self) -> None:
        one, trigger = await self._choose()
        if trigger is None:
            return

        async def is_over() -> bool:
            # A new instance may have taken over from the one that was told.
            for instance in RUNNING[trigger]:
                instance.go.set()
            return (await self.player.tasks(self.run))[one.task_id].state != TaskState.DEFERRED.value

        async with asyncio.timeout(60):
            while not await is_over():
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Do what a user does."""
        one, trigger = await self._choose()
        if trigger is not None:
            self.stopped.add(trigger)
        where = self.run.dag_id, self.run.run_id, (one.task_id,)
        if self.chance.random() < 0.5:
            self.did["mark"] += 1
            await self.store.call(MarkTasks(*where, self.chance.choice(["success", "failed"]), "tester"))
        self.did["clear"] += 1
        await self.store.call(ClearTasks(*where, "tester"))


def _find_trigger(connection: Any, task: int) -> int:
    from sqlalchemy import text

    statement = text("SELECT max(id) FROM trigger WHERE task_id = :task")
    return int(connection.execute(statement, {"task": task}).scalar_one())


@pytest.mark.long
@pytest.mark.timeout(120 + ACTIONS)
async def test_on_kill_is_called_once_for_each_user_action_by_real_triggerers(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "DRAIN_SECONDS", 0.01)
    for kept in (RUNNING, KILLS, KNOWN, AGAIN, LOST):
        kept.clear()
    site = Site(database, tmp_path)
    try:
        await site.begin()
        for _ in range(ACTIONS):
            await site.defer()
            if site.chance.random() < 0.1:
                await site.triggerers[0].call_lost_kills()
            for _ in range(site.chance.randrange(3)):
                await site.act()
            await site.stop()
        await site.triggerers[0].call_lost_kills()
        await until(lambda: set(KILLS) >= site.stopped, what=lambda: f"KILLS_SEED={SEED}: {site.stopped - set(KILLS)}")
        # Whatever still waits to be called would be called now.
        for one in site.triggerers:
            await one.shut_down()
        await until(lambda: all(one.link.claims > 2 for one in site.triggerers))
        assert set(KILLS) == site.stopped, f"KILLS_SEED={SEED}"
        assert not AGAIN, f"KILLS_SEED={SEED}"
        assert len(site.stopped) > ACTIONS // 4
        print(
            f"KILLS_SEED={SEED}, load {os.getloadavg()[0]:.1f}: {len(site.stopped)} triggers stopped, "
            f"{KILLS.total()} calls, {dict(site.did)}"
        )
    finally:
        for one in site.triggerers:
            await one.stop()
