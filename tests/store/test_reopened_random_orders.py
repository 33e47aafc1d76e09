"""Sources of maps that users clear at random, again and again: in the end each element has run with its value."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest
from sqlalchemy import Connection, select
from tests.size import sized
from tests.store.dags import dag, task
from tests.store.server import PostgresServer
from tests.store.test_groups import group, part
from tests.store.test_maps import mapped
from tests.store.test_maps_random_orders import ITEMS, Life, play

from tidemill.core.tasks.comparison import compute_digest
from tidemill.core.tasks.structure import DagStructure, MapSource
from tidemill.store.calls.call import CallRefusedError
from tidemill.store.calls.instance_calls import ClearTasks
from tidemill.store.calls.task_calls import EmitItems, GetValuePage
from tidemill.store.calls.worker_calls import ClaimedAttempt
from tidemill.store.dag_tables import task_instance, task_map
from tidemill.store.queries.dags.items.elements import read_items
from tidemill.store.queries.dags.items.sources import locate_leaves
from tidemill.store.queries.dags.items.stored_sources import read_sources


class ReopenedLife(Life):
    """A generator and two lists; maps and groups over one of them, or over a combination; and a map over a map."""

    NAMES: ClassVar[list[tuple[str, ...]]] = [
        ("g",), ("g",), ("s",), ("s",), ("o",), ("g", "s"), ("s", "o"), ("m",), ("n",), ("f",), ("u",), ("p",), (),
    ]  # fmt: skip
    MAPPED: ClassVar[tuple[str, ...]] = ("m", "n", "f", "u", "p", "q")
    FOLLOWERS: ClassVar[str] = "f"

    def build(self, rule: str, limit: int | None) -> DagStructure:
        retries = {"retries": 1, "retry_delay_us": 0}
        source, other = (MapSource("xcom", name, "return_value") for name in "so")
        unit = self.random.choice([source, MapSource("generator", "g")])
        self.structure = dag(
            task("g", is_generator=True, retries=2, retry_delay_us=0),
            task("s", **retries),
            task("o", **retries),
            mapped("m", MapSource("generator", "g"), max_outstanding=3, max_failed_elements=limit, **retries),
            mapped("f", MapSource("map", "m", "return_value"), max_outstanding=3),
            mapped("n", source, other, max_outstanding=3, **retries),
            group(unit, id="u", max_outstanding=2, max_failed_elements=limit),
            part("p", group="u", **retries),
            part("q", "p", group="u", rule=self.random.choice(["all_success", "all_done", "one_failed"])),
            task("z", "m", "n", "q", rule=rule),
            id=f"again{self.seed}",
            fail_fast=self.random.random() < 0.2,
        )
        return self.structure

    async def play(self) -> None:
        await super().play()
        for _ in range(self.random.randrange(1, 4)):
            await self.clear_sources()
            steps = [self.take, self.take, self.end, self.end, self.end, self.yield_some, self.order]
            for _ in range(self.random.randrange(20)):
                self.calm = self.random.random() < 0.8
                await self.random.choice(steps if self.random.random() < 0.2 else steps[:-1])()
            self.calm = True
            if self.random.random() < 0.7:
                await self.clear_sources()
            await self.finish()

    async def clear_sources(self) -> None:
        names = self.random.choice([("g",), ("s",), ("o",), ("g", "s"), ("s", "o"), ("g", "s", "o")])
        self.log.append(f"clear {names}")
        await self.give(ClearTasks(self.run.dag_id, self.run.run_id, names, "tester"))

    def choose(self, number: int) -> str:
        """Return the value with a number; it is often the same as before."""
        return str(number) if self.random.random() < 0.7 else f'"{number} {self.random.randrange(3)}"'

    def build_value(self, attempt: ClaimedAttempt) -> str:
        if attempt.task_id not in ("s", "o"):
            return "1"
        return f"[{','.join(map(self.choose, range(self.random.randrange(4))))}]"

    async def emit(self, key: tuple[int, int]) -> bool:
        first = self.emitted.get(key, 0)
        known = await self.player.store.call(GetValuePage(self.run.id, "g"))
        if first >= len(known.values) and self.random.random() < 0.1:
            self.emitted[key] = ITEMS  # it yields no more
            return False
        value = dict(known.values).get(first) or self.choose(first)
        try:
            stored = await self.player.store.call(EmitItems(*key, first, (value,)))
        except CallRefusedError:
            self.held.pop(key)
            return False
        self.emitted[key] = first + 1
        return stored.wanted

    #: How many elements were compared with the items that they have in the end.
    compared: ClassVar[int] = 0

    async def check(self) -> None:
        await super().check()
        await self.player.store.read(self._check_items)

    def _check_items(self, connection: Connection) -> None:
        t = task_instance.c
        tasks = {one.id: one for one in self.structure.tasks}
        rows = connection.execute(select(task_instance).where(t.run == self.run.id)).mappings().all()
        states = {one["task_id"]: one["state"] for one in rows if one["map_index"] < 0}
        maps = connection.execute(select(task_map).where(task_map.c.run == self.run.id)).mappings().all()
        stored = {one["task_id"]: one for one in maps}
        for row in rows:
            name = tasks[row["task_id"]].mapped_group or row["task_id"]
            mapped = tasks[name].mapped
            if mapped is None or name == "f" or row["map_index"] < 0 or row["items_digest"] is None:
                continue
            one = stored[name]
            said = f"seed {self.seed}: {dict(row)}, {dict(one)}, {self.log}"
            assert one["compared"] is None, said
            if one["stop"] or row["map_index"] >= one["created"] or row["tries"] == row["tries_before"]:
                continue
            if any(states[source] != "success" for source in mapped.sources) or row["state"] == "removed":
                continue
            sources = read_sources(one["sources"])
            if sources.stale or states[name] == "skipped":
                continue
            numbers = locate_leaves(mapped, sources, row["map_index"])
            places = [(*owner, number) for owner, number in zip(sources.owners, numbers, strict=True) if owner]
            items = read_items(connection, places)
            type(self).compared += 1
            assert row["items_digest"] == compute_digest([items.get(place) for place in places], numbers), said


def test_random_orders_on_sources_in_sqlite(tmp_path: Path) -> None:
    play(f"sqlite:///{tmp_path}/tidemill.db", range(3), ReopenedLife)


@pytest.mark.nightly
def test_random_orders_on_sources_in_sqlite_often(tmp_path: Path) -> None:
    play(f"sqlite:///{tmp_path}/tidemill.db", range(3000, 3020), ReopenedLife)


@pytest.mark.long
def test_random_orders_on_sources_in_postgresql(postgres: PostgresServer) -> None:
    with asyncio.Runner() as runner:
        url = runner.run(postgres.new_database())
    play(url, range(sized(2, 10)), ReopenedLife)
