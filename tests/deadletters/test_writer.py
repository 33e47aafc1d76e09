"""Letters: any letter can be written, what is too large is shrunk, and a real broker confirms it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
import pydantic
import pytest
import structlog.testing
from confluent_kafka.admin import AdminClient
from tests.until import until

from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.core.retry import Backoff
from tidemill.deadletters.letter import (
    Letter,
    LetterKind,
    decode_letter,
    describe_sources,
    encode_letter,
    truncate_stderr,
)
from tidemill.deadletters.payloads import Blob, encode_payload
from tidemill.deadletters.writer import KafkaDeadLetters
from tidemill.runtime.embedded.broker import EmbeddedBroker, free_port
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.payloads import FilePayload, KafkaPayload
from tidemill.testing.kafka import consume, unique_name


class Model(pydantic.BaseModel):
    n: int


def message(value: bytes | None = b'{"n":1}', offset: int = 7, **fields: Any) -> SourceMessage:
    return SourceMessage("in", 3, offset, fields.pop("key", b"k"), value, **fields)


def test_a_letter_says_everything_and_can_be_read_back() -> None:
    sources = describe_sources([message(headers=(("h", b"v"), ("none", None)), timestamp=1_700_000_000_000)])
    letter = Letter(
        kind=LetterKind.TASK,
        error="exit code 1",
        partition=3,
        attempt_count=4,
        task_id="t-1",
        args=["-a"],
        exit_code=1,
        stderr="oops",
        sources=sources,
    )
    fields = json.loads(encode_letter(letter))
    assert list(fields) == list(Letter.__struct_fields__)
    assert fields["schema_version"] == 1
    assert fields["kind"] == "task"
    assert fields["redrives"] == 0
    assert datetime.fromisoformat(fields["timestamp"]).utcoffset().total_seconds() == 0  # type: ignore[union-attr]
    assert fields["sources"] == [
        {
            "topic": "in",
            "partition": 3,
            "offset": 7,
            "key": "k",
            "headers": [["h", "v"], ["none", None]],
            "timestamp": 1_700_000_000_000,
            "value": '{"n":1}',
            "headers_error": None,
        }
    ]
    assert decode_letter(encode_letter(letter)) == letter


def test_letters_have_ids_of_their_own() -> None:
    assert len({Letter(kind=LetterKind.HOOK, error="e").letter_id for _ in range(100)}) == 100


def test_binary_keys_values_and_headers_are_base64() -> None:
    raw = b"\xff\x00\xfe"
    (source,) = describe_sources([message(raw, key=raw, headers=(("h", raw),))])
    expected = Blob(base64=base64.b64encode(raw).decode())
    assert (source.key, source.value, source.headers) == (expected, expected, [("h", expected)])
    assert json.loads(msgspec.json.encode(source))["value"] == {"base64": "/wD+"}


def test_a_tombstone_has_no_value() -> None:
    (source,) = describe_sources([message(None, key=None)])
    assert (source.key, source.value) == (None, None)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (KafkaPayload("s", "k", {"a": [1]}), {"sink": "s", "key": "k", "data": {"a": [1]}}),
        (FilePayload("", "a.jsonl", Model(n=5)), {"sink": "", "path": "a.jsonl", "data": {"n": 5}}),
        (
            FilePayload("", "a.jsonl", Model(n=5), op="replace"),
            {"sink": "", "path": "a.jsonl", "data": {"n": 5}, "op": "replace"},
        ),
        (KafkaPayload("s", b"\xff", [Model(n=5)]), {"sink": "s", "key": {"base64": "/w=="}, "data": [{"n": 5}]}),
        (KafkaPayload("s", b"k", b"raw"), {"sink": "s", "key": {"text": "k"}, "data": {"text": "raw"}}),
        (KafkaPayload("s", None, "text"), {"sink": "s", "key": None, "data": "text"}),
        ({"no": "payload"}, {"data": {"no": "payload"}}),
    ],
)
def test_a_payload_is_kept_whole(payload: Any, expected: Any) -> None:
    assert json.loads(encode_payload(payload)) == expected


class Awkward:
    def __repr__(self) -> str:
        return "<awkward \udcff>"


@pytest.mark.parametrize("data", [Awkward(), {"x": Awkward()}, {("a", "b"): 1}, "lone \udcff", float("nan"), {1.5: 2}])
def test_data_that_has_no_json_form_is_kept_as_well_as_can_be(data: Any) -> None:
    letter = Letter(
        kind=LetterKind.DELIVERY,
        error="\udcff",
        args=["\udc80"],
        original_payloads=[encode_payload(KafkaPayload(data=data))],
    )
    fields = json.loads(encode_letter(letter))
    assert "data" in json.loads(fields["original_payloads"][0])
    assert fields["args"] == ["?"]


def test_only_the_end_of_stderr_is_kept() -> None:
    assert truncate_stderr("a" + "b" * 4096) == "b" * 4096
    assert truncate_stderr(b"x\xff") == "x\ufffd"
    assert len(truncate_stderr("\u00e9" * 4000).encode()) <= 4096


def large_letter(sources: int = 3, size: int = 50_000) -> Letter:
    value = b"v" * size
    return Letter(
        kind=LetterKind.OVERSIZE,
        error="too large",
        original_payloads=[
            encode_payload(KafkaPayload("s", "k", "d" * size)),
            encode_payload(KafkaPayload("s", "k", value)),
        ],
        args=["a" * 1000],
        stderr="e" * 4096,
        sources=describe_sources([message(value, offset) for offset in range(sources)]),
    )


def test_what_is_too_large_loses_bodies_but_keeps_length_digest_and_position() -> None:
    letter = large_letter()
    encoded = encode_letter(letter, 20_000)
    assert len(encoded) <= 20_000
    shrunk = decode_letter(encoded)
    digest = hashlib.sha256(b"v" * 50_000).hexdigest()
    assert [source.value for source in shrunk.sources] == [Blob(length=50_000, sha256=digest)] * 3
    assert [(source.partition, source.offset, source.key) for source in shrunk.sources] == [
        (3, n, "k") for n in range(3)
    ]
    as_json, as_bytes = (json.loads(payload) for payload in shrunk.original_payloads)
    assert as_json["key"] == "k"
    assert as_json["data"] == {"length": 50_002, "sha256": hashlib.sha256(b'"' + b"d" * 50_000 + b'"').hexdigest()}
    assert as_bytes["data"] == {"length": 50_000, "sha256": digest}
    assert (shrunk.stderr, shrunk.args, shrunk.letter_id) == (letter.stderr, letter.args, letter.letter_id)


def test_a_binary_body_is_measured_as_the_bytes_that_it_was() -> None:
    raw = b"\xff" * 1000
    letter = Letter(
        kind=LetterKind.PARSE,
        error="e",
        original_payloads=[encode_payload(KafkaPayload("s", None, raw))],
        sources=describe_sources([message(raw, key=b"\xff")]),
    )
    shrunk = decode_letter(encode_letter(letter, 1000))
    expected = Blob(length=1000, sha256=hashlib.sha256(raw).hexdigest())
    assert shrunk.sources[0].value == expected
    assert shrunk.sources[0].key == Blob(base64="/w==")
    assert json.loads(shrunk.original_payloads[0])["data"]["length"] == 1000


def test_positions_stay_as_long_as_they_fit() -> None:
    letter = large_letter(sources=100)
    shrunk = decode_letter(encode_letter(letter, 12_000))
    assert [source.offset for source in shrunk.sources] == list(range(100))
    assert shrunk.sources[0].value == Blob(), "there was a value, and it is not here"
    assert decode_letter(encode_letter(large_letter(), 1_500)).original_payloads == []
    fewer = decode_letter(encode_letter(letter, 3_000))
    assert 0 < len(fewer.sources) < 100
    assert fewer.letter_id == letter.letter_id


def test_a_letter_that_fits_is_left_alone() -> None:
    letter = large_letter()
    assert decode_letter(encode_letter(letter, 1_000_000)) == letter


# -- with a broker --------------------------------------------------------------------------------------------


def settings_for(bootstrap: str, topic: str = "", **dlq: Any) -> Settings:
    kafka = {"brokers": bootstrap, "source_topic": unique_name("in")}
    return Settings.model_validate({"kafka": kafka, "dlq": {"topic": topic, **dlq}})


async def written(letters: KafkaDeadLetters, letter: Letter, timeout_seconds: float = 20.0) -> None:
    done = asyncio.Event()
    letters.put(letter, done.set)
    assert not done.is_set()
    async with asyncio.timeout(timeout_seconds):
        await done.wait()


@pytest.mark.kafka
async def test_the_topic_is_created_once_and_letters_are_confirmed(embedded_kafka: EmbeddedBroker) -> None:
    settings = settings_for(embedded_kafka.bootstrap)
    engines = [KafkaDeadLetters(settings) for _ in range(3)]
    await asyncio.gather(*(letters.open() for letters in engines))
    letter = Letter(kind=LetterKind.PARSE, error="no JSON", sources=describe_sources([message(b"\xff")]))
    for letters in engines:
        await written(letters, letter)
        assert (letters.statistics().written, letters.describe_wait()) == (1, None)
        await letters.close()
    found = consume(embedded_kafka.bootstrap, f"{settings.kafka.source_topic}_dlq", 3)
    assert [decode_letter(each.value() or b"") for each in found] == [letter] * 3


@pytest.mark.kafka
async def test_a_letter_larger_than_the_topic_accepts_is_shrunk_and_others_are_not(
    embedded_kafka: EmbeddedBroker,
) -> None:
    topic = embedded_kafka.create_topic(unique_name("dlq"), config={"max.message.bytes": "10000"})
    letters = KafkaDeadLetters(settings_for(embedded_kafka.bootstrap, topic))
    await letters.open()
    small = Letter(kind=LetterKind.HOOK, error="small", sources=describe_sources([message(b"x" * 5000)]))
    await asyncio.gather(*(written(letters, letter) for letter in (small, large_letter(), small)))
    await letters.close()
    found = [decode_letter(each.value() or b"") for each in consume(embedded_kafka.bootstrap, topic, 3)]
    assert [letter.sources for letter in found if letter.kind is LetterKind.HOOK] == [small.sources] * 2
    (large,) = [letter for letter in found if letter.kind is LetterKind.OVERSIZE]
    assert [source.offset for source in large.sources] == [0, 1, 2]


@pytest.mark.kafka
async def test_a_limit_that_the_broker_only_tells_by_refusing_is_found(
    embedded_kafka: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = embedded_kafka.create_topic(unique_name("dlq"), config={"max.message.bytes": "10000"})
    # As for a client without the right to read configurations.
    monkeypatch.setattr("tidemill.runtime.kafka.client.TopicAdmin.max_message_bytes", lambda self, topic: None)
    letters = KafkaDeadLetters(settings_for(embedded_kafka.bootstrap, topic), Backoff(0.01, 0.1))
    await letters.open()
    small = Letter(kind=LetterKind.HOOK, error="small", sources=describe_sources([message(b"x" * 5000)]))
    await asyncio.gather(*(written(letters, letter) for letter in (small, large_letter(), small)))
    assert letters.describe_wait() is None
    await letters.close()
    found = [decode_letter(each.value() or b"") for each in consume(embedded_kafka.bootstrap, topic, 3)]
    assert sorted(len(letter.sources) for letter in found) == [1, 1, 3]


async def test_no_broker_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.runtime.kafka.client.CALL_SECONDS", 1.0)
    letters = KafkaDeadLetters(settings_for(f"127.0.0.1:{free_port()}"))
    with pytest.raises(RemoteError, match="dlq: no answer from Kafka"):
        await letters.open()
    await letters.close()


@pytest.mark.kafka
async def test_a_topic_that_cannot_be_created_is_said_by_name(embedded_kafka: EmbeddedBroker) -> None:
    letters = KafkaDeadLetters(settings_for(embedded_kafka.bootstrap))
    letters._topic = "no/name"
    with pytest.raises(RemoteError, match=r"dlq: topic 'no/name' cannot be (looked up|created) at 127"):
        await letters.open()


@pytest.mark.kafka
async def test_a_topic_that_is_deleted_while_the_pipeline_runs_is_said_with_what_to_do(
    embedded_kafka: EmbeddedBroker,
) -> None:
    topic = unique_name("dlq")
    letters = KafkaDeadLetters(settings_for(embedded_kafka.bootstrap, topic), Backoff(0.05, 0.2))
    letters._config |= {"topic.metadata.propagation.max.ms": 200, "topic.metadata.refresh.interval.ms": 200}
    await letters.open()
    await written(letters, Letter(kind=LetterKind.HOOK, error="first"))
    admin = AdminClient({"bootstrap.servers": embedded_kafka.bootstrap})
    await asyncio.to_thread(lambda: admin.delete_topics([topic])[topic].result(30))
    letters.put(Letter(kind=LetterKind.HOOK, error="second"), lambda: None)
    await until(lambda: "create the topic again" in (letters.describe_wait() or ""))
    await letters.close()


@pytest.mark.kafka
async def test_while_the_broker_is_down_letters_wait_say_so_and_are_written_later_or_given_up_by_a_close(
    own_kafka: Callable[..., EmbeddedBroker],
) -> None:
    broker = own_kafka()
    letters = KafkaDeadLetters(settings_for(broker.bootstrap, "dlq"), Backoff(0.05, 0.2))
    letters._config |= {"delivery.timeout.ms": 500, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}
    await letters.open()
    await written(letters, Letter(kind=LetterKind.HOOK, error="first"))
    broker.kill()
    waiting = asyncio.ensure_future(written(letters, Letter(kind=LetterKind.HOOK, error="second"), 60.0))
    await until(lambda: letters.describe_wait() is not None)
    assert "1 letter waiting for topic dlq" in (letters.describe_wait() or "")
    await asyncio.to_thread(broker.start)
    await waiting
    assert (letters.statistics().written, letters.describe_wait()) == (2, None)

    letters._backoff = Backoff(1e6, 1e6)
    broker.kill()
    called: list[int] = []
    letters.put(Letter(kind=LetterKind.HOOK, error="in back-off"), lambda: called.append(1))
    await until(lambda: letters.describe_wait() is not None)
    letters.put(Letter(kind=LetterKind.HOOK, error="in flight"), lambda: called.append(2))
    async with asyncio.timeout(30):
        await letters.close()
    assert (called, letters.statistics().written) == ([], 2)


@pytest.mark.long
@pytest.mark.kafka
async def test_on_demand_letters_that_are_refused_are_dropped_counted_and_logged(
    own_kafka: Callable[..., EmbeddedBroker],
) -> None:
    broker = own_kafka()
    letters = KafkaDeadLetters(settings_for(broker.bootstrap, "dlq", on_send_failure="drop"))
    letters._config |= {"delivery.timeout.ms": 4_000, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}
    await letters.open()
    await written(letters, Letter(kind=LetterKind.HOOK, error="first"))
    broker.kill()
    lost = Letter(kind=LetterKind.HOOK, error="second", sources=describe_sources([message(b"secret body", 41)]))
    with structlog.testing.capture_logs() as logs:
        await written(letters, lost)
    assert (letters.statistics().written, letters.statistics().dropped, letters.describe_wait()) == (1, 1, None)
    (line,) = [each for each in logs if each["event"].startswith("a dead letter is dropped")]
    assert (line["letter_id"], line["sources"], line["log_level"]) == (lost.letter_id, ["in/3/41"], "error")
    assert "secret body" not in str(line)
    await asyncio.to_thread(broker.start)
    # Nobody has to do anything for the next one.
    async with asyncio.timeout(60):
        while letters.statistics().written == 1:
            await written(letters, Letter(kind=LetterKind.HOOK, error="third"))
    await letters.close()


@pytest.mark.kafka
async def test_even_then_a_letter_that_is_too_large_is_shrunk_first(
    embedded_kafka: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = embedded_kafka.create_topic(unique_name("dlq"), config={"max.message.bytes": "10000"})
    monkeypatch.setattr("tidemill.runtime.kafka.client.TopicAdmin.max_message_bytes", lambda self, topic: None)
    settings = settings_for(embedded_kafka.bootstrap, topic, on_send_failure="drop")
    letters = KafkaDeadLetters(settings, Backoff(0.01, 0.1))
    await letters.open()
    await written(letters, large_letter())
    assert (letters.statistics().written, letters.statistics().dropped) == (1, 0)
    await letters.close()


def test_a_letter_says_how_many_positions_it_had_to_leave_out() -> None:
    letter = large_letter(sources=100)
    fewer = decode_letter(encode_letter(letter, 3_000))
    assert len(fewer.sources) + fewer.sources_dropped == 100
    assert decode_letter(encode_letter(letter)).sources_dropped == 0
