"""Lives of tasks through the calls of the store, on both databases."""

from __future__ import annotations

import base64
import random
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import text
from tests.store.dags import Player, dag, encode, fail_these, task

from tidemill.core.tasks.endings import Deferral, Failure, Skip, Success
from tidemill.core.tasks.inputs import Channel
from tidemill.core.tasks.structure import DagStructure
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.callback_calls import ListCallbacks, ReadCallbackLog
from tidemill.store.calls.dag_calls import PauseDag
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks, TaskHistory
from tidemill.store.calls.log_calls import ReadLog
from tidemill.store.calls.run_calls import CancelRun, CreateRun
from tidemill.store.calls.service_calls import LoseSession, StoreFile
from tidemill.store.calls.setting_calls import ListPools, SetConnection, SetPool
from tidemill.store.calls.task_calls import GetXCom, PushXCom, SetVariable
from tidemill.store.calls.trigger_calls import ClaimTriggers, FailTrigger, FiredEvent, HeldTriggers, StoreEvents
from tidemill.store.calls.worker_calls import (
    PART_BASE,
    AttemptReport,
    CallbackReport,
    LogPart,
    OutcomeKind,
    ResumeWith,
    WorkerTurn,
)
from tidemill.store.calls.xcom_calls import ListXComs
from tidemill.store.database import Database


@pytest.fixture
async def player(database: Database) -> Player:
    return await Player(database).begin()


