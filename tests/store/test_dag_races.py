"""Two connections at once on PostgreSQL: claims, admissions and ends of tasks do not get in each other's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from tests.store.dags import Player, dag, task
from tests.store.server import PostgresServer
from tests.store.test_backlog import over
from tests.store.test_groups import group, part
from tests.store.test_maps import literal, mapped
from tests.store.test_maps_follow import follower

from tidemill.core.tasks.endings import Deferral, Failure, Success
from tidemill.core.tasks.structure import MapSource, MapStructure, StartStructure
from tidemill.store.calls.call import Call
from tidemill.store.calls.instance_calls import ClearTasks
from tidemill.store.calls.run_calls import CancelRun, CreateRun
from tidemill.store.calls.service_calls import (
    BeginSession,
    ClaimFiles,
    EndSession,
    LoseSession,
    ReleaseLeft,
    ReportFiles,
    SchedulerTurn,
)
from tidemill.store.calls.setting_calls import ListPools, SetPool
from tidemill.store.calls.task_calls import EmitItems
from tidemill.store.calls.trigger_calls import (
    ClaimedTrigger,
    ClaimTriggers,
    FiredEvent,
    ReleaseTriggers,
    StoreEvents,
)
from tidemill.store.calls.worker_calls import AttemptReport, OutcomeKind, WorkerTurn
from tidemill.store.engines.opening import open_store
from tidemill.store.queries.sessions import services


@pytest.fixture
async def address(postgres: PostgresServer) -> str:
    return await postgres.new_database()


@pytest.fixture
async def players(address: str) -> AsyncIterator[list[Player]]:
    stores = [await open_store(address) for _ in range(3)]
    yield [await Player(store).begin() for store in stores]
    for store in stores:
        await store.close()


class HeldRuns:
    """Holds the locks of all runs, so that what needs them goes on in the order in which it came."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def wait_for(self, waiting: int) -> None:
        """Wait until as many others wait for locks."""
        count = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        async with asyncio.timeout(30):
            while await self._connection.fetchval(count) < waiting:
                await asyncio.sleep(0.01)
                # What a transaction reads of the statistics stays the same until it forgets that.
                await self._connection.execute("SELECT pg_stat_clear_snapshot()")

    async def release(self) -> None:
        await self._connection.execute("COMMIT")


async def is_free(address: str, mapped_task: str) -> bool:
    """Return whether a transaction can lock a map at once."""
    connection = await asyncpg.connect(address)
    try:
        await connection.execute(f"SELECT FROM task_map WHERE task_id = '{mapped_task}' FOR UPDATE NOWAIT")
    except asyncpg.LockNotAvailableError:
        return False
    finally:
        await connection.close()
    return True


@pytest.fixture
async def held_runs(address: str, players: list[Player]) -> AsyncIterator[Callable[[], Awaitable[HeldRuns]]]:
    connection = await asyncpg.connect(address)

    async def hold() -> HeldRuns:
        await connection.execute("BEGIN; SELECT FROM dag_run FOR UPDATE")
        return HeldRuns(connection)

    yield hold
    await connection.close()


async def test_a_task_that_is_cleared_while_its_worker_is_lost_runs_again(
    players: list[Player], held_runs: Callable[[], Awaitable[HeldRuns]]
) -> None:
    run = await players[0].create(dag(task("a")))
    await players[0].claim_one()
    held = await held_runs()
    clearing = asyncio.create_task(players[0].store.call(ClearTasks(run.dag_id, run.run_id, ("a",), "tester")))
    await held.wait_for(1)
    losing = asyncio.create_task(players[1].store.call(LoseSession(players[0].worker)))
    await held.wait_for(2)
    await held.release()
    await asyncio.gather(clearing, losing)

    assert (await players[1].claim_one()).try_number == 2


