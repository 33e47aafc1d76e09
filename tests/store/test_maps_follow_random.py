"""Random DAGs with maps over maps, against the same DAGs with a task for each element: all states agree.

`s` is mapped over a list. `f` follows it, and `g` follows `f`; `w` is mapped over `s` as a whole. In the eager DAG each
element is a task whose upstream is the task with its index. The result of an attempt depends on its name alone, so that
it is known which elements return None, and what does not exist after them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.size import sized
from tests.store.dags import Player, dag, task
from tests.store.server import PostgresServer
from tests.store.test_maps import end, list_elements, literal, mapped
from tests.store.test_maps_follow import follower, over
from tests.store.test_maps_random import RULES, Table, join, name

from tidemill.core.tasks.endings import AttemptEnding, Failure, Skip, Success
from tidemill.core.tasks.structure import DagStructure
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt

#: What the order in which elements end may change: the rule decides by the first failure or skip.
IN_ORDER = "all_success"


class Shape(NamedTuple):
    """`windows`: those of `s`, `f` and `g`; `rules`: those of `w`, and of the tasks after `f`, `g` and `w`."""

    length: int
    windows: tuple[int, int, int]
    rules: tuple[str, str, str, str]
    seed: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    rules = [rule for rule in RULES if rule != IN_ORDER]
    windows = draw(st.tuples(*[st.sampled_from([1, 2, 9])] * 3))
    chosen = [draw(st.sampled_from(rules)) for _ in range(4)]
    return Shape(draw(st.integers(0, 4)), windows, tuple(chosen), draw(st.integers(0, 1 << 16)))  # type: ignore[arg-type]


def choose(seed: int, name: str) -> str:
    """Return how an attempt ends."""
    return random.Random(f"{seed} {name} ends").choice(["value", "value", "value", "none", "fail", "skip"])


def build_maps(shape: Shape, id: str) -> DagStructure:
    of_s, of_f, of_g = shape.windows
    for_w, *after = shape.rules
    return dag(
        mapped("s", literal(shape.length), max_outstanding=of_s),
        follower("f", "s", max_outstanding=of_f),
        follower("g", "f", max_outstanding=of_g),
        mapped("w", over("s"), arguments=("x",), rule=for_w),
        *[task(f"after_{one}", one, rule=rule) for one, rule in zip("fgw", after, strict=True)],
        id=id,
    )


def has_follower(seed: int, *chain: str) -> bool:
    """Return whether the last of these elements, which follow one another, is followed by one."""
    for one in chain:
        result = choose(seed, one)
        if result != "value":
            return result != "none"
    return True


def build_eager(shape: Shape, id: str) -> DagStructure:
    indexes, seed = range(shape.length), shape.seed
    for_w, *after = shape.rules
    s = [f"s[{index}]" for index in indexes]
    f = [index for index in indexes if has_follower(seed, f"s[{index}]")]
    g = [index for index in f if has_follower(seed, f"s[{index}]", f"f[{index}]")]
    values = sum(choose(seed, one) == "value" for one in s)
    # A map without elements is skipped, and its rule is decided as if it had one.
    names = {
        "f": [f"f[{index}]" for index in f] or ["f"],
        "g": [f"g[{index}]" for index in g] or ["g"],
        "w": [f"w[{number}]" for number in range(values)] or ["w"],
    }
    tasks = [task(one) for one in s]
    tasks += [task(f"f[{index}]", f"s[{index}]") for index in f]
    tasks += [task(f"g[{index}]", f"f[{index}]") for index in g]
    tasks += [task(one, *s, rule=for_w) for one in names["w"]]
    tasks += [task(one, rule="always") for one in ("f", "g") if names[one] == [one]]
    tasks += [task(f"after_{one}", *names[one], rule=rule) for one, rule in zip("fgw", after, strict=True)]
    return dag(*tasks, id=id)


def finish(seed: int, attempt: ClaimedAttempt) -> tuple[AttemptEnding, tuple[tuple[str, str], ...]]:
    own = name(attempt)
    if own in ("f", "g", "w"):  # an empty map of the eager DAG
        return Skip(), ()
    match choose(seed, own):
        case "value":
            return Success(), (("return_value", msgspec.json.encode(own).decode()),)
        case "none":
            return Success(), ()
        case "fail":
            return Failure("no", may_retry=False), ()
        case _:
            return Skip(), ()


async def play(player: Player, structure: DagStructure, seed: int) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """Play a run to its end, ending one attempt at a time, as the seed says."""
    run = await player.create(structure)
    held: dict[str, ClaimedAttempt] = {}
    items: dict[str, Any] = {}
    while True:
        held |= {name(one): one for one in await player.claim()}
        if not held:
            return run, await end(player, run), items
        attempt = held.pop(min(held, key=lambda one: random.Random(f"{seed} {one}").random()))
        items[name(attempt)] = attempt.elements
        result, xcoms = finish(seed, attempt)
        await player.turn(AttemptReport(attempt.task, attempt.epoch, result, xcoms=xcoms))


class ChainTable(Table):
    def check(self, shape: Shape) -> None:  # type: ignore[override]
        self.loop.run_until_complete(self.check_all(shape))

    async def check_all(self, shape: Shape) -> None:
        self.number += 1
        run, found, items = await play(self.player, build_maps(shape, f"maps{self.number}"), shape.seed)
        _, wanted, _ = await play(self.player, build_eager(shape, f"eager{self.number}"), shape.seed)
        states = dict(found)
        for one in "sfgw":
            for element in await list_elements(self.player, run, one):
                states[f"{one}[{element.map_index}]"] = element.state
        heads = {one: [state for each, state in wanted.items() if each.startswith(f"{one}[")] for one in "sfgw"}
        if not heads["w"] and wanted["w"] in ("upstream_failed", "skipped"):
            heads["w"] = [wanted["w"]]
        # A map that its rule does not let run has no elements.
        if not any(each.startswith("w[") for each in states):
            wanted = {each: state for each, state in wanted.items() if not each.startswith("w[")}
        assert states == wanted | {one: join(each) for one, each in heads.items()}, shape
        s = [f"s[{index}]" for index in range(shape.length)]
        values = [msgspec.json.encode(one).decode() for one in s if states[one] == "success"]
        stored = [msgspec.json.encode(one).decode() for one in s if choose(shape.seed, one) == "value"]
        assert set(stored) <= set(values)
        for each, given_items in items.items():
            task_id, _, index = each.partition("[")
            if task_id in "fg":
                assert given_items == (f'"{"s" if task_id == "f" else "f"}[{index}"',)
            elif task_id == "w":
                assert given_items == (stored[int(index[:-1])],)


@pytest.fixture
def sqlite_table(tmp_path: Path) -> Iterator[ChainTable]:
    table = ChainTable(f"sqlite:///{tmp_path}/tidemill.db")
    yield table
    table.close()


@pytest.fixture
def postgres_table(postgres: PostgresServer) -> Iterator[ChainTable]:
    loop = asyncio.new_event_loop()
    table = ChainTable(loop.run_until_complete(postgres.new_database()))
    loop.close()
    yield table
    table.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes())
def test_maps_over_maps_end_as_their_elements_would_in_sqlite(sqlite_table: ChainTable, shape: Shape) -> None:
    sqlite_table.check(shape)


@pytest.mark.nightly
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes())
def test_maps_over_maps_end_as_their_elements_would_in_sqlite_often(sqlite_table: ChainTable, shape: Shape) -> None:
    sqlite_table.check(shape)


@pytest.mark.long
@settings(max_examples=sized(10, 25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes())
def test_maps_over_maps_end_as_their_elements_would_in_postgresql(postgres_table: ChainTable, shape: Shape) -> None:
    postgres_table.check(shape)
