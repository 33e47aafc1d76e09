"""Runs with maps that a user clears, marks and cancels at random end, and each map counts its elements."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sqlalchemy import Connection, select
from tests.size import sized
from tests.store.dags import Player, dag, task
from tests.store.server import PostgresServer
from tests.store.test_maps import literal, mapped

from tidemill.core.tasks.endings import AttemptEnding, Failure, Skip, Success
from tidemill.core.tasks.expansion import find_count
from tidemill.core.tasks.structure import DagStructure, MapSource
from tidemill.core.tasks.task_row import TaskState
from tidemill.store.calls.call import Call, CallRefusedError
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.run_calls import CancelRun
from tidemill.store.calls.task_calls import EmitItems
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt, OutcomeKind
from tidemill.store.dag_tables import task_instance, task_map
from tidemill.store.engines.opening import open_store
from tidemill.store.queries.dags.items.stored_sources import read_sources

STEPS, ITEMS = 40, 6
COUNTS = ("waiting", "unfinished", "retrying", "success", "failed", "upstream_failed", "skipped")


class Life:
    """One run with a generator, a map over it, a map over a list, and a task after both, under random orders."""

    NAMES: ClassVar[list[tuple[str, ...]]] = [("m",), ("n",), ("g",), ("z",), ("m", "n"), ()]
    #: The tasks whose elements are cleared and marked.
    MAPPED: ClassVar[tuple[str, ...]] = ("m", "n", "f", "h")
    FOLLOWERS: ClassVar[str] = ""
    #: The part of the attempts that return None.
    NONES: ClassVar[float] = 0.0

    def __init__(self, player: Player, seed: int) -> None:
        self.player, self.random, self.seed = player, random.Random(seed), seed
        self.held: dict[tuple[int, int], ClaimedAttempt] = {}
        #: The held attempts that wait for items.
        self.blocked: set[tuple[int, int]] = set()
        self.emitted: dict[tuple[int, int], int] = {}
        #: The latest value that each task instance has returned.
        self.values: dict[int, str] = {}
        self.log: list[str] = []
        self.calm = False

    async def live(self) -> None:
        rule = self.random.choice(["all_done", "all_success", "one_failed", "one_success", "none_failed"])
        limit = self.random.choice([None, None, 0, 1])
        self.run = await self.player.create(self.build(rule, limit))
        await self.play()

    def build(self, rule: str, limit: int | None) -> DagStructure:
        return dag(
            task("g", is_generator=True, retries=2, retry_delay_us=0),
            mapped(
                "m",
                MapSource("generator", "g"),
                max_outstanding=3,
                max_failed_elements=limit,
                retries=1,
                retry_delay_us=0,
            ),
            mapped("n", literal(4), max_outstanding=2),
            task("z", "m", "n", rule=rule),
            id=f"d{self.seed}",
            fail_fast=self.random.random() < 0.2,
        )

    async def play(self) -> None:
        for _ in range(self.random.randrange(5, STEPS)):
            await self.random.choice(
                [self.take, self.take, self.end, self.end, self.end, self.yield_some, self.order]
            )()
        await self.finish()

    async def finish(self) -> None:
        """Run everything until nothing is left, without failures, and check what has become of it."""
        self.calm = True
        for _ in range(60):
            await self.take()
            if not self.held:
                break
            await self.end()
        else:
            raise AssertionError(f"there is always something to run: {self.log}")
        await self.check()

    async def take(self) -> None:
        for _ in range(5 if self.calm else 2):
            await self.player.schedule()
            capacity = 20 if self.calm else self.random.randrange(1, 4)
            self.blocked &= self.held.keys()
            answer = await self.player.turn(capacity=capacity, held=tuple(self.held), blocked=tuple(self.blocked))
            self.blocked -= {*answer.unblocked}
            for one in answer.end:
                self.held.pop(one, None)
            self.held |= {(one.task, one.epoch): one for one in answer.claimed}

    async def end(self) -> None:
        if self.held:
            await self.end_one(self.random.choice(list(self.held)))

    async def end_one(self, key: tuple[int, int]) -> None:
        attempt = self.held[key]
        generator = attempt.task_id == "g" and attempt.callback is None
        result: AttemptEnding = (
            Success()
            if self.calm
            else self.random.choice([Success(), Success(), Failure("no"), Failure("no", may_retry=False), Skip()])
        )
        if generator and isinstance(result, Success):
            while self.emitted.get(key, 0) < ITEMS and await self.emit(key):
                pass
            if key not in self.held:
                return
        del self.held[key]
        self.log.append(f"{attempt.task_id}[{attempt.map_index}] {type(result).__name__}")
        if attempt.callback is None:
            returns = isinstance(result, Success) and not generator and self.random.random() >= self.NONES
            xcoms = (("return_value", self.build_value(attempt)),) if returns else ()
            answer = await self.player.turn(AttemptReport(*key, result, xcoms=xcoms), held=tuple(self.held))
            if xcoms and answer.outcomes[0].kind is OutcomeKind.MOVED:
                self.values[attempt.task] = xcoms[0][1]

    def build_value(self, attempt: ClaimedAttempt) -> str:
        return "1"

    async def emit(self, key: tuple[int, int]) -> bool:
        first = self.emitted.get(key, 0)
        try:
            stored = await self.player.store.call(EmitItems(*key, first, (str(first),)))
        except CallRefusedError:
            self.held.pop(key)
            return False
        self.emitted[key] = first + 1
        return stored.wanted

    async def yield_some(self) -> None:
        for key, one in list(self.held.items()):
            if one.task_id == "g" and self.emitted.get(key, 0) < ITEMS:
                await self.emit(key)

    async def order(self) -> None:
        dag_id, run_id = self.run.dag_id, self.run.run_id
        names = self.random.choice(self.NAMES)
        indexes = self.random.choice([None, (0, 0), (1, 2), (0, 9)]) if names and names[0] in self.MAPPED else None
        more = self.random.random() < 0.5
        call = self.random.choice(
            [
                ClearTasks(dag_id, run_id, names, "tester", indexes=indexes, downstream=more),
                ClearTasks(dag_id, run_id, names, "tester", failed=True),
                MarkTasks(
                    dag_id,
                    run_id,
                    names or self.NAMES[0],
                    self.random.choice(["success", "failed", "skipped"]),
                    "tester",
                    indexes=indexes,
                ),
                CancelRun(dag_id, run_id, "tester"),
            ]
        )
        self.log.append(f"{call}")
        try:
            await self.give(call)
        except CallRefusedError as error:
            self.log.append(f"refused: {error}")

    async def give(self, call: Call[Any]) -> None:
        await self.player.store.call(call)

    async def check(self) -> None:
        def read(connection: Connection) -> tuple[Any, Any]:
            t, m = task_instance.c, task_map.c
            rows = connection.execute(
                select(t.task_id, t.map_index, t.state).where(t.run == self.run.id).order_by(t.task_id, t.map_index)
            ).all()
            return rows, connection.execute(select(task_map).where(m.run == self.run.id)).mappings().all()

        rows, maps = await self.player.store.read(read)
        states = {(one.task_id, one.map_index): one.state for one in rows}
        run = await self.player.run(self.run)
        said = f"seed {self.seed}: run {run.state}, {states}, {[dict(one) for one in maps]}, {self.log}"
        assert run.state in ("success", "failed"), said
        over = {"success", "failed", "upstream_failed", "skipped", "removed"}
        assert all(state in over for state in states.values()), said
        for one in maps:
            if not one["opened"]:
                continue
            # A follower that was stopped before it opened has elements of its former life.
            follows = one["task_id"] in self.FOLLOWERS and one["sources"] is not None
            found = Counter(
                find_count(TaskState(state))
                for (name, index), state in states.items()
                if name == one["task_id"] and (0 <= index < one["created"] or (index >= 0 and follows))
            )
            # A map that follows another one counts these apart.
            never = read_sources(one["sources"]).never
            extra = max(never, one["arrived"] - one["created"]) if one["stop"] else 0
            told = {name: one[name] for name in COUNTS}
            wanted = {name: found[name] + (extra if name == "skipped" else 0) for name in COUNTS}
            at_source = {name: told[name] - wanted[name] for name in COUNTS if told[name] != wanted[name]}
            assert at_source in ({}, {"upstream_failed": 1}), f"{one['task_id']} counts {told}, has {wanted}; {said}"


class ChainLife(Life):
    """A generator, a map over it, two maps that follow it one after the other, and a task after them."""

    NAMES: ClassVar[list[tuple[str, ...]]] = [("m",), ("f",), ("h",), ("g",), ("z",), ("m", "f"), ("f", "h"), ()]
    FOLLOWERS: ClassVar[str] = "fh"
    NONES: ClassVar[float] = 0.2

    def build(self, rule: str, limit: int | None) -> DagStructure:
        windows = {name: self.random.randint(1, 3) for name in "mfh"}
        retries = {"retries": 1, "retry_delay_us": 0}
        return dag(
            task("g", is_generator=True, retries=2, retry_delay_us=0),
            mapped("m", MapSource("generator", "g"), max_outstanding=windows["m"], **retries),
            mapped("f", MapSource("map", "m", "return_value"), max_outstanding=windows["f"], **retries),
            mapped(
                "h",
                MapSource("map", "f", "return_value"),
                max_outstanding=windows["h"],
                max_failed_elements=limit,
                **retries,
            ),
            task("z", "m", "h", rule=rule),
            id=f"chain{self.seed}",
            fail_fast=self.random.random() < 0.2,
        )


def play(url: str, seeds: range, kind: type[Life] = Life) -> None:
    async def run() -> None:
        store = await open_store(url)
        try:
            for seed in seeds:
                player = await Player(store).begin()
                await kind(player, seed).live()
        finally:
            await store.close()

    asyncio.run(run())


def test_random_orders_on_maps_in_sqlite(tmp_path: Path) -> None:
    play(f"sqlite:///{tmp_path}/tidemill.db", range(12))


@pytest.mark.nightly
def test_random_orders_on_maps_in_sqlite_often(tmp_path: Path) -> None:
    play(f"sqlite:///{tmp_path}/tidemill.db", range(1000, 1020))


@pytest.mark.long
def test_random_orders_on_maps_in_postgresql(postgres: PostgresServer) -> None:
    loop = asyncio.new_event_loop()
    url = loop.run_until_complete(postgres.new_database())
    loop.close()
    play(url, range(sized(6, 15)))


def test_random_orders_on_maps_over_maps_in_sqlite(tmp_path: Path) -> None:
    play(f"sqlite:///{tmp_path}/tidemill.db", range(12), ChainLife)


@pytest.mark.nightly
def test_random_orders_on_maps_over_maps_in_sqlite_often(tmp_path: Path) -> None:
    play(f"sqlite:///{tmp_path}/tidemill.db", range(2000, 2015), ChainLife)


@pytest.mark.long
def test_random_orders_on_maps_over_maps_in_postgresql(postgres: PostgresServer) -> None:
    loop = asyncio.new_event_loop()
    url = loop.run_until_complete(postgres.new_database())
    loop.close()
    play(url, range(sized(4, 8)), ChainLife)
