"""The trigger that polls an HTTP address."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.triggers.builtin.triggers_contract import fired, made_again

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.retry import Backoff
from tidemill.runtime.embedded.broker import free_port
from tidemill.triggers.builtin import http_client
from tidemill.triggers.builtin.http import HttpTrigger


class Site:
    """A server whose answers are scripted; the last one stays."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any, dict[str, str]]] = []
        self.requests: list[dict[str, Any]] = []
        self.delay_seconds = 0.0
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                length = int(self.headers.get("content-length", 0))
                site.requests.append(
                    {
                        "method": self.command,
                        "path": self.path,
                        "headers": dict(self.headers),
                        "body": self.rfile.read(length),
                        "at": time.monotonic(),
                    }
                )
                time.sleep(site.delay_seconds)
                status, body, headers = site.answers.pop(0) if len(site.answers) > 1 else site.answers[0]
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"content-length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = _answer

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *args: Any) -> None:
                pass  # who asked did not wait for the answer

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def will_answer(self, *answers: Any) -> None:
        self.answers = [(answer, b"", {}) if isinstance(answer, int) else (*answer, {})[:3] for answer in answers]

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(http_client, "_BACKOFF", Backoff(0.01, 0.02))
    made = Site()
    yield made
    made.close()


async def test_an_answer_as_expected_fires_with_its_body(site):
    site.will_answer((200, {"state": "done"}))
    (event,) = await fired(HttpTrigger(f"{site.url}/job/7"))
    assert event.payload == {"url": f"{site.url}/job/7", "status": 200, "body": {"state": "done"}}
    assert re.fullmatch(re.escape(f"{site.url}/job/7") + "#[0-9a-f]{32}", event.identity)


async def test_each_answer_and_each_request_is_an_event_of_its_own(site):
    async def identity(answer: Any, path: str = "/job?n=7", **kwargs: Any) -> str:
        site.will_answer((200, answer))
        (event,) = await fired(HttpTrigger(f"{site.url}{path}", **kwargs))
        return str(event.identity)

    done = {"state": "done", "run": 1}
    assert await identity(done) == await identity(done)
    assert await identity(done, where={"run": 1, "state": "done"}) == await identity(done, where=dict(done))
    found = [
        await identity(done),
        await identity({"state": "done", "run": 2}),
        await identity(b"done"),
        await identity(done, path="/job?n=8"),
        await identity(done, path="/job", params={"n": 7}),
        await identity(done, method="POST"),
        await identity(done, method="POST", json={"a": 1}),
        await identity(done, where={"run": {"ge": 1}}),
        await identity(done, path="/job?" + "x" * 5_000),
        await identity(done, path="/" + "x" * 5_000),
    ]
    assert len(set(found)) == len(found)
    assert all(len(one) < 1_024 for one in found)


async def test_a_secret_that_changes_in_the_environment_changes_no_identity(site, monkeypatch):
    site.will_answer(200)
    found = set()
    for secret in ("hunter2", "hunter3"):
        monkeypatch.setenv("API_TOKEN", secret)
        headers = {"authorization": {"env": "API_TOKEN"}}
        (event,) = await fired(HttpTrigger(site.url, params={"key": {"env": "API_TOKEN"}}, headers=headers))
        found.add(event.identity)
    assert len(found) == 1


@pytest.mark.parametrize(("body", "shown"), [(b"", ""), (b"tide", "tide"), (b"\xff", {"base64": "/w=="})])
async def test_a_body_that_is_not_json_is_fired_as_text(site, body, shown):
    site.will_answer((200, body))
    (event,) = await fired(HttpTrigger(site.url))
    assert event.payload["body"] == shown


async def test_it_polls_until_status_and_body_are_as_expected(site):
    site.will_answer(404, 202, (200, {"state": "busy"}), (200, b"{"), (200, {"state": "done"}))
    trigger = HttpTrigger(site.url, where={"state": {"in": ["done", "failed"]}}, poll_seconds=0.05, max_retries=0)
    (event,) = await fired(trigger)
    assert event.payload["body"] == {"state": "done"}
    times = [request["at"] for request in site.requests]
    assert len(times) == 5
    assert all(later - earlier >= 0.045 for earlier, later in itertools.pairwise(times))


async def test_why_it_still_polls_is_in_its_log_whenever_that_changes(site, monkeypatch):
    site.will_answer(404, 404, (200, {"state": "busy"}), (200, b"{"), (200, {"state": "done"}))
    trigger = HttpTrigger(site.url, where={"state": "done"}, poll_seconds=0.01)
    said = []

    class Log:
        def info(self, event, *, answer, **about):
            said.append(answer)

    monkeypatch.setattr(type(trigger), "log", Log())
    await fired(trigger)
    assert said == [
        "status 404",
        "status 200, but `where` is false",
        "status 200, but the body is not JSON, so `where` is false",
    ]


async def test_a_status_that_is_an_error_elsewhere_can_be_waited_for(site):
    site.will_answer(200, 200, 503)
    (event,) = await fired(HttpTrigger(site.url, status=[410, 503], poll_seconds=0.01))
    assert event.payload["status"] == 503


