"""A task that a user clears, marks or cancels while it runs waits until its old attempt is gone, on both databases."""

from __future__ import annotations

import pytest
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Deferral, Success
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.run_calls import CancelRun, RunRecord
from tidemill.store.calls.service_calls import LoseSession
from tidemill.store.calls.setting_calls import ListPools
from tidemill.store.calls.trigger_calls import ClaimedTrigger, ClaimTriggers, FailTrigger, HeldTriggers, ReleaseTriggers
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt, OutcomeKind, WorkerTurn
from tidemill.store.database import Database


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def clear(player: Player, run: RunRecord, *names: str) -> tuple[str, ...]:
    return await player.store.call(ClearTasks(run.dag_id, run.run_id, names, "tester"))


async def mark(player: Player, run: RunRecord, name: str) -> tuple[str, ...]:
    return await player.store.call(MarkTasks(run.dag_id, run.run_id, (name,), "success", "tester"))


def hold(attempt: ClaimedAttempt) -> tuple[tuple[int, int], ...]:
    return ((attempt.task, attempt.epoch),)


async def defer(player: Player) -> tuple[RunRecord, int, ClaimedTrigger]:
    """Make a run whose task has deferred; return the triggerer and its claim, too."""
    run = await player.create(dag(task("a"), task("b", "a")))
    await player.report(await player.claim_one(), Deferral("package.Trigger", "{}", "resume"))
    triggerer = await player.begin_service("triggerer")
    (claimed,) = await player.store.call(ClaimTriggers(triggerer, 1, 1))
    return run, triggerer, claimed


async def test_a_cleared_task_runs_again_once_its_worker_does_not_hold_the_old_attempt(player: Player) -> None:
    run = await player.create(dag(task("a")))
    first = await player.claim_one()
    assert await clear(player, run, "a") == ("a",)
    await player.schedule()
    answer = await player.turn(capacity=9, held=hold(first))
    assert (answer.end, answer.claimed) == (hold(first), ())
    assert await player.states(run) == {"a": "ending"}
    (pool,) = await player.store.call(ListPools())
    assert pool.used == 1, "the old process keeps its slot"
    assert await clear(player, run, "a") == (), "it is being cleared"

    await player.turn()
    second = await player.claim_one()
    assert (second.task, second.try_number) == (first.task, 2)
    assert (await player.report(first, Success())).kind is OutcomeKind.FENCED
    await player.report(second, Success())
    assert await player.states(run) == {"a": "success"}


async def test_what_follows_a_marked_task_waits_for_the_end_of_its_process(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a")))
    attempt = await player.claim_one()
    assert await mark(player, run, "a") == ("a",)
    await player.schedule()
    await player.turn(held=hold(attempt))
    assert await player.states(run) == {"a": "ending", "b": "none"}
    await player.turn(AttemptReport(attempt.task, attempt.epoch, Success()))
    await player.schedule()
    assert await player.states(run) == {"a": "success", "b": "queued"}


async def test_a_cleared_task_runs_again_once_the_worker_that_ran_it_is_dead(player: Player) -> None:
    run = await player.create(dag(task("a")))
    await player.claim_one()
    await clear(player, run, "a")
    lost, player.worker = player.worker, await player.begin_service("worker")
    await player.turn(capacity=9)
    assert await player.states(run) == {"a": "ending"}
    await player.store.call(LoseSession(lost))
    assert (await player.claim_one()).try_number == 2


async def test_a_worker_that_never_got_its_claim_does_not_run_what_was_cleared_since(player: Player) -> None:
    run = await player.create(dag(task("a")))
    await player.schedule()
    turn = WorkerTurn(player.worker, 1, capacity=9)
    assert len((await player.store.call(turn)).claimed) == 1
    await clear(player, run, "a")
    assert (await player.store.call(turn)).claimed == ()
    assert (await player.claim_one()).try_number == 2


async def test_a_cleared_deferral_waits_for_the_cleanup_of_its_trigger(player: Player) -> None:
    run, triggerer, trigger = await defer(player)
    await clear(player, run, "a")
    (stop,) = await player.store.call(HeldTriggers(triggerer, ((trigger.id, trigger.token),)))
    assert stop.reason == "user"
    assert await player.claim() == ()
    assert await player.states(run) == {"a": "ending", "b": "none"}
    await player.store.call(ReleaseTriggers(triggerer, ((trigger.id, trigger.token),)))
    assert (await player.claim_one()).try_number == 2


async def test_what_follows_a_marked_deferral_waits_for_the_cleanup_of_its_trigger(player: Player) -> None:
    run, triggerer, trigger = await defer(player)
    await mark(player, run, "a")
    await player.schedule()
    assert await player.states(run) == {"a": "ending", "b": "none"}
    await player.store.call(ReleaseTriggers(triggerer, ((trigger.id, trigger.token),)))
    await player.schedule()
    assert await player.states(run) == {"a": "success", "b": "queued"}


async def test_a_cleared_deferral_whose_trigger_fails_while_it_is_stopped_runs_again(player: Player) -> None:
    run, triggerer, trigger = await defer(player)
    await clear(player, run, "a")
    failure = FailTrigger(triggerer, trigger.id, trigger.token, "ValueError: no")
    assert await player.store.call(failure) is OutcomeKind.FENCED
    assert (await player.claim_one()).try_number == 2


async def test_a_cleared_deferral_runs_again_once_its_triggerer_is_dead(player: Player) -> None:
    run, triggerer, _ = await defer(player)
    await clear(player, run, "a")
    await player.store.call(LoseSession(triggerer))
    assert (await player.claim_one()).try_number == 2


async def test_a_cleared_deferral_that_no_triggerer_has_claimed_runs_again_at_once(player: Player) -> None:
    run = await player.create(dag(task("a")))
    await player.report(await player.claim_one(), Deferral("package.Trigger", "{}", "resume"))
    await clear(player, run, "a")
    assert (await player.claim_one()).try_number == 2


async def test_the_end_of_an_older_trigger_does_not_let_a_task_go_on(player: Player) -> None:
    run, triggerer, old = await defer(player)
    await clear(player, run, "a")
    await player.store.call(ReleaseTriggers(triggerer, ((old.id, old.token),)))
    await player.report(await player.claim_one(), Deferral("package.Trigger", "{}", "resume"))
    (new,) = await player.store.call(ClaimTriggers(triggerer, 2, 1))
    await clear(player, run, "a")
    await player.store.call(ReleaseTriggers(triggerer, ((old.id, old.token),)))
    assert (await player.states(run))["a"] == "ending"
    await player.store.call(ReleaseTriggers(triggerer, ((new.id, new.token),)))
    assert (await player.claim_one()).try_number == 3


async def test_a_run_with_many_running_tasks_is_cancelled_in_bounded_transactions(player: Player) -> None:
    run = await player.create(dag(*[task(f"t{number:03}", pool_slots=0) for number in range(520)]))
    while await player.claim(500):
        pass
    await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    await player.schedule()
    assert set((await player.states(run)).values()) == {"ending"}
    await player.turn()
    await player.schedule()
    assert (await player.run(run)).state == "failed"
