"""Events in the store, on both databases."""

from __future__ import annotations

import pytest
from tests.store.helpers import NOW_US, all_events, claim, claimed

from tidemill.core.errors import RemoteError
from tidemill.core.triggers.event_plan import (
    Counter,
    Duplicate,
    EventPlan,
    EventRefusal,
    EventRefused,
    EventStored,
    NewEvent,
    make_plan,
)
from tidemill.store.database import Database
from tidemill.store.queries.triggers.events import (
    count_events,
    list_events,
    list_latest_events,
    list_latest_trigger_events,
    list_trigger_events,
    store_events,
)


async def store(database: Database, *events: NewEvent, earlier: EventPlan | None = None) -> EventPlan:
    return await database.write(lambda c: store_events(c, events, earlier))


async def test_events_are_numbered_per_trigger_in_the_order_in_which_they_fired(database: Database) -> None:
    tokens = await claimed(database, "a", "b")
    first, second = tokens
    texts = ['"ü😀"', "null", '{"nul": "\\u0000"}', "'; DROP TABLE trigger; --"]

    plan = await store(
        database,
        *[NewEvent(n, tokens[n], text, None, NOW_US + i) for i, text in enumerate(texts) for n in (second, first)],
    )

    assert plan.outcomes == [EventStored(index) for index in (0, 0, 1, 1, 2, 2, 3, 3)]
    rows = await all_events(database)
    assert [(row.trigger_name, row.sequence_index, row.payload, row.created_us) for row in rows] == [
        (name, i, text, NOW_US + i) for i, text in enumerate(texts) for name in ("b", "a")
    ]


async def test_numbers_continue_after_a_takeover_and_the_former_owner_is_refused(database: Database) -> None:
    [(number, old)] = (await claimed(database, "one")).items()
    await store(database, NewEvent(number, old, "1", None, NOW_US))

    [new] = (await claim(database, number)).values()
    late = await store(database, NewEvent(number, old, "2", None, NOW_US))
    plan = await store(database, NewEvent(number, new, "3", None, NOW_US))

    assert late.outcomes == [EventRefused(EventRefusal.FENCED)]
    assert plan.outcomes == [EventStored(1)]
    assert [row.payload for row in await all_events(database)] == ["1", "3"]


async def test_an_unknown_trigger_is_refused_and_the_others_are_stored(database: Database) -> None:
    [(number, token)] = (await claimed(database, "one")).items()

    plan = await store(database, NewEvent(999, 1, "1", "x", NOW_US), NewEvent(number, token, "2", None, NOW_US))

    assert plan.outcomes == [EventRefused(EventRefusal.UNKNOWN_TRIGGER), EventStored(0)]


async def test_an_identity_is_stored_once_per_trigger_within_a_transaction_and_over_many(database: Database) -> None:
    tokens = await claimed(database, "a", "b")
    first, second = tokens

    def fired(number: int, identity: str | None) -> NewEvent:
        return NewEvent(number, tokens[number], "1", identity, NOW_US)

    one = await store(database, fired(first, "ü'x"), fired(first, "ü'x"), fired(second, "ü'x"), fired(first, None))
    two = await store(database, fired(first, None), fired(first, "ü'x"), fired(first, ""), fired(first, ""))

    assert one.outcomes == [EventStored(0), Duplicate(0), EventStored(0), EventStored(1)]
    assert two.outcomes == [EventStored(2), Duplicate(0), EventStored(3), Duplicate(3)]
    assert len(await all_events(database)) == 5


async def test_an_attempt_whose_commit_was_not_acknowledged_is_not_stored_twice(database: Database) -> None:
    [(number, token)] = (await claimed(database, "one")).items()
    events = [NewEvent(number, token, str(n), None, NOW_US) for n in range(3)]
    heard_of = await store(database, *events)

    again = await store(database, *events, earlier=heard_of)

    assert again is heard_of
    assert len(await all_events(database)) == 3


async def test_an_attempt_that_was_rolled_back_is_stored_when_it_is_tried_again(database: Database) -> None:
    [(number, token)] = (await claimed(database, "one")).items()
    events = [NewEvent(number, token, str(n), None, NOW_US) for n in range(3)]
    plans = []

    def fails(connection) -> None:
        plans.append(store_events(connection, events))
        raise OSError("the line is cut")

    with pytest.raises(RemoteError, match="the line is cut") as caught:
        await database.write(fails)
    assert caught.value.retryable
    again = await store(database, *events, earlier=plans[0])

    assert again.outcomes == [EventStored(0), EventStored(1), EventStored(2)]
    assert len(await all_events(database)) == 3


async def test_a_lost_commit_is_recognised_although_all_its_triggers_were_claimed_since(database: Database) -> None:
    tokens = await claimed(database, "a", "b")
    events = [NewEvent(number, token, "1", None, NOW_US) for number, token in tokens.items()]
    landed = await store(database, *events)
    later = await claim(database, *tokens)
    await store(database, *[NewEvent(number, token, "2", None, NOW_US) for number, token in later.items()])

    again = await store(database, *events, earlier=landed)

    assert again is landed
    assert len(await all_events(database)) == 4


async def test_an_attempt_that_was_not_committed_is_not_mistaken_for_what_the_next_owner_stored(
    database: Database,
) -> None:
    [(number, old)] = (await claimed(database, "one")).items()
    event = NewEvent(number, old, "1", None, NOW_US)
    lost = make_plan([event], {number: Counter(0, old)}, {})
    [new] = (await claim(database, number)).values()
    await store(database, NewEvent(number, new, "2", None, NOW_US))

    again = await store(database, event, earlier=lost)

    assert again.outcomes == [EventRefused(EventRefusal.FENCED)]
    assert [row.payload for row in await all_events(database)] == ["2"]


async def test_pages_cover_every_event_once_in_both_directions(database: Database) -> None:
    tokens = await claimed(database, "a", "b")
    first, _ = tokens
    await store(database, *[NewEvent(n, t, str(i), None, NOW_US) for i in range(10) for n, t in tokens.items()])

    async def pages(query, cursor: str, *arguments: int) -> list[list[int]]:
        found, at = [], None
        while True:
            page = await database.read(lambda c, at=at: query(c, *arguments, **{cursor: at}, limit=4))
            found.append([row.id for row in page.rows])
            at = page.next
            if at is None:
                return found

    async def listed(*arguments) -> list[int]:
        return [number for page in await pages(*arguments) for number in page]

    ids = [row.id for row in await all_events(database)]
    of_first = [row.id for row in await all_events(database) if row.trigger_id == first]
    forward = await pages(list_events, "after")
    assert [len(page) for page in forward] == [4] * 5
    assert [number for page in forward for number in page] == ids
    assert await listed(list_latest_events, "before") == ids[::-1]
    assert await listed(list_trigger_events, "after", first) == of_first
    assert await listed(list_latest_trigger_events, "before", first) == of_first[::-1]
    assert await database.read(count_events) == 20
    assert await database.read(lambda c: count_events(c, first)) == 10


async def test_refused_content_is_not_reported_as_an_outage(database: Database) -> None:
    def breaks(connection) -> None:
        [row] = connection.exec_driver_sql("SELECT count(*) FROM trigger_event")
        assert row[0] == 0
        connection.exec_driver_sql(
            "INSERT INTO trigger_event (trigger_id, sequence_index, payload, created_us) VALUES (999, 0, '1', 0)"
        )

    with pytest.raises(RemoteError) as caught:
        await database.write(breaks)
    assert not caught.value.retryable
