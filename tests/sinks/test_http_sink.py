"""The HTTP sink against a real server of the test's own."""

from __future__ import annotations

import asyncio
import email.utils
import gzip
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
from tests.faults import FaultyProxy
from tests.sinks.servers import Answer, HttpDouble, Request
from tests.until import slack

from tidemill.config.sections.delivery_settings import DeliverySettings
from tidemill.config.sections.sink_settings import HttpSinkSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.delivery.routing import Origin
from tidemill.runtime.embedded.broker import free_port
from tidemill.sinks import http as module
from tidemill.sinks.base import WAITS, Sink
from tidemill.sinks.http import HttpSink
from tidemill.sinks.payloads import CollectResult, HttpPayload
from tidemill.testing.contract import JsonSinkContract, Order, Outage, deliver
from tidemill.testing.scripted import ScriptedDeadLetters

OK: Answer = (204, {}, b"")


def make_sink(port: int, path: str = "/in", **options: Any) -> HttpSink:
    return HttpSink("api", HttpSinkSettings(url=f"http://127.0.0.1:{port}{path}", **options))


class TestHttpContract(JsonSinkContract):
    secret = "hunter2"
    in_one_order = True

    @pytest.fixture(autouse=True)
    def _server(self, http_double: HttpDouble, proxy: Callable[[int], FaultyProxy]) -> None:
        self.server = http_double
        self.between = proxy(http_double.port)

        def judge(request: Request) -> Answer:
            return (422, {}, b"hunter2 is not an order") if request.body == b'{"n":666}' else OK

        http_double.judge = judge

    def make(self) -> Sink:
        headers = {"Authorization": "Bearer hunter2"}
        return make_sink(self.between.port, "/in?token=hunter2", headers=headers, max_retries=0)

    def make_unusable(self) -> Sink:
        return make_sink(free_port(), "/in?token=hunter2")

    def payload(self, data: Any, key: str = "k") -> Any:
        return HttpPayload(data=data)

    def bad_payload(self) -> Any:
        return HttpPayload(data=1, idempotency_key="two\r\nlines")

    def refused_payload(self) -> Any:
        return HttpPayload(data={"n": 666})

    def outage(self) -> Outage:
        return self.between

    async def received(self, count: int) -> Sequence[bytes]:
        return [request.body for request in self.server.requests if request.body != b'{"n":666}']

    # One after the other, nothing is sent behind a payload that is refused before that is decided.
    async def test_a_payload_that_the_target_refuses_takes_no_other_down(self) -> None:
        sink = self.make()
        await sink.connect()
        answers = await deliver(sink, [self.payload({"n": 1}), self.refused_payload(), self.payload({"n": 2})])
        assert [None if answer is None else answer.retryable for answer in answers] == [None, False, True]
        assert "422" in str(answers[1])
        assert "hunter2" not in str(answers[1])
        assert await self._read_data(1) == [{"n": 1}]
        await sink.close()


@pytest.fixture
async def connected() -> AsyncIterator[Callable[..., Any]]:
    sinks: list[HttpSink] = []

    async def connect(port: int, path: str = "/in", **options: Any) -> HttpSink:
        sinks.append(make_sink(port, path, **options))
        await sinks[-1].connect()
        return sinks[-1]

    yield connect
    for each in sinks:
        await each.close()


def scripted(server: HttpDouble, *answers: Answer) -> None:
    left = list(answers)
    server.judge = lambda request: left.pop(0) if left else OK


