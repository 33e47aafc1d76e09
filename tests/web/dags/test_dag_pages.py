"""What pages and API show of DAGs, and what they change."""

from __future__ import annotations

import html
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tests.store.dags import dag, task
from tests.web.dags.played import DAG, RUN, PlayedStore, played_store
from tests.web.scripted_pipeline import SCRIPT, SECRET
from tests.web.serving import KEY, ORIGIN, PORT

from tidemill.core.tasks.structure import MapSource, MapStructure, ParamStructure
from tidemill.services.dev import web_ui
from tidemill.store.calls.instance_calls import TaskHistory
from tidemill.store.calls.service_calls import BeginSession, EndSession, ListSessions
from tidemill.store.calls.setting_calls import SetConnection
from tidemill.web.access.hashes import hash_token
from tidemill.web.access.logins import Logins
from tidemill.web.access.origins import Origins
from tidemill.web.app import create_app
from tidemill.web.dags.start import describe_about, mount_sections
from tidemill.web.pages import Pages
from tidemill.web.sections import Health

BASE = f"/dags/{DAG}/runs/{quote(RUN)}"
PAGES = ["/dags", "/dag-runs", "/pools", f"/dags/{DAG}", BASE, f"{BASE}/tasks/extract", f"{BASE}/tasks/retried?try=1"]
TEXTS = [
    *PAGES,
    f"{BASE}/state",
    f"{BASE}/tasks/wait/state",
    *(f"/api/v1{path}" for path in ("/dags", "/dag-runs", "/pools", "/dag-files", f"/dags/{DAG}", BASE)),
    *(f"/api/v1{BASE}{path}" for path in ("/tasks", "/xcoms", "/tasks/wait", "/tasks/wait/history", "/tasks/wait/log")),
    "/api/openapi.json",
    "/api/docs",
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PlayedStore]:
    with played_store(tmp_path) as played:
        yield played


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedStore]:
    """Yield a store that tests only look at."""
    with played_store(tmp_path_factory.mktemp("store")) as played:
        yield played


@asynccontextmanager
async def log_in(store: PlayedStore) -> AsyncIterator[httpx.AsyncClient]:
    watched, debug = store.watched, store.settings.debug
    origins = Origins(debug.host, debug.debug_url, tuple(debug.allowed_hosts))
    pages = Pages(describe_about(watched), origins.prefix)
    app = create_app(
        mount_sections(pages, watched), pages, Logins(KEY, debug.users, debug.tokens), origins, Health(list, list), PORT
    )
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url=ORIGIN, follow_redirects=True) as client:
        await client.get(f"/login?key={KEY}")
        found = re.search(r'data-csrf="([^"]+)"', (await client.get("/dags")).text)
        assert found is not None
        client.headers.update({"X-CSRF-Token": found[1], "Origin": ORIGIN})
        yield client


@pytest.mark.parametrize("path", TEXTS)
async def test_no_page_shows_a_secret_and_text_of_users_is_never_markup(shown: PlayedStore, path: str) -> None:
    async with log_in(shown) as client:
        answer = await client.get(path)

    assert answer.status_code == 200, answer.text
    assert SECRET not in answer.text
    if not path.startswith("/api/"):
        assert SCRIPT not in answer.text
        assert not re.search(r"\s(?:style|on\w+)=", answer.text)
    if path in ("/dags", f"/dags/{DAG}", BASE):
        assert html.escape(SCRIPT, quote=False)[:8] in answer.text


async def test_a_run_says_what_each_task_waits_for(shown: PlayedStore) -> None:
    async with log_in(shown) as client:
        answer = await client.get(f"/api/v1{BASE}/tasks")
        running = (await client.get(f"/api/v1{BASE}/tasks?state=running")).json()
    tasks = {row["task_id"]: row for row in answer.json()["rows"]}

    assert {name: (row["state"], (row["waits_for"] or {}).get("kind")) for name, row in tasks.items()} == {
        "extract": ("success", None),
        "load": ("running", None),
        "notify": ("none", "upstream"),
        "report": ("none", "upstream"),
        "retried": ("up_for_retry", "retry"),
        "wait": ("deferred", "trigger"),
    }
    assert tasks["report"]["waits_for"]["names"] == ["load", "wait"]
    assert tasks["retried"]["waits_for"]["at"] > tasks["retried"]["since"]
    assert tasks["load"]["worker"] is not None
    assert [row["task_id"] for row in running["rows"]] == ["load"]


