"""A run or DAG that the store cannot make sense of keeps no other one from going on."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from sqlalchemy import Connection, text
from tests.store.dags import Player, dag, task
from tests.store.test_streams import Stream

from tidemill.core.errors import RemoteError
from tidemill.core.tasks.endings import Deferral, Success
from tidemill.core.tasks.structure import ScheduleStructure
from tidemill.store.calls.service_calls import LoseSession, SchedulerTurn
from tidemill.store.calls.setting_calls import SetPool
from tidemill.store.calls.trigger_calls import ClaimTriggers, FiredEvent, StoreEvents
from tidemill.store.calls.worker_calls import AttemptReport, OutcomeKind, WorkerTurn
from tidemill.store.ciphers import Cipher
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store
from tidemill.store.engines.sqlite import SqliteDatabase, open_sqlite

#: A digest of its own, because plans are kept by it.
UNREADABLE = "UPDATE dag_version SET structure = '{}', digest = 'unreadable' WHERE structure LIKE '%\"id\":\"bad\"%'"
BAD_RUNS = "SELECT r.id FROM dag_run r JOIN dag d ON d.id = r.dag WHERE d.dag_id = 'bad'"
SENSELESS = f"UPDATE task_instance SET tallies = 'x' WHERE run IN ({BAD_RUNS})"


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def damage(player: Player, statement: str) -> None:
    await player.store.write(lambda connection: connection.execute(text(statement)).rowcount)


async def settle(player: Player) -> None:
    """Take turns as the scheduler does, and see that it comes to rest."""
    runs: set[int] = set()
    dags: set[int] = set()
    for _ in range(20):
        turn = SchedulerTurn(player.scheduler, skip_runs=tuple(runs), skip_dags=tuple(dags))
        answer = await player.store.call(turn)
        runs |= set(answer.broken_runs)
        dags |= set(answer.broken_dags)
        if not answer.more:
            return
    raise AssertionError("there is always more to do at once")


@pytest.mark.parametrize("harm", [UNREADABLE, SENSELESS])
@pytest.mark.parametrize("stage", ["waits", "pending", "scheduled", "queued", "retries", "late", "stopped"])
async def test_a_run_that_cannot_be_read_holds_up_no_other(player: Player, harm: str, stage: str) -> None:
    # Earlier than the good one in every order.
    details = {"run_timeout_us": 1} if stage == "late" else {}
    structure = dag(task("a", retries=1, retry_delay_us=0), task("b", "a"), id="bad", **details)
    bad = await player.create(structure)
    if stage == "waits":
        await damage(player, f"UPDATE dag_run SET state = 'queued' WHERE id IN ({BAD_RUNS})")
    elif stage == "pending":
        await damage(player, f"UPDATE task_instance SET state = 'none', pending = 1 WHERE run IN ({BAD_RUNS})")
    elif stage == "queued":
        await player.schedule()
    elif stage == "retries":
        due = f"UPDATE task_instance SET state = 'up_for_retry', due_us = 1, next_due_us = 1 WHERE run IN ({BAD_RUNS})"
        await damage(player, due)
    elif stage == "stopped":
        await damage(player, f"UPDATE dag_run SET stop = 'cancel' WHERE id IN ({BAD_RUNS})")
    await damage(player, harm)

    good = await player.create(dag(task("a"), task("b", "a"), id="good"))
    for _ in range(2):
        await settle(player)
        claimed = (await player.turn(capacity=1)).claimed
        assert [one.dag_id for one in claimed] == ["good"]
        await player.report(claimed[0], Success())
    await settle(player)

    assert (await player.run(good)).state == "success"
    assert (await player.run(bad)).state in ("queued", "running")


@pytest.mark.parametrize("harm", [UNREADABLE])
async def test_a_schedule_that_cannot_be_read_holds_up_no_other(player: Player, harm: str) -> None:
    every = ScheduleStructure("interval", interval_us=1_000_000, start_us=0, catchup=True)
    await player.create(dag(task("a"), id="bad", schedule=every))
    good = await player.create(dag(task("a"), id="good", schedule=every, max_active_runs=3))
    await damage(player, harm)

    await settle(player)

    assert len(await player.claim(50)) >= 2
    assert (await player.run(good)).state == "running"


async def test_what_a_dead_worker_held_of_a_run_that_cannot_be_read_keeps_nothing_else(player: Player) -> None:
    await player.create(dag(task("a"), id="bad"))
    good = await player.create(dag(task("a"), id="good"))
    assert len(await player.claim()) == 2
    await damage(player, SENSELESS)

    assert await player.store.call(LoseSession(player.worker))

    assert await player.states(good) == {"a": "queued"}


async def test_a_report_that_cannot_be_stored_harms_no_other_of_its_turn(player: Player) -> None:
    await player.create(dag(task("a"), task("b", "a"), id="bad"))
    good = await player.create(dag(task("a"), id="good"))
    attempts = await player.claim()
    # Its successor is missing.
    await damage(player, f"DELETE FROM task_instance WHERE task_id = 'b' AND run IN ({BAD_RUNS})")

    answer = await player.turn(*[AttemptReport(one.task, one.epoch, Success()) for one in attempts])

    kinds = {attempt.dag_id: outcome for attempt, outcome in zip(attempts, answer.outcomes, strict=True)}
    assert kinds["good"].kind is OutcomeKind.MOVED
    assert kinds["bad"].kind is OutcomeKind.UNSTORED
    assert "KeyError" in kinds["bad"].reason
    assert (await player.run(good)).state == "success"


async def test_a_crowd_that_waits_for_a_limit_lets_the_scheduler_rest(player: Player) -> None:
    await player.store.call(SetPool("small", 2))
    tasks = [task(f"t{number}", pool="small") for number in range(700)]
    await player.create(dag(*tasks, max_active_tasks=1))
    await settle(player)
    assert len((await player.turn(capacity=10)).claimed) == 1

    await settle(player)


async def defer(player: Player, id: str) -> None:
    await player.create(dag(task("a"), id=id))
    (attempt,) = await player.claim()
    await player.report(attempt, Deferral("package.Trigger", '{"n":1}', "resume", '{"secret":2}'))


async def test_a_deferral_of_another_key_waits_for_its_key_and_nothing_waits_for_it(url: str) -> None:
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    before = await open_store(url, Cipher([old]))
    player = await Player(before).begin()
    await defer(player, "resumed")
    await defer(player, "deferred")
    triggerer = await player.begin_service("triggerer")
    (claimed,) = await before.call(ClaimTriggers(triggerer, 1, 1))
    assert claimed.dag_id == "resumed"
    await before.call(StoreEvents(triggerer, 1, (FiredEvent(claimed.id, claimed.token, "null", None, 1),)))
    await before.close()

    without = await open_store(url, Cipher([new]))
    player.store = without
    await defer(player, "good")
    assert (await without.call(ClaimTriggers(triggerer, 2, 1)))[0].dag_id == "good"
    await player.create(dag(task("a"), id="other"))
    await settle(player)
    (attempt,) = (await player.turn(capacity=1)).claimed
    assert attempt.dag_id == "other"
    await without.close()

    again = await open_store(url, Cipher([new, old]))
    player.store = again
    (attempt,) = (await player.turn(capacity=1)).claimed
    assert (attempt.dag_id, attempt.resume and attempt.resume.kwargs) == ("resumed", '{"secret":2}')
    assert [one.dag_id for one in await again.call(ClaimTriggers(triggerer, 3, 10))] == ["deferred"]
    await again.close()


async def set_room(store: SqliteDatabase, pages: int | None) -> None:
    """Let the file grow by this many pages at most; None: as much as it wants."""

    def limit(connection: Connection) -> None:
        now = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        most = 1 << 30 if pages is None else now + pages
        connection.exec_driver_sql(f"PRAGMA max_page_count = {most}")

    await store.write(limit)


async def test_a_full_disk_is_nobodys_fault_and_all_goes_on_when_there_is_room(tmp_path: Path) -> None:
    store = await open_sqlite(tmp_path / "store.db")
    player = await Player(store).begin()
    run = await player.create(dag(*[task(f"t{number:03}") for number in range(100)], id="dag"))
    attempts = await player.claim(100)
    big = (("return_value", '"' + "x" * 20_000 + '"'),)
    reports = tuple(AttemptReport(one.task, one.epoch, Success(), big) for one in attempts)
    turn = WorkerTurn(player.worker, 1000, reports)
    await set_room(store, 0)

    for _ in range(2):
        with pytest.raises(RemoteError, match="full") as failed:
            await store.call(turn)
        assert failed.value.retryable
    with pytest.raises(RemoteError, match="full"):
        await player.create(dag(*[task(f"t{number:03}") for number in range(500)], id="more"))
    assert set((await player.states(run)).values()) == {"running"}
    await set_room(store, None)

    assert {outcome.kind for outcome in (await store.call(turn)).outcomes} == {OutcomeKind.MOVED}
    await player.schedule()
    assert (await player.run(run)).state == "success"
    await store.close()


async def test_a_stream_of_a_run_that_cannot_be_read_keeps_no_scheduler_busy(player: Player) -> None:
    stream = await Stream(player).begin()
    await stream.fire("0")
    await damage(player, UNREADABLE.replace("bad", "dag"))
    answer = await player.store.call(SchedulerTurn(player.scheduler))
    assert answer.broken_runs == (stream.run.id,)
    answer = await player.store.call(SchedulerTurn(player.scheduler, skip_runs=answer.broken_runs))
    assert (answer.more, answer.again, answer.skipped) == (False, False, False)