async def test_a_run_of_a_chain_succeeds_task_after_task(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a"), task("c", "b")))
    assert run.state == "running"
    for name in "abc":
        attempt = await player.claim_one()
        assert (attempt.task_id, attempt.try_number, attempt.file) == (name, 1, "dag.py")
        assert (await player.report(attempt, Success())).kind is OutcomeKind.MOVED

    assert await player.states(run) == dict.fromkeys("abc", "success")
    assert (await player.run(run)).state == "success"


async def test_a_failure_fails_what_follows_and_the_run(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a"), task("c", "b"), task("d", "a", rule="all_done")))

    await player.play(fail_these("a"))

    states = {"a": "failed", "b": "upstream_failed", "c": "upstream_failed", "d": "success"}
    assert await player.states(run) == states
    assert (await player.run(run)).state == "failed"


async def test_a_report_that_is_repeated_is_known_and_one_that_is_late_is_fenced(player: Player) -> None:
    run = await player.create(dag(task("a", retries=1, retry_delay_us=0)))
    attempt = await player.claim_one()

    assert (await player.report(attempt, Failure("broken"))).kind is OutcomeKind.MOVED
    assert (await player.report(attempt, Failure("broken"))).kind is OutcomeKind.ALREADY
    assert (await player.report(attempt, Success())).kind is OutcomeKind.FENCED
    again = await player.claim_one()
    assert (again.try_number, again.max_tries) == (2, 2)
    assert (await player.report(attempt, Failure("broken"))).kind is OutcomeKind.ALREADY
    await player.report(again, Success())

    history = await player.store.call(TaskHistory(run.dag_id, run.run_id, "a"))
    after = ["scheduled", "queued", "running", "up_for_retry", "scheduled", "queued", "running", "success"]
    assert [row.after for row in history.rows] == after
    assert [row.epoch for row in history.rows] == list(range(1, 9))
    assert history.rows[3].detail == "broken"
    assert history.rows[2].by == f"worker {player.worker}"


async def test_a_claim_whose_answer_was_lost_gets_the_same_attempts_again(player: Player) -> None:
    await player.create(dag(*[task(f"t{number}") for number in range(5)]))
    await player.schedule()
    turn = WorkerTurn(player.worker, 77, capacity=3)

    first = await player.store.call(turn)
    assert len(first.claimed) == 3
    assert (await player.store.call(turn)).claimed == first.claimed
    assert len((await player.store.call(WorkerTurn(player.worker, 78, capacity=3))).claimed) == 2


async def test_a_deferred_task_resumes_with_the_event_that_is_stored(player: Player) -> None:
    run = await player.create(dag(task("a")))
    attempt = await player.claim_one()
    deferral = Deferral("package.Trigger", '{"n":1}', "resume", '{"x":2}', stream_key="key")
    assert (await player.report(attempt, deferral)).kind is OutcomeKind.MOVED
    assert await player.states(run) == {"a": "deferred"}
    assert (await player.store.call(ListPools()))[0].used == 0
    triggerer = await player.begin_service("triggerer")

    (claimed,) = await player.store.call(ClaimTriggers(triggerer, 1, 10))
    assert (claimed.classpath, claimed.kwargs, claimed.task_id, claimed.try_number) == (
        "package.Trigger",
        '{"n":1}',
        "a",
        1,
    )
    assert await player.store.call(ClaimTriggers(triggerer, 1, 10)) == (claimed,)
    assert await player.store.call(ClaimTriggers(triggerer, 2, 10)) == ()
    assert await player.store.call(HeldTriggers(triggerer, ((claimed.id, claimed.token),))) == ()
    event = FiredEvent(claimed.id, claimed.token, '"payload"', None, 5)
    outcomes = await player.store.call(StoreEvents(triggerer, 1, (event, event)))
    assert [one.kind for one in outcomes] == ["stored", "stored"]
    assert await player.store.call(StoreEvents(triggerer, 1, (event, event))) == outcomes
    (fenced,) = await player.store.call(StoreEvents(triggerer, 2, (event,)))
    assert fenced.kind == "fenced"
    (stopped,) = await player.store.call(HeldTriggers(triggerer, ((claimed.id, claimed.token),)))
    assert stopped.reason == "done"

    again = await player.claim_one()
    assert again.resume == ResumeWith("resume", '{"x":2}', '"payload"')
    assert again.try_number == 1
    await player.report(again, Success())
    assert (await player.run(run)).state == "success"


async def test_a_trigger_that_fails_fails_its_task_once(player: Player) -> None:
    run = await player.create(dag(task("a")))
    await player.report(await player.claim_one(), Deferral("package.Trigger", "{}", "resume"))
    triggerer = await player.begin_service("triggerer")
    (claimed,) = await player.store.call(ClaimTriggers(triggerer, 1, 10))
    failure = FailTrigger(triggerer, claimed.id, claimed.token, "Traceback")

    assert await player.store.call(failure) is OutcomeKind.MOVED
    assert await player.store.call(failure) is OutcomeKind.ALREADY
    assert (await player.tasks(run))["a"].error == "TaskDeferralError: Traceback"
    assert (await player.run(run)).state == "failed"


async def test_a_deferral_that_is_too_late_times_out_and_stops_its_trigger(player: Player) -> None:
    run = await player.create(dag(task("a")))
    await player.report(await player.claim_one(), Deferral("package.Trigger", "{}", "resume", timeout_us=1))
    triggerer = await player.begin_service("triggerer")
    (claimed,) = await player.store.call(ClaimTriggers(triggerer, 1, 10))

    await player.schedule()

    assert (await player.states(run)) == {"a": "failed"}
    held = HeldTriggers(triggerer, ((claimed.id, claimed.token),))
    assert (await player.store.call(held))[0].reason == "timeout"


async def test_what_a_dead_service_held_is_free_again(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b")))
    first, second = await player.claim()
    await player.report(second, Deferral("package.Trigger", "{}", "resume"))
    triggerer = await player.begin_service("triggerer")
    (claimed,) = await player.store.call(ClaimTriggers(triggerer, 1, 10))

    assert await player.store.call(LoseSession(player.worker))
    assert not await player.store.call(LoseSession(player.worker))
    assert await player.store.call(LoseSession(triggerer))
    with pytest.raises(CallRefusedError) as refused:
        await player.turn()
    assert refused.value.kind is RefusalKind.FENCED
    dead, player.worker = player.worker, await player.begin_service("worker")
    again = await player.claim_one()
    assert (again.task, again.try_number, again.epoch) == (first.task, 1, first.epoch + 2)
    assert dead != player.worker
    triggerer = await player.begin_service("triggerer")
    (taken,) = await player.store.call(ClaimTriggers(triggerer, 1, 10))
    assert taken.id == claimed.id
    assert taken.token > claimed.token
    assert await player.states(run) == {"a": "running", "b": "deferred"}


async def test_a_worker_is_told_which_attempts_a_user_has_replaced(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b")))
    a, b = await player.claim()
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("a",), "tester"))

    answer = await player.turn(held=((a.task, a.epoch), (b.task, b.epoch)))

    assert answer.end == ((a.task, a.epoch),)
    assert (await player.report(a, Success())).kind is OutcomeKind.FENCED


async def test_slots_are_given_by_priority_and_never_more_than_there_are(player: Player) -> None:
    await player.store.call(SetPool("small", 3))
    tasks = [task(f"t{n}", pool="small", pool_slots=1 + n % 2, priority=n) for n in range(6)]
    run = await player.create(dag(*tasks))

    claimed = await player.claim()
    assert [one.task_id for one in claimed] == ["t5", "t4"]
    pool = next(one for one in await player.store.call(ListPools()) if one.name == "small")
    assert (pool.used, pool.waiting) == (3, 4)
    await player.turn(*[AttemptReport(one.task, one.epoch, Success()) for one in claimed])
    await player.play()
    assert set((await player.states(run)).values()) == {"success"}


async def test_limits_of_a_dag_hold_up_no_other_dag(player: Player) -> None:
    await player.create(dag(*[task(f"t{n}") for n in range(4)], id="limited", max_active_tasks=1))
    await player.create(dag(task("x", max_active_per_run=1), task("y"), id="free"))

    claimed = await player.claim()

    assert sorted(one.dag_id for one in claimed) == ["free", "free", "limited"]
    assert await player.claim() == ()


async def test_what_a_branch_skips_is_skipped_again_when_it_is_cleared_alone(player: Player) -> None:
    join = task("join", "left", "right", rule="none_failed_min_one_success")
    run = await player.create(dag(task("branch"), task("left", "branch"), task("right", "branch"), join))
    branch = await player.claim_one()
    await player.report(branch, Success(), skip=("left",))
    await player.play()
    assert (await player.states(run))["left"] == "skipped"
    assert (await player.run(run)).state == "success"

    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("left",), "tester"))
    await player.play()
    assert (await player.states(run))["left"] == "skipped"

    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("branch",), "tester", downstream=True))
    branch = await player.claim_one()
    await player.report(branch, Success(), skip=("right",))
    await player.play()
    expected = {"branch": "success", "left": "success", "right": "skipped", "join": "success"}
    assert await player.states(run) == expected


