"""A message's key, headers and value come from its topic, as people can read them, secrets masked."""

from __future__ import annotations

import html
import json
import threading

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient
from tests.until import wait_until
from tests.web.scripted_pipeline import SCRIPT, SECRET, ScriptedPipeline
from tests.web.serving import connect, log_in

from tidemill.core.errors import RemoteError
from tidemill.deadletters.restore import SourceReader
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.testing.kafka import unique_name
from tidemill.web.problems import RequestProblem
from tidemill.web.values.section import ValueReader
from tidemill.web.values.shown_bytes import MAX_BYTES, show


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (b"", "text", ""),
        (b"plain text", "text", "plain text"),
        ("gr\u00fc\u00df\n\t\u6f22".encode(), "text", "gr\u00fc\u00df\n\t\u6f22"),
        (b'{"b": 1, "a": [1, "x"]}', "json", '{\n  "b": 1,\n  "a": [\n    1,\n    "x"\n  ]\n}'),
        (b' {"n": NaN}', "json", '{\n  "n": NaN\n}'),
        (b'{"broken": ', "text", '{"broken": '),
        (b"12345678901234567890", "text", "12345678901234567890"),
        (b"[" * 100_000, "text", "[" * 100_000),
        (b"[" + b"9" * 5000 + b"]", "text", "[" + "9" * 5000 + "]"),
        (b"[" * 3000 + b"]" * 3000, "text", "[" * 3000 + "]" * 3000),
        (b'["\\ud800"]', "json", None),
        (b"NUL \x00", "binary", None),
        (b"\x1b[31m", "binary", None),
        ("\u202eright to left".encode(), "binary", None),
        (b"\xff\xfe", "binary", "00000000  ff fe                                             .."),
    ],
)
def test_bytes_are_shown_as_json_text_or_hex(data: bytes, kind: str, text: str | None) -> None:
    shown = show(data)
    assert (shown.kind, shown.size_bytes, shown.is_cut) == (kind, len(data), False)
    if text is not None:
        assert shown.text == text
    shown.text.encode()


def test_null_is_not_an_empty_value() -> None:
    assert (show(None).kind, show(b"").kind) == ("null", "text")


def test_what_is_large_is_cut_and_says_so() -> None:
    text = show("\u00e4".encode() * MAX_BYTES)
    assert (text.kind, text.is_cut, text.size_bytes) == ("text", True, 2 * MAX_BYTES)
    assert text.text == "\u00e4" * (MAX_BYTES // 2)
    odd = show(b"x" + "\u00e4".encode() * MAX_BYTES)
    assert (odd.kind, len(odd.text)) == ("text", MAX_BYTES // 2)
    large = show(json.dumps(["x"] * MAX_BYTES).encode())
    assert (large.kind, large.is_cut) == ("text", True)
    binary = show(bytes(MAX_BYTES))
    assert (binary.kind, binary.is_cut) == ("binary", True)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (json.dumps({"user": "ann", "password": SECRET, "in": [{"api_key": SECRET}]}).encode(), ""),
        (json.dumps([f"postgres://app:{SECRET}@db/x"]).encode(), ""),
        (f"password={SECRET} user=ann".encode(), ""),
        (SECRET.encode(), "Authorization"),
        (json.dumps({"n": SECRET}).encode(), "x-session-token"),
    ],
)
def test_secrets_are_masked(data: bytes, name: str) -> None:
    assert SECRET not in show(data, name).text
    assert "***" in show(data, name).text


@pytest.fixture(scope="module")
def topic(embedded_kafka: EmbeddedBroker) -> str:
    name = unique_name("orders")
    embedded_kafka.create_topic(name, 1)
    producer = ck.Producer({"bootstrap.servers": embedded_kafka.bootstrap})
    headers: list[tuple[str, bytes | None]] = [
        ("trace", b"abc"),
        ("api-token", SECRET.encode()),
        ("empty", None),
        ("bin", b"\xff\x00"),
    ]
    for number in range(6):
        value = json.dumps({"n": number, "password": SECRET, "text": SCRIPT}).encode()
        producer.produce(name, value, f"key-{number} {SCRIPT}".encode(), 0, headers=headers)
    producer.produce(name, None, None, 0)
    assert producer.flush(60) == 0
    admin = AdminClient({"bootstrap.servers": embedded_kafka.bootstrap})
    (deleted,) = admin.delete_records([ck.TopicPartition(name, 0, 2)]).values()
    deleted.result(60)
    return name


