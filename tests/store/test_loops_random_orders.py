"""Runs with loops, and with tasks that run all elements in one attempt, under random orders: each run ends.

`LOOPS_SEEDS=1000-1200 pytest tests/store/test_loops_random_orders.py` plays other lives.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sqlalchemy import Connection, and_, select
from tests.size import sized
from tests.store.dags import dag, task
from tests.store.server import PostgresServer
from tests.store.test_groups import part
from tests.store.test_iterations import iterated
from tests.store.test_maps import literal
from tests.store.test_maps_random_orders import Life, play

from tidemill.core.tasks.endings import Failure, Loss, Success
from tidemill.core.tasks.structure import (
    ChunkStructure,
    DagStructure,
    LoopStructure,
    MapSource,
    MapStructure,
    TaskStructure,
)
from tidemill.store.calls.call import Call, CallRefusedError
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.iteration_calls import GetParts, KeepParts, KeptPart
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt
from tidemill.store.dag_tables import task_instance, task_iteration, task_journal, task_map, task_part, xcom

FIRST, END = map(int, os.environ.get("LOOPS_SEEDS", "0-5").split("-"))
LOOP = ("l", "l.a", "l.b", "l.gate")
AGAIN = {"retries": 1, "retry_delay_us": 0}


class LoopLife(Life):
    """A loop of at most four iterations, a task before, and one after it."""

    NAMES: ClassVar[list[tuple[str, ...]]] = [
        ("l",), ("l",), ("l.a",), ("l.b",), ("l.gate",), ("x",), ("z",), ("l.a", "l.b"), (),
    ]  # fmt: skip
    MAPPED: ClassVar[tuple[str, ...]] = LOOP
    is_marked = False

    def build(self, rule: str, limit: int | None) -> DagStructure:
        structure = MapStructure(("loop",), (MapSource("loop"),), 1, loop=LoopStructure(4, "l.gate"))
        return dag(
            task("x", **AGAIN),
            TaskStructure("l", "TaskGroup", pool_slots=0, mapped=structure, is_group=True),
            part("l.a", "x", group="l", **AGAIN),
            part("l.b", "l.a", group="l", rule=self.random.choice(["all_success", "all_done"]), **AGAIN),
            part("l.gate", "l.a", "l.b", group="l", **AGAIN),
            task("z", "l.gate", rule=rule),
            id=f"loop{self.seed}",
            fail_fast=self.random.random() < 0.2,
        )

    def build_value(self, attempt: ClaimedAttempt) -> str:
        if attempt.task_id == "l.gate":
            return json.dumps({"done": self.calm or self.random.random() < 0.3, "reason": ""})
        return str(len(self.log))

    async def give(self, call: Call[Any]) -> None:
        await super().give(call)
        if isinstance(call, MarkTasks) and not set(LOOP).isdisjoint(call.task_ids):
            self.is_marked = True

    async def take(self) -> None:
        known = set(self.held)
        await super().take()
        for key in self.held.keys() - known:
            one = self.held[key]
            if one.task_id in LOOP and one.map_index > 0 and one.callback is None and not self.is_marked:
                before = await self.read_gate(one.map_index - 1)
                assert before == ("success", False), f"{one.task_id}[{one.map_index}] runs after {before}: {self.told}"

    @property
    def told(self) -> str:
        return f"seed {self.seed}: {self.log}"

    async def read_gate(self, index: int) -> tuple[str, bool]:
        def read(connection: Connection) -> Any:
            t = task_instance.c
            mine = and_(t.run == self.run.id, t.task_id == "l.gate", t.map_index == index)
            stored = and_(xcom.c.task == t.id, xcom.c.key == "return_value")
            return connection.execute(select(t.state, xcom.c.value).outerjoin(xcom, stored).where(mine)).one()

        state, value = await self.player.store.read(read)
        return state, value is None or json.loads(value)["done"]

    async def check(self) -> None:
        await super().check()

        def read(connection: Connection) -> tuple[Any, ...]:
            t, j = task_instance.c, task_journal.c
            mine = and_(t.run == self.run.id, t.task_id.in_(LOOP))
            rows = connection.execute(select(t.id, t.task_id, t.map_index, t.state).where(mine)).all()
            changes = (
                select(j.task, j.epoch, j.before, j.after, j.given).join(task_instance, t.id == j.task).where(mine)
            )
            values = select(xcom.c.task, xcom.c.value).join(task_instance, t.id == xcom.c.task).where(mine)
            created = select(task_map.c.task_id, task_map.c.created).where(task_map.c.run == self.run.id)
            journal = connection.execute(changes.order_by(j.task, j.epoch)).all()
            return rows, journal, dict(connection.execute(values).all()), dict(connection.execute(created).all())

        rows, journal, values, created = await self.player.store.read(read)
        # What has succeeded runs again only because a user asks for it.
        units = {row.id for row in rows if row.map_index >= 0 and row.task_id != "l"}
        again = [one for one in journal if one.before == "success" and one.task in units]
        assert {one.given.partition(" ")[0] for one in again} <= {"clear", "mark", "remove"}, f"{again}, {self.told}"
        last = {one.task: one for one in journal}
        states = {(row.task_id, row.map_index, row.state) for row in rows}
        for row in rows:
            if row.id in units and row.state == "success" and last[row.id].given.startswith("succeeded"):
                assert values.get(row.id) == self.values.get(row.id), f"{row}, {self.told}"
        of_units: dict[int, list[str]] = {}
        for row in rows:
            if row.id in units:
                of_units.setdefault(row.map_index, []).append(row.state)
        for row in rows:
            if row.task_id == "l" and row.map_index >= 0 and row.state == "success":
                found = of_units[row.map_index]
                assert "removed" not in found, f"l[{row.map_index}] succeeded with {found}: {self.told}"
        # One that was cancelled before it had begun again has iterations of its former life.
        ended = (await self.player.run(self.run)).state == "success"
        for name, number in created.items() if ended and ("l", -1, "success") in states else ():
            there = sorted(row.map_index for row in rows if row.task_id == name and row.state != "removed")
            assert there == list(range(-1, number)), f"{name} has {there} of {number}: {self.told}"


class IterationLife(Life):
    """A generator, an attempt that runs its items, one that runs lists, a map over results, and a task after all."""

    NAMES: ClassVar[list[tuple[str, ...]]] = [
        ("i",), ("i",), ("i",), ("c",), ("g",), ("y",), ("z",), ("i", "c"), (),
    ]  # fmt: skip
    MAPPED: ClassVar[tuple[str, ...]] = ("i", "c", "y")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: The results that are stored, by task instance and element.
        self.results: dict[int, dict[int, str | None]] = {}
        self.ids: dict[str, int] = {}
        self.number = 0

    def build(self, rule: str, limit: int | None) -> DagStructure:
        over = MapStructure(("x",), (MapSource("results", "i", "return_value"),))
        return dag(
            task("g", is_generator=True, retries=2, retry_delay_us=0),
            iterated("i", MapSource("generator", "g", "return_value"), **AGAIN),
            iterated("c", literal(5), chunk=ChunkStructure(2), **AGAIN),
            task("y", "i", mapped=over),
            task("z", "y", "c", rule=rule),
            id=f"iteration{self.seed}",
            fail_fast=self.random.random() < 0.2,
        )

    async def end_one(self, key: tuple[int, int]) -> None:
        one = self.held[key]
        if one.task_id in ("i", "c") and one.callback is None:
            await self.run_elements(key)
        else:
            await super().end_one(key)

    async def run_elements(self, key: tuple[int, int]) -> None:
        """Run some elements, store how they ended, and perhaps end the attempt."""
        if key in self.blocked:
            return
        one, call = self.held[key], self.player.store.call
        self.ids[one.task_id] = one.task
        page = await call(GetParts(one.task, -1, 100 if self.calm else 3))
        await self.compare()
        stored = self.results.setdefault(one.task, {})
        assert stored.keys().isdisjoint(each.number for each in page.parts), f"{page}, {stored}, {self.told}"
        kept = []
        for found in page.parts[: None if self.calm else self.random.randint(0, 3)]:
            self.number += 1
            word = "success"
            if not self.calm:
                word = self.random.choice(["success", "success", "failed", "up_for_retry", "skipped"])
            value = str(self.number) if word == "success" else None
            kept.append(KeptPart(found.number, word, found.tries + 1, value))
        try:
            counts = await call(KeepParts(one.task, one.epoch, tuple(kept), page.next + 1, 0))
        except CallRefusedError:
            self.log.append(f"{one.task_id} was stopped")
            del self.held[key]
            return
        stored |= {each.number: each.value for each in kept if each.state == "success"}
        left = await call(GetParts(one.task, -1, 100))
        ending: Any = None
        if left.closed and not left.parts:
            ending = Failure("elements failed", may_retry=False) if counts.failed else Success()
        elif not self.calm and self.random.random() < 0.2:
            ending = self.random.choice([Loss(), Failure("the process failed"), Failure("no", may_retry=False)])
        elif not self.calm and not left.parts and self.random.random() < 0.5:
            self.blocked.add(key)
        self.log.append(f"{one.task_id} {[(each.number, each.state) for each in kept]} {type(ending).__name__}")
        if ending is not None:
            del self.held[key]
            await self.player.turn(AttemptReport(*key, ending), held=tuple(self.held))

    @property
    def told(self) -> str:
        return f"seed {self.seed}: {self.log}"

    async def give(self, call: Call[Any]) -> None:
        names = await self.player.store.call(call)
        if not isinstance(call, ClearTasks):
            return
        for task_id, number in self.ids.items():
            known = self.results.get(number, {})
            if call.indexes is not None and call.task_ids == (task_id,):
                chosen = range(call.indexes[0], call.indexes[1] + 1)
                self.results[number] = {index: value for index, value in known.items() if index not in chosen}
            elif task_id in names or (not call.failed and f"{task_id}[0]" in names):
                self.results[number] = {}
        await self.compare()

    async def compare(self) -> None:
        """Check that each result is stored that was, and that it is counted."""

        def read(connection: Connection) -> tuple[Any, Any]:
            ids = sorted(self.ids.values())
            rows = connection.execute(select(task_part).where(task_part.c.task.in_(ids))).mappings().all()
            counts = connection.execute(select(task_iteration).where(task_iteration.c.task.in_(ids))).mappings().all()
            return rows, counts

        rows, counts = await self.player.store.read(read)
        found: dict[int, dict[int, str | None]] = {}
        for row in rows:
            if row["state"] == "success":
                found.setdefault(row["task"], {})[row["number"]] = row["value"]
        expected = {number: values for number, values in self.results.items() if values}
        assert found == expected, self.told
        for one in counts:
            states = Counter(row["state"] for row in rows if row["task"] == one["task"])
            told = {name: one[name] for name in ("success", "failed", "skipped", "up_for_retry")}
            assert told == {name: states[name] for name in told}, f"{told}, {states}, {self.told}"

    async def check(self) -> None:
        await super().check()
        await self.compare()


@pytest.mark.parametrize("life", [LoopLife, IterationLife])
def test_random_orders_on_loops_in_sqlite(tmp_path: Path, life: type[Life]) -> None:
    play(f"sqlite:///{tmp_path}/tidemill.db", range(FIRST, END), life)


@pytest.mark.long
@pytest.mark.parametrize("life", [LoopLife, IterationLife])
def test_random_orders_on_loops_in_postgresql(postgres: PostgresServer, life: type[Life]) -> None:
    with asyncio.Runner() as runner:
        url = runner.run(postgres.new_database())
    play(url, range(sized(3, 20)), life)
