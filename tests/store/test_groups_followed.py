"""Maps over the outputs of mapped groups in the store, on both databases."""

from __future__ import annotations

import pytest
from tests.store.dags import Player, dag, task
from tests.store.test_groups import group, part
from tests.store.test_maps import end, literal, mapped
from tests.store.test_maps_follow import follower, list_states, list_values, over, play, player, succeed

from tidemill.core.tasks.endings import Failure
from tidemill.core.tasks.structure import MapSource
from tidemill.store.calls.instance_calls import ClearTasks

__all__ = ["player"]


async def test_an_element_follows_the_one_of_the_group_with_its_index(player: Player) -> None:
    tasks = (group(literal(4), max_outstanding=2), part("a"), part("b", "a"), follower("f", "b"), task("z", "f"))
    run = await player.create(dag(*tasks))

    ran = await play(player, failing=("a[1]", "b[2]"))

    assert sorted(ran) == ["a[0]", "a[1]", "a[2]", "a[3]", "b[0]", "b[2]", "b[3]", "f[0]", "f[3]"]
    assert ran.index("f[0]") < ran.index("a[3]")
    assert await list_states(player, run, "f") == {
        0: "success",
        1: "upstream_failed",
        2: "upstream_failed",
        3: "success",
    }
    assert await list_values(player, run, "f") == ((0, '"f[0]"'), (3, '"f[3]"'))
    found = await end(player, run)
    assert [found[name] for name in ("run", "G", "a", "b", "f", "z")] == [
        "failed",
        "failed",
        "failed",
        "failed",
        "upstream_failed",
        "upstream_failed",
    ]


async def test_an_element_of_the_group_without_a_result_has_no_follower(player: Player) -> None:
    run = await player.create(dag(group(literal(2)), part("a"), follower("f", "a"), follower("g", "f")))
    while attempts := await player.claim(1):
        await succeed(player, attempts[0], "" if attempts[0].map_index == 0 else None)
    assert await list_states(player, run, "f") == {1: "success"}
    assert await list_states(player, run, "g") == {1: "success"}


@pytest.mark.parametrize("bad", [(), ("m[1]",)])
async def test_a_group_over_a_map_waits_for_all_of_it(player: Player, bad: tuple[str, ...]) -> None:
    tasks = (mapped("m", literal(3)), group(over("m")), part("a"), part("b", "a"), task("z", "b"))
    run = await player.create(dag(*tasks))

    ran = await play(player, failing=bad)

    if bad:
        assert sorted(ran) == ["m[0]", "m[1]", "m[2]"]
        found = await end(player, run)
        assert [found[name] for name in ("run", "G", "a", "z")] == ["failed", *["upstream_failed"] * 3]
        await player.store.call(ClearTasks(run.dag_id, run.run_id, ("m",), "me", downstream=True, failed=True))
        ran += await play(player)
    assert [one[0] for one in ran if one[0] in "abz"] == list("abababz")
    assert (await end(player, run))["run"] == "success"


@pytest.mark.parametrize("outcome", ["skipped", "upstream_failed"])
async def test_a_group_without_elements_decides_what_follows_it(player: Player, outcome: str) -> None:
    source = MapSource("xcom", "s", "return_value")
    run = await player.create(dag(task("s"), group(source), part("a"), follower("f", "a")))
    (attempt,) = await player.claim()
    if outcome == "skipped":
        await succeed(player, attempt, "[]")
    else:
        await player.report(attempt, Failure("no", may_retry=False))
    await player.play()
    found = await end(player, run)
    assert [found[name] for name in ("G", "a", "f")] == [outcome] * 3


async def test_clearing_a_task_of_an_element_with_downstream_takes_its_followers(player: Player) -> None:
    tasks = (group(literal(3)), part("a"), part("b", "a"), follower("f", "b"), follower("g", "f"), task("z", "g"))
    run = await player.create(dag(*tasks))
    await play(player, failing=("a[1]", "b[2]"))

    cleared = await player.store.call(ClearTasks(run.dag_id, run.run_id, ("G",), "me", downstream=True, failed=True))
    assert set(cleared) >= {"z"}
    assert sorted(await play(player)) == ["a[1]", "b[1]", "b[2]", "f[1]", "f[2]", "g[1]", "g[2]", "z[-1]"]
    assert (await end(player, run))["run"] == "success"

    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("b",), "me", downstream=True, map_index=1))
    assert sorted(await play(player)) == ["b[1]", "f[1]", "g[1]", "z[-1]"]
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("G",), "me", downstream=True, map_index=2))
    assert sorted(await play(player)) == ["a[2]", "b[2]", "f[2]", "g[2]", "z[-1]"]
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("G",), "me", downstream=True))
    assert len(await play(player)) == 13
    assert (await end(player, run))["run"] == "success"