async def test_requests_have_method_path_headers_and_json_and_share_a_connection(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    sink = await connected(http_double.port, "/in?x=1", method="PUT", headers={"X-Api-Key": "k", "User-Agent": "me"})
    for n in range(5):
        assert list(await deliver(sink, [HttpPayload(data={"n": n}), HttpPayload(data="x")])) == [None, None]
    assert http_double.connections <= 2  # one looked whether anybody is there
    first = http_double.requests[0]
    assert (first.method, first.path, json.loads(first.body)) == ("PUT", "/in?x=1", {"n": 0})
    wanted = {"content-type": "application/json", "x-api-key": "k", "user-agent": "me"}
    assert wanted.items() <= first.headers.items()


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
async def test_what_may_pass_is_retried_with_the_same_idempotency_key(
    http_double: HttpDouble, connected: Callable[..., Any], status: int
) -> None:
    scripted(http_double, (status, {}, b""), None, (status, {}, b""))
    sink = await connected(http_double.port)
    assert list(await deliver(sink, [HttpPayload(data=1), HttpPayload(data=2)])) == [None, None]
    keys = [request.headers["idempotency-key"] for request in http_double.requests]
    assert Counter(keys).most_common() == [(keys[0], 4), (keys[4], 1)]


@pytest.mark.parametrize("status", [301, 304, 400, 401, 404, 409, 410, 413, 422, 451])
async def test_what_asking_again_cannot_change_is_refused_at_once(
    http_double: HttpDouble, connected: Callable[..., Any], status: int
) -> None:
    scripted(http_double, (status, {"location": "/elsewhere"}, b"because"))
    sink = await connected(http_double.port, concurrency=2)
    bad, good = await deliver(sink, [HttpPayload(data=1), HttpPayload(data=2)])
    assert (bad is None) is not (good is None)
    refusal = bad or good
    assert refusal is not None
    assert (refusal.retryable, refusal.oversize) == (False, status == 413)
    assert str(status) in refusal.error
    assert len(http_double.requests) == 2


async def test_retries_end_and_the_payload_keeps_its_key_for_the_deliverys_own(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    scripted(http_double, *[(503, {}, b"busy")] * 3)
    sink = await connected(http_double.port, max_retries=2, idempotency_header="X-Once")
    batch = [sink.encode(HttpPayload(data=1, idempotency_key="mine")), sink.encode(HttpPayload(data=2))]
    first, second = await sink.send(batch)
    assert first.retryable
    assert not first.waits
    assert second is WAITS, "it was never sent"
    assert len(http_double.requests) == 3
    assert list(await sink.send(batch)) == [None, None]
    assert [request.headers["x-once"] for request in http_double.requests[:4]] == ["mine"] * 4


@pytest.mark.parametrize("status", [500, 503])
async def test_without_concurrency_the_sink_fails_with_the_payload_that_all_others_wait_for(
    http_double: HttpDouble, connected: Callable[..., Any], status: int
) -> None:
    http_double.judge = lambda request: (status, {}, b"busy")
    sink = await connected(http_double.port, max_retries=0)
    with pytest.raises(RemoteError, match=rf"sinks\.http\.api: http://127.* answered {status} Said: busy") as caught:
        await deliver(sink, [HttpPayload(data=1)])
    assert caught.value.retryable


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_a_server_that_fails_over_every_payload_opens_the_breaker(
    http_double: HttpDouble, connected: Callable[..., Any], concurrency: int
) -> None:
    http_double.judge = lambda request: (500, {}, b"")
    sink = make_sink(http_double.port, max_retries=0, concurrency=concurrency)
    options = {"retry_backoff": {"initial_seconds": 0.001, "max_seconds": 0.01}, "breaker": {"open_seconds": 0.1}}
    outbox = Outbox({"http": {"api": sink}}, ScriptedDeadLetters(), None, DeliverySettings.model_validate(options))
    await outbox.connect()
    released: list[int] = []
    async with asyncio.timeout(60):
        for number in range(1_000):
            routed = outbox.route(CollectResult(http=[HttpPayload(data=number)]))
            outbox.submit(routed, Origin([]), lambda number=number: released.append(number))
            await asyncio.sleep(0.002)
            if outbox.statistics().sinks["sinks.http.api"].breaker_opened:
                break
        assert outbox.statistics().sinks["sinks.http.api"].breaker_opened == 1
        assert released == []
        http_double.judge = lambda request: OK
        while len(released) <= number:
            await asyncio.sleep(0.002)
    await outbox.close()
    assert outbox.statistics().sinks["sinks.http.api"].delivered_payloads == number + 1


async def test_one_payload_that_the_server_fails_over_holds_up_no_other_with_concurrency(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    http_double.judge = lambda request: (500, {}, b"") if request.body == b"3" else OK
    sink = await connected(http_double.port, concurrency=4, max_retries=1)
    answers = await deliver(sink, [HttpPayload(data=n) for n in range(16)])
    assert [n for n, answer in enumerate(answers) if answer is not None] == [3]
    assert answers[3].retryable


async def test_without_concurrency_nothing_overtakes_a_payload_that_is_retried(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    scripted(http_double, OK, *[(500, {}, b"")] * 2)
    sink = await connected(http_double.port, max_retries=1)
    answers = await deliver(sink, [HttpPayload(data=n) for n in range(4)])
    assert [None if answer is None else answer.retryable for answer in answers] == [None, True, True, True]
    assert [answer.waits for answer in answers[1:]] == [False, True, True]
    assert [request.body for request in http_double.requests] == [b"0", b"1", b"1"]
    assert sink.encode(HttpPayload(data=1)).key == sink.encode(HttpPayload(data=2)).key


async def test_concurrency_bounds_the_requests_at_a_time(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    http_double.delay = 0.02
    sink = await connected(http_double.port, concurrency=4)
    assert sink.encode(HttpPayload(data=1)).key is None
    assert sink.max_batch_count == 16
    assert list(await deliver(sink, [HttpPayload(data=n) for n in range(16)])) == [None] * 16
    assert http_double.at_once == 4
    assert http_double.connections <= 5


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_retry_after_is_honoured_in_both_its_forms(
    http_double: HttpDouble, connected: Callable[..., Any], form: str
) -> None:
    # Both dates are the server's: its clock need not agree with ours.
    there = time.time() - 5_000
    headers = {"retry-after": "1"}
    if form == "date":
        headers = {
            "date": email.utils.formatdate(there, usegmt=True),
            "retry-after": email.utils.formatdate(there + 1, usegmt=True),
        }
    scripted(http_double, (429, headers, b""))
    sink = await connected(http_double.port)
    started = time.monotonic()
    assert list(await deliver(sink, [HttpPayload(data=1)])) == [None]
    assert 0.95 <= time.monotonic() - started < slack(5)


async def test_retry_after_holds_for_the_next_payloads_too_and_is_bounded(
    http_double: HttpDouble, connected: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PAUSE_SECONDS", 0.5)
    scripted(http_double, (503, {"retry-after": "86400"}, b""))
    sink = await connected(http_double.port, max_retries=0)
    with pytest.raises(RemoteError):
        await deliver(sink, [HttpPayload(data=1)])
    started = time.monotonic()
    assert list(await deliver(sink, [HttpPayload(data=2)])) == [None]
    assert 0.4 <= time.monotonic() - started < slack(5)


async def test_a_request_that_is_not_answered_in_time_has_failed(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    http_double.delay = 5.0
    sink = await connected(http_double.port, timeout_seconds=0.1, max_retries=1)
    started = time.monotonic()
    with pytest.raises(RemoteError, match=r"no answer within 0\.1 s"):
        await deliver(sink, [HttpPayload(data=1)])
    assert time.monotonic() - started < slack(3)


async def test_a_long_answer_is_not_read_to_its_end(http_double: HttpDouble, connected: Callable[..., Any]) -> None:
    scripted(http_double, (200, {}, b"x" * 5_000_000), (400, {}, b"y" * 5_000_000))
    sink = await connected(http_double.port)
    first, second = await deliver(sink, [HttpPayload(data=1), HttpPayload(data=2)])
    assert first is None
    assert len(second.error) < 400


async def test_nothing_is_logged_per_request(
    http_double: HttpDouble, connected: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sink = await connected(http_double.port, "/in?token=hunter2")
    await deliver(sink, [HttpPayload(data=1)])
    assert "hunter2" not in caplog.text


async def test_a_sink_that_is_not_connected_says_so() -> None:
    sink = make_sink(1)
    with pytest.raises(RemoteError, match="not connected"):
        await deliver(sink, [HttpPayload(data=1)])
    with pytest.raises(ConfigError, match=r"sinks\.http\.api"):
        await HttpSink("api", HttpSinkSettings(url="http://-ü-/")).connect()
    await asyncio.sleep(0)


def sent(server: HttpDouble) -> list[tuple[str, str, bytes]]:
    return [(request.method, request.path, request.body) for request in server.requests]


async def test_payloads_say_method_path_query_headers_and_body_for_themselves(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    options = {"headers": {"X-Api-Key": "k", "X-Kind": "sink"}}
    sink = await connected(http_double.port, "/v1?tenant=7", method="PUT", **options)
    payloads = [
        HttpPayload(data={"n": 1}, path="orders/a b", query={"dry": True, "tag": ["x", "y"]}),
        HttpPayload(
            data={"n": 2}, method="patch", headers={"x-kind": "payload", "Content-Type": "application/vnd.a+json"}
        ),
        HttpPayload(method="DELETE", path="orders/7"),
        HttpPayload(data={"why": "late"}, method="DELETE", path="orders/8"),
        HttpPayload(method="GET", path="ping", query=[("q", "\u00e9")]),
        HttpPayload(data={"a": "x y", "n": [1, 2], "on": True}, method="POST", body="form"),
        HttpPayload(data=b"a=1&b=2", method="POST", body="form"),
        HttpPayload(data=Order(n=3, note="\u00e9"), method="POST", body="form"),
    ]
    assert list(await deliver(sink, payloads)) == [None] * 8
    assert sent(http_double) == [
        ("PUT", "/v1/orders/a%20b?tenant=7&dry=true&tag=x&tag=y", b'{"n":1}'),
        ("PATCH", "/v1?tenant=7", b'{"n":2}'),
        ("DELETE", "/v1/orders/7?tenant=7", b""),
        ("DELETE", "/v1/orders/8?tenant=7", b'{"why":"late"}'),
        ("GET", "/v1/ping?tenant=7&q=%C3%A9", b""),
        ("POST", "/v1?tenant=7", b"a=x+y&n=1&n=2&on=true"),
        ("POST", "/v1?tenant=7", b"a=1&b=2"),
        ("POST", "/v1?tenant=7", b"n=3&note=%C3%A9"),
    ]
    kinds = [request.headers.get("content-type") for request in http_double.requests]
    json_type, form_type = "application/json", "application/x-www-form-urlencoded"
    assert kinds == [json_type, "application/vnd.a+json", None, json_type, None, form_type, form_type, form_type]
    assert [request.headers["x-kind"] for request in http_double.requests[:3]] == ["sink", "payload", "sink"]
    assert all(request.headers["x-api-key"] == "k" for request in http_double.requests)
    assert len({request.headers["idempotency-key"] for request in http_double.requests}) == 8


async def test_each_try_of_a_payload_is_the_same_request(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    scripted(http_double, (503, {}, b""), None, (500, {}, b""))
    sink = await connected(http_double.port)
    payload = HttpPayload(data={"n": 1}, method="PUT", path="orders/1", query={"v": 2}, headers={"X-Trace": "4bf9"})
    assert list(await deliver(sink, [payload])) == [None]
    assert len(http_double.requests) == 4
    assert (
        len({(request.method, request.path, request.body, str(request.headers)) for request in http_double.requests})
        == 1
    )


@pytest.mark.parametrize(("path", "port_offset"), [("../admin", 0), ("//127.0.0.1:1/x", 0), ("%2e%2e/admin", 0)])
async def test_a_path_that_leads_out_of_the_url_is_refused_and_nothing_is_sent(
    http_double: HttpDouble, connected: Callable[..., Any], path: str, port_offset: int
) -> None:
    sink = await connected(http_double.port)
    with pytest.raises(ValueError, match="path"):
        sink.encode(HttpPayload(data=1, path=path))
    assert http_double.requests == []


async def test_what_was_deleted_by_a_try_without_an_answer_is_delivered(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    scripted(http_double, None, (404, {}, b""), (410, {}, b""), (404, {}, b"no such order"))
    sink = await connected(http_double.port)
    answers = await deliver(sink, [HttpPayload(method="DELETE", path=f"orders/{n}") for n in range(4)])
    assert [answer is None for answer in answers] == [True, True, False, False]
    assert not answers[2].retryable
    assert "answered 404 Said: no such order" in answers[2].error
    assert answers[3] is WAITS


async def test_an_error_has_the_start_of_the_answer_as_text_on_one_line(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    long = ("line\r\n\x1b[31m" + "x" * 2_000).encode()
    packed = gzip.compress("\u00e9t\u00e9 d\u00e9pass\u00e9".encode() + b" " * 1_000_000)
    scripted(
        http_double,
        (400, {"content-type": "text/plain"}, long),
        (422, {"content-encoding": "gzip"}, packed),
        (400, {"content-type": "text/plain; charset=latin-1"}, "sch\u00f6n".encode("latin-1")),
        (400, {}, b"\x89PNG\0\xff"),
        (308, {"location": "/v2"}, b"moved to v2"),
        (400, {}, b""),
    )
    sink = await connected(http_double.port, concurrency=2)
    errors = [(await deliver(sink, [HttpPayload(data=n)]))[0].error for n in range(6)]
    assert errors.pop(4).endswith("redirects (308), which is not followed; correct url (it says: moved to v2)")
    starts = [error.partition(" Said")[2] for error in errors]
    assert starts[0].startswith(": line [31mxxx")
    assert starts[0].endswith("x...")
    assert len(starts[0]) < 310
    assert starts[1:] == [": \u00e9t\u00e9 d\u00e9pass\u00e9", ": sch\u00f6n", ": (binary)", ""]
    assert http_double.requests[0].headers["accept-encoding"] == "identity"


async def test_an_answer_that_repeats_the_request_is_told_without_its_secrets(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    def judge(request: Request) -> Answer:
        filler = b"." * 250
        text = f"{request.path} {request.headers} {request.body.decode()}".encode()
        return (400, {"content-type": "text/plain"}, text if request.body == b"1" else filler + text)

    http_double.judge = judge
    options = {"headers": {"X-Sink": "hunter2-sink"}, "concurrency": 2}
    sink = await connected(http_double.port, "/services/T0/hunter2-path?token=hunter2-query", **options)
    for data in (1, 2):
        payload = HttpPayload(
            data=data, path="orders/7", query={"api_key": "hunter2-added"}, headers={"X-Any": "hunter2-any"}
        )
        (answer,) = await deliver(sink, [payload])
        assert "hunter2" not in answer.error
        assert "answered 400" in answer.error


async def test_a_request_that_the_client_itself_refuses_is_that_payloads_own_failure(
    http_double: HttpDouble, connected: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = httpx.AsyncClient.send

    async def send(self: Any, request: httpx.Request, **kwargs: Any) -> httpx.Response:
        if request.content == b"1":
            raise httpx.LocalProtocolError("Illegal header value")
        return await original(self, request, **kwargs)

    monkeypatch.setattr(httpx.AsyncClient, "send", send)
    sink = await connected(http_double.port, concurrency=2)
    bad, good = await deliver(sink, [HttpPayload(data=1), HttpPayload(data=2)])
    assert good is None
    assert not bad.retryable
    assert "Illegal header value" in bad.error


async def test_different_requests_of_one_sink_stay_in_one_order(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    scripted(http_double, OK, *[(500, {}, b"")] * 2)
    sink = await connected(http_double.port, max_retries=1)
    payloads = [HttpPayload(data=n, method=("PUT", "POST")[n % 2], path=f"orders/{n}") for n in range(3)]
    answers = await deliver(sink, payloads)
    assert [None if answer is None else answer.waits for answer in answers] == [None, False, True]
    assert len({sink.encode(payload).key for payload in payloads}) == 1
    assert list(await deliver(sink, payloads[1:])) == [None, None]
    assert [request.path for request in http_double.requests] == [f"/in/orders/{n}" for n in (0, 1, 1, 1, 2)]


@pytest.mark.parametrize("hosts", ["[::1]", "::1/128,127.0.0.1", "fd00::/8, 127.0.0.0/8"])
async def test_a_list_of_hosts_without_proxy_may_name_addresses_of_ipv6(
    http_double: HttpDouble, connected: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    if "127" not in hosts:
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    else:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", hosts)
    sink = await connected(http_double.port)
    assert await deliver(sink, [HttpPayload(data={"n": 1})]) == [None]


async def test_requests_go_through_a_socks_proxy(
    http_double: HttpDouble, connected: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly((await reader.readexactly(2))[1])
        writer.write(b"\x05\x00")
        head = await reader.readexactly(5)
        asked.append(await reader.readexactly(head[4]))
        await reader.readexactly(2)
        writer.write(b"\x05\x00\x00\x01" + bytes(6))
        upstream = await asyncio.open_connection("127.0.0.1", http_double.port)
        await asyncio.gather(copy(reader, upstream[1]), copy(upstream[0], writer))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65_536):
            writer.write(chunk)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    monkeypatch.setenv("ALL_PROXY", f"socks5h://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    sink = HttpSink("api", HttpSinkSettings(url="http://api.example/in"))
    await sink.connect()
    assert await deliver(sink, [HttpPayload(data={"n": 1})]) == [None]
    await sink.close()
    server.close()
    assert asked == [b"api.example"]


async def test_a_proxy_that_cannot_be_read_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://::1:3128")
    with pytest.raises(ConfigError, match="HTTP_PROXY is not the address of a proxy"):
        await make_sink(1).connect()