async def test_a_failure_is_retried_up_to_a_limit_in_a_row(site):
    site.will_answer(500, 429, 404, 503, 408, 200)
    assert len(await fired(HttpTrigger(site.url, max_retries=2, poll_seconds=0.01))) == 1
    site.requests.clear()
    site.will_answer(500)
    with pytest.raises(RemoteError, match="failed 3 times in a row; the last failure: status 500"):
        await fired(HttpTrigger(site.url, max_retries=2))
    assert len(site.requests) == 3


async def test_the_retry_after_of_a_server_is_honoured(site):
    site.will_answer((429, b"", {"retry-after": "1"}), 200)
    await fired(HttpTrigger(site.url))
    first, second = site.requests
    assert second["at"] - first["at"] >= 1.0


@pytest.mark.parametrize("status", [301, 400, 401, 403])
async def test_an_error_that_a_retry_cannot_change_is_raised_at_once(site, status):
    site.will_answer((status, b"", {"location": f"{site.url}/elsewhere"}))
    with pytest.raises(RemoteError, match=f"status {status}, which a retry will not change") as raised:
        await fired(HttpTrigger(site.url))
    assert raised.value.retryable is False
    assert len(site.requests) == 1


async def test_no_answer_in_time_and_no_server_at_all_are_failures(site):
    site.delay_seconds = 0.5
    site.will_answer(200)
    with pytest.raises(RemoteError, match=r"no response within 0\.1 s"):
        await fired(HttpTrigger(site.url, timeout_seconds=0.1, max_retries=1))
    with pytest.raises(RemoteError, match="failed 2 times in a row; the last failure: ConnectError"):
        await fired(HttpTrigger(f"http://127.0.0.1:{free_port()}", max_retries=1))


async def test_an_answer_beyond_the_bound_is_an_error(site):
    site.will_answer((200, b"x" * 2000))
    with pytest.raises(RemoteError, match="more than 1000 bytes"):
        await fired(HttpTrigger(site.url, max_body_bytes=1000))


async def test_requests_are_sent_as_given_and_secrets_come_from_the_environment(site, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2")
    site.will_answer(200)
    trigger = HttpTrigger(
        f"{site.url}/q",
        method="POST",
        json={"a": [1]},
        params={"key": {"env": "API_TOKEN"}, "n": 1},
        headers={"authorization": {"env": "API_TOKEN"}},
    )
    (event,) = await fired(trigger)
    (request,) = site.requests
    assert (request["method"], request["path"], json.loads(request["body"])) == (
        "POST",
        "/q?key=hunter2&n=1",
        {"a": [1]},
    )
    assert request["headers"]["authorization"] == "hunter2"
    assert "hunter2" not in f"{trigger!r} {trigger.serialize()} {event.payload} {event.identity}"
    monkeypatch.delenv("API_TOKEN")
    with pytest.raises(ConfigError, match="authorization comes from the environment variable API_TOKEN"):
        await fired(trigger)


async def test_no_secret_of_an_address_is_in_errors_logs_or_events(site, capfd):
    secret = site.url.replace("//", "//me:hunter2@") + "/x?sig=hunter3#hunter4"
    site.will_answer(500, 401)
    trigger = HttpTrigger(secret)
    with pytest.raises(RemoteError) as raised:
        await fired(trigger)
    site.will_answer(500)
    with pytest.raises(RemoteError) as failed:
        await fired(HttpTrigger(secret, max_retries=0))
    site.will_answer(200)
    (event,) = await fired(HttpTrigger(secret))
    with pytest.raises(ValueError, match="must start with") as refused:
        HttpTrigger("ftp://me:hunter2@host/x?sig=hunter3")
    out, err = capfd.readouterr()
    said = f"{raised.value!r} {failed.value!r} {refused.value!r} {event.payload} {event.identity} {out} {err}"
    assert "hunter" not in said
    assert "/x?***" in said


async def test_a_cancelled_poll_leaves_nothing_running(site):
    site.will_answer(404)
    tasks = asyncio.all_tasks()
    waiting = asyncio.ensure_future(fired(HttpTrigger(site.url)))
    while not site.requests:
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert asyncio.all_tasks() == tasks


def test_it_is_created_again_as_it_was():
    made_again(HttpTrigger("https://host/x"))
    made_again(
        HttpTrigger(
            "https://host/x",
            method="PUT",
            params={"a": {"env": "X"}},
            headers={"h": "v"},
            json=[1],
            status={404, 200},
            where={"a": 1},
            poll_seconds=1,
            timeout_seconds=2,
            max_retries=0,
            max_body_bytes=10,
        )
    )


@pytest.mark.parametrize(
    ("url", "kwargs"),
    [
        ("host/x", {}),
        ("http://", {}),
        ("http://h", {"poll_seconds": 0}),
        ("http://h", {"max_retries": -1}),
        ("http://h", {"status": []}),
        ("http://h", {"status": [200, 2000]}),
        ("http://h", {"where": {"a": {"about": 1}}}),
    ],
)
def test_arguments_that_make_no_sense_are_refused(url, kwargs):
    with pytest.raises(
        ValueError, match=r"url must start|poll_seconds must be positive|max_retries must not|status must be|'about'"
    ):
        HttpTrigger(url, **kwargs)
