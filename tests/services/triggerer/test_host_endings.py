"""What becomes of triggers, and of the events they are on, when something ends in the middle of them."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import DID
from tests.services.triggerer.hosts import spec
from tests.store.conftest import sqlite_url as url
from tests.store.helpers import all_events
from tests.until import until

from tidemill.core.triggers.event_plan import EventRefusal, EventRefused
from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.services.triggerer.hosting import host as host_module
from tidemill.services.triggerer.lists import host as list_host_module
from tidemill.services.triggerer.lists import trigger as trigger_run
from tidemill.store.records import TriggerSpec, TriggerState

__all__ = ["url"]

pytestmark = pytest.mark.usefixtures("fresh")


def moments(name: str) -> list[str]:
    return [did for did in DID[name] if did.startswith("moment")]


# -- the event that a trigger is on


async def test_an_event_that_a_stop_interrupts_is_not_acknowledged(hosts, upstream):
    host = await hosts.start(spec("shares", hosted.Sharing, upstream=upstream.name, stuck_on=2, deaf=True))
    for n in range(4):
        upstream.items.put_nowait(n)
    await until(lambda: host.report()[0].lanes and host.report()[0].lanes[0].head == 2)

    await hosts.stop(host)

    assert upstream.advanced == [(0, (1, 0, 0)), (1, (1, 0, 0)), (2, (0, 1, 0))]
    assert upstream.closed == 1


async def test_an_event_that_a_replacement_interrupts_is_not_acknowledged(hosts, upstream):
    stays = spec("stays", hosted.Sharing, upstream=upstream.name)
    host = await hosts.start(
        spec("shares", hosted.Sharing, upstream=upstream.name, stuck_on=0, deaf=True),
        stays,
        shared_stream_ack_timeout=0.5,
    )
    upstream.items.put_nowait(0)
    await until(lambda: host.report()[0].lanes and host.report()[0].lanes[0].holders == ("shares",))

    await host.reload([spec("shares", hosted.Sharing, upstream=upstream.name, modulo=2), stays])
    await until(lambda: upstream.advanced)

    assert upstream.advanced == [(0, (1, 1, 0))]


async def test_the_last_one_of_a_stream_that_is_replaced_acknowledges_nothing_and_keeps_the_stream(hosts, upstream):
    host = await hosts.start(spec("shares", hosted.Sharing, upstream=upstream.name, stuck_on=0, deaf=True))
    upstream.items.put_nowait(0)
    await until(lambda: host.report()[0].outstanding)

    await host.reload([spec("shares", hosted.Sharing, upstream=upstream.name, modulo=2)])
    await until(lambda: upstream.advanced)
    upstream.items.put_nowait(2)
    await until(lambda: len(upstream.advanced) == 2)

    assert upstream.advanced == [(0, (0, 1, 0)), (2, (1, 0, 0))]
    assert (hosted.DID[upstream.name], upstream.closed) == (["open"], 0)


async def test_an_event_that_a_removal_interrupts_holds_up_nobody(hosts, upstream):
    host = await hosts.start(
        spec("gone", hosted.Sharing, upstream=upstream.name, stuck_on=0, deaf=True),
        spec("stays", hosted.Sharing, upstream=upstream.name),
    )
    upstream.items.put_nowait(0)
    await until(lambda: host.report()[0].lanes and host.report()[0].lanes[0].holders == ("gone",))

    await host.reload([spec("stays", hosted.Sharing, upstream=upstream.name)])

    await until(lambda: upstream.advanced)
    assert upstream.advanced == [(0, (1, 0, 0))]


async def test_an_event_of_which_something_cannot_be_stored_is_not_acknowledged(hosts, upstream, monkeypatch):
    class Unstorable(hosted.Sharing):
        async def filter_shared_stream(self, shared_stream):
            async for n in shared_stream:
                yield hosted.TriggerEvent(object() if n == 1 else n)

    monkeypatch.setattr(hosted, "Unstorable", Unstorable, raising=False)
    await hosts.start(spec("bad", Unstorable, upstream=upstream.name), shared_stream_ack_timeout=0.5)
    for n in range(2):
        upstream.items.put_nowait(n)

    record = await hosts.state("bad", TriggerState.FAILED)

    assert "cannot be written as JSON" in (record.error or "")
    assert (1, (1, 0, 0)) not in upstream.advanced


# -- what a trigger goes on with


async def test_a_clock_goes_on_over_a_stop(hosts):
    later = spec("later", hosted.Timed, "on-failure", delta=5)
    host = await hosts.start(later)
    await until(lambda: moments("later"))
    await hosts.stop(host)

    await hosts.start(later)
    await until(lambda: len(moments("later")) == 2)

    first, second = moments("later")
    assert first == second


@pytest.mark.usefixtures("quick_restarts")
async def test_a_clock_goes_on_over_a_failure(hosts):
    await hosts.start(spec("later", hosted.Timed, "on-failure", then="raise"))
    await until(lambda: len(moments("later")) >= 3)

    assert len(set(moments("later"))) == 1


@pytest.mark.usefixtures("quick_restarts")
async def test_a_clock_starts_over_with_every_run_of_one_that_always_restarts(hosts):
    await hosts.start(spec("later", hosted.Timed, "always", then="end"))
    await until(lambda: len(moments("later")) >= 3)

    assert len(set(moments("later"))) == len(moments("later"))


async def test_a_clock_of_one_that_finished_starts_over_with_the_next_host(hosts):
    later = spec("later", hosted.Timed, "always", then="end")
    host = await hosts.start(later)
    await hosts.state("later", TriggerState.FINISHED)
    await hosts.stop(host)
    DID.clear()

    await hosts.start(later)
    await until(lambda: moments("later"))

    kept = json.loads((await hosts.record("later")).serialized or "")[1]
    assert json.loads(kept) == {"moment": int(moments("later")[0].split()[1]), "then": "end"}


async def test_a_trigger_that_cannot_be_created_from_its_serialized_form_is_created_as_listed(hosts, monkeypatch):
    class Moved(hosted.Counting):
        def serialize(self):
            return "tests.triggers.nowhere.Moved", {"count": 1}

    monkeypatch.setattr(hosted, "Moved", Moved, raising=False)
    moved = spec("moved", Moved, "on-failure", then="wait")
    host = await hosts.start(moved)
    await until(lambda: "yielded" in DID["moved"])
    await hosts.stop(host)

    await hosts.start(moved)

    await until(lambda: DID["moved"].count("yielded") == 2)


# -- lists


async def test_another_restart_alone_disturbs_nobody(hosts):
    host = await hosts.start(spec("one", hosted.Counting, "never", then="wait"))
    await until(lambda: "yielded" in DID["one"])

    changes = await host.reload([spec("one", hosted.Counting, "always", then="wait")])

    assert (changes.started, changes.removed, changes.replaced) == ([], [], [])
    assert DID["one"] == ["run", "yielded"]
    assert (await hosts.record("one")).spec.restart == "always"


@pytest.mark.usefixtures("quick_restarts")
async def test_another_restart_counts_from_the_next_end_on(hosts):
    host = await hosts.start(spec("one", hosted.Counting, "on-failure", then="raise"))
    await until(lambda: DID["one"].count("run") >= 2)

    await host.reload([spec("one", hosted.Counting, "never", then="raise")])

    await until(lambda: not host.running)
    await hosts.state("one", TriggerState.FAILED)


async def test_what_was_removed_while_no_host_ran_is_cancelled_by_the_next_one(hosts):
    host = await hosts.start(spec("gone", hosted.Counting, then="wait"), spec("stays", hosted.Counting, then="wait"))
    await until(lambda: "yielded" in DID["gone"])
    await hosts.stop(host)

    await hosts.start(spec("stays", hosted.Counting, then="wait"))

    record = await hosts.state("gone", TriggerState.CANCELLED)
    assert record.reason == "user"


async def test_triggers_of_another_list_are_left_alone(hosts):
    host = await hosts.start(spec("theirs", hosted.Counting, then="wait"), list_name="other")
    await until(lambda: "yielded" in DID["theirs"])
    await hosts.stop(host)

    await hosts.start(spec("ours", hosted.Counting, then="wait"))

    assert (await hosts.record("theirs")).reason == "shutdown"


# -- triggers that do not end, or end by themselves


async def test_a_trigger_is_told_why_it_is_cancelled(hosts):
    host = await hosts.start(spec("deaf", hosted.Deaf, times=1))
    await until(lambda: DID["deaf"])

    await host.reload([])

    assert DID["deaf"][1] == f"asked: {CancelReason.USER}"


async def test_one_that_ignores_its_cancellation_is_cancelled_again(hosts, monkeypatch):
    monkeypatch.setattr(host_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(host_module, "REPEAT_SECONDS", 0.02)
    monkeypatch.setattr(trigger_run, "END_SECONDS", 0.1)
    host = await hosts.start(spec("deaf", hosted.Deaf, times=3))
    await until(lambda: DID["deaf"])

    await asyncio.wait_for(host.reload([]), 30)

    assert DID["deaf"] == ["there"] + ["asked: user"] * 3 + ["on_kill", "cleanup"]
    assert (await hosts.record("deaf")).state is TriggerState.CANCELLED


async def test_a_cancellation_that_comes_from_within_is_a_failure(hosts):
    await hosts.start(spec("nested", hosted.Nested), spec("good", hosted.Counting))

    record = await hosts.state("nested", TriggerState.FAILED)

    assert "CancelledError" in (record.error or "")
    await hosts.state("good", TriggerState.FINISHED)


async def test_a_filter_that_raises_at_once_leaves_its_stream(hosts, upstream):
    host = await hosts.start(
        spec("bad", hosted.Badly, upstream=upstream.name), spec("good", hosted.Sharing, upstream=upstream.name)
    )
    upstream.items.put_nowait(0)

    record = await hosts.state("bad", TriggerState.FAILED)
    await until(lambda: upstream.advanced)

    assert "ValueError: no filter" in (record.error or "")
    assert host.report()[0].subscribers == ("good",)


async def test_an_error_in_the_list_s_own_words_names_the_trigger_that_has_it(hosts):
    await hosts.start(TriggerSpec("bad", "tests.services.triggerer.hosted.Counting", '{"cuont": 1}', "never"))

    record = await hosts.state("bad", TriggerState.FAILED)

    assert "cuont" in (record.error or "")


async def test_a_stop_does_not_interrupt_a_cleanup_that_has_begun(hosts):
    host = await hosts.start(spec("tidies", hosted.Tidying))
    await until(lambda: "cleaning" in DID["tidies"])
    # A stop does not wait for the store: the next host would run it again.
    await until(lambda: not host._runs or not host._runs["tidies"]._pending)

    await hosts.stop(host)

    assert DID["tidies"] == ["finishing", "cleaning", "clean"]
    assert (await hosts.record("tidies")).state is TriggerState.FINISHED


async def test_a_trigger_whose_last_event_is_refused_has_not_finished(hosts, monkeypatch):
    host = await hosts.start()
    add = host.events.add

    def refused(number, token, payload, identity, done):
        add(number, token, payload, identity, lambda _: done(EventRefused(EventRefusal.CONTENT, "too odd")))

    monkeypatch.setattr(host.events, "add", refused)
    await host.reload([spec("odd", hosted.Counting)])

    record = await hosts.state("odd", TriggerState.FAILED)

    assert "too odd" in (record.error or "")
    assert DID["odd"] == ["run", "yielded", "cleanup"]


async def test_a_trigger_that_waits_to_run_again_can_be_removed_and_is_cancelled(hosts):
    host = await hosts.start(spec("fails", hosted.Counting, "on-failure", then="raise"))
    await hosts.state("fails", TriggerState.FAILED)

    await asyncio.wait_for(host.reload([]), 30)

    record = await hosts.record("fails")
    assert (record.state, record.reason) == (TriggerState.CANCELLED, "user")
    assert not host.running


async def test_one_that_never_ends_is_left_behind_and_its_name_is_free(hosts, upstream, monkeypatch):
    monkeypatch.setattr(list_host_module, "END_SECONDS", 0.2)
    monkeypatch.setattr("tidemill.services.triggerer.hosting.host.END_SECONDS", 0.2)
    deaf = spec("deaf", hosted.Deaf, times=20)
    host = await hosts.start(deaf)
    await until(lambda: DID["deaf"])

    await asyncio.wait_for(host.reload([spec("deaf", hosted.Counting, then="wait")]), 30)

    await until(lambda: "yielded" in DID["deaf"])
    assert host.running == 1
    assert (await hosts.record("deaf")).state is TriggerState.RUNNING


@pytest.mark.parametrize("where", ["key", "producer", "filter", "open", "advance", "close", "on_kill", "cleanup"])
async def test_a_trigger_that_exits_python_anywhere_ends_nobody_but_itself(hosts, where):
    good = spec("good", hosted.Counting, count=3, then="wait")
    host = await hosts.start(good, spec("bad", hosted.ExitingSomewhere, where=where))
    if where in {"close", "on_kill", "cleanup"}:
        await host.reload([good])
    await until(lambda: where in DID["exits"])
    await until(lambda: host.running == 1 and not host.events.pending)

    assert await hosts.payloads("good") == [{"n": 0}, {"n": 1}, {"n": 2}]


async def test_a_trigger_whose_key_cannot_be_one_runs_by_itself(hosts):
    await hosts.start(spec("bad", hosted.Unhashable, where=""))

    await hosts.state("bad", TriggerState.FINISHED)

    assert await hosts.payloads("bad") == ["by itself"]


async def test_an_identity_of_a_subclass_of_str_is_stored_as_the_text_that_it_is(hosts):
    host = await hosts.start(spec("odd", hosted.OddIdentity), spec("good", hosted.Counting, count=3))
    await until(lambda: not host.events.pending)

    [odd] = [row for row in await all_events(hosts.database) if row.trigger_name == "odd"]

    assert odd.identity == "odd"
    assert await hosts.payloads("good") == [{"n": 0}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize("how", ["stopped", "removed"])
async def test_a_trigger_that_is_slow_to_end_after_a_timeout_does_not_run_again_once_it_is(how, hosts):
    host = await hosts.start(spec("deaf", hosted.Deaf, "always", times=2))
    await until(lambda: "there" in DID["deaf"])
    host._runs["deaf"].cancel(CancelReason.TIMEOUT)

    await until(lambda: DID["deaf"][-1] == "asked: timeout")

    async with asyncio.timeout(30):
        await (hosts.stop(host) if how == "stopped" else host.reload([]))

    assert DID["deaf"].count("there") == 1
    assert (await hosts.record("deaf")).state is TriggerState.CANCELLED
