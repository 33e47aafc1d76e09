"""What becomes of raw events when the runs of triggers end, restart, or are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import DID
from tests.services.triggerer.hosts import spec
from tests.until import until

from tidemill.store.records import TriggerState
from tidemill.triggers.base import TriggerEvent

pytestmark = pytest.mark.usefixtures("quick_restarts")


class Faulty(hosted.Sharing):
    """Raises on an event, the first so many times."""

    def __init__(self, upstream: str, on: int, times: int = 1) -> None:
        super().__init__(upstream)
        self.on, self.times = on, times

    def serialize(self) -> tuple[str, dict[str, Any]]:
        kwargs = {"upstream": self.upstream, "on": self.on, "times": self.times}
        return f"tests.services.triggerer.hosted.{type(self).__name__}", kwargs

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for n in shared_stream:
            if n == self.on and DID[self.trigger_id].count("raised") < self.times:
                DID[self.trigger_id].append("raised")
                raise ValueError(f"not {n}")
            yield TriggerEvent(n)


class OneByOne(hosted.Sharing):
    """Takes one event a run."""

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for n in shared_stream:
            DID[self.trigger_id].append("run")
            if n % self.modulo == 0:
                yield TriggerEvent(n)
            return


class Odd(hosted.Sharing):
    """Fires what JSON cannot hold, or an identity that no store takes, for one event."""

    def __init__(self, upstream: str, identity: str | None = None) -> None:
        super().__init__(upstream)
        self.identity = identity

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.hosted.Odd", {"upstream": self.upstream, "identity": self.identity}

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for n in shared_stream:
            odd = n == 1
            yield TriggerEvent(
                "\ud800" if odd and self.identity is None else n,
                identity=self.identity * 2000 if odd and self.identity else None,
            )


@pytest.fixture(autouse=True)
def classes(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (Faulty, OneByOne, Odd):
        monkeypatch.setattr(hosted, cls.__name__, cls, raising=False)


def put(upstream: hosted.Upstream, *items: int) -> None:
    for item in items:
        upstream.items.put_nowait(item)


async def test_a_filter_that_raises_fails_its_event_alone_and_gets_all_others(hosts, upstream):
    await hosts.start(
        spec("a", Faulty, "on-failure", upstream=upstream.name, on=3), spec("b", hosted.Sharing, upstream=upstream.name)
    )
    put(upstream, 1, 2, 3, 4, 5, 6)
    await until(lambda: len(upstream.advanced) == 6)
    assert upstream.advanced == [(n, (1, 1, 0) if n == 3 else (2, 0, 0)) for n in range(1, 7)]
    assert await hosts.payloads("a") == [1, 2, 4, 5, 6]
    assert (DID[upstream.name], upstream.closed) == (["open"], 0)


async def test_a_filter_that_raises_and_is_not_restarted_is_released_from_all_it_holds(hosts, upstream):
    await hosts.start(
        spec("a", Faulty, "never", upstream=upstream.name, on=2), spec("b", hosted.Sharing, upstream=upstream.name)
    )
    put(upstream, 1, 2, 3)
    await until(lambda: len(upstream.advanced) == 3)
    assert upstream.advanced == [(1, (2, 0, 0)), (2, (1, 0, 0)), (3, (1, 0, 0))]


async def test_the_last_trigger_of_a_stream_that_is_gone_for_good_acknowledges_nothing_it_held(hosts, upstream):
    await hosts.start(spec("a", Faulty, "never", upstream=upstream.name, on=2))
    put(upstream, 1, 2, 3)
    await until(lambda: upstream.closed)
    assert [item for item, outcome in upstream.advanced if outcome[0]] == [1]


@pytest.mark.parametrize("modulo", [1, 3])
async def test_a_trigger_that_handles_one_event_a_run_begins_again_at_once_and_misses_none(hosts, upstream, modulo):
    hosts.backoff = slow = type(hosts).backoff.__class__(5.0, 30.0)
    await hosts.start(
        spec("one", OneByOne, "always", upstream=upstream.name, modulo=modulo),
        spec("quiet", hosted.Sharing, upstream=upstream.name, modulo=1000),
    )
    put(upstream, *range(100))
    await until(lambda: len(upstream.advanced) == 100)
    assert upstream.advanced == [(n, (2, 0, 0)) for n in range(100)]
    assert await hosts.payloads("one") == list(range(0, 100, modulo))
    assert len(DID["one"]) == 100
    assert hosts.backoff is slow


@pytest.mark.parametrize("identity", [None, "x"])
async def test_an_event_that_cannot_be_encoded_fails_at_once(hosts, upstream, identity):
    await hosts.start(spec("odd", Odd, "on-failure", upstream=upstream.name, identity=identity))
    put(upstream, 0, 1, 2)
    await until(lambda: len(upstream.advanced) == 3)
    assert upstream.advanced == [(0, (1, 0, 0)), (1, (0, 1, 0)), (2, (1, 0, 0))]
    assert await hosts.payloads("odd") == [0, 2]


async def test_a_replacement_during_an_event_fails_it_at_once_and_the_next_one_goes_on_behind_it(hosts, upstream):
    host = await hosts.start(spec("a", hosted.Sharing, upstream=upstream.name, stuck_on=1, deaf=True))
    put(upstream, 0, 1, 2, 3)
    await until(lambda: host.report()[0].lanes and host.report()[0].lanes[0].head == 1)
    await host.reload([spec("a", hosted.Sharing, upstream=upstream.name, modulo=2)])
    await until(lambda: len(upstream.advanced) == 4)
    assert upstream.advanced == [(0, (1, 0, 0)), (1, (0, 1, 0)), (2, (1, 0, 0)), (3, (1, 0, 0))]
    assert await hosts.payloads("a") == [0, 2]
    assert (DID[upstream.name], upstream.closed) == (["open"], 0)


async def test_a_replacement_that_shares_another_stream_holds_up_nobody_in_the_old_one(hosts, upstream):
    other = hosted.UPSTREAMS["other"] = hosted.Upstream("other")
    stays = spec("stays", hosted.Sharing, upstream=upstream.name)
    host = await hosts.start(spec("moves", hosted.Sharing, upstream=upstream.name, stuck_on=0, deaf=True), stays)
    put(upstream, 0, 1)
    await until(lambda: host.report()[0].outstanding == 2)
    await host.reload([spec("moves", hosted.Sharing, upstream="other"), stays])
    put(other, 7)
    await until(lambda: len(upstream.advanced) == 2 and other.advanced)
    assert upstream.advanced == [(0, (1, 1, 0)), (1, (1, 0, 0))]
    assert other.advanced == [(7, (1, 0, 0))]


async def test_a_stop_during_an_event_advances_what_is_stored_by_then(hosts, upstream):
    host = await hosts.start(
        spec("a", hosted.Sharing, upstream=upstream.name, stuck_on=2, deaf=True),
        spec("b", hosted.Sharing, upstream=upstream.name),
    )
    put(upstream, 0, 1, 2, 3)
    await until(lambda: host.report()[0].lanes and host.report()[0].lanes[0].head == 2)
    await hosts.stop(host)
    assert upstream.advanced == [(0, (2, 0, 0)), (1, (2, 0, 0)), (2, (1, 1, 0))]


async def test_a_run_that_its_stream_failed_begins_again_without_a_gap(hosts, upstream):
    host = await hosts.start(
        spec("a", Faulty, "on-failure", upstream=upstream.name, on=-1),
        spec("b", Faulty, "on-failure", upstream=upstream.name, on=-1),
    )
    put(upstream, 0)
    await until(lambda: len(upstream.advanced) == 1)
    host.manager._groups[upstream.name]._life._polling.cancel()
    await until(lambda: upstream.closed)
    put(upstream, 1, 2)
    await until(lambda: len(upstream.advanced) == 3)
    assert upstream.advanced == [(n, (2, 0, 0)) for n in range(3)]
    assert await hosts.payloads("a") == await hosts.payloads("b") == [0, 1, 2]


async def test_a_trigger_that_raises_while_it_is_made_again_keeps_its_seat_until_it_can(hosts, upstream, monkeypatch):
    made: list[int] = []

    class Fragile(Faulty):
        def __init__(self, upstream: str, on: int, times: int = 1) -> None:
            super().__init__(upstream, on, times)
            made.append(1)
            if len(made) == 2:
                raise OSError("not now")

    monkeypatch.setattr(hosted, "Fragile", Fragile, raising=False)
    await hosts.start(
        spec("a", Fragile, "on-failure", upstream=upstream.name, on=0),
        spec("b", hosted.Sharing, upstream=upstream.name),
    )
    put(upstream, 0, 1, 2)
    await until(lambda: len(upstream.advanced) == 3)
    assert upstream.advanced == [(0, (1, 1, 0)), (1, (2, 0, 0)), (2, (2, 0, 0))]
    assert len(made) == 3


async def test_a_subscriber_that_waits_for_an_event_is_not_held_up_by_a_helper_task_of_another_one(
    hosts, upstream, monkeypatch
):
    class Helped(hosted.Sharing):
        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
            from tidemill.triggers.shared_stream import reject_shared_stream_event

            go = asyncio.Event()

            async def helper() -> None:
                await go.wait()
                reject_shared_stream_event()

            async for n in shared_stream:
                if n == 0:
                    task = asyncio.create_task(helper())
                else:
                    go.set()
                    await task
                yield TriggerEvent(n)

    monkeypatch.setattr(hosted, "Helped", Helped, raising=False)
    await hosts.start(spec("helped", Helped, upstream=upstream.name))
    put(upstream, 0, 1, 2)
    await until(lambda: len(upstream.advanced) == 3)
    assert upstream.advanced == [(n, (1, 0, 0)) for n in range(3)]
    record = await hosts.record("helped")
    assert record.state is TriggerState.RUNNING
