"""A host in this process, over real stores, with triggers that do all they should not."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import DID
from tests.services.triggerer.hosts import Hosts, spec
from tests.store.helpers import all_events, claim, new_session
from tests.store.server import PostgresServer
from tests.until import until

from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.services.triggerer.hosting import host as host_module
from tidemill.services.triggerer.lists import trigger as trigger_run
from tidemill.store.engines.opening import open_store
from tidemill.store.records import TriggerSpec, TriggerState


async def test_events_are_stored_in_order_and_the_trigger_is_finished_once_they_are(hosts):
    await hosts.start(spec("counts", hosted.Counting, count=500))
    record = await hosts.state("counts", TriggerState.FINISHED)
    assert record.next_index == 500
    assert await hosts.payloads() == [{"n": n} for n in range(500)]
    assert DID["counts"] == ["run", "yielded", "cleanup"]


async def test_a_finished_trigger_is_not_run_again_unless_always(hosts):
    specs = [spec("once", hosted.Counting, "on-failure"), spec("ever", hosted.Counting, "always")]
    first = await hosts.start(*specs)
    await hosts.state("once", TriggerState.FINISHED)
    await until(lambda: "yielded" in DID["ever"])
    await hosts.stop(first)
    DID.clear()
    await hosts.start(*specs)
    await until(lambda: "yielded" in DID["ever"])
    assert DID["once"] == []


async def test_triggers_running_when_the_host_stopped_run_again_and_continue_their_numbers(hosts):
    waits = spec("waits", hosted.Counting, count=2, then="wait")
    first = await hosts.start(waits)
    await until(lambda: "yielded" in DID["waits"])
    await hosts.stop(first)
    record = await hosts.record("waits")
    assert (record.state, record.reason) == (TriggerState.CANCELLED, "shutdown")
    assert DID["waits"] == ["run", "yielded", "cleanup"]  # and no on_kill
    await hosts.start(waits)
    await until(lambda: DID["waits"].count("yielded") == 2)
    await until(lambda: not hosts.running[0].events.pending)
    assert [row.sequence_index for row in await all_events(hosts.database)] == [0, 1, 2, 3]


async def test_an_identity_is_stored_once_also_over_restarts(hosts):
    waits = spec("waits", hosted.Counting, count=3, then="wait", identity=True)
    for _ in range(2):
        host = await hosts.start(waits)
        await until(lambda: "yielded" in DID["waits"])
        await hosts.stop(host)
        DID.clear()
    assert await hosts.payloads() == [{"n": 0}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (hosted.Refusing, "rejected its kwargs: not today"),
        (hosted.Raising, "OSError: the upstream is gone"),
        (hosted.Silent, "ended without having fired an event"),
        (hosted.Undescribable, "cannot be written as JSON"),
        (hosted.WrongEvent, "a trigger must yield TriggerEvents, not dict"),
        (hosted.WrongIdentity, "the identity of an event must be a string or None, not int"),
        (hosted.Exiting, "SystemExit: 3"),
    ],
)
async def test_a_trigger_that_fails_is_named_with_its_traceback_and_the_others_go_on(hosts, cls, said):
    host = await hosts.start(spec("bad", cls), spec("good", hosted.Counting, count=3, then="wait"))
    record = await hosts.state("bad", TriggerState.FAILED)
    assert said in (record.error or "")
    assert "hunter2secret" not in (record.error or "")
    await until(lambda: not host.events.pending)
    assert await hosts.payloads("good") == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert host.running == 1
    if cls is not hosted.Refusing:
        assert DID["bad"] == ["cleanup"]


@pytest.mark.parametrize(
    "classpath", ["tests.triggers.nowhere.Class", "tests.services.triggerer.hosted.Nothing", "json.JSONEncoder"]
)
async def test_a_class_that_does_not_exist_or_is_not_a_trigger_is_that_trigger_s_failure(hosts, classpath):
    await hosts.start(TriggerSpec("bad", classpath, "{}", "never"))
    record = await hosts.state("bad", TriggerState.FAILED)
    assert classpath in (record.error or "")


@pytest.mark.usefixtures("quick_restarts")
async def test_a_failed_trigger_runs_again_and_its_error_is_kept_meanwhile(hosts):
    await hosts.start(spec("fails", hosted.Counting, "on-failure", count=1, then="raise"))
    await until(lambda: DID["fails"].count("run") >= 3)
    async with asyncio.timeout(30):
        # What runs report is written beside them, not before they begin again.
        while "RuntimeError: as it was told" not in ((await hosts.record("fails")).error or ""):
            await asyncio.sleep(0.01)
        while len(await hosts.payloads()) < 2:
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("quick_restarts")
async def test_one_that_always_restarts_starts_from_its_beginning(hosts):
    await hosts.start(spec("ever", hosted.Counting, "always", count=1))
    await until(lambda: DID["ever"].count("cleanup") >= 3)


async def test_a_trigger_that_never_restarts_is_not_run_after_its_failure_by_the_next_host_either(hosts):
    bad = spec("bad", hosted.Raising, "never")
    first = await hosts.start(bad)
    await hosts.state("bad", TriggerState.FAILED)
    await hosts.stop(first)
    DID.clear()
    host = await hosts.start(bad)
    assert host.running == 0
    assert DID["bad"] == []


async def test_a_trigger_that_serialized_itself_with_an_absolute_moment_continues_with_it(hosts):
    later = spec("later", hosted.Delayed, "on-failure", delta=5)
    first = await hosts.start(later)
    await hosts.stop(first)
    await hosts.start(later)
    assert DID["moments"] == ["1005", "1005"]
    assert json.loads((await hosts.record("later")).serialized or "") == [
        "tests.services.triggerer.hosted.Delayed",
        '{"moment":1005}',
    ]


async def test_other_arguments_start_from_the_beginning(hosts):
    first = await hosts.start(spec("later", hosted.Delayed, delta=5))
    await hosts.stop(first)
    await hosts.start(spec("later", hosted.Delayed, delta=7))
    assert DID["moments"] == ["1005", "1007"]


# -- reload and cancellation


async def test_a_reload_ends_what_is_gone_replaces_what_differs_and_leaves_the_rest_alone(hosts):
    host = await hosts.start(
        spec("gone", hosted.Counting, then="wait"),
        spec("other", hosted.Counting, then="wait", count=1),
        spec("same", hosted.Counting, then="wait"),
    )
    await until(lambda: all("yielded" in DID[name] for name in ("gone", "other", "same")))
    changes = await host.reload(
        [
            spec("other", hosted.Counting, then="wait", count=2),
            spec("same", hosted.Counting, then="wait"),
            spec("new", hosted.Counting, then="wait"),
        ]
    )
    await until(lambda: "yielded" in DID["new"] and DID["other"].count("yielded") == 2)
    assert (changes.started, changes.removed, changes.replaced) == (["new"], ["gone"], ["other"])
    record = await hosts.record("gone")
    assert (record.state, record.reason) == (TriggerState.CANCELLED, "user")
    assert DID["gone"] == ["run", "yielded", "on_kill", "cleanup"]
    assert DID["same"] == ["run", "yielded"]
    assert host.running == 3


async def test_an_entry_that_comes_back_runs_again(hosts):
    one = spec("one", hosted.Counting, then="wait")
    host = await hosts.start(one)
    await until(lambda: "yielded" in DID["one"])
    await host.reload([])
    await host.reload([one])
    await until(lambda: DID["one"].count("yielded") == 2)


async def test_a_kill_that_hangs_and_a_cleanup_that_raises_hold_up_nobody_for_long(hosts, monkeypatch):
    monkeypatch.setattr(trigger_run, "END_SECONDS", 0.05)
    host = await hosts.start(spec("stubborn", hosted.StubbornKill, then="wait"))
    await until(lambda: "yielded" in DID["stubborn"])
    await asyncio.wait_for(host.reload([]), 30)
    assert DID["stubborn"][-2:] == ["on_kill", "cleanup"]
    assert (await hosts.record("stubborn")).reason == "user"


async def test_a_trigger_claimed_by_another_host_ends_here_and_reports_nothing_to_the_store(hosts, database, upstream):
    host = await hosts.start(spec("moved", hosted.Sharing, upstream=upstream.name))
    record = await hosts.record("moved")
    await claim(database, record.id, session=await new_session(database, host="another"))
    upstream.items.put_nowait(0)
    await until(lambda: not host.running)
    record = await hosts.record("moved")
    assert (record.state, record.session, record.next_index) == (TriggerState.RUNNING, "another, process 17", 0)
    assert upstream.advanced == [(0, (0, 1, 0))]  # it was not stored, so it was not acknowledged


# -- shared streams


async def test_all_triggers_of_a_key_subscribe_before_its_first_poll_and_it_advances_what_is_stored(hosts, upstream):
    for n in range(30):
        upstream.items.put_nowait(n)
    await hosts.start(*(spec(f"s{m}", hosted.Sharing, upstream=upstream.name, modulo=m) for m in (1, 2, 3)))
    await until(lambda: len(upstream.advanced) == 30)
    assert upstream.advanced == [(n, (3, 0, 0)) for n in range(30)]
    assert DID[upstream.name] == ["open"]
    assert await hosts.payloads("s2") == list(range(0, 30, 2))
    assert await hosts.payloads("s3") == list(range(0, 30, 3))


async def test_nothing_is_advanced_that_is_not_stored_and_deadlines_stand_still_while_the_store_is_away(
    hosts, upstream, monkeypatch
):
    host = await hosts.start(
        spec("shares", hosted.Sharing, upstream=upstream.name),
        spec("alone", hosted.Counting, count=3, then="wait"),
        shared_stream_ack_timeout=0.5,
    )
    await until(lambda: not host.events.pending)
    gone = asyncio.Event()
    real = type(hosts.database).write

    async def write(self, work):
        await gone.wait()
        return await real(self, work)

    monkeypatch.setattr(type(hosts.database), "write", write)
    upstream.items.put_nowait(0)
    await until(lambda: host.events.standing is ProducerStanding.DOWN)
    upstream.items.put_nowait(1)
    upstream.items.put_nowait(2)
    held_at = host.now()
    await asyncio.sleep(1.2)  # twice the ack timeout, and more: the outage itself is what is tested
    assert host.now() == held_at
    assert upstream.advanced == []
    assert len(upstream.pulled) <= 2  # the one that waits, and the one that was on its way
    gone.set()
    await until(lambda: len(upstream.advanced) == 3)
    assert upstream.advanced == [(n, (1, 0, 0)) for n in range(3)]
    assert await hosts.payloads("shares") == [0, 1, 2]
    assert host.manager.list_forced() == {}


@pytest.mark.usefixtures("quick_restarts")
async def test_a_subscriber_that_times_out_fails_alone_and_takes_part_again(hosts, upstream):
    await hosts.start(
        spec("slow", hosted.Sharing, "on-failure", upstream=upstream.name, stuck_on=1, deaf=True),
        spec("quick", hosted.Sharing, upstream=upstream.name),
        shared_stream_ack_timeout=0.3,
    )
    for n in range(3):
        upstream.items.put_nowait(n)
    await until(lambda: len(upstream.advanced) == 3)
    assert upstream.advanced[0] == (0, (2, 0, 0))
    assert [outcome for _, outcome in upstream.advanced[1:]] == [(1, 1, 0), (1, 1, 0)]
    assert await hosts.payloads("quick") == [0, 1, 2]


async def test_a_trigger_that_was_forced_to_fail_and_does_not_end_is_cancelled_for_its_timeout(
    hosts, upstream, monkeypatch
):
    monkeypatch.setattr(host_module, "FORCED_SECONDS", 0.2)
    monkeypatch.setattr(host_module, "LOOK_SECONDS", 0.05)
    await hosts.start(
        spec("deaf", hosted.Sharing, upstream=upstream.name, stuck_on=0, deaf=True), shared_stream_ack_timeout=0.1
    )
    upstream.items.put_nowait(0)
    record = await hosts.state("deaf", TriggerState.FAILED)
    assert record.reason == CancelReason.TIMEOUT.value
    assert "did not end" in (record.error or "")


@pytest.mark.usefixtures("quick_restarts")
async def test_a_trigger_on_an_event_when_its_stream_fails_is_cancelled_if_it_does_not_end_and_runs_again(
    hosts, upstream, monkeypatch
):
    monkeypatch.setattr(host_module, "FORCED_SECONDS", 0.2)
    monkeypatch.setattr(host_module, "LOOK_SECONDS", 0.05)
    broken = asyncio.Event()
    opened = upstream.open_stream

    async def breaking():
        if not broken.is_set():
            yield 0, 0
            await broken.wait()
            raise OSError("the upstream is gone")
        async for item in opened():
            yield item

    monkeypatch.setattr(upstream, "open_stream", breaking)
    host = await hosts.start(
        spec("deaf", hosted.Sharing, "on-failure", upstream=upstream.name, stuck_on=0, deaf=True),
    )
    await until(lambda: host.report()[0].outstanding)
    broken.set()
    upstream.items.put_nowait(1)

    await until(lambda: (1, (1, 0, 0)) in upstream.advanced)

    assert host.manager.list_forced() == {}


async def test_a_stop_finishes_what_is_fanned_out_advances_it_and_closes_the_stream(hosts, upstream):
    host = await hosts.start(spec("shares", hosted.Sharing, upstream=upstream.name))
    for n in range(200):
        upstream.items.put_nowait(n)
    await until(lambda: upstream.pulled)
    await hosts.stop(host)
    assert [item for item, _ in upstream.advanced] == upstream.pulled
    assert all(outcome == (1, 0, 0) for _, outcome in upstream.advanced)
    assert DID[upstream.name] == ["open", "close"]
    assert await hosts.payloads() == upstream.pulled


async def test_the_report_names_the_subscriber_that_holds_the_head_of_a_lane(hosts, upstream):
    host = await hosts.start(
        spec("deaf", hosted.Sharing, upstream=upstream.name, stuck_on=0, deaf=True),
        spec("quick", hosted.Sharing, upstream=upstream.name),
    )
    upstream.items.put_nowait(0)
    await until(lambda: host.report()[0].outstanding == 1)
    await until(lambda: host.report()[0].lanes[0].holders == ("deaf",))
    [stream] = host.report()
    assert stream.key == upstream.name
    assert set(stream.subscribers) == {"deaf", "quick"}


# -- real outages


async def test_while_postgresql_is_down_nothing_is_advanced_failed_or_lost(own_postgres: PostgresServer, upstream):
    database = await open_store(await own_postgres.new_database())
    hosts = Hosts(database)
    host = await hosts.start(spec("shares", hosted.Sharing, upstream=upstream.name), shared_stream_ack_timeout=1.0)
    upstream.items.put_nowait(0)
    await until(lambda: len(upstream.advanced) == 1)
    own_postgres.stop()
    for n in range(1, 50):
        upstream.items.put_nowait(n)
    await until(lambda: host.events.standing is ProducerStanding.DOWN)
    await asyncio.sleep(2.0)  # twice the ack timeout: the outage itself is what is tested
    assert len(upstream.advanced) == 1
    own_postgres.start()
    await until(lambda: len(upstream.advanced) == 50)
    assert all(outcome == (1, 0, 0) for _, outcome in upstream.advanced)
    assert await hosts.payloads() == list(range(50))
    await hosts.stop(host)
    await database.close()
