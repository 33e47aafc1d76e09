"""Deaths of triggers, which losses of sessions count, and the trials that follow."""

from __future__ import annotations

from sqlalchemy import select, update
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Deferral
from tidemill.core.triggers.lost_hosts import CULPRIT_LOSSES
from tidemill.store.calls.instance_calls import ListTasks
from tidemill.store.calls.run_calls import CancelRun
from tidemill.store.calls.service_calls import (
    PART,
    BeginSession,
    EndSession,
    LoseOtherSessions,
    LoseSession,
    ReleaseLeft,
    StopSession,
    TrialKind,
)
from tidemill.store.calls.trigger_calls import (
    ClaimTriggers,
    ClearDeaths,
    FindSuspects,
    FiredEvent,
    ListOwnedTriggers,
    ReleaseTriggers,
    ReserveTriggers,
    StoreEvents,
    TakenSuspects,
    TakeSuspects,
)
from tidemill.store.calls.worker_calls import AttemptReport
from tidemill.store.database import Database
from tidemill.store.queries.sessions import claims, services, suspects
from tidemill.store.records import TriggerState
from tidemill.store.tables import trigger, trigger_death

QUEUES = ("default",)


class Site:
    """Deferred tasks, and triggerers that run and die."""

    def __init__(self, database: Database) -> None:
        self.store, self.player = database, Player(database)

    async def defer(self, count: int, stream: str | None = None) -> None:
        await self.player.begin()
        self.run = await self.player.create(dag(*[task(f"t{n}", retries=0) for n in range(count)]))
        deferral = Deferral("package.Class", "{}", "resume", stream_key=stream)
        attempts = await self.player.claim()
        await self.player.turn(*[AttemptReport(one.task, one.epoch, deferral) for one in attempts])

    async def begin(self, **details: object) -> int:
        return await self.store.call(BeginSession("triggerer", "t", "machine", "boot", 17, **details))  # type: ignore[arg-type]

    async def claim(self, session: int, request: int = 1, **details: object) -> list[int]:
        claimed = await self.store.call(ClaimTriggers(session, request, 100, QUEUES, **details))  # type: ignore[arg-type]
        return [one.id for one in claimed]

    async def die(self, **details: object) -> list[int]:
        """Run all that can be claimed in a session that is lost."""
        session = await self.begin()
        claimed = await self.claim(session)
        await self.store.call(LoseSession(session, **details))  # type: ignore[arg-type]
        return claimed

    async def try_out(self, holder: int, *, lose: bool = True) -> TakenSuspects:
        """Try suspects in a host that is lost, or in a trial that is cleared."""
        parent = await self.begin()
        taken = await self.store.call(TakeSuspects(parent, QUEUES))
        trial = await self.begin(parent=parent, trial=TrialKind.SPLIT)
        await self.store.call(ReserveTriggers(parent, trial, taken.triggers))
        assert tuple(await self.claim(trial, reserved=True)) == taken.triggers
        if lose:
            await self.store.call(LoseSession(parent, holder))
        else:
            await self.store.call(ClearDeaths(taken.triggers, 1))
            await self.store.call(EndSession(parent))
        return taken

    async def count_alone(self) -> dict[int, int]:
        """Return how many hosts were lost while they tried a trigger alone."""
        columns = (trigger_death.c.trigger_id, trigger_death.c.alone)
        return dict(await self.store.read(lambda connection: connection.execute(select(*columns)).all()))  # type: ignore[arg-type]


async def test_a_trigger_is_a_suspect_from_its_second_death_and_claimed_for_trials_only(database: Database):
    site = Site(database)
    await site.defer(2)
    first = await site.die()
    assert await site.die() == first, "one death is nobody's fault"

    other = await site.begin()
    assert await site.claim(other) == []
    assert (await database.call(FindSuspects(QUEUES))).triggers
    assert not (await database.call(FindSuspects(("other",)))).triggers
    taken = await database.call(TakeSuspects(other, QUEUES))
    assert taken == TakenSuspects((first[0],), 10.0, 2)
    owned = await database.call(ListOwnedTriggers(other))
    assert [(one.id, one.running, one.deaths) for one in owned] == [(first[0], False, 2)]
    assert (await database.call(TakeSuspects(other, QUEUES))).triggers == (first[1],)
    assert await database.call(TakeSuspects(other, QUEUES)) == TakenSuspects()


