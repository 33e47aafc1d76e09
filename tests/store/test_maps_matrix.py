"""Each trigger rule over each end of an element, in maps, groups and maps over maps, against DAGs with a task for each.

One run has a task for each rule, so a case is an end of elements in one shape. Both DAGs are played in the same order.
The last part of a case is what a user does: clear, mark, or clear a source that gives fewer values the second time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import pytest
from tests.store.dags import Player, dag, task
from tests.store.server import PostgresServer
from tests.store.test_groups import group, part
from tests.store.test_maps import mapped

from tidemill.core.tasks.dependencies import TaskOutcome, Told, TriggerRule
from tidemill.core.tasks.endings import AttemptEnding, Failure, Skip, Success
from tidemill.core.tasks.instance import format_instance
from tidemill.core.tasks.structure import DagStructure, MapSource, TaskStructure
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.run_calls import RunRecord
from tidemill.store.calls.task_calls import PushXCom
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt
from tidemill.store.calls.xcom_calls import ListXComs
from tidemill.store.engines.opening import open_store

RULES = [rule.value for rule in TriggerRule]
#: A task of a group that depends on others of the group may not have the rule `always`.
INNER_RULES = [rule for rule in RULES if rule != "always"]
#: A map with this rule follows the other one element by element.
WHOLE_RULES = [rule for rule in RULES if rule != "all_success"]
SHAPES = ("task", "group", "map over map")
ENDS = ("success", "failure", "skip", "retry", "empty", "clear", "mark", "removed")
#: The elements that end so: one of three, or all.
HIT = {"one": (1,), "all": (0, 1, 2)}
LIST = "[10,11,12]"
RETRY = {"retries": 1, "retry_delay_us": 0}


@dataclass
class Case:
    """How the elements of a case end.

    Attributes:
        shape: The shape of the DAG.
        end: How they end.
        hit: The elements that end so.
        number: Makes the ids of its DAGs unique.
        played: The attempts of each instance so far.
        is_over: Whether the user has done their part.
    """

    shape: str
    end: str
    hit: tuple[int, ...]
    number: int
    played: dict[str, int] = field(default_factory=dict)
    is_over: bool = False

    @property
    def first(self) -> str:
        """The task whose elements end in that way."""
        return "a" if self.shape == "group" else "m"

    @property
    def left(self) -> range:
        """The elements that exist in the end."""
        if self.end == "empty":
            return range(0)
        return range(3 - len(self.hit) if self.end == "removed" else 3)

    def choose(self, name: str) -> AttemptEnding:
        """Return how the next attempt of an instance ends."""
        self.played[name] = self.played.get(name, 0) + 1
        if name not in {format_instance(self.first, index) for index in self.hit}:
            return Success()
        match self.end:
            case "failure":
                return Failure("no", may_retry=False)
            case "skip":
                return Skip()
            case "retry":
                return Failure("again") if self.played[name] == 1 else Success()
            case "clear" | "mark" | "removed":
                return Success() if self.is_over else Failure("no", may_retry=False)
            case _:
                return Success()


def build_mapped(case: Case) -> DagStructure:
    source = MapSource("xcom", "s", "return_value")
    names = [f"z_{rule}" for rule in RULES]
    tasks = [task("s"), task("x")]
    if case.shape == "group":
        tasks += [group(source, max_outstanding=2), part("a", **RETRY), part("c")]
        tasks += [part(f"b_{rule}", "a", "c", rule=rule) for rule in INNER_RULES]
        tasks += [task(name, "a", "x", rule=name[2:]) for name in names]
        tasks += [task(f"y_{rule}", f"b_{rule}") for rule in INNER_RULES]
    else:
        tasks.append(mapped("m", source, max_outstanding=2, **RETRY))
        last = "m"
        if case.shape == "map over map":
            over, last = MapSource("map", "m", "return_value"), "f"
            tasks.append(mapped("f", over, arguments=("x",)))
            tasks += [mapped(f"w_{rule}", over, arguments=("x",), rule=rule) for rule in WHOLE_RULES]
        else:
            tasks += [mapped(f"q_{rule}", MapSource("literal", length=2), upstream=("m",), rule=rule) for rule in RULES]
        tasks += [task(name, last, "x", rule=name[2:]) for name in names]
    return dag(*tasks, id=f"maps{case.number}")


def build_eager(case: Case) -> DagStructure:
    """Return the DAG with a task for each element; a map without elements is one task, which is skipped."""
    indexes = case.left if case.end == "removed" else range(0 if case.end == "empty" else 3)
    tasks: list[TaskStructure] = [task("s"), task("x")]

    def add(name: str, upstream: list[str] | None = None, numbers: range = indexes, **details: Any) -> list[str]:
        """Add the elements of a mapped task; with `upstream`, all depend on the same tasks."""
        names = [format_instance(name, index) for index in numbers] or [name]
        if not numbers and upstream is None:
            details["rule"] = "always"
        tasks.extend(task(one, *(upstream or ["s"]), **details) for one in names)
        return names

    def follow(name: str, sources: tuple[str, ...], **details: Any) -> list[str]:
        """Add the elements of a task that each depend on the elements of other tasks with their index."""
        if not indexes:
            return add(name)
        found = [format_instance(name, index) for index in indexes]
        for one, index in zip(found, indexes, strict=True):
            tasks.append(task(one, *[format_instance(source, index) for source in sources], **details))
        return found

    if case.shape == "group":
        last = add("a", **RETRY)
        add("c")
        for rule in INNER_RULES:
            tasks.append(task(f"y_{rule}", *follow(f"b_{rule}", ("a", "c"), rule=rule)))
    else:
        last = m = add("m", **RETRY)
        if case.shape == "map over map":
            last = follow("f", ("m",))
            values = count_values(case)
            for rule in WHOLE_RULES:
                add(f"w_{rule}", m, range(values), rule=rule)
        else:
            for rule in RULES:
                add(f"q_{rule}", m, range(2), rule=rule)
    tasks += [task(f"z_{rule}", *last, "x", rule=rule) for rule in RULES]
    return dag(*tasks, id=f"eager{case.number}")


def count_values(case: Case) -> int:
    """Return how many elements of `m` have a value in the end."""
    return len(case.left) - (len(case.hit) if case.end in ("failure", "skip") else 0)


class Table:
    """An open store of one kind, used by all cases."""

    def __init__(self, url: str) -> None:
        self.runner = asyncio.Runner()
        self.store = self.runner.run(open_store(url))
        self.player = self.runner.run(Player(self.store).begin())
        self.numbers = count()

    def check(self, shape: str, end: str, hit: str) -> None:
        indexes = (2,) if (end, hit) == ("removed", "one") else HIT[hit]  # a list loses its last values
        self.runner.run(self.check_case(Case(shape, end, indexes, next(self.numbers))))

    def close(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()

    async def check_case(self, case: Case) -> None:
        run, found, values = await self.live(case, build_mapped(case), "m")
        case.played.clear()
        case.is_over = case.end == "removed"
        eager_run, wanted, eager_values = await self.live(case, build_eager(case), "e")
        if case.end == "mark":  # a map that was opened before keeps the values that there were
            found, wanted = ({name: one for name, one in each.items() if name[:2] != "w_"} for each in (found, wanted))
        elements = {name for name in found if "[" in name}
        for name in [name for name, state in found.items() if state == "removed"]:
            del found[name]
            elements.discard(name)
        inner: dict[str, list[str]] = {}
        for name in list(wanted):
            task_id, bracket, index = name.partition("[")
            if bracket:
                inner.setdefault(task_id, []).append(wanted[name])
                if case.shape == "group":
                    inner.setdefault(f"G[{index}", []).append(wanted[name])
                    inner.setdefault("G", []).append(wanted[name])
                if name not in elements:  # a map that its rule does not let run has no elements
                    assert task_id[:2] in ("q_", "w_")
                    assert found[task_id] in ("skipped", "upstream_failed")
                    del wanted[name]
        wanted |= {name: join(states) for name, states in inner.items()}
        if case.shape == "group" and "G" not in wanted:
            wanted["G"] = "skipped"
        assert found == wanted
        assert values == eager_values
        assert (await self.player.run(run)).state == (await self.player.run(eager_run)).state

    async def live(
        self, case: Case, structure: DagStructure, kind: str
    ) -> tuple[RunRecord, dict[str, str], dict[str, str]]:
        """Play a run, do what the user does, and play on; return the states of all instances, and the values."""
        run = await self.player.create(structure)
        await self.play(case, run)
        if case.end in ("clear", "mark") or (case.end == "removed" and kind == "m"):
            for call in list_calls(case, run, kind):
                await self.player.store.call(call)
            case.is_over = True
            await self.play(case, run)
        states = await self.player.states(run)
        listed = await self.player.store.call(ListXComs(run.dag_id, run.run_id))
        values = {format_instance(one.task_id, one.map_index): one.value for one in listed.rows}
        found = {name: value for name, value in values.items() if states[name] == "success" and name[:2] in VALUED}
        return run, states, found

    async def play(self, case: Case, run: RunRecord) -> None:
        held: dict[str, ClaimedAttempt] = {}
        while True:
            held |= {name_attempt(one): one for one in await self.player.claim()}
            if not held:
                return
            # What decides ends one by one, and what follows it all at once.
            first = [name for name in held if name[:2] in DECIDE or name in DECIDE]
            if first:
                first = [min(first, key=lambda one: random.Random(f"{case.end} {case.hit} {one}").random())]
            reports = [await self.report(case, name, held.pop(name)) for name in first or list(held)]
            await self.player.turn(*reports)

    async def report(self, case: Case, name: str, attempt: ClaimedAttempt) -> AttemptReport:
        value = msgspec.json.encode(name).decode()
        result = case.choose(name)
        if name == "s":
            value = LIST if not case.is_over else str(list(range(len(case.left))))
            value = "[]" if case.end == "empty" else value
        elif name in case_empty(case):
            result = Skip()  # a map without elements of the eager DAG
        if isinstance(result, Failure):  # it has a value once it is marked
            await self.player.store.call(PushXCom(attempt.task, attempt.epoch, "return_value", value))
        xcoms = (("return_value", value),) if isinstance(result, Success) else ()
        return AttemptReport(attempt.task, attempt.epoch, result, xcoms=xcoms)


#: The tasks that decide what follows.
DECIDE = ("s", "x", "m", "f", "a", "c", "m[", "f[", "a[", "c[")
#: The tasks whose values are compared.
VALUED = ("m[", "f[", "a[", "b_", "c[")


def case_empty(case: Case) -> set[str]:
    """Return the tasks of the eager DAG that stand for maps without elements."""
    found = {f"w_{rule}" for rule in WHOLE_RULES} if not count_values(case) else set()
    if not case.left:
        found |= {"m", "f", "a", "c", *(f"b_{rule}" for rule in INNER_RULES)}
    return found


def list_calls(case: Case, run: RunRecord, kind: str) -> list[Any]:
    dag_id, run_id, by = run.dag_id, run.run_id, "tester"
    if case.end == "removed":
        return [ClearTasks(dag_id, run_id, ("s",), by, downstream=True)]
    if kind == "e":
        names = tuple(format_instance(case.first, index) for index in case.hit)
        if case.end == "clear":
            return [ClearTasks(dag_id, run_id, names, by, downstream=True)]
        return [MarkTasks(dag_id, run_id, names, "success", by)]
    indexes: dict[str, Any] = {"indexes": (case.hit[0], case.hit[-1])}
    if case.end == "clear":
        return [ClearTasks(dag_id, run_id, (case.first,), by, downstream=True, **indexes)]
    return [MarkTasks(dag_id, run_id, (case.first,), "success", by, **indexes)]


def name_attempt(attempt: ClaimedAttempt) -> str:
    return format_instance(attempt.task_id, attempt.map_index)


def join(states: list[str]) -> str:
    return Told(frozenset(TaskOutcome(state) for state in states), done=True).outcome.value


@pytest.fixture(scope="module")
def sqlite_table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    table = Table(f"sqlite:///{tmp_path_factory.mktemp('matrix')}/tidemill.db")
    yield table
    table.close()


@pytest.fixture(scope="module")
def postgres_table(postgres: PostgresServer) -> Iterator[Table]:
    with asyncio.Runner() as runner:
        url = runner.run(postgres.new_database())
    table = Table(url)
    yield table
    table.close()


CASES = [
    (shape, end, hit)
    for shape in SHAPES
    for end in ENDS
    for hit in HIT
    if hit == "one" or end not in ("success", "empty")
]


@pytest.mark.parametrize(("shape", "end", "hit"), CASES)
def test_all_rules_decide_as_over_a_task_for_each_element_in_sqlite(
    sqlite_table: Table, shape: str, end: str, hit: str
) -> None:
    sqlite_table.check(shape, end, hit)


#: Each end in one shape.
SOME_CASES = [(SHAPES[number % 3], end, "one") for number, end in enumerate(ENDS)]


@pytest.mark.long
@pytest.mark.parametrize(("shape", "end", "hit"), SOME_CASES)
def test_all_rules_decide_as_over_a_task_for_each_element_in_postgresql(
    postgres_table: Table, shape: str, end: str, hit: str
) -> None:
    postgres_table.check(shape, end, hit)
