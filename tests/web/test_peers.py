"""Other hosts: what they have recorded is shown with their names; what they send is not trusted."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.recorder.rows import message, messages, task, tasks
from tests.until import slack, wait_until
from tests.web.scripted_pipeline import SCRIPT, ScriptedPipeline
from tests.web.serving import log_in

from tidemill.config.redaction import redact
from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.config.sections.web_settings import PeerSettings
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.writing.writer import RecordWriter
from tidemill.spark.live.web_ui import serve_web
from tidemill.web.access.hashes import hash_token
from tidemill.web.peers.peers import Peers

TOKEN = "the-token-of-a-peer"
NOW = int(time.time() * 1_000_000)


def write(folder: Path, worker: str, offsets: range) -> None:
    """Record messages that were resolved one second after the other, each with a task and a failure."""
    rows, ran, events = [], [], []
    for offset in offsets:
        at = NOW - 3_600_000_000 + offset * 1_000_000
        rows.append(message(offset, resolved_at=at, consumed_at=at - 1_000))
        ran.append(task(f"t-{offset}", [offset], ended_at=at - 10))
        events.append(
            RecordedEvent(
                at - 10, EventKind.TASK_FAILED, "orders", 0, offset, f"t-{offset}", text="no", error_class="no"
            )
        )
    with RecordWriter(DebugSettings(db_dir=str(folder)), "order-workers", worker) as writer:
        writer.put_rows("e", 0, 1, RowTable.MESSAGES, messages(*rows))
        writer.put_rows("e", 0, 2, RowTable.TASKS, tasks(*ran))
        writer.put_events("e", 0, 3, events)
        wait_until(lambda: writer.statistics.rows == 2 * len(rows), 30)


class Asked(list[tuple[str, str]]):
    """Paths and tokens that a scripted peer was asked with."""


@contextlib.contextmanager
def scripted(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, Asked]]:
    """Yield the address of a peer that a test scripts."""
    asked = Asked()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("Authorization", "")))
            with contextlib.suppress(OSError):
                answer(self)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def send(handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real one, with even offsets."""
    folder = tmp_path_factory.mktemp("peer") / "db"
    write(folder, "worker-2", range(0, 60, 2))
    debug = {
        "enabled": True,
        "port": 0,
        "db_dir": str(folder),
        "tokens": {"other": {"hash": hash_token(TOKEN), "role": "operate"}},
    }
    with serve_web(ScriptedPipeline({"debug": debug}).watched()) as web:
        assert web is not None
        web.begin()
        yield web.address.rstrip("/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recordings of this host, with odd offsets."""
    folder = tmp_path_factory.mktemp("own") / "db"
    write(folder, "worker-1", range(1, 61, 2))
    return folder


def make_pipeline(folder: Path, *peers: str) -> ScriptedPipeline:
    listed = [{"url": url, "token": TOKEN} for url in peers]
    return ScriptedPipeline({"debug": {"enabled": True, "port": 0, "db_dir": str(folder), "peers": listed}})


async def read(client: httpx.AsyncClient, path: str, **filters: str) -> Any:
    answer = await client.get(f"/api/v1{path}", params=filters)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for peers that answer as long as a busy machine needs."""
    monkeypatch.setattr(Peers.__init__, "__defaults__", (60.0,))


@pytest.mark.parametrize("filters", [{}, {"label": "tenant=acme"}, {"error": "no", "since": "2h"}, {"topic": "orders"}])
@pytest.mark.parametrize("limit", ["7", "1000"])
async def test_pages_have_the_messages_of_all_hosts_once_each_in_order(
    folder: Path, peer: str, filters: dict[str, str], limit: str
) -> None:
    seen: list[int] = []
    async with log_in(make_pipeline(folder, peer)) as client:
        cursor = ""
        while True:
            page = await read(client, "/messages", peers="true", limit=limit, cursor=cursor, **filters)
            assert page["missing"] == {}
            assert len(page["rows"]) <= int(limit)
            assert {bool(row["host"]) == (row["offset"] % 2 == 0) for row in page["rows"]} <= {True}
            seen += [row["offset"] for row in page["rows"]]
            if page["cursor"] is None:
                break
            cursor = page["cursor"]
    assert seen == list(range(59, -1, -1))


async def test_tasks_failures_and_pages_name_the_host(folder: Path, peer: str) -> None:
    name = peer.partition("://")[2]
    async with log_in(make_pipeline(folder, peer)) as client:
        found = await read(client, "/tasks", peers="true", task="t-4")
        groups = (await read(client, "/failures", peers="true"))["groups"]
        own = (await read(client, "/failures"))["groups"]
        shown = {path: (await client.get(path)).text for path in ("/messages", "/tasks", "/failures", "/hosts", "/")}
    assert [(row["host"], row["task_id"]) for row in found["rows"]] == [(name, "t-4")]
    assert [(group["count"], group["hosts"]) for group in groups] == [(60, [name])]
    assert sum(count for _, count in groups[0]["minutes"]) == 60
    assert [group["count"] for group in own] == [30]
    for path in ("/messages", "/tasks", "/failures", "/hosts"):
        assert name in shown[path], path
    assert f'href="{peer}/messages/orders/0/58"' in shown["/messages"]
    assert '<span class="chip good">running</span>' in shown["/hosts"]
    assert 'data-load="/hosts"' in shown["/"]
    assert TOKEN not in "".join(shown.values())


async def test_one_that_does_not_answer_is_named_within_the_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(lambda handler: time.sleep(5)) as (slow, _):
        monkeypatch.setattr(Peers.__init__, "__defaults__", (0.3,))
        async with log_in(make_pipeline(folder, slow)) as client:
            began = time.monotonic()
            page = await read(client, "/messages", peers="true")
            took = time.monotonic() - began
            shown = (await client.get("/messages")).text
    assert page["missing"] == {slow.partition("://")[2]: "no answer within 0.3 s"}
    assert [row["offset"] for row in page["rows"]] == list(range(59, 0, -2))
    assert page["cursor"] is None
    assert took < slack(4)
    assert "no answer within 0.3 s (debug.peers)" in shown


def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
    """Send a byte now and then, for ever."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.02)


def flood(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 100_000)


EVIL_ROW = {"rows": [{"offset": SCRIPT}], "cursor": None, "problems": [], "cursors": ["x"]}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (drip, "no answer within 1 s"),
        (flood, "larger than 4,194,304 bytes"),
        (
            lambda handler: send(handler, 302, Location="http://127.0.0.1:9/steal"),
            "redirects, which is not followed",
        ),
        (lambda handler: send(handler, 401), "rejects the token"),
        (lambda handler: send(handler, 500), "status 500"),
        (lambda handler: send(handler, 200, b"<html>"), "(1 errors)"),
        (lambda handler: send(handler, 200, json.dumps(EVIL_ROW).encode()), "does not match the API"),
        (lambda handler: send(handler, 200, b"[" * 100_000), "(1 errors)"),
        (lambda handler: send(handler, 200, b"{}", **{"Content-Length": "50"}), "incomplete"),
        (lambda handler: handler.wfile.write(b"SSH-2.0-x\r\n"), "not HTTP (BadStatusLine)"),
        (
            lambda handler: send(handler, 200, b'{"rows": [], "cursor": "x", "problems": [], "cursors": ["y"]}'),
            "does not match the request",
        ),
    ],
    ids=["drip", "flood", "redirect", "token", "status", "markup", "rows", "nested", "short", "ssh", "cursors"],
)
async def test_what_a_peer_sends_is_checked(
    folder: Path,
    answer: Callable[[http.server.BaseHTTPRequestHandler], None],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scripted(answer) as (address, asked):
        if problem.startswith("no answer"):
            monkeypatch.setattr(Peers.__init__, "__defaults__", (1.0,))
        async with log_in(make_pipeline(folder, address)) as client:
            page = await read(client, "/messages", peers="true")
    assert problem in page["missing"][address.partition("://")[2]]
    assert len(page["rows"]) == 30
    assert len(asked) == 1
    assert asked[0][1] == f"Bearer {TOKEN}"
    assert "peers" not in asked[0][0]


async def test_what_was_said_last_is_shown_as_stale(folder: Path) -> None:
    run = {
        "recording": "g.w",
        "group": "g",
        "worker": SCRIPT,
        "started_at": 1.0,
        "written_at": 2.0,
        "live": True,
        "periods": 3,
    }
    broken = False

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        if broken or handler.path != "/api/v1/runs":
            send(handler, 404)
        else:
            send(handler, 200, json.dumps([run]).encode())

    with scripted(answer) as (address, _):
        async with log_in(make_pipeline(folder, address)) as client:
            first = (await client.get("/hosts")).text
            broken = True
            second = (await client.get("/hosts")).text
    assert "recordings only" in first
    assert "stale" not in first
    assert "(1 running)" in second
    assert "status 404; <b>stale</b>, as of" in second


@pytest.mark.parametrize("cursor", ["x", "e30", "W10", "eyIiOiA1fQ", "eyIiOiAiLi4vLi4ifQ", "é"])
async def test_a_cursor_that_was_not_given_out_is_refused_or_harmless(folder: Path, peer: str, cursor: str) -> None:
    async with log_in(make_pipeline(folder, peer)) as client:
        answer = await client.get("/api/v1/messages", params={"peers": "true", "cursor": cursor})
    # An empty one begins at the beginning.
    assert answer.status_code == (200 if cursor == "e30" else 422)


def test_tokens_of_peers_are_masked() -> None:
    settings = DebugSettings(peers=[PeerSettings(url="https://b.example", token=TOKEN)])
    assert TOKEN not in str(redact(settings.model_dump(mode="json")))


async def test_a_server_of_the_same_folder_is_named_and_shows_nothing_twice(folder: Path, tmp_path: Path) -> None:
    token = {"other": {"hash": hash_token(TOKEN), "role": "read"}}
    link = tmp_path / "link"
    link.symlink_to(folder)
    debug = {"enabled": True, "port": 0, "db_dir": str(link), "tokens": token}
    with serve_web(ScriptedPipeline({"debug": debug}).watched()) as web:
        assert web is not None
        web.begin()
        address = web.address.rstrip("/")
        name = address.partition("://")[2]
        async with log_in(make_pipeline(folder, address)) as client:
            pages = [await read(client, path, peers="true") for path in ("/messages", "/tasks")]
            failures = await read(client, "/failures", peers="true")
            shown = (await client.get("/hosts")).text
    for page in [*pages, failures]:
        assert list(page["missing"]) == [name]
        assert "the same folder of recordings" in page["missing"][name]
    assert [len(page["rows"]) for page in pages] == [30, 30]
    assert [group["count"] for group in failures["groups"]] == [30]
    assert "the same folder of recordings" in shown
