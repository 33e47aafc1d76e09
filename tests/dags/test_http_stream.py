"""Operators that stream the pages of an API, and the trigger that reads them from a real server."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.triggers.builtin.triggers_contract import fired, made_again

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.retry import Backoff
from tidemill.dags import GraphStreamOperator, HttpStreamOperator, TaskDeferred
from tidemill.dags.attempt.streaming import StreamCursor
from tidemill.dags.context.connection import Connection
from tidemill.dags.operators import http_pages as module
from tidemill.dags.operators.http_pages import HttpPagesTrigger
from tidemill.triggers.builtin import http_client


class Api:
    """A server of numbered pages; `scripted` responses come first."""

    def __init__(self, pages: int = 3) -> None:
        self.pages = pages
        self.how = "link"
        self.scripted: list[tuple[int, bytes, dict[str, str]]] = []
        self.requests: list[tuple[str, dict[str, str], float]] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                api.requests.append((self.path, dict(self.headers), time.monotonic()))
                status, data, headers = api.scripted.pop(0) if api.scripted else api.answer(self.path)
                self.send_response(status)
                for name, value in {"content-length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        number = int(parse_qs(urlsplit(path).query).get("page", ["0"])[0])
        following = number + 1 if number + 1 < self.pages else None
        body: dict[str, Any] = {"value": [number]}
        headers = {}
        if following is not None:
            if self.how == "link":
                headers["link"] = f'</items?page={following}>; rel="next", </items?page=0>; rel="first"'
            elif self.how == "url":
                body["paging"] = {"next": f"?page={following}"}
            elif self.how == "graph":
                body["@odata.nextLink"] = f"{self.url}/items?page={following}"
            else:
                body["after"] = following
        return 200, json.dumps(body).encode(), headers


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setattr(http_client, "_BACKOFF", Backoff(0.01, 0.02))
    api = Api()
    yield api
    api.server.shutdown()
    api.server.server_close()


@pytest.mark.parametrize(
    ("how", "arguments"),
    [
        ("link", {}),
        ("url", {"next_url": "paging.next"}),
        ("graph", {"next_url": ["@odata.nextLink"]}),
        ("cursor", {"next_cursor": "after", "cursor_param": "page"}),
    ],
)
async def test_it_fires_each_page_once_in_order(api, how, arguments):
    api.how = how
    events = await fired(HttpPagesTrigger(f"{api.url}/items", **arguments))
    assert [(one.payload["number"], one.payload["body"]["value"]) for one in events] == [(0, [0]), (1, [1]), (2, [2])]
    assert len({one.identity for one in events}) == 3
    assert [one.identity for one in await fired(HttpPagesTrigger(f"{api.url}/items", **arguments))] == [
        one.identity for one in events
    ]


async def test_it_requests_a_page_when_the_one_before_was_taken(api):
    events = HttpPagesTrigger(f"{api.url}/items").run()
    await anext(events)
    assert len(api.requests) == 1
    await anext(events)
    assert len(api.requests) == 2
    await events.aclose()


async def test_a_failing_page_is_requested_again_and_the_server_says_when(api):
    api.scripted = [api.answer("/items"), (503, b"", {}), (429, b"", {"retry-after": "1"})]
    events = await fired(HttpPagesTrigger(f"{api.url}/items", max_retries=2))
    assert [one.payload["number"] for one in events] == [0, 1, 2]
    paths, times = [one[0] for one in api.requests], [one[2] for one in api.requests]
    assert paths == ["/items", *["/items?page=1"] * 3, "/items?page=2"]
    assert times[3] - times[2] >= 1.0


async def test_a_page_that_fails_too_often_is_an_error_after_the_pages_before_it(api):
    api.scripted = [api.answer("/items"), *[(500, b"", {})] * 3]
    taken = []
    with pytest.raises(RemoteError, match="failed 3 times in a row; the last failure: status 500"):
        async for event in HttpPagesTrigger(f"{api.url}/items", max_retries=2).run():
            taken.append(event.payload["number"])
    assert taken == [0]


@pytest.mark.parametrize("status", [301, 401, 404])
async def test_a_status_that_a_retry_cannot_change_is_raised_at_once(api, status):
    api.scripted = [(status, b"", {"location": "/elsewhere"})]
    with pytest.raises(RemoteError, match=f"status {status}, which a retry will not change"):
        await fired(HttpPagesTrigger(f"{api.url}/items"))
    assert len(api.requests) == 1


@pytest.mark.parametrize(
    ("link", "reason"), [("http://localhost.example/x", "another host"), ("/items", "read before")]
)
async def test_it_follows_no_link_elsewhere_and_no_circle(api, link, reason):
    api.scripted = [(200, b"{}", {"link": f'<{link}>; rel="next"'})]
    with pytest.raises(RemoteError, match=reason):
        await fired(HttpPagesTrigger(f"{api.url}/items"))
    assert len(api.requests) == 1


async def test_pages_may_be_text_or_empty_unless_json_names_the_next_one(api):
    api.scripted = [(200, b"a,b", {"link": '</items>; rel="next"'}), (204, b"", {})]
    events = await fired(HttpPagesTrigger(f"{api.url}/first"))
    assert [one.payload["body"] for one in events] == ["a,b", None]
    api.scripted = [(200, b"a,b", {})]
    with pytest.raises(RemoteError, match="not JSON"):
        await fired(HttpPagesTrigger(f"{api.url}/items", next_url="next"))


async def test_the_number_and_size_of_pages_are_limited(api):
    assert len(await fired(HttpPagesTrigger(f"{api.url}/items", max_pages=2))) == 2
    with pytest.raises(RemoteError, match="more than 5 bytes"):
        await fired(HttpPagesTrigger(f"{api.url}/items", max_body_bytes=5))


@pytest.mark.parametrize(
    ("login", "password", "expected"),
    [("me", "hunter2", "Basic bWU6aHVudGVyMg=="), (None, "hunter2", "Bearer hunter2")],
)
async def test_a_connection_gives_host_credentials_and_headers(api, monkeypatch, login, password, expected):
    extra = json.dumps({"headers": {"x-tenant": "7"}})
    found = Connection("api", "http", host="127.0.0.1", port=api.port, login=login, password=password, extra=extra)
    monkeypatch.setattr(module.Connection, "get", lambda conn_id: found)
    monkeypatch.setenv("API_KEY", "hunter3")
    trigger = HttpPagesTrigger("items", conn_id="api", params={"key": {"env": "API_KEY"}}, headers={"accept": "x/y"})
    events = await fired(trigger)
    assert len(events) == 3
    path, headers, _ = api.requests[0]
    assert path == "/items?key=hunter3"
    sent = {name.lower(): value for name, value in headers.items()}
    assert (sent["authorization"], sent["x-tenant"], sent["accept"]) == (expected, "7", "x/y")
    assert "hunter" not in f"{trigger!r} {[(one.payload, one.identity) for one in events]}"
    monkeypatch.delenv("API_KEY")
    with pytest.raises(ConfigError, match="API_KEY"):
        await fired(trigger)


async def test_no_secret_of_an_address_is_in_its_errors(api, capfd):
    api.scripted = [(500, b"", {}), (403, b"", {})]
    with pytest.raises(RemoteError) as raised:
        await fired(HttpPagesTrigger(f"{api.url}/items?sig=hunter2"))
    assert "hunter2" not in f"{raised.value!r} {capfd.readouterr()}"


async def test_no_response_in_time_is_a_failure():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(RemoteError, match=r"no response within 0\.1 s"):
        await fired(HttpPagesTrigger(url, timeout_seconds=0.1, max_retries=0))
    server.close()
    with pytest.raises(RemoteError, match="ConnectError"):
        await fired(HttpPagesTrigger(url, max_retries=0))


def test_it_is_created_again_as_it_was():
    made_again(HttpPagesTrigger("https://host/x"))
    made_again(
        HttpPagesTrigger(
            "x",
            params={"a": 1},
            headers={"b": {"env": "B"}},
            conn_id="c",
            next_cursor=("d", "e"),
            cursor_param="f",
            timeout_seconds=1,
            max_retries=0,
            max_pages=2,
            max_body_bytes=3,
            start={"number": 1, "next": "/x"},
        )
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"url": "host/x"},
        {"next_url": "a", "next_cursor": "b"},
        {"timeout_seconds": 0},
        {"max_body_bytes": 0},
        {"max_pages": 0},
        {"max_retries": -1},
        {"start": {"number": -1, "next": None}},
        {"start": {"number": 1}},
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ValueError, match=r"url must|both set|must be positive|must not be negative|start must"):
        HttpPagesTrigger(**{"url": "http://host", **arguments})


@pytest.mark.parametrize(
    ("data", "headers", "reason"),
    [
        (b"<h1>Log in</h1>", {"content-type": "text/html"}, "not JSON.*'text/html'"),
        (b'{"value": [1', {"content-type": "application/json"}, "not JSON.*correct it on the server"),
        (b'{"value": ' + b"9" * 100_000 + b"}", {}, "not JSON that can be read"),
        (b'{"after": "' + b"x" * 100_000 + b'"}', {}, "characters"),
        (b'{"after": [1]}', {}, "of type list"),
        (b"[" * 100_000 + b"]" * 100_000, {}, "not JSON"),
        (b'{"after": "\\ud800"}', {}, "not JSON"),
        (b"x", {"content-encoding": "br"}, "'br'"),
        (b"x", {"content-encoding": "gzip, gzip"}, "gzip, gzip"),
        (b"not gzip", {"content-encoding": "gzip"}, "not gzip, although"),
        (gzip.compress(b" " * 50_000_000), {"content-encoding": "gzip"}, "more than 1,048,576 bytes"),
        (gzip.compress(b" " * 900_000) * 3, {"content-encoding": "gzip"}, "more than 1,048,576 bytes"),
    ],
    ids=range(12),
)
async def test_a_page_that_cannot_be_read_is_an_error_and_not_the_last_one(api, data, headers, reason):
    api.scripted = [(200, data, headers)]
    with pytest.raises(RemoteError, match=reason) as raised:
        await fired(HttpPagesTrigger(f"{api.url}/items?sig=hunter2", next_cursor="after"))
    assert not raised.value.retryable
    assert "hunter2" not in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"[" * 300 + b"]" * 300, "cannot be stored"), (b'"' * 1_000_000, "2,000,.* bytes as JSON"), (b"[1]", None)],
    ids=["deep", "long", "good"],
)
async def test_a_page_that_the_store_cannot_hold_is_refused_with_its_address(api, data, reason):
    api.scripted = [(200, data, {})]
    if reason is None:
        assert [one.payload["body"] for one in await fired(HttpPagesTrigger(f"{api.url}/items"))] == [[1]]
        return
    with pytest.raises(RemoteError, match=f"{api.url}/items .*{reason}") as raised:
        await fired(HttpPagesTrigger(f"{api.url}/items"))
    assert len(str(raised.value)) < 800


@pytest.mark.parametrize("link", ['<x; rel="next"', "http://[; rel=next", "<http://[>; rel=next", "<>; rel=next"])
async def test_a_malformed_link_to_the_next_page_is_an_error_and_not_the_last_one(api, link):
    api.scripted = [(200, b"{}", {"link": link})]
    with pytest.raises(RemoteError, match=r"malformed|without a URL"):
        await fired(HttpPagesTrigger(f"{api.url}/items"))


async def test_a_redirect_is_not_followed_with_credentials(api, monkeypatch):
    found = Connection("api", "http", host="127.0.0.1", port=api.port, password="hunter2")
    monkeypatch.setattr(module.Connection, "get", lambda conn_id: found)
    api.scripted = [(302, b"", {"location": "http://elsewhere.example/take?token=hunter3"})]
    with pytest.raises(
        RemoteError, match=r"redirects to http://elsewhere\.example/take\?\*\*\*, which is not"
    ) as raised:
        await fired(HttpPagesTrigger("items", conn_id="api"))
    assert "hunter" not in str(raised.value)
    assert len(api.requests) == 1


async def test_pages_that_differ_by_their_fragment_are_a_circle(api):
    api.scripted = [(200, b"{}", {"link": f'</items#{number}>; rel="next"'}) for number in range(5)]
    with pytest.raises(RemoteError, match="read before"):
        await fired(HttpPagesTrigger(f"{api.url}/items"))


async def test_compressed_pages_are_read_and_only_gzip_is_asked_for(api):
    packed = gzip.compress(b'{"value":') + gzip.compress(b"[7]}")
    api.scripted = [(200, packed, {"content-encoding": "gzip"}), (200, packed[:-9], {"content-encoding": "gzip"})]
    assert [one.payload["body"] for one in await fired(HttpPagesTrigger(f"{api.url}/items"))] == [{"value": [7]}]
    assert {name.lower(): value for name, value in api.requests[0][1].items()}["accept-encoding"] == "gzip"
    with pytest.raises(RemoteError, match="ended too early"):
        await fired(HttpPagesTrigger(f"{api.url}/items", max_retries=0))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before tries, none of which takes any time."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds:
            found.append(seconds)
        await sleep(0)

    monkeypatch.setattr(module.asyncio, "sleep", note)
    return found


@pytest.mark.parametrize("asked", ["-5", "9" * 5_000, "soon", "Wed, 99 Foo 2026 07:28:00 GMT", "0"])
async def test_a_server_cannot_delay_the_next_try_for_ever(api, pauses, asked):
    api.scripted = [(429, b"", {"retry-after": asked})]
    assert len(await fired(HttpPagesTrigger(f"{api.url}/items"))) == 3
    assert 0 <= pauses[0] <= 3_600


async def test_a_retry_after_that_is_a_date_is_relative_to_the_clock_of_the_server(api, pauses):
    until = "Thu, 01 Jan 2099 00:00:00 GMT"
    api.scripted = [(503, b"", {"retry-after": until})]
    await fired(HttpPagesTrigger(f"{api.url}/items"))
    assert pauses == [3_600]


@pytest.mark.parametrize("value", ["a\nb: c", "caf\u00e9", "\ud800"])
async def test_headers_that_http_does_not_allow_are_refused_and_not_shown(api, value):
    trigger = HttpPagesTrigger(f"{api.url}/items", headers={"authorization": f"hunter2{value}"})
    with pytest.raises(ConfigError, match="header") as raised:
        await fired(trigger)
    assert "hunter2" not in str(raised.value)
    assert not api.requests


async def test_a_retry_continues_with_the_page_after_the_last_one_that_was_handled(api, monkeypatch):
    monkeypatch.setenv("API_KEY", "hunter2 & co")
    api.pages = 4
    arguments = {"next_cursor": "after", "cursor_param": "page", "params": {"key": {"env": "API_KEY"}}}
    api.how = "cursor"
    events = await fired(HttpPagesTrigger(f"{api.url}/items", **arguments))
    assert "hunter2" not in str([one.payload for one in events])
    stored = [{"number": one.payload["number"] + 1, "next": one.payload["next"]} for one in events]
    api.requests.clear()
    later = await fired(HttpPagesTrigger(f"{api.url}/items", **arguments, start=stored[1]))
    assert [one.identity for one in later] == [one.identity for one in events[2:]]
    assert [parse_qs(urlsplit(path).query) for path, _, _ in api.requests] == [
        {"key": ["hunter2 & co"], "page": [str(number)]} for number in (2, 3)
    ]
    assert await fired(HttpPagesTrigger(f"{api.url}/items", **arguments, start=stored[3])) == []
    for elsewhere in ("http://elsewhere.example/items", "http://[", "{env:API_KEY}"):
        with pytest.raises(RemoteError, match="clear the task"):
            await fired(HttpPagesTrigger(f"{api.url}/items", **arguments, start={"number": 1, "next": elsewhere}))


async def test_no_secret_in_the_address_of_a_page_is_stored(api):
    address = f"{api.url.replace('http://', 'http://me:hunter2@')}/items"
    params = {"api_key": "hunter3", "size": 50}
    events = await fired(HttpPagesTrigger(f"{address}?token=hunter4", params=params))
    assert "hunter" not in str([one.payload for one in events])
    api.how = "url"
    arguments = {"next_url": "paging.next", "params": params}
    events = await fired(HttpPagesTrigger(f"{address}?token=hunter4", **arguments))
    assert "hunter" not in str([one.payload for one in events])
    start = {"number": 1, "next": events[0].payload["next"]}
    later = await fired(HttpPagesTrigger(f"{address}?token=hunter4", **arguments, start=start))
    assert [one.identity for one in later] == [one.identity for one in events[1:]]


def test_the_operator_begins_at_its_cursor():
    operator = GraphStreamOperator(task_id="read", url="http://a/items")
    cursors = [(None, None), ({"number": 2, "next": "/x"}, {"number": 2, "next": "/x"}), ("mine", None), ({}, None)]
    for cursor, expected in cursors:
        with pytest.raises(TaskDeferred) as deferred:
            operator.execute({"stream": StreamCursor(cursor)})
        assert deferred.value.trigger.serialize()[1]["start"] == expected


class Stream:
    def __init__(self) -> None:
        self.emitted: list[tuple[Any, str | None]] = []
        self.checkpoints: list[Any] = []

    def emit(self, element: Any, identity: str | None = None) -> None:
        self.emitted.append((element, identity))

    def checkpoint(self, value: Any) -> None:
        self.checkpoints.append(value)


async def test_the_operator_defers_to_the_trigger_and_emits_each_page(api):
    api.how = "graph"
    operator = GraphStreamOperator(task_id="read", url=f"{api.url}/items", timeout=60)
    with pytest.raises(TaskDeferred) as deferred:
        operator.execute({})
    assert deferred.value.timeout == 60
    events = await fired(deferred.value.trigger)
    stream = Stream()
    operator.handle_trigger_events(events, {"stream": stream})
    assert stream.emitted == [({**event.payload["body"]}, event.identity) for event in events]
    assert [element["value"] for element, _ in stream.emitted] == [[0], [1], [2]]
    assert stream.checkpoints == [{"number": 3, "next": None}]


def test_a_filter_chooses_what_a_page_becomes():
    from tidemill.triggers import TriggerEvent

    operator = HttpStreamOperator(task_id="read", url="http://a", page_filter=lambda page: page or None)
    stream = Stream()
    bodies = enumerate([[1], [], 2])
    events = [TriggerEvent({"number": number, "body": body, "next": "/x"}, f"{number}") for number, body in bodies]
    operator.handle_trigger_events(events, {"stream": stream})
    assert stream.emitted == [([1], "0"), (2, "2")]
