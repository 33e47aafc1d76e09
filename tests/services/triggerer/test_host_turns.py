"""Start, reload and stop of a host at the same time: one after another, and a stop is not kept waiting."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import DID
from tests.services.triggerer.hosts import spec
from tests.store.conftest import sqlite_url as url
from tests.until import until

from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.services.triggerer.hosting import host as host_module
from tidemill.services.triggerer.lists import host as list_host_module
from tidemill.services.triggerer.lists.turns import HostStopsError

__all__ = ["url"]

pytestmark = pytest.mark.usefixtures("fresh")


class Door:
    """What stands between a host and its store."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.waiting = 0


@pytest.fixture
def door(hosts, monkeypatch) -> Door:
    """Let writes wait while it is closed."""
    made = Door()
    real = type(hosts.database).write

    async def write(self, work):
        made.waiting += 1
        try:
            await made.open.wait()
        finally:
            made.waiting -= 1
        return await real(self, work)

    monkeypatch.setattr(type(hosts.database), "write", write)
    return made


def ticks(count: int = 5, **kwargs):
    return spec("ticks", hosted.Counting, count=count, then="wait", **kwargs)


async def test_a_reload_during_the_start_waits_for_it_and_nothing_runs_twice(hosts, door):
    host = await hosts.make()
    door.open.clear()
    starting = asyncio.create_task(host.start([ticks()]))
    await until(lambda: door.waiting)
    reloading = asyncio.create_task(host.reload([ticks(), spec("more", hosted.Counting, then="wait")]))
    await asyncio.sleep(0.05)  # gives a reload that waits for nothing the time to do harm
    door.open.set()
    await starting
    changes = await reloading
    await until(lambda: "yielded" in DID["ticks"] and "yielded" in DID["more"])
    await until(lambda: not host.events.pending)

    assert (changes.started, changes.removed, changes.replaced) == (["more"], [], [])
    assert host.running == 2
    assert DID["ticks"] == ["run", "yielded"]
    assert await hosts.payloads("ticks") == [{"n": n} for n in range(5)]


async def test_reloads_at_the_same_time_come_one_after_another_and_the_last_one_counts(hosts):
    host = await hosts.start(ticks())
    lists = [[ticks(n), spec(f"also-{n}", hosted.Counting, then="wait")] for n in range(1, 5)]
    await asyncio.gather(*(host.reload(one) for one in lists))
    await until(lambda: DID["ticks"].count("yielded") == 5 and DID["also-4"])

    assert host.running == 2
    assert DID["ticks"].count("run") - DID["ticks"].count("cleanup") == 1
    assert DID["also-3"][-1] == "cleanup"


async def test_a_stop_interrupts_a_start_that_waits_for_the_store(hosts, door):
    host = await hosts.make()
    door.open.clear()
    starting = asyncio.create_task(host.start([ticks()]))
    await until(lambda: door.waiting)

    await asyncio.wait_for(host.stop(), 30)

    with pytest.raises(HostStopsError):
        await starting
    door.open.set()
    await asyncio.sleep(0.05)
    assert host.running == 0
    assert DID["ticks"] == []


async def test_a_stop_interrupts_a_reload_that_waits_for_the_store(hosts, door):
    host = await hosts.start(ticks())
    await until(lambda: "yielded" in DID["ticks"] and not host.events.pending)
    door.open.clear()
    reloading = asyncio.create_task(host.reload([ticks(), spec("more", hosted.Counting, then="wait")]))
    await until(lambda: door.waiting)

    stopping = asyncio.create_task(hosts.stop(host))
    with pytest.raises(HostStopsError):
        await asyncio.wait_for(reloading, 30)
    door.open.set()
    await asyncio.wait_for(stopping, 30)

    assert DID["ticks"] == ["run", "yielded", "cleanup"]
    assert DID["more"] == []


async def test_nothing_begins_while_a_host_stops_or_after_it(hosts):
    host = await hosts.start(spec("tidies", hosted.Tidying), ticks())
    await until(lambda: "cleaning" in DID["tidies"])
    stopping = asyncio.create_task(hosts.stop(host))
    await asyncio.sleep(0)
    reloading = asyncio.create_task(host.reload([ticks(), spec("more", hosted.Counting)]))
    with pytest.raises(HostStopsError):
        await reloading
    await stopping
    with pytest.raises(HostStopsError):
        await host.start([ticks()])
    assert DID["more"] == []
    assert DID["ticks"].count("run") == 1


