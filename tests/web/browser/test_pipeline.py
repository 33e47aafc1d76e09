"""The pages of a pipeline in a real browser: it is driven through all of them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, Error, Page, Route
from tests.deadletters.redrive.test_folder import Place
from tests.until import wait_until
from tests.web.browser.opened import EACH_WIDTH, EVERY_LOOK, NARROW, PATIENCE, WIDE, Served, keep_picture, opened
from tests.web.recordings import FAILED, record, write_letters
from tests.web.scripted_pipeline import SCRIPT, SECRET, ScriptedPipeline

from tidemill.deadletters.restore import SourceReader
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.live_tasks import LiveState, LiveTask, LiveWindow
from tidemill.spark.live.web_ui import serve_web
from tidemill.web.values.section import ValueReader

PAGES = {
    "overview": "/",
    "partitions": "/partitions",
    "engines": "/engines",
    "live": "/live",
    "messages": "/messages",
    "message": f"/messages/orders/0/{FAILED}",
    "unknown message": "/messages/orders/0/999999",
    "tasks": "/tasks?label=tenant%3Dacme",
    "failures": "/failures?since=1h",
    "events": "/events?kind=task_failed",
    "letters": "/letters",
    "letter": "/letters/letter-5",
    "runs": "/runs",
    "redrives": "/redrives?kind=delivery&letter=letter-1",
    "probe": "/probe",
    "recordings": "/recordings",
    "metrics": "/metrics-queries",
    "configuration": "/configuration",
    "api": "/api/docs",
}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("recordings") / "db"
    record(folder)
    letters = write_letters(tmp_path_factory.mktemp("letters"))
    debug = {"enabled": True, "port": 0, "db_dir": str(folder)}
    pipeline = ScriptedPipeline({"debug": debug, "dlq": {"path": str(letters)}})
    with serve_web(pipeline.watched()) as web:
        assert web is not None
        web.begin()
        yield Served(pipeline, web.address)


@EVERY_LOOK
def test_every_page_fits_logs_no_error_and_asks_nobody_else(
    browser: Browser, served: Served, size: tuple[int, int], theme: str
) -> None:
    with opened(browser, served, size, theme) as (page, watch):
        for name, path in PAGES.items():
            page.goto(f"{served.base}{path}")
            if path == "/":
                page.wait_for_selector("[data-live][data-state=on]")
                page.wait_for_selector(".chart canvas")
            keep_picture(page, f"{name.replace(' ', '-')}-{theme}-{size[0]}")
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0], f"{name} is wider than the window"
            assert page.locator("h1").count() == 1, name
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (background == "rgb(14, 19, 24)") == (theme == "dark"), name
    wrong = [text for text in watch.wrong if "404" not in text]  # the message that is not recorded
    assert wrong == []


def test_the_overview_follows_the_pipeline_without_being_reloaded(browser: Browser, served: Served) -> None:
    with opened(browser, served, WIDE, "light") as (page, watch):
        page.wait_for_selector("[data-live][data-state=on]")
        first = served.pipeline.engines
        served.pipeline.engines = [msgspec.structs.replace(first[0], state="link lost"), first[1]]
        page.wait_for_selector("#engines >> text=link lost")
        served.pipeline.engines = first
        page.wait_for_selector("#engines >> text=link lost", state="detached")
        points = page.evaluate("document.querySelectorAll('.chart canvas').length")
    assert points == 4
    assert watch.wrong == []


@pytest.mark.parametrize("step", [-10_800, 86_400])
def test_charts_are_loaded_again_when_the_clock_was_set(browser: Browser, served: Served, step: int) -> None:
    """Points by the old clock and by the new one do not fit on one axis, and newer ones must not be left out."""
    tell = """step => {
        const names = ["consumed", "done", "failed", "retried", "letters", "lag", "in_flight"];
        const detail = {at: [Date.now() / 1000 + step]};
        for (const name of [...names, "task_p50", "task_p95", "task_p99"]) detail[name] = [1];
        document.dispatchEvent(new CustomEvent("point", {detail}));
    }"""
    with opened(browser, served, WIDE, "light") as (page, watch):
        page.wait_for_selector("[data-live][data-state=on]")
        page.wait_for_selector(".chart canvas")
        with page.expect_response("**/api/v1/series?*", timeout=PATIENCE) as loaded:
            page.evaluate(tell, step)
        assert loaded.value.ok
    assert watch.wrong == []


def test_times_of_charts_are_utc_with_the_date_where_it_changes(browser: Browser, served: Served) -> None:
    """The browser is in New York."""
    noon = 1_790_000_000 // 86_400 * 86_400 + 43_200  # 2026-09-21
    with opened(browser, served, WIDE, "light") as (page, watch):

        def label(first: int, step: int, count: int, now: int = noon) -> list[str]:
            ticks = [first + step * place for place in range(count)]
            found: list[str] = page.evaluate("([ticks, now]) => tidemill.labelTimes(ticks, now)", [ticks, now])
            return found

        assert label(noon - 30, 15, 3) == ["11:59:30", "11:59:45", "12:00:00"]
        assert label(noon - 7200, 3600, 3) == ["10:00", "11:00", "12:00"]
        assert label(noon - 86_400, 43_200, 3) == ["12:00\n09-20", "00:00\n09-21", "12:00"]
        assert label(noon - 43_200 - 86_400, 86_400, 2) == ["09-20", "09-21"]
        assert label(noon, 3600, 2, noon + 10 * 86_400) == ["12:00\n09-21", "13:00"], "not of today"
        page.goto(f"{served.base}/runs?range=604800")
        page.wait_for_selector(".chart canvas")
    assert watch.wrong == []


def wait_for(page: Page, condition: str) -> None:
    """Wait until an expression is true in a page; the browser's own way would need `eval`, which the pages forbid."""
    wait_until(lambda: page.evaluate(condition), PATIENCE / 1000, what=condition)


