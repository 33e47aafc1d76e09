"""Services are lost while reports, events, hand-overs and the clears of users are on their way, in every order.

On PostgreSQL a third connection holds locks, so that two transactions wait for each other in a known order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import asyncpg
import pytest
from tests.store.dags import Player, dag, task
from tests.store.server import PostgresServer

from tidemill.core.errors import RemoteError
from tidemill.core.tasks.endings import Deferral, Success
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.sessions.observer import SessionObserver
from tidemill.store.calls.call import Call, CallRefusedError, RefusalKind
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.run_calls import CancelRun, RunRecord
from tidemill.store.calls.service_calls import (
    BeginSession,
    EndSession,
    ListSessions,
    LoseSession,
    ReleaseLeft,
    StopSession,
    TrialKind,
)
from tidemill.store.calls.stream_calls import EndStream
from tidemill.store.calls.trigger_calls import (
    ClaimedTrigger,
    ClaimTriggers,
    EventOutcomeKind,
    FailTrigger,
    FiredEvent,
    HeldTriggers,
    KillCalled,
    ReleaseTriggers,
    StoreEvents,
)
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt, OutcomeKind, WorkerTurn
from tidemill.store.database import Database
from tidemill.store.engines.postgres import open_postgres
from tidemill.store.queries.sessions import services

T = TypeVar("T")
REQUESTS = count(1)
QUEUES = ("default",)
LEASE = ServiceLease(30.0)
#: How long transactions may wait for each other on a busy machine.
SECONDS = 60.0


async def begin_triggerer(store: Database) -> int:
    return await store.call(BeginSession("triggerer", "t", "machine", "boot", 17, QUEUES, 100))


async def claim(store: Database, session: int) -> tuple[ClaimedTrigger, ...]:
    return await store.call(ClaimTriggers(session, next(REQUESTS), 100, QUEUES, kills=True))


async def defer(player: Player, *names: str, streams: bool = False) -> RunRecord:
    """Create a run whose tasks are deferred."""
    run = await player.create(dag(*[task(name, retries=0) for name in names]))
    deferral = Deferral("package.Class", "{}", "resume", streams=streams)
    attempts = await player.claim()
    await player.turn(*[AttemptReport(one.task, one.epoch, deferral) for one in attempts])
    return run


async def hold(address: str, table: str) -> asyncpg.Connection:
    """Lock all rows of a table, until the returned connection commits."""
    connection = await asyncpg.connect(address)
    await connection.execute(f"BEGIN; SELECT FROM {table} FOR UPDATE")
    return connection


async def wait_for_waiting(connection: asyncpg.Connection, number: int) -> None:
    """Wait until this many transactions wait for locks."""
    count = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with asyncio.timeout(SECONDS):
        while await connection.fetchval(count) < number:
            await asyncio.sleep(0.01)
            # What a transaction reads of the statistics stays the same until it forgets that.
            await connection.execute("SELECT pg_stat_clear_snapshot()")


def fire(session: int, trigger: ClaimedTrigger, request: int = 1) -> StoreEvents:
    return StoreEvents(session, request, (FiredEvent(trigger.id, trigger.token, "1", None, 1),))


# -- a restart of the database during a take-over ---------------------------------------------------------------


@dataclass
class Lost:
    """A triggerer and a worker that are gone, with what they held, on a server that a test may crash."""

    server: PostgresServer
    store: Database
    player: Player
    run: RunRecord
    triggerer: int
    triggers: tuple[ClaimedTrigger, ...]

    async def crash_during(self, work: Coroutine[Any, Any, Any], locks: str) -> None:
        """Crash the server while a transaction of `work` waits for rows of a table, and start it again."""
        connection = await hold(self.server.url(), locks)
        working = asyncio.create_task(work)
        await wait_for_waiting(connection, 1)
        await asyncio.to_thread(self.server.stop, "immediate")
        with pytest.raises(RemoteError):
            await working
        connection.terminate()
        await asyncio.to_thread(self.server.start)
        with contextlib.suppress(RemoteError):  # all connections of before the crash are gone
            await self.store.call(ListSessions())

    async def count(self, statement: str) -> list[Any]:
        connection = await asyncpg.connect(self.server.url())
        try:
            return [row[0] for row in await connection.fetch(statement)]
        finally:
            await connection.close()

    async def take_over(self) -> None:
        """Have another scheduler observe all sessions until their leases have expired."""
        own = await self.player.begin_service("scheduler")
        observer = SessionObserver(self.store, own, LEASE)
        for second in range(0, 100, 5):
            await observer.look(float(second))
        live = await self.count("SELECT id FROM service_session WHERE ended_us IS NULL")
        assert live == [own]

    async def check(self) -> None:
        """Check that everything was released once, and runs again."""
        assert await self.count("SELECT deaths FROM trigger_death") == [1] * len(self.triggers)
        assert await self.count("SELECT lost FROM task_instance WHERE lost > 0") == [1]
        self.player.worker = await self.player.begin_service("worker")
        self.player.scheduler = await self.player.begin_service("scheduler")
        other = await begin_triggerer(self.store)
        found = await claim(self.store, other)
        assert [one.id for one in found] == [one.id for one in self.triggers]
        for one in found:
            (outcome,) = await self.store.call(fire(other, one, next(REQUESTS)))
            assert outcome.kind is EventOutcomeKind.STORED
        await self.player.play()
        assert (await self.player.run(self.run)).state == "success"
        assert await self.count("SELECT max(tries) FROM task_instance") == [1]


@pytest.fixture
async def lost(own_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lost]:
    # What the triggerer held takes several transactions.
    monkeypatch.setattr(services, "PART", 2)
    monkeypatch.setattr("tidemill.services.sessions.releasing.PART", 2)
    store = await open_postgres(own_postgres.url(), attempt_seconds=SECONDS)
    player = await Player(store).begin()
    names = [f"t{number}" for number in range(5)]
    run = await player.create(dag(task("a", retries=0), *[task(name, retries=0) for name in names]))
    deferral = Deferral("package.Class", "{}", "resume")
    attempts = [one for one in await player.claim() if one.task_id != "a"]
    await player.turn(*[AttemptReport(one.task, one.epoch, deferral) for one in attempts])
    triggerer = await begin_triggerer(store)
    yield Lost(own_postgres, store, player, run, triggerer, await claim(store, triggerer))
    await store.close()


async def test_a_takeover_that_a_crash_of_the_database_undid_is_done_by_another_scheduler(lost: Lost) -> None:
    losing = lost.store.call(LoseSession(lost.triggerer, lost.player.scheduler))
    await lost.crash_during(losing, "trigger_cursor")
    assert await lost.count("SELECT deaths FROM trigger_death") == []
    assert await lost.count(f"SELECT ended_us FROM service_session WHERE id = {lost.triggerer}") == [None]

    await lost.take_over()

    await lost.check()


async def test_a_takeover_that_a_crash_of_the_database_interrupted_is_continued_by_another_scheduler(
    lost: Lost,
) -> None:
    assert await lost.store.call(LoseSession(lost.triggerer, lost.player.scheduler))
    assert await lost.store.call(ReleaseLeft()) == 2
    await lost.crash_during(lost.store.call(ReleaseLeft()), "trigger_cursor")
    assert await lost.count("SELECT deaths FROM trigger_death") == [1] * 4

    await lost.take_over()

    await lost.check()


async def test_a_worker_whose_loss_a_crash_of_the_database_undid_is_lost_once(lost: Lost) -> None:
    losing = lost.store.call(LoseSession(lost.player.worker, lost.player.scheduler))
    await lost.crash_during(losing, "dag_run")
    assert await lost.count("SELECT state FROM task_instance WHERE task_id = 'a'") == ["running"]

    await lost.take_over()

    await lost.check()


# -- clear, mark and cancel while the triggerer is dead ---------------------------------------------------------

ACTIONS = ["clear", "mark", "cancel"]


def build_action(action: str, run: RunRecord) -> Call[Any]:
    if action == "clear":
        return ClearTasks(run.dag_id, run.run_id, ("t",), "tester")
    if action == "mark":
        return MarkTasks(run.dag_id, run.run_id, ("t",), "success", "tester")
    return CancelRun(run.dag_id, run.run_id, "tester")


class Deferred:
    """A deferred task whose triggerer is dead."""

    def __init__(self, store: Database) -> None:
        self.store = store

    async def begin(self, *, streams: bool = False) -> None:
        self.player = await Player(self.store).begin()
        self.run = await defer(self.player, "t", streams=streams)
        self.dead = await begin_triggerer(self.store)
        (self.trigger,) = await claim(self.store, self.dead)
        self.other = await begin_triggerer(self.store)

    async def state(self) -> str:
        return (await self.player.states(self.run))["t"]

    async def act(self, action: str) -> None:
        await self.store.call(build_action(action, self.run))
        await self.player.schedule()

    async def claim_kills(self) -> list[tuple[int, ClaimedTrigger]]:
        """Have a new triggerer, and a process that only calls `on_kill`, claim what there is to call."""
        trial = await self.store.call(BeginSession("triggerer", "t", "machine", "boot", 17, trial=TrialKind.KILLS))
        other = await begin_triggerer(self.store)
        requests = [
            ClaimTriggers(other, next(REQUESTS), 100, QUEUES, kills=True),
            ClaimTriggers(trial, next(REQUESTS), 100, QUEUES, reserved=True),
        ]
        found = [(one.session, kill) for one in requests for kill in await self.store.call(one)]
        return [(session, kill) for session, kill in found if kill.kill is not None]

    async def check_killed_once(self) -> None:
        """Check that exactly one process is told to call `on_kill`, and the dead triggerer is not."""
        ((session, kill),) = await self.claim_kills()
        assert kill.id == self.trigger.id
        assert await self.claim_kills() == []
        assert kill.kill is not None
        assert await self.store.call(KillCalled(session, kill.kill))
        held = HeldTriggers(self.dead, ((self.trigger.id, self.trigger.token),))
        assert [one.reason for one in await self.store.call(held)] == ["hand-over"]
        await self.store.call(LoseSession(session))
        assert await self.claim_kills() == []

    async def check_fenced(self) -> None:
        """Check that an event of the old trigger is refused, from the dead triggerer and from its successor."""
        dead, other = fire(self.dead, self.trigger, next(REQUESTS)), fire(self.other, self.trigger, next(REQUESTS))
        live = {one.id for one in await self.store.call(ListSessions())}
        if self.dead in live:
            assert [one.kind for one in await self.store.call(dead)] == [EventOutcomeKind.FENCED]
        else:
            with pytest.raises(CallRefusedError) as refused:
                await self.store.call(dead)
            assert refused.value.kind is RefusalKind.FENCED
        assert [one.kind for one in await self.store.call(other)] == [EventOutcomeKind.FENCED]


@pytest.fixture
async def deferred(database: Database) -> Deferred:
    deferred = Deferred(database)
    await deferred.begin()
    return deferred


@pytest.mark.parametrize("action", ACTIONS)
async def test_a_task_that_a_user_ends_while_its_triggerer_is_dead_goes_on_when_the_lease_ends(
    deferred: Deferred, action: str
) -> None:
    await deferred.act(action)
    assert await deferred.state() == "ending", "the triggerer may be alive, and has to clean up"
    assert await deferred.player.claim() == ()
    await deferred.check_fenced()

    await deferred.store.call(LoseSession(deferred.dead, deferred.player.scheduler))

    await deferred.check_fenced()
    await deferred.check_killed_once()
    if action == "clear":
        again = await deferred.player.claim_one()
        assert again.try_number == 2
        assert (await deferred.player.report(again, Success())).kind is OutcomeKind.MOVED
    assert await deferred.state() == ("failed" if action == "cancel" else "success")


@pytest.mark.parametrize("action", ACTIONS)
async def test_a_task_that_a_user_ends_while_its_triggerer_is_dead_goes_on_after_a_minute_at_most(
    deferred: Deferred, action: str
) -> None:
    await deferred.act(action)
    overdue = "UPDATE task_instance SET due_us = 1, next_due_us = 1 WHERE state = 'ending'"
    assert await deferred.store.write(lambda connection: connection.exec_driver_sql(overdue).rowcount) == 1
    await deferred.player.schedule()
    expected = {"clear": "queued", "mark": "success", "cancel": "failed"}
    assert await deferred.state() == expected[action]
    assert await claim(deferred.store, deferred.other) == (), "its triggerer may still call it"
    await deferred.check_fenced()

    await deferred.store.call(LoseSession(deferred.dead, deferred.player.scheduler))

    await deferred.check_killed_once()
    assert await deferred.state() == expected[action]


@pytest.mark.parametrize("action", ACTIONS)
async def test_a_task_that_a_user_ends_while_the_rest_of_a_dead_triggerer_is_not_released_yet_goes_on_with_it(
    deferred: Deferred, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "PART", 0)
    await deferred.store.call(LoseSession(deferred.dead, deferred.player.scheduler))
    monkeypatch.setattr(services, "PART", 10)
    await deferred.act(action)

    await deferred.store.call(ReleaseLeft())

    await deferred.player.schedule()
    await deferred.check_killed_once()
    assert await deferred.state() == {"clear": "queued", "mark": "success", "cancel": "failed"}[action]


@pytest.mark.parametrize("action", ACTIONS)
async def test_an_attempt_of_a_stream_that_a_user_ends_while_its_triggerer_is_dead_waits_for_its_own_end_alone(
    database: Database, action: str
) -> None:
    deferred = Deferred(database)
    await deferred.begin(streams=True)
    await database.call(fire(deferred.dead, deferred.trigger))
    await deferred.player.claim_one()
    await deferred.act(action)

    await database.call(LoseSession(deferred.dead, deferred.player.scheduler))

    assert await deferred.state() == "ending", "the attempt is still running"
    await deferred.player.turn()  # it no longer holds it
    await deferred.player.schedule()
    assert await deferred.state() == {"clear": "queued", "mark": "success", "cancel": "failed"}[action]
    await deferred.check_killed_once()


# -- orders of locks on PostgreSQL ------------------------------------------------------------------------------


@dataclass
class Race:
    """A database with two connections, and a third that holds locks."""

    address: str
    one: Database
    other: Database
    player: Player

    async def run(self, locks: str, first: Awaitable[T], second: Callable[[], Awaitable[Any]]) -> tuple[T, Any]:
        """Have two calls wait for rows of a table in this order; return their answers, or what they raised."""
        connection = await hold(self.address, locks)
        begun = asyncio.ensure_future(first)
        await wait_for_waiting(connection, 1)
        following = asyncio.ensure_future(second())
        await wait_for_waiting(connection, 2)
        await connection.execute("COMMIT")
        answers = await asyncio.gather(begun, following, return_exceptions=True)
        await connection.close()
        return answers[0], answers[1]  # type: ignore[return-value]

    async def fetch(self, statement: str) -> Any:
        connection = await asyncpg.connect(self.address)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()


@pytest.fixture
async def race(postgres_url: str) -> AsyncIterator[Race]:
    one, other = [await open_postgres(postgres_url, attempt_seconds=SECONDS) for _ in range(2)]
    yield Race(postgres_url, one, other, await Player(one).begin())
    await one.close()
    await other.close()


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("is_first", [True, False], ids=["user first", "loss first"])
async def test_a_user_and_the_loss_of_a_triggerer_at_once_have_on_kill_called_as_if_one_followed_the_other(
    race: Race, action: str, is_first: bool
) -> None:
    deferred = Deferred(race.one)
    await deferred.begin()
    acting = race.one.call(build_action(action, deferred.run))
    losing = race.other.call(LoseSession(deferred.dead, deferred.player.scheduler))
    if is_first:
        await race.run("trigger_cursor", acting, lambda: losing)
    else:
        await race.run("trigger_cursor", losing, lambda: acting)
    await race.other.call(ReleaseLeft())  # as the scheduler does next that has ended the session
    await deferred.player.schedule()

    assert await deferred.state() == {"clear": "queued", "mark": "success", "cancel": "failed"}[action]
    await deferred.check_killed_once()


def release(session: int, trigger: ClaimedTrigger) -> ReleaseTriggers:
    return ReleaseTriggers(session, ((trigger.id, trigger.token),), moves=True)


def lose(session: int, trigger: ClaimedTrigger) -> LoseSession:
    return LoseSession(session)


def end(session: int, trigger: ClaimedTrigger) -> EndSession:
    return EndSession(session)


GIVING_UP = pytest.mark.parametrize("give_up", [release, lose, end])
STREAMS = pytest.mark.parametrize("streams", [False, True], ids=["event", "stream"])


@GIVING_UP
@STREAMS
async def test_an_event_that_is_being_stored_when_its_trigger_is_given_up_is_stored_once(
    race: Race, give_up: Callable[[int, ClaimedTrigger], Call[Any]], streams: bool
) -> None:
    run = await defer(race.player, "t", streams=streams)
    triggerer = await begin_triggerer(race.one)
    (trigger,) = await claim(race.one, triggerer)
    storing = race.one.call(fire(triggerer, trigger))
    (outcome,), _ = await race.run(
        "trigger_cursor" if streams else "dag_run", storing, lambda: race.other.call(give_up(triggerer, trigger))
    )
    assert outcome.kind is EventOutcomeKind.STORED

    found = await claim(race.other, await begin_triggerer(race.other))
    assert [one.id for one in found] == ([trigger.id] if streams else []), "a stream goes on, a task has its event"
    assert await race.fetch("SELECT count(*) FROM trigger_event") == 1
    await race.player.schedule()
    assert (await race.player.states(run))["t"] == "queued"


@GIVING_UP
@STREAMS
async def test_an_event_that_comes_while_its_trigger_is_given_up_is_refused_and_its_successor_stores_it(
    race: Race, give_up: Callable[[int, ClaimedTrigger], Call[Any]], streams: bool
) -> None:
    run = await defer(race.player, "t", streams=streams)
    triggerer = await begin_triggerer(race.one)
    (trigger,) = await claim(race.one, triggerer)
    giving_up = race.one.call(give_up(triggerer, trigger))
    _, answer = await race.run("trigger_cursor", giving_up, lambda: race.other.call(fire(triggerer, trigger)))
    if give_up is release:
        assert [one.kind for one in answer] == [EventOutcomeKind.FENCED]
    else:
        assert isinstance(answer, CallRefusedError)
        assert answer.kind is RefusalKind.FENCED
    assert await race.fetch("SELECT count(*) FROM trigger_event") == 0

    successor = await begin_triggerer(race.other)
    (again,) = await claim(race.other, successor)
    (outcome,) = await race.other.call(fire(successor, again))
    assert outcome.kind is EventOutcomeKind.STORED
    assert await race.fetch("SELECT count(*) FROM trigger_event") == 1
    await race.player.schedule()
    assert (await race.player.states(run))["t"] == "queued"


# -- a lease that ends while the last report travels ------------------------------------------------------------


def report(session: int, attempt: ClaimedAttempt) -> WorkerTurn:
    return WorkerTurn(session, next(REQUESTS), (AttemptReport(attempt.task, attempt.epoch, Success()),))


async def run_again(player: Player, run: RunRecord) -> None:
    """Have another worker run the task that a lost one had, in the same try."""
    player.worker = await player.begin_service("worker")
    attempt = await player.claim_one()
    assert attempt.try_number == 1
    assert (await player.report(attempt, Success())).kind is OutcomeKind.MOVED
    assert (await player.run(run)).state == "success"


async def check_late(store: Database, player: Player, attempt: ClaimedAttempt, kind: OutcomeKind) -> None:
    """Report a success again: in the session that has ended, and in the one that the worker has begun since."""
    with pytest.raises(CallRefusedError) as refused:
        await store.call(report(player.worker, attempt))
    assert refused.value.kind is RefusalKind.FENCED
    anew = await player.begin_service("worker")
    (outcome,) = (await store.call(report(anew, attempt))).outcomes
    assert outcome.kind is kind
    player.worker = anew


@pytest.mark.parametrize("how", [LoseSession, EndSession])
async def test_a_last_report_before_the_end_of_the_session_counts_though_its_answer_was_lost(
    database: Database, how: type[LoseSession | EndSession]
) -> None:
    player = await Player(database).begin()
    run = await player.create(dag(task("a")))
    attempt = await player.claim_one()
    await database.call(report(player.worker, attempt))
    await database.call(how(player.worker))

    await check_late(database, player, attempt, OutcomeKind.ALREADY)

    assert (await player.run(run)).state == "success"
    assert await player.claim() == ()


@pytest.mark.parametrize("how", [LoseSession, EndSession])
async def test_a_last_report_after_the_end_of_the_session_is_refused_and_the_task_runs_again(
    database: Database, how: type[LoseSession | EndSession]
) -> None:
    player = await Player(database).begin()
    run = await player.create(dag(task("a")))
    attempt = await player.claim_one()
    await database.call(how(player.worker))

    await check_late(database, player, attempt, OutcomeKind.FENCED)

    await run_again(player, run)


@pytest.mark.parametrize("how", [LoseSession, EndSession])
@pytest.mark.parametrize("is_first", [True, False], ids=["report first", "end first"])
async def test_a_last_report_and_the_end_of_the_session_at_once_have_the_task_succeed_once(
    race: Race, how: type[LoseSession | EndSession], is_first: bool
) -> None:
    player = race.player
    run = await player.create(dag(task("a")))
    attempt = await player.claim_one()
    reporting, ending = report(player.worker, attempt), how(player.worker)
    calls: list[Call[Any]] = [reporting, ending] if is_first else [ending, reporting]
    answers = await race.run("dag_run", race.one.call(calls[0]), lambda: race.other.call(calls[1]))

    if is_first:
        assert [one.kind for one in answers[0].outcomes] == [OutcomeKind.MOVED]
        assert answers[1] is True
        assert await race.fetch("SELECT lost FROM task_instance") == 0
    else:
        assert answers[0] is True
        assert isinstance(answers[1], CallRefusedError)
        await run_again(player, run)
    assert (await player.run(run)).state == "success"
    assert await race.fetch("SELECT count(*) FROM task_journal WHERE after = 'success'") == 1


def fail(session: int, trigger: ClaimedTrigger) -> FailTrigger:
    return FailTrigger(session, trigger.id, trigger.token, "it is broken")


def end_of_stream(session: int, trigger: ClaimedTrigger) -> EndStream:
    return EndStream(session, trigger.id, trigger.token, "it is broken")


LAST = pytest.mark.parametrize(("last", "streams"), [(fail, False), (end_of_stream, True)], ids=["failure", "end"])


@LAST
@pytest.mark.parametrize("how", [LoseSession, EndSession])
@pytest.mark.parametrize("is_first", [True, False], ids=["report first", "end first"])
async def test_the_last_report_of_a_triggerer_and_the_end_of_its_session_at_once_fail_the_task_once(
    race: Race,
    last: Callable[[int, ClaimedTrigger], Call[Any]],
    streams: bool,
    how: type[LoseSession | EndSession],
    is_first: bool,
) -> None:
    player = race.player
    run = await defer(player, "t", streams=streams)
    triggerer = await begin_triggerer(race.one)
    (trigger,) = await claim(race.one, triggerer)
    reporting, ending = last(triggerer, trigger), how(triggerer)
    calls: list[Call[Any]] = [reporting, ending] if is_first else [ending, reporting]
    locks = "dag_run" if is_first and not streams else "trigger_cursor"
    answers = await race.run(locks, race.one.call(calls[0]), lambda: race.other.call(calls[1]))

    found = await claim(race.other, other := await begin_triggerer(race.other))
    if is_first:
        assert answers == (OutcomeKind.MOVED, True)
        assert found == ()
    else:
        assert answers[0] is True
        assert isinstance(answers[1], CallRefusedError)
        (again,) = found
        assert await race.other.call(last(other, again)) is OutcomeKind.MOVED
    if streams:  # the attempts of its task handle the end
        assert (await player.claim_one()).stream is not None
    else:
        await player.schedule()
        assert (await player.run(run)).state == "failed"
        assert await race.fetch("SELECT count(*) FROM task_journal WHERE after = 'failed'") == 1
    is_death = how is LoseSession and not is_first
    assert await race.fetch("SELECT coalesce(sum(deaths), 0) FROM trigger_death") == int(is_death)


@pytest.mark.parametrize("is_first", [True, False], ids=["clean end first", "loss first"])
async def test_a_clean_end_that_meets_the_loss_of_its_session_hands_over_and_blames_nobody(
    race: Race, is_first: bool
) -> None:
    player = race.player
    run = await player.create(dag(task("a"), task("t")))
    attempts = {one.task_id: one for one in await player.claim()}
    await player.report(attempts["t"], Deferral("package.Class", "{}", "resume"))
    parent = await begin_triggerer(race.one)
    child = await race.one.call(BeginSession("triggerer", "t", "machine", "boot", 17, QUEUES, 100, parent=parent))
    await claim(race.one, child)
    for session, locks in ((player.worker, "dag_run"), (parent, "trigger_cursor")):
        # A service that drains says so first.
        await race.one.call(StopSession(session))
        calls: list[Call[Any]] = [EndSession(session), LoseSession(session, player.scheduler)]
        if not is_first:
            calls.reverse()
        answers = await race.run(locks, race.one.call(calls[0]), lambda calls=calls: race.other.call(calls[1]))
        assert answers == (True, False)

    assert await race.fetch("SELECT count(*) FROM trigger_death") == 0
    # A try that is continued has at least 1; more would count towards the limit.
    assert await race.fetch("SELECT max(lost) FROM task_instance") == 1
    other = await begin_triggerer(race.one)
    (again,) = await claim(race.one, other)
    await race.one.call(fire(other, again))
    player.worker = await player.begin_service("worker")
    await player.play()
    assert (await player.run(run)).state == "success"


async def test_a_task_that_drains_meet_again_and_again_while_their_sessions_are_lost_is_never_given_up(
    database: Database,
) -> None:
    player = await Player(database).begin()
    run = await player.create(dag(task("a", retries=0)))
    for _ in range(8):
        await player.claim_one()
        await database.call(StopSession(player.worker))
        await database.call(LoseSession(player.worker, player.scheduler))
        assert not await database.call(EndSession(player.worker))
        player.worker = await player.begin_service("worker")
    await run_again(player, run)