async def test_a_deferred_task_names_class_arguments_due_time_and_timeout_of_its_trigger(tmp_path: Path) -> None:
    with played_store(tmp_path) as store:
        store.call(SetConnection("shop", "http", password="T0psecretpw"))
        store.defer(
            "late", "tidemill.triggers.builtin.temporal.DateTimeTrigger", {"moment": "2031-05-06T07:08:09+00:00"}
        )
        store.defer("polls", "my.Poll", {"url": "https://me:hunter2@host", "note": "with T0psecretpw", "token": "x1y2"})
        store.call(BeginSession("triggerer", "t", "here", "boot", 1, (), 10))
        async with log_in(store) as client:
            late, polls = [(await client.get(f"/api/v1/dags/{each}/runs/r/tasks")).json() for each in ("late", "polls")]
            page = html.unescape((await client.get("/dags/polls/runs/r/tasks/only")).text)
            run = html.unescape((await client.get("/dags/late/runs/r")).text)

    (wait,) = [row["waits_for"] for row in late["rows"]]
    assert wait["trigger"]["classpath"] == "tidemill.triggers.builtin.temporal.DateTimeTrigger"
    assert wait["text"] == 'an event of DateTimeTrigger(moment="2031-05-06T07:08:09+00:00"), due at'
    assert wait["at"] == wait["trigger"]["due_at"] == 1_935_817_689
    assert wait["times_out_at"] > time.time() + 3_000
    assert "due at" in run
    assert "times out at" in run
    (wait,) = [row["waits_for"] for row in polls["rows"]]
    assert wait["trigger"]["arguments"] == 'url="https://***@host", note="with ***", token="***"'
    assert (wait["at"], wait["missing"]) == (None, "")
    for text in ("my.Poll", 'note="with ***"', "Times out", "none runs it"):
        assert text in page
    assert "T0psecretpw" not in page + run


async def test_a_stream_is_shown_with_its_counts_cursor_error_and_events(tmp_path: Path) -> None:
    with played_store(tmp_path) as store:
        number = store.stream("pages", {"page": 1}, SCRIPT, 3)
        async with log_in(store) as client:
            path = "/dags/pages/runs/r/tasks/only"
            (task,) = (await client.get("/api/v1/dags/pages/runs/r/tasks")).json()["rows"]
            events = (await client.get(f"/api/v1{path}/events?limit=2")).json()
            older = (await client.get(f"/api/v1{path}/events?limit=2&cursor={events['cursor']}")).json()
            page = (await client.get(path)).text

    assert task["stream"].pop("rate") > 0
    assert task["stream"] == {
        "trigger": number,
        "received": 3,
        "handled": 1,
        "undelivered": 2,
        "checkpoint": '"page 1"',
        "ended": True,
        "error": "Traceback\nValueError: no page",
        "carried": 0,
        "discarded": 0,
        "discarded_for": None,
    }
    rows = [(row["trigger_run_id"], row["sequence_index"], row["is_last"]) for row in events["rows"]]
    assert rows == [(number, 2, True), (number, 1, False)]
    assert [(row["payload"], row["identity"]) for row in older["rows"]] == [('{"page": 1}', None)]
    assert older["cursor"] is None
    assert SCRIPT not in page
    shown = html.unescape(re.sub(r"<[^>]+>", " ", page))
    for text in ("Received 3", "Handled 1", "Undelivered 2", 'Cursor "page 1"', "ValueError: no page", "2, last"):
        assert text in " ".join(shown.split())