def task_of(number: int, at: float, seconds: float = 0.0, outcome: str = "", of: int = 1, slot: int = 0) -> LiveTask:
    return LiveTask(slot, f"task-{number}", f"tenant={SCRIPT}", 1, "orders", 0, number, at, seconds, outcome, of)


def test_the_live_page_shows_what_executors_do_to_mouse_and_keyboard(browser: Browser, served: Served) -> None:
    pipeline, now = served.pipeline, time.time()
    ended = [task_of(1, now - 5, 2.0, "ok"), task_of(2, now - 2, 1.0, "exit"), task_of(3, now - 1, 0.1, "ok", 40)]
    waiting, backing_off = [task_of(5, now, slot=-1)], [task_of(6, now + 3600, slot=-1)]
    window = LiveWindow("orders", 0, 7, 1, 50, 12, now - 9)
    pipeline.live = {0: LiveState(3, [task_of(4, now - 3, slot=1)], ended, 9, 31, waiting, 1, backing_off, [window])}
    with opened(browser, served, NARROW, "dark") as (page, watch):
        page.goto(f"{served.base}/live")
        page.wait_for_selector(".task.failed")
        pipeline.live = {0: msgspec.structs.replace(pipeline.live[0], ended=[], left_out=0)}
        assert page.locator(".lane").count() == 3
        page.wait_for_selector(".task.running")
        assert page.locator(".task.ok", has_text="1 of 40").count() >= 1
        assert page.locator("#running-count").inner_text() == "1 of 3 busy"
        assert page.locator("#waiting").inner_text().startswith("task-5")
        assert page.locator("#waiting-count").inner_text() == "31"
        assert "task-6" in page.locator("#backing-off").inner_text()
        assert "orders/0" in page.locator("#windows").inner_text()
        page.click("#freeze")
        assert page.get_attribute("#freeze", "aria-pressed") == "true"
        shift = page.evaluate("lanes.style.getPropertyValue('--shift')")
        count = page.locator(".task").count()
        pipeline.live = {0: msgspec.structs.replace(pipeline.live[0], ended=[task_of(7, now, 1.0, "timeout")])}
        wait_for(page, "document.querySelector('[data-updates]').innerText === 'frozen'")
        seen = pipeline.watches
        wait_until(lambda: pipeline.watches > seen + 1, 60)
        assert page.locator(".task").count() == count
        assert page.evaluate("lanes.style.getPropertyValue('--shift')") == shift
        page.click("#freeze")
        wait_for(page, "[...document.querySelectorAll('.task')].some((bar) => bar.task.task_id === 'task-7')")
        page.focus(".lane .task[tabindex='0']")
        for _ in range(30):
            page.keyboard.press("ArrowLeft")
        assert "task-1" in page.locator("#detail").inner_text()
        assert SCRIPT in page.locator("#detail").inner_text(), "it stays text"
        page.keyboard.press("ArrowDown")
        wait_for(page, "document.activeElement.task.task_id === 'task-4'")
        page.keyboard.press("Enter")
        page.wait_for_url("**/tasks?task=task-4")
    assert watch.wrong == []
    pipeline.live = {}
    seen = pipeline.watches
    with opened(browser, served, NARROW, "dark") as (page, watch):
        page.goto(f"{served.base}/live")
        wait_until(lambda: pipeline.watches > seen, 60)
        page.evaluate(HIDE)
        wait_for(page, "document.querySelector('[data-updates]').innerText === 'paused'")
        wait_until(lambda: _is_quiet(pipeline), 60)


