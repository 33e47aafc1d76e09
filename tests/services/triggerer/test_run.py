"""The run of one trigger by itself: what is asked of it, or told to it, at the wrong moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import DID
from tests.services.triggerer.hosts import spec
from tests.until import until

from tidemill.core.retry import Backoff
from tidemill.core.triggers.event_plan import EventRefusal, EventRefused, EventStored, StoreOutcome
from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.services.triggerer.hosting.run_services import ListTriggerServices
from tidemill.services.triggerer.hosting.state_change import StateChange
from tidemill.services.triggerer.hosting.trigger_book import TriggerBook
from tidemill.services.triggerer.lists.trigger import ListTrigger
from tidemill.store.records import TriggerSpec, TriggerState
from tidemill.triggers.shared_stream import SharedStreamManager

pytestmark = pytest.mark.usefixtures("fresh")


class Host:
    """A host of one trigger, whose store answers by hand."""

    standing = ProducerStanding.OPEN

    def __init__(self) -> None:
        self.manager = SharedStreamManager(seat_seconds=60.0)
        self.states: list[StateChange] = []
        self.unanswered: list[Callable[[StoreOutcome], None]] = []

    def add(
        self, trigger_id: int, token: int, payload: str, identity: str | None, done: Callable[[StoreOutcome], None]
    ) -> None:
        self.unanswered.append(done)

    async def wait_open(self) -> None:
        return

    async def keep_serialized(self, serialized: Mapping[int, str]) -> None:
        return

    def note(self, trigger: str, outcome: StoreOutcome, identity: str | None) -> None:
        return

    def run(self, listed: TriggerSpec) -> tuple[ListTrigger, asyncio.Task[None]]:
        put, keep = self.states.append, self.keep_serialized
        services = ListTriggerServices(
            self.manager, self, lambda: False, self.note, lambda: None, put, TriggerBook(), keep
        )
        run = ListTrigger(services, listed, 1, 1, backoff=Backoff(0.001, 0.002))
        run.create()
        run.route()
        return run, run.start()


async def end(run: ListTrigger, task: asyncio.Task[None]) -> None:
    run.cancel(CancelReason.USER)
    async with asyncio.timeout(30):
        await task


async def test_one_that_is_cancelled_before_its_first_step_is_cleaned_up_all_the_same() -> None:
    host = Host()
    run, task = host.run(spec("counts", hosted.Counting, then="wait"))
    await end(run, task)
    assert DID["counts"] == ["on_kill", "cleanup"]
    assert [(change.state, change.reason) for change in host.states] == [(TriggerState.CANCELLED, "user")]


@pytest.mark.parametrize("reason", [CancelReason.USER, CancelReason.SHUTDOWN, CancelReason.HAND_OVER])
async def test_one_that_ends_for_its_timeout_does_not_run_again_if_it_is_cancelled_meanwhile(
    monkeypatch: pytest.MonkeyPatch, reason: CancelReason
) -> None:
    cleaning, cleaned = asyncio.Event(), asyncio.Event()

    class Slow(hosted.Counting):
        async def cleanup(self) -> None:
            cleaning.set()
            await cleaned.wait()

    monkeypatch.setattr(hosted, "Slow", Slow, raising=False)
    host = Host()
    run, task = host.run(spec("slow", Slow, "on-failure", then="wait"))
    await until(lambda: DID["slow"] == ["run", "yielded"])
    run.cancel(CancelReason.TIMEOUT)
    await asyncio.wait_for(cleaning.wait(), 30)
    run.cancel(reason)
    cleaned.set()
    await until(lambda: task.done() or DID["slow"].count("run") > 1)
    assert DID["slow"].count("run") == 1
    # What becomes of one that is handed over, its new host says.
    assert [change.reason for change in host.states[-1:]] == (
        [] if reason is CancelReason.HAND_OVER else [reason.value]
    )
    await end(run, task)


async def test_a_refused_event_is_not_blamed_on_the_raw_event_that_its_trigger_is_on_by_then(
    upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blamed: list[tuple[Any, dict[Any, str], tuple[Any, ...]]] = []
    told = {
        "subscriber_joined": lambda name: None,
        "subscriber_left": lambda name: None,
        "subscriber_gone": lambda name: None,
        "event_failed": lambda item, failures, unread: blamed.append((item, dict(failures), tuple(unread))),
    }
    for name, method in told.items():
        monkeypatch.setattr(upstream, name, method, raising=False)
    host = Host()
    run, task = host.run(spec("shares", hosted.Sharing, "on-failure", upstream=upstream.name, stuck_on=1))
    upstream.items.put_nowait(0)
    upstream.items.put_nowait(1)
    await until(lambda: len(upstream.pulled) == 2 and len(host.unanswered) == 1)
    await until(lambda: host.manager.report()[0].outstanding == 2)
    host.unanswered[0](EventRefused(EventRefusal.CONTENT, "too large"))
    await until(lambda: len(blamed) == 2)
    (first, failures, unread), second = blamed
    assert (first, [*failures], unread) == (0, ["shares"], ())
    assert second == (1, {}, ("shares",))
    await end(run, task)
    await host.manager.stop_all()


async def test_one_that_is_stopped_while_its_last_event_is_refused_says_that_it_was_stopped() -> None:
    host = Host()
    run, task = host.run(spec("counts", hosted.Counting))
    await until(lambda: host.unanswered and DID["counts"][-1:] == ["cleanup"])
    await asyncio.sleep(0)
    host.unanswered[0](EventRefused(EventRefusal.CONTENT, "too large"))
    run.cancel(CancelReason.SHUTDOWN)
    async with asyncio.timeout(30):
        await task
    assert [(change.state, change.reason) for change in host.states] == [(TriggerState.CANCELLED, "shutdown")]


async def test_one_that_finishes_reports_so_when_its_last_event_is_stored() -> None:
    host = Host()
    _, task = host.run(spec("counts", hosted.Counting))
    await until(lambda: DID["counts"][-1:] == ["cleanup"])
    assert not host.states
    host.unanswered[0](EventStored(0))
    async with asyncio.timeout(30):
        await task
    assert [change.state for change in host.states] == [TriggerState.FINISHED]
