"""Triggers whose events are elements of maps, without an attempt, on both databases."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from tests.store.dags import Player, dag, task
from tests.store.test_backlog import over

from tidemill.core.tasks.endings import Success
from tidemill.core.tasks.structure import StartStructure
from tidemill.store.calls.run_calls import CancelRun
from tidemill.store.calls.service_calls import MapLimits
from tidemill.store.calls.stream_calls import EndStream
from tidemill.store.calls.task_calls import GetValuePage
from tidemill.store.calls.trigger_calls import (
    ClaimedTrigger,
    ClaimTriggers,
    CountUndelivered,
    EventEnding,
    EventOutcome,
    FiredEvent,
    HeldTriggers,
    StoreEvents,
)
from tidemill.store.calls.worker_calls import AttemptReport, ClaimedAttempt, OutcomeKind
from tidemill.store.database import Database
from tidemill.store.queries.dags.streams.rows import FULL

_requests = itertools.count(1)


class Feeding(Player):
    """Plays a triggerer, too, which runs the trigger of a task with a map over it."""

    triggerer = 0
    trigger: ClaimedTrigger

    async def start(self, **details: Any) -> None:
        await self.begin()
        self.triggerer = await self.begin_service("triggerer")
        start = StartStructure("mod.Trigger", feeds=True, **details)
        source = task("a", is_generator=True, start=start, retries=1, retry_delay_us=0)
        self.dag_run = await self.create(dag(source, over("a", "e", max_outstanding=2)))
        self.trigger = await self.claim_trigger()

    async def claim_trigger(self) -> ClaimedTrigger:
        await self.schedule()
        (claimed,) = await self.store.call(ClaimTriggers(self.triggerer, next(_requests), 10))
        assert claimed.streams
        return claimed

    async def fire(
        self, *payloads: str, identity: str | None = None, ending: EventEnding | None = None
    ) -> tuple[EventOutcome, ...]:
        text = None if ending is None else msgspec.json.encode(ending).decode()
        last = len(payloads) - 1
        events = tuple(
            FiredEvent(self.trigger.id, self.trigger.token, one, identity, 1, text if number == last else None)
            for number, one in enumerate(payloads)
        )
        return await self.store.call(StoreEvents(self.triggerer, next(_requests), events, 4))

    async def end(self, error: str | None = None) -> OutcomeKind:
        return await self.store.call(EndStream(self.triggerer, self.trigger.id, self.trigger.token, error))

    async def finish(self, *attempts: ClaimedAttempt) -> None:
        await self.turn(*[AttemptReport(one.task, one.epoch, Success(), map_index=one.map_index) for one in attempts])

    async def values(self) -> list[str]:
        page = await self.store.call(GetValuePage(self.dag_run.id, "a"))
        return [value for _, value in page.values]


@pytest.fixture
async def feeding(database: Database) -> Feeding:
    return Feeding(database)


async def test_events_become_elements_that_run_while_the_trigger_goes_on(feeding: Feeding) -> None:
    await feeding.start()
    assert [one.undelivered for one in await feeding.fire('"x"', '"y"')] == [0, 0]
    elements = await feeding.claim()
    assert [(one.task_id, one.map_index, one.elements) for one in elements] == [("e", 0, ('"x"',)), ("e", 1, ('"y"',))]
    await feeding.finish(*elements)
    assert (await feeding.states(feeding.dag_run))["a"] == "deferred"
    await feeding.fire('"z"')
    assert await feeding.end() is OutcomeKind.MOVED
    assert await feeding.end() in (OutcomeKind.ALREADY, OutcomeKind.FENCED)
    await feeding.finish(*await feeding.claim())
    await feeding.play()
    assert (await feeding.run(feeding.dag_run)).state == "success"
    assert await feeding.values() == ['"x"', '"y"', '"z"']


async def test_an_identity_is_an_element_once_also_after_a_retry(feeding: Feeding) -> None:
    await feeding.start()
    await feeding.fire('"x"', identity="k")
    assert [one.kind for one in await feeding.fire('"x"', identity="k")] == ["duplicate"]
    assert await feeding.end("ValueError: no") is OutcomeKind.MOVED
    found = (await feeding.tasks(feeding.dag_run))["a"]
    assert (found.state, found.error) == ("up_for_retry", "TaskDeferralError: ValueError: no")
    feeding.trigger = await feeding.claim_trigger()
    await feeding.fire('"x"', identity="k")
    await feeding.fire('"y"', identity="l")
    await feeding.end()
    await feeding.play()
    assert await feeding.values() == ['"x"', '"y"']
    assert (await feeding.run(feeding.dag_run)).state == "success"


@pytest.mark.parametrize(("may_be_empty", "state"), [(False, "up_for_retry"), (True, "success")])
async def test_a_stream_without_an_event_is_an_error_unless_it_is_allowed(
    feeding: Feeding, may_be_empty: bool, state: str
) -> None:
    await feeding.start(may_be_empty=may_be_empty)
    assert await feeding.end() is OutcomeKind.MOVED
    assert (await feeding.states(feeding.dag_run))["a"] == state


async def test_the_trigger_waits_while_the_backlog_of_the_map_is_full(feeding: Feeding) -> None:
    feeding.map_limits = MapLimits(max_backlog=4)
    await feeding.start()
    # The map opens with its first element.
    await feeding.fire("0")
    elements = list(await feeding.claim())
    outcomes = await feeding.fire(*map(str, range(1, 9)))
    assert {one.undelivered for one in outcomes} == {FULL}
    count = CountUndelivered((feeding.trigger.id,))
    assert await feeding.store.call(count) == ((feeding.trigger.id, FULL),)
    for _ in range(12):
        await feeding.finish(*elements)
        elements = list(await feeding.claim())
        if await feeding.store.call(count) == ((feeding.trigger.id, 0),):
            break
    else:
        pytest.fail("the trigger has no room")
    assert [one.undelivered for one in await feeding.fire("9")] == [0]


async def test_an_event_ends_the_task_in_the_transaction_that_stores_it(feeding: Feeding) -> None:
    await feeding.start()
    await feeding.fire('"x"', "null", ending=EventEnding("success"))
    assert (await feeding.states(feeding.dag_run))["a"] == "success"
    await feeding.play()
    assert await feeding.values() == ['"x"']
    assert (await feeding.run(feeding.dag_run)).state == "success"


async def test_a_cancelled_run_stops_its_trigger(feeding: Feeding) -> None:
    await feeding.start()
    await feeding.fire('"x"')
    await feeding.store.call(CancelRun(feeding.dag_run.dag_id, feeding.dag_run.run_id, "tester"))
    held = ((feeding.trigger.id, feeding.trigger.token),)
    assert [one.reason for one in await feeding.store.call(HeldTriggers(feeding.triggerer, held))] == ["user"]
    assert [one.kind for one in await feeding.fire('"y"')] == ["fenced"]
