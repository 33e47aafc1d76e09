"""Group commit of events: timing, order, outages, and isolation from each other's failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from sqlalchemy import Connection, select
from tests.store.helpers import NOW_US, Outcomes, all_events, claim, claimed
from tests.until import until

from tidemill.core.errors import RemoteError
from tidemill.core.retry import Backoff
from tidemill.core.triggers.event_plan import Duplicate, EventRefusal, EventRefused, EventStored
from tidemill.core.triggers.group_commit import CommitLimits, ProducerStanding
from tidemill.store.content import MAX_IDENTITY_BYTES
from tidemill.store.database import Database
from tidemill.store.database_events import DatabaseEvents
from tidemill.store.engines.sqlite import open_sqlite
from tidemill.store.group_commit import EventStore
from tidemill.store.queries.triggers.triggers import find_triggers, report_triggers
from tidemill.store.records import TriggerReport, TriggerState
from tidemill.store.tables import trigger_event
from tidemill.store.write_retry import write_patiently

T = TypeVar("T")
QUICK = Backoff(0.001, 0.005)


class Unsteady:
    """A real database whose connection fails as the test says."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.label = database.label
        self.before: list[Exception | None] = []
        self.after: list[Exception | None] = []
        self.refused_payload = ""
        self.held: threading.Event | None = None
        self.writes = 0

    async def write(self, work: Callable[[Connection], T]) -> T:
        self.writes += 1
        if self.before and (error := self.before.pop(0)):
            raise error

        def held(connection: Connection) -> T:
            if self.held is not None:
                assert self.held.wait(20)
            result = work(connection)
            found = connection.execute(
                select(trigger_event.c.id).where(trigger_event.c.payload == self.refused_payload)
            )
            if found.first():
                raise RemoteError("refused", retryable=False)
            return result

        result = await self._database.write(held)
        if self.after and (error := self.after.pop(0)):
            raise error
        return result

    async def read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.read(work)

    async def close(self) -> None:
        await self._database.close()


class Bench:
    """An event store over an unreliable connection, one trigger, and the outcomes."""

    def __init__(self, line: Unsteady, tokens: dict[int, int], limits: CommitLimits) -> None:
        self.line = line
        [(self.trigger_id, self.token)] = tokens.items()
        self.standings: list[ProducerStanding] = []
        self.outcomes = Outcomes()
        self.store = EventStore(DatabaseEvents(line), self.standings.append, limits)
        self.store.start()

    def add(self, *payloads: object, identity: str | None = None) -> None:
        for payload in payloads:
            self.store.add(self.trigger_id, self.token, str(payload), identity, self.outcomes.of(payload))

    async def rows(self) -> list[str]:
        return [row.payload for row in await all_events(self.line)]


@pytest.fixture
def limits() -> CommitLimits:
    return CommitLimits(backoff=QUICK)


@pytest.fixture
async def bench(tmp_path: Path, limits: CommitLimits) -> AsyncIterator[Bench]:
    line = Unsteady(await open_sqlite(tmp_path / "tidemill.db"))
    tokens = await claimed(line, "one")
    line.writes = 0
    made = Bench(line, tokens, limits)
    yield made
    await made.store.close(5)
    await line.close()


def down() -> RemoteError:
    return RemoteError("the line is cut")


async def test_a_single_event_is_stored_after_the_linger_and_then_confirmed(bench: Bench) -> None:
    bench.add(1)
    assert bench.outcomes.all == []

    await bench.store.wait_settled()

    assert bench.outcomes.all == [(1, EventStored(0))]
    assert await bench.rows() == ["1"]


async def test_events_that_come_together_share_one_transaction(bench: Bench) -> None:
    bench.add(*range(500))
    await bench.store.wait_settled()

    assert bench.line.writes == 1
    assert bench.outcomes.all == [(number, EventStored(number)) for number in range(500)]


