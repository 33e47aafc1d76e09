"""A trigger host that a test scripts: what its loop knows, without a store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from tests.web.scripted_pipeline import SCRIPT, SECRET

from tidemill.config.settings import Settings
from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.core.triggers.lifecycle import EndVerdict, Next
from tidemill.services.triggerer.lists.reporting.monitoring import HostMonitor
from tidemill.store.records import TriggerRecord, TriggerSpec, TriggerState
from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.shared_stream import AdvanceItem, SharedStreamManager, SharedStreamProducer

T = TypeVar("T")
LIST = "orders"


class Feed(SharedStreamProducer):
    """Yields what it is fed: pairs of a lane and a number."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()

    async def open_stream(self) -> AsyncIterator[tuple[Any, Any]]:
        while True:
            item = await self.items.get()
            yield item, item

    def get_advance_lane(self, broker_payload: Any) -> Any:
        return broker_payload[0]

    async def advance(self, batch: Any) -> None:
        assert all(isinstance(item, AdvanceItem) for item in batch)


class Reading(BaseEventTrigger):
    """Takes part in a stream."""

    feed: Feed

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "no.such.Trigger", {}

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return cls.feed

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(1)


class ScriptedHost:
    """A host on a loop of its own thread.

    Attributes:
        monitor: What is known of it.
        manager: Its streams.
        standing: That of its store.
    """

    def __init__(self, folder: Path | str = "", **debug: Any) -> None:
        self.settings = Settings.model_validate(
            {
                "debug": {"enabled": True, "port": 0, "db_dir": str(folder), **debug},
                "store": {"url": f"postgresql://app:{SECRET}@db/orders"},
                "triggerer": {"list_name": LIST},
            }
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.standing = ProducerStanding.OPEN
        self._readers: list[Any] = []
        self.call(self._set_up)

    def call(self, function: Callable[[], T]) -> T:
        """Return what a function returns on the loop of the host."""

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(30)

    def _set_up(self) -> None:
        self.monitor = HostMonitor(self.settings.metrics, "worker-1", LIST)
        self.manager = SharedStreamManager(counts=self.monitor.book.counts, now=self.loop.time)
        host = SimpleNamespace(manager=self.manager, events=self, running=3, now=self.loop.time, report=list)
        replica = SimpleNamespace(host=host, report=lambda: {"waits_for": None})
        self.monitor.replica = replica  # type: ignore[assignment]
        self.monitor.book.is_started = True

    def list_triggers(self, *names: str) -> None:
        """Have triggers in the list; all of them run but the last, which failed."""
        book = self.monitor.book.triggers
        specs = [TriggerSpec(name, f"module.{SCRIPT}", "{}", "on-failure") for name in names]
        rest: list[Any] = [None] * (len(TriggerRecord.__dataclass_fields__) - 3)

        def note() -> None:
            book.note_listed(
                TriggerRecord(number, spec, TriggerState.RUNNING, *rest) for number, spec in enumerate(specs)
            )
            for spec in specs:
                book.note_started(SimpleNamespace(spec=spec, fired=2))
            last = book.entries[names[-1]].run
            assert last is not None
            error = f"Traceback\nRuntimeError: {SCRIPT}"
            book.note_ended(last, Next(EndVerdict.FAILED, 20.0), None, error)

        self.call(note)

    def open_stream(self, key: Any, subscribers: list[str], *events: tuple[Any, int]) -> None:
        """Have a stream whose subscribers are all on its first event, if it has any."""
        feed = Feed()
        cls = type("Reading", (Reading,), {"feed": feed})

        async def begin() -> None:
            ends = [self.manager.subscribe(trigger_id=name, trigger=cls(), key=key) for name in subscribers]
            self._readers += ends
            for event in events:
                feed.items.put_nowait(event)
            for end in ends if events else ():
                await asyncio.wait_for(anext(end), 30)
            while self.manager.streams[key].group.outstanding < len(events):  # type: ignore[attr-defined]
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(begin(), self.loop).result(60)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.manager.stop_all(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()


@contextmanager
def scripted_host(folder: Path | str = "", **debug: Any) -> Iterator[ScriptedHost]:
    """Yield a host with three triggers and two streams."""
    host = ScriptedHost(folder, **debug)
    try:
        host.list_triggers("audit", "invoices", f"shipping {SCRIPT}")
        host.open_stream(("kafka", "orders", SCRIPT), ["audit", "invoices"], (("orders", 0), 1), (("orders", 1), 2))
        host.open_stream("queue", ["shipping"], ("group", 1))
        yield host
    finally:
        host.close()
