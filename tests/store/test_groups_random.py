"""Random DAGs with a mapped group, against the same DAGs with the tasks of each unit written out: all states agree.

Both are played in the same order: the attempts that can run are the same, and the same one ends next.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.size import sized
from tests.store.dags import Player, dag, task
from tests.store.server import PostgresServer
from tests.store.test_groups import group, part
from tests.store.test_maps import literal

from tidemill.core.tasks.dependencies import TaskOutcome, Told, TriggerRule
from tidemill.core.tasks.endings import AttemptEnding, Failure, Skip, Success
from tidemill.core.tasks.structure import DagStructure, TaskStructure
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt
from tidemill.store.engines.opening import open_store

RULES = [rule.value for rule in TriggerRule if rule is not TriggerRule.ALWAYS]
#: The rules by which a task may have upstream tasks on both sides of a group.
BOTH = ["all_success", "all_done", "none_failed", "none_skipped"]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[tuple[str, str, set[str]]], int, int]:
    """Return name, rule and upstream of tasks before (x), in (t) and after (z) a group, its length, and a seed."""
    found: list[tuple[str, str, set[str]]] = [(f"x{number}", "all_success", set()) for number in range(2)]
    for number in range(draw(st.integers(1, 4))):
        inner = draw(st.sets(st.sampled_from([f"t{one}" for one in range(number)]), max_size=2)) if number else set()
        outer = draw(st.sets(st.sampled_from(["x0", "x1"]), max_size=1))
        rules = BOTH if inner and outer else RULES
        found.append((f"t{number}", draw(st.sampled_from(["all_success", *rules])), inner | outer))
    names = [name for name, _, _ in found if name[0] == "t"]
    for number in range(2):
        upstream = draw(st.sets(st.sampled_from([*names, "x0"]), min_size=1, max_size=3))
        found.append((f"z{number}", draw(st.sampled_from(RULES)), upstream))
    return found, draw(st.integers(1, 3)), draw(st.integers(0, 1 << 16))


def build_grouped(shape: list[tuple[str, str, set[str]]], length: int, id: str) -> DagStructure:
    # All units begin at once, as the eager tasks do: whether a failure or a skip comes first decides what follows both.
    tasks = [group(literal(length), max_outstanding=length)]
    for name, rule, upstream in shape:
        tasks.append((part if name[0] == "t" else task)(name, *upstream, rule=rule))
    return dag(*tasks, id=id)


def build_eager(shape: list[tuple[str, str, set[str]]], length: int, id: str) -> DagStructure:
    tasks: list[TaskStructure] = []
    for name, rule, upstream in shape:
        if name[0] == "t":
            for index in range(length):
                before = [f"{one}[{index}]" if one[0] == "t" else one for one in upstream]
                tasks.append(task(f"{name}[{index}]", *before, rule=rule))
            continue
        before = [
            full for one in upstream for full in ([f"{one}[{i}]" for i in range(length)] if one[0] == "t" else [one])
        ]
        tasks.append(task(name, *before, rule=rule))
    return dag(*tasks, id=id)


def name_attempt(attempt: ClaimedAttempt) -> str:
    return attempt.task_id if attempt.map_index < 0 else f"{attempt.task_id}[{attempt.map_index}]"


async def play(player: Player, structure: DagStructure, seed: int) -> dict[str, str]:
    """Play a run to its end, ending the attempts as the seed says; tasks before the group end first."""
    run = await player.create(structure)

    def draw(name: str) -> float:
        return random.Random(f"{seed} {name}").random()

    def end(name: str) -> AttemptEnding:
        endings: list[AttemptEnding] = [Success(), Success(), Failure("no", may_retry=False), Skip()]
        return random.Random(f"{seed} {name} ends").choice(endings)

    held: dict[str, ClaimedAttempt] = {}
    while True:
        held |= {name_attempt(one): one for one in await player.claim()}
        if not held:
            return {**await player.states(run), "run": (await player.run(run)).state}
        # Those before the group end together: what follows two of them is decided by both, not by the first.
        chosen = [one for one in held if one[0] == "x"] or [min(held, key=draw)]
        attempts = {one: held.pop(one) for one in chosen}
        reports = [AttemptReport(one.task, one.epoch, end(name)) for name, one in attempts.items()]
        await player.turn(*reports)


def join(found: list[str]) -> str:
    return Told(frozenset(TaskOutcome(state) for state in found), done=True).outcome.value


def check_many(url: str, count: int) -> None:
    with asyncio.Runner() as runner:
        store = runner.run(open_store(url))
        player = runner.run(Player(store).begin())
        numbers = iter(range(1 << 30))

        @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
        @given(shapes())
        def check(shape: tuple[list[tuple[str, str, set[str]]], int, int]) -> None:
            tasks, length, seed = shape
            number = next(numbers)
            found = runner.run(play(player, build_grouped(tasks, length, f"group{number}"), seed))
            wanted = runner.run(play(player, build_eager(tasks, length, f"eager{number}"), seed))
            inner = [name for name, _, _ in tasks if name[0] == "t"]
            for name in inner:
                wanted[name] = join([wanted[f"{name}[{index}]"] for index in range(length)])
            for index in range(length):
                wanted[f"G[{index}]"] = join([wanted[f"{name}[{index}]"] for name in inner])
            wanted["G"] = join([wanted[f"G[{index}]"] for index in range(length)])
            assert found == wanted

        try:
            check()
        finally:
            runner.run(store.close())


def test_a_group_decides_as_its_tasks_would_in_sqlite(tmp_path: Path) -> None:
    check_many(f"sqlite:///{tmp_path}/tidemill.db", 25)


@pytest.mark.nightly
def test_a_group_decides_as_its_tasks_would_in_sqlite_often(tmp_path: Path) -> None:
    check_many(f"sqlite:///{tmp_path}/tidemill.db", 30)


@pytest.mark.long
def test_a_group_decides_as_its_tasks_would_in_postgresql(postgres: PostgresServer) -> None:
    with asyncio.Runner() as runner:
        url = runner.run(postgres.new_database())
    check_many(url, sized(8, 15))