async def test_a_short_circuit_skips_everything_after_it_but_teardowns(player: Player) -> None:
    tasks = [task("a"), task("b", "a"), task("c", "b", rule="all_done")]
    run = await player.create(dag(*tasks, task("d", "c", is_teardown=True, rule="all_done")))
    await player.report(await player.claim_one(), Success(), skip_all_downstream=True)
    await player.play()

    assert await player.states(run) == {"a": "success", "b": "skipped", "c": "skipped", "d": "success"}


async def test_a_chain_of_skips_is_cut_into_bounded_transactions(player: Player) -> None:
    names = [f"t{number:04}" for number in range(1200)]
    tasks = [task(names[0])] + [task(name, before) for before, name in pairwise(names)]
    run = await player.create(dag(*tasks))

    attempt = await player.claim_one()
    await player.report(attempt, Skip())
    skipped = [state for state in (await player.states(run)).values() if state == "skipped"]
    assert len(skipped) == 501
    await player.schedule()
    assert (await player.run(run)).state == "success"


async def test_a_cancelled_run_ends_failed_with_all_its_tasks(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a"), task("c")))
    a, _ = await player.claim()

    cancelled = await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))

    assert (cancelled.state, cancelled.reason) == ("running", "cancelled by tester")
    assert await player.states(run) == {"a": "ending", "b": "skipped", "c": "ending"}
    assert (await player.turn(held=((a.task, a.epoch),))).end == ((a.task, a.epoch),)
    assert await player.states(run) == {"a": "ending", "b": "skipped", "c": "failed"}
    await player.turn()
    ended = await player.run(run)
    assert (ended.state, ended.reason) == ("failed", "cancelled by tester")
    assert await player.states(run) == {"a": "failed", "b": "skipped", "c": "failed"}
    assert (await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))) == ended


async def test_a_run_that_is_cancelled_skips_its_teardowns_which_run_once_they_are_cleared(player: Player) -> None:
    down = task("down", "up", "work", is_teardown=True, rule="all_done_setup_success")
    run = await player.create(dag(task("up", is_setup=True), task("work", "up"), down))
    await player.report(await player.claim_one(), Success())
    await player.claim_one()
    await player.store.call(CancelRun(run.dag_id, run.run_id, "tester"))
    await player.turn()
    assert await player.states(run) == {"up": "success", "work": "failed", "down": "skipped"}

    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("down",), "tester"))
    await player.play()

    assert await player.states(run) == {"up": "success", "work": "failed", "down": "success"}


