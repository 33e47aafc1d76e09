"""Several schedulers on PostgreSQL: each leaves to the others what they have locked, and nothing happens twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import asyncpg
import pytest
from tests.store.dags import Player, dag, encode, mapped, task
from tests.store.server import PostgresServer
from tests.store.test_dag_clock import Clock, clock
from tests.store.test_loops import loop, play
from tests.store.test_streams import Stream

from tidemill.core.tasks.endings import Success
from tidemill.core.tasks.structure import ScheduleStructure
from tidemill.store.calls.dag_calls import PauseDag
from tidemill.store.calls.instance_calls import ClearTasks
from tidemill.store.calls.run_calls import CancelRun, CreateRun, ListRuns, RunRecord
from tidemill.store.calls.service_calls import SchedulerTurn, StoreFile
from tidemill.store.calls.setting_calls import SetPool
from tidemill.store.calls.worker_calls import AttemptReport
from tidemill.store.engines.opening import open_store

__all__ = ["clock"]

HOUR_US = 3_600_000_000
VIENNA = ZoneInfo("Europe/Vienna")


@pytest.fixture
async def address(postgres: PostgresServer) -> str:
    return await postgres.new_database()


@pytest.fixture
async def players(address: str) -> AsyncIterator[list[Player]]:
    stores = [await open_store(address) for _ in range(2)]
    yield [await Player(store).begin() for store in stores]
    for store in stores:
        await store.close()


@pytest.fixture
async def slow(address: str) -> AsyncIterator[asyncpg.Connection]:
    """Yield a connection that holds locks as a scheduler does that has stopped in the middle of its turn."""
    connection = await asyncpg.connect(address)
    await connection.execute("BEGIN")
    yield connection
    await connection.close()


async def test_a_run_that_another_scheduler_has_locked_delays_no_other_run(
    players: list[Player], slow: asyncpg.Connection
) -> None:
    first, second = [await players[0].create(dag(task("a"), id=name, run_timeout_us=1)) for name in ("one", "two")]
    await slow.execute(f"SELECT FROM dag_run WHERE id = {first.id} FOR UPDATE")

    async with asyncio.timeout(30):
        answer = await players[1].schedule()

    assert (answer.skipped, answer.ended) == (False, 0), "the run that is locked is due, and retried soon"
    assert answer.next_due_us is not None
    assert answer.next_due_us <= answer.now_us
    assert (await players[1].run(second)).state == "failed"
    assert (await players[1].run(first)).state == "running"
    await slow.execute("COMMIT")
    await players[1].schedule()
    assert (await players[1].run(first)).state == "failed"


async def test_a_stream_whose_task_is_locked_is_resumed_by_a_later_turn(
    players: list[Player], slow: asyncpg.Connection
) -> None:
    stream = await Stream(players[0]).begin()
    await stream.fire("0")
    await slow.execute("SELECT FROM task_instance WHERE task_id = 'a' FOR UPDATE")
    async with asyncio.timeout(30):
        assert (await players[1].schedule()).skipped, "it is looked at again soon"
    await slow.execute("COMMIT")
    assert (await players[1].claim_one()).stream is not None


@pytest.mark.parametrize("locked", ["pool", "dag"])
async def test_a_pool_or_a_limited_dag_that_is_locked_delays_no_other(
    players: list[Player], slow: asyncpg.Connection, locked: str
) -> None:
    for name in ("one", "two"):
        await players[0].store.call(SetPool(name, 1))
    limit = {"max_active_tasks": 1} if locked == "dag" else {}
    runs = [await players[0].create(dag(task("a", pool=name), id=name, **limit)) for name in ("one", "two")]
    await slow.execute(f"SELECT FROM {locked} WHERE {'name' if locked == 'pool' else 'dag_id'} = 'one' FOR UPDATE")

    async with asyncio.timeout(30):
        answer = await players[1].schedule()

    assert answer.skipped
    assert [(await players[1].states(run))["a"] for run in runs] == ["scheduled", "queued"]
    await slow.execute("COMMIT")
    assert not (await players[1].schedule()).skipped
    assert [(await players[1].states(run))["a"] for run in runs] == ["queued", "queued"]


async def test_a_stopped_run_that_is_locked_delays_no_map(players: list[Player], slow: asyncpg.Connection) -> None:
    await players[0].create(dag(task("a"), mapped("m", "a"), id="two"))
    attempt = await players[0].claim_one()
    stopped = await players[0].create(dag(*(task(f"t{number}") for number in range(501)), id="one"))
    await players[0].store.call(CancelRun("one", stopped.run_id, "tester"))
    await slow.execute(f"SELECT FROM dag_run WHERE id = {stopped.id} FOR UPDATE")
    await players[0].report(attempt, Success(), xcoms=(("return_value", "[1,2]"),))

    async with asyncio.timeout(30):
        await players[1].schedule()

    assert [one.task_id for one in (await players[1].turn(capacity=2, queues=("default",))).claimed] == ["m", "m"]
    await slow.execute("COMMIT")
    await players[1].schedule()
    assert (await players[1].run(stopped)).state == "failed"


async def test_schedulers_at_once_create_one_run_of_each_due_time(players: list[Player]) -> None:
    start_us = time.time_ns() // 1000 - HOUR_US // 2
    schedule = ScheduleStructure("interval", interval_us=HOUR_US, start_us=start_us, catchup=True)
    for number in range(12):
        structure = dag(task("a"), id=f"d{number}", schedule=schedule)
        await players[0].store.call(StoreFile(f"d{number}.py", "digest", structures=(encode(structure),)))

    turns = [player.store.call(SchedulerTurn(player.scheduler)) for player in players * 3]
    answers = await asyncio.gather(*turns)

    assert sum(answer.created for answer in answers) == 12
    for player in players:
        await player.play()
    runs = (await players[0].store.call(ListRuns())).rows
    assert [run.state for run in runs] == ["success"] * 12


async def test_a_queued_run_whose_cancel_takes_several_turns_does_not_begin(players: list[Player]) -> None:
    await players[0].create(dag(*[task(f"t{number}") for number in range(600)]))
    await players[0].store.call(PauseDag("dag", True, "tester"))
    run = await players[0].store.call(CreateRun("dag", by="tester", run_id="second"))
    assert run.state == "queued"
    assert (await players[0].store.call(CancelRun("dag", "second", "tester"))).state == "queued"
    await players[0].store.call(PauseDag("dag", False, "tester"))

    await players[0].schedule()

    found = await players[0].run(run)
    assert (found.state, found.reason, found.started_us) == ("failed", "cancelled by tester", None)


async def wait_for_lock(connection: asyncpg.Connection) -> None:
    """Wait until a transaction waits for a lock of this connection."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE pg_backend_pid() = ANY(pg_blocking_pids(pid))"
    async with asyncio.timeout(60):
        while not await connection.fetchval(waiting):
            await asyncio.sleep(0.02)


