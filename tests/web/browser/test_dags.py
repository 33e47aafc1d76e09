"""The pages of DAGs in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser
from tests.store.dags import dag, task
from tests.web.browser.opened import EVERY_LOOK, WIDE, Served, keep_picture, opened
from tests.web.dags.played import DAG, PlayedStore, played_store
from tests.web.dags.test_dag_pages import BASE

from tidemill.core.tasks.structure import MapSource, MapStructure, ParamStructure
from tidemill.services.dev.web_ui import serve_dags_web
from tidemill.store.calls.run_calls import ListRuns
from tidemill.store.calls.task_calls import GetValuePage

PAGES = {
    "dags": "/dags",
    "dag": f"/dags/{DAG}#trigger",
    "run": BASE,
    "task": f"{BASE}/tasks/retried?try=1",
    "map": "/dags/maps/runs/r/tasks/m",
    "map-run": "/dags/maps/runs/r",
    "element": "/dags/maps/runs/r/tasks/m?map_index=3",
    "group": "/dags/groups/runs/r/tasks/g",
    "group-run": "/dags/groups/runs/r",
    "group-element": "/dags/groups/runs/r/tasks/g?map_index=3",
    "group-task": "/dags/groups/runs/r/tasks/g.fit?map_index=3",
    "loop": "/dags/loops/runs/r/tasks/epoch",
    "loop-run": "/dags/loops/runs/r",
    "loop-element": "/dags/loops/runs/r/tasks/epoch?map_index=1",
    "loop-gate": "/dags/loops/runs/r/tasks/epoch.loop_gate?map_index=1",
    "iteration": "/dags/calls/runs/r/tasks/calls",
    "iteration-run": "/dags/calls/runs/r",
    "iteration-element": "/dags/calls/runs/r/tasks/calls?map_index=1",
    "runs": "/dag-runs",
    "pools": "/pools",
    "services": "/services",
    "waits": "/dags/wants/runs/r",
}

pytestmark = pytest.mark.timeout(600)


@dataclass
class ServedDags(Served):
    """DAGs with their web UI; `pipeline` is the store."""

    pipeline: PlayedStore  # type: ignore[assignment]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDags]:
    with played_store(tmp_path_factory.mktemp("store")) as store, serve_dags_web(store.watched) as web:
        assert web is not None
        states = ["success", "success", "running", "failed", "failed", "scheduled", "skipped", "up_for_retry"]
        store.open_map(
            "maps", states * 9, arrived=100, created=72, success=18, failed=18, skipped=9, unfinished=18, retrying=9
        )
        store.open_group("groups")
        store.open_loop("loops")
        store.open_iteration("calls")
        store.lack_slots_and_files()
        yield ServedDags(store, web.address, "/dags")


@EVERY_LOOK
def test_every_page_of_dags_fits_logs_no_error_and_asks_nobody_else(
    browser: Browser, served: ServedDags, size: tuple[int, int], theme: str
) -> None:
    with opened(browser, served, size, theme) as (page, watch):
        for name, path in PAGES.items():
            page.goto(f"{served.base}{path}")
            if name == "task":
                page.wait_for_selector("#log >> text=hello <script>")
            keep_picture(page, f"dags-{name}-{theme}-{size[0]}")
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0], f"{path} is wider than the window"
            assert page.locator("h1").count() == 1, path
            assert page.locator(".graph:visible").count() == (
                name in ("dag", "run", "map-run", "group-run", "loop-run", "iteration-run", "waits")
            ), path
    assert watch.wrong == []


def test_a_silent_try_that_has_ended_says_so(browser: Browser, served: ServedDags) -> None:
    (run,) = served.pipeline.call(ListRuns("small")).rows
    with opened(browser, served, WIDE, "light") as (page, watch):
        page.goto(f"{served.base}/dags/small/runs/{quote(run.run_id)}/tasks/only")
        page.wait_for_selector("#log-state >> text=no output; this try has ended")
        page.goto(f"{served.base}{BASE}/tasks/wait")
        page.wait_for_selector("#log-state >> text=no output yet; following")
    assert watch.wrong == []


def test_a_run_is_triggered_with_params_and_cancelled_with_the_typed_word(browser: Browser, served: ServedDags) -> None:
    with opened(browser, served, WIDE, "light") as (page, watch):
        page.goto(f"{served.base}/dags/{DAG}#trigger")
        page.fill("[data-param=size]", "7")
        page.fill("[name=run_id]", "by hand")
        page.click("form.trigger button.main")
        page.wait_for_url("**/runs/by%20hand")
        page.click("text=Cancel")
        assert page.locator("dialog button.main").is_disabled()
        page.fill("dialog input", "cancel")
        page.click("dialog button.main")
        page.wait_for_selector("#state >> text=cancelled by key")
    (run, *_) = served.pipeline.call(ListRuns(DAG)).rows
    assert (run.run_id, run.conf, run.state, run.by) == ("by hand", '{"size":7}', "failed", "key")
    assert watch.wrong == []


def test_the_form_sends_a_long_list_in_parts(browser: Browser, served: ServedDags) -> None:
    store = served.pipeline
    over = MapStructure(("x",), (MapSource("param", key="rows"),))
    structure = dag(task("m", mapped=over), id="long", params=(ParamStructure("rows", "[]"),))
    store.wait(store.player.create(structure, run_id="first"))
    with opened(browser, served, WIDE, "light") as (page, watch):
        page.goto(f"{served.base}/dags/long#trigger")
        page.fill("[data-param=rows]", json.dumps(["x" * 40 + str(number) for number in range(2_500)]))
        page.fill("[name=conf]", '{"more": 1}')
        page.fill("[name=run_id]", "r")
        page.click("form.trigger button.main")
        page.wait_for_url("**/long/runs/r")
    (run, _) = store.call(ListRuns("long")).rows
    assert json.loads(run.conf) == {"rows": {"$tidemill": "items", "value": 2_500}, "more": 1}
    values = store.call(GetValuePage(run.id, "", "rows", offset=2_499)).values
    assert values == ((2_499, json.dumps("x" * 40 + "2499")),)
    assert watch.wrong == []


def test_failed_elements_are_retried_with_one_click(browser: Browser, served: ServedDags) -> None:
    served.pipeline.run_map("broken", 60, 7, 55)
    with opened(browser, served, WIDE, "light") as (page, watch):
        page.goto(f"{served.base}/dags/broken/runs/r/tasks/m")
        assert page.locator("#rows > tr").count() == 51
        page.click("text=Show more")
        page.wait_for_selector("[aria-label='m[59]']")
        page.select_option("[name=state]", "failed")
        page.click("text=Search")
        page.wait_for_url("**state=failed**")
        assert page.locator("#rows > tr").count() == 2
        page.click("text=Retry failed")
        page.click("dialog button.main")
        page.wait_for_selector("text=Cleared 3 tasks.")
        page.wait_for_selector(".chip >> text=mapped")
        page.goto(f"{served.base}/dags/broken/runs/r/tasks/m?map_index=55")
        page.click(".hint a >> nth=0")
        page.wait_for_url("**/tasks/m")
    assert watch.wrong == []
