"""Triggers that stream their events to tasks, in a real store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import DID
from tests.store.conftest import sqlite_url as url
from tests.store.dags import Player, dag, task
from tests.until import until

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.sections.triggerer_settings import TriggererSettings
from tidemill.core.tasks.endings import Deferral
from tidemill.core.triggers.event_plan import EventRefusal, EventRefused
from tidemill.runtime.json.codec import decode, encode_sorted
from tidemill.services.triggerer.tasks.folder_code import FolderCode
from tidemill.services.triggerer.tasks.host import TaskHost
from tidemill.store.calls.instance_calls import ListTasks
from tidemill.store.calls.run_calls import CancelRun, RunRecord
from tidemill.store.calls.service_calls import BeginSession
from tidemill.store.calls.stream_calls import KeepBatch, StreamBatch, StreamWant, TakeEvents
from tidemill.store.calls.worker_calls import ClaimedAttempt
from tidemill.store.database import Database

__all__ = ["url"]


class Streaming:
    """A task that has deferred to a trigger that streams."""

    def __init__(self, database: Database) -> None:
        self.database, self.player = database, Player(database)
        self.run: RunRecord

    async def defer(self, cls: type, **kwargs: Any) -> None:
        await self.player.begin()
        self.run = await self.player.create(dag(task("a")))
        classpath = f"tests.services.triggerer.hosted.{cls.__name__}"
        deferral = Deferral(classpath, encode_sorted(kwargs), "", streams=True)
        await self.player.report(await self.player.claim_one(), deferral)

    async def count_received(self) -> int:
        listed = await self.database.call(ListTasks(self.run.dag_id, self.run.run_id))
        (about,) = [one.stream for one in listed.rows]
        return 0 if about is None else about.received

    async def wait_received(self, count: int) -> None:
        async with asyncio.timeout(60):
            while await self.count_received() != count:
                await asyncio.sleep(0.01)

    async def claim(self) -> ClaimedAttempt:
        async with asyncio.timeout(60):
            while not (claimed := await self.player.claim()):
                await asyncio.sleep(0.02)
        (attempt,) = claimed
        return attempt

    async def take(self, attempt: ClaimedAttempt) -> StreamBatch:
        assert attempt.stream is not None
        (batch,) = await self.database.call(TakeEvents((StreamWant(attempt.stream.trigger, 0),)))
        return batch


@contextlib.asynccontextmanager
async def triggerer(store: Database, folder: Path, **settings: Any) -> AsyncIterator[TaskHost]:
    host = TaskHost(
        store,
        TriggererSettings(**settings),
        BeginSession("triggerer", "t", "here", "boot", 1, (), 10_000),
        FolderCode(folder),
        65_536,
        KnownSecrets(),
    )
    stop = asyncio.Event()
    running = asyncio.create_task(host.run(stop))
    yield host
    stop.set()
    await asyncio.wait_for(running, 60)


async def test_a_trigger_waits_at_its_yield_until_half_of_its_events_are_handled(database: Database, tmp_path: Path):
    DID.clear()
    streaming = Streaming(database)
    await streaming.defer(hosted.Counting, count=20, then="wait")
    async with triggerer(database, tmp_path, max_undelivered_events=10):
        attempt = await streaming.claim()
        assert attempt.stream is not None
        number = attempt.stream.trigger
        await streaming.wait_received(11)
        await database.call(KeepBatch(attempt.task, attempt.epoch, number, 5, 1))
        await streaming.wait_received(11)
        assert DID[number] == ["run"]
        await database.call(KeepBatch(attempt.task, attempt.epoch, number, 6, 2))
        await streaming.wait_received(17)
        assert DID[number] == ["run"]
        await database.call(KeepBatch(attempt.task, attempt.epoch, number, 17, 3))
        await streaming.wait_received(20)
        await until(lambda: DID[number] == ["run", "yielded"])


async def test_an_event_that_ends_the_task_ends_the_trigger_too(database: Database, tmp_path: Path):
    DID.clear()
    streaming = Streaming(database)
    await streaming.defer(hosted.EndingStream)
    async with triggerer(database, tmp_path):
        attempt = await streaming.claim()
        assert attempt.stream is not None
        number = attempt.stream.trigger
        await until(lambda: DID[number][-1:] == ["cleanup"])
        batch = await streaming.take(attempt)
    assert [decode(one.payload) for one in batch.events] == [0, 1]
    assert batch.ended
    assert batch.ending is not None
    assert (batch.ending.state, batch.ending.xcoms) == ("skipped", (("return_value", "7"),))
    assert DID[number] == ["cleanup"]


def refuse_all(host: TaskHost, refused: EventRefused, monkeypatch: Any) -> None:
    """Refuse all events, after they were stored."""
    assert host.host is not None
    add = host.host.events.add

    def refuse(number: int, token: int, payload: str, identity: str | None, done: Any, ending: Any = None) -> None:
        add(number, token, payload, identity, lambda _: done(refused), ending)

    monkeypatch.setattr(host.host.events, "add", refuse)


async def test_a_stream_whose_event_comes_too_late_is_killed_if_a_user_has_stopped_it(
    database: Database, tmp_path: Path, monkeypatch
):
    DID.clear()
    streaming = Streaming(database)
    async with triggerer(database, tmp_path) as host:
        await until(lambda: host.host is not None)
        refuse_all(host, EventRefused(EventRefusal.FENCED), monkeypatch)
        await streaming.defer(hosted.Counting, count=9, then="wait")
        attempt = await streaming.claim()
        assert attempt.stream is not None
        number = attempt.stream.trigger
        await database.call(CancelRun(streaming.run.dag_id, streaming.run.run_id, "tester"))
        await until(lambda: DID[number][-1:] == ["cleanup"])
    assert DID[number][-2:] == ["on_kill", "cleanup"]


async def test_a_refused_event_ends_a_stream_before_its_next_yield(database: Database, tmp_path: Path, monkeypatch):
    DID.clear()
    streaming = Streaming(database)
    async with triggerer(database, tmp_path) as host:
        await until(lambda: host.host is not None)
        refuse_all(host, EventRefused(EventRefusal.CONTENT, "too odd"), monkeypatch)
        await streaming.defer(hosted.Counting, count=1, then="wait")
        attempt = await streaming.claim()
        await until(lambda: DID[attempt.stream.trigger][-1:] == ["cleanup"])
        async with asyncio.timeout(60):
            while not (batch := await streaming.take(attempt)).ended:
                await asyncio.sleep(0.01)
    assert batch.error is not None
    assert "too odd" in batch.error


async def test_a_cancelled_run_waits_for_the_cleanup_of_its_trigger_and_for_its_attempt(
    database: Database, tmp_path: Path
):
    DID.clear()
    streaming = Streaming(database)
    await streaming.defer(hosted.Counting, count=1, then="wait")
    async with triggerer(database, tmp_path):
        attempt = await streaming.claim()
        assert attempt.stream is not None
        number = attempt.stream.trigger
        await database.call(CancelRun(streaming.run.dag_id, streaming.run.run_id, "tester"))
        await until(lambda: DID[number][-2:] == ["on_kill", "cleanup"])
        assert (await streaming.player.states(streaming.run))["a"] == "ending"
        await streaming.player.turn()
        async with asyncio.timeout(60):
            while (await streaming.player.states(streaming.run))["a"] == "ending":
                await asyncio.sleep(0.01)
    assert (await streaming.player.states(streaming.run))["a"] == "failed"
