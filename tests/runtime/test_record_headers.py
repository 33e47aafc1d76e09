"""The headers of a record are read once, whatever they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
from tests.foreign_client import send_with_headers

import tidemill
from tidemill.runtime.kafka.record_headers import UnreadableHeadersError, check_headers, read_headers
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.testing.kafka import unique_name

GOOD, BAD = (b"trace", b"1"), (b"caf\xe9", b"2")


class Record:
    """Like a record of the client: asked a second time after a failure, it ends the process."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked = 0

    def headers(self) -> Any:
        self.asked += 1
        raise self.error


@pytest.mark.parametrize(
    "error", [SystemError("returned a result with an exception set"), ValueError("no"), MemoryError()]
)
def test_a_record_whose_headers_cannot_be_read_is_asked_once(error: Exception) -> None:
    record = Record(error)
    headers, why = read_headers(record)
    assert (headers, record.asked) == ((), 1)
    assert type(error).__name__ in (why or "")


def test_nothing_else_asks_a_record_for_its_headers() -> None:
    folder = Path(tidemill.__file__).parent
    asking = [
        path.name
        for path in folder.rglob("*.py")
        if re.search(r"\.headers\(\)|methodcaller\(.headers", path.read_text().replace("`headers()`", ""))
    ]
    assert asking == ["record_headers.py"]


def test_a_long_name_is_shown_in_part() -> None:
    error = SystemError()
    error.__cause__ = UnicodeDecodeError("utf-8", b"\xe9" * 10_000, 0, 1, "invalid start byte")
    _, why = read_headers(Record(error))
    assert why is not None
    assert why.startswith("the name of a header is not UTF-8: b'\\xe9")
    assert why.endswith("'...")
    assert len(why) < 500


def test_a_message_is_refused_only_if_its_headers_could_not_be_read() -> None:
    check_headers(SourceMessage("t", 0, 1))
    with pytest.raises(UnreadableHeadersError, match="is not UTF-8"):
        check_headers(SourceMessage("t", 0, 1, headers_error="the name of a header is not UTF-8: b'\\xe9'"))


@pytest.mark.kafka
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], ((), None)),
        ([GOOD], ((("trace", b"1"),), None)),
        ([BAD], ((), "the name of a header is not UTF-8: b'caf\\xe9'")),
        ([GOOD, BAD], ((), "the name of a header is not UTF-8: b'caf\\xe9'")),
        ([GOOD, BAD, GOOD], ((), "the name of a header is not UTF-8: b'caf\\xe9'")),
        ([BAD, GOOD, BAD], ((), "the name of a header is not UTF-8: b'caf\\xe9'")),
        ([(b"\xed\xa0\x80", b"surrogate")], ((), "the name of a header is not UTF-8: b'\\xed\\xa0\\x80'")),
    ],
)
def test_what_a_program_in_another_language_sent_is_read(embedded_kafka: Any, headers: Any, expected: Any) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    for each in ([], headers):
        send_with_headers(embedded_kafka.bootstrap, topic, b"v", each)
    consumer = ck.Consumer({"bootstrap.servers": embedded_kafka.bootstrap, "group.id": topic})
    try:
        consumer.assign([ck.TopicPartition(topic, 0, 0)])
        plain, record = consumer.consume(2, 20)
        assert (record.error(), record.value()) == (None, b"v")
        for _ in range(100):  # a line that ran often is specialized by the interpreter
            read_headers(plain)
        assert read_headers(record) == expected
    finally:
        consumer.close()