#: What a browser does when another tab is chosen.
HIDE = """
Object.defineProperty(document, "hidden", { value: true });
document.dispatchEvent(new Event("visibilitychange"));
"""


def _is_quiet(pipeline: ScriptedPipeline) -> bool:
    """Tell whether nobody watches any more: the engines are not asked again for more than two updates."""
    before = pipeline.watches
    time.sleep(2.5)
    return pipeline.watches == before


def test_a_reader_signs_out_and_in_again_with_the_forms(browser: Browser, served: Served) -> None:
    key = served.address.partition("key=")[2]
    with opened(browser, served, WIDE, "light") as (page, watch):
        page.click("text=Sign out")
        page.wait_for_url(f"{served.base}/login")
        page.goto(f"{served.base}/tasks?kind=exit")
        page.wait_for_url("**/login?next=*")
        page.fill("input[name=key]", key)
        page.keyboard.press("Enter")
        page.wait_for_url(f"{served.base}/tasks?kind=exit")
        assert page.locator("h1").inner_text() == "Tasks"
    assert watch.wrong == []


def test_signing_out_ends_what_the_page_still_fetches(browser: Browser, served: Served) -> None:
    """What arrived after the end of the session would be refused, and be an error in the console."""
    held: list[Route] = []

    def sign_out(route: Route) -> None:
        answer = route.fetch(max_redirects=0)
        for late in held:
            with contextlib.suppress(Error):  # the browser has given it up
                late.continue_()
        page.wait_for_timeout(1000)
        route.fulfill(response=answer)

    with opened(browser, served, WIDE, "light") as (page, watch):
        page.route("**/series*", lambda route: held.append(route))
        with page.expect_request("**/series*"):
            page.reload(wait_until="commit")
        page.route("**/logout", sign_out)
        page.click("text=Sign out")
        page.wait_for_url(f"{served.base}/login")
    assert watch.wrong == []


