"""Workers that are told to stop while a task runs which takes longer than they may."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.services.hosts.fleet import count, wait_for
from tests.size import sized
from tests.store.dags import Player, dag, task
from tests.store.server import PostgresServer

from tidemill.config.known_secrets import KnownSecrets
from tidemill.core.tasks.worker_slots import WorkerLimits
from tidemill.services.worker.preloads import PRELOADS
from tidemill.services.worker.store_link import WorkerFencedError
from tidemill.services.worker.worker_config import WorkerConfig
from tidemill.services.worker.worker_session import WorkerSession
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Setup
from tidemill.store.calls.service_calls import BeginSession, LoseSession
from tidemill.store.engines.opening import open_store

FILE = """
import pathlib, time
from tidemill.dags import DAG, task

HERE = pathlib.Path(__file__).parent

with DAG("long", schedule=None):
    @task(retries=0)
    def work():
        with (HERE / "begun").open("a") as file:
            print("begun", file=file)
        while not (HERE / "go").exists():
            time.sleep(0.02)
        time.sleep(SECONDS)
        with (HERE / "done").open("a") as file:
            print("done", file=file)
        return "done"
    work()
"""
#: More than the losses after which a task fails.
DRAINS = 8
#: How long the last attempt takes.
SECONDS = sized(0.1, 60.0)


class Rollout:
    """Workers, each of which is told to stop while the task runs, and followed by another one."""

    def __init__(self, player: Player, folder: Path, zygote: ZygoteClient, drain_seconds: float) -> None:
        self.player, self.folder = player, folder
        self.stop = asyncio.Event()
        config = WorkerConfig(folder, WorkerLimits(concurrency=4, recycle_after=100, grace_seconds=5.0))
        about = BeginSession("worker", "w", "host", "boot", 1)
        session = WorkerSession(config, drain_seconds, about, player.store, zygote, KnownSecrets())
        self.running = asyncio.ensure_future(session.run(self.stop))

    async def wait_for_attempt(self, number: int) -> None:
        """Wait until the task has begun as often as this."""
        begun = self.folder / "begun"
        async with asyncio.timeout(60):
            while not begun.exists() or len(begun.read_text().splitlines()) < number:
                await self.player.schedule()
                await asyncio.sleep(0.02)

    async def end(self) -> None:
        self.stop.set()
        await self.running


@pytest.fixture
async def player(postgres: PostgresServer) -> AsyncIterator[Player]:
    store = await open_store(await postgres.new_database())
    yield await Player(store).begin()
    await store.close()


@pytest.fixture
async def zygote(tmp_path: Path) -> AsyncIterator[ZygoteClient]:
    zygote = ZygoteClient(Setup(PRELOADS, (), (str(tmp_path),)))
    yield zygote
    await zygote.close()


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_long_task_is_handed_back_by_many_drains_uses_up_nothing_and_ends_once(
    player: Player, zygote: ZygoteClient, tmp_path: Path
) -> None:
    (tmp_path / "long.py").write_text(FILE.replace("SECONDS", str(SECONDS)))
    run = await player.create(dag(task("work"), id="long"))
    for number in range(1, DRAINS + 1):
        worker = Rollout(player, tmp_path, zygote, drain_seconds=0.1)
        await worker.wait_for_attempt(number)
        await worker.end()
        assert (await player.states(run))["work"] == "queued"
    worker = Rollout(player, tmp_path, zygote, drain_seconds=120.0)
    await worker.wait_for_attempt(DRAINS + 1)
    (tmp_path / "go").touch()
    # This one may take as long as the task.
    await worker.end()

    assert (await player.run(run)).state == "success"
    assert (tmp_path / "done").read_text() == "done\n"
    found = (await player.tasks(run))["work"]
    assert (found.tries, found.error) == (1, None)
    assert await count(player.store, "SELECT count(*) FROM task_journal WHERE after = 'success'") == 1
    assert (
        await count(player.store, "SELECT count(*) FROM service_session WHERE kind = 'worker' AND ended_us IS NULL")
        == 1
    )


@pytest.mark.timeout(300)
async def test_a_worker_that_is_killed_while_it_drains_loses_nothing_that_counts(
    player: Player, zygote: ZygoteClient, tmp_path: Path
) -> None:
    (tmp_path / "long.py").write_text(FILE.replace("SECONDS", "0"))
    run = await player.create(dag(task("work"), id="long"))
    worker = Rollout(player, tmp_path, zygote, drain_seconds=120.0)
    await worker.wait_for_attempt(1)
    worker.stop.set()
    stopping = "SELECT count(*) FROM service_session WHERE kind = 'worker' AND stopping = 1"
    await wait_for(player.store, stopping, 1, "it says that it stops")
    number = await count(player.store, "SELECT max(id) FROM service_session WHERE kind = 'worker'")

    assert await player.store.call(LoseSession(number, player.scheduler))

    with contextlib.suppress(WorkerFencedError):
        await worker.running
    assert await count(player.store, "SELECT max(lost) FROM task_instance") == 1, "as if it had been handed back"
    assert (await player.states(run))["work"] == "queued"
    journal = "SELECT count(*) FROM task_journal WHERE given ILIKE 'returned%'"
    assert await count(player.store, journal) == 1