async def test_what_has_survived_its_trial_is_claimed_again(database: Database):
    site = Site(database)
    await site.defer(1)
    (only,) = await site.die()
    await site.die()
    await site.try_out(site.player.scheduler, lose=False)
    assert await site.die() == [only]
    assert await site.claim(await site.begin()) == [], "one more death makes it a suspect again"
    await database.call(ClearDeaths((only,)))
    assert await site.claim(await site.begin()) == [only]


async def test_one_that_is_alone_at_the_loss_of_several_hosts_fails(database: Database):
    site = Site(database)
    await site.defer(2)
    await site.die()
    await site.die()
    culprit = (await site.try_out(0)).triggers
    for _ in range(CULPRIT_LOSSES - 1):
        assert (await site.try_out(0)).triggers == culprit, "it has the most deaths"
    assert (await site.try_out(0, lose=False)).triggers != culprit

    failed = [one for one in (await site.player.tasks(site.run)).values() if one.state == "failed"]
    assert len(failed) == 1
    assert "the host that tried only this trigger was lost 3 times in a row" in (failed[0].error or "")


async def test_a_loss_after_a_stop_or_with_a_known_cause_is_no_death(database: Database):
    site = Site(database)
    await site.defer(1)
    for _ in range(2):
        parent = await site.begin()
        child = await site.begin(parent=parent)
        (only,) = await site.claim(child)
        assert await database.call(StopSession(parent))
        await database.call(LoseSession(parent, site.player.scheduler))
        assert not await database.call(StopSession(parent))
        assert await site.die(is_death=False) == [only]
    session = await site.begin()
    await site.claim(session)
    await database.call(EndSession(session))
    session = await site.begin()
    await site.claim(session)
    await database.call(LoseOtherSessions(keep=(site.player.scheduler, site.player.worker)))
    assert (await database.call(ListOwnedTriggers(await site.begin()))) == ()
    other = await site.begin()
    assert await site.claim(other) == [only]
    assert (await database.call(ListOwnedTriggers(other)))[0].deaths == 0


async def test_a_stream_with_a_suspect_is_split_if_the_others_do_not_wait_long_and_not_claimed_meanwhile(
    database: Database,
):
    site = Site(database)
    await site.defer(3, "topic")
    await site.die()
    session = await site.begin()
    *_, third = await database.call(ClaimTriggers(session, 1, 3, QUEUES))
    await database.call(ReleaseTriggers(session, ((third.id, third.token),)))
    await database.call(LoseSession(session))
    other = await site.begin()
    assert await site.claim(other) == [], "the third has one death only, but the same stream"
    taken = await database.call(TakeSuspects(other, QUEUES))
    assert (len(taken.triggers), taken.is_split) == (1, True)
    assert await database.call(TakeSuspects(other, QUEUES)) == TakenSuspects()
    assert not (await database.call(FindSuspects(QUEUES))).triggers, "another session reads the stream"


async def test_a_stream_whose_trial_lasts_long_is_tried_as_a_whole_and_others_join_it(database: Database):
    site = Site(database)
    await site.defer(2, "topic")
    first, second = await site.die()
    parent = await site.begin()
    await database.call(ClaimTriggers(parent, 1, 1, QUEUES))
    await database.call(LoseSession(parent))
    lived = update(trigger_death).values(lived_us=3600_000_000)
    await database.write(lambda connection: connection.execute(lived))
    taken = await database.call(TakeSuspects(site.player.scheduler, QUEUES))
    assert taken == TakenSuspects((first, second), 7200.0, 2), "one of them has had one death only"

    about = {"parent": site.player.scheduler}
    whole, split = [await site.begin(trial=kind, **about) for kind in (TrialKind.WHOLE, TrialKind.SPLIT)]
    await database.call(ReserveTriggers(site.player.scheduler, whole, taken.triggers))
    assert await site.claim(whole, reserved=True) == [first, second]
    await site.defer(1, "topic")
    assert await site.claim(split, reserved=True) == []
    assert await site.claim(await site.begin()) == []
    (joined,) = await site.claim(whole, 2, reserved=True)
    assert await site.claim(whole, 2, reserved=True) == [joined], "the answer was lost"
    await database.call(LoseSession(whole))
    assert len(await site.count_alone()) == 3