async def test_a_run_that_ends_while_it_is_to_give_its_place_is_not_begun_again(
    players: list[Player], held_runs: Callable[[], Awaitable[HeldRuns]]
) -> None:
    earlier = await players[0].create(dag(task("a", depends_on_past=True), max_active_runs=1), logical_us=1)
    await players[0].play()
    later = await players[0].store.call(CreateRun("dag", logical_us=2))
    attempt = await players[0].claim_one()
    await players[0].store.call(ClearTasks(earlier.dag_id, earlier.run_id, ("a",), "tester"))
    held = await held_runs()
    ending = asyncio.create_task(players[0].report(attempt, Success()))
    await held.wait_for(1)
    starting = asyncio.create_task(players[1].store.call(SchedulerTurn(players[1].scheduler)))
    await held.wait_for(2)
    await held.release()
    await asyncio.gather(ending, starting)

    assert (await players[0].run(later)).state == "success"
    await players[0].play()
    assert (await players[0].run(earlier)).state == "success"


async def count_deadlocks(address: str) -> int:
    connection = await asyncpg.connect(address)
    try:
        statement = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        return int(await connection.fetchval(statement))
    finally:
        await connection.close()


async def test_a_queued_run_that_is_cancelled_while_it_is_to_begin_does_not_begin(
    address: str, players: list[Player], held_runs: Callable[[], Awaitable[HeldRuns]]
) -> None:
    await players[0].create(dag(task("a"), max_active_runs=1))
    second = await players[0].store.call(CreateRun("dag", by="tester", run_id="second"))
    await players[0].report(await players[0].claim_one(), Success())
    held = await held_runs()
    cancelling = asyncio.create_task(players[0].store.call(CancelRun("dag", "second", "tester")))
    await held.wait_for(1)
    starting = asyncio.create_task(players[1].store.call(SchedulerTurn(players[1].scheduler)))
    await held.wait_for(2)
    await held.release()
    await asyncio.gather(cancelling, starting)

    found = await players[0].run(second)
    assert (found.state, found.reason) == ("failed", "cancelled by tester")
    assert await count_deadlocks(address) == 0


async def test_an_element_that_ends_while_a_map_follows_others_is_followed_too(
    address: str, players: list[Player]
) -> None:
    run = await players[0].create(dag(mapped("s", literal(4)), follower("f", "s")))
    attempts = await players[0].claim()
    values = (("return_value", "1"),)
    await players[0].report(attempts[0], Success(), xcoms=values)
    await players[0].schedule()  # the first success is told, which marks the other map, too
    await players[0].report(attempts[1], Success(), xcoms=values)
    connection = await asyncpg.connect(address)
    await connection.execute("BEGIN; SELECT FROM task_map WHERE task_id = 'f' FOR UPDATE")
    held = HeldRuns(connection)
    reporting = asyncio.create_task(players[0].report(attempts[2], Success(), xcoms=values))
    await held.wait_for(1)
    # It reads what has ended before the report is committed, and locks the map afterwards.
    turning = asyncio.create_task(players[1].store.call(SchedulerTurn(players[1].scheduler)))
    await held.wait_for(2)
    await held.release()
    await asyncio.gather(reporting, turning)
    await connection.close()

    await players[1].schedule()

    states = await players[1].states(run)
    assert [states.get(f"f[{index}]") for index in range(4)] == ["queued", "queued", "queued", None]


async def test_a_group_that_stops_itself_leaves_a_unit_that_has_started_meanwhile(
    address: str, players: list[Player]
) -> None:
    run = await players[0].create(dag(group(literal(3), max_failed_elements=0), part("a")))
    (attempt,) = await players[0].claim(1)
    await players[0].report(attempt, Failure("no", may_retry=False))
    connection = await asyncpg.connect(address)
    # As a claim of a worker does.
    claim = "state = 'running', epoch = epoch + 1, tries = tries + 1, session_id = $1"
    await connection.execute("BEGIN")
    await connection.execute(
        f"UPDATE task_instance SET {claim} WHERE task_id = 'a' AND map_index = 1", players[0].worker
    )
    held = HeldRuns(connection)
    stopping = asyncio.create_task(players[1].schedule())
    await held.wait_for(1)
    await held.release()
    await stopping
    await connection.close()

    states = await players[1].states(run)
    assert [states[f"a[{index}]"] for index in range(3)] == ["failed", "running", "skipped"]


