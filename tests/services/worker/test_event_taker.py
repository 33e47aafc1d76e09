"""The streams that attempts of a worker wait for are asked for together, and left when the worker drains."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tidemill.services.worker.event_taker import EventTaker
from tidemill.services.worker.worker import Worker
from tidemill.store.calls.stream_calls import StreamBatch, StreamEvent, StreamWant, TakeEvents


class Calls:
    """A store with events of streams, by trigger."""

    def __init__(self) -> None:
        self.events: dict[int, tuple[StreamEvent, ...]] = {}
        self.calls: list[TakeEvents] = []

    async def call(self, request: Any) -> Any:
        self.calls.append(request)
        return tuple(StreamBatch(want.trigger, self.events.get(want.trigger, ())) for want in request.wants)


async def test_one_call_asks_for_the_streams_of_all_attempts() -> None:
    calls: Any = Calls()
    taker = EventTaker(calls)
    waiting = [asyncio.ensure_future(taker.take(StreamWant(number, 0), 60.0)) for number in (1, 2)]
    await asyncio.sleep(0.01)
    calls.events[2] = (StreamEvent(0, "1", None, 1),)
    taker.note_ring()
    assert (await waiting[1]).events == calls.events[2]
    assert not waiting[0].done()
    assert [want.trigger for want in calls.calls[-1].wants] == [1, 2]
    waiting[0].cancel()


async def test_an_attempt_gets_no_event_from_a_worker_that_drains_although_its_stream_has_some() -> None:
    calls: Any = Calls()
    taker = EventTaker(calls)
    waiting = asyncio.ensure_future(taker.take(StreamWant(1, 0), 60.0))
    await asyncio.sleep(0.01)
    taker.leave()
    calls.events[1] = (StreamEvent(0, "1", None, 1),)
    async with asyncio.timeout(10):
        assert await waiting == StreamBatch(1)
        assert await taker.take(StreamWant(1, 0), 60.0) == StreamBatch(1)


async def test_a_worker_that_drains_gives_no_events_that_are_asked_for_without_a_wait() -> None:
    calls: Any = Calls()
    calls.events[1] = (StreamEvent(0, "1", None, 1),)
    taker = EventTaker(calls)
    secrets = SimpleNamespace(add=lambda file, found: None)
    worker: Any = SimpleNamespace(_events=taker, _calls=calls, _secrets=secrets)
    call = TakeEvents((StreamWant(1, 0),))
    assert await Worker.call_store(worker, "file.py", call) == (StreamBatch(1, calls.events[1]),)
    taker.leave()
    assert await Worker.call_store(worker, "file.py", call) == (StreamBatch(1),)