@EACH_WIDTH
def test_a_pause_has_a_time_and_a_restart_is_confirmed_by_typing(
    browser: Browser, served: Served, size: tuple[int, int]
) -> None:
    served.pipeline.actions.clear()
    with opened(browser, served, size, "dark") as (page, watch):
        page.focus("#pause")
        page.keyboard.press("Enter")
        page.select_option("dialog select", label="1 hour")
        page.click("dialog >> text=Yes")
        page.wait_for_selector(".toasts >> text=Paused all partitions for 1 h")
        page.wait_for_selector(".note:has-text('until') >> text=Paused")
        page.click("#resume")
        page.click("dialog >> text=Yes")
        page.wait_for_selector(".toasts >> text=Resumed all partitions.")
        page.wait_for_selector("#pause-2")
        page.click("#pause-2")
        page.click("dialog >> text=Yes")
        page.wait_for_selector("#resume-2")
        page.click("#resume-2")
        page.click("dialog >> text=No")
        page.click("#restart-1")
        assert page.locator("dialog >> text=Yes").is_disabled()
        page.keyboard.type("restart 1")
        page.keyboard.press("Enter")
        page.wait_for_selector(".toasts >> text=Engine 1 drains and then restarts.")
        page.click("#resume")
        page.click("dialog >> text=Yes")
        page.wait_for_selector("#pause-2")
        assert watch.wrong == []
    assert served.pipeline.actions == [
        "pause 3600 None key",
        "resume None",
        "pause 900 2 key",
        "restart 1",
        "resume None",
    ]
    served.pipeline.actions.clear()


@EACH_WIDTH
def test_a_ticked_letter_goes_from_the_click_to_its_sink(
    browser: Browser, tmp_path: Path, size: tuple[int, int]
) -> None:
    place = Place(tmp_path)
    place.write(range(5))
    pipeline = ScriptedPipeline()
    pipeline.settings = place.settings
    with serve_web(pipeline.watched()) as web:
        assert web is not None
        web.begin()
        with opened(browser, Served(pipeline, web.address), size, "light") as (page, watch):
            page.goto(f"{watch.base}/letters")
            page.locator("input[name=letter]").nth(0).check()
            page.click("text=Redrive selected")
            page.wait_for_url("**/redrives?*")  # with its script: until then the form is one without
            page.fill("input[name=to]", "sink")
            page.focus("#dry-run")
            page.keyboard.press("Enter")
            page.click("#send")
            assert page.locator("dialog >> text=Yes").is_disabled()
            page.keyboard.type("send 1")
            page.keyboard.press("Enter")
            page.wait_for_selector("#state h2:has-text('Redrive 2')")
            page.wait_for_selector("#state .chip:has-text('ended')")
            assert watch.wrong == []
            page.reload()
            page.wait_for_selector("text=Past redrives")
    assert place.sent() == {4: 1}


def test_a_value_is_read_where_the_reader_asks_for_it(
    browser: Browser, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: SourceReader, topic: str, partition: int, offset: int) -> SourceMessage:
        value = json.dumps({"text": SCRIPT, "password": SECRET}).encode()
        return SourceMessage(topic, partition, offset, SCRIPT.encode(), value, ((SCRIPT, b"\xff"),), 1_790_000_000_000)

    monkeypatch.setattr(SourceReader, "find_range", lambda self, topic, partition: (1, 1_000))
    monkeypatch.setattr(SourceReader, "read", read)
    with opened(browser, served, NARROW, "light") as (page, watch):
        page.goto(f"{served.base}{PAGES['message']}")
        page.focus("#value a")
        page.keyboard.press("Enter")
        page.wait_for_selector("section#value")
        text = page.inner_text("section#value")
        assert text.count(SCRIPT) == 3
        assert '"password": "***"' in text
        assert SECRET not in page.content()
        assert page.url == f"{served.base}{PAGES['message']}"
        assert page.evaluate("document.documentElement.scrollWidth") == NARROW[0]
        page.goto(f"{served.base}/messages/orders/0/0")
        page.click("#value a")
        page.wait_for_selector("text=was removed by retention")
        assert [line for line in watch.wrong if "404" not in line] == []


