"""A shared stream of very many events with a subscriber that lags as far as it may, and what memory it takes.

Of three subscribers two keep up; one lets its queue fill to nine tenths, reads all of it, and so on. In ack mode every
event is bound and confirmed by all three, so nothing of it may stay behind once all have moved past it.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.shared_stream import AdvanceItem, SharedStreamManager, SharedStreamProducer

KEY = ("endless",)
QUEUE = 1000
LAG = 900
BURST = 100
PAYLOAD_BYTES = 200


class Run:
    """What the source, the subscribers and the measurement share.

    Args:
        count: How many events.
        probes: How many times to look at the memory, evenly spread.
    """

    def __init__(self, count: int, probes: int) -> None:
        self.count = count
        self.every = count // probes
        self.kib: list[int] = []
        self.advanced = 0
        self.full = asyncio.Event()

    async def numbers(self) -> AsyncIterator[tuple[bytes, int]]:
        for number in range(self.count):
            yield number.to_bytes(8, "big") + os.urandom(8) * (PAYLOAD_BYTES // 8), number
            if number % LAG == LAG - 1:
                self.full.set()
            if number % BURST == BURST - 1:
                await asyncio.sleep(0)
            if number % self.every == self.every - 1:
                gc.collect()
                self.kib.append(resident_kib())
        self.full.set()
        await asyncio.Event().wait()


def resident_kib() -> int:
    """Return what of this process is in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


class Producer(SharedStreamProducer):
    """Two lanes, so that lanes come and go."""

    def __init__(self, run: Run) -> None:
        self.run = run

    async def open_stream(self) -> AsyncIterator[tuple[bytes, int]]:
        async for event in self.run.numbers():
            yield event

    def get_advance_lane(self, broker_payload: int) -> int:
        return broker_payload // BURST % 2

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        assert all(outcome == (3, 0, 0) for _, outcome in batch)
        self.run.advanced += len(batch)


class Reading(BaseEventTrigger):
    """Subscribes; it only says how its stream is read."""

    run_of: Run

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "endless.Reading", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise AssertionError("it shares a stream")
        yield

    @classmethod
    async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[bytes]:
        async for event, _ in cls.run_of.numbers():
            yield event


class Acking(Reading):
    """The same with acknowledgement."""

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return Producer(cls.run_of)


async def subscriber(manager: SharedStreamManager, trigger: Reading, number: int, run: Run) -> int:
    """Read everything; number 0 lags. Return how many events there were."""
    stream = manager.subscribe(trigger_id=number, trigger=trigger, key=KEY)
    bind, confirm = manager.bind_pending_event, manager.confirm_persisted
    waiting: list[int] = []
    read = 0
    while read < run.count:
        if number == 0 and read % LAG == 0:
            await run.full.wait()
            run.full.clear()
        event = await stream.__anext__()
        assert int.from_bytes(event[:8], "big") == read
        read += 1
        seq = bind(trigger_id=number, key=KEY)
        if seq is not None:
            waiting.append(seq)
            if len(waiting) >= BURST:
                # A store confirms later, and in whatever order.
                confirm(reversed(waiting))
                waiting.clear()
    confirm(waiting)
    await manager.unsubscribe(number, KEY)
    return read


async def endless(mode: str, count: int, probes: int = 10) -> list[int]:
    """Run it; return the resident memory in KiB, as often as asked.

    Args:
        mode: `ack` or `fast`.
        count: How many events.
        probes: How many times to look.
    """
    run = Run(count, probes)
    cls = type("Once", (Acking if mode == "ack" else Reading,), {"run_of": run})
    manager = SharedStreamManager(max_subscriber_queue=QUEUE)
    tasks = [asyncio.create_task(subscriber(manager, cls(), number, run)) for number in range(3)]
    assert await asyncio.gather(*tasks) == [count] * 3
    assert run.advanced == (count if mode == "ack" else 0)
    return run.kib
