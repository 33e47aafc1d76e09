"""The pages of a trigger host in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser
from tests.web.browser.opened import EVERY_LOOK, WIDE, Served, keep_picture, opened
from tests.web.scripted_host import LIST, ScriptedHost, scripted_host
from tests.web.scripted_pipeline import SCRIPT

from tidemill.core.triggers.lifecycle import EndVerdict, Next
from tidemill.services.triggerer.lists.reporting.recording import record_host
from tidemill.services.triggerer.lists.reporting.web_ui import serve_host_web
from tidemill.store.records import TriggerSpec
from tidemill.triggers.streams.stream_counts import Incident, IncidentKind

PAGES = ["/triggers", "/triggers?state=restarting", "/streams", "/events", "/failures", "/recordings", "/configuration"]

pytestmark = pytest.mark.timeout(600)


@dataclass
class ServedHost(Served):
    """A trigger host with its web UI; `pipeline` is the host."""

    pipeline: ScriptedHost  # type: ignore[assignment]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHost]:
    folder = tmp_path_factory.mktemp("recordings") / "db"
    with scripted_host(folder) as host, ExitStack() as stack:
        book = host.monitor.book
        host.monitor.recorder = stack.enter_context(record_host(host.settings, "worker-1", LIST, book))
        host.call(lambda: book.counts.tell(Incident(IncidentKind.OVERFLOW, "queue", "audit", text=f"slow {SCRIPT}")))
        serving = serve_host_web(host.settings, host.monitor)
        web = host.call(serving.__enter__)
        assert web is not None
        stack.callback(serving.__exit__, None, None, None)
        yield ServedHost(host, web.address, "/triggers")


@EVERY_LOOK
def test_every_page_of_a_host_fits_logs_no_error_and_asks_nobody_else(
    browser: Browser, served: ServedHost, size: tuple[int, int], theme: str
) -> None:
    with opened(browser, served, size, theme) as (page, watch):
        page.goto(f"{served.base}/streams")
        stream = page.locator("#streams tbody a").first.get_attribute("href")
        for path in [*PAGES, stream or ""]:
            page.goto(f"{served.base}{path}")
            if path in ("/triggers", "/streams"):
                page.wait_for_selector("[data-live][data-state=on]")
            name = path.strip("/").split("?")[0].replace("/", "-")
            keep_picture(page, f"host-{name}-{theme}-{size[0]}")
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0], f"{path} is wider than the window"
            assert page.locator("h1").count() == 1, path
    assert watch.wrong == []


def test_the_triggers_follow_the_host_and_are_searched_with_the_keyboard(browser: Browser, served: ServedHost) -> None:
    book = served.pipeline.monitor.book.triggers

    def fail() -> None:
        run = book.entries["audit"].run
        assert run is not None
        assert isinstance(run.spec, TriggerSpec)
        book.note_ended(run, Next(EndVerdict.FAILED), None, "OSError: the queue is gone")

    with opened(browser, served, WIDE, "light") as (page, watch):
        page.wait_for_selector("[data-live][data-state=on]")
        served.pipeline.call(fail)
        page.wait_for_selector("#triggers >> text=OSError: the queue is gone")
        page.keyboard.press("/")
        page.keyboard.type("invoi")
        page.keyboard.press("Enter")
        page.wait_for_url("**/triggers?text=invoi*")
        assert page.locator("#rows > tr").count() == 1
        page.goto(f"{served.base}/events?kind=overflow")
        page.wait_for_selector("#rows >> text=slow <script>")
    assert watch.wrong == []