@pytest.mark.alone
async def test_a_transaction_starts_within_20_milliseconds_of_the_event(bench: Bench) -> None:
    waits = []
    for number in range(20):
        began = time.perf_counter()
        bench.add(number)
        await until(lambda number=number: bench.line.writes > number)
        waits.append(time.perf_counter() - began)
        await bench.store.wait_settled()

    assert sorted(waits)[10] < 0.02


async def test_a_commit_whose_answer_was_lost_is_recognised_and_stored_once(bench: Bench) -> None:
    bench.line.after = [down(), down()]
    bench.add(1, 2)
    await bench.store.wait_settled()

    assert bench.line.writes == 3
    assert bench.outcomes.all == [(1, EventStored(0)), (2, EventStored(1))]
    assert await bench.rows() == ["1", "2"]


async def test_an_outage_is_waited_for_in_order_and_reported_when_it_begins_and_ends(bench: Bench) -> None:
    bench.line.before = [down() for _ in range(20)]
    bench.add(1)
    await until(lambda: bench.store.standing is ProducerStanding.DOWN)
    bench.add(2)
    assert bench.outcomes.all == []

    await bench.store.wait_open()
    await bench.store.wait_settled()

    assert bench.standings == [ProducerStanding.DOWN, ProducerStanding.OPEN]
    assert bench.outcomes.told() == [1, 2]
    assert await bench.rows() == ["1", "2"]


async def test_a_bug_keeps_the_events_too(bench: Bench) -> None:
    bench.line.before = [KeyError("ours")]
    bench.add(1)
    await bench.store.wait_settled()

    assert bench.outcomes.all == [(1, EventStored(0))]


@pytest.mark.parametrize("limits", [CommitLimits(outage_seconds=0.05)])
async def test_a_write_without_an_answer_holds_producers_until_it_is_answered(bench: Bench) -> None:
    bench.line.held = threading.Event()
    bench.add(1)
    await until(lambda: bench.store.standing is ProducerStanding.DOWN)
    waits = asyncio.ensure_future(bench.store.wait_open())
    await asyncio.sleep(0)
    assert not waits.done()

    bench.line.held.set()
    await waits

    assert bench.outcomes.all == [(1, EventStored(0))]
    assert bench.standings == [ProducerStanding.DOWN, ProducerStanding.OPEN]


@pytest.mark.parametrize("limits", [CommitLimits(high_count=10, low_count=2, max_batch_count=4)])
async def test_too_many_pending_events_hold_producers_and_are_not_an_outage(bench: Bench) -> None:
    bench.add(*range(9))
    assert bench.standings == []
    bench.add(9)
    assert bench.standings == [ProducerStanding.FULL]

    await bench.store.wait_open()

    assert bench.store.pending <= 2
    assert bench.standings == [ProducerStanding.FULL, ProducerStanding.OPEN]


async def test_content_that_the_database_refuses_fails_that_event_alone(bench: Bench) -> None:
    bench.line.refused_payload = "bad"
    bench.add(1, 2, "bad", 3, 4)
    await bench.store.wait_settled()

    assert bench.outcomes.all == [
        (1, EventStored(0)),
        (2, EventStored(1)),
        ("bad", EventRefused(EventRefusal.CONTENT, "refused")),
        (3, EventStored(2)),
        (4, EventStored(3)),
    ]
    assert await bench.rows() == ["1", "2", "3", "4"]


async def test_a_takeover_refuses_the_events_of_that_trigger(bench: Bench) -> None:
    await claim(bench.line, bench.trigger_id)
    bench.add(1)
    await bench.store.wait_settled()

    assert bench.outcomes.all == [(1, EventRefused(EventRefusal.FENCED))]


async def test_an_identity_is_confirmed_again_and_stored_once(bench: Bench) -> None:
    bench.add(1, identity="a")
    await bench.store.wait_settled()
    bench.add(2, identity="a")
    await bench.store.wait_settled()

    assert bench.outcomes.all == [(1, EventStored(0)), (2, Duplicate(0))]
    assert await bench.rows() == ["1"]


