"""A pipeline with fifty engines and a thousand partitions in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser
from tests.until import wait_until
from tests.web.browser.opened import EVERY_LOOK, NARROW, WIDE, Served, keep_picture, opened
from tests.web.scripted_pipeline import ScriptedPipeline
from tests.web.test_lists import make_large_pipeline

from tidemill.spark.live.web_ui import serve_web
from tidemill.web.pipeline import lists

PAGES = {
    "large-overview": "/",
    "large-partitions": "/partitions",
    "large-stalled": "/partitions?state=stalled",
    "large-second-page": "/partitions?name=orders&order=name",
    "large-engines": "/engines",
    "large-none": "/partitions?engine=30",
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(lists, "EVERY_SECONDS", 1)
    debug = {"enabled": True, "port": 0, "db_dir": str(tmp_path / "db")}
    pipeline = make_large_pipeline(ScriptedPipeline({"debug": debug}))
    with serve_web(pipeline.watched()) as web:
        assert web is not None
        web.begin()
        yield Served(pipeline, web.address)


@EVERY_LOOK
def test_the_lists_of_many_fit_log_no_error_and_ask_nobody_else(
    browser: Browser, served: Served, size: tuple[int, int], theme: str
) -> None:
    with opened(browser, served, size, theme) as (page, watch):
        for name, path in PAGES.items():
            page.goto(f"{served.base}{path}")
            page.wait_for_selector(".live[data-state=on]")
            if name == "large-second-page":
                page.click("#next-page")
                page.wait_for_selector("text=51 to 100 of 980")
            keep_picture(page, f"{name}-{theme}-{size[0]}")
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0], f"{name} is wider than the window"
            assert page.locator("h1").count() == 1, name
    assert watch.wrong == []


def test_all_partitions_are_found_from_the_overview_with_the_keyboard(browser: Browser, served: Served) -> None:
    with opened(browser, served, WIDE, "light") as (page, watch):
        page.wait_for_selector("[data-live][data-state=on]")
        assert page.locator("#partitions tbody tr:not(.more)").count() == 20
        page.focus("#partitions tr.more a")
        # The part is replaced every second: the focus stays on what leads to the same place.
        page.evaluate("document.querySelector('#partitions table').dataset.old = 'yes'")
        lag = served.pipeline.engines[0].progress
        assert lag is not None
        lag.lag = dict.fromkeys(lag.lag, 5000)
        wait_until(lambda: page.locator("#partitions table[data-old]").count() == 0, 60)
        assert page.evaluate("document.activeElement.textContent") == "960 more"
        page.keyboard.press("Enter")
        page.wait_for_url("**/partitions")
        assert page.locator("#list tbody tr").count() == 50
        page.focus("#next-page")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=51 to 100 of 980")
        page.focus("input[name=engine]")
        page.keyboard.type("7")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=1 to 20 of 20 matching, 980 in total")
        assert page.url.endswith("/partitions?name=&engine=7&state=&order=")
        page.select_option("select[name=state]", "held")
        page.click("text=Show")
        page.wait_for_selector("text=1 to 1 of 1")
        assert page.locator("#list tbody td:first-child").all_text_contents() == ["orders/141"]
        page.go_back()
        page.wait_for_selector("text=1 to 20 of 20")
    assert watch.wrong == []


def test_an_open_list_follows_the_pipeline_and_says_when_it_is_old(browser: Browser, served: Served) -> None:
    engines = served.pipeline.engines
    with opened(browser, served, NARROW, "dark") as (page, _watch):
        page.goto(f"{served.base}/engines?state=link+lost")
        page.wait_for_selector("text=No engine matches")
        served.pipeline.engines = [msgspec.structs.replace(engines[0], state="link lost"), *engines[1:]]
        page.wait_for_selector("#list >> text=1 to 1 of 1")
        page.goto(f"{served.base}/partitions?engine=3")
        page.focus("#pause-60")
        page.evaluate("document.querySelector('#list table').dataset.old = 'yes'")
        wait_until(lambda: page.locator("#list table[data-old]").count() == 0, 60)
        assert page.evaluate("document.activeElement.id") == "pause-60"
        page.route("**/partitions/rows?*", lambda route: route.abort())
        page.wait_for_selector(".live[data-state=lost] >> text=no connection")
        assert page.evaluate("document.body.classList.contains('stale')")
        page.unroute("**/partitions/rows?*")
        page.wait_for_selector(".live[data-state=on]")
        assert not page.evaluate("document.body.classList.contains('stale')")


def test_a_partition_is_paused_from_its_list(browser: Browser, served: Served) -> None:
    with opened(browser, served, WIDE, "light") as (page, watch):
        page.goto(f"{served.base}/partitions?engine=3")
        page.click("#pause-60")
        page.click("dialog >> text=Yes")
        page.wait_for_selector(".toasts >> text=Paused partition 60")
        page.wait_for_selector("#resume-60")
        page.click("text=Clear")
        page.select_option("select[name=state]", "paused")
        page.click("text=Show")
        page.wait_for_selector("text=1 to 1 of 1")
    assert [action.split()[2] for action in served.pipeline.actions] == ["60"]
    assert watch.wrong == []