async def test_an_element_that_ends_with_a_callback_does_not_wait_for_its_run(
    address: str, players: list[Player]
) -> None:
    run = await players[0].create(dag(mapped("m", literal(1))))
    await players[0].claim_one()
    connection = await asyncpg.connect(address)
    await connection.execute("BEGIN; SELECT FROM task_instance WHERE map_index = 0 FOR UPDATE")
    held = HeldRuns(connection)
    cancelling = asyncio.create_task(players[0].store.call(CancelRun(run.dag_id, run.run_id, "tester")))
    await held.wait_for(1)

    # As the insert of a callback, which refers to the run.
    await connection.execute("SELECT FROM dag_run FOR KEY SHARE NOWAIT")

    await held.release()
    await cancelling
    await connection.close()


@pytest.mark.parametrize("clears", [False, True])
async def test_maps_that_change_together_are_locked_in_one_order(address: str, clears: bool) -> None:
    connection = await asyncpg.connect(address)
    name = await connection.fetchval("SELECT current_database()")
    for scan in ("indexscan", "indexonlyscan", "bitmapscan"):
        await connection.execute(f"ALTER DATABASE {name} SET enable_{scan} = off")
    store = await open_store(address)
    player = await Player(store).begin()
    over = MapStructure(("x",), (MapSource("generator", "g"),))
    run = await player.create(dag(task("g", is_generator=True), *[task(one, "g", mapped=over) for one in "az"]))
    attempt = await player.claim_one()
    first, other = [row["task_id"] for row in await connection.fetch("SELECT task_id FROM task_map ORDER BY task")]
    call: Call[Any] = EmitItems(attempt.task, attempt.epoch, 0, ("1",))
    if clears:
        await player.report(attempt, Success())
        await player.play()
        call = ClearTasks(run.dag_id, run.run_id, ("a", "z"), "tester")
    # A scan finds the rows in another order than that of their ids now.
    await connection.execute("UPDATE task_map SET made = made WHERE task_id = $1", first)
    await connection.execute(f"BEGIN; SELECT FROM task_map WHERE task_id = '{first}' FOR UPDATE")
    held = HeldRuns(connection)
    calling = asyncio.create_task(store.call(call))
    await held.wait_for(1)

    assert await is_free(address, other)

    await held.release()
    await calling
    await connection.close()
    await store.close()


async def test_a_turn_that_reports_an_element_locks_runs_before_its_map(
    address: str, players: list[Player], held_runs: Callable[[], Awaitable[HeldRuns]]
) -> None:
    structure = MapStructure(("x",), (MapSource("literal", length=1),))
    run = await players[0].create(dag(task("m", mapped=structure), task("t")))
    attempts = {one.task_id: one for one in await players[0].claim()}
    await players[0].store.call(ClearTasks(run.dag_id, run.run_id, ("t",), "tester"))
    held = await held_runs()
    reporting = asyncio.create_task(players[0].report(attempts["m"], Success()))
    await held.wait_for(1)

    assert await is_free(address, "m")

    await held.release()
    assert (await reporting).kind is OutcomeKind.MOVED
    await players[0].play()
    assert (await players[0].run(run)).state == "success"


async def test_workers_that_claim_at_once_get_different_tasks(players: list[Player]) -> None:
    run = await players[0].create(dag(*[task(f"t{number:02}") for number in range(60)]))
    await players[0].schedule()

    turns = [one.turn(capacity=3) for one in players for _ in range(8)]
    claimed = [attempt.task_id for answer in await asyncio.gather(*turns) for attempt in answer.claimed]

    assert len(claimed) == len(set(claimed))
    rest = await players[0].turn(capacity=100)
    assert len(claimed) + len(rest.claimed) == 60
    assert set((await players[1].states(run)).values()) == {"running"}


async def test_schedulers_that_admit_at_once_never_give_more_slots_than_there_are(players: list[Player]) -> None:
    await players[0].store.call(SetPool("small", 5))
    await players[0].create(dag(*[task(f"t{number:02}", pool="small") for number in range(40)]))
    done = 0
    while done < 40:
        await asyncio.gather(*[one.store.call(SchedulerTurn(one.scheduler)) for one in players for _ in range(3)])
        pool = next(one for one in await players[0].store.call(ListPools()) if one.name == "small")
        assert pool.used == min(5, 40 - done)
        claimed = (await players[0].turn(capacity=10)).claimed
        await players[0].turn(*[AttemptReport(one.task, one.epoch, Success()) for one in claimed])
        done += len(claimed)