async def test_a_run_that_no_service_works_on_says_so(tmp_path: Path) -> None:
    with played_store(tmp_path) as store:
        async with log_in(store) as client:
            before = (await client.get(f"/api/v1{BASE}/tasks")).json()
            for each in store.call(ListSessions()):
                store.call(EndSession(each.id))
            after = (await client.get(f"/api/v1{BASE}/tasks")).json()
            page = (await client.get(BASE)).text

    waits = {row["task_id"]: row["waits_for"] for row in before["rows"]}
    assert waits["wait"]["missing"] == "no triggerer is alive; start `tidemill dev`"
    waits = {row["task_id"]: row["waits_for"] for row in after["rows"]}
    assert after["missing"] == "no scheduler and no worker is alive; start `tidemill dev`"
    assert after["missing"] in html.unescape(page)
    assert waits["retried"]["missing"] == "no scheduler is alive; start `tidemill dev`"


async def test_wrong_names_parameters_and_cursors_are_refused(shown: PlayedStore) -> None:
    wrong = {
        "/api/v1/dags/nothing": 404,
        f"/api/v1/dags/{DAG}/runs/nothing": 404,
        f"/api/v1{BASE}/tasks/nothing": 404,
        f"/api/v1{BASE}/tasks/nothing/log": 404,
        "/api/v1/dags?tags=x": 422,
        f"/api/v1{BASE}/tasks?state=sleeping": 422,
        "/api/v1/dag-runs?state=deferred": 422,
        "/api/v1/dag-runs?cursor=x": 422,
        f"/api/v1{BASE}/tasks?cursor=-": 422,
        f"/api/v1{BASE}/xcoms?cursor=x": 422,
        f"/api/v1{BASE}/tasks/wait/log?cursor=%C2%B2": 422,
    }
    async with log_in(shown) as client:
        answers = {path: await client.get(path) for path in wrong}
    assert {path: answer.status_code for path, answer in answers.items()} == wrong
    assert all(answer.headers["content-type"] == "application/problem+json" for answer in answers.values())


async def test_pages_of_lists_are_complete(shown: PlayedStore) -> None:
    async with log_in(shown) as client:
        for path, key in (
            ("/api/v1/dags", "dag_id"),
            ("/api/v1/dag-runs", "run_id"),
            (f"/api/v1{BASE}/tasks", "task_id"),
        ):
            every = [row[key] for row in (await client.get(path)).json()["rows"]]
            found, cursor = [], ""
            while cursor is not None:
                page = (await client.get(path, params={"limit": 1, "cursor": cursor})).json()
                found += [row[key] for row in page["rows"]]
                cursor = page["cursor"]
            assert found == every
            assert len(found) >= 2


async def test_a_log_is_followed_with_its_cursor(store: PlayedStore) -> None:
    path = f"/api/v1{BASE}/tasks/extract/log"
    async with log_in(store) as client:
        first = (await client.get(path)).json()
        nothing = (await client.get(path, params={"cursor": first["cursor"]})).json()
        number = store.wait(store.player.tasks(store.wait(_find_run(store))))["extract"].id
        store.append_log(number, 1, "more")
        more = (await client.get(path, params={"cursor": nothing["cursor"]})).json()

    assert [row["text"] for row in first["rows"]] == [f"hello {SCRIPT}", "\x1b[31mred"]
    assert (nothing["rows"], nothing["cursor"], nothing["ended"]) == ([], first["cursor"], True)
    assert [(row["text"], row["level"], row["source"]) for row in more["rows"]] == [("more", "error", "stderr")]


async def _find_run(store: PlayedStore):  # type: ignore[no-untyped-def]
    from tidemill.store.calls.run_calls import GetRun

    return await store.database.call(GetRun(DAG, RUN))


async def test_a_callback_of_a_run_that_failed_is_shown_with_what_it_wrote(store: PlayedStore) -> None:
    number = store.fail_callback("told")
    base = "/dags/told/runs/first%20run"
    async with log_in(store) as client:
        page = (await client.get(base)).text
        listed = (await client.get(f"/api/v1{base}/callbacks")).json()["rows"]
        log = (await client.get(f"/api/v1{base}/callbacks/{number}/log")).json()
        other = await client.get(f"/api/v1{base}/callbacks/{number + 1}/log")

    assert "ConnectionError: the chat is down" in page
    assert "sending &lt;script" in page
    assert SCRIPT not in page
    assert [(one["id"], one["task_id"], one["name"], one["state"]) for one in listed] == [
        (number, None, "on_success", "failed")
    ]
    assert [line["text"] for line in log["rows"]] == [f"sending {SCRIPT}"]
    assert other.status_code == 404


