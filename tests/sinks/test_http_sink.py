"""The HTTP sink against a real server of the test's own."""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from tests.faults import FaultyProxy
from tests.sinks.servers import Answer, HttpDouble, Request

from tidemill.config.settings import DeliverySettings
from tidemill.config.sink_settings import HttpSinkSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.pipeline.delivery import Origin, Outbox
from tidemill.runtime.broker import free_port
from tidemill.sinks import http as module
from tidemill.sinks.base import WAITS, Sink
from tidemill.sinks.http import HttpSink
from tidemill.sinks.payloads import CollectResult, HttpPayload
from tidemill.testing.contract import JsonSinkContract, Outage, deliver
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
            return (422, {}, b"hunter2 is no order") if request.body == b'{"n":666}' else OK

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
        assert await self._data(1) == [{"n": 1}]
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
async def test_what_may_pass_is_sent_again_with_the_same_idempotency_key(
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
    async with asyncio.timeout(10):
        for number in range(1_000):
            routed = outbox.route(CollectResult(http=[HttpPayload(data=number)]))
            outbox.submit(routed, Origin([]), lambda number=number: released.append(number))
            await asyncio.sleep(0.002)
            if outbox.stats["sinks.http.api"].breaker_opened:
                break
        assert outbox.stats["sinks.http.api"].breaker_opened == 1
        assert released == []
        http_double.judge = lambda request: OK
        while len(released) <= number:
            await asyncio.sleep(0.002)
    await outbox.close()
    assert outbox.stats["sinks.http.api"].delivered_payloads == number + 1


async def test_one_payload_that_the_server_fails_over_holds_up_no_other_with_concurrency(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    http_double.judge = lambda request: (500, {}, b"") if request.body == b"3" else OK
    sink = await connected(http_double.port, concurrency=4, max_retries=1)
    answers = await deliver(sink, [HttpPayload(data=n) for n in range(16)])
    assert [n for n, answer in enumerate(answers) if answer is not None] == [3]
    assert answers[3].retryable


async def test_without_concurrency_nothing_overtakes_a_payload_that_is_tried_again(
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
    assert 0.95 <= time.monotonic() - started < 5


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
    assert 0.4 <= time.monotonic() - started < 5


async def test_a_request_that_is_not_answered_in_time_has_failed(
    http_double: HttpDouble, connected: Callable[..., Any]
) -> None:
    http_double.delay = 5.0
    sink = await connected(http_double.port, timeout_seconds=0.1, max_retries=1)
    started = time.monotonic()
    with pytest.raises(RemoteError, match=r"no answer within 0\.1 s"):
        await deliver(sink, [HttpPayload(data=1)])
    assert time.monotonic() - started < 3


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
        await HttpSink("api", HttpSinkSettings(url="http://[::1]extra/")).connect()
    await asyncio.sleep(0)
