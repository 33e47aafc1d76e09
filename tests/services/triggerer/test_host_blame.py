"""Whom a producer is told of when an event fails: who did something wrong with that very event, and nobody else."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.hosts import spec
from tests.until import until

from tidemill.core.triggers.event_plan import EventRefusal, EventRefused

pytestmark = pytest.mark.usefixtures("quick_restarts")


class Attended(hosted.Upstream):
    """An upstream that is told who is there, and who failed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.failed: list[tuple[Any, dict[Hashable, str], list[Hashable]]] = []

    def subscriber_joined(self, trigger_id: Hashable) -> None:
        return

    def subscriber_left(self, trigger_id: Hashable) -> None:
        return

    def subscriber_gone(self, trigger_id: Hashable) -> None:
        return

    def event_failed(self, broker_payload: Any, failures: Mapping[Hashable, str], unread: Collection[Hashable]) -> None:
        self.failed.append((broker_payload, dict(failures), list(unread)))


@pytest.fixture
def attended(upstream: hosted.Upstream) -> Attended:
    hosted.UPSTREAMS[upstream.name] = Attended(upstream.name)
    return hosted.UPSTREAMS[upstream.name]  # type: ignore[return-value]


def refuse_zero(host: Any, reason: EventRefusal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store refuse the event that is 0."""
    add = host.events.add

    def refused(number, token, payload, identity, done):
        if json.loads(payload) == 0:
            add(number, token, payload, identity, lambda _: done(EventRefused(reason, "too odd")))
        else:
            add(number, token, payload, identity, done)

    monkeypatch.setattr(host.events, "add", refused)


async def test_an_event_that_the_store_refuses_is_blamed_and_the_one_that_its_trigger_is_on_is_not(
    hosts, attended, monkeypatch
):
    host = await hosts.start()
    refuse_zero(host, EventRefusal.CONTENT, monkeypatch)
    await host.reload([spec("a", hosted.Sharing, "on-failure", upstream=attended.name, stuck_on=1, deaf=True)])
    attended.items.put_nowait(0)
    attended.items.put_nowait(1)
    await until(lambda: len(attended.failed) == 2)

    (zero, failures, unread), (one, no_failures, interrupted) = attended.failed

    assert (zero, list(failures), unread) == (0, ["a"], [])
    assert "too odd" in failures["a"]
    assert (one, no_failures, interrupted) == (1, {}, ["a"])


async def test_an_event_of_a_trigger_that_another_host_has_claimed_is_blamed_on_nobody(hosts, attended, monkeypatch):
    host = await hosts.start()
    refuse_zero(host, EventRefusal.FENCED, monkeypatch)
    await host.reload([spec("a", hosted.Sharing, upstream=attended.name)])
    attended.items.put_nowait(0)
    await until(lambda: attended.failed)

    assert attended.failed == [(0, {}, ["a"])]
