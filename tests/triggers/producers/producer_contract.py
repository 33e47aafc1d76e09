"""What every stream, and every producer that is told outcomes, has to do, written once: a class for each inherits it.

A `Place` is an upstream of one kind: it can be fed and looked at from outside, and streams over it can be opened.
"""

from __future__ import annotations

import abc
import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from tidemill.triggers.shared_stream import AdvanceItem, AdvanceOutcome, SharedStreamProducer, SubscriberObserver

CLEAN = AdvanceOutcome(1, 0, 0)
FAILED = AdvanceOutcome(1, 1, 0)
REJECTED = AdvanceOutcome(1, 1, 1)
DEADLINE_SECONDS = 30.0


class Pulled:
    """A stream that is pulled by a task of its own, as a manager does it."""

    def __init__(self, source: AsyncIterator[Any], close: Callable[[], Awaitable[None]]) -> None:
        self.source = source
        self.given: list[Any] = []
        self._taken = 0
        self._close = close
        self._news = asyncio.Event()
        self.task = asyncio.ensure_future(self._pull())

    async def _pull(self) -> None:
        async for item in self.source:
            self.given.append(item)
            self._news.set()

    async def take(self, count: int, seconds: float = DEADLINE_SECONDS) -> list[Any]:
        """Wait for the next `count` of what is yielded."""
        async with asyncio.timeout(seconds):
            while len(self.given) < self._taken + count:
                if self.task.done():
                    self.task.result()
                self._news.clear()
                news = asyncio.ensure_future(self._news.wait())
                await asyncio.wait([news, self.task], return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
        taken = self.given[self._taken : self._taken + count]
        self._taken += count
        return taken

    @property
    def untaken(self) -> int:
        return len(self.given) - self._taken

    async def cancel(self) -> None:
        """End the pull wherever it is."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def close(self) -> None:
        await self.cancel()
        await self.source.aclose()  # type: ignore[attr-defined]
        await self._close()


class Place(abc.ABC):
    """An upstream."""

    @abc.abstractmethod
    async def put(self, lane: str, *values: str) -> None:
        """Let values arrive, in this order, in one of two lanes, 'a' and 'b'; all values are different."""

    @abc.abstractmethod
    def open(self) -> Pulled:
        """Open a stream over it."""

    @abc.abstractmethod
    def value(self, item: Any) -> str:
        """Return the value of something that a stream yielded."""

    async def deal_with(self, stream: Pulled, count: int) -> list[str]:
        """Take so many, and be done with each at once: some upstreams give the next of a lane only then."""
        return [self.value(item) for item in await stream.take(count)]


class AckPlace(Place):
    """An upstream that is told what was dealt with."""

    @abc.abstractmethod
    def make(self) -> SharedStreamProducer:
        """Return a producer that has not been opened."""

    @abc.abstractmethod
    async def unfinished(self) -> int:
        """Return how many values the upstream would give again to somebody else."""

    @abc.abstractmethod
    async def refused(self) -> list[str]:
        """Return the values where rejected ones go, once there are some."""

    def open(self) -> Pulled:
        self.producer = producer = self.make()
        if isinstance(producer, SubscriberObserver):
            producer.subscriber_joined("t")
        return Pulled(producer.open_stream(), producer.aclose)

    async def advance(self, *items: Any, outcome: AdvanceOutcome = CLEAN) -> None:
        for _, payload in items:
            await self.producer.advance([AdvanceItem(payload, outcome)])

    async def deal_with(self, stream: Pulled, count: int) -> list[str]:
        values = []
        for _ in range(count):
            (item,) = await stream.take(1)
            values.append(self.value(item))
            await self.advance(item)
        return values

    async def wait_for_unfinished(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while await self.unfinished() != count:
                await asyncio.sleep(0.02)


class StreamContract:
    """Inherit, and give a fixture `place`."""

    async def test_every_value_comes_once_and_in_the_order_of_its_lane(self, place: Place) -> None:
        first = [f"{n:03}" for n in range(12)]
        second = [f"{n:03}" for n in range(100, 112)]
        await place.put("a", *first[:5])
        stream = place.open()
        await place.put("b", *second)
        await place.put("a", *first[5:])
        values = await place.deal_with(stream, 24)
        assert [value for value in values if value < "100"] == first
        assert [value for value in values if value >= "100"] == second
        await stream.close()

    async def test_closing_is_possible_twice_and_leaves_nothing_running(self, place: Place) -> None:
        tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
        await place.put("a", "1")
        stream = place.open()
        await stream.take(1)
        await stream.close()
        await stream.close()
        assert asyncio.all_tasks() == tasks
        for thread in set(threading.enumerate()) - threads:
            if not thread.name.startswith("asyncio_"):  # the loop's own, which stay for the next call
                await asyncio.to_thread(thread.join, DEADLINE_SECONDS)
                assert not thread.is_alive(), thread

    async def test_a_pull_can_be_cancelled_before_anything_is_there(self, place: Place) -> None:
        tasks = asyncio.all_tasks()
        stream = place.open()
        await asyncio.sleep(0)
        await stream.cancel()
        await stream.close()
        assert asyncio.all_tasks() == tasks

    async def test_a_pull_that_is_cancelled_while_it_waits_loses_nothing(self, place: Place) -> None:
        await place.put("a", "1")
        stream = place.open()
        await stream.take(1)
        await stream.cancel()
        await stream.close()
        await place.put("a", "2")
        again = place.open()
        assert await place.deal_with(again, 2) == ["1", "2"]
        await again.close()


class ProducerContract(StreamContract):
    """Inherit, and give a fixture `place` that is an `AckPlace`."""

    async def test_closing_is_possible_without_opening(self, place: AckPlace) -> None:
        producer = place.make()
        await producer.aclose()
        await producer.aclose()

    async def test_nothing_is_advanced_before_it_is_clean(self, place: AckPlace) -> None:
        await place.put("a", "1", "2")
        await place.put("b", "3")
        stream = place.open()
        items = await stream.take(3)
        assert await place.unfinished() == 3
        (other,) = [item for item in items if place.value(item) == "3"]
        await place.advance(other)
        await place.wait_for_unfinished(2)
        await place.advance(*[item for item in items if item is not other])
        await place.wait_for_unfinished(0)
        await stream.close()

    async def test_a_failed_event_is_redelivered_and_no_other(self, place: AckPlace) -> None:
        await place.put("a", "1", "2", "3")
        stream = place.open()
        good, bad, last = await stream.take(3)
        await place.advance(good)
        await place.advance(bad, outcome=FAILED)
        await place.advance(last)
        (again,) = await stream.take(1)
        assert place.value(again) == "2"
        assert await place.unfinished() >= 1
        await place.advance(again)
        await place.wait_for_unfinished(0)
        assert stream.untaken == 0
        await stream.close()

    async def test_a_rejected_event_is_dead_lettered_and_then_resolved(self, place: AckPlace) -> None:
        await place.put("a", "1", "2")
        stream = place.open()
        bad, good = await stream.take(2)
        await place.advance(bad, outcome=REJECTED)
        await place.advance(good)
        await place.wait_for_unfinished(0)
        assert await place.refused() == ["1"]
        await stream.close()

    async def test_outstanding_messages_are_redelivered_after_the_end_and_clean_ones_are_not(
        self, place: AckPlace
    ) -> None:
        await place.put("a", "1", "2", "3")
        stream = place.open()
        items = await stream.take(3)
        await place.advance(items[0])
        await stream.close()
        assert await place.unfinished() == 2
        again = place.open()
        assert sorted(await place.deal_with(again, 2)) == ["2", "3"]
        await again.close()

    async def test_a_stream_that_is_not_pulled_any_more_can_still_be_advanced(self, place: AckPlace) -> None:
        await place.put("a", "1")
        stream = place.open()
        (item,) = await stream.take(1)
        await stream.cancel()
        await place.advance(item)
        await stream.close()
        assert await place.unfinished() == 0
