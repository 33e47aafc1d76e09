"""A triggerer gives triggers up while an event is being stored: it acknowledges nothing before the store's answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import DID, UPSTREAMS, Upstream
from tests.services.triggerer.task_store import Deferred, TaskStore
from tests.services.triggerer.test_task_host import Triggerers
from tests.until import until

from tidemill.core.errors import RemoteError
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.triggerer.hosting import host as host_module
from tidemill.store.calls.call import CallRefusedError
from tidemill.store.calls.trigger_calls import StoreEvents
from tidemill.triggers.stream_api import AdvanceItem, AdvanceOutcome


class Slow(TaskStore):
    """A store whose transactions with events take until they are let go.

    Attributes:
        stored: Whether the transaction is carried out at once, and only its answer waits.
        waiting: The number of transactions that wait.
        go: Set to let them go.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stored, self.waiting, self.go = False, 0, asyncio.Event()

    async def call(self, request: Any) -> Any:
        if not isinstance(request, StoreEvents) or self.go.is_set():
            return await super().call(request)
        answer = await self._try(request) if self.stored else None
        self.waiting += 1
        await self.go.wait()
        if not self.stored:
            answer = await self._try(request)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _try(self, request: Any) -> Any:
        try:
            return await super().call(request)
        except (CallRefusedError, RemoteError) as error:
            return error


class Broker(Upstream):
    """Delivers again what was not acknowledged, at once or to the next reader."""

    async def open_stream(self) -> AsyncIterator[tuple[Any, Any]]:
        for item in self.pulled:
            if item not in self.list_acknowledged():
                self.items.put_nowait(item)
        self.pulled = []
        async for item in super().open_stream():
            yield item

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        await super().advance(batch)
        for item, outcome in batch:
            if not outcome.is_clean:
                self.items.put_nowait(item)

    def list_acknowledged(self) -> list[Any]:
        """Return the events that were acknowledged, which are not delivered again."""
        return [item for item, outcome in self.advanced if AdvanceOutcome(*outcome).is_clean]


@pytest.fixture
async def triggerers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Triggerers]:
    for name in ("DRAIN_SECONDS", "STORE_SECONDS"):
        monkeypatch.setattr(host_module, name, 0.5)
    DID.clear()
    UPSTREAMS.clear()
    made = Triggerers(tmp_path)
    made.store = Slow()
    yield made
    made.store.go.set()
    for host in list(made.running):
        await made.stop(host)
    DID.clear()


def lose(store: TaskStore, one: Deferred) -> None:
    """Have an observer end the session."""
    assert one.session is not None
    store.lose(one.session)


def move(store: TaskStore, one: Deferred) -> None:
    """Have the trigger given to another session, as if its own had handed it over."""
    one.session, one.token = None, one.token + 1
    store.ring()


@pytest.mark.parametrize("give_up", [lose, move])
@pytest.mark.parametrize("stored", [True, False], ids=["event first", "hand-over first"])
async def test_an_event_of_a_shared_stream_in_a_hand_over_is_acknowledged_after_the_store_has_answered_and_stored_once(
    triggerers: Triggerers, give_up: Any, stored: bool
) -> None:
    store = triggerers.store
    assert isinstance(store, Slow)
    store.stored = stored
    broker = UPSTREAMS["up"] = Broker("up")
    one = store.defer(hosted.Sharing, "up", upstream="up")
    triggerers.start(lease=ServiceLease(1.0))
    await until(lambda: "open" in DID["up"])
    broker.items.put_nowait(7)
    await until(lambda: store.waiting)
    assert one.resumed is stored

    give_up(store, one)
    # Long enough for the triggerer to notice, and to begin another session or to claim the trigger again.
    count = len(store.requests)
    await until(lambda: len(store.requests) > count + 8)
    assert broker.list_acknowledged() == []
    store.go.set()

    await until(lambda: one.resumed)
    assert one.payload == 7
    assert one.claims == (1 if stored else 2), "its successor fires the event again if need be"
    assert set(broker.list_acknowledged()) <= {7}


async def test_an_event_of_its_own_upstream_that_is_refused_in_a_hand_over_is_fired_again_by_the_successor(
    triggerers: Triggerers,
) -> None:
    store = triggerers.store
    assert isinstance(store, Slow)
    one = store.defer(hosted.Counting, count=1, then="wait")
    triggerers.start(lease=ServiceLease(1.0))
    await until(lambda: store.waiting)

    lose(store, one)
    store.go.set()

    await until(lambda: one.resumed)
    assert one.claims == 2
    await until(lambda: DID[one.claim.id].count("cleanup") == 2)
    assert "on_kill" not in DID[one.claim.id]