async def test_a_run_is_created_once_for_a_repeated_request(store: PlayedStore) -> None:
    order = {"conf": {"size": 5}, "logical_date": "2026-05-01T12:00:00Z", "request": "one"}
    async with log_in(store) as client:
        first = await client.post(f"/api/v1/dags/{DAG}/runs", json=order)
        again = await client.post(f"/api/v1/dags/{DAG}/runs", json=order)
        twin = await client.post(f"/api/v1/dags/{DAG}/runs", json={**order, "request": "two"})
        naive = await client.post(f"/api/v1/dags/{DAG}/runs", json={"logical_date": "2026-05-01T12:00:00"})
        unknown = await client.post("/api/v1/dags/nothing/runs", json={})
        typing_error = await client.post(f"/api/v1/dags/{DAG}/runs", json={"config": {}})
        wrong = await client.post(f"/api/v1/dags/{DAG}/runs", json={"conf": {"region": "mars"}})
        misspelt = await client.post(f"/api/v1/dags/{DAG}/runs", json={"conf": {"Regoin": "mars"}})

    assert first.status_code == again.status_code == 201, first.text
    assert first.json()["run"] == again.json()["run"]
    run = first.json()["run"]
    assert (run["conf"], run["by"], run["logical_at"]) == ('{"size":5}', "key", 1777636800.0)
    assert [each.status_code for each in (twin, naive, unknown, typing_error)] == [409, 422, 404, 422]
    assert first.json()["warnings"] == []
    assert misspelt.json()["warnings"] == ["DAG 'orders' has no param 'Regoin'; did you mean 'region'?"]
    assert misspelt.json()["text"].endswith(" did you mean 'region'?")
    assert (wrong.status_code, wrong.json()["detail"]) == (
        422,
        "param 'region': 'mars' is not one of ['eu', 'us']; no run of DAG 'orders' was created",
    )


async def test_a_long_list_is_sent_in_parts_before_its_run_is_created(store: PlayedStore) -> None:
    over = MapStructure(("x",), (MapSource("param", key="rows"),))
    schema = json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 4})
    params = (ParamStructure("rows", "[]", schema),)
    store.wait(store.player.create(dag(task("m", mapped=over), id="long", params=params)))
    store.wait(store.player.create(dag(task("m", mapped=over), id="free", params=(ParamStructure("rows", "[]"),))))
    path = "/api/v1/dags/long"
    async with log_in(store) as client:
        part = {"stage": 7, "name": "rows"}
        sent = [
            await client.post(f"{path}/conf-lists", json={**part, "first": first, "values": values})
            for first, values in ((0, [10, 11]), (2, [12]), (2, [12]))
        ]
        wrong = await client.post(f"{path}/conf-lists", json={**part, "first": 3, "values": ["x"]})
        other = await client.post(f"{path}/conf-lists", json={**part, "name": "n", "values": [1]})
        unknown = await client.post("/api/v1/dags/nothing/conf-lists", json={**part, "values": [1]})
        free = await client.post("/api/v1/dags/free/conf-lists", json={**part, "stage": 8, "values": ["a", "b"]})
        of_other = await client.post(f"{path}/runs", json={"lists": {"rows": 2}, "stage": 8})
        missing = await client.post(f"{path}/runs", json={"lists": {"rows": 4}, "stage": 7})
        long = await client.post(f"{path}/runs", json={"lists": {"rows": 5}, "stage": 7})
        twice = await client.post(f"{path}/runs", json={"conf": {"rows": []}, "lists": {"rows": 3}, "stage": 7})
        made = await client.post(
            f"{path}/runs", json={"run_id": "r", "conf": {"n": 1}, "lists": {"rows": 3}, "stage": 7}
        )
        page = await client.get("/dags/long")
    assert [answer.status_code for answer in sent] == [200] * 3
    assert [answer.status_code for answer in (wrong, other, unknown)] == [422, 422, 404]
    assert "rows" in wrong.json()["detail"]
    assert "[3]" in wrong.json()["detail"]
    assert [answer.status_code for answer in (free, of_other)] == [200, 422], "its schema would not be checked"
    assert [answer.status_code for answer in (missing, long, twice)] == [422] * 3
    assert made.status_code == 201
    assert """data-lists='{"rows": true}'""" in page.text
    attempts = [one for one in store.wait(store.player.claim()) if one.run_id == "r"]
    assert [one.elements for one in attempts] == [("10",), ("11",), ("12",)]


