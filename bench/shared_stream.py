"""What a delivery through a shared stream costs, against a bare `async for`: ratios, all in one run.

The floor is `async for` over a list through one async generator that wraps each item in a slotted class; the filters
of the subscribers yield the same class. Bars, per delivery, with 1, 10, 100 and 1,000 subscribers: at most 2, 1.2, 1.2
and 1.5 times the floor in fast mode; 8, 3, 2.5 and 2.5 times in ack mode with bind and confirm of every event; and 1.5
times a slotted class for `TriggerEvent(x)`. CPU time; the median of several rounds, the floor measured beside each.

    python bench/shared_stream.py [--deliveries 200000] [--rounds 5] [--profile ack:1]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence

from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.shared_stream import AdvanceItem, SharedStreamManager, SharedStreamProducer

BURST = 250
SUBSCRIBERS = (1, 10, 100, 1000)
BARS = {"fast": (2.0, 1.2, 1.2, 1.5), "ack": (8.0, 3.0, 2.5, 2.5)}
KEY = ("bench", "stream")


class Run:
    """What a run and its source share: set when all events have been read."""

    finished: asyncio.Event


class Wrapped:
    """The benchmark's own event class."""

    __slots__ = ("payload",)

    def __init__(self, payload: object) -> None:
        self.payload = payload


async def wrap(items: Sequence[int]) -> AsyncIterator[Wrapped]:
    for item in items:
        yield Wrapped(item)


async def floor(deliveries: int) -> float:
    """Return CPU seconds per item."""
    items = list(range(deliveries))
    began = time.process_time()
    async for _ in wrap(items):
        pass
    return (time.process_time() - began) / deliveries


async def finish() -> None:
    """Let everybody read what is left, and wait for ever."""
    for _ in range(10):
        await asyncio.sleep(0)
    Run.finished.set()
    await asyncio.Event().wait()


async def bursts(count: int) -> AsyncIterator[int]:
    """Yield numbers as a client does that is given messages in batches."""
    for number in range(count):
        yield number
        if number % BURST == BURST - 1:
            await asyncio.sleep(0)
    await finish()


class Producer(SharedStreamProducer):
    def __init__(self, count: int) -> None:
        self.count = count
        self.advanced = 0

    async def open_stream(self) -> AsyncIterator[tuple[int, int]]:
        for number in range(self.count):
            yield number, number
            if number % BURST == BURST - 1:
                await asyncio.sleep(0)
        await finish()

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        assert batch[0].outcome.is_clean
        self.advanced += len(batch)


class FastTrigger(BaseEventTrigger):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def serialize(self):
        return "bench.Trigger", {"count": self.count}

    async def run(self):
        yield TriggerEvent(None)

    @classmethod
    def open_shared_stream(cls, kwargs):
        return bursts(kwargs["count"])

    async def filter_shared_stream(self, shared_stream):
        async for raw in shared_stream:
            yield Wrapped(raw)


class AckTrigger(FastTrigger):
    producer: Producer

    @classmethod
    def create_shared_stream_producer(cls, kwargs):
        cls.producer = Producer(kwargs["count"])
        return cls.producer


async def drive_fast(manager: SharedStreamManager, number: int, trigger: FastTrigger) -> None:
    stream = manager.subscribe(trigger_id=number, trigger=trigger, key=KEY)
    async for _ in trigger.filter_shared_stream(stream):
        pass


async def drive_ack(manager: SharedStreamManager, number: int, trigger: FastTrigger) -> None:
    bind, confirm = manager.bind_pending_event, manager.confirm_persisted
    stream = manager.subscribe(trigger_id=number, trigger=trigger, key=KEY)
    async for _ in trigger.filter_shared_stream(stream):
        confirm((bind(trigger_id=number, key=KEY),))


async def shared(mode: str, subscribers: int, deliveries: int) -> float:
    """Return CPU seconds per delivery, from the first subscription until the last event was read and advanced."""
    count = max(2 * BURST, deliveries // subscribers)
    manager = SharedStreamManager(max_outstanding=1_000_000)
    cls, drive = (FastTrigger, drive_fast) if mode == "fast" else (AckTrigger, drive_ack)
    Run.finished = asyncio.Event()
    began = time.process_time()
    tasks = [asyncio.create_task(drive(manager, number, cls(count))) for number in range(subscribers)]
    await Run.finished.wait()
    spent = time.process_time() - began
    if mode == "ack":
        assert AckTrigger.producer.advanced == count, AckTrigger.producer.advanced
    await asyncio.gather(*(manager.unsubscribe(number, KEY) for number in range(subscribers)))
    await asyncio.gather(*tasks)
    return spent / (count * subscribers)


def construction(count: int) -> tuple[float, float]:
    """Return seconds per `TriggerEvent(x)` and per instance of a slotted class."""

    def spent(cls: type) -> float:
        began = time.process_time()
        for number in range(count):
            cls(number)
        return (time.process_time() - began) / count

    return min(spent(TriggerEvent) for _ in range(5)), min(spent(Wrapped) for _ in range(5))


def main() -> int:
    """Measure all shapes, print a JSON line each; the exit code says whether all bars hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deliveries", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", metavar="MODE:SUBSCRIBERS")
    args = parser.parse_args()
    if args.profile:
        mode, _, subscribers = args.profile.partition(":")
        with cProfile.Profile() as profile:
            asyncio.run(shared(mode, int(subscribers), args.deliveries))
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return 0
    good = True
    for mode, bars in BARS.items():
        for subscribers, limit in zip(SUBSCRIBERS, bars, strict=True):
            pairs = [
                (asyncio.run(shared(mode, subscribers, args.deliveries)), asyncio.run(floor(args.deliveries)))
                for _ in range(args.rounds)
            ]
            ratio = statistics.median(one / base for one, base in pairs)
            good &= ratio <= limit
            row = {
                "bench": "shared_stream",
                "mode": mode,
                "subscribers": subscribers,
                "ns_per_delivery": round(statistics.median(one for one, _ in pairs) * 1e9),
                "floor_ns": round(statistics.median(base for _, base in pairs) * 1e9),
                "ratio": round(ratio, 2),
                "bar": limit,
                "holds": ratio <= limit,
            }
            print(json.dumps(row), flush=True)
    event, slotted = construction(args.deliveries)
    good &= event <= 1.5 * slotted
    row = {"bench": "trigger_event", "ns": round(event * 1e9), "slotted_ns": round(slotted * 1e9), "bar": 1.5}
    print(json.dumps({**row, "ratio": round(event / slotted, 2), "holds": event <= 1.5 * slotted}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
