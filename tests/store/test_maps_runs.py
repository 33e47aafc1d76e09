"""Mapped tasks and their runs: elements change no run, and runs that wait, stop or go on count them right."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, func, select, text
from tests.store.dags import Player, dag, fail_these, mapped, task
from tests.store.test_groups import group, part
from tests.store.test_maps import literal

from tidemill.core.errors import InvariantError
from tidemill.core.tasks.endings import Failure, Success
from tidemill.core.tasks.structure import MapSource, MapStructure, TaskStructure
from tidemill.store.calls.instance_calls import ClearTasks
from tidemill.store.calls.run_calls import CancelRun, CreateRun
from tidemill.store.calls.setting_calls import SetPool
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt
from tidemill.store.ciphers import Cipher
from tidemill.store.context import build_context
from tidemill.store.dag_tables import dag_run, task_instance
from tidemill.store.database import Database
from tidemill.store.queries.dags.maps import turns as map_turns
from tidemill.store.queries.dags.maps.turns import expand_maps
from tidemill.store.queries.dags.runs.runs import start_runs
from tidemill.store.queries.dags.state import transition
from tidemill.store.queries.dags.state.task_rows import locate_tasks
from tidemill.store.queries.dags.state.transition import Board


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


def over(id: str, length: int) -> TaskStructure:
    """A task that is mapped over a literal list, with a window for all its elements."""
    structure = MapStructure(("x",), (MapSource("literal", length=length),), max_outstanding=length)
    return task(id, mapped=structure)


def read_run(connection: Connection) -> tuple[str | None, int]:
    return tuple(connection.execute(select(dag_run.c.stop, dag_run.c.unfinished)).one())


async def claim_all(player: Player) -> list[ClaimedAttempt]:
    found: list[ClaimedAttempt] = []
    while claimed := await player.claim(100):
        found += claimed
    return found


async def test_the_report_of_an_element_leaves_a_stopping_run_to_the_scheduler(
    player: Player, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await player.store.call(SetPool("default_pool", 2000))
    run = await player.create(dag(over("m", 520), task("t")))
    attempts = await claim_all(player)
    await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    assert await database.read(read_run) == ("cancel", 2), "more tasks than one transaction stops"
    late = max((one for one in attempts if one.map_index >= 0), key=lambda one: one.map_index)

    def read_before_the_other_task_ends(connection: Connection, ids: set[int]) -> Any:
        found = locate_tasks(connection, ids)
        end = "UPDATE task_instance SET state = 'failed', session_id = NULL, ending_outcome = NULL, epoch = epoch + 1"
        connection.execute(text(f"{end} WHERE task_id = 't'"))
        connection.execute(text("UPDATE dag_run SET unfinished = 1"))
        monkeypatch.setattr(transition, "locate_tasks", locate_tasks)
        return found

    monkeypatch.setattr(transition, "locate_tasks", read_before_the_other_task_ends)
    held = tuple((one.task, one.epoch) for one in attempts if one is not late)
    await player.turn(AttemptReport(late.task, late.epoch, Success()), held=held)

    assert await database.read(read_run) == ("cancel", 1)
    await player.schedule()
    await player.turn(held=())
    await player.schedule()
    assert await database.read(read_run) == (None, 0)
    assert (await player.run(run)).state == "failed"


async def test_a_run_that_is_not_locked_is_never_written(player: Player, database: Database) -> None:
    run = await player.create(dag(over("m", 1)))
    attempt = await player.claim_one()

    def change(connection: Connection) -> None:
        board = Board(connection, build_context(connection, Cipher()))
        board.lock([attempt.task])
        board.runs[run.id].changed = True
        board.flush()

    with pytest.raises(InvariantError):
        await database.write(change)


async def test_clearing_one_of_several_failed_elements_runs_it_in_a_fail_fast_dag(player: Player) -> None:
    run = await player.create(dag(over("m", 3), fail_fast=True))
    failed = [AttemptReport(one.task, one.epoch, Failure("no", may_retry=False)) for one in await player.claim()]
    await player.turn(*failed)
    await player.play()
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "tester", map_index=0))

    await player.play()

    assert await player.states(run) == {"m": "failed", "m[0]": "success", "m[1]": "failed", "m[2]": "failed"}
    assert (await player.run(run)).state == "failed"


async def test_a_run_that_waits_for_an_earlier_one_yields_its_slot_although_a_map_is_open(player: Player) -> None:
    structure = dag(task("s", depends_on_past=True), mapped("m", "s"), max_active_runs=1)
    one = await player.create(structure, run_id="one", logical_us=1)
    await player.play(fail_these(["s"]))
    two = await player.store.call(CreateRun(structure.id, run_id="two", logical_us=2))
    await player.play()
    assert (await player.states(two))["m"] == "mapped"
    await player.store.call(ClearTasks(structure.id, "one", (), "tester", failed=True, downstream=True))

    await player.play()

    assert (await player.states(one))["s"] == "success"
    assert (await player.states(two))["s"] == "success"
    assert {(await player.run(run)).state for run in (one, two)} <= {"failed", "success"}


async def test_a_turn_creates_a_limited_number_of_elements_and_goes_on_in_the_next(
    player: Player, database: Database
) -> None:
    run = await player.create(dag(over("a", 8), over("b", 4)))

    def expand(connection: Connection) -> tuple[bool, int]:
        context = build_context(connection, Cipher())
        expand_maps(connection, context, most=5)
        created = select(func.count()).select_from(task_instance).where(task_instance.c.map_index >= 0)
        return context.left, connection.execute(created).scalar_one()

    await database.write(lambda c: start_runs(c, [run.id], build_context(c, Cipher())))

    assert [await database.write(expand) for _ in range(4)] == [(True, 5), (True, 10), (False, 12), (False, 12)]
    await player.play()
    assert (await player.run(run)).state == "success"


async def test_a_turn_creates_a_limited_number_of_tasks_of_a_group(player: Player, database: Database) -> None:
    run = await player.create(dag(group(literal(5)), part("a"), part("b", "a"), over("c", 3)))

    def expand(connection: Connection) -> int:
        expand_maps(connection, build_context(connection, Cipher()), most=4)
        created = select(func.count()).select_from(task_instance).where(task_instance.c.map_index >= 0)
        return int(connection.execute(created).scalar_one())

    await database.write(lambda c: start_runs(c, [run.id], build_context(c, Cipher())))

    # An element of the group and its tasks are three.
    assert [await database.write(expand) for _ in range(5)] == [6, 12, 16, 18, 18]
    await player.play()
    assert (await player.run(run)).state == "success"


async def test_maps_that_always_have_work_do_not_hold_up_others(
    player: Player, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_turns, "MAPS", 1)
    run = await player.create(dag(over("a", 3), over("b", 3)))
    await database.write(lambda c: start_runs(c, [run.id], build_context(c, Cipher())))

    def expand(connection: Connection) -> set[str]:
        expand_maps(connection, build_context(connection, Cipher()))
        connection.execute(text("UPDATE task_map SET pending = 1"))
        return set(connection.execute(text("SELECT task_id FROM task_instance WHERE map_index = 0")).scalars())

    found = [await database.write(expand) for _ in range(40)]

    assert found[-1] == {"a", "b"}


async def test_a_queued_run_that_was_cancelled_starts_if_a_task_is_cleared_while_its_map_ends(player: Player) -> None:
    run = await player.create(dag(over("m", 2), task("z", "m", rule="all_done")))
    await player.play(lambda one: Failure("no", may_retry=False) if one.map_index == 1 else Success())
    of_run = run.dag_id, run.run_id
    await player.store.call(ClearTasks(*of_run, ("m",), "tester", map_index=1))
    assert (await player.run(run)).state == "queued"

    await player.store.call(CancelRun(*of_run, "tester"))
    await player.store.call(ClearTasks(*of_run, ("z",), "tester"))
    await player.play()

    assert (await player.states(run))["z"] == "success"
    assert (await player.run(run)).ended_us is not None