async def test_tasks_that_end_at_once_count_all_for_what_follows_them(players: list[Player]) -> None:
    names = [f"t{number:02}" for number in range(30)]
    run = await players[0].create(dag(*[task(name) for name in names], task("z", *names)))
    await players[0].schedule()
    claims = [(await one.turn(capacity=10)).claimed for one in players]
    attempts = [(players[number], attempt) for number, claimed in enumerate(claims) for attempt in claimed]
    assert len(attempts) == 30

    outcomes = await asyncio.gather(*[player.report(attempt, Success()) for player, attempt in attempts])

    assert {one.kind for one in outcomes} == {OutcomeKind.MOVED}
    assert (await players[0].states(run))["z"] == "scheduled"


async def test_reports_clears_claims_and_turns_at_once_leave_nothing_stuck(players: list[Player]) -> None:
    names = [f"t{number:02}" for number in range(20)]
    tasks = [task(name, *names[max(0, number - 3) : number]) for number, name in enumerate(names)]
    run = await players[0].create(dag(*tasks))

    async def work(player: Player, number: int) -> None:
        for _ in range(12):
            claimed = (await player.turn(capacity=2)).claimed
            await player.turn(*[AttemptReport(one.task, one.epoch, Success()) for one in claimed])
            await player.store.call(SchedulerTurn(player.scheduler))
            if number == 1:
                clear = ClearTasks(run.dag_id, run.run_id, (names[number],), "tester", downstream=True)
                await player.store.call(clear)

    await asyncio.gather(*[work(player, number) for number, player in enumerate(players)])
    for player in players:
        await player.play()

    assert set((await players[0].states(run)).values()) == {"success"}
    assert (await players[0].run(run)).state == "success"


async def test_triggerers_that_claim_at_once_get_different_triggers(players: list[Player]) -> None:
    await players[0].create(dag(*[task(f"t{number:02}") for number in range(20)]))
    claimed = await players[0].claim()
    await players[0].turn(*[AttemptReport(one.task, one.epoch, Deferral("a.B", "{}", "go")) for one in claimed])
    triggerers = [await one.begin_service("triggerer") for one in players]

    calls = [one.store.call(ClaimTriggers(number, 1, 8)) for one, number in zip(players, triggerers, strict=True)]
    found = [trigger.id for answer in await asyncio.gather(*calls) for trigger in answer]

    assert len(found) == len(set(found))
    rest = await players[0].store.call(ClaimTriggers(triggerers[0], 2, 100))
    assert len(found) + len(rest) == 20


async def test_a_trigger_that_another_triggerer_has_claimed_meanwhile_is_not_released(
    address: str, players: list[Player]
) -> None:
    await players[0].create(dag(task("a")))
    await players[0].report(await players[0].claim_one(), Deferral("a.B", "{}", "go"))
    first, second = [await players[0].begin_service("triggerer") for _ in range(2)]
    await players[0].store.call(ClaimTriggers(first, 1, 1))
    connection = await asyncpg.connect(address)
    # The first one has released it, and the second one is claiming it, when the first one is found dead.
    await connection.execute("BEGIN")
    await connection.execute("UPDATE trigger_cursor SET session_id = $1, token = token + 2", second)
    held = HeldRuns(connection)
    losing = asyncio.create_task(players[1].store.call(LoseSession(first)))
    await held.wait_for(1)
    await held.release()
    await losing

    assert await connection.fetchval("SELECT session_id FROM trigger_cursor") == second
    assert await connection.fetchval("SELECT state FROM trigger") == "running"
    await connection.close()


async def test_a_request_that_is_sent_twice_at_once_claims_once(players: list[Player]) -> None:
    await players[0].create(dag(*[task(f"t{number}") for number in range(4)]))
    await players[0].schedule()
    turn = WorkerTurn(players[0].worker, 1, capacity=2)

    first, second = await asyncio.gather(players[0].store.call(turn), players[1].store.call(turn))

    assert first.claimed == second.claimed