async def test_a_trial_claims_all_triggers_of_a_stream_at_once_so_that_none_misses_what_the_first_ones_read(
    database: Database,
):
    site = Site(database)
    await site.defer(3, "topic")
    shared = await site.die()
    await site.defer(1)
    parent = await site.begin()
    single = (set(await site.claim(parent)) - set(shared)).pop()
    trial = await site.begin(parent=parent, trial=TrialKind.WHOLE)
    await database.call(ReserveTriggers(parent, trial, (*shared, single)))
    found = await database.call(ClaimTriggers(trial, 1, 2, QUEUES, reserved=True))
    assert [one.id for one in found] == shared
    assert await database.call(ClaimTriggers(trial, 1, 2, QUEUES, reserved=True)) == found, "the answer was lost"
    assert [one.id for one in await database.call(ClaimTriggers(trial, 2, 2, QUEUES, reserved=True))] == [single]


async def test_suspects_beyond_the_limit_of_a_call_divide_no_stream(database: Database, monkeypatch):
    site = Site(database)
    await site.defer(2, "a")
    await site.defer(2, "b")
    first, second, *_ = await site.die()
    await site.die()
    monkeypatch.setattr(suspects, "_SUSPECTS", 3)
    long_ago = update(trigger).values(changed_us=trigger.c.changed_us - 600_000_000)
    await database.write(lambda connection: connection.execute(long_ago))
    taken = await database.call(TakeSuspects(await site.begin(), QUEUES, beside=1))
    assert taken.triggers == (first, second)


async def test_suspects_whose_arguments_cannot_be_decrypted_keep_no_others_waiting(database: Database):
    site = Site(database)
    await site.defer(2)
    first, second = await site.die()
    await site.die()
    unreadable = update(trigger).where(trigger.c.id == first).values(kwargs="fernet:unknown")
    await database.write(lambda connection: connection.execute(unreadable))
    other = await site.begin()
    assert (await database.call(TakeSuspects(other, QUEUES))).triggers == (second,)
    assert await database.call(TakeSuspects(other, QUEUES)) == TakenSuspects()


async def test_a_suspect_that_a_user_stops_during_the_call_is_not_tried(database: Database, monkeypatch):
    site = Site(database)
    await site.defer(1)
    await site.die()
    await site.die()
    lock = suspects.try_lock_streams

    def stop_first(connection, keys):
        connection.execute(update(trigger).values(state=TriggerState.CANCELLED.value))
        return lock(connection, keys)

    monkeypatch.setattr(suspects, "try_lock_streams", stop_first)
    other = await site.begin()
    assert (await database.call(TakeSuspects(other, QUEUES))).triggers == ()
    assert await database.call(ListOwnedTriggers(other)) == ()


async def test_a_suspect_whose_task_was_cancelled_is_not_tried(database: Database):
    site = Site(database)
    await site.defer(1)
    await site.die()
    await site.die()
    await database.call(CancelRun(site.run.dag_id, site.run.run_id, "tester"))
    await site.player.schedule()
    assert not (await database.call(FindSuspects(QUEUES))).triggers


async def test_the_deaths_of_a_suspect_that_has_ended_are_forgotten(database: Database):
    site = Site(database)
    await site.defer(1)
    await site.die()
    await site.die()
    await database.call(ReleaseLeft())
    assert len(await site.count_alone()) == 1
    await database.call(CancelRun(site.run.dag_id, site.run.run_id, "tester"))
    await site.player.schedule()
    await database.call(ReleaseLeft())
    assert await site.count_alone() == {}


async def test_beginning_a_session_again_with_the_same_request_gives_the_same_session(database: Database):
    request = BeginSession("triggerer", "t", "machine", "boot", 17, request="r1")
    first = await database.call(request)
    assert await database.call(request) == first
    assert await database.call(BeginSession("triggerer", "t", "machine", "boot", 17, request="r2")) != first


async def test_the_triggers_of_a_large_triggerer_are_released_in_parts(database: Database, monkeypatch):
    monkeypatch.setattr(services, "PART", 2)
    site = Site(database)
    await site.defer(5)
    session = await site.begin()
    held = await site.claim(session)
    await database.call(LoseSession(session))
    other = await site.begin()
    assert len(await site.claim(other, 1)) == 2
    assert await database.call(ReleaseLeft()) == 2
    assert await database.call(ReleaseLeft()) == 1
    assert await database.call(ReleaseLeft()) == 0
    await site.claim(other, 2)
    owned = await database.call(ListOwnedTriggers(other))
    assert [(one.id, one.deaths) for one in owned] == [(number, 1) for number in held]
    assert PART == 2_000


async def test_triggers_of_a_trial_that_are_released_in_parts_were_not_alone(database: Database, monkeypatch):
    site = Site(database)
    await site.defer(6)
    await site.die()
    await site.die()
    monkeypatch.setattr(services, "PART", 2)
    assert len((await site.try_out(0)).triggers) == 3
    while await database.call(ReleaseLeft()):
        pass
    assert set((await site.count_alone()).values()) == {0}


