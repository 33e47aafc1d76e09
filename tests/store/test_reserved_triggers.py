"""Triggers that only one service may claim."""

from __future__ import annotations

from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Deferral
from tidemill.store.calls.service_calls import EndSession, LoseSession
from tidemill.store.calls.trigger_calls import (
    ClaimTriggers,
    FailTrigger,
    ListOwnedTriggers,
    OwnedTrigger,
    ReserveTriggers,
)
from tidemill.store.calls.worker_calls import AttemptReport, OutcomeKind
from tidemill.store.database import Database


async def defer(database: Database, count: int, stream: str | None = None) -> Player:
    player = await Player(database).begin()
    await player.create(dag(*[task(f"t{n}") for n in range(count)]))
    deferral = Deferral("package.Class", "{}", "resume", stream_key=stream)
    await player.turn(*[AttemptReport(one.task, one.epoch, deferral) for one in await player.claim()])
    return player


async def claim(database: Database, session: int, request: int, *, reserved: bool = False) -> list[int]:
    claimed = await database.call(ClaimTriggers(session, request, 100, reserved=reserved))
    return [one.id for one in claimed]


async def test_only_the_service_that_they_are_reserved_for_claims_them(database: Database):
    player = await defer(database, 3)
    dead, holder, other = [await player.begin_service("triggerer") for _ in range(3)]
    first, second, third = await claim(database, dead, 1)

    assert await database.call(ReserveTriggers(dead, holder, (first, second))) == 2
    await database.call(LoseSession(dead))

    assert await claim(database, other, 1) == [third]
    assert await claim(database, holder, 1) == []
    owned = await database.call(ListOwnedTriggers(holder))
    assert [(one.id, one.running) for one in owned] == [(first, False), (second, False)]
    assert await claim(database, holder, 2, reserved=True) == [first, second]
    assert await claim(database, holder, 2, reserved=True) == [first, second], "the answer was lost"
    assert await claim(database, holder, 3, reserved=True) == []
    assert all(one.running for one in await database.call(ListOwnedTriggers(holder)))


async def test_they_are_free_when_that_service_has_ended(database: Database):
    player = await defer(database, 2)
    dead, holder, other = [await player.begin_service("triggerer") for _ in range(3)]
    both = await claim(database, dead, 1)
    await database.call(ReserveTriggers(dead, holder, tuple(both)))

    await database.call(EndSession(holder))

    assert await claim(database, other, 1) == both


async def test_what_the_owner_has_lost_is_not_reserved_for_another(database: Database):
    player = await defer(database, 1)
    dead, holder, other = [await player.begin_service("triggerer") for _ in range(3)]
    (only,) = await claim(database, dead, 1)
    await database.call(LoseSession(dead))
    await claim(database, other, 1)

    assert await database.call(ReserveTriggers(dead, holder, (only,))) == 0
    assert await database.call(ReserveTriggers(dead, holder, ())) == 0

    assert await database.call(ListOwnedTriggers(other)) == (OwnedTrigger(only, 3, True, deaths=1),)


async def test_no_other_of_their_stream_runs_elsewhere_meanwhile(database: Database):
    player = await defer(database, 2, "topic")
    dead, holder, other = [await player.begin_service("triggerer") for _ in range(3)]
    first, second = await claim(database, dead, 1)
    await database.call(ReserveTriggers(dead, holder, (first,)))
    await database.call(LoseSession(dead))

    assert [one.stream for one in await database.call(ListOwnedTriggers(holder))] == ["topic"]
    assert await claim(database, other, 1) == []
    await database.call(EndSession(holder))
    assert await claim(database, other, 2) == [first, second]


async def test_one_that_ran_in_a_dead_service_is_failed_in_its_name(database: Database):
    player = await defer(database, 1)
    dead = await player.begin_service("triggerer")
    await claim(database, dead, 1)
    (owned,) = await database.call(ListOwnedTriggers(dead))

    assert await database.call(FailTrigger(dead, owned.id, owned.token, "it ended")) is OutcomeKind.MOVED

    assert await database.call(ListOwnedTriggers(dead)) == ()