async def test_a_run_that_is_created_while_the_one_before_ends_is_not_forgotten(players: list[Player]) -> None:
    structure = dag(task("a", depends_on_past=True), max_active_runs=100)
    run = await players[0].create(structure, logical_us=1)
    for number in range(2, 12):
        (attempt,) = await players[0].claim()
        report, create = players[0].report(attempt, Success()), CreateRun("dag", logical_us=number)
        _, run = await asyncio.gather(report, players[1].store.call(create))
    await players[0].play()

    assert (await players[0].run(run)).state == "success"


async def test_triggerers_that_claim_at_once_never_share_out_a_stream(players: list[Player]) -> None:
    streams, members = 30, 4
    names = [f"s{stream:02}m{member}" for stream in range(streams) for member in range(members)]
    await players[0].create(dag(*[task(name) for name in names]))
    deferred = [
        AttemptReport(one.task, one.epoch, Deferral("tests.Trigger", "{}", "resume", stream_key=one.task_id[:3]))
        for one in await players[0].claim(len(names))
    ]
    await players[0].turn(*deferred)
    triggerers = [await one.begin_service("triggerer") for one in players]
    owners: dict[str, set[int]] = {}
    claimed: list[int] = []
    for request in range(1, 40):
        answers = await asyncio.gather(
            *[one.store.call(ClaimTriggers(t, request, 9)) for one, t in zip(players, triggerers, strict=True)]
        )
        for triggerer, answer in zip(triggerers, answers, strict=True):
            for trigger in answer:
                assert trigger.stream_key is not None
                owners.setdefault(trigger.stream_key, set()).add(triggerer)
                claimed.append(trigger.id)

    assert len(claimed) == len(set(claimed)) == len(names)
    assert {stream for stream, of_stream in owners.items() if len(of_stream) > 1} == set()


async def test_ends_of_tasks_in_one_unit_do_not_block_each_other_for_good(address: str, players: list[Player]) -> None:
    run = await players[0].create(dag(group(literal(12)), part("a"), part("b"), part("c", "a", "b")))
    attempts = {(one.task_id, one.map_index): one for one in await players[0].claim()}

    async def end(player: Player, *keys: tuple[str, int]) -> None:
        found = [attempts[key] for key in keys]
        await player.turn(*[AttemptReport(one.task, one.epoch, Success()) for one in found])

    for index in range(0, 12, 2):
        await asyncio.gather(
            end(players[0], ("a", index), ("b", index + 1)), end(players[1], ("b", index), ("a", index + 1))
        )
    assert await count_deadlocks(address) == 0
    await players[0].play()
    assert set((await players[0].states(run)).values()) == {"success"}


