"""Redrives against a real broker: every byte comes back, each letter goes once, and what cannot go is named."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import msgspec
import pytest
from tests.foreign_client import send_with_headers
from tests.sinks.servers import HttpDouble

from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import LetterCriteria, RedriveTally, Target, UnsentReason
from tidemill.core.errors import ConfigError, FencedError, RemoteError
from tidemill.deadletters import reader, restore
from tidemill.deadletters.letter import (
    Letter,
    LetterKind,
    LetterSource,
    count_redrives,
    decode_letter,
    describe_sources,
    encode_letter,
)
from tidemill.deadletters.payloads import encode_payload
from tidemill.deadletters.redrive import cursor as redrive_cursor
from tidemill.deadletters.redrive import run as redrive_module
from tidemill.deadletters.redrive import sinks as redrive_sinks
from tidemill.deadletters.redrive.run import Redrive, RedriveOrder
from tidemill.deadletters.redrive.targets import RedriveItem
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.delivery.routing import Origin
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import DeliveryAction, ErrorAction, ExecutorTask
from tidemill.runtime.embedded.broker import EmbeddedBroker, free_port
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.base import Encoded, Refusal
from tidemill.sinks.build import build_sinks
from tidemill.sinks.kafka import KafkaSink
from tidemill.sinks.payloads import CollectResult, FilePayload, HttpPayload, KafkaPayload
from tidemill.testing import run_handler
from tidemill.testing.kafka import FAST_CLIENT, consume, produce, unique_name
from tidemill.testing.scripted import ScriptedDeadLetters

pytestmark = pytest.mark.kafka


class Place:
    """A source topic and its dead-letter topic."""

    def __init__(self, broker: EmbeddedBroker, partitions: int = 2, dlq_partitions: int = 1, **config: Any) -> None:
        self.broker = broker
        self.topic = broker.create_topic(unique_name("in"), partitions=partitions)
        self.dlq = broker.create_topic(f"{self.topic}_dlq", partitions=dlq_partitions)
        self.config: dict[str, Any] = {"kafka": {"brokers": broker.bootstrap, "source_topic": self.topic}, **config}

    @property
    def settings(self) -> Settings:
        return Settings.model_validate(self.config)

    def message(self, offset: int, value: bytes | None = b"v", **fields: Any) -> SourceMessage:
        return SourceMessage(self.topic, fields.pop("partition", 0), offset, fields.pop("key", None), value, **fields)

    def write(self, *letters: Letter | bytes | None) -> list[Letter]:
        values = [each if each is None or isinstance(each, bytes) else encode_letter(each) for each in letters]
        produce(self.broker.bootstrap, self.dlq, values)
        return [each for each in letters if isinstance(each, Letter)]

    def letters(self, count: int, start: int = 0, **fields: Any) -> list[Letter]:
        made = [
            Letter(
                kind=fields.get("kind", LetterKind.TASK),
                error="exit code 1",
                sources=describe_sources([self.message(offset, b"%d" % offset)]),
            )
            for offset in range(start, start + count)
        ]
        return self.write(*made)

    def redrive(self, stopped: Callable[[], bool] = lambda: False, **order: Any) -> RedriveTally:
        return Redrive(self.settings, RedriveOrder(**order), stopped).run()

    def sent(self, count: int, topic: str = "") -> list[ck.Message]:
        return consume(self.broker.bootstrap, topic or self.topic, count)

    def values(self, count: int, topic: str = "") -> Counter[bytes]:
        return Counter(each.value() or b"" for each in self.sent(count, topic))


@pytest.fixture
def place(embedded_kafka: EmbeddedBroker) -> Place:
    return Place(embedded_kafka)


def headers_of(message: ck.Message) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in message.headers() or []]


def test_key_value_and_headers_come_back_byte_for_byte_in_their_partition(place: Place) -> None:
    raw = bytes(range(256))
    messages = [
        place.message(1, b'{"n": 1}', key=b"k", headers=(("trace", b"abc"), ("trace", raw), ("none", None), ("", b""))),
        place.message(2, raw, key=raw, partition=1),
        place.message(3, b"", key=b""),
        place.message(4, None, key="ключ".encode()),
        place.message(5, "naïve\u0000\n".encode()),
    ]
    letters = place.write(
        *(Letter(kind=LetterKind.TASK, error="e", attempt_count=4, sources=describe_sources([m])) for m in messages)
    )

    assert place.redrive().sent == 5

    found = place.sent(5)
    by_offset = {json.loads(headers_of(each)[-1][1])[0]["offset"]: each for each in found}
    for message, letter in zip(messages, letters, strict=True):
        again = by_offset[message.offset]
        assert (again.key(), again.value(), again.partition()) == (message.key, message.value, message.partition)
        *own, redrives, history = headers_of(again)
        assert own == list(message.headers)
        assert redrives == ("tidemill-redrives", b"1")
        (entry,) = json.loads(history[1])
        assert entry["letter_id"] == letter.letter_id
        assert (entry["kind"], entry["error"], entry["attempt_count"]) == ("task", "e", 4)
        assert (entry["topic"], entry["partition"]) == (place.topic, message.partition)


def test_each_message_of_a_letter_with_several_goes_once(place: Place) -> None:
    messages = [place.message(offset, b"%d" % offset) for offset in (1, 2, 3, 2)]
    place.write(Letter(kind=LetterKind.TASK, error="e", sources=describe_sources(messages)))
    tally = place.redrive()
    assert (tally.sent, tally.messages) == (1, 3)
    assert place.values(3) == Counter([b"1", b"2", b"3"])


def test_the_same_command_continues_and_restart_starts_over(place: Place) -> None:
    place.letters(10)
    assert place.redrive(limit=4).sent == 4
    assert place.values(4) == Counter([b"0", b"1", b"2", b"3"])
    again = Redrive(place.settings, RedriveOrder())
    assert (again.run().sent, again.resumed, again.left) == (6, True, 0)
    assert place.redrive().sent == 0
    place.letters(2, start=10)
    assert place.redrive().sent == 2
    assert set(place.values(12).values()) == {1}
    assert place.redrive(restart=True).sent == 12


def test_other_filters_are_another_redrive_with_its_own_cursor(place: Place) -> None:
    place.letters(2)
    place.letters(3, start=2, kind=LetterKind.PARSE)
    assert place.redrive(criteria=LetterCriteria(kinds=("parse",))).sent == 3
    assert place.redrive(criteria=LetterCriteria(kinds=("task",))).sent == 2
    assert set(place.values(5).values()) == {1}


def test_a_stop_leaves_the_rest_for_the_next_run(place: Place) -> None:
    place.letters(30)
    asked = iter(range(1_000))
    first = place.redrive(lambda: next(asked) > 5)
    assert 0 < first.sent < 30
    assert first.sent + place.redrive().sent == 30
    assert set(place.values(30).values()) == {1}


def test_the_rate_is_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.letters(11)
    began = time.monotonic()
    assert place.redrive(rate=20.0).sent == 11
    assert time.monotonic() - began >= 0.5


def test_a_dry_run_sends_and_saves_nothing(place: Place) -> None:
    place.letters(3)
    shown: list[RedriveItem] = []
    tally = Redrive(place.settings, RedriveOrder(dry_run=True, limit=2), shown=shown.append).run()
    assert (tally.sent, [item.where for item in shown]) == (2, [f"{place.topic}/0"] * 2)
    assert place.redrive().sent == 3
    assert set(place.values(3).values()) == {1}


def test_what_is_not_a_letter_is_counted_and_passed_over(place: Place) -> None:
    place.write(
        b"garbage", None, b"{}", b'{"kind":"task","error":"e","timestamp":"yesterday"}', b"\xff", b'{"kind":"new"}'
    )
    place.letters(1)
    tally = place.redrive()
    assert (tally.sent, tally.why, tally.unsent) == (1, {UnsentReason.NO_LETTER: 6}, 0)


def test_letters_of_aborted_transactions_are_never_seen(place: Place) -> None:
    producer = ck.Producer({**FAST_CLIENT, "bootstrap.servers": place.broker.bootstrap, "transactional.id": place.dlq})
    producer.init_transactions(10)
    for value, end in ((b"0", producer.abort_transaction), (b"1", producer.commit_transaction)):
        letter = Letter(kind=LetterKind.TASK, error="e", sources=describe_sources([place.message(0, value)]))
        producer.begin_transaction()
        producer.produce(place.dlq, encode_letter(letter))
        producer.flush(10)
        end(10)
    assert place.redrive().sent == 1
    assert place.values(1) == Counter([b"1"])
    assert Redrive(place.settings, RedriveOrder()).run().sent == 0


def test_a_letter_that_was_written_twice_goes_once(place: Place) -> None:
    (letter,) = place.letters(1)
    place.write(letter, letter)
    tally = place.redrive()
    assert (tally.sent, tally.why) == (1, {UnsentReason.TWICE: 2})


def test_letters_of_several_partitions_go_once_each(embedded_kafka: EmbeddedBroker) -> None:
    place = Place(embedded_kafka, dlq_partitions=3)
    for number in range(3):
        values = [
            encode_letter(
                Letter(kind=LetterKind.TASK, error="e", sources=describe_sources([place.message(n, b"%d" % n)]))
            )
            for n in range(number * 10, number * 10 + 10)
        ]
        produce(embedded_kafka.bootstrap, place.dlq, values, partition=number)
    assert place.redrive(limit=13).sent == 13
    assert place.redrive().sent == 17
    assert set(place.values(30).values()) == {1}


# -- headers that cannot be read --------------------------------------------------------------------------------


def write_letter_with_bad_headers(place: Place, limit: int | None) -> Letter:
    body = b"v" * 5_000
    send_with_headers(place.broker.bootstrap, place.topic, body, [(b"trace", b"1"), (b"caf\xe9", b"2")])
    (sent,) = place.sent(1)
    source = place.message(0, body, timestamp=sent.timestamp()[1], headers_error="the name of a header is not UTF-8")
    letter = Letter(kind=LetterKind.PARSE, error="e", sources=describe_sources([source]))
    place.write(encode_letter(letter, limit))
    return letter


@pytest.mark.parametrize("limit", [None, 1_000, 500], ids=["whole", "bodies dropped", "nothing but the position left"])
def test_a_message_is_sent_without_unreadable_headers_only_on_request(
    embedded_kafka: EmbeddedBroker, limit: int | None
) -> None:
    place = Place(embedded_kafka, partitions=1)
    letter = write_letter_with_bad_headers(place, limit)
    tally = place.redrive()
    assert (tally.sent, tally.unsent) == (0, 1)
    ((letter_id, why, text),) = tally.failed
    assert (letter_id, why) == (letter.letter_id, UnsentReason.HEADERS)
    assert "--drop-headers" in text

    order = {"drop_headers": True, "restart": True}
    assert place.redrive(**order, criteria=LetterCriteria(ids=(letter.letter_id,))).sent == 1

    _, again = place.sent(2)
    assert (again.value(), [name for name, _ in headers_of(again)]) == (
        b"v" * 5_000,
        ["tidemill-redrives", "tidemill-history"],
    )


# -- what was too large for its letter ------------------------------------------------------------------------


def oversize(place: Place, limit: int, body: bytes = b"v" * 50_000) -> tuple[Letter, ck.Message]:
    """Produce a message and write a letter about it that is too large to carry it."""
    producer = ck.Producer({**FAST_CLIENT, "bootstrap.servers": place.broker.bootstrap})
    producer.produce(place.topic, body, b"key", partition=0, headers=[("h", b"\xff" * 300)])
    producer.flush(10)
    (message,) = place.sent(1)
    source = place.message(
        message.offset() or 0, message.value(), key=message.key(), headers=tuple(headers_of(message)),
        timestamp=message.timestamp()[1],
    )  # fmt: skip
    letter = Letter(kind=LetterKind.OVERSIZE, error="too large", sources=describe_sources([source]))
    place.write(encode_letter(letter, limit))
    return letter, message


@pytest.mark.parametrize("limit", [2_000, 500], ids=["bodies dropped", "nothing but the position left"])
def test_an_oversize_body_is_read_again_from_its_topic(embedded_kafka: EmbeddedBroker, limit: int) -> None:
    place = Place(embedded_kafka, partitions=1)
    _, _message = oversize(place, limit)
    tally = place.redrive()
    assert (tally.sent, tally.failed) == (1, [])
    first, again = place.sent(2)
    assert (again.key(), again.value()) == (first.key(), first.value()) == (b"key", b"v" * 50_000)
    assert headers_of(again)[:-2] == headers_of(first)


def test_an_oversize_body_that_is_gone_is_named(embedded_kafka: EmbeddedBroker) -> None:
    place = Place(embedded_kafka, partitions=1)
    letter, message = oversize(place, 2_000)
    admin = ck.admin.AdminClient({**FAST_CLIENT, "bootstrap.servers": embedded_kafka.bootstrap})
    end = ck.TopicPartition(place.topic, 0, (message.offset() or 0) + 1)
    for future in admin.delete_records([end]).values():
        future.result(30)
    tally = place.redrive()
    assert (tally.sent, tally.unsent) == (0, 1)
    assert tally.failed == [
        (
            letter.letter_id,
            UnsentReason.LOST,
            f"{place.topic}/0/{message.offset()} is no longer in its topic, and was too large for the letter",
        )
    ]


@pytest.mark.parametrize("change", ["value", "key", "headers", "timestamp"])
def test_another_message_at_the_same_place_is_noticed(change: str) -> None:
    def digest(data: bytes) -> Any:
        return msgspec.convert({"length": len(data), "sha256": hashlib.sha256(data).hexdigest()}, restore.Blob)

    source = LetterSource("t", 0, 7, "k", [("h", "x")], 5, digest(b"body"))
    good = SourceMessage("t", 0, 7, b"k", b"body", (("h", b"x"),), 5)
    assert restore.restore_message(source, lambda *place: good) == good
    other: dict[str, Any] = {"value": b"bodY", "key": None, "headers": (("g", b"x"),), "timestamp": 6}
    wrong = msgspec.structs.replace(good, **{change: other[change]})
    with pytest.raises(restore.ContentLostError, match="t/0/7 is a different message now"):
        restore.restore_message(source, lambda *place: wrong)


# -- loops ----------------------------------------------------------------------------------------------------


class AlwaysFailing(Handler[Any, Any]):
    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return [ExecutorTask(f"t-{m.offset}", binary_path="false", source_offsets=[m.offset]) for m in messages]

    async def on_error(self, task: Any, error: Any) -> ErrorAction:
        return ErrorAction.DLQ


def test_a_message_that_always_fails_is_not_sent_forever(embedded_kafka: EmbeddedBroker) -> None:
    place = Place(embedded_kafka, partitions=1, dlq={"max_redrives": 2})
    produce(embedded_kafka.bootstrap, place.topic, [b"poison"])
    rounds = []
    for _ in range(4):
        message = place.sent(len(rounds) + 1)[len(rounds)]
        source = place.message(message.offset() or 0, message.value(), headers=tuple(headers_of(message)))
        (letter,) = run_handler(AlwaysFailing(), [source]).dead_letters
        assert letter.redrives == len(rounds) == count_redrives(source.headers)
        place.write(letter)
        tally = place.redrive()
        if not tally.sent:
            break
        rounds.append(tally)
    assert len(rounds) == 2
    advice = "already sent again 2 times, and the limit is 2; use --max-redrives 3 to send it once more"
    assert tally.failed == [(letter.letter_id, UnsentReason.MAX_REDRIVES, advice)]
    *_, last = place.sent(3)
    headers = headers_of(last)
    assert [name for name, _ in headers] == ["tidemill-redrives", "tidemill-history"]
    assert [entry["offset"] for entry in json.loads(headers[1][1])] == [0, 1]
    assert place.redrive(criteria=LetterCriteria(ids=(letter.letter_id,)), max_redrives=3).sent == 1


class Delivering(Handler[Any, Any]):
    async def arrange(self, messages: Any, pending: Any) -> list[Any]:
        return []

    async def on_message_complete(self, group: Any) -> Any:
        from tidemill import CollectResult

        return CollectResult(kafka=[KafkaPayload(data=object())])

    async def on_delivery_error(self, error: Any) -> DeliveryAction:
        return DeliveryAction.DLQ


def test_letters_about_deliveries_count_redrives_too(place: Place) -> None:
    sources = [place.message(0, headers=(("tidemill-redrives", b"2"),)), place.message(1)]
    letters = run_handler(Delivering(), sources).dead_letters
    assert sorted((letter.kind, letter.redrives) for letter in letters) == [("delivery", 0), ("delivery", 2)]


@pytest.mark.parametrize("value", [None, b"", b"many", b"-1", b"9" * 30, b"\xff"])
def test_a_header_that_is_not_a_number_counts_for_nothing(value: bytes | None) -> None:
    assert count_redrives([("tidemill-redrives", value)]) == 0


def test_a_message_may_not_go_to_the_dead_letter_topic_itself(place: Place) -> None:
    place.letters(1)
    with pytest.raises(ConfigError, match="would go to the dead-letter topic"):
        place.redrive(target=Target.TOPIC, topic=place.dlq)


# -- other topics, other brokers ------------------------------------------------------------------------------


def test_messages_go_to_another_topic(place: Place) -> None:
    place.letters(3)
    topic = place.broker.create_topic(unique_name("other"), partitions=3)
    assert place.redrive(target=Target.TOPIC, topic=topic).sent == 3
    assert place.values(3, topic) == Counter([b"0", b"1", b"2"])


def test_a_topic_that_is_not_there_ends_the_redrive_before_anything_is_sent(place: Place) -> None:
    place.letters(3)
    with pytest.raises(ConfigError, match=r"topic 'nowhere' does not exist at .*; create it"):
        place.redrive(target=Target.TOPIC, topic="nowhere")


def test_a_message_that_its_topic_refuses_is_named_and_the_others_go(embedded_kafka: EmbeddedBroker) -> None:
    place = Place(embedded_kafka, partitions=1)
    topic = embedded_kafka.create_topic(unique_name("small"), config={"max.message.bytes": "5000"})
    messages = [place.message(n, b"%d" % n if n % 7 else os.urandom(20_000)) for n in range(1, 21)]
    letters = place.write(
        *(Letter(kind=LetterKind.TASK, error="e", sources=describe_sources([each])) for each in messages)
    )
    for order in ({}, {"restart": True}):
        if order:
            other = place.broker.bootstrap.replace("127.0.0.1", "localhost")
            place.config["dlq"] = {"brokers": other}
        tally = place.redrive(target=Target.TOPIC, topic=topic, **order)
        assert (tally.sent, tally.messages) == (18, 18)
        refused = [letters[n - 1].letter_id for n in (7, 14)]
        assert [letter_id for letter_id, _, _ in tally.failed] == refused
        assert all("MSG_SIZE_TOO_LARGE" in text for _, _, text in tally.failed)
    assert set(place.values(36, topic).values()) == {2}


def test_a_message_just_below_the_limit_goes_without_its_history(embedded_kafka: EmbeddedBroker) -> None:
    place = Place(embedded_kafka, partitions=1)
    topic = embedded_kafka.create_topic(unique_name("tight"), config={"max.message.bytes": "5000"})
    body = os.urandom(4_800)
    letter = Letter(kind=LetterKind.TASK, error="e" * 300, sources=describe_sources([place.message(0, body)]))
    place.write(letter)
    assert place.redrive(target=Target.TOPIC, topic=topic).sent == 1
    (found,) = place.sent(1, topic)
    assert (found.value(), headers_of(found)) == (body, [("tidemill-redrives", b"1")])


def test_letters_on_other_brokers_are_sent_before_the_cursor_is_saved(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other brokers as far as their names tell.
    place.config["dlq"] = {"brokers": place.broker.bootstrap.replace("127.0.0.1", "localhost")}
    monkeypatch.setattr(redrive_module, "BATCH_LETTERS", 10)
    place.letters(25)
    commit = redrive_cursor.KafkaCursor.commit
    commits: list[int] = []

    def crashing(self: Any, records: Any, positions: Any) -> Any:
        commits.append(len(records))
        if len(commits) == 2:
            raise KeyboardInterrupt
        return commit(self, records, positions)

    monkeypatch.setattr(redrive_cursor.KafkaCursor, "commit", crashing)
    with pytest.raises(KeyboardInterrupt):
        place.redrive()
    assert place.redrive().sent == 15
    counts = place.values(35)
    assert set(counts) == {b"%d" % n for n in range(25)}
    assert [value for value, count in counts.items() if count > 1] == [b"%d" % n for n in range(10, 20)]
    assert set(commits) == {0}


def test_a_crash_before_the_end_of_a_transaction_leaves_no_trace(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrive_module, "BATCH_LETTERS", 10)
    place.letters(25)
    save = redrive_cursor.KafkaCursor._save
    saves: list[Any] = []

    def crashing(self: Any, positions: Any) -> None:
        saves.append(positions)
        if len(saves) == 2:
            raise KeyboardInterrupt
        save(self, positions)

    monkeypatch.setattr(redrive_cursor.KafkaCursor, "_save", crashing)
    with pytest.raises(KeyboardInterrupt):
        place.redrive()
    assert place.redrive().sent == 15
    assert place.values(25) == Counter(b"%d" % n for n in range(25))


def test_a_cursor_that_cannot_even_be_handed_over_ends_the_redrive_and_nothing_is_sent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.letters(5)
    with monkeypatch.context() as patched:
        patched.setattr(reader.LetterReader, "get_group_metadata", lambda self: None)
        with pytest.raises(TypeError):
            place.redrive()
    assert place.redrive().sent == 5
    assert place.values(5) == Counter(b"%d" % n for n in range(5))


def test_a_second_process_of_the_same_redrive_ends_the_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrive_module, "BATCH_LETTERS", 5)
    place.letters(20)
    inner: list[RedriveTally] = []

    def watch(redrive: Redrive) -> None:
        if redrive.tally.sent >= 5 and not inner:
            inner.append(place.redrive())

    with pytest.raises(FencedError, match="another process has started the same redrive"):
        Redrive(place.settings, RedriveOrder(), watch=watch).run()
    assert set(place.values(20).values()) == {1}


def test_a_cursor_beyond_the_end_needs_a_restart(place: Place) -> None:
    place.letters(1)
    name = Redrive(place.settings, RedriveOrder()).name
    consumer = ck.Consumer({**FAST_CLIENT, "bootstrap.servers": place.broker.bootstrap, "group.id": name})
    consumer.commit(offsets=[ck.TopicPartition(place.dlq, 0, 100)], asynchronous=False)
    consumer.close()
    with pytest.raises(ConfigError, match="use --restart to start over"):
        place.redrive()
    assert place.redrive(restart=True).sent == 1
    assert place.redrive().sent == 0


# -- sinks ----------------------------------------------------------------------------------------------------


def refused(place: Place, kind: str, name: str, *payloads: Any) -> Letter:
    (letter,) = place.write(
        Letter(
            kind=LetterKind.DELIVERY,
            error="refused",
            sink_type=kind,
            sink_name=name,
            original_payloads=[encode_payload(payload) for payload in payloads],
            sources=describe_sources([place.message(0)]),
        )
    )
    return letter


def test_payloads_go_to_their_sinks_again(place: Place, tmp_path: Path) -> None:
    out = place.broker.create_topic(unique_name("out"))
    place.config["sinks"] = {
        "kafka": {"out": {"topic": out}, "other": {"topic": place.topic}},
        "filesystem": {"files": {"base_path": str(tmp_path)}},
    }
    refused(place, "kafka", "out", KafkaPayload("", b"\xff", {"n": 1}), KafkaPayload("out", "k", b"\x00\xff"))
    refused(place, "filesystem", "files", FilePayload(path="a.jsonl", data={"n": 2}))
    refused(place, "kafka", "out", KafkaPayload("", "k", None))
    place.letters(1)

    tally = place.redrive(target=Target.SINK)

    assert (tally.sent, tally.messages, tally.why) == (3, 4, {UnsentReason.NO_PAYLOADS: 1})
    found = [(each.key(), each.value()) for each in place.sent(3, out)]
    assert found == [(b"\xff", b'{"n":1}'), (b"k", b"\x00\xff"), (b"k", None)]
    assert (tmp_path / "a.jsonl").read_text() == '{"n":2}\n'
    assert place.redrive(target=Target.SINK).sent == 0


def test_a_record_goes_to_its_sink_again_with_headers_partition_and_timestamp(place: Place) -> None:
    out = place.broker.create_topic(unique_name("out"), partitions=3)
    place.config["sinks"] = {"kafka": {"out": {"topic": out}}}
    at = datetime.datetime(2024, 5, 1, 12, 30, tzinfo=datetime.UTC)
    headers = {"raw": b"\xff\x00", "text": "x", "null": None}
    refused(place, "kafka", "out", KafkaPayload("", "k", 1, headers, 2, at), KafkaPayload("", None, 2, partition=1))
    assert place.redrive(target=Target.SINK).messages == 2
    first, second = sorted(place.sent(2, out), key=lambda each: each.value())
    assert (first.partition(), first.timestamp()[1]) == (2, int(at.timestamp() * 1000))
    assert first.headers() == [("raw", b"\xff\x00"), ("text", b"x"), ("null", None)]
    assert (second.partition(), second.headers()) == (1, None)


def test_a_letter_for_a_sink_that_is_not_configured_or_without_its_payload_is_named(place: Place) -> None:
    place.config["sinks"] = {"kafka": {"out": {"topic": place.topic}}}
    gone = refused(place, "redis", "cache", KafkaPayload("", "k", 1))
    shown = refused(place, "kafka", "out", KafkaPayload("", "k", object()))
    strange = refused(place, "kafka", "out", FilePayload(path="p", data=1))
    tally = place.redrive(target=Target.SINK)
    assert tally.failed == [
        (gone.letter_id, UnsentReason.NOT_CONFIGURED, "sinks.redis.cache is not configured"),
        (
            shown.letter_id,
            UnsentReason.LOST,
            "a payload for sinks.kafka.out: its data has no JSON form; the letter only shows it",
        ),
        (strange.letter_id, UnsentReason.LOST, tally.failed[2][2]),
    ]
    assert "not a KafkaPayload" in tally.failed[2][2]


def test_a_payload_that_is_refused_again_is_named_and_the_others_arrive(place: Place) -> None:
    out = place.broker.create_topic(unique_name("out"), config={"max.message.bytes": "5000"})
    place.config["sinks"] = {"kafka": {"out": {"topic": out}}}
    refused(place, "kafka", "out", KafkaPayload("", "a", b"1"))
    bad = refused(place, "kafka", "out", KafkaPayload("", "b", os.urandom(9_000)), KafkaPayload("", "b", b"2"))
    refused(place, "kafka", "out", KafkaPayload("", "b", b"3"))
    tally = place.redrive(target=Target.SINK)
    assert tally.sent == 2
    assert [(letter_id, why) for letter_id, why, _ in tally.failed] == [(bad.letter_id, UnsentReason.REFUSED)]
    assert place.values(3, out) == Counter([b"1", b"2", b"3"])


def test_a_name_of_a_sink_is_known_by_the_configuration_or_by_a_letter(place: Place) -> None:
    place.config["sinks"] = {"kafka": {"out": {"topic": place.topic}}}
    refused(place, "redis", "gone", KafkaPayload("", "k", 1))
    for name in ("out", "kafka.out", "gone"):
        place.redrive(target=Target.SINK, criteria=LetterCriteria(sinks=(name,)))
    with pytest.raises(ConfigError, match="--sink other: no configured sink and no letter has this name"):
        place.redrive(target=Target.SINK, criteria=LetterCriteria(sinks=("gone", "other")))


def test_a_request_goes_to_its_sink_again_with_all_that_it_said(place: Place) -> None:
    double = HttpDouble()
    try:
        place.config["sinks"] = {"http": {"api": {"url": f"http://127.0.0.1:{double.port}/v1"}}}
        payload = HttpPayload(
            data={"at": datetime.date(2026, 5, 1), "n": [1, 2]},
            idempotency_key="mine",
            method="PUT",
            path="orders/a b",
            query={"dry": True, "n": [1, 2.5]},
            headers={"X-Trace": "4bf9"},
        )
        form = HttpPayload(data={"a": "x y"}, body="form")
        refused(place, "http", "api", payload, form)
        assert place.redrive(target=Target.SINK).messages == 2
        first, second = double.requests
        assert (first.method, first.path) == ("PUT", "/v1/orders/a%20b?dry=true&n=1&n=2.5")
        assert (first.headers["x-trace"], first.headers["idempotency-key"]) == ("4bf9", "mine")
        assert first.body == b'{"at":"2026-05-01","n":[1,2]}'
        assert (second.headers["content-type"], second.body) == ("application/x-www-form-urlencoded", b"a=x+y")
    finally:
        double.close()


def test_a_request_that_is_delivered_from_its_letter_has_its_first_key(place: Place) -> None:
    double = HttpDouble(lambda request: (422, {}, b"no"))
    try:
        place.config["sinks"] = {"http": {"api": {"url": f"http://127.0.0.1:{double.port}/"}}}
        settings = place.settings
        letters = ScriptedDeadLetters()

        async def deliver_first() -> None:
            outbox = Outbox(build_sinks(settings), letters, group=settings.kafka.consumer_group)
            await outbox.connect()
            origin = Origin([place.message(7)], ExecutorTask("t-7"), hook="on_task_complete")
            payloads = [HttpPayload(data={"n": 1}), HttpPayload(data={"n": 1})]
            outbox.submit(outbox.route(CollectResult(http=payloads)), origin, lambda: None)
            await outbox.flush(10.0)
            await outbox.close()

        asyncio.run(deliver_first())
        first = [request.headers["idempotency-key"] for request in double.requests]
        assert len(set(first)) == 2
        place.write(*letters.letters)
        double.judge = lambda request: (204, {}, b"")
        double.requests.clear()
        assert place.redrive(target=Target.SINK).messages == 2
        assert [request.headers["idempotency-key"] for request in double.requests] == first
    finally:
        double.close()


def test_a_sink_that_says_how_long_an_answer_may_take_is_given_that_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(sink: Any, batch: Any) -> Any:
        sent.append(len(batch))
        await asyncio.sleep(0.3)
        return [None] * len(batch)

    sent: list[int] = []
    monkeypatch.setattr(redrive_sinks, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(redrive_sinks, "GIVE_UP_SECONDS", 0.0)
    monkeypatch.setattr(KafkaSink, "connect", lambda sink: asyncio.sleep(0))
    monkeypatch.setattr(KafkaSink, "send", slow)
    place.config["sinks"] = {"kafka": {"out": {"topic": place.topic}}}
    place.config["delivery"] = {"timeout_seconds": 0.05}
    refused(place, "kafka", "out", KafkaPayload("", "a", b"1"))
    with pytest.raises(RemoteError, match=r"no answer within 0.05 s"):
        place.redrive(target=Target.SINK)
    monkeypatch.setattr(KafkaSink, "send_timeout_seconds", 10.0)
    assert place.redrive(target=Target.SINK).sent == 1
    assert sent == [1, 1]


class Flaky:
    """What a sink answers: fails as a whole at first, then refuses a key for a while."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    async def connect(self, sink: Any) -> None:
        pass

    async def send(self, sink: Any, batch: list[Encoded]) -> list[Refusal | None]:
        self.batches.append([each.body for each in batch])
        if len(self.batches) == 1:
            raise RemoteError("connection reset")
        busy = len(self.batches) < 4
        return [Refusal("busy", retryable=True) if busy and each.key == b"a" else None for each in batch]


