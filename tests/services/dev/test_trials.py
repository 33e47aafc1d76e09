"""A trigger that ends its process, among others."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.services.triggerer.deferring import Deferring
from tests.store.dags import dag, task

from tidemill.services.dev.child import Child, Death
from tidemill.services.dev.trials import Trials
from tidemill.store.call_server import CallServer
from tidemill.store.calls import BeginService, Deferral, ListServices, LoseService, Report
from tidemill.store.sqlite import SqliteDatabase, open_sqlite

_CODE = """
import asyncio, os, pathlib, signal
from tidemill.triggers.base import BaseTrigger, TriggerEvent


class Ends(BaseTrigger):
    def __init__(self, how):
        self.how = how

    def serialize(self):
        return "hard.Ends", {"how": self.how}

    async def run(self):
        await asyncio.sleep(0.1)
        if self.how.startswith("exit"):
            os._exit(int(self.how[4:]))
        os.kill(os.getpid(), getattr(signal, self.how))
        yield TriggerEvent("never")


class Waits(BaseTrigger):
    def __init__(self, path):
        self.path = path

    def serialize(self):
        return "hard.Waits", {"path": self.path}

    async def run(self):
        while not pathlib.Path(self.path).exists():
            await asyncio.sleep(0.05)
        yield TriggerEvent("here")
"""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    opened = await open_sqlite(tmp_path / "store.db")
    yield opened
    await opened.close()


@asynccontextmanager
async def triggerer(store: SqliteDatabase, folder: Path) -> AsyncIterator[list[Death]]:
    """Keep a triggerer running, as `dev` does, and yield its deaths."""
    deaths: list[Death] = []
    server = CallServer(store, folder / "calls.sock")
    await server.start()
    module = "tidemill.services.triggerer.task_process"
    arguments = ["-m", module, str(server.path), "--folder", str(folder)]
    about = BeginService("triggerer", "t", "here", "boot", os.getpid())
    trials = Trials(store, arguments, os.environ, sys.stderr.fileno(), about)

    async def note_death(death: Death) -> None:
        deaths.append(death)
        for service in await store.call(ListServices("triggerer")):
            if service.pid == death.pid:
                await trials.note_death(service.id, death)
                await store.call(LoseService(service.id))

    child = Child("triggerer", arguments, os.environ, sys.stderr.fileno(), note_death)
    holder = await store.call(BeginService("dev", "t", "here", "boot", os.getpid()))
    tasks = [asyncio.create_task(child.run()), asyncio.create_task(trials.run(holder))]
    try:
        yield deaths
    finally:
        await child.stop(10.0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        await server.close()
    assert [one.kind for one in await store.call(ListServices("triggerer"))] == []


@pytest.mark.parametrize(
    ("how", "named"),
    [
        pytest.param("exit3", "ended with 3", marks=pytest.mark.long),
        ("exit0", "ended with 0"),
        ("SIGSEGV", "ended with SIGSEGV"),
    ],
)
async def test_one_that_ends_its_process_is_found_among_others_and_fails_while_those_go_on(
    store: SqliteDatabase, tmp_path: Path, how: str, named: str
):
    (tmp_path / "hard.py").write_text(_CODE)
    there = tmp_path / "there"
    deferring = Deferring(store)
    player = await deferring.player.begin()
    deferring.run = await player.create(dag(*[task(f"t{n}", retries=0) for n in range(4)]))
    waits = Deferral("hard.Waits", f'{{"path": "{there}"}}', "resume")
    ends = Deferral("hard.Ends", f'{{"how": "{how}"}}', "resume")
    attempts = await player.claim()
    culprit = attempts[2].task_id
    await player.turn(*[Report(one.task, one.epoch, ends if one.task_id == culprit else waits) for one in attempts])

    async with triggerer(store, tmp_path) as deaths:
        async with asyncio.timeout(300):
            while not (failed := await deferring.failed()):
                await asyncio.sleep(0.1)
        assert [one.task_id for one in failed] == [culprit]
        assert (failed[0].error or "").startswith("TaskDeferralError: the process that ran this trigger, and no other")
        assert named in (failed[0].error or "")
        there.touch()
        async with asyncio.timeout(300):
            while len(deferring.resumed) < 3:
                await deferring.take_resumed()
                await asyncio.sleep(0.1)
        assert len(deaths) == 3