async def test_a_confirmation_that_raises_does_not_prevent_the_others(bench: Bench) -> None:
    def breaks(outcome: object) -> None:
        raise RuntimeError("a fault")

    bench.store.add(bench.trigger_id, bench.token, "1", None, breaks)
    bench.add(2)
    await bench.store.wait_settled()

    assert bench.outcomes.all == [(2, EventStored(1))]


async def test_events_added_by_confirmations_are_stored(bench: Bench) -> None:
    bench.store.add(bench.trigger_id, bench.token, "1", None, lambda outcome: bench.add(2))
    await bench.store.wait_settled()

    assert await bench.rows() == ["1", "2"]


async def test_an_event_of_an_earlier_claim_is_refused_next_to_one_of_the_current_claim(bench: Bench) -> None:
    old = bench.token
    [bench.token] = (await claim(bench.line, bench.trigger_id)).values()
    bench.add("new")
    bench.store.add(bench.trigger_id, old, '"stale"', None, bench.outcomes.of("stale"))
    bench.add("newer")
    await bench.store.wait_settled()

    assert bench.outcomes.all == [
        ("new", EventStored(0)),
        ("stale", EventRefused(EventRefusal.FENCED)),
        ("newer", EventStored(1)),
    ]


async def test_content_that_the_checks_should_have_refused_fails_by_its_outcome(bench: Bench) -> None:
    bench.store.add(bench.trigger_id, bench.token, '"\ud800"', None, bench.outcomes.of("bad"))
    bench.add("good")
    await bench.store.wait_settled()

    [(_, bad), good] = bench.outcomes.all
    assert isinstance(bad, EventRefused)
    assert bad.reason is EventRefusal.CONTENT
    assert good == ("good", EventStored(0))


async def test_on_close_pending_events_are_stored_without_lingering(tmp_path: Path) -> None:
    line = Unsteady(await open_sqlite(tmp_path / "tidemill.db"))
    bench = Bench(line, await claimed(line, "one"), CommitLimits(linger_seconds=3600))
    bench.add(1, 2)

    assert await bench.store.close(10) == 0

    assert bench.outcomes.told() == [1, 2]
    await line.close()


async def test_on_close_an_outage_is_not_waited_for_and_nothing_is_confirmed(bench: Bench) -> None:
    bench.line.before = [down() for _ in range(10_000)]
    bench.add(1, 2)

    assert await bench.store.close(0.05) == 2

    assert bench.outcomes.all == []
    assert await bench.rows() == []


async def test_the_largest_identity_is_stored_in_both_databases(database: Database) -> None:
    [(trigger_id, token)] = (await claimed(database, "one")).items()
    store, outcomes = EventStore(DatabaseEvents(database)), Outcomes()
    store.start()
    # Random, so that compression does not make it small.
    identity = "".join(chr(0x4E00 + (number * 7919) % 20_000) for number in range(MAX_IDENTITY_BYTES // 3))
    for number in range(2):
        store.add(trigger_id, token, "1", identity, outcomes.of(number))
    await store.close(10)

    assert outcomes.all == [(0, EventStored(0)), (1, Duplicate(0))]
    assert [row.identity for row in await all_events(database)] == [identity]


async def test_reports_wait_for_the_database_as_events_do(bench: Bench) -> None:
    bench.line.before = [down(), down()]
    bench.line.after = [down()]
    await write_patiently(
        bench.line,
        lambda c: report_triggers(c, [TriggerReport(bench.trigger_id, 1, TriggerState.FINISHED, NOW_US)]),
        QUICK,
    )

    assert bench.line.writes == 4
    [record] = await bench.line.read(lambda c: find_triggers(c, ["one"]))
    assert record.state is TriggerState.FINISHED


async def test_a_report_that_is_refused_does_not_wait(bench: Bench) -> None:
    bench.line.before = [RemoteError("refused", retryable=False)]

    with pytest.raises(RemoteError, match="refused"):
        await write_patiently(bench.line, lambda c: None)
    assert bench.line.writes == 1
