"""The metrics and the health of a trigger host, over HTTP."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.runtime.metrics.asking import ask, parse, scrape

from tidemill.config.sections.metrics_settings import MetricsSettings
from tidemill.core.streams.members import LaneReport
from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.runtime.loop.durations import Durations
from tidemill.runtime.metrics.exposition import write_families
from tidemill.services.triggerer.lists.reporting import monitoring
from tidemill.services.triggerer.lists.reporting.host_metrics import DEFINITIONS, collect_metrics
from tidemill.services.triggerer.lists.reporting.host_state import HostState
from tidemill.services.triggerer.lists.reporting.monitoring import HostMonitor, find_reasons
from tidemill.triggers.shared_stream import StreamReport


def lane(name: Any, since: float) -> LaneReport[Any]:
    return LaneReport(name, 1, 0, since, ())


STREAMS = (
    StreamReport(("orders", "eu"), ("a", "b"), {}, 3, None, (lane(("orders", 0), 90.0), lane(None, 50.0))),
    StreamReport(("orders", "us"), ("c",), {}, 4, None, (lane(("orders", 0), 80.0), lane("/home/me/secret", 40.0))),
)
BUSY = HostState(
    store_known=True,
    active=True,
    started=True,
    store_open=True,
    triggers=5,
    streams=STREAMS,
    now=100.0,
    advanced=17,
    redelivered=3,
    dead_lettered={"rejected": 2},
    lags=Durations([1, 0, 2, *[0] * 12], 0.05),
)


def collected(state: HostState) -> dict[str, dict[tuple[str, ...], float]]:
    return parse(write_families(collect_metrics(("w", "1.0", "list"), state)).decode())


def test_each_metric_has_the_number_of_the_report_and_no_label_has_a_users_key() -> None:
    found = collected(BUSY)

    assert found["tidemill_triggers"] == {(): 5}
    assert found["tidemill_stream_subscribers"] == {(): 3}
    assert found["tidemill_stream_outstanding"] == {(): 7}
    assert found["tidemill_stream_advances_total"] == {(): 17}
    assert found["tidemill_stream_redeliveries_total"] == {(): 3}
    assert found["tidemill_dead_letters_total"] == {("failed",): 0, ("rejected",): 2}
    assert found["tidemill_loop_lag_seconds_count"] == {(): 3}
    assert found["tidemill_stream_head_age_seconds"] == {("orders/0",): 20.0, ("",): 60.0}
    assert (found["tidemill_triggerer_active"], found["tidemill_store_open"]) == ({(): 1}, {(): 1})
    assert set(found) >= {name for definition in DEFINITIONS for name in definition.list_series()}


@pytest.mark.parametrize(
    ("state", "reasons"),
    [
        (BUSY, []),
        (HostState(), ["it is starting: its store is not open yet"]),
        (HostState(store_known=True), ["it is starting: it waits for its list"]),
        (HostState(store_known=True, standby=True), []),
        (replace(BUSY, started=False), ["it is starting: not all triggers have been started"]),
        (replace(BUSY, store_open=False), ["its store cannot be reached"]),
        (
            replace(BUSY, failed_streams=2),
            ["2 shared streams failed, and will be read again when the triggers restart"],
        ),
    ],
)
def test_why_a_host_is_not_ready(state: HostState, reasons: list[str]) -> None:
    assert find_reasons(state) == reasons


class Scripted:
    """A replica with a host whose store is open."""

    running = 5
    standing = ProducerStanding.OPEN

    @property
    def host(self) -> Any:
        return self

    events = property(lambda self: self)

    manager = property(lambda self: self)

    def now(self) -> float:
        return 100.0

    def count_failed(self) -> int:
        return 0

    def report(self) -> Any:
        return Reported(STREAMS)


class Reported(tuple):
    """The report of a host, and of a replica."""

    def __getitem__(self, name: Any) -> Any:
        return None if name == "waits_for" else super().__getitem__(name)


async def test_the_endpoint_asks_the_loop_and_says_if_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "LOOP_SECONDS", 0.2)
    monitor = HostMonitor(MetricsSettings(port=0), "w", "list")
    with monitor.serve():
        address = monitor.address
        assert address is not None
        assert await asyncio.to_thread(ask, f"{address}/readyz") == (503, ["it is starting: its store is not open yet"])
        monitor.book.is_started = True
        monitor.replica = Scripted()  # type: ignore[assignment]
        assert await asyncio.to_thread(ask, f"{address}/readyz") == (200, [])
        assert (await asyncio.to_thread(scrape, address))["tidemill_stream_outstanding"] == {(): 7}
        asking = asyncio.ensure_future(asyncio.to_thread(ask, f"{address}/healthz"))
        await asyncio.sleep(0)
        # The answer comes from another thread; this one blocks the loop until then.
        deadline = time.monotonic() + 60
        while not asking.done() and time.monotonic() < deadline:
            time.sleep(0.3)
            await asyncio.sleep(0)
        status, [reason] = asking.result()
        assert (status, "the event loop has not answered" in reason) == (503, True)


async def test_off_means_no_endpoint() -> None:
    monitor = HostMonitor(MetricsSettings(enabled=False), "w", "list")
    with monitor.serve():
        assert monitor.address is None