async def test_one_that_was_alone_is_released_first(database: Database, monkeypatch):
    site = Site(database)
    await site.defer(2)
    first, last = await site.die()
    parent = await site.begin()
    child, trial = await site.begin(parent=parent), await site.begin(parent=parent, trial=TrialKind.SPLIT)
    await site.claim(child)
    await database.call(ReserveTriggers(child, trial, (last,)))
    await site.claim(trial, reserved=True)
    monkeypatch.setattr(services, "PART", 1)
    await database.call(LoseSession(parent, 0))
    await database.call(ReleaseLeft())
    assert await site.count_alone() == {first: 0, last: 1}


async def test_deaths_that_are_counted_during_a_claim_make_suspects(database: Database, monkeypatch):
    site = Site(database)
    await site.defer(1)
    await site.die()
    await site.die()
    found = iter([False])
    any_suspects = claims.any_suspects
    monkeypatch.setattr(claims, "any_suspects", lambda *given: next(found, True) and any_suspects(*given))
    assert await site.claim(await site.begin()) == []


async def test_beside_other_trials_all_suspects_are_tried_that_have_waited_for_long(database: Database):
    site = Site(database)
    await site.defer(4)
    await site.die()
    await site.die()
    other = await site.begin()
    assert len((await database.call(TakeSuspects(other, QUEUES, most=1))).triggers) == 1
    assert not (await database.call(FindSuspects(QUEUES, beside=2))).triggers
    assert await database.call(TakeSuspects(other, QUEUES, beside=2)) == TakenSuspects()
    long_ago = update(trigger).values(changed_us=trigger.c.changed_us - 600_000_000)
    await database.write(lambda connection: connection.execute(long_ago))
    assert (await database.call(FindSuspects(QUEUES, beside=2))).triggers
    assert len((await database.call(TakeSuspects(other, QUEUES, beside=2))).triggers) == 3


async def test_a_stream_that_kills_its_hosts_ends_with_an_error_for_its_task(database: Database):
    site = Site(database)
    await site.player.begin()
    run = await site.player.create(dag(task("t", retries=0)))
    await site.player.report(await site.player.claim_one(), Deferral("mod.Trigger", "{}", "", streams=True))
    session = await site.begin()
    (claimed,) = await database.call(ClaimTriggers(session, 1, 10, QUEUES))
    await database.call(StoreEvents(session, 1, (FiredEvent(claimed.id, claimed.token, "1", None, 1),)))
    # It goes on while an attempt of its task handles the event.
    await site.player.claim_one()
    await database.call(LoseSession(session))
    await site.die()
    for _ in range(CULPRIT_LOSSES):
        await site.try_out(0)

    assert await database.call(TakeSuspects(await site.begin(), QUEUES)) == TakenSuspects()
    assert not (await database.call(FindSuspects(QUEUES))).triggers
    (row,) = (await database.call(ListTasks(run.dag_id, run.run_id, task_id="t"))).rows
    assert row.stream is not None
    assert row.stream.ended
    assert "the host that tried only this trigger was lost 3 times in a row" in (row.stream.error or "")


async def test_tasks_that_waited_for_a_lost_triggerer_are_released_in_parts(database: Database, monkeypatch):
    site = Site(database)
    await site.defer(3)
    session = await site.begin()
    await site.claim(session)
    await database.call(CancelRun(site.run.dag_id, site.run.run_id, "tester"))
    await site.player.schedule()
    monkeypatch.setattr(services, "PART", 2)
    await database.call(LoseSession(session))
    states = list((await site.player.states(site.run)).values())
    assert states.count("ending") == 1
    while await database.call(ReleaseLeft()):
        pass
    assert set((await site.player.states(site.run)).values()) == {"failed"}


async def test_sessions_that_cannot_be_released_do_not_hide_others(database: Database, monkeypatch):
    site = Site(database)
    await site.defer(2)
    sessions = [await site.begin(), await site.begin()]
    for session in sessions:
        await database.call(ClaimTriggers(session, 1, 1, QUEUES))
    monkeypatch.setattr(services, "PART", 0)
    for session in sessions:
        await database.call(LoseSession(session))
    seen: set[int] = set()
    monkeypatch.setattr(services, "_LEFT", 1)
    monkeypatch.setattr(services, "release_held", lambda connection, found, context: seen.update(found) or 0)
    for _ in range(40):
        await database.call(ReleaseLeft())
    assert seen == set(sessions)
