"""Random DAGs with a mapped task, against the same DAGs with a task for each of its elements: all states agree.

Both are played in the same order: the attempts that can run are the same, and the same one ends next.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.size import sized
from tests.store.dags import Player, dag, task
from tests.store.server import PostgresServer
from tests.store.test_maps import end, literal, mapped

from tidemill.core.tasks.dependencies import TaskOutcome, Told, TriggerRule
from tidemill.core.tasks.endings import Failure, Skip, Success
from tidemill.core.tasks.structure import DagStructure, TaskStructure
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt
from tidemill.store.engines.opening import open_store

RULES = [rule.value for rule in TriggerRule]
TASKS = 5


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[tuple[str, set[int]]], int, int, int]:
    """Return rule and upstream tasks by number, which task is mapped, its length, and a seed of the outcomes."""
    shape = []
    for number in range(TASKS):
        upstream = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        shape.append((draw(st.sampled_from(["all_success", *RULES])), upstream))
    return shape, draw(st.integers(0, TASKS - 1)), draw(st.integers(1, 4)), draw(st.integers(0, 1 << 16))


def build_mapped(shape: list[tuple[str, set[int]]], place: int, length: int, id: str) -> DagStructure:
    tasks = []
    for number, (rule, upstream) in enumerate(shape):
        names = tuple(f"t{one}" for one in upstream)
        if number == place:
            tasks.append(mapped(f"t{number}", literal(length), upstream=names, rule=rule))
        else:
            tasks.append(task(f"t{number}", *names, rule=rule))
    return dag(*tasks, id=id)


def build_eager(shape: list[tuple[str, set[int]]], place: int, length: int, id: str) -> DagStructure:
    names = {number: [f"t{number}"] for number in range(TASKS)} | {
        place: [f"t{place}[{index}]" for index in range(length)]
    }
    tasks: list[TaskStructure] = []
    for number, (rule, upstream) in enumerate(shape):
        before = [name for one in upstream for name in names[one]]
        tasks += [task(name, *before, rule=rule) for name in names[number]]
    return dag(*tasks, id=id)


def join(states: Iterable[str]) -> str:
    kinds = frozenset(TaskOutcome(state) for state in states)
    return Told(kinds, done=True).outcome.value


def name(attempt: ClaimedAttempt) -> str:
    return attempt.task_id if attempt.map_index < 0 else f"{attempt.task_id}[{attempt.map_index}]"


async def play(player: Player, structure: DagStructure, seed: int) -> dict[str, str]:
    """Play a run to its end, ending one attempt at a time, as the seed says."""
    run = await player.create(structure)
    held: dict[str, ClaimedAttempt] = {}
    while True:
        held |= {name(one): one for one in await player.claim()}
        if not held:
            return await end(player, run)
        chosen = min(held, key=lambda one: random.Random(f"{seed} {one}").random())
        result = random.Random(f"{seed} {chosen} ends").choice(
            [Success(), Success(), Failure("no", may_retry=False), Skip()]
        )
        attempt = held.pop(chosen)
        await player.turn(AttemptReport(attempt.task, attempt.epoch, result))


class Table:
    """An open store of one kind, used by all examples."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = self.loop.run_until_complete(open_store(url))
        self.player = self.loop.run_until_complete(Player(self.store).begin())
        self.number = 0

    def check(self, shape: tuple[list[tuple[str, set[int]]], int, int, int]) -> None:
        tasks, place, length, seed = shape
        self.number += 1
        maps = build_mapped(tasks, place, length, f"maps{self.number}")
        eager = build_eager(tasks, place, length, f"eager{self.number}")
        found = self.loop.run_until_complete(play(self.player, maps, seed))
        wanted = self.loop.run_until_complete(play(self.player, eager, seed))
        elements = [wanted.pop(f"t{place}[{index}]") for index in range(length)]
        assert found == wanted | {f"t{place}": join(elements)}

    def close(self) -> None:
        self.loop.run_until_complete(self.store.close())
        self.loop.close()


@pytest.fixture
def sqlite_table(tmp_path: Path) -> Iterator[Table]:
    table = Table(f"sqlite:///{tmp_path}/tidemill.db")
    yield table
    table.close()


@pytest.fixture
def postgres_table(postgres: PostgresServer) -> Iterator[Table]:
    loop = asyncio.new_event_loop()
    table = Table(loop.run_until_complete(postgres.new_database()))
    loop.close()
    yield table
    table.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes())
def test_a_map_decides_as_its_elements_would_in_sqlite(sqlite_table: Table, shape: object) -> None:
    sqlite_table.check(shape)  # type: ignore[arg-type]


@pytest.mark.nightly
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes())
def test_a_map_decides_as_its_elements_would_in_sqlite_often(sqlite_table: Table, shape: object) -> None:
    sqlite_table.check(shape)  # type: ignore[arg-type]


@pytest.mark.long
@settings(max_examples=sized(10, 25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes())
def test_a_map_decides_as_its_elements_would_in_postgresql(postgres_table: Table, shape: object) -> None:
    postgres_table.check(shape)  # type: ignore[arg-type]