@pytest.mark.parametrize(
    "value",
    ["[" * 50_000 + "]" * 50_000, "[" * 500 + "]" * 500, json.dumps("x" * 1_040_000)],
    ids=["deep", "less", "large"],
)
async def test_a_run_with_a_value_that_is_deep_or_large_is_refused(store: PlayedStore, value: str) -> None:
    headers = {"content-type": "application/json"}
    async with log_in(store) as client:
        answer = await client.post(
            f"/api/v1/dags/{DAG}/runs", content=f'{{"conf": {{"region": {value}}}}}', headers=headers
        )

    assert answer.status_code in (400, 413, 422)
    assert len(answer.text) < 2000


async def test_changes_stand_in_the_journal_with_who_made_them(store: PlayedStore) -> None:
    async with log_in(store) as client:
        which = await client.post(
            f"/api/v1{BASE}/clear", json={"tasks": ["extract"], "downstream": True, "dry_run": True}
        )
        cleared = await client.post(f"/api/v1{BASE}/clear", json={"tasks": ["extract"]})
        marked = await client.post(f"/api/v1{BASE}/mark", json={"tasks": ["retried"], "state": "success"})
        cancelled = await client.post(f"/api/v1{BASE}/cancel")
        again = await client.post(f"/api/v1{BASE}/cancel")
        paused = await client.post(f"/api/v1/dags/{DAG}/pause", json={"paused": True})
        dag = (await client.get(f"/api/v1/dags/{DAG}")).json()["dag"]

    assert which.json()["tasks"] == ["extract", "load", "wait"]
    assert (cleared.json()["tasks"], marked.json()["tasks"]) == (["extract"], ["retried"])
    assert cancelled.json()["run"]["reason"] == "cancelled by key"
    assert again.status_code == 200, "a task of it is still ending"
    assert (paused.status_code, dag["paused"]) == (200, True)
    history = store.call(TaskHistory(DAG, RUN, "extract")).rows
    assert ("none", "key") in [(change.after, change.by) for change in history]


async def test_a_change_needs_the_token_of_the_page(store: PlayedStore) -> None:
    async with log_in(store) as client:
        del client.headers["X-CSRF-Token"]
        refused = await client.post(f"/api/v1{BASE}/cancel")
        run = (await client.get(f"/api/v1{BASE}")).json()
    assert (refused.status_code, run["state"]) == (403, "running")


async def test_the_state_of_a_run_is_sent_only_if_it_changed(store: PlayedStore) -> None:
    async with log_in(store) as client:
        page = (await client.get(BASE)).text
        found = re.search(r'hx-get="([^"]+)"', page)
        assert found is not None
        address = html.unescape(found[1])
        same = await client.get(address)
        await client.post(f"/api/v1{BASE}/mark", json={"tasks": ["retried"], "state": "skipped"})
        changed = await client.get(address)
    assert (same.status_code, changed.status_code) == (204, 200)
    assert "state-skipped" in changed.text


async def test_who_may_only_read_changes_nothing(tmp_path: Path) -> None:
    token = "t" * 40
    tokens = {"reader": {"hash": hash_token(token), "role": "read"}}
    with played_store(tmp_path, tokens=tokens) as store:
        async with log_in(store) as client:
            client.cookies.clear()
            client.headers["Authorization"] = f"Bearer {token}"
            seen = await client.get(f"/api/v1{BASE}")
            changes = {
                f"{BASE}/clear": {},
                f"{BASE}/mark": {"tasks": ["load"], "state": "failed"},
                f"{BASE}/cancel": None,
                f"/dags/{DAG}/pause": {"paused": True},
                f"/dags/{DAG}/runs": {},
            }
            refused = [await client.post(f"/api/v1{path}", json=body) for path, body in changes.items()]
    assert seen.status_code == 200
    assert [answer.status_code for answer in refused] == [403] * 5


