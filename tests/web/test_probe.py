"""Messages are probed from the page and over the API: by whom, one at a time, and what is told of them."""

from __future__ import annotations

import asyncio
import base64
import html
from typing import Any

import httpx
import pytest
from tests.until import until
from tests.web.scripted_pipeline import SCRIPT, SECRET, SETTINGS, ScriptedPipeline
from tests.web.serving import connect, log_in
from tests.web.test_access import TOKEN, with_accounts
from tests.web.test_actions import noted  # noqa: F401  # a fixture

from tidemill.core.errors import RemoteError, UserActionError
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.probe_report import MAX_PROBE_BYTES, PROBE_SECONDS
from tidemill.web.problems import RequestProblem
from tidemill.web.values.section import ValueReader

PATH = "/api/v1/probe"


async def ended(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return the last probe once it has ended."""
    found: list[dict[str, Any]] = []

    async def look() -> bool:
        answer: dict[str, Any] = (await client.get(PATH)).json()
        found.append(answer)
        return answer["ended_at"] is not None

    async with asyncio.timeout(30):
        while not await look():
            await asyncio.sleep(0.01)
    return found[-1]


async def test_a_pasted_message_is_probed_and_recorded_with_who_did_it(
    noted: list[tuple[str, str]],  # noqa: F811
) -> None:
    pipeline = ScriptedPipeline()
    order = {
        "partition": 3,
        "offset": 17,
        "key": r"\xff\\a",
        "value": '{"a": "\\\\x41 \u00e4"}',
        "headers": [{"name": "trace", "value": r"\x00"}, {"name": "empty", "value": ""}, {"name": "none"}],
        "timestamp": 1_790_000_000.5,
    }
    async with log_in(pipeline) as client:
        assert (await client.get(PATH)).status_code == 404
        begun = await client.post(PATH, json=order)
        found = await ended(client)
    assert begun.status_code == 202
    assert (begun.json()["number"], begun.json()["by"], begun.json()["report"]) == (1, "key", None)
    message = SourceMessage(
        "orders",
        3,
        17,
        b"\xff\\a",
        '{"a": "\\\\x41 \u00e4"}'.encode(),
        (("trace", b"\0"), ("empty", b""), ("none", None)),
        1_790_000_000_500,
    )
    assert pipeline.probed == [(message, PROBE_SECONDS)]
    assert noted == [("probe a pasted message as orders:3:17 (35 bytes)", "key")]
    report = found["report"]
    assert (found["problem"], report["status"], report["sinks"]) == ("", "failed", {"sinks.kafka.results": 1})
    assert [stage["hook"] for stage in report["stages"]][:2] == ["deserialize_message", "arrange"]
    assert [attempt["exit_code"] for attempt in report["tasks"][0]["attempts"]] == [3, 0]
    assert report["letters"][0]["kind"] == "hook"
    assert (report["cache_writes"], report["left_out"]) == (2, 7)


async def test_a_recorded_message_is_read_from_its_topic_as_it_is(
    noted: list[tuple[str, str]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = SourceMessage("orders", 3, 17, None, b'{"password": "x"}', (), 5)
    read: list[tuple[str, int, int]] = []

    def fetch(self: ValueReader, *place: Any) -> SourceMessage:
        read.append(place)
        if place[2] == 18:
            raise RequestProblem(410, "it was removed")
        return message

    monkeypatch.setattr(ValueReader, "fetch", fetch)
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        await client.post(PATH, json={"recorded": True, "partition": 3, "offset": 17})
        assert (await ended(client))["recorded"] is True
        gone = await client.post(PATH, json={"recorded": True, "partition": 3, "offset": 18})
    assert (gone.status_code, gone.json()["detail"]) == (410, "it was removed")
    assert read == [("orders", 3, 17), ("orders", 3, 18)]
    assert pipeline.probed == [(message, PROBE_SECONDS)], "nothing is masked before it is probed"
    assert noted == [("probe message orders:3:17", "key")]


@pytest.mark.parametrize(
    ("order", "value"),
    [
        ({}, None),
        ({"value": None}, None),
        ({"value": ""}, b""),
        ({"value": base64.b64encode(b"\xff\0").decode(), "encoding": "base64"}, b"\xff\0"),
    ],
)
async def test_a_value_may_be_null_empty_or_any_bytes(order: dict[str, Any], value: bytes | None) -> None:
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        assert (await client.post(PATH, json=order)).status_code == 202
        await ended(client)
    assert pipeline.probed[0][0].value == value
    assert pipeline.probed[0][0].key is None


@pytest.mark.parametrize(
    ("order", "status"),
    [
        ({"partition": -1}, 422),
        ({"offset": "x"}, 422),
        ({"offset": 2**63}, 422),
        ({"topic": "other"}, 422),
        ({"value": 5}, 422),
        ({"value": "not base64!", "encoding": "base64"}, 422),
        ({"value": "x", "encoding": "hex"}, 422),
        ({"headers": [{"name": "", "value": "x"}]}, 422),
        ({"headers": [{"name": "x"}] * 201}, 422),
        ({"timestamp": -1}, 422),
        ({"recorded": True}, 422),
        ({"recorded": True, "partition": 0, "offset": 1, "value": "x"}, 422),
        ([], 422),
    ],
)
async def test_what_cannot_be_a_message_is_refused_and_not_recorded(
    noted: list[tuple[str, str]],  # noqa: F811
    order: Any,
    status: int,
) -> None:
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        answer = await client.post(PATH, json=order)
        lone = await client.post(PATH, content=b'{"value": "\\ud800"}', headers={"Content-Type": "application/json"})
    assert (answer.status_code, lone.status_code) == (status, 422)
    assert answer.headers["content-type"] == "application/problem+json"
    assert (pipeline.probed, noted) == ([], [])


async def test_a_message_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    value = b"x" * MAX_PROBE_BYTES
    monkeypatch.setattr(ValueReader, "fetch", lambda self, *place: SourceMessage("orders", 0, place[2], None, value))
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        fits = await client.post(PATH, json={"recorded": True, "offset": 1})
        await ended(client)
        value += b"x"
        too_large = await client.post(PATH, json={"recorded": True, "offset": 1})
        pasted = await client.post(PATH, json={"value": "x" * MAX_PROBE_BYTES})
    assert (fits.status_code, too_large.status_code, pasted.status_code) == (202, 413, 413)
    assert "1,048,577 bytes" in too_large.json()["detail"]
    assert len(pipeline.probed) == 1


async def test_one_probe_runs_at_a_time() -> None:
    pipeline = ScriptedPipeline()
    pipeline.probe_gate.clear()
    async with log_in(pipeline) as client:
        assert (await client.post(PATH, json={"value": "1"})).status_code == 202
        second = await client.post(PATH, json={"value": "2"})
        page = (await client.get("/probe")).text
        pipeline.probe_gate.set()
        await ended(client)
        assert (await client.post(PATH, json={"value": "3"})).json()["number"] == 2
        await ended(client)
    assert (second.status_code, second.headers["Retry-After"]) == (429, "5")
    assert "started by key" in second.json()["detail"]
    assert ">running<" in page
    assert [message.value for message, _ in pipeline.probed] == [b"1", b"3"]


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (UserActionError("engine 0: it is draining"), "engine 0: it is draining"),
        (RemoteError(f"engine 0: the link to kafka://u:{SECRET}@x was closed"), "kafka://***@x"),
        (ValueError(SECRET), "internal error in tidemill; see the log of this process"),
    ],
)
async def test_why_nothing_was_probed_is_told(error: Exception, problem: str) -> None:
    pipeline = ScriptedPipeline()
    pipeline.report = error
    async with log_in(pipeline) as client:
        await client.post(PATH, json={"value": "1"})
        found = await ended(client)
        page = (await client.get("/probe")).text
    assert problem in found["problem"]
    assert found["report"] is None
    assert problem in page
    assert SECRET not in page


async def test_who_may_only_read_sees_probes_and_begins_none() -> None:
    pipeline = with_accounts()
    async with connect(pipeline) as client:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = await client.post(PATH, json={"value": "1"}, headers=headers)
        page = await client.get("/probe", headers=headers)
    assert (answer.status_code, "the role operate" in answer.json()["detail"]) == (403, True)
    assert page.status_code == 200
    assert pipeline.probed == []


async def test_a_probe_needs_the_token_of_the_pages_and_their_origin() -> None:
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        foreign = await client.post(PATH, json={"value": "1"}, headers={"Origin": "http://evil.example"})
        del client.headers["X-CSRF-Token"]
        without = await client.post(PATH, json={"value": "1"})
    assert (foreign.status_code, without.status_code, pipeline.probed) == (403, 403, [])


async def test_the_page_warns_and_shows_what_was_found_as_text() -> None:
    pipeline = ScriptedPipeline()
    async with log_in(pipeline) as client:
        empty = await client.get("/probe?partition=3&offset=17")
        await client.post(PATH, json={"value": SCRIPT})
        await ended(client)
        page = (await client.get("/probe")).text
        part = await client.get("/probe/state?seen=0")
        version = part.text.partition("seen=")[2].partition('"')[0]
        same = await client.get(f"/probe/state?seen={version}")
        message = (await client.get("/messages/orders/3/17")).text
        other = (await client.get("/messages/others/3/17")).text
    assert "Side effects of hooks are real." in empty.text
    assert 'value="17"' in empty.text
    assert SCRIPT not in page
    shown = html.unescape(page)
    for text in (
        "it would have left 1 dead letter",
        f"ValueError: {SCRIPT}",
        f"result {SCRIPT}",
        "exit code 3",
        '"data": "***"',
        "2 writes, discarded",
        "7 more",
    ):
        assert text in shown, text
    assert page.count('class="bar ') == 7
    assert (part.status_code, same.status_code) == (200, 204)
    assert 'href="/probe?partition=3&amp;offset=17"' in message
    assert "/probe?" not in other


async def test_nothing_of_it_is_there_where_it_is_off() -> None:
    pipeline = ScriptedPipeline({"debug": SETTINGS["debug"] | {"probe_enabled": False}})
    async with log_in(pipeline) as client:
        answers = [await client.get("/probe"), await client.get(PATH), await client.post(PATH, json={"value": "1"})]
        page = (await client.get("/messages/orders/3/17")).text
    assert [answer.status_code for answer in answers] == [404] * 3
    assert all("debug.probe_enabled" in answer.text for answer in answers)
    assert "/probe" not in page
    assert pipeline.probed == []


async def test_it_is_in_the_openapi_document() -> None:
    async with log_in(ScriptedPipeline()) as client:
        paths = (await client.get("/api/openapi.json")).json()["paths"]
    assert {"get", "post"} <= paths[PATH].keys()


async def test_the_probe_of_a_pipeline_that_is_slow_does_not_hold_up_pages() -> None:
    pipeline = ScriptedPipeline()
    pipeline.probe_gate.clear()
    async with log_in(pipeline) as client:
        await client.post(PATH, json={"value": "1"})
        for _ in range(20):
            assert (await client.get("/")).status_code == 200
        await until(lambda: pipeline.probed)
        pipeline.probe_gate.set()
        await ended(client)
