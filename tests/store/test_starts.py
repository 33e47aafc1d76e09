"""Tasks that start in a trigger, and tasks that an event of their trigger ends, on both databases."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, select
from tests.store.dags import Player, dag, task

from tidemill.core.tasks.endings import Deferral, Success
from tidemill.core.tasks.structure import MapSource, MapStructure, ParamStructure, StartStructure
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.run_calls import CancelRun
from tidemill.store.calls.setting_calls import SetPool
from tidemill.store.calls.trigger_calls import (
    ClaimedTrigger,
    ClaimTriggers,
    EventEnding,
    EventOutcome,
    FailTrigger,
    FiredEvent,
    HeldTriggers,
    PlaceTriggers,
    ReleaseTriggers,
    StoreEvents,
)
from tidemill.store.calls.worker_calls import AttemptReport
from tidemill.store.dag_tables import task_callback, task_journal, xcom
from tidemill.store.database import Database

START = StartStructure("tests.Trigger", '{"n":1}', "go_on", '{"a":1}')
_requests = itertools.count(1)


class Starting(Player):
    """Plays a triggerer, too."""

    triggerer = 0

    async def begin(self) -> Starting:
        await super().begin()
        self.triggerer = await self.begin_service("triggerer")
        return self

    async def claim_triggers(self, capacity: int = 5_000, session: int = 0) -> tuple[ClaimedTrigger, ...]:
        await self.schedule()
        return await self.store.call(ClaimTriggers(session or self.triggerer, next(_requests), capacity))

    async def claim_trigger(self) -> ClaimedTrigger:
        (claimed,) = await self.claim_triggers()
        return claimed

    async def fire(self, *claimed: ClaimedTrigger, ending: EventEnding | None = None) -> tuple[EventOutcome, ...]:
        text = None if ending is None else msgspec.json.encode(ending).decode()
        events = tuple(FiredEvent(one.id, one.token, "1", None, 1, text) for one in claimed)
        return await self.store.call(StoreEvents(self.triggerer, next(_requests), events))

    async def journal(self) -> list[tuple[str, str, str, str]]:
        columns = task_journal.c

        def read(connection: Connection) -> Any:
            names = (columns.task, columns.epoch, columns.before, columns.after, columns.given, columns.said_by)
            return connection.execute(select(*names).order_by(columns.task, columns.epoch)).all()

        return [tuple(row[2:]) for row in await self.store.read(read)]


@pytest.fixture
async def player(database: Database) -> Starting:
    return await Starting(database).begin()


async def test_a_task_starts_in_its_trigger_without_a_claim_and_is_resumed_by_its_event(player: Starting) -> None:
    run = await player.create(dag(task("a", start=START)))
    claimed = await player.claim_trigger()
    assert (claimed.classpath, claimed.kwargs, claimed.try_number) == ("tests.Trigger", '{"n":1}', 1)
    assert claimed.start is not None
    assert not claimed.start.rendered
    assert await player.states(run) == {"a": "deferred"}
    assert await player.claim() == ()
    await player.fire(claimed)
    attempt = await player.claim_one()
    assert (attempt.resume.method, attempt.resume.kwargs, attempt.resume.payload) == ("go_on", '{"a":1}', "1")
    assert attempt.try_number == 1
    # A later deferral of the same try is one like any other.
    await player.report(attempt, Deferral("tests.Other", '{"b":"{{ ds }}"}', "go_on"))
    later = await player.claim_trigger()
    assert (later.start, later.kwargs) == (None, '{"b":"{{ ds }}"}')
    await player.fire(later)
    await player.report(await player.claim_one(), Success())
    assert (await player.run(run)).state == "success"


@pytest.mark.parametrize(
    ("ending", "state", "callback"),
    [
        (EventEnding("success", xcoms=(("return_value", "7"),)), "success", "on_success"),
        (EventEnding("skipped", xcoms=(("return_value", "7"),)), "skipped", "on_skipped"),
        (EventEnding("failed", "no luck", (("return_value", "7"),)), "failed", "on_failure"),
    ],
)
async def test_an_event_ends_the_task_in_one_transaction_with_xcoms_callbacks_and_successors(
    player: Starting, database: Database, ending: EventEnding, state: str, callback: str
) -> None:
    callbacks = ("on_success", "on_failure", "on_skipped")
    first = task("a", start=START, callbacks=callbacks)
    run = await player.create(dag(first, task("b", "a", rule="all_done", start=START)))
    await player.fire(await player.claim_trigger(), ending=ending)
    found = (await player.tasks(run))["a"]
    assert (found.state, found.error) == (state, "TaskDeferralError: no luck" if state == "failed" else None)

    def read(connection: Connection) -> Any:
        values = connection.execute(select(xcom.c.key, xcom.c.value)).all()
        return [tuple(row) for row in values], list(connection.execute(select(task_callback.c.name)).scalars())

    assert await database.read(read) == ([("return_value", "7")], [callback])
    assert (await player.states(run))["b"] == "scheduled", "its successor is told"
    assert (await player.claim_triggers())[0].task_id == "b"


async def test_a_failure_that_the_trigger_reports_uses_the_retries(player: Starting) -> None:
    one = task("a", start=START, retries=1, retry_delay_us=0, callbacks=("on_retry", "on_failure"))
    run = await player.create(dag(one))
    for try_number in (1, 2):
        claimed = await player.claim_trigger()
        assert claimed.try_number == try_number
        await player.fire(claimed, ending=EventEnding("failed"))
    found = (await player.tasks(run))["a"]
    assert (found.state, found.error) == ("failed", "TaskDeferralError: the trigger fired a TaskFailedEvent")
    names = [attempt.callback.name for attempt in await player.claim() if attempt.callback is not None]
    assert names == ["on_retry", "on_failure"]


async def test_a_trigger_that_raises_is_retried_as_a_start(player: Starting) -> None:
    run = await player.create(dag(task("a", start=START, retries=1, retry_delay_us=0)))
    claimed = await player.claim_trigger()
    await player.store.call(FailTrigger(player.triggerer, claimed.id, claimed.token, "ValueError: no"))
    assert (await player.claim_trigger()).try_number == 2
    assert (await player.states(run)) == {"a": "deferred"}


async def test_xcoms_that_cannot_be_stored_fail_the_task_finally(player: Starting) -> None:
    run = await player.create(dag(task("a", start=START, retries=3)))
    ending = EventEnding("success", xcoms=(("key", '"' + "x" * (1 << 20) + '"'),))
    await player.fire(await player.claim_trigger(), ending=ending)
    found = (await player.tasks(run))["a"]
    assert found.state == "failed"
    assert found.error is not None
    assert "the XCom 'key'" in found.error


async def test_a_repeated_and_a_late_event_change_nothing(player: Starting) -> None:
    run = await player.create(dag(task("a", start=START)))
    claimed = await player.claim_trigger()
    text = msgspec.json.encode(EventEnding("success")).decode()
    request = StoreEvents(
        player.triggerer, next(_requests), (FiredEvent(claimed.id, claimed.token, "1", None, 1, text),)
    )
    first = await player.store.call(request)
    assert await player.store.call(request) == first
    (late,) = await player.fire(claimed, ending=EventEnding("failed"))
    assert late.kind == "fenced"
    assert await player.states(run) == {"a": "success"}


@pytest.mark.parametrize("keeps", [True, False])
async def test_an_admission_needs_a_slot_which_a_deferred_task_keeps_only_if_the_pool_says_so(
    player: Starting, keeps: bool
) -> None:
    await player.store.call(SetPool("small", 2, "", keeps))
    tasks = [task(f"t{n}", pool="small", start=START) for n in range(5)]
    run = await player.create(dag(*tasks))
    assert len(await player.claim_triggers()) == (2 if keeps else 5)
    states = Counter((await player.states(run)).values())
    assert states == ({"deferred": 2, "scheduled": 3} if keeps else {"deferred": 5})


async def test_a_full_pool_and_the_limits_of_the_dag_hold_for_tasks_that_start_in_triggers(player: Starting) -> None:
    await player.store.call(SetPool("small", 1))
    run = await player.create(dag(task("busy", pool="small", priority=9), task("a", pool="small", start=START)))
    busy = await player.claim_one()
    assert await player.claim_triggers() == ()
    await player.report(busy, Success())
    assert [one.task_id for one in await player.claim_triggers()] == ["a"]
    limited = dag(*[task(f"t{n}", start=START) for n in range(3)], id="limited", max_active_tasks=2)
    await player.create(limited)
    waiting = await player.claim_triggers()
    assert len(waiting) == 2
    await player.fire(waiting[0], ending=EventEnding("success"))
    assert len(await player.claim_triggers()) == 1
    assert (await player.states(run))["busy"] == "success"


async def test_the_timeouts_count_from_the_deferral(player: Starting) -> None:
    start = StartStructure("tests.Trigger", timeout_us=1)
    tasks = task("late", start=start), task("slow", start=START, execution_timeout_us=1)
    run = await player.create(dag(*tasks))
    await player.schedule()
    await player.schedule()
    found = await player.tasks(run)
    assert {name: one.state for name, one in found.items()} == {"late": "failed", "slow": "failed"}
    assert "TaskDeferralTimeout" in (found["late"].error or "")
    assert "TaskTimeout" in (found["slow"].error or "")


@pytest.mark.parametrize("given", ["clear", "mark", "cancel"])
async def test_a_user_ends_a_task_that_started_in_its_trigger(player: Starting, given: str) -> None:
    run = await player.create(dag(task("a", start=START)))
    claimed = await player.claim_trigger()
    if given == "clear":
        await player.store.call(ClearTasks("dag", run.run_id, ("a",), by="tester"))
    elif given == "mark":
        await player.store.call(MarkTasks("dag", run.run_id, ("a",), "success", by="tester"))
    else:
        await player.store.call(CancelRun("dag", run.run_id, by="tester"))
    (stopped,) = await player.store.call(HeldTriggers(player.triggerer, ((claimed.id, claimed.token),)))
    assert stopped.reason == "user"
    await player.store.call(ReleaseTriggers(player.triggerer, ((claimed.id, claimed.token),)))
    again = await player.claim_triggers()
    assert len(again) == (1 if given == "clear" else 0)
    assert (await player.states(run))["a"] == {"clear": "deferred", "mark": "success", "cancel": "failed"}[given]


async def test_a_triggerer_that_gives_up_hands_the_same_start_to_the_next(player: Starting) -> None:
    start = StartStructure("tests.Trigger", '{"n":"{{ ds }}"}', rendered=True, native=True)
    await player.create(dag(task("a", start=start)), logical_us=1_767_225_600_000_000)
    claimed = await player.claim_trigger()
    await player.store.call(ReleaseTriggers(player.triggerer, ((claimed.id, claimed.token),)))
    again = await player.claim_trigger()
    assert (again.start, again.kwargs, again.try_number) == (claimed.start, claimed.kwargs, 1)
    assert again.token > claimed.token
    assert claimed.start is not None
    assert claimed.start.attempt is not None
    assert claimed.start.native
    assert claimed.start.started_us > 0
    assert claimed.start.attempt.logical_us == 1_767_225_600_000_000


def mapped(*factors: MapSource, start: StartStructure, arguments: tuple[str, ...] = ("trigger_kwargs",)) -> Any:
    upstream = tuple(sorted({leaf.task for factor in factors for leaf in factor.leaves if leaf.task}))
    structure = MapStructure(arguments, factors, max_outstanding=1_000)
    return task("a", *upstream, mapped=structure, start=start)


async def test_elements_of_a_map_over_literals_start_with_their_own_arguments(player: Starting) -> None:
    elements = ('{"n":0}', '{"n":"{{ ti.map_index }}"}')
    start = StartStructure("tests.Trigger", rendered=True, elements=elements)
    await player.create(dag(mapped(MapSource("literal", length=2), start=start)))
    claimed = sorted(await player.claim_triggers(), key=lambda one: one.map_index)
    assert [one.kwargs for one in claimed] == list(elements)
    assert [one.start.attempt.map_index for one in claimed] == [0, 1]


async def test_elements_start_with_values_of_other_tasks_which_are_no_templates(player: Starting) -> None:
    start = StartStructure("tests.Trigger", leaf=1)
    factors = MapSource("literal", length=1), MapSource("xcom", "listing", "return_value")
    run = await player.create(dag(task("listing"), mapped(*factors, start=start, arguments=("x", "trigger_kwargs"))))
    values = (("return_value", '[{"n":"{{ ds }}"},{"n":2}]'),)
    await player.report(await player.claim_one(), Success(), xcoms=values)
    claimed = sorted(await player.claim_triggers(), key=lambda one: one.map_index)
    assert [one.kwargs for one in claimed] == ['{"n":"{{ ds }}"}', '{"n":2}']
    assert [one.start.rendered for one in claimed] == [False, False]
    await player.fire(*claimed, ending=EventEnding("success"))
    await player.schedule()
    assert (await player.run(run)).state == "success"


async def test_templates_get_the_mapped_arguments_of_their_element(player: Starting) -> None:
    start = StartStructure("tests.Trigger", '{"n":"{{ element.x }}"}', rendered=True, items=((), ('"u"', '"v"')))
    factors = MapSource("param", key="all"), MapSource("literal", length=2)
    param = ParamStructure("all", "[5]")
    structure = dag(mapped(*factors, start=start, arguments=("x", "y")), params=(param,))
    await player.create(structure)
    claimed = sorted(await player.claim_triggers(), key=lambda one: one.map_index)
    assert [one.start.element for one in claimed] == [(("x", "5"), ("y", '"u"')), (("x", "5"), ("y", '"v"'))]


@pytest.mark.parametrize("count", [1_000])
async def test_mapped_tasks_that_start_and_end_in_their_triggers_use_no_worker(player: Starting, count: int) -> None:
    start = StartStructure("tests.Trigger", elements=tuple(f'{{"n":{n}}}' for n in range(count)))
    run = await player.create(dag(mapped(MapSource("literal", length=count), start=start)))
    ended = 0
    while ended < count:
        claimed = await player.claim_triggers()
        assert claimed
        await player.fire(*claimed, ending=EventEnding("success", xcoms=(("return_value", "1"),)))
        ended += len(claimed)
    await player.schedule()
    assert (await player.run(run)).state == "success"
    journal = await player.journal()
    assert not [row for row in journal if row[2].startswith("claim") or row[1] in ("queued", "running")]
    assert Counter(row[2] for row in journal if row[1] == "deferred") == {"admit": count}
    assert len([row for row in journal if row[2].startswith("trigger-ended")]) == count


async def test_triggers_of_one_stream_run_in_one_session_once_their_key_is_known(player: Starting) -> None:
    other = await player.begin_service("triggerer")
    await player.create(dag(*[task(f"t{n}", start=START) for n in range(3)]))
    (first,) = await player.claim_triggers(1)
    rest = await player.claim_triggers(session=other)
    assert await player.store.call(PlaceTriggers(player.triggerer, ((first.id, first.token, "key"),))) == ()
    placing = tuple((one.id, one.token, "key" if n else "another") for n, one in enumerate(rest))
    assert await player.store.call(PlaceTriggers(other, placing)) == (rest[1].id,)
    assert await player.claim_triggers(session=other) == ()
    (moved,) = await player.claim_triggers()
    assert (moved.id, moved.stream_key) == (rest[1].id, "key")
    # A stale token changes nothing, and is to be given up.
    assert await player.store.call(PlaceTriggers(other, placing[1:])) == (rest[1].id,)


async def test_a_task_that_starts_in_its_trigger_leaves_no_attempt_to_report(player: Starting) -> None:
    run = await player.create(dag(task("a", start=START)))
    claimed = await player.claim_trigger()
    (outcome,) = (await player.turn(AttemptReport(claimed.task, claimed.epoch, Success()))).outcomes
    assert outcome.kind == "refused"
    assert await player.states(run) == {"a": "deferred"}