async def begin_map(player: Player) -> RunRecord:
    """Create a run whose map has two elements that run, and after it a task that the first success starts."""
    run = await player.create(dag(task("s"), mapped("m", "s"), task("z", "m", rule="one_success"), id="one"))
    await player.report(await player.claim_one(), Success(), xcoms=(("return_value", "[1,2]"),))
    assert len(await player.claim()) == 2
    return run


async def test_a_turn_that_waits_for_an_element_keeps_no_pool(players: list[Player], slow: asyncpg.Connection) -> None:
    first, second = players
    run = await begin_map(first)
    await slow.execute("SELECT FROM task_instance WHERE task_id = 'm' AND map_index = 0 FOR UPDATE")
    await first.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester"))
    other = await first.create(dag(task("a"), id="two"))
    waiting = asyncio.create_task(first.schedule())
    await wait_for_lock(slow)

    async with asyncio.timeout(60):
        for _ in range(2):
            await second.store.call(SchedulerTurn(second.scheduler))

    assert await second.states(other) == {"a": "queued"}
    await slow.execute("ROLLBACK")
    await first.turn()  # the attempts have ended
    await waiting


async def test_a_turn_that_waits_for_a_task_after_a_map_has_not_locked_the_map(
    players: list[Player], slow: asyncpg.Connection
) -> None:
    player, _ = players
    run = await begin_map(player)
    (element, _) = [one for one in (await player.tasks(run)).values() if one.map_index >= 0]
    await slow.execute("SELECT FROM task_instance WHERE task_id = 'z' FOR UPDATE")
    await player.turn(AttemptReport(element.id, element.epoch, Success()))
    waiting = asyncio.create_task(player.schedule())
    await wait_for_lock(slow)

    # A worker that has claimed the task waits for the map next.
    await slow.execute("SELECT FROM task_map FOR UPDATE NOWAIT")

    await slow.execute("ROLLBACK")
    await waiting
    assert (await player.states(run))["z"] == "queued"