def test_what_a_sink_may_accept_later_is_retried_in_the_order_of_its_key(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky = Flaky()
    monkeypatch.setattr(KafkaSink, "connect", lambda sink: flaky.connect(sink))
    monkeypatch.setattr(KafkaSink, "send", lambda sink, batch: flaky.send(sink, batch))
    place.config["sinks"] = {"kafka": {"out": {"topic": place.topic}}}
    for n, key in enumerate(["a", "b", "a"]):
        refused(place, "kafka", "out", KafkaPayload("", key, b"%d" % n))
    assert place.redrive(target=Target.SINK).sent == 3
    a0, b1, a2 = (b"a", b"0"), (b"b", b"1"), (b"a", b"2")
    assert flaky.batches == [[a0, b1, a2], [a0, b1], [a0], [a0], [a2]]


def test_a_sink_that_accepts_nothing_ends_the_redrive_which_continues_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(sink: Any, batch: Any) -> Any:
        raise RemoteError("connection refused")

    out = place.broker.create_topic(unique_name("out"))
    place.config["sinks"] = {"kafka": {"out": {"topic": out}}}
    refused(place, "kafka", "out", KafkaPayload("", "a", b"1"))
    with monkeypatch.context() as patched:
        patched.setattr(redrive_sinks, "GIVE_UP_SECONDS", 0.2)
        patched.setattr(KafkaSink, "send", down)
        with pytest.raises(
            RemoteError, match=r"sinks.kafka.out is not accepting payloads: connection refused; run the same command"
        ):
            place.redrive(target=Target.SINK)
    assert place.redrive(target=Target.SINK).sent == 1
    assert place.values(1, out) == Counter([b"1"])


# -- brokers --------------------------------------------------------------------------------------------------


def test_a_missing_topic_says_what_may_be_wrong(embedded_kafka: EmbeddedBroker) -> None:
    settings = Settings.model_validate(
        {"kafka": {"brokers": embedded_kafka.bootstrap, "source_topic": unique_name("never")}}
    )
    with pytest.raises(ConfigError, match=r"no pipeline has created it yet, or dlq.topic"):
        Redrive(settings, RedriveOrder()).run()


def test_brokers_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.runtime.kafka.client.CALL_SECONDS", 1.0)
    port = free_port()
    settings = Settings.model_validate({"kafka": {"brokers": f"127.0.0.1:{port}"}})
    with pytest.raises(RemoteError, match=f"no answer from Kafka at 127.0.0.1:{port}"):
        Redrive(settings, RedriveOrder()).run()


@pytest.mark.long
def test_a_broker_that_goes_away_ends_nothing_that_comes_back(
    own_kafka: Callable[..., EmbeddedBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive_cursor, "HANG_SECONDS", 3.0)
    place = Place(own_kafka(), partitions=1)
    place.letters(40)
    restarted: list[Iterable[Any]] = []

    def watch(redrive: Redrive) -> None:
        if redrive.tally.sent >= 5 and not restarted:
            restarted.append(())
            # Kafka 4.3 may lose a commit that is not complete when the only replica stops (ADR 4).
            place.sent(redrive.tally.sent)
            place.broker.stop()
            place.broker.start()

    tally = Redrive(place.settings, RedriveOrder(rate=40.0), watch=watch).run()
    assert (tally.sent, restarted) == (40, [()])
    assert place.values(40) == Counter(b"%d" % n for n in range(40))


def test_letters_can_be_decoded_from_what_is_written(place: Place) -> None:
    (letter,) = place.letters(1)
    (found,) = place.sent(1, place.dlq)
    assert decode_letter(found.value() or b"") == letter
