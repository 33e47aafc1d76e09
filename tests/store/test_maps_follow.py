"""Maps over the outputs of other maps in the store, on both databases."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from sqlalchemy import func, select
from tests.store.dags import Player, dag, task
from tests.store.test_maps import emit, end, find_head, list_elements, literal, mapped

from tidemill.core.tasks.endings import Failure, Skip, Success
from tidemill.core.tasks.structure import MapSource, TaskStructure
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.run_calls import CancelRun, RunRecord
from tidemill.store.calls.task_calls import GetValuePage
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt
from tidemill.store.dag_tables import map_item, task_instance, task_map
from tidemill.store.database import Database
from tidemill.store.queries.dags.maps import preparation
from tidemill.store.queries.dags.runs.run_retention import RunRemoval, remove_part
from tidemill.store.queries.dags.state.map_queue import QUEUE


def over(name: str, key: str = "return_value") -> MapSource:
    return MapSource("map", name, key)


def follower(id: str, source: str, **details: Any) -> TaskStructure:
    return mapped(id, over(source), arguments=("x",), **details)


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


def name(attempt: ClaimedAttempt) -> str:
    return f"{attempt.task_id}[{attempt.map_index}]"


async def succeed(player: Player, attempt: ClaimedAttempt, value: str | None = None) -> None:
    """End an attempt well; it returns its own name, unless `value` is given; an empty one is None."""
    encoded = msgspec.json.encode(name(attempt)).decode() if value is None else value
    await player.report(attempt, Success(), xcoms=(("return_value", encoded),) if encoded else ())


async def fail(player: Player, attempt: ClaimedAttempt) -> None:
    await player.report(attempt, Failure("no", may_retry=False))


async def play(player: Player, *, failing: tuple[str, ...] = (), most: int = 100) -> list[str]:
    """Run everything, one attempt after the other, and return what ran."""
    ran: list[str] = []
    for _ in range(most):
        attempts = await player.claim(1)
        if not attempts:
            return ran
        (attempt,) = attempts
        ran.append(name(attempt))
        await (fail if name(attempt) in failing else succeed)(player, attempt)
    raise AssertionError("there is always something to run")


async def list_states(player: Player, run: RunRecord, task_id: str) -> dict[int, str]:
    return {one.map_index: one.state for one in await list_elements(player, run, task_id)}


async def count_queued(player: Player) -> int:
    statement = select(func.count()).select_from(map_item).where(map_item.c.key == QUEUE)
    return int(await player.store.read(lambda connection: connection.execute(statement).scalar_one()))


async def list_values(player: Player, run: RunRecord, task_id: str) -> tuple[tuple[int, str], ...]:
    return (await player.store.call(GetValuePage(run.id, task_id))).values


async def test_an_element_begins_as_soon_as_the_one_with_its_index_has_ended(player: Player) -> None:
    run = await player.create(dag(mapped("s", literal(3)), follower("f", "s"), task("z", "f")))
    first, second, third = await player.claim()
    assert [name(one) for one in (first, second, third)] == ["s[0]", "s[1]", "s[2]"]
    assert (await end(player, run))["f"] == "mapped"

    await succeed(player, third, '{"a":1}')

    (attempt,) = await player.claim()
    assert (attempt.task_id, attempt.map_index, attempt.elements) == ("f", 2, ('{"a":1}',))
    assert (attempt.leaf_indexes, attempt.map_length) == ((2,), None)
    await succeed(player, attempt)
    await succeed(player, first)
    await succeed(player, second)
    left = await player.claim()
    assert [(name(one), one.elements, one.map_length) for one in left] == [
        ("f[0]", ('"s[0]"',), 3),
        ("f[1]", ('"s[1]"',), 3),
    ]
    for one in left:
        await succeed(player, one)
    await player.play()

    assert await end(player, run) == {"run": "success", "s": "success", "f": "success", "z": "success"}
    counts = (await find_head(player, run, "f")).elements
    assert counts is not None
    assert (counts.arrived, counts.created, counts.closed, counts.success) == (3, 3, True, 3)
    assert await list_values(player, run, "f") == ((0, '"f[0]"'), (1, '"f[1]"'), (2, '"f[2]"'))
    assert await count_queued(player) == 0


async def test_failures_skips_and_missing_results_pass_along_a_chain_and_leave_gaps(player: Player) -> None:
    run = await player.create(
        dag(mapped("s", literal(4)), follower("f", "s"), follower("g", "f"), task("z", "g", rule="all_done"))
    )
    attempts = await player.claim()
    await fail(player, attempts[0])
    await player.report(attempts[1], Skip())
    await succeed(player, attempts[2], "")
    await succeed(player, attempts[3])

    assert await play(player) == ["f[3]", "g[3]", "z[-1]"]

    for task_id in ("f", "g"):
        states = {0: "upstream_failed", 1: "skipped", 3: "success"}
        assert await list_states(player, run, task_id) == states
        counts = (await find_head(player, run, task_id)).elements
        assert counts is not None
        assert (counts.arrived, counts.upstream_failed, counts.skipped, counts.success) == (3, 1, 1, 1)
    assert await list_values(player, run, "s") == ((3, '"s[3]"'),)
    assert await list_values(player, run, "g") == ((3, '"g[3]"'),)
    states = {"run": "success", "s": "failed", "f": "upstream_failed", "g": "upstream_failed", "z": "success"}
    assert await end(player, run) == states


async def test_a_branch_skips_the_elements_of_followers_with_its_index(player: Player) -> None:
    run = await player.create(
        dag(
            mapped("s", literal(3)),
            *(follower("f", "s"), follower("g", "s"), follower("h", "g")),
            task("z", "f", rule="none_failed"),
        )
    )
    attempts = await player.claim()
    skips = ((("f",), False), (("g", "z"), False), ((), True))
    for one, (names, everything) in zip(attempts, skips, strict=True):
        xcoms = (("return_value", "1"),)
        await player.report(one, Success(), skip=names, skip_all_downstream=everything, xcoms=xcoms)
    assert sorted(await play(player)) == ["f[1]", "g[0]", "h[0]", "z[-1]"]
    assert await list_states(player, run, "f") == {0: "skipped", 1: "success", 2: "skipped"}
    for task_id in ("g", "h"):
        assert await list_states(player, run, task_id) == {0: "success", 1: "skipped", 2: "skipped"}
    assert set((await end(player, run)).values()) == {"success"}

    # A follower that is cleared alone is skipped again.
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("f",), "tester", indexes=(0, 1)))
    assert await play(player) == ["f[1]"]
    assert await list_states(player, run, "f") == {0: "skipped", 1: "success", 2: "skipped"}

    # With another choice it runs.
    call = ClearTasks(run.dag_id, run.run_id, ("s",), "tester", map_index=0, downstream=True)
    assert set(await player.store.call(call)) == {"s[0]", "f[0]", "g[0]", "h[0]", "z"}
    assert sorted(await play(player)) == ["f[0]", "g[0]", "h[0]", "s[0]", "z[-1]"]
    assert (await list_states(player, run, "f"))[0] == "success"
    assert set((await end(player, run)).values()) == {"success"}


async def test_an_element_that_is_cleared_forgets_what_it_skipped(player: Player) -> None:
    run = await player.create(dag(mapped("s", literal(1)), follower("f", "s")))
    await player.report(await player.claim_one(), Success(), skip=("f",), xcoms=(("return_value", "1"),))
    await play(player)
    assert (await end(player, run))["f"] == "skipped"
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("s",), "tester", map_index=0, downstream=True))
    await player.report(await player.claim_one(), Failure("no", may_retry=False), xcoms=())
    await play(player)
    assert await list_states(player, run, "f") == {0: "upstream_failed"}
    columns = task_instance.c
    skips = await player.store.read(
        lambda connection: connection.execute(select(columns.skips).where(columns.task_id == "s")).scalars().all()
    )
    assert set(skips) == {None}


async def test_a_follower_without_elements_is_skipped(player: Player) -> None:
    run = await player.create(dag(mapped("s", literal(2)), follower("f", "s"), follower("g", "f")))
    for one in await player.claim():
        await succeed(player, one, "")
    await player.play()
    assert await end(player, run) == {"run": "success", "s": "success", "f": "skipped", "g": "skipped"}


@pytest.mark.parametrize(("failing", "state"), [(("a[-1]",), "upstream_failed"), ((), "skipped")])
async def test_a_map_that_never_opens_decides_the_one_that_follows_it(
    player: Player, failing: tuple[str, ...], state: str
) -> None:
    rule = "all_success" if failing else "all_failed"
    run = await player.create(
        dag(task("a"), mapped("s", literal(2), upstream=("a",), rule=rule), follower("f", "s"), follower("g", "f"))
    )
    await play(player, failing=failing)
    found = await end(player, run)
    assert (found["s"], found["f"], found["g"]) == (state, state, state)


async def test_a_follower_lags_behind_within_its_window(player: Player) -> None:
    run = await player.create(
        dag(mapped("s", literal(40), max_outstanding=40), follower("f", "s", max_outstanding=2), task("z", "f"))
    )
    attempts = await player.claim()
    await player.turn(
        *[AttemptReport(one.task, one.epoch, Success(), xcoms=(("return_value", "1"),)) for one in attempts]
    )
    await player.schedule()
    assert await count_queued(player) == 38
    for first in range(0, 40, 2):
        claimed = await player.claim()
        assert [one.map_index for one in claimed] == [first, first + 1]
        for one in claimed:
            await succeed(player, one)
    assert await play(player) == ["z[-1]"]
    assert await end(player, run) == {"run": "success", "s": "success", "f": "success", "z": "success"}


async def test_elements_that_need_no_attempt_pass_a_narrow_window_at_once(player: Player) -> None:
    run = await player.create(dag(mapped("s", literal(30)), follower("f", "s", max_outstanding=1)))
    attempts = await player.claim()
    await player.turn(*[AttemptReport(one.task, one.epoch, Skip()) for one in attempts])
    await player.schedule()
    assert await end(player, run) == {"run": "success", "s": "skipped", "f": "skipped"}
    assert len(await list_elements(player, run, "f", "skipped")) == 30


async def test_a_follower_that_opens_late_takes_what_has_ended(player: Player) -> None:
    run = await player.create(dag(task("late"), mapped("s", literal(3)), follower("f", "s", upstream=("late",))))
    late, *attempts = await player.claim()
    for one in attempts[:2]:
        await succeed(player, one)
    assert await player.claim() == ()
    assert (await end(player, run))["f"] == "none"
    await succeed(player, late)
    assert [name(one) for one in await player.claim()] == ["f[0]", "f[1]"]


async def test_only_the_last_try_is_followed_and_tries_of_a_follower_get_the_same_item(player: Player) -> None:
    retries = {"retries": 1, "retry_delay_us": 0}
    run = await player.create(dag(mapped("s", literal(1), **retries), follower("f", "s", **retries)))
    await player.report(await player.claim_one(), Failure("no"))
    again = await player.claim_one()
    assert (name(again), again.try_number) == ("s[0]", 2)
    await succeed(player, again)
    followed = await player.claim_one()
    await player.report(followed, Failure("no"))
    followed = await player.claim_one()
    assert (name(followed), followed.try_number, followed.elements) == ("f[0]", 2, ('"s[0]"',))
    await succeed(player, followed)
    await player.schedule()
    assert await end(player, run) == {"run": "success", "s": "success", "f": "success"}


async def test_a_generator_is_followed_while_it_yields(player: Player) -> None:
    run = await player.create(
        dag(task("g", is_generator=True), mapped("s", MapSource("generator", "g")), follower("f", "s"))
    )
    source = await player.claim_one()
    await emit(player, source, 0, "1", "2")
    _, second = await player.claim()
    await succeed(player, second)
    assert [name(one) for one in await player.claim()] == ["f[1]"]
    assert (await end(player, run))["g"] == "running"


async def begin_chain(player: Player, *failing: str) -> RunRecord:
    """Return a run that has ended of a chain of three maps of 3 elements, and a task after it."""
    run = await player.create(dag(mapped("s", literal(3)), follower("f", "s"), follower("g", "f"), task("z", "g")))
    await play(player, failing=failing)
    return run


async def test_clearing_with_downstream_takes_the_same_index_along_the_chain(player: Player) -> None:
    run = await begin_chain(player)
    call = ClearTasks(run.dag_id, run.run_id, ("s",), "tester", map_index=1, downstream=True)

    assert set(await player.store.call(call)) == {"s[1]", "f[1]", "g[1]", "z"}

    found = await end(player, run)
    assert (found["s"], found["f"], found["g"], found["z"]) == ("mapped", "mapped", "mapped", "none")
    assert await play(player) == ["s[1]", "f[1]", "g[1]", "z[-1]"]
    assert await end(player, run) == dict.fromkeys(("run", "s", "f", "g", "z"), "success")
    assert len(await list_values(player, run, "g")) == 3


async def test_clearing_one_element_alone_leaves_those_after_it(player: Player) -> None:
    run = await begin_chain(player)
    call = ClearTasks(run.dag_id, run.run_id, ("s",), "tester", map_index=1)
    assert await player.store.call(call) == ("s[1]",)
    assert await play(player) == ["s[1]"]
    call = ClearTasks(run.dag_id, run.run_id, ("f",), "tester", indexes=(0, 1))
    assert await player.store.call(call) == ("f[0]", "f[1]")
    assert await play(player) == ["f[0]", "f[1]"]
    assert await end(player, run) == dict.fromkeys(("run", "s", "f", "g", "z"), "success")


async def test_clearing_while_the_run_goes_on_starts_nothing_too_early(player: Player) -> None:
    run = await player.create(
        dag(mapped("s", literal(2)), follower("f", "s"), task("z", "f", rule="all_done"), task("slow"))
    )
    first, second, slow = sorted(await player.claim(), key=lambda one: (one.task_id == "slow", one.map_index))
    held = (slow.task, slow.epoch)
    await succeed(player, first)
    await succeed(player, second)
    assert await play_beside(player, held) == ["f[0]", "f[1]", "z[-1]"]

    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("s",), "tester", map_index=0, downstream=True))

    assert await play_beside(player, held) == ["s[0]", "f[0]", "z[-1]"]


async def play_beside(player: Player, held: tuple[int, int]) -> list[str]:
    ran = []
    for _ in range(50):
        await player.schedule()
        claimed = (await player.turn(capacity=1, held=(held,))).claimed
        if not claimed:
            return ran
        ran.append(name(claimed[0]))
        xcoms = (("return_value", "1"),)
        report = AttemptReport(claimed[0].task, claimed[0].epoch, Success(), xcoms=xcoms)
        await player.turn(report, held=(held,))
    raise AssertionError("there is always something to run")


async def test_clearing_what_failed_runs_followers_after_what_they_follow(player: Player) -> None:
    run = await begin_chain(player, "s[1]", "f[2]")
    assert await list_states(player, run, "g") == {0: "success", 1: "upstream_failed", 2: "upstream_failed"}
    cleared = await player.store.call(ClearTasks(run.dag_id, run.run_id, (), "tester", failed=True))
    assert set(cleared) == {"s[1]", "f[1]", "f[2]", "g[1]", "g[2]", "z"}
    ran = await play(player)
    assert sorted(ran) == ["f[1]", "f[2]", "g[1]", "g[2]", "s[1]", "z[-1]"]
    assert ran.index("s[1]") < ran.index("f[1]") < ran.index("g[1]")
    assert ran.index("f[2]") < ran.index("g[2]")
    assert await end(player, run) == dict.fromkeys(("run", "s", "f", "g", "z"), "success")


async def test_clearing_a_follower_of_a_failed_element_fails_it_again(player: Player) -> None:
    run = await begin_chain(player, "s[1]")
    call = ClearTasks(run.dag_id, run.run_id, ("f",), "tester", map_index=1, downstream=True)
    assert set(await player.store.call(call)) == {"f[1]", "g[1]", "z"}
    assert await play(player) == []
    assert await list_states(player, run, "g") == {0: "success", 1: "upstream_failed", 2: "success"}
    assert (await end(player, run))["run"] == "failed"


async def test_a_whole_follower_and_a_whole_chain_are_cleared(player: Player) -> None:
    run = await begin_chain(player)
    assert await player.store.call(ClearTasks(run.dag_id, run.run_id, ("f",), "tester")) == ("f",)
    assert sorted(await play(player)) == ["f[0]", "f[1]", "f[2]"]
    cleared = await player.store.call(ClearTasks(run.dag_id, run.run_id, ("s",), "tester", downstream=True))
    assert set(cleared) == {"s", "f", "g", "z"}
    ran = await play(player)
    assert sorted(ran) == sorted([f"{one}[{index}]" for one in "sfg" for index in range(3)] + ["z[-1]"])
    assert all(ran.index(f"s[{index}]") < ran.index(f"f[{index}]") for index in range(3))
    assert await end(player, run) == dict.fromkeys(("run", "s", "f", "g", "z"), "success")


async def test_a_chain_over_fewer_items_removes_the_rest(player: Player) -> None:
    run = await player.create(
        dag(task("a", is_generator=True), mapped("s", MapSource("generator", "a")), follower("f", "s"))
    )
    source = await player.claim_one()
    await emit(player, source, 0, "1", "2", "3")
    await player.report(source, Success())
    await play(player)
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("a",), "tester", downstream=True))
    source = await player.claim_one()
    await emit(player, source, 0, "7")
    await player.report(source, Success())
    assert await play(player) == ["s[0]", "f[0]"]
    assert await list_states(player, run, "f") == {0: "success", 1: "removed", 2: "removed"}
    counts = (await find_head(player, run, "f")).elements
    assert counts is not None
    assert (counts.arrived, counts.success, counts.unfinished) == (1, 1, 0)
    assert await end(player, run) == {"run": "success", "a": "success", "s": "success", "f": "success"}


async def test_an_element_that_runs_is_ended_before_it_follows_again(player: Player) -> None:
    run = await player.create(dag(mapped("s", literal(2)), follower("f", "s")))
    first, second = await player.claim()
    await succeed(player, first)
    followed = await player.claim_one()
    call = ClearTasks(run.dag_id, run.run_id, ("s",), "tester", map_index=0, downstream=True)
    assert set(await player.store.call(call)) == {"s[0]", "f[0]"}
    assert (await list_states(player, run, "f")) == {0: "ending"}
    holding = ((second.task, second.epoch), (followed.task, followed.epoch))
    await player.schedule()
    (again,) = (await player.turn(capacity=5, held=holding)).claimed
    assert name(again) == "s[0]"
    report = AttemptReport(again.task, again.epoch, Success(), xcoms=(("return_value", "8"),))
    await player.turn(report, held=holding)
    await player.schedule()
    assert (await player.turn(capacity=5, held=holding)).claimed == ()
    await player.turn(held=holding[:1])
    await player.schedule()
    (once_more,) = (await player.turn(capacity=5, held=holding[:1])).claimed
    assert (name(once_more), once_more.elements) == ("f[0]", ("8",))
    await succeed(player, once_more)
    await succeed(player, second)
    assert await play(player) == ["f[1]"]
    assert await end(player, run) == {"run": "success", "s": "success", "f": "success"}


async def test_an_element_that_appears_late_gives_its_follower_one(player: Player) -> None:
    run = await player.create(dag(mapped("s", literal(2)), follower("f", "s"), task("z", "f")))
    first, second = await player.claim()
    await succeed(player, first, "")
    await succeed(player, second)
    assert await play(player) == ["f[1]", "z[-1]"]
    call = ClearTasks(run.dag_id, run.run_id, ("s",), "tester", map_index=0, downstream=True)
    assert set(await player.store.call(call)) == {"s[0]", "z"}
    assert await play(player) == ["s[0]", "f[0]", "z[-1]"]
    assert await end(player, run) == dict.fromkeys(("run", "s", "f", "z"), "success")


async def test_marking_a_failed_element_as_success_lets_its_follower_go(player: Player) -> None:
    run = await begin_chain(player, "s[1]")
    call = MarkTasks(run.dag_id, run.run_id, ("s",), "success", "tester", map_index=1)
    assert await player.store.call(call) == ("s[1]",)
    # It has no result, so there is nothing to follow.
    assert await play(player) == ["z[-1]"]
    assert await list_states(player, run, "f") == {0: "success", 1: "removed", 2: "success"}
    assert await end(player, run) == dict.fromkeys(("run", "s", "f", "g", "z"), "success")


async def test_a_follower_stops_after_too_many_failed_elements(player: Player) -> None:
    run = await player.create(
        dag(mapped("s", literal(5)), follower("f", "s", max_outstanding=1, max_failed_elements=0), task("z", "f"))
    )
    ran = await play(player, failing=("f[1]",))
    assert ran == ["s[0]", "s[1]", "s[2]", "s[3]", "s[4]", "f[0]", "f[1]"]
    assert await end(player, run) == {"run": "failed", "s": "success", "f": "failed", "z": "upstream_failed"}
    counts = (await find_head(player, run, "f")).elements
    assert counts is not None
    assert (counts.arrived, counts.success, counts.failed, counts.skipped) == (5, 1, 1, 3)
    call = ClearTasks(run.dag_id, run.run_id, ("s",), "tester", map_index=1, downstream=True)
    await player.store.call(call)
    assert sorted(await play(player)) == ["f[1]", "f[2]", "f[3]", "f[4]", "s[1]", "z[-1]"]
    assert await end(player, run) == dict.fromkeys(("run", "s", "f", "z"), "success")
    counts = (await find_head(player, run, "f")).elements
    assert counts is not None
    assert (counts.arrived, counts.success, counts.skipped) == (5, 5, 0)


async def test_cancelling_a_run_ends_a_chain(player: Player) -> None:
    run = await player.create(
        dag(mapped("s", literal(9), max_outstanding=3), follower("f", "s", max_outstanding=1), follower("g", "f"))
    )
    first, second, _ = await player.claim()
    await succeed(player, first)
    await succeed(player, second)
    assert "f[0]" in [name(one) for one in await player.claim()]
    await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    await player.schedule()
    await player.turn(held=())
    await player.schedule()
    found = await end(player, run)
    assert (found["run"], found["s"], found["f"]) == ("failed", "failed", "failed")
    assert await player.claim() == ()
    counts = (await find_head(player, run, "f")).elements
    assert counts is not None
    # The second one had ended, but the window had no room for the element that follows it.
    assert (counts.arrived, counts.failed, counts.skipped) == (2, 1, 1)


async def test_old_elements_of_a_map_that_begins_anew_are_removed_in_batches_that_are_read_once(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await player.create(dag(mapped("s", literal(7)), follower("f", "s"), task("z", "f")))
    await play(player)
    monkeypatch.setattr(preparation, "ELEMENTS", 3)
    fetch, read = preparation.fetch_elements, []

    def note(board: Any, head: Any, kind: str, first: int, *details: Any) -> list[Any]:
        if (head.task_id, kind) == ("f", "present"):
            read.append(first)
        return fetch(board, head, kind, first, *details)

    monkeypatch.setattr(preparation, "fetch_elements", note)
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("s",), "tester", downstream=True))
    ran = await play(player)

    assert sorted(ran) == sorted([*(f"{task_id}[{index}]" for task_id in "sf" for index in range(7)), "z[-1]"])
    assert read == [0, 3, 6]
    assert len(await list_values(player, run, "f")) == 7
    assert await end(player, run) == dict.fromkeys(("run", "s", "f", "z"), "success")


async def test_another_rule_or_source_waits_for_the_whole_map_and_maps_over_dense_values(player: Player) -> None:
    run = await player.create(
        dag(
            mapped("s", literal(4)),
            mapped("rule", over("s"), arguments=("x",), rule="all_done"),
            mapped("cross", over("s"), literal(2), rule="none_failed"),
            mapped("strict", over("s"), literal(2)),
        )
    )
    attempts = await player.claim()
    await succeed(player, attempts[3])
    await succeed(player, attempts[0], "")
    await succeed(player, attempts[2])
    assert await player.claim() == ()
    await fail(player, attempts[1])

    claimed = await player.claim()

    assert [(name(one), one.elements, one.map_length) for one in claimed] == [
        ("rule[0]", ('"s[2]"',), 2),
        ("rule[1]", ('"s[3]"',), 2),
    ]
    for one in claimed:
        await succeed(player, one)
    await player.play()
    states = {"s": "failed", "rule": "success", "cross": "upstream_failed", "strict": "upstream_failed"}
    assert await end(player, run) == {"run": "failed"} | states
    call = ClearTasks(run.dag_id, run.run_id, ("s",), "tester", map_index=1, downstream=True)
    assert set(await player.store.call(call)) == {"s[1]", "rule", "cross", "strict"}
    await succeed(player, await player.claim_one())
    claimed = await player.claim()
    assert [one.elements for one in claimed if one.task_id == "rule"] == [('"s[1]"',), ('"s[2]"',), ('"s[3]"',)]
    cross = [(one.map_index, one.elements, one.leaf_indexes) for one in claimed if one.task_id == "cross"]
    assert cross[:3] == [(0, ('"s[1]"', None), (0, 0)), (1, ('"s[1]"', None), (0, 1)), (2, ('"s[2]"', None), (1, 0))]
    assert len([one for one in claimed if one.task_id == "strict"]) == 6


@pytest.mark.parametrize("fills", [False, True])
async def test_results_of_maps_are_paired_by_index(player: Player, fills: bool) -> None:
    pairs = MapSource("zip", parts=(over("s"), over("t"), MapSource("xcom", "a", "k")), fills=fills)
    run = await player.create(
        dag(mapped("s", literal(4)), mapped("t", literal(3)), task("a"), mapped("m", pairs, arguments=("x",)))
    )
    for one in await player.claim():
        if one.task_id == "a":
            await player.report(one, Success(), xcoms=(("k", "[5,6,7]"),))
        else:
            await succeed(player, one, "" if name(one) in ("s[1]", "t[0]") else None)

    attempts = await player.claim()

    whole = ('"s[2]"', '"t[2]"', "7")
    partly = [('"s[0]"', None, "5"), (None, '"t[1]"', "6"), whole, ('"s[3]"', None, None)]
    assert [one.elements for one in attempts] == (partly if fills else [whole])
    assert [one.map_index for one in attempts] == list(range(len(attempts)))
    for one in attempts:
        await succeed(player, one)
    await player.play()
    assert (await end(player, run))["run"] == "success"


async def test_a_rule_that_is_met_early_still_maps_over_the_whole_map(player: Player) -> None:
    run = await player.create(
        dag(mapped("s", literal(2)), mapped("f", over("s"), arguments=("x",), rule="one_success"))
    )
    first, second = await player.claim()
    await succeed(player, first)
    assert await player.claim() == ()
    await succeed(player, second)
    assert [name(one) for one in await player.claim()] == ["f[0]", "f[1]"]
    assert (await end(player, run))["f"] == "mapped"


async def test_two_maps_follow_one_and_retention_removes_all(player: Player) -> None:
    run = await player.create(dag(mapped("s", literal(2)), follower("e", "s"), follower("f", "s", max_outstanding=1)))
    assert sorted(await play(player)) == ["e[0]", "e[1]", "f[0]", "f[1]", "s[0]", "s[1]"]
    assert await end(player, run) == dict.fromkeys(("run", "s", "e", "f"), "success")
    later_us = (await player.run(run)).created_us + 86_400_000_000
    while (await player.store.write(lambda c: remove_part(c, run.id, later_us))).removal is not RunRemoval.DONE:
        pass
    for table in (map_item, task_map, task_instance):
        statement = select(func.count()).select_from(table)
        assert await player.store.read(lambda c, statement=statement: c.execute(statement).scalar()) == 0


async def test_elements_that_keep_their_results_are_followed(player: Player) -> None:
    structure = dag(
        task("g", is_generator=True), mapped("s", MapSource("generator", "g")), follower("f", "s", max_outstanding=1)
    )
    run = await player.create(structure)
    source = await player.claim_one()
    await emit(player, source, 0, "1", "2", "3")
    await player.report(source, Success())
    for one in await player.claim():
        await succeed(player, one)
    (held,) = await player.claim()
    assert name(held) == "f[0]"
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("g",), "tester"))
    await player.schedule()
    await succeed(player, held)
    claimed = {name(one): one for one in await player.claim()}
    assert claimed.keys() == {"g[-1]", "f[1]"}
    await emit(player, claimed["g[-1]"], 0, "1", "2", "3")
    await player.report(claimed["g[-1]"], Success())
    await succeed(player, claimed["f[1]"])
    ran = await play(player)
    assert [one for one in ran if one.startswith("f")] == ["f[2]"]
    assert await list_states(player, run, "f") == dict.fromkeys(range(3), "success")
    assert await end(player, run) == dict.fromkeys(("run", "g", "s", "f"), "success")