async def test_a_run_that_begins_again_locks_units_before_their_tasks(
    players: list[Player], slow: asyncpg.Connection
) -> None:
    player, _ = players
    run = await player.create(loop())
    await play(player, 1, bad=("l.b", 0))
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("l.b",), "tester", map_index=0))
    await slow.execute("SELECT FROM task_instance WHERE task_id = 'l' AND map_index = 0 FOR UPDATE")
    waiting = asyncio.create_task(player.schedule())
    await wait_for_lock(slow)

    # A worker that holds the unit waits for its tasks next.
    await slow.execute("SELECT FROM task_instance WHERE task_id = 'l.b' AND map_index = 0 FOR UPDATE NOWAIT")

    await slow.execute("ROLLBACK")
    await waiting
    assert (await player.states(run))["l.b[0]"] == "queued"


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        (
            datetime(2026, 3, 28, 23, tzinfo=UTC),
            {
                "daily": ["03:00"],
                "hourly": ["01:00", "03:00", "04:00", "05:00", "06:00"],
                "half": ["00:30", "01:00", "01:30", *["03:00", "03:30", "04:00", "04:30", "05:00", "05:30", "06:00"]],
                "every": ["01:00", "03:00", "04:00", "05:00", "06:00"],
            },
        ),
        (
            datetime(2026, 10, 24, 22, tzinfo=UTC),
            {
                "daily": ["02:30"],
                "hourly": ["01:00", "02:00", "02:00", "03:00", "04:00"],
                "half": ["00:30", "01:00", "01:30", *["02:00", "02:30", "02:00", "02:30", "03:00", "03:30", "04:00"]],
                "every": ["01:00", "02:00", "02:00", "03:00", "04:00"],
            },
        ),
    ],
    ids=["spring", "autumn"],
)
async def test_two_schedulers_of_which_one_is_late_create_each_run_once_when_the_clocks_change(
    clock: Clock, players: list[Player], slow: asyncpg.Connection, begin: datetime, expected: dict[str, list[str]]
) -> None:
    begin_us = clock.now_us = round(begin.timestamp()) * 1_000_000
    crons = {"daily": "30 2 * * *", "hourly": "0 * * * *", "half": "*/30 * * * *"}
    schedules = {
        name: ScheduleStructure("cron", cron=cron, zone="Europe/Vienna", start_us=begin_us + 1, catchup=True)
        for name, cron in crons.items()
    }
    schedules["every"] = ScheduleStructure("interval", interval_us=HOUR_US, start_us=begin_us + HOUR_US, catchup=True)
    for name, schedule in schedules.items():
        structure = dag(task("a"), id=name, schedule=schedule, max_active_runs=100)
        await players[0].store.call(StoreFile(f"{name}.py", "d", structures=(encode(structure),)))
    # A third scheduler stops in the middle of its turn with this DAG, and goes on after the change.
    await slow.execute("SELECT FROM dag WHERE dag_id = 'daily' FOR UPDATE")

    for minutes in (31, 62, 91, 121, 122, 150, 181, 245, 301):
        clock.now_us = begin_us + minutes * 60_000_000
        if minutes == 245:
            await slow.execute("COMMIT")
        await asyncio.gather(players[0].schedule(), players[minutes % 2].schedule())
    # This one reads the time before the change, and comes to its turn only now.
    clock.now_us = begin_us + 60_000_000
    assert (await players[1].schedule()).created == 0

    runs = (await players[0].store.call(ListRuns(limit=100))).rows
    found: dict[str, list[str]] = {name: [] for name in schedules}
    for logical_us, dag_id in sorted((run.logical_us or 0, run.dag_id) for run in runs):
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=logical_us)
        found[dag_id].append(f"{moment.astimezone(VIENNA):%H:%M}")
    assert found == expected
    assert len({(run.dag_id, run.logical_us) for run in runs}) == len(runs)