@pytest.fixture
def pipeline(embedded_kafka: EmbeddedBroker, topic: str) -> ScriptedPipeline:
    return ScriptedPipeline(
        {"kafka": {"brokers": embedded_kafka.bootstrap, "source_topic": topic, "consumer_group": "order-workers"}}
    )


async def test_a_message_has_key_headers_and_value_without_secrets(pipeline: ScriptedPipeline, topic: str) -> None:
    async with log_in(pipeline) as client:
        found = (await client.get(f"/api/v1/messages/{topic}/0/4/value")).json()
        page = (await client.get(f"/messages/{topic}/0/4/value")).text
        null = (await client.get(f"/api/v1/messages/{topic}/0/6/value")).json()
        linked = (await client.get(f"/messages/{topic}/0/4")).text

    assert json.loads(found["value"]["text"]) == {"n": 4, "password": "***", "text": SCRIPT}
    assert found["key"]["text"] == f"key-4 {SCRIPT}"
    assert [(each["name"], each["value"]["kind"]) for each in found["headers"]] == [
        ("trace", "text"),
        ("api-token", "text"),
        ("empty", "null"),
        ("bin", "binary"),
    ]
    assert found["headers"][1]["value"]["text"] == "***"
    assert found["timestamp"] > 1_700_000_000
    assert (null["key"]["kind"], null["value"]["kind"], null["headers"]) == ("null", "null", [])
    assert SECRET not in json.dumps(found) + page
    assert SCRIPT not in page
    assert html.escape(SCRIPT) in page
    assert f'hx-get="/messages/{topic}/0/4/value"' in linked


@pytest.mark.parametrize(
    ("place", "status", "said"),
    [
        ("0/1", 410, "was removed by retention; the partition begins at offset 2 now"),
        ("0/7", 404, "does not exist yet; the partition ends at offset 7"),
        ("0/9223372036854775806", 404, "does not exist yet"),
        ("7/0", 404, "there is no partition 7"),
        ("0/9223372036854775807", 422, "offset"),
        ("x/0", 422, "partition"),
    ],
)
async def test_what_is_not_there_says_why(
    pipeline: ScriptedPipeline, topic: str, place: str, status: int, said: str
) -> None:
    async with log_in(pipeline) as client:
        answer = await client.get(f"/api/v1/messages/{topic}/{place}/value")
        page = await client.get(f"/messages/{topic}/{place}/value", headers={"Accept": "text/html"})
        part = await client.get(
            f"/messages/{topic}/{place}/value", headers={"Accept": "text/html", "HX-Request": "true"}
        )
    assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text
    assert (page.status_code, part.status_code) == (status, 422 if status == 422 else 200)
    assert said in html.unescape(page.text)


async def test_other_topics_cannot_be_read(pipeline: ScriptedPipeline) -> None:
    async with log_in(pipeline) as client:
        for topic in ("__consumer_offsets", "..%2F..%2Fetc", "order-results"):
            assert (await client.get(f"/api/v1/messages/{topic}/0/0/value")).status_code == 404
        other = (await client.get("/messages/order-results/0/0")).text
    assert "/value" not in other


async def test_a_value_needs_a_login(pipeline: ScriptedPipeline, topic: str) -> None:
    async with connect(pipeline) as client:
        assert (await client.get(f"/api/v1/messages/{topic}/0/4/value")).status_code == 401


def test_brokers_that_do_not_answer_are_said_and_few_read_at_a_time(
    pipeline: ScriptedPipeline, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, go_on = ValueReader(pipeline.settings, wait_seconds=0.01), threading.Event()
    waiting: list[int] = []
    problems: list[RequestProblem] = []

    def read(self: SourceReader, topic: str, partition: int, offset: int) -> None:
        waiting.append(offset)
        go_on.wait(60)
        raise RemoteError("no answer from Kafka")

    def ask() -> None:
        try:
            reader.read(topic, 0, 4)
        except RequestProblem as problem:
            problems.append(problem)

    monkeypatch.setattr(SourceReader, "find_range", lambda self, topic, partition: (0, 9))
    monkeypatch.setattr(SourceReader, "read", read)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(waiting) == 2)
    with pytest.raises(RequestProblem, match="other messages are being read"):
        reader.read(topic, 0, 4)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert [(problem.status, problem.text) for problem in problems] == [(503, "no answer from Kafka")] * 2