async def test_a_trigger_that_feeds_a_map_and_the_stop_of_its_run_do_not_block_each_other_for_good(
    address: str, players: list[Player]
) -> None:
    # More tasks than one transaction stops, so that the scheduler stops the source, whose map it could expand, too. The
    # source is the last one by name, but begins whatever the others do: it has a pool of its own.
    await players[0].store.call(SetPool("own", 1))
    others = [task(f"t{number:03}") for number in range(505)]
    source = task("y", is_generator=True, pool="own", start=StartStructure("mod.Trigger", feeds=True))
    run = await players[0].create(dag(*others, source, over("y", "z", max_outstanding=2)))
    triggerer = await players[0].begin_service("triggerer")
    await players[0].schedule()
    (trigger,) = await players[0].store.call(ClaimTriggers(triggerer, 1, 10))

    async def fire(request: int) -> None:
        event = FiredEvent(trigger.id, trigger.token, "1", None, 1)
        await players[0].store.call(StoreEvents(triggerer, request, (event,), 100))

    await players[0].store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    await fire(1)
    connection = await asyncpg.connect(address)
    await connection.execute("BEGIN; SELECT FROM task_instance WHERE task_id = 't504' FOR UPDATE")
    held = HeldRuns(connection)
    stopping = asyncio.create_task(players[1].store.call(SchedulerTurn(players[1].scheduler)))
    await held.wait_for(1)
    firing = asyncio.create_task(fire(2))
    waiting = asyncio.create_task(held.wait_for(2))
    await asyncio.wait({firing, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    await asyncio.wait({waiting})
    await held.release()
    await asyncio.gather(stopping, firing)
    await connection.close()
    assert await count_deadlocks(address) == 0
    await players[0].store.call(ReleaseTriggers(triggerer, ((trigger.id, trigger.token),)))
    await players[0].play()
    assert (await players[0].run(run)).state == "failed"


async def test_a_task_that_depends_on_a_run_that_is_locked_is_decided_later(
    address: str, players: list[Player]
) -> None:
    structure = dag(task("a", depends_on_past=True))
    await players[0].create(structure, run_id="one", logical_us=1)
    await players[0].play()
    connection = await asyncpg.connect(address)
    await connection.execute("BEGIN; SELECT FROM dag_run WHERE run_id = 'one' FOR UPDATE")

    # Waiting would be a deadlock: the transaction that holds that run may wait for this task.
    async with asyncio.timeout(9):
        await players[0].store.call(CreateRun("dag", run_id="two", logical_us=2))
        for _ in range(3):
            answer = await players[0].store.call(SchedulerTurn(players[0].scheduler))

    assert (answer.more, answer.skipped) == (False, True)
    await connection.execute("COMMIT")
    await connection.close()
    assert (await players[0].claim_one()).task_id == "a"


async def claim_trigger(player: Player) -> tuple[int, ClaimedTrigger]:
    """Return a triggerer, and the trigger of a task that it has claimed."""
    await player.create(dag(task("t", retries=0)), run_id="r")
    await player.report(await player.claim_one(), Deferral("package.Class", "{}", "resume"))
    triggerer = await player.begin_service("triggerer")
    (claimed,) = await player.store.call(ClaimTriggers(triggerer, 1, 10))
    return triggerer, claimed


async def test_triggers_that_two_services_release_at_once_have_one_death(
    address: str, players: list[Player], monkeypatch: pytest.MonkeyPatch
) -> None:
    triggerer, _ = await claim_trigger(players[0])
    monkeypatch.setattr(services, "PART", 0)
    await players[0].store.call(LoseSession(triggerer))
    monkeypatch.setattr(services, "PART", 10)
    connection = await asyncpg.connect(address)
    await connection.execute("BEGIN; SELECT FROM trigger_cursor FOR UPDATE")
    held = HeldRuns(connection)
    releases = [asyncio.create_task(player.store.call(ReleaseLeft())) for player in players[:2]]
    await held.wait_for(2)
    await held.release()
    counts = await asyncio.gather(*releases)
    deaths = await connection.fetchval("SELECT deaths FROM trigger_death")
    await connection.close()
    assert (sorted(counts), deaths) == ([0, 1], 1)


async def test_on_kill_of_a_trigger_that_a_user_stops_while_it_is_handed_over_is_called(
    address: str, players: list[Player]
) -> None:
    triggerer, trigger = await claim_trigger(players[0])
    connection = await asyncpg.connect(address)
    await connection.execute("BEGIN; SELECT FROM trigger_cursor FOR UPDATE")
    held = HeldRuns(connection)
    clearing = asyncio.create_task(players[0].store.call(ClearTasks("dag", "r", ("t",), "tester")))
    await held.wait_for(1)
    release = ReleaseTriggers(triggerer, ((trigger.id, trigger.token),), moves=True)
    releasing = asyncio.create_task(players[1].store.call(release))
    await held.wait_for(2)
    await held.release()
    await asyncio.gather(clearing, releasing)
    await connection.close()

    other = await players[1].begin_service("triggerer")
    (kill,) = await players[1].store.call(ClaimTriggers(other, 1, 10, kills=True))
    assert (kill.id, kill.kill is not None) == (trigger.id, True)


async def test_a_session_that_is_begun_by_two_calls_of_one_request_at_once_is_one(
    address: str, players: list[Player]
) -> None:
    store = players[0].store
    first = await store.call(BeginSession("worker", "w", "machine", "boot", 17, request="first"))
    connection = await asyncpg.connect(address)
    await connection.execute(f"BEGIN; UPDATE service_session SET request = 'again' WHERE id = {first}")
    held = HeldRuns(connection)
    beginning = asyncio.create_task(store.call(BeginSession("worker", "w", "machine", "boot", 17, request="again")))
    await held.wait_for(1)
    await held.release()
    assert await beginning == first
    await connection.close()


async def test_files_that_a_worker_reports_twice_at_once_are_stored(address: str, players: list[Player]) -> None:
    connection = await asyncpg.connect(address)
    await connection.execute(f"BEGIN; INSERT INTO file_difference VALUES ({players[0].worker}, 'a.py', 'missing', 1)")
    held = HeldRuns(connection)
    reporting = asyncio.create_task(players[0].store.call(ReportFiles(players[0].worker, ("a.py",))))
    await held.wait_for(1)
    await held.release()
    await reporting
    assert await connection.fetchval("SELECT since_us > 1 FROM file_difference")
    await connection.close()


async def test_a_file_that_a_parser_claims_which_began_during_the_claim_of_another_is_given_to_one_of_them(
    address: str, players: list[Player]
) -> None:
    store = players[0].store
    early = await store.call(BeginSession("parser", "early", "machine", "boot", 17))
    await store.call(ClaimFiles(early, ("a.py",)))
    await store.call(EndSession(early))
    second = await store.call(BeginSession("parser", "second", "machine", "boot", 17))
    connection = await asyncpg.connect(address)
    await connection.execute("BEGIN; SELECT FROM dag_file FOR UPDATE")
    held = HeldRuns(connection)
    claiming = asyncio.create_task(store.call(ClaimFiles(second, ("a.py",))))
    await held.wait_for(1)
    # As a parser that begins now, and claims the file.
    third = await players[1].store.call(BeginSession("parser", "third", "machine", "boot", 17))
    await connection.execute("UPDATE dag_file SET session_id = $1", third)
    await held.release()
    await connection.close()
    assert await claiming == ()
    assert await store.call(ClaimFiles(third, ("a.py",))) == ("a.py",)


async def test_an_element_that_starts_while_its_value_changes_runs_again_with_the_new_one(
    address: str, players: list[Player]
) -> None:
    player, other, scheduler = players
    source = MapSource("generator", "s", "return_value")
    run = await player.create(dag(task("s", is_generator=True), mapped("m", source)))
    first = await player.claim_one()
    await player.store.call(EmitItems(first.task, first.epoch, 0, ("1", "2")))
    await player.report(first, Success())
    await player.schedule()
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("s",), "tester"))
    await player.schedule()
    # The two elements have waited longer.
    claimed = (await player.turn(capacity=3)).claimed
    again = next(one for one in claimed if one.task_id == "s")
    elements = {one.map_index: one for one in claimed if one.map_index >= 0}
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester", map_index=1))
    await player.turn(held=((elements[0].task, elements[0].epoch), (again.task, again.epoch)))
    await player.schedule()

    connection = await asyncpg.connect(address)
    try:
        # A claim reads the values, then writes the journal, and then commits.
        await connection.execute("BEGIN; LOCK TABLE task_journal IN SHARE MODE")
        locks = HeldRuns(connection)
        claim = asyncio.ensure_future(player.turn(capacity=1, held=((elements[0].task, elements[0].epoch),)))
        await locks.wait_for(1)
        await other.store.call(EmitItems(again.task, again.epoch, 0, ("1", "7")))
        turn = asyncio.ensure_future(scheduler.store.call(SchedulerTurn(scheduler.scheduler)))
        await locks.wait_for(2)
        await locks.release()
        ((started,), _) = ((await claim).claimed, await turn)
    finally:
        await connection.close()
    await scheduler.schedule()

    assert (started.map_index, started.elements) == (1, ("2",))
    held = tuple((one.task, one.epoch) for one in (elements[0], started, again))
    assert (await player.turn(held=held)).end == ((started.task, started.epoch),)
    await player.turn(held=(held[0], held[2]))
    (last,) = await player.claim()
    assert (last.map_index, last.elements) == (1, ("7",))