async def test_a_store_that_does_not_answer_is_a_problem_and_not_a_hanging_page(
    store: PlayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with log_in(store) as client:
        monkeypatch.setattr(web_ui, "STORE_SECONDS", 0.2)
        blocked = threading.Event()
        store.loop.call_soon_threadsafe(blocked.wait, 60)
        try:
            answer = await client.get("/api/v1/dags")
        finally:
            blocked.set()
    assert (answer.status_code, "does not answer" in answer.json()["detail"]) == (503, True)


async def test_elements_of_a_mapped_task_have_pages_lists_and_changes_of_their_own(store: PlayedStore) -> None:
    store.map_task("maps", "scheduled", "scheduled", "none")
    base = "/api/v1/dags/maps/runs/r"
    async with log_in(store) as client:

        async def read(path: str) -> dict[str, Any]:
            answer = await client.get(f"{base}{path}")
            assert answer.status_code == 200, answer.text
            return answer.json()

        listed, cursor = [], ""
        while cursor is not None:
            page = await read(f"/tasks?limit=2&cursor={cursor}")
            listed += [(row["task_id"], row["map_index"], row["state"]) for row in page["rows"]]
            cursor = page["cursor"]
        assert listed == [("a", -1, "success"), ("b", -1, "scheduled")]
        assert [row["state"] for row in (await read("/tasks/a/elements"))["rows"]] == ["success", "success", "none"]
        assert (await read("/tasks/a?map_index=2"))["state"] == "none"
        assert [row["text"] for row in (await read("/tasks/a/log?map_index=1"))["rows"]] == ["log of a[1]"]
        assert [row["text"] for row in (await read("/tasks/a/log"))["rows"]] == ["log of a"]
        assert [row["after"] for row in (await read("/tasks/a/history?map_index=2"))["rows"]] == []
        assert [row["value"] for row in (await read("/xcoms?task=a&map_index=0"))["rows"]] == ['"value of a[0]"']
        assert len((await read("/xcoms?task=a"))["rows"]) == 3
        ranged = (await read("/xcoms?task=a&map_index=0&last_index=1"))["rows"]
        assert [row["map_index"] for row in ranged] == [0, 1]
        missing = await client.get(f"{base}/tasks/a?map_index=3")
        assert (missing.status_code, "a[3]" in missing.json()["detail"]) == (404, True)

        shown = html.unescape((await client.get("/dags/maps/runs/r/tasks/a?map_index=1")).text)
        assert "<h1><code>a[1]</code></h1>" in shown
        assert '{"map_index": 1, "tasks": ["a"]}' in shown
        assert "value of a[1]" in shown
        assert "value of a[0]" not in shown
        run = (await client.get("/dags/maps/runs/r")).text
        assert "<code>a[2]</code>" not in run
        assert "a: success" in run, "the graph shows the task, not one of its elements"
        grid = (await client.get("/dags/maps")).text
        assert 'title="r: success' in grid
        assert 'title="r: none"' not in grid

        cleared = (await client.post(f"{base}/clear", json={"tasks": ["a"], "map_index": 0})).json()
        marked = (await client.post(f"{base}/mark", json={"tasks": ["a"], "state": "skipped", "map_index": 2})).json()
        refused = await client.post(f"{base}/clear", json={"map_index": 0})
        states = [row["state"] for path in ("/tasks", "/tasks/a/elements") for row in (await read(path))["rows"]]
    assert (cleared["tasks"], marked["tasks"], refused.status_code) == (["a[0]"], ["a[2]"], 422)
    assert states == ["success", "scheduled", "none", "success", "skipped"]


STATES = ["success", "success", "running", "failed", "failed", "scheduled", "skipped", "up_for_retry"]


@pytest.fixture(scope="module")
def opened_map(shown: PlayedStore) -> PlayedStore:
    """A store with a run whose task `m` is mapped: 72 of 100 elements exist."""
    counts = {"success": 18, "failed": 18, "skipped": 9, "unfinished": 18, "retrying": 9}
    shown.open_map("mapped", STATES * 9, arrived=100, created=72, **counts)
    return shown


async def test_a_mapped_task_is_shown_by_its_counts_and_its_elements_by_pages(opened_map: PlayedStore) -> None:
    base = "/dags/mapped/runs/r"
    async with log_in(opened_map) as client:

        async def read(path: str) -> Any:
            return (await client.get(f"/api/v1{base}{path}")).json()

        head = next(row for row in (await read("/tasks"))["rows"] if row["task_id"] == "m")
        wanted = {"arrived": 100, "created": 72, "unfinished": 27, "running": 9, "success": 18, "closed": False}
        assert {name: head["elements"][name] for name in wanted} == wanted
        assert head["elements"]["rate"] > 0
        assert (head["state"], head["waits_for"]["kind"]) == ("mapped", "elements")

        failed, cursor = [], ""
        while cursor is not None:
            page = await read(f"/tasks/m/elements?state=failed&first=10&last=50&limit=4&cursor={cursor}")
            failed += [row["map_index"] for row in page["rows"]]
            cursor = page["cursor"]
        assert failed == [index for index in range(10, 51) if STATES[index % 8] == "failed"]
        for state in ("running", "scheduled", "success", "up_for_retry"):
            rows = (await read(f"/tasks/m/elements?state={state}"))["rows"]
            assert [row["state"] for row in rows] == [state] * (18 if state == "success" else 9), state
        groups = await read("/tasks/m/failures")
        assert [(one["elements"], one["first"]) for one in groups["groups"]] == [(9, 3), (9, 4)]
        assert (groups["elements"], groups["more"]) == (18, False)

        shown = html.unescape((await client.get(f"{base}/tasks/m?state=failed&index=10-20")).text)
        assert "18 failed elements" in shown
        assert "/tasks/m?map_index=11" in shown
        assert "/tasks/m?map_index=27" not in shown
        assert (await client.get(f"{base}/tasks/m?index=x")).status_code == 422
        run = html.unescape((await client.get(base)).text)
        assert "45 of 100 so far: 18 success, 18 failed" in run
        assert "an element of" in (await client.get(f"{base}/tasks/m?map_index=3")).text


@pytest.mark.parametrize("order", [{"indexes": [3, 1]}, {"indexes": [1, 3], "map_index": 2}, {"indexes": [-1, 3]}])
async def test_a_range_of_elements_that_makes_no_sense_is_refused(opened_map: PlayedStore, order: Any) -> None:
    async with log_in(opened_map) as client:
        answer = await client.post("/api/v1/dags/mapped/runs/r/clear", json={"tasks": ["m"], **order})
    assert answer.status_code == 422


async def test_a_mapped_group_is_shown_by_its_elements_and_an_element_by_its_tasks(shown: PlayedStore) -> None:
    shown.open_group("grouped")
    base = "/dags/grouped/runs/r"
    async with log_in(shown) as client:

        async def read(path: str) -> Any:
            return (await client.get(f"/api/v1{base}{path}")).json()

        head = await read("/tasks/g")
        counts = [head["elements"][name] for name in ("success", "failed", "running", "unfinished", "arrived")]
        assert (head["state"], counts) == ("mapped", [2, 2, 6, 6, 12])
        elements = (await read("/tasks/g/elements"))["rows"]
        assert [row["state"] for row in elements[:5]] == ["success", "success", "failed", "failed", "mapped"]
        assert (await read("/tasks/g/elements?state=mapped"))["rows"][0]["map_index"] == 4
        failures = await read("/tasks/g/failures")
        assert [(one["task_id"], one["elements"], one["first"]) for one in failures["groups"]] == [("g.fit", 2, 2)]
        assert (await read("/tasks/g.put?map_index=5"))["waits_for"]["text"] == "upstream g.fit in this element"

        page = html.unescape((await client.get(f"{base}/tasks/g")).text)
        assert 'class="cell state-failed" href="/dags/grouped/runs/r/tasks/g.fit?map_index=3"' in page
        element = html.unescape((await client.get(f"{base}/tasks/g?map_index=3")).text)
        assert [element.index(f"<code>g.{name}[3]</code>") for name in ("get", "fit", "put")] == sorted(
            element.index(f"<code>g.{name}[3]</code>") for name in ("get", "fit", "put")
        )
        assert "upstream failed" in element
        assert 'id="log"' not in element
        inner = (await client.get(f"{base}/tasks/g.fit?map_index=3")).text
        assert '<a href="/dags/grouped/runs/r/tasks/g?map_index=3"><code>g[3]</code></a>' in inner
        assert (await client.get(f"{base}/tasks/g/state?map_index=3")).status_code == 200
        run = html.unescape((await client.get(base)).text)
        assert "of 12: 2 success, 2 failed" in run

        for order, wanted in (
            ({"map_index": 0}, 3),
            ({"failed": True, "downstream": True}, 5),  # and `page`
        ):
            cleared = await client.post(f"/api/v1{base}/clear", json={"tasks": ["g"], "dry_run": True, **order})
            assert len(cleared.json()["tasks"]) == wanted


async def test_a_loop_is_shown_by_its_iterations_with_their_durations_results_and_decisions(shown: PlayedStore) -> None:
    shown.open_loop("looped")
    base = "/dags/looped/runs/r"
    async with log_in(shown) as client:
        rows = (await client.get(f"/api/v1{base}/tasks/epoch/elements")).json()["rows"]
        assert [(row["map_index"], row["state"]) for row in rows] == [(0, "success"), (1, "success"), (2, "mapped")]
        assert rows[1]["label"] == f"goes on: the loss is 0.63 {SCRIPT}, result {{'loss': 0.63}}"
        assert rows[1]["ended_at"] >= rows[1]["started_at"]

        page = html.unescape((await client.get(f"{base}/tasks/epoch")).text)
        assert "Decision and result" in page
        assert "3 so far, at most 30" in page
        assert f'<td class="wrap">{rows[1]["label"]}</td>' in page
        assert "Later iterations are removed" in page
        for path in ("epoch?map_index=1", "epoch.train?map_index=1"):
            assert "Later iterations are removed" in (await client.get(f"{base}/tasks/{path}")).text


async def test_elements_of_one_attempt_are_shown_with_their_results_and_its_log(shown: PlayedStore) -> None:
    shown.open_iteration("calls")
    base = "/dags/calls/runs/r"
    async with log_in(shown) as client:

        async def read(path: str) -> Any:
            return (await client.get(f"/api/v1{base}{path}")).json()

        head = await read("/tasks/calls")
        names = ("arrived", "success", "failed", "skipped", "running", "retrying", "iterated")
        assert [head["elements"][name] for name in names] == [1000, 2, 1, 1, 20, 1, True]
        rows = (await read("/tasks/calls/elements"))["rows"]
        ended = ["success", "failed", "up_for_retry", "success", "skipped"]
        assert [row["state"] for row in rows[:6]] == [*ended, "none"]
        assert rows[2]["waits_for"]["text"] == "try 2 of 2, in the attempt of all elements"
        assert rows[5]["waits_for"]["kind"] == "elements"
        assert len((await read("/tasks/calls/elements?state=none&limit=100"))["rows"]) == 100
        for index, value in ((0, '"zero"'), (3, '"three"')):
            xcoms = (await read(f"/xcoms?task=calls&map_index={index}"))["rows"]
            assert [(one["map_index"], one["key"], one["value"]) for one in xcoms] == [(index, "return_value", value)]
        for index in (-1, 0, 3, 999):
            log = await read(f"/tasks/calls/log?map_index={index}")
            assert [line["text"] for line in log["rows"]] == ["element 1 failed in try 2"]

        page = (await client.get(f"{base}/tasks/calls")).text
        assert 'id="log"' in page
        assert "try 1 of 2, running" in page
        assert (await client.get(f"{base}/tasks/calls?map_index=999")).status_code == 200
        assert (await client.get(f"{base}/tasks/calls?map_index=1000")).status_code == 404
        element = (await client.get(f"{base}/tasks/calls?map_index=1")).text
        assert 'data-try="1"' in element
        assert "Mark success" not in element
        assert (await client.get(f"{base}/tasks/calls/state?map_index=1")).status_code == 200