async def test_the_first_failure_skips_what_has_not_started_if_the_dag_fails_fast(player: Player) -> None:
    tasks = [task("a"), task("b"), task("c", "b"), task("down", "c", is_teardown=True, rule="all_done")]
    run = await player.create(dag(*tasks, fail_fast=True))
    attempts = {one.task_id: one for one in await player.claim()}

    await player.report(attempts["a"], Failure("no"))
    assert await player.states(run) == {"a": "failed", "b": "running", "c": "skipped", "down": "none"} or (
        await player.states(run) == {"a": "failed", "b": "running", "c": "skipped", "down": "scheduled"}
    )
    await player.report(attempts["b"], Success())
    await player.play()
    assert (await player.run(run)).state == "failed"
    assert (await player.states(run))["down"] == "success"


async def test_a_fail_fast_run_fails_although_its_leaves_are_skipped(player: Player) -> None:
    run = await player.create(dag(task("s"), task("t", "s"), fail_fast=True, callbacks=("on_failure",)))
    await player.report(await player.claim_one(), Failure("no"))
    await player.schedule()
    assert await player.states(run) == {"s": "failed", "t": "skipped"}
    assert (await player.run(run)).state == "failed"
    callback = (await player.claim_one()).callback
    assert callback is not None
    assert (callback.name, callback.error) == ("on_failure", "tasks failed: s")

    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("s",), "success", "tester"))

    assert (await player.run(run)).state == "success"


async def test_a_failed_teardown_stops_nothing_in_a_fail_fast_run(player: Player) -> None:
    down = task("down", "up", is_teardown=True, rule="all_done_setup_success", setups=("up",))
    run = await player.create(dag(task("up", is_setup=True), down, task("work", "up"), fail_fast=True))
    await player.play(fail_these(["down"]))
    assert (await player.run(run)).state == "success"


async def test_a_run_that_takes_too_long_fails(player: Player) -> None:
    run = await player.create(dag(task("a"), run_timeout_us=1))
    await player.schedule()

    found = await player.run(run)
    assert (found.state, found.reason) == ("failed", "it exceeded its dagrun_timeout")


async def test_runs_beyond_the_limit_of_a_dag_wait_for_earlier_ones(player: Player) -> None:
    first = await player.create(dag(task("a"), max_active_runs=1))
    second = await player.store.call(CreateRun("dag", by="tester"))
    assert (first.state, second.state) == ("running", "queued")

    await player.report(await player.claim_one(), Success())
    attempt = await player.claim_one()
    assert attempt.run == second.id


async def test_ended_runs_whose_tasks_are_cleared_wait_for_room_as_new_ones_do(player: Player) -> None:
    first = await player.create(dag(task("a"), max_active_runs=1))
    second = await player.store.call(CreateRun("dag", by="tester"))
    await player.play()
    for run in (first, second):
        assert await player.store.call(ClearTasks(run.dag_id, run.run_id, (), "tester")) == ("a",)

    attempt = await player.claim_one()
    assert attempt.run == first.id
    waiting = await player.run(second)
    assert (waiting.state, waiting.started_us, waiting.ended_us) == ("queued", None, None)
    await player.report(attempt, Success())
    attempt = await player.claim_one()
    assert attempt.run == second.id
    await player.report(attempt, Success())
    assert {(await player.run(run)).state for run in (first, second)} == {"success"}


