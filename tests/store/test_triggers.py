"""Triggers in the store, on both databases."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.store.helpers import NOW_US, claim, claimed, new_session, registered

from tidemill.core.triggers.event_plan import NewEvent
from tidemill.store.database import Database
from tidemill.store.engines.postgres import open_postgres
from tidemill.store.queries.triggers import triggers
from tidemill.store.queries.triggers.events import count_events, list_trigger_events, store_events
from tidemill.store.queries.triggers.triggers import (
    cancel_unlisted,
    count_triggers,
    find_triggers,
    list_triggers,
    register_triggers,
    report_triggers,
)
from tidemill.store.records import TriggerRecord, TriggerReport, TriggerReportOutcome, TriggerSpec, TriggerState


async def register(database: Database, *specs: TriggerSpec, now_us: int = NOW_US) -> list[TriggerRecord]:
    return await database.write(lambda c: register_triggers(c, specs, "list", now_us))


async def mark(
    database: Database, number: int, token: int, state: TriggerState, **details: str
) -> TriggerReportOutcome:
    report = TriggerReport(number, token, state, NOW_US + 5, **details)
    [marked] = (await database.write(lambda c: report_triggers(c, [report]))).values()
    return marked


async def test_registered_triggers_are_returned_in_the_given_order(database: Database) -> None:
    specs = [
        TriggerSpec("zebra", "a.B", '{"x": "ü\\u0000😀"}', "always"),
        TriggerSpec("äpfel'; --", "a.C", "{}", "never"),
    ]

    records = await register(database, *specs)

    assert all(record.spec is spec for record, spec in zip(records, specs, strict=True)), "no copy is kept"
    stored = await database.read(lambda c: find_triggers(c, [spec.name for spec in specs]))
    assert sorted((one.id, one.spec.name) for one in records) == [(one.id, one.spec.name) for one in stored]
    assert {one.spec for one in stored} == set(specs)
    assert {record.state for record in records} == {TriggerState.REGISTERED}
    assert [(r.token, r.next_index, r.list, r.session, r.created_us) for r in records] == [
        (0, 0, "list", None, NOW_US)
    ] * 2


async def test_a_long_list_is_registered_in_parts(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers, "_PART", 2)
    specs = [TriggerSpec(name, "a.B", f'"{name}"') for name in "cbead"]

    for _ in range(2):
        records = await register(database, *specs)
        assert [record.spec for record in records] == specs
        stored = await database.read(lambda c: find_triggers(c, "abcde"))
        assert {one.spec for one in stored} == set(specs)
    with pytest.raises(ValueError, match="duplicate trigger names: 'c'"):
        await register(database, *specs, specs[0])


async def test_registering_again_keeps_id_and_state(database: Database) -> None:
    spec = TriggerSpec("one", "a.B")
    [(number, token)] = (await claimed(database, "one")).items()
    await register(database, spec)
    await mark(database, number, token, TriggerState.FINISHED)

    [record] = await register(database, TriggerSpec("one", "a.B", restart="always"), now_us=NOW_US + 9)

    assert (record.id, record.token, record.state) == (number, token, TriggerState.FINISHED)
    assert (record.spec.restart, record.created_us, record.changed_us) == ("always", NOW_US, NOW_US + 5)


@pytest.mark.parametrize("change", [TriggerSpec("one", "a.C"), TriggerSpec("one", "a.B", '{"n": 1}')])
async def test_a_different_trigger_under_an_old_name_starts_over(database: Database, change: TriggerSpec) -> None:
    [before] = await register(database, TriggerSpec("one", "a.B"))
    await mark(database, before.id, 0, TriggerState.FAILED, error="Traceback")

    [record] = await register(database, change)

    assert (record.id, record.state, record.error) == (before.id, TriggerState.REGISTERED, None)


async def test_a_cancelled_trigger_that_is_listed_again_starts_over(database: Database) -> None:
    [before] = await register(database, TriggerSpec("one", "a.B"))
    await mark(database, before.id, 0, TriggerState.CANCELLED, reason="user")

    [record] = await register(database, TriggerSpec("one", "a.B"))

    assert (record.state, record.reason) == (TriggerState.REGISTERED, None)


async def test_a_duplicate_name_is_reported(database: Database) -> None:
    with pytest.raises(ValueError, match="'one'"):
        await register(database, TriggerSpec("one", "a.B"), TriggerSpec("one", "a.C"))
    assert await register(database) == []


async def test_every_claim_raises_the_token(database: Database) -> None:
    [(number, first)] = (await claimed(database, "one")).items()

    session = await new_session(database, host="other", pid=99)
    second = await claim(database, number, 999, session=session)

    assert second == {number: first + 1}
    [record] = await database.read(lambda c: find_triggers(c, ["one", "unknown"]))
    assert (record.token, record.session) == (first + 1, "other, process 99")


async def test_reports_are_accepted_only_from_the_last_claim(database: Database) -> None:
    [(number, old)] = (await claimed(database, "one")).items()
    [token] = (await claim(database, number)).values()

    assert await mark(database, number, token, TriggerState.RUNNING) is TriggerReportOutcome.MARKED
    assert await mark(database, number, old, TriggerState.FAILED, error="late") is TriggerReportOutcome.FENCED
    assert await mark(database, 999, 1, TriggerState.FAILED) is TriggerReportOutcome.UNKNOWN
    [record] = await database.read(lambda c: find_triggers(c, ["one"]))
    assert (record.state, record.error) == (TriggerState.RUNNING, None)


async def test_of_several_reports_the_last_with_the_current_token_counts(database: Database) -> None:
    [(number, old)] = (await claimed(database, "one")).items()
    [other] = (await registered(database, "two")).values()
    [token] = (await claim(database, number)).values()
    reports = [
        TriggerReport(number, token, TriggerState.FAILED, NOW_US, None, "first"),
        TriggerReport(number, token, TriggerState.FINISHED, NOW_US + 1),
        TriggerReport(number, old, TriggerState.FAILED, NOW_US + 2, None, "late"),
        TriggerReport(other, 5, TriggerState.FAILED, NOW_US),
        TriggerReport(999, 1, TriggerState.FAILED, NOW_US),
    ]

    outcomes = await database.write(lambda c: report_triggers(c, reports))

    assert outcomes == {
        number: TriggerReportOutcome.MARKED,
        other: TriggerReportOutcome.FENCED,
        999: TriggerReportOutcome.UNKNOWN,
    }
    [record] = await database.read(lambda c: find_triggers(c, ["one"]))
    assert (record.state, record.error, record.changed_us) == (TriggerState.FINISHED, None, NOW_US + 1)
    assert await database.write(lambda c: report_triggers(c, [])) == {}


async def test_only_triggers_that_a_list_owns_and_would_run_are_cancelled_when_they_leave_it(
    database: Database,
) -> None:
    mine = await registered(database, "runs", "stays", "stopped", "ended", "never ran", list="mine")
    tokens = await claim(database, *list(mine.values())[:4], *(await registered(database, "a", list="other")).values())
    await mark(database, mine["stopped"], tokens[mine["stopped"]], TriggerState.CANCELLED, reason="shutdown")
    await mark(database, mine["ended"], tokens[mine["ended"]], TriggerState.FINISHED)

    cancelled = await database.write(lambda c: cancel_unlisted(c, "mine", ["stays"], NOW_US))

    assert cancelled == ["runs", "stopped"]
    assert await database.write(lambda c: cancel_unlisted(c, "mine", ["stays"], NOW_US)) == []
    assert await database.write(lambda c: cancel_unlisted(c, "nobody's", [], NOW_US)) == []


async def test_a_trigger_moves_to_the_list_that_registers_it(database: Database) -> None:
    [number] = (await registered(database, "one", list="old")).values()

    assert (await registered(database, "one", list="new")) == {"one": number}

    [record] = await database.read(lambda c: find_triggers(c, ["one"]))
    assert (record.list, record.state) == ("new", TriggerState.REGISTERED)


async def test_hosts_that_register_the_same_new_triggers_at_once_agree(postgres) -> None:
    url = await postgres.new_database()
    databases = [await open_postgres(url) for _ in range(4)]
    names = [f"t{n}" for n in range(500)]

    found = await asyncio.gather(
        *[registered(each, *(names[::-1] if n % 2 else names)) for n, each in enumerate(databases)]
    )

    assert all(one == found[0] for one in found)
    assert len(set(found[0].values())) == 500
    for each in databases:
        await each.close()


async def test_an_error_text_that_databases_would_refuse_is_stored_nevertheless(database: Database) -> None:
    [(number, token)] = (await claimed(database, "one")).items()

    await mark(database, number, token, TriggerState.FAILED, error="bad \0 and \ud800 but ü")

    [record] = await database.read(lambda c: find_triggers(c, ["one"]))
    assert record.error == "bad \ufffd and ? but ü"


async def test_all_triggers_of_a_state_are_listed_page_by_page(database: Database) -> None:
    tokens = await claimed(database, *[f"t{number}" for number in range(7)])
    failed = list(tokens)[::2]
    for number in failed:
        await mark(database, number, tokens[number], TriggerState.FAILED)

    pages, after = [], None
    while True:
        page = await database.read(
            lambda c, after=after: list_triggers(c, states=[TriggerState.FAILED], after=after, limit=2)
        )
        pages.append([record.id for record in page.rows])
        after = page.next
        if after is None:
            break
    assert pages == [failed[:2], failed[2:]]
    assert len((await database.read(list_triggers)).rows) == 7
    assert await database.read(count_triggers) == {TriggerState.FAILED: 4, TriggerState.RUNNING: 3}


async def test_events_and_their_numbers_survive_a_changed_trigger(database: Database) -> None:
    [(number, token)] = (await claimed(database, "one")).items()
    events = [NewEvent(number, token, str(n), None, NOW_US) for n in range(3)]
    await database.write(lambda c: store_events(c, events))

    [record] = await register(database, TriggerSpec("one", "another.Class"))

    assert record.next_index == 3
    assert len((await database.read(lambda c: list_trigger_events(c, number))).rows) == 3
    assert await database.read(lambda c: count_events(c, number)) == 3


@pytest.mark.alone
@pytest.mark.long
async def test_ten_thousand_triggers_are_registered_and_claimed_within_two_seconds(database: Database) -> None:
    began = time.perf_counter()
    tokens = await claimed(database, *[f"trigger-{number}" for number in range(10_000)])

    assert len(tokens) == 10_000
    assert time.perf_counter() - began < 2
