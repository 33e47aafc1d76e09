"""Shared streams for tests: sources that are fed by hand, triggers of one line, and a loop that is stepped."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.shared_stream import AdvanceItem, SharedStreamManager, SharedStreamProducer

KEY = ("queue", "q")


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Log:
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda event, **details: self.lines.append((level, event, details))

    def said(self, level: str) -> list[str]:
        return [event for found, event, _ in self.lines if found == level]


async def turns(count: int = 20) -> None:
    """Let the loop turn: a few turns are all that anything here may take."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any]) -> None:
    """Wait until something is so, with a deadline in turns of the loop."""
    for _ in range(300):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come about")


class Upstream:
    """What a poll reads: events put by hand, or the exception that ends it; it ends when told to."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.opened = 0
        self.closed = 0
        self.pulled = 0

    def put(self, *events: Any) -> None:
        for event in events:
            self.items.put_nowait(event)

    async def stream(self) -> AsyncIterator[Any]:
        self.opened += 1
        try:
            while True:
                self.pulled += 1
                item = await self.items.get()
                if isinstance(item, Exception):
                    raise item
                if item is StopAsyncIteration:
                    return
                yield item
        finally:
            self.closed += 1


class Producer(SharedStreamProducer):
    """Yields what the upstream is fed, with `payload of EVENT`; keeps what it was advanced over."""

    def __init__(self, upstream: Upstream, lane: Callable[[Any], Any] | None = None) -> None:
        self.upstream = upstream
        self.batches: list[list[AdvanceItem]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.error: BaseException | None = None
        self.closed = 0
        self.close_error: Exception | None = None
        if lane is not None:
            self.get_advance_lane = lane  # type: ignore[method-assign]

    async def open_stream(self) -> AsyncIterator[tuple[Any, Any]]:
        async for event in self.upstream.stream():
            yield event, f"payload of {event}"

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        assert batch
        assert not self.running
        assert not self.closed
        self.running += 1
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            self.batches.append(list(batch))
        finally:
            self.running -= 1

    async def aclose(self) -> None:
        assert not self.running
        self.closed += 1
        if self.close_error is not None:
            raise self.close_error

    @property
    def advanced(self) -> list[tuple[Any, tuple[int, int, int]]]:
        return [(item.broker_payload.removeprefix("payload of "), tuple(item.outcome)) for item in self.items]

    @property
    def items(self) -> list[AdvanceItem]:
        return list(itertools.chain.from_iterable(self.batches))


class Attending(Producer):
    """Writes down what it is told of who is there."""

    def __init__(self, upstream: Upstream) -> None:
        super().__init__(upstream)
        self.told: list[tuple[Any, ...]] = []

    def subscriber_joined(self, trigger_id: Any) -> None:
        self.told.append(("joined", trigger_id))

    def subscriber_left(self, trigger_id: Any) -> None:
        self.told.append(("left", trigger_id))

    def subscriber_gone(self, trigger_id: Any) -> None:
        self.told.append(("gone", trigger_id))

    def event_failed(self, broker_payload: Any, failures: Any, unread: Any) -> None:
        self.told.append(("failed", broker_payload, dict(failures), tuple(unread)))


class Trigger(BaseEventTrigger):
    """Fires each raw event that starts with its prefix."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "no.such.module.Trigger", {"prefix": self.prefix}

    def shared_stream_key(self) -> Any:
        return KEY

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent("ran by itself")

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for raw in shared_stream:
            if raw.startswith(self.prefix):
                yield TriggerEvent(raw)


def fast_class(upstream: Upstream) -> type[Trigger]:
    """A trigger class whose stream is only read."""

    class Fast(Trigger):
        kwargs: list[Any] = []

        @classmethod
        def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[Any]:
            cls.kwargs.append(kwargs)
            return upstream.stream()

    return Fast


def ack_class(make: Callable[[], SharedStreamProducer]) -> type[Trigger]:
    """A trigger class whose stream is acknowledged."""

    class Ack(Trigger):
        kwargs: list[Any] = []

        @classmethod
        def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
            cls.kwargs.append(kwargs)
            return make()

    return Ack


class Scene:
    """A manager, an upstream, and subscribers by number."""

    def __init__(self, *, ack: bool = True, lane: Callable[[Any], Any] | None = None, **settings: Any) -> None:
        self.log = Log()
        self.clock = Clock()
        self.upstream = Upstream()
        self.producer = Producer(self.upstream, lane)
        self.made = 0
        self.trigger_class = ack_class(self._make) if ack else fast_class(self.upstream)
        self.manager = SharedStreamManager(log=self.log, now=self.clock, **settings)

    def _make(self) -> Producer:
        self.made += 1
        return self.producer

    def join(self, trigger_id: int, key: Any = KEY) -> AsyncIterator[Any]:
        return self.manager.subscribe(trigger_id=trigger_id, trigger=self.trigger_class(), key=key)

    async def leave(self, *trigger_ids: int) -> None:
        for trigger_id in trigger_ids:
            await self.manager.unsubscribe(trigger_id, KEY)

    def bind(self, trigger_id: int, key: Any = KEY) -> int | None:
        return self.manager.bind_pending_event(trigger_id=trigger_id, key=key)

    def confirm(self, seqs: Iterable[int]) -> None:
        self.manager.confirm_persisted(seqs)

    def put(self, *events: Any) -> None:
        self.upstream.put(*events)

    @property
    def polls(self) -> bool:
        return any(report.key == KEY for report in self.manager.report())


async def pull(stream: AsyncIterator[Any], count: int = 1) -> list[Any]:
    """Request so many events, each as soon as the one before has come."""
    return [await asyncio.wait_for(stream.__anext__(), 30) for _ in range(count)]


class Request:
    """A request for the next event that goes on while the test does other things."""

    def __init__(self, stream: AsyncIterator[Any]) -> None:
        self.task = asyncio.ensure_future(stream.__anext__())

    @property
    def waits(self) -> bool:
        return not self.task.done()

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
