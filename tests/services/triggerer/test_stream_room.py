"""Triggers of streams that wait at their `yield`."""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.services.triggerer.tasks.stream_room import StreamRoom
from tidemill.store.calls.trigger_calls import CountUndelivered


class Store:
    """Answers with the counts that a test sets."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.requests: list[CountUndelivered] = []

    async def call(self, request: Any) -> tuple[tuple[int, int], ...]:
        self.requests.append(request)
        return tuple((number, self.counts[number]) for number in request.triggers if number in self.counts)


async def test_one_call_counts_the_events_of_all_triggers_that_wait():
    store: Any = Store()
    room = StreamRoom(store, 10)
    await room.look()
    assert not store.requests
    store.counts = {1: 5, 2: 6}
    waits = {number: asyncio.create_task(room.wait(number)) for number in (1, 2, 3)}
    await asyncio.sleep(0)
    await room.look()
    await asyncio.sleep(0)
    assert [request.triggers for request in store.requests] == [(1, 2, 3)]
    # The third one has been removed; the store will refuse its next event.
    assert (waits[1].result(), waits[2].done(), waits[3].result()) == (5, False, 0)
    store.counts[2] = 0
    await room.look()
    assert await waits[2] == 0
    await room.look()
    assert len(store.requests) == 2


async def test_a_cancelled_trigger_does_not_wait_any_longer():
    store: Any = Store()
    room = StreamRoom(store, 10)
    waiting = asyncio.create_task(room.wait(1))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await room.look()
    assert waiting.cancelled()
    assert not store.requests