async def test_a_second_stop_waits_for_the_first_and_does_nothing_else(hosts):
    host = await hosts.start(ticks())
    await until(lambda: "yielded" in DID["ticks"])
    assert await asyncio.gather(host.stop(), host.stop(), hosts.stop(host)) == [0, 0, None]
    assert DID["ticks"] == ["run", "yielded", "cleanup"]


async def test_a_stop_whose_caller_is_cancelled_continues(hosts):
    host = await hosts.start(ticks())
    await until(lambda: "yielded" in DID["ticks"])
    stopping = asyncio.create_task(host.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await hosts.stop(host)
    assert DID["ticks"] == ["run", "yielded", "cleanup"]


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144])
async def test_a_start_that_is_interrupted_anywhere_leaves_nothing_that_has_run_without_its_end(
    hosts, turns, monkeypatch, upstream
):
    monkeypatch.setattr(host_module, "_BURST", 2)
    host = await hosts.make()
    specs = [spec(f"s{n}", hosted.Sharing, upstream=upstream.name) for n in range(10)]
    specs += [spec(f"c{n}", hosted.Counting, then="wait") for n in range(10)]
    starting = asyncio.create_task(host.start(specs))
    for _ in range(turns):
        await asyncio.sleep(0)
    await asyncio.wait_for(hosts.stop(host), 30)
    with contextlib.suppress(HostStopsError, asyncio.CancelledError):
        await starting
    assert host.running == 0
    assert host.report() == []
    for n in range(10):
        assert DID[f"c{n}"].count("run") <= DID[f"c{n}"].count("cleanup")


@pytest.mark.parametrize("interrupted", ["start", "reload"])
async def test_a_caller_that_is_cancelled_takes_its_step_along(hosts, door, interrupted):
    host = await hosts.make()
    if interrupted == "reload":
        await host.start([])
    door.open.clear()
    step = asyncio.create_task(getattr(host, interrupted)([ticks()]))
    await until(lambda: door.waiting)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(step, 30)
    door.open.set()
    await host.reload([ticks()])
    await until(lambda: "yielded" in DID["ticks"])
    assert DID["ticks"] == ["run", "yielded"]


async def test_a_host_that_stops_pulls_no_producer_again_however_its_store_does(hosts, upstream, monkeypatch):
    monkeypatch.setattr(host_module, "DRAIN_SECONDS", 1.0)
    host = await hosts.start(spec("deaf", hosted.Sharing, upstream=upstream.name, stuck_on=0, deaf=True))
    upstream.items.put_nowait(0)
    await until(lambda: host.report()[0].outstanding)
    stopping = asyncio.create_task(hosts.stop(host))
    await asyncio.sleep(0.01)
    host.host._on_standing(ProducerStanding.DOWN)
    host.host._on_standing(ProducerStanding.OPEN)
    pulled = len(upstream.pulled)
    for n in range(1, 20):
        upstream.items.put_nowait(n)
    await asyncio.sleep(0.2)  # what must not happen has this long to happen
    # One may have been on its way before the stop.
    assert len(upstream.pulled) <= pulled + 1
    await stopping


async def test_a_host_is_idle_when_its_last_trigger_is_removed_and_left_behind(hosts, monkeypatch):
    monkeypatch.setattr(list_host_module, "END_SECONDS", 0.05)
    monkeypatch.setattr("tidemill.services.triggerer.hosting.host.END_SECONDS", 0.05)
    host = await hosts.start(spec("deaf", hosted.Deaf, times=1))
    await until(lambda: "there" in DID["deaf"])
    blocked = asyncio.Event()
    monkeypatch.setattr(hosted.Deaf, "cleanup", lambda self: blocked.wait())
    idle = asyncio.create_task(host.wait_idle())
    await asyncio.sleep(0)
    await host.reload([])
    async with asyncio.timeout(30):
        await idle
    blocked.set()