async def test_nothing_of_a_paused_dag_starts_when_it_is_cleared_or_marked(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a")))
    await player.play(fail_these("a"))
    await player.store.call(PauseDag(run.dag_id, True, "tester"))

    assert await player.store.call(MarkTasks(run.dag_id, run.run_id, ("a",), "success", "tester")) == ("a",)
    assert await player.claim() == ()
    assert await player.store.call(ClearTasks(run.dag_id, run.run_id, ("a",), "tester")) == ("a",)
    assert await player.claim() == ()
    assert (await player.run(run)).state == "queued"

    await player.store.call(PauseDag(run.dag_id, False, "tester"))
    await player.play()
    assert await player.states(run) == {"a": "success", "b": "success"}
    assert (await player.run(run)).state == "success"


async def test_a_task_that_depends_on_the_past_waits_for_the_run_before(player: Player) -> None:
    structure = dag(task("a", depends_on_past=True), task("b", "a"))
    first = await player.create(structure, logical_us=1_000_000)
    second = await player.create(structure, logical_us=2_000_000)
    (attempt,) = await player.claim()
    assert attempt.run == first.id

    await player.report(attempt, Failure("no"))
    assert await player.claim() == ()
    await player.store.call(MarkTasks(first.dag_id, first.run_id, ("a",), "success", "tester"))
    attempts = await player.claim()
    assert {(one.run, one.task_id) for one in attempts} == {(first.id, "b"), (second.id, "a")}


async def test_a_task_that_is_marked_lets_go_on_what_had_failed_with_it(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a")))
    await player.play(fail_these("a"))
    assert (await player.run(run)).state == "failed"

    marked = MarkTasks(run.dag_id, run.run_id, ("a",), "success", "tester")
    assert await player.store.call(marked) == ("a",)
    await player.play()
    assert await player.states(run) == {"a": "success", "b": "success"}
    assert (await player.run(run)).state == "success"


async def test_xcoms_are_stored_with_the_success_and_removed_by_a_clear(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b", "a")))
    attempt = await player.claim_one()
    await player.store.call(PushXCom(attempt.task, attempt.epoch, "early", "1"))
    await player.report(attempt, Success(), xcoms=(("return_value", '{"x":[1]}'),))
    with pytest.raises(CallRefusedError, match="no longer counts"):
        await player.store.call(PushXCom(attempt.task, attempt.epoch, "late", "1"))

    assert await player.store.call(GetXCom(run.id, ("b", "a"))) == (None, '{"x":[1]}')
    listed = await player.store.call(ListXComs(run.dag_id, run.run_id))
    assert [row.key for row in listed.rows] == ["early", "return_value"]
    await player.store.call(ClearTasks(run.dag_id, run.run_id, ("a",), "tester"))
    assert await player.store.call(GetXCom(run.id, ("a",))) == (None,)


async def test_an_xcom_that_is_too_large_fails_its_own_task_alone(player: Player) -> None:
    run = await player.create(dag(task("a"), task("b")))
    a, b = await player.claim()
    large, fits = '"' + "x" * 1024 * 1024 + '"', '"' + "x" * (1024 * 1024 - 2) + '"'

    await player.turn(
        AttemptReport(a.task, a.epoch, Success(), (("return_value", large),)),
        AttemptReport(b.task, b.epoch, Success(), (("return_value", fits),)),
    )

    assert await player.states(run) == {"a": "failed", "b": "success"}
    assert "at most 1048576 are allowed" in str((await player.tasks(run))["a"].error)
    assert await player.store.call(GetXCom(run.id, ("a", "b"))) == (None, fits)


async def test_a_callback_runs_after_the_state_is_stored_and_again_if_its_worker_dies(player: Player) -> None:
    run = await player.create(dag(task("a", callbacks=("on_failure",)), callbacks=("on_failure",)))
    await player.report(await player.claim_one(), Failure("broken"))
    assert (await player.run(run)).state == "failed"

    claimed = await player.claim()
    names = [(one.task_id, one.callback.name, one.callback.error) for one in claimed if one.callback]
    assert names == [("a", "on_failure", "broken"), ("", "on_failure", "tasks failed: a")]
    await player.store.call(LoseSession(player.worker))
    player.worker = await player.begin_service("worker")
    again = await player.claim()
    assert [one.callback for one in again] == [one.callback for one in claimed]


async def test_a_callback_is_told_what_its_task_and_run_became_and_where_it_was_raised(
    player: Player,
) -> None:
    run = await player.create(
        dag(task("a", retries=1, callbacks=("on_failure", "on_retry")), callbacks=("on_failure",))
    )
    await player.report(await player.claim_one(), Failure("broken", origin="[1]"))
    (retried,) = [one.callback for one in await player.claim() if one.callback]
    assert retried is not None
    assert (retried.name, retried.origin, retried.run_state) == ("on_retry", "[1]", "running")
    assert retried.started_us is not None
    assert retried.started_us <= retried.ended_us
    await player.store.call(MarkTasks(run.dag_id, run.run_id, ("a",), "failed", "tester"))
    ended = await player.run(run)
    callbacks = {one.task_id: one.callback for one in await player.claim() if one.callback}
    of_task, of_run = callbacks["a"], callbacks[""]
    assert of_task is not None
    assert of_run is not None
    assert (of_task.name, of_task.origin, of_task.run_state) == ("on_failure", None, "failed")
    assert (of_run.run_state, of_run.run_ended_us, of_run.started_us) == ("failed", ended.ended_us, None)


async def test_the_callbacks_of_a_run_and_those_of_tasks_that_failed_are_listed_with_their_logs(player: Player) -> None:
    run = await player.create(dag(task("a", callbacks=("on_success",)), callbacks=("on_success",)))
    await player.report(await player.claim_one(), Success())
    claimed = {one.task_id: one for one in await player.claim() if one.callback}
    of_task, of_run = claimed["a"].callback, claimed[""].callback
    assert of_task is not None
    assert of_run is not None
    part = LogPart(0, 0, of_run.id * PART_BASE, 5, b"said", 1, last=True)
    others = LogPart(0, 0, (of_run.id + 1) * PART_BASE, 5, b"of another", 1, last=True)
    ends = (CallbackReport(of_run.id, "the chat is down", log_end=part), CallbackReport(of_task.id, log_end=others))
    await player.turn(callbacks=ends)

    listed = await player.store.call(ListCallbacks(run.dag_id, run.run_id))
    assert [(one.id, one.task_id, one.state, one.error) for one in listed.rows] == [
        (of_run.id, None, "failed", "the chat is down")
    ]
    log = await player.store.call(ReadCallbackLog(run.dag_id, run.run_id, of_run.id))
    assert [one.data for one in log.rows] == [b"said"]
    for number in (of_task.id, of_run.id + 99):
        with pytest.raises(CallRefusedError, match="has no callback"):
            await player.store.call(ReadCallbackLog(run.dag_id, run.run_id, number))


async def test_the_log_of_a_try_is_read_in_order_and_a_part_is_stored_once(player: Player) -> None:
    run = await player.create(dag(task("a")))
    attempt = await player.claim_one()
    end = LogPart(attempt.task, 1, 1, 6, b"\0end", 1, last=True)
    report = AttemptReport(attempt.task, attempt.epoch, Success(), log_end=end)
    for _ in range(2):
        await player.turn(report)
    from tidemill.store.calls.task_calls import AppendLog

    await player.store.call(AppendLog((LogPart(attempt.task, 1, 0, 5, b"first", 3),)))

    log = await player.store.call(ReadLog(run.dag_id, run.run_id, "a"))
    assert [(part.number, part.data, part.last) for part in log.rows] == [(0, b"first", False), (1, b"\0end", True)]


async def test_a_run_is_created_once_per_request_and_refuses_a_twin(player: Player) -> None:
    await player.create(dag(task("a")))
    request = CreateRun("dag", logical_us=5, by="tester", request="r1")

    run = await player.store.call(request)
    assert await player.store.call(request) == run
    with pytest.raises(CallRefusedError, match="already has a run with this logical date") as refused:
        await player.store.call(CreateRun("dag", run_id="other", logical_us=5))
    assert refused.value.kind is RefusalKind.CONFLICT
    with pytest.raises(CallRefusedError, match="there is no DAG 'none'"):
        await player.store.call(CreateRun("none"))
    with pytest.raises(CallRefusedError, match="JSON object"):
        await player.store.call(CreateRun("dag", conf="[1]"))
    for name in ("r" * 251, "two\nlines", "\x1b[31mred"):
        with pytest.raises(CallRefusedError, match=r"the id of a run .* at most 250 characters") as refused:
            await player.store.call(CreateRun("dag", run_id=name))
        assert refused.value.kind is RefusalKind.INVALID
    for name in ("a/b", "/", ".", "..", "-x"):
        with pytest.raises(CallRefusedError, match=r"the id of a run .* contain '/'") as refused:
            await player.store.call(CreateRun("dag", run_id=name))
        assert refused.value.kind is RefusalKind.INVALID
    assert (await player.store.call(CreateRun("dag", run_id="Mühle a.b"))).run_id == "Mühle a.b"


@pytest.mark.parametrize(("name", "structure"), [("a/b", dag(task("t"), id="a/b")), ("..", dag(task("..")))])
async def test_ids_that_no_page_can_have_in_its_address_are_not_stored(
    player: Player, name: str, structure: DagStructure
) -> None:
    (stored,) = await player.store.call(StoreFile("dag.py", "digest", structures=(encode(structure),)))
    assert f"the id '{name}' must not be" in stored.refused


@pytest.mark.parametrize("name", ["", " ", "two\nlines", "\x1b[31mred", "n" * 251, "a\0b"])
@pytest.mark.parametrize(
    "build",
    [lambda name: SetPool(name, 1), lambda name: SetVariable(name, "v"), lambda name: SetConnection(name, "http")],
)
async def test_names_that_cannot_be_shown_are_refused(player: Player, name: str, build: Any) -> None:
    with pytest.raises(CallRefusedError, match=r"name") as refused:
        await player.store.call(build(name))
    assert refused.value.kind is RefusalKind.INVALID


async def test_a_pool_keeps_what_is_not_given(player: Player) -> None:
    await player.store.call(SetPool("small", 1, "for a slow database", True))
    await player.store.call(SetPool("small", 2))
    await player.store.call(SetPool("default_pool", 3))
    pools = {one.name: one for one in await player.store.call(ListPools())}
    small, default = pools["small"], pools["default_pool"]
    assert (small.slots, small.description, small.include_deferred) == (2, "for a slow database", True)
    assert (default.slots, default.description) == (3, "Default pool")
    await player.store.call(SetPool("small", 2, "", False))
    (small,) = [one for one in await player.store.call(ListPools()) if one.name == "small"]
    assert (small.description, small.include_deferred) == ("", False)
    for wrong in (SetPool("small", -1), SetPool("small", 1 << 31), SetPool("small", 1, "\0")):
        with pytest.raises(CallRefusedError):
            await player.store.call(wrong)


async def test_bells_ring_after_a_commit(player: Player) -> None:
    bell = player.store.doorbell
    for channel in Channel:
        await bell.wait(channel, 0)
        while await bell.wait(channel, 0.02):
            pass
    await player.create(dag(task("a")))
    assert await bell.wait(Channel.SCHEDULER, 5)
    await player.schedule()
    assert await bell.wait(Channel.WORKER, 5)


async def test_what_a_database_refuses_fails_its_own_task_alone(player: Player) -> None:
    names = ("bad_key", "bad_deferral", "bad_error", "good")
    run = await player.create(dag(*[task(name) for name in names]))
    claimed = {one.task_id: one for one in await player.claim()}
    results = {
        "bad_key": AttemptReport(claimed["bad_key"].task, 3, Success(), (("k\0", "1"),)),
        "bad_deferral": AttemptReport(claimed["bad_deferral"].task, 3, Deferral("a.B", "{}", "go\0")),
        "bad_error": AttemptReport(claimed["bad_error"].task, 3, Failure("broken\0\ud800")),
        "good": AttemptReport(claimed["good"].task, 3, Success(), (("k", '"\u00e4"'),)),
    }

    answer = await player.turn(*results.values())

    assert {one.kind for one in answer.outcomes} == {OutcomeKind.MOVED}
    tasks = await player.tasks(run)
    assert {name: one.state for name, one in tasks.items()} == dict.fromkeys(names[:3], "failed") | {"good": "success"}
    assert tasks["bad_error"].error == "broken\ufffd?"


async def test_a_result_that_the_database_rejects_fails_its_own_task_alone(player: Player) -> None:
    run = await player.create(dag(*[task(name) for name in "abc"]))
    key = base64.b85encode(random.Random(1).randbytes(8000)).decode()
    reports = [
        AttemptReport(one.task, one.epoch, Success(), ((key, "1"),) if one.task_id == "b" else ())
        for one in await player.claim()
    ]

    answer = await player.turn(*reports)

    assert {one.kind for one in answer.outcomes} == {OutcomeKind.MOVED}
    # The keys of an index of PostgreSQL are short.
    of_b = "success" if player.store.exclusive else "failed"
    assert await player.states(run) == {"a": "success", "b": of_b, "c": "success"}


async def test_a_turn_that_cancels_queued_tasks_claims_others_and_callbacks(player: Player) -> None:
    first = dag(task("a", callbacks=("on_failure",)), task("b"), task("c"), id="first", fail_fast=True)
    await player.create(first)
    await player.schedule()
    (attempt,) = (await player.turn(capacity=1)).claimed
    await player.create(dag(task("x"), id="second"))
    await player.schedule()

    failed = AttemptReport(attempt.task, attempt.epoch, Failure("no", may_retry=False))
    claimed = (await player.turn(failed, capacity=2)).claimed

    found = [(one.task_id, None if one.callback is None else one.callback.name) for one in claimed]
    assert sorted(found, key=str) == [("a", "on_failure"), ("x", None)]


async def test_a_structure_that_cannot_be_read_keeps_no_other_dag_from_running(player: Player) -> None:
    bad = await player.create(dag(task("a"), task("b", "a"), id="bad"))
    (attempt,) = await player.claim()
    await player.create(dag(task("x"), id="bad2"))
    broken = "UPDATE dag_version SET structure = '{}', digest = 'unreadable'"
    await player.store.write(lambda connection: connection.execute(text(broken)))

    good = await player.create(dag(task("a"), id="good"))
    await player.play()
    assert (await player.run(good)).state == "success"
    assert (await player.run(bad)).state == "running"
    assert (await player.report(attempt, Success())).kind is OutcomeKind.UNSTORED


async def test_dags_whose_runs_wait_for_the_past_do_not_keep_those_of_others_from_beginning(player: Player) -> None:
    for number in range(51):
        await player.create(dag(task("a", depends_on_past=True), id=f"dag{number}", max_active_runs=1), logical_us=1)
    await player.schedule()
    for number in range(51):
        await player.store.call(CreateRun(f"dag{number}", logical_us=2))
    await player.create(dag(task("a", queue="mine"), id="other", max_active_runs=1))
    other = await player.store.call(CreateRun("other"))
    await player.schedule()
    (attempt,) = (await player.turn(capacity=1, queues=("mine",))).claimed
    await player.report(attempt, Success())
    await player.schedule()
    assert (await player.run(other)).state == "running"


async def test_a_cleared_run_takes_the_place_of_a_later_one_that_waits_for_it(player: Player) -> None:
    structure = dag(task("a", depends_on_past=True), task("b"), max_active_runs=1)
    first = await player.create(structure, run_id="first", logical_us=1)
    await player.play(fail_these({"a"}))
    second = await player.create(structure, run_id="second", logical_us=2)
    await player.play()
    assert await player.states(second) == {"a": "none", "b": "success"}
    await player.store.call(ClearTasks("dag", "first", ("a",), "tester"))
    await player.schedule()
    assert [(await player.run(run)).state for run in (first, second)] == ["running", "queued"]
    await player.play()
    assert [(await player.run(run)).state for run in (first, second)] == ["success", "success"]


async def test_a_run_that_waits_for_a_failed_one_keeps_no_place_from_a_run_without_a_date(player: Player) -> None:
    structure = dag(task("a", depends_on_past=True), max_active_runs=1)
    await player.create(structure, run_id="first", logical_us=1)
    await player.play(fail_these({"a"}))
    second = await player.create(structure, run_id="second", logical_us=2)
    await player.play()
    by_hand = await player.create(structure, run_id="by hand")
    await player.play()
    assert (await player.run(by_hand)).state == "success"
    assert (await player.run(second)).state == "running"
    assert await player.states(second) == {"a": "none"}


async def test_a_run_that_still_does_something_keeps_its_place(player: Player) -> None:
    structure = dag(task("a", depends_on_past=True), task("b"), max_active_runs=1)
    first = await player.create(structure, run_id="first", logical_us=1)
    await player.play(fail_these({"a"}))
    second = await player.create(structure, run_id="second", logical_us=2)
    b = await player.claim_one()
    await player.store.call(ClearTasks("dag", "first", ("a",), "tester"))
    assert await player.claim() == ()
    assert [(await player.run(run)).state for run in (first, second)] == ["queued", "running"]
    await player.report(b, Success())
    await player.play()
    assert [(await player.run(run)).state for run in (first, second)] == ["success", "success"]


async def test_workers_are_rung_for_callbacks_that_a_turn_of_the_scheduler_makes_due(player: Player) -> None:
    await player.create(dag(task("a", callbacks=("on_failure",))))
    await player.report(await player.claim_one(), Deferral("a.B", "{}", "go", timeout_us=1))
    bell = player.store.doorbell
    while await bell.wait(Channel.WORKER, 0.02):
        pass
    await player.schedule()
    assert await bell.wait(Channel.WORKER, 5)
    (attempt,) = (await player.turn(capacity=1)).claimed
    assert attempt.callback is not None
