"""What pages and API show of a trigger host."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
from tests.web.scripted_host import LIST, ScriptedHost, scripted_host
from tests.web.scripted_pipeline import SCRIPT, SECRET
from tests.web.serving import KEY, ORIGIN, PORT

from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.recorder.format.counts import Counts, LaneCounts, name_stream_lane
from tidemill.services.triggerer.lists.reporting import web_ui
from tidemill.services.triggerer.lists.reporting.host_view import HostView
from tidemill.services.triggerer.lists.reporting.web_ui import WatchedHost
from tidemill.web.access.logins import Logins
from tidemill.web.access.origins import Origins
from tidemill.web.app import create_app
from tidemill.web.pages import Pages
from tidemill.web.sections import Health
from tidemill.web.triggers.lane_series import LaneSeries, build_lane_series
from tidemill.web.triggers.start import describe_about, mount_sections

PAGES = [
    "/triggers",
    "/streams",
    "/configuration",
    "/configuration?changed=true",
    "/events",
    "/failures",
    "/recordings",
]
TEXTS = [*PAGES, "/api/v1/host", "/api/v1/triggers", "/api/v1/streams", "/api/v1/configuration", "/api/openapi.json"]


@pytest.fixture(scope="module")
def host() -> Iterator[ScriptedHost]:
    with scripted_host() as made:
        yield made


def watch(host: ScriptedHost) -> WatchedHost:
    monitor = host.monitor
    health = monitor.find_dead, monitor.find_unready
    view = HostView(monitor)
    return WatchedHost(host.settings, "worker-1", LIST, view, host.loop, *health, metrics_address="http://m:9090")


@asynccontextmanager
async def log_in(host: ScriptedHost) -> AsyncIterator[httpx.AsyncClient]:
    watched, debug = watch(host), host.settings.debug
    origins = Origins(debug.host, debug.debug_url, tuple(debug.allowed_hosts))
    pages = Pages(describe_about(watched), origins.prefix)
    _, sections = mount_sections(pages, watched)
    health = Health(watched.find_dead, watched.find_unready)
    app = create_app(sections, pages, Logins(KEY, debug.users, debug.tokens), origins, health, PORT)
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
        await client.get(f"/login?key={KEY}")
        yield client


@pytest.mark.parametrize("path", TEXTS)
async def test_no_page_shows_a_secret_and_text_of_users_is_never_markup(host: ScriptedHost, path: str) -> None:
    async with log_in(host) as client:
        answer = await client.get(path)

    assert answer.status_code == 200
    assert SECRET not in answer.text
    if path in PAGES:
        assert SCRIPT not in answer.text
        assert all('src="/static/' in script for script in re.findall(r"<script[^>]*>", answer.text))
        assert not re.search(r"\s(?:style|on\w+)=", answer.text)
        links = re.findall(r'<nav class="links".*?</nav>', answer.text, re.DOTALL)[0]
        assert re.findall(r">([A-Z]\w+)</a>", links)[:4] == ["Triggers", "Streams", "Failures", "Events"]
        assert "Messages" not in links
    if path == "/streams":
        assert html.escape(SCRIPT) in answer.text


async def test_without_a_login_nothing_is_shown(host: ScriptedHost) -> None:
    async with log_in(host) as client:
        client.cookies.clear()
        assert (await client.get("/api/v1/triggers")).status_code == 401
        assert (await client.get("/healthz")).status_code == 200


async def test_triggers_have_state_events_runs_and_their_last_error(host: ScriptedHost) -> None:
    async with log_in(host) as client:
        assert (await client.get("/", follow_redirects=False)).headers["location"] == "/triggers"
        page = (await client.get("/api/v1/triggers")).json()
        failed = (await client.get("/api/v1/triggers?state=restarting")).json()
        by_text = (await client.get("/api/v1/triggers?text=AUD")).json()
        wrong = await client.get("/api/v1/triggers?state=sleeping")

    assert [row["name"] for row in page["rows"]] == ["audit", "invoices", f"shipping {SCRIPT}"]
    assert page["cursor"] is None
    [row] = failed["rows"]
    assert (row["events"], row["runs"], row["error"]) == (2, 1, f"Traceback\nRuntimeError: {SCRIPT}")
    assert row["next_at"] == pytest.approx(row["since"] + 20.0)
    assert [row["name"] for row in by_text["rows"]] == ["audit"]
    assert (wrong.status_code, "expected one of" in wrong.json()["detail"]) == (422, True)


async def test_streams_say_who_holds_the_oldest_event_of_each_lane(host: ScriptedHost) -> None:
    async with log_in(host) as client:
        kafka, queue = (await client.get("/api/v1/streams")).json()["rows"]
        details = (await client.get(f"/api/v1/streams/{kafka['id']}?limit=1")).json()
        later = (await client.get(f"/api/v1/streams/{kafka['id']}?cursor={details['cursor']}")).json()
        shown = await client.get(f"/streams/{kafka['id']}")
        unknown = await client.get("/api/v1/streams/0123456789abcdef")
        wrong = await client.get("/streams/NOTHING")

    assert kafka["name"] == f"kafka orders {SCRIPT}"
    assert (kafka["subscribers"], kafka["outstanding"], kafka["lanes"]) == (2, 2, 2)
    assert (queue["name"], queue["oldest"]["lane"], queue["oldest"]["holders"]) == ("queue", "group", ["shipping"])
    assert (kafka["oldest"]["lane"], kafka["oldest"]["holders"]) == ("orders/0", ["audit", "invoices"])
    assert kafka["oldest"]["age_seconds"] >= 0
    assert kafka["oldest"]["since"] <= time.time()
    assert [lane["lane"] for lane in details["lanes"]] == ["orders/0"]
    assert [lane["lane"] for lane in later["lanes"]] == ["orders/1"]
    assert later["cursor"] is None
    assert details["subscribers"] == ["audit"]
    assert (shown.status_code, unknown.status_code, wrong.status_code) == (200, 404, 422)


async def test_pages_of_triggers_and_streams_are_bounded_and_complete() -> None:
    with scripted_host(max_ui_rows=150) as host:
        host.list_triggers(*(f"t{number:04d}" for number in range(1_000)))
        for number in range(12):
            host.open_stream(f"s{number:02d}", ["t0001"])
        async with log_in(host) as client:
            text = (await client.get("/triggers")).text
            assert text.count("<tr") == 102  # the head, a hundred triggers, and the link to more
            names = await read_all(client, "/api/v1/triggers", limit=9_999)
            streams = await read_all(client, "/api/v1/streams", limit=5)
    assert len(names) == len(set(names)) == 1_003
    assert len(streams) == len(set(streams)) == 14


async def read_all(client: httpx.AsyncClient, path: str, limit: int) -> list[str]:
    names: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await client.get(path, params={"limit": limit, "cursor": cursor})).json()
        assert len(page["rows"]) <= min(limit, 150)
        names += [row["name"] for row in page["rows"]]
        cursor = page["cursor"]
    return names


async def test_the_host_says_why_it_is_not_ready(host: ScriptedHost) -> None:
    async with log_in(host) as client:
        assert (await client.get("/api/v1/host")).json()["state"] == "running"
        assert (await client.get("/readyz")).json() == {"ok": True, "reasons": []}
        host.standing = ProducerStanding.DOWN
        try:
            down = (await client.get("/api/v1/host")).json()
            ready = await client.get("/readyz")
        finally:
            host.standing = ProducerStanding.OPEN

    assert (down["store"], down["problems"]) == ("down", ["its store cannot be reached"])
    assert (ready.status_code, ready.json()["reasons"]) == (503, ["its store cannot be reached"])
    assert down["triggers"]["restarting"] == 1


async def test_a_host_that_is_blocked_is_answered_with_a_problem(
    host: ScriptedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_ui, "LOOP_SECONDS", 0.2)
    blocked = {"on": True}

    def block() -> None:
        while blocked["on"]:
            time.sleep(0.01)

    async with log_in(host) as client:
        host.loop.call_soon_threadsafe(block)
        try:
            answer = await client.get("/api/v1/triggers")
        finally:
            blocked["on"] = False
    assert answer.status_code == 503
    assert "does not answer" in answer.json()["detail"]


async def test_live_pages_begin_with_what_is_now(host: ScriptedHost) -> None:
    watched = watch(host)
    view, _ = mount_sections(Pages(describe_about(watched)), watched)
    for name in ("host", "triggers", "streams"):
        await view.refresh(name)
        events = await view.live.listen(name)
        parts = {}
        while name not in parts:
            event = await anext(events)
            parts[event["event"]] = event["data"]
        assert view.live.has_clients(name)
        if name == "host":
            assert json.loads(parts[name])["streams"] == 2
        else:
            assert SCRIPT not in parts[name]
            assert html.escape(SCRIPT) in parts[name]
        await events.aclose()  # type: ignore[attr-defined]
    assert view.live.clients == 0


def test_lanes_are_added_up_over_time_by_stream_and_by_lane() -> None:
    one, two, other = (name_stream_lane(*place) for place in (("a", "0"), ("a", "1"), ("ab", "0")))
    points = [
        Counts(100, 10, lanes={one: LaneCounts(10, 20, 30), two: LaneCounts(1, 2, 3), other: LaneCounts(100, 0, 0)}),
        Counts(110, 10),
        Counts(140, 10, lanes={one: LaneCounts(5, 0, 0)}),
        Counts(150, 10, lanes={one: LaneCounts(7, 7, 7)}),
    ]

    def build(stream: str | None = None, lane: str | None = None) -> LaneSeries:
        return build_lane_series(points, 10, 159.0, stream, lane)

    whole = build()
    assert whole.at == [100.0, 110.0, 120.0, 140.0], "the last step is not over"
    assert whole.broadcast == [11.1, 0.0, None, 0.5]
    assert (whole.resolved[0], whole.advanced[0]) == (2.2, 3.3)
    assert build("a").broadcast == [1.1, 0.0, None, 0.5]
    assert build("a", "1").advanced == [0.3, 0.0, None, 0.0]
    assert build("b").broadcast == [0.0, 0.0, None, 0.0]
    assert build_lane_series([], 10, 159.0, None, None).at == []


async def test_pages_of_streams_have_a_chart_of_their_lanes(host: ScriptedHost) -> None:
    async with log_in(host) as client:
        streams = (await client.get("/api/v1/streams")).json()["rows"]
        found = await client.get("/api/v1/streams/series", params={"stream": streams[0]["name"]})
        lane = await client.get("/api/v1/streams/series?lane=0")
        pages = [(await client.get(path)).text for path in ("/streams", f"/streams/{streams[0]['id']}")]
    assert (found.status_code, lane.status_code) == (200, 422)
    assert set(found.json()) == {"at", "broadcast", "resolved", "advanced"}
    assert [page.count('data-chart="lanes"') for page in pages] == [1, 1]
    assert "&stream=" in html.unescape(pages[1])
