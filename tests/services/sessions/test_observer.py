"""An observer ends the sessions of dead services, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.store.dags import Player, dag, task

from tidemill.core.errors import RemoteError
from tidemill.services.sessions import releasing
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.sessions.observer import SessionObserver
from tidemill.store.calls.call import Call, CallRefusedError
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.service_calls import (
    BeatSession,
    BeginSession,
    DescribeServices,
    EndSession,
    ListSessions,
    LoseSession,
    ReleaseLeft,
)
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store
from tidemill.store.queries.sessions import services

LEASE = ServiceLease(30.0)


class Cut:
    """A store that can be cut off, before or after it has done what it was asked to."""

    def __init__(self, database: Database) -> None:
        self.database, self.is_cut = database, False
        self.cut_before: type[Call] | None = None
        self.cut_after: type[Call] | None = None

    async def call(self, request: Call) -> object:
        if self.is_cut or type(request) is self.cut_before:
            raise RemoteError("cut off")
        answer = await self.database.call(request)
        if type(request) is self.cut_after:
            raise RemoteError("the answer is lost")
        return answer


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await open_store(f"sqlite:///{tmp_path}/dags.db")
    yield opened
    await opened.close()


async def begin(database: Database, kind: str = "worker", parent: int | None = None) -> int:
    return await database.call(BeginSession(kind, "w", "here", "boot", 1, parent=parent))


async def list_live(database: Database) -> set[int]:
    return {one.id for one in await database.call(ListSessions())}


async def test_a_session_without_heartbeats_is_ended_after_the_lease_with_those_it_supervises(database: Database):
    own = await begin(database, "scheduler")
    dead, live = await begin(database, "triggerer"), await begin(database)
    await begin(database, "triggerer", dead)
    silent_child = await begin(database, "triggerer", live)
    observer = SessionObserver(database, own, LEASE)
    for second in range(0, 30, 5):
        await database.call(BeatSession(live))
        await observer.look(float(second))
        assert dead in await list_live(database)

    await observer.look(30.0)

    assert await list_live(database) == {own, live, silent_child}


async def test_an_outage_of_the_observer_counts_for_no_session(database: Database):
    own, other = await begin(database, "scheduler"), await begin(database)
    store = Cut(database)
    observer = SessionObserver(store, own, LEASE)
    running = iter(range(0, 10_000, 5))
    for _ in range(5):
        await observer.look(float(next(running)))
    store.is_cut = True
    for _ in range(100):
        with pytest.raises(RemoteError):
            await observer.look(float(next(running)))
        observer.note_outage()
    store.is_cut = False
    await observer.look(float(next(running)))
    assert other in await list_live(database)


async def test_a_session_that_has_beaten_since_is_not_ended(database: Database):
    session = await begin(database)
    await database.call(BeatSession(session))

    assert not await database.call(LoseSession(session, beat=0))

    assert await list_live(database) == {session}
    assert await database.call(LoseSession(session, beat=1))


async def test_the_services_are_described_with_what_they_hold(database: Database):
    player = Player(database)
    player.scheduler, player.worker = await begin(database, "scheduler"), await begin(database)
    await player.create(dag(task("a"), task("b")))
    assert len(await player.claim()) == 2

    found = await database.call(DescribeServices())

    assert [(one.session.kind, one.held) for one in found] == [("scheduler", 0), ("worker", 2)]


async def test_what_an_ended_session_still_holds_is_released(database: Database):
    player = await Player(database).begin()
    run = await player.create(dag(task("a")))
    assert len(await player.claim()) == 1
    ended = text("UPDATE service_session SET ended_us = 1 WHERE kind = 'worker'")
    await database.write(lambda connection: connection.execute(ended))
    observer = SessionObserver(database, player.scheduler, LEASE)

    await observer.look(0.0)

    assert await player.states(run) == {"a": "queued"}


async def begin_takeover(database: Database, store: Cut, monkeypatch: pytest.MonkeyPatch) -> tuple[Player, RunRecord]:
    """Have a take-over of three tasks, of which one is released per transaction, meet an outage."""
    monkeypatch.setattr(services, "PART", 1)
    monkeypatch.setattr(releasing, "PART", 1)
    player = await Player(database).begin()
    run = await player.create(dag(task("a"), task("b"), task("c")))
    assert len(await player.claim()) == 3
    observer = SessionObserver(store, player.scheduler, LEASE)
    for second in range(0, 45, 5):
        if second == 15:  # what ended sessions hold is looked for at 0 and 30 seconds
            await database.call(BeatSession(player.worker))
        await observer.look(float(second))
    async with asyncio.timeout(30):
        with pytest.raises(RemoteError):
            await observer.look(45.0)
    observer.note_outage()
    store.cut_before = store.cut_after = None
    await observer.look(50.0)
    return player, run


async def test_a_takeover_whose_answer_is_lost_is_continued_at_the_next_look(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Cut(database)
    store.cut_after = LoseSession

    player, run = await begin_takeover(database, store, monkeypatch)

    assert set((await player.states(run)).values()) == {"queued"}


async def test_an_outage_during_a_takeover_counts_for_no_session(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Cut(database)

    async def call(request: Call) -> object:
        if isinstance(request, LoseSession):
            store.cut_before = ReleaseLeft
        return await Cut.call(store, request)

    monkeypatch.setattr(store, "call", call)

    player, run = await begin_takeover(database, store, monkeypatch)

    assert set((await player.states(run)).values()) == {"queued"}


async def test_no_child_begins_below_a_session_that_has_ended(database: Database):
    parent = await begin(database, "triggerer")
    await begin(database, "triggerer", parent)
    assert await database.call(EndSession(parent))
    assert await list_live(database) == set()

    with pytest.raises(CallRefusedError):
        await begin(database, "triggerer", parent)


class Refusing(Cut):
    """A store that does not end one session, or does not release what sessions hold."""

    def __init__(self, database: Database, session: int = 0, *, releases: bool = True) -> None:
        super().__init__(database)
        self._session, self._releases = session, releases

    async def call(self, request: Call) -> object:
        if isinstance(request, LoseSession) and request.session == self._session:
            raise RemoteError("its rows are broken", retryable=False)
        if isinstance(request, ReleaseLeft) and not self._releases:
            raise RemoteError("some rows are broken", retryable=False)
        return await super().call(request)


async def test_a_session_that_cannot_be_ended_does_not_keep_the_others(database: Database):
    own, broken, _ = [await begin(database, kind) for kind in ("scheduler", "worker", "worker")]
    observer = SessionObserver(Refusing(database, broken), own, LEASE)

    for second in range(0, 35, 5):
        await observer.look(float(second))

    assert await list_live(database) == {own, broken}


async def test_rows_that_cannot_be_released_do_not_keep_dead_sessions(database: Database):
    own, _ = await begin(database, "scheduler"), await begin(database)
    observer = SessionObserver(Refusing(database, releases=False), own, LEASE)

    for second in range(0, 60, 5):
        try:
            await observer.look(float(second))
        except RemoteError:
            observer.note_outage()

    assert await list_live(database) == {own}


async def test_a_part_of_a_process_was_heard_from_when_the_process_was(database: Database) -> None:
    scheduler = await database.call(BeginSession("scheduler", "a", "host", "boot", 17))
    part = await database.call(BeginSession("parser", "a", "host", "boot", 17, parent=scheduler))
    child = await database.call(BeginSession("parser", "a", "host", "boot", 18, parent=scheduler))
    await asyncio.sleep(0.01)
    assert await database.call(BeatSession(scheduler))
    found = {one.id: one.beat_us for one in await database.call(ListSessions())}
    assert found[part] == found[scheduler] > found[child]
    (parser, *_) = await database.call(ListSessions("parser"))
    assert (parser.id, parser.beat_us) == (part, found[scheduler])