@EACH_WIDTH
def test_a_message_is_probed_with_the_keyboard_alone(
    browser: Browser, served: Served, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    def fetch(self: ValueReader, topic: str, partition: int, offset: int) -> SourceMessage:
        return SourceMessage(topic, partition, offset, b"k", b"recorded")

    monkeypatch.setattr(ValueReader, "fetch", fetch)
    pipeline = served.pipeline
    pipeline.probed.clear()
    pipeline.probe_gate.clear()
    try:
        with opened(browser, served, size, "light") as (page, watch):
            page.goto(f"{served.base}{PAGES['message']}")
            page.focus("text=Probe >> nth=1")
            page.keyboard.press("Enter")
            page.wait_for_url("**/probe?partition=0&offset=*")
            assert not page.locator("textarea[name=value]").is_visible()
            page.focus("#probe")
            page.keyboard.press("Enter")
            page.wait_for_selector("#state .chip:has-text('running')")
            page.select_option("[name=source]", "pasted")
            page.fill("textarea[name=value]", f'{{"text": "{SCRIPT}"}}')
            page.fill("[name=key]", r"\xff")
            page.fill("[name=headers]", "trace: 1\nbare")
            page.focus("#probe")
            page.keyboard.press("Enter")
            page.wait_for_selector(".toasts >> text=another probe is running")
            pipeline.probe_gate.set()
            page.wait_for_selector("#status:has-text('failed')")
            page.focus("#probe")
            page.keyboard.press("Enter")
            page.wait_for_selector("#state h2:has-text('A message as')")
            page.wait_for_selector("#status:has-text('failed')")
            assert SCRIPT in page.inner_text("#state")
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
            page.select_option("[name=encoding]", "none")
            assert page.locator("textarea[name=value]").is_disabled()
            assert [line for line in watch.wrong if "429" not in line] == []
    finally:
        pipeline.probe_gate.set()
    first, second = (message for message, _ in pipeline.probed)
    assert (first.key, first.value, first.offset) == (b"k", b"recorded", FAILED)
    assert (second.key, second.value) == (b"\xff", f'{{"text": "{SCRIPT}"}}'.encode())
    assert second.headers == (("trace", b"1"), ("bare", None))


def test_a_drain_is_confirmed_by_its_name_with_the_keyboard_alone(browser: Browser, served: Served) -> None:
    with opened(browser, served, WIDE, "light") as (page, watch):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.focus("#drain")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog[open]")
        page.keyboard.type("order-worker")
        assert page.is_disabled("dialog button[value=yes]")
        page.keyboard.type("s")
        page.keyboard.press("Enter")
        page.wait_for_selector(".toasts >> text=The pipeline drains")
    wait_until(lambda: served.pipeline.actions == ["drain"], 30)
    assert watch.wrong == []


def test_searching_paging_and_opening_a_message_by_hand(browser: Browser, served: Served) -> None:
    with opened(browser, served, WIDE, "light") as (page, watch):
        page.keyboard.press("/")
        page.wait_for_url("**/messages#search")
        assert page.evaluate("document.activeElement.type") == "search"
        assert page.locator("#rows > tr").count() == 101
        page.focus("tr.more a")
        page.keyboard.press("Enter")
        page.locator("#rows > tr").nth(200).wait_for()
        wait_until(lambda: page.evaluate("document.activeElement.closest('tr')?.sectionRowIndex") == 100, 30)
        shown = page.locator("#rows > tr").nth(100).locator("time").first
        assert str(shown.get_attribute("datetime"))[11:19] in str(shown.text_content())
        page.keyboard.press("/")
        page.keyboard.type(f"orders:0:{FAILED}")
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/messages/orders/0/{FAILED}")
        assert page.locator("svg.bar").count() >= 10
        page.goto(f"{served.base}/configuration")
        page.fill("input[type=search]", "consumer_group")
        assert page.locator("tr.setting:visible").count() == 1
        page.click("[data-theme-switch]")
        assert page.get_attribute("html", "data-theme") == "dark"
        page.reload()
        assert page.get_attribute("html", "data-theme") == "dark"
    assert watch.wrong == []
