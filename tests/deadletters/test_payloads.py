"""Payloads in letters: what goes in comes out again, or the error says what was lost."""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import math
import uuid
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.deadletters.payloads import PayloadLostError, drop_body, encode_payload, restore_fields
from tidemill.sinks.base import to_json
from tidemill.sinks.payloads import CustomPayload, FilePayload, KafkaPayload, PostgresPayload


class Row(pydantic.BaseModel):
    at: datetime.datetime
    amount: decimal.Decimal
    note: str | None = None
    raw: bytes = b"abc"
    inner: list[Row] = []


AT = datetime.datetime(2026, 5, 1, 12, 30, tzinfo=datetime.UTC)
TYPED: dict[str, Any] = {
    "at": AT,
    "day": AT.date(),
    "hour": AT.timetz(),
    "long": datetime.timedelta(days=1, seconds=2.5),
    "amount": decimal.Decimal("1.10"),
    "id": uuid.UUID(int=7),
    "raw": b"\xff\x00",
    "nan": math.inf,
    "in": [{"a/b~c": AT}, (1, AT)],
}

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.sampled_from(["text", "base64", "length", "sha256"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.none() | st.binary() | st.text(), JSON | st.binary())
def test_what_a_kafka_sink_gets_is_the_same_again(key: Any, data: Any) -> None:
    fields = restore_fields(encode_payload(KafkaPayload("out", key, data)), typed=False)
    again = KafkaPayload(**fields)
    assert (again.sink, again.key) == ("out", key)
    assert to_json(again.data) == to_json(data)


@pytest.mark.parametrize("data", [{"text": "x"}, {"base64": "eA=="}, {"length": 1, "sha256": "y"}])
def test_data_that_looks_like_bytes_of_a_letter_stays_data(data: dict[str, Any]) -> None:
    assert restore_fields(encode_payload(KafkaPayload("s", None, data)), typed=False)["data"] == data


def test_times_decimals_and_bytes_come_back_as_such_where_they_are_wanted() -> None:
    text = encode_payload(FilePayload("s", "p", TYPED))
    assert json.loads(text)["data"]["amount"] == "1.10", "people read JSON"
    again = restore_fields(text, typed=True)["data"]
    assert again == {**TYPED, "in": [{"a/b~c": AT}, [1, AT]]}
    as_json = restore_fields(text, typed=False)["data"]
    assert as_json["nan"] == math.inf, "null would be another value"
    assert to_json(as_json, "string") == to_json(TYPED, "string")


def test_a_value_that_is_typed_itself_comes_back() -> None:
    assert restore_fields(encode_payload(FilePayload("s", "p", AT)), typed=True)["data"] == AT


def test_a_model_comes_back_as_its_dump() -> None:
    row = Row(at=AT, amount=decimal.Decimal("2"), inner=[Row(at=AT, amount=decimal.Decimal("3"))])
    text = encode_payload(FilePayload("s", "p", row))
    assert restore_fields(text, typed=True)["data"] == row.model_dump()
    assert restore_fields(text, typed=False)["data"] == row.model_dump(mode="json")


class Column(str, enum.Enum):  # noqa: UP042 - its `str` is not its value
    AMOUNT = "amount"


@pytest.mark.parametrize("key", [Column.AMOUNT, AT, uuid.UUID(int=1), 7], ids=lambda key: type(key).__name__)
def test_what_is_under_a_key_that_is_no_text_comes_back(key: Any) -> None:
    text = encode_payload(PostgresPayload("s", "t", data={"doc": {key: decimal.Decimal("1.10"), "n": math.inf}}))
    again = restore_fields(text, typed=True)["data"]["doc"]
    assert list(again.values()) == [decimal.Decimal("1.10"), math.inf]


def test_a_model_that_is_one_number_keeps_what_it_writes_for_nan() -> None:
    class Rate(pydantic.RootModel[float]):
        model_config = pydantic.ConfigDict(ser_json_inf_nan="constants")

    again = restore_fields(encode_payload(KafkaPayload("s", None, Rate(math.nan))), typed=False)["data"]
    assert to_json(again) == to_json(Rate(math.nan)) == b"NaN"


def test_a_float_of_another_library_comes_back_as_a_float() -> None:
    class Float64(float):
        """Like NumPy's."""

    row = {"x": Float64(1.5), "y": Float64("inf")}
    again = restore_fields(encode_payload(PostgresPayload("s", "t", data=row)), typed=True)["data"]
    assert again == {"x": 1.5, "y": math.inf}


@pytest.mark.parametrize("data", [object(), {"x": object()}, "lone \udcff", [{1, object()}]])
def test_what_is_only_shown_is_never_sent(data: Any) -> None:
    with pytest.raises(PayloadLostError, match="data has no JSON form"):
        restore_fields(encode_payload(KafkaPayload("s", None, data)), typed=False)


@pytest.mark.parametrize("data", [b"\xff" * 1000, b"x" * 1000, {"n": ["x" * 1000], "at": AT}])
def test_what_was_dropped_for_its_size_is_lost(data: Any) -> None:
    small = drop_body(encode_payload(KafkaPayload("s", b"k", data)))
    assert len(small) < 300
    assert drop_body(small) == small
    with pytest.raises(PayloadLostError, match=r"its data of 10\d\d bytes was too large for the letter"):
        restore_fields(small, typed=True)


def test_types_of_small_fields_stay_when_a_large_one_goes() -> None:
    payload = msgspec.defstruct("Payload", ["data", "where"])(data="x" * 1000, where={"at": AT, "text": "t"})
    kept = json.loads(drop_body(encode_payload(payload)))
    assert kept["_types"] == {"where/at": "datetime"}
    assert set(kept) == {"data", "where", "_types"}


@pytest.mark.parametrize(
    "text",
    ["[1]", "no json", '{"data": 1, "_types": 3}', '{"data": {"x": 1}, "_types": {"data/x": "uuid"}}',
     '{"data": {}, "_types": {"data/x": "uuid"}}', '{"data": [1], "_types": {"data/7": "date"}}'],
)  # fmt: skip
def test_what_is_not_a_payload_says_so(text: str) -> None:
    with pytest.raises(PayloadLostError):
        restore_fields(text, typed=True)


@given(
    st.dictionaries(st.text(), st.none() | st.binary() | st.text(), max_size=3)
    | st.lists(st.tuples(st.text(), st.none() | st.binary() | st.text()), max_size=3),
    st.none() | st.integers(0, 2**31 - 1),
    st.none() | st.integers(1, 2**63 - 1) | st.datetimes(timezones=st.just(datetime.UTC)),
)
def test_headers_partition_and_timestamp_of_a_record_come_back_as_they_were(
    headers: Any, partition: int | None, timestamp: Any
) -> None:
    payload = KafkaPayload("out", "k", {"at": AT}, headers, partition, timestamp)
    again = KafkaPayload(**restore_fields(encode_payload(payload), typed=False))
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    found = list(again.headers.items()) if isinstance(again.headers, dict) else [tuple(pair) for pair in again.headers]
    assert (found, again.partition, again.timestamp) == (pairs, partition, timestamp)
    assert again.data == {"at": "2026-05-01T12:30:00Z"}, "JSON sinks get their data as JSON has them"


class OwnPayload(CustomPayload, frozen=True, omit_defaults=True):
    """As another package may have it."""

    extra: int = 7


def test_a_letter_about_a_payload_of_another_package_has_all_its_fields() -> None:
    payload = OwnPayload(type="s3", data=1)
    assert OwnPayload(**restore_fields(encode_payload(payload), typed=True)) == payload
    assert json.loads(encode_payload(payload))["extra"] == 7


def test_a_letter_leaves_out_what_was_left_at_its_default() -> None:
    assert json.loads(encode_payload(KafkaPayload("s", None, 1))) == {"sink": "s", "key": None, "data": 1}
    assert json.loads(encode_payload(KafkaPayload("s", None, 1, partition=0)))["partition"] == 0
    statement = json.loads(encode_payload(PostgresPayload(statement="count", data={"n": 1})))
    assert statement == {"sink": "", "data": {"n": 1}, "statement": "count"}
    change = PostgresPayload(table="t", op="delete", where={"at": AT, "id": uuid.UUID(int=7), "gone": None})
    assert PostgresPayload(**restore_fields(encode_payload(change), typed=True)) == change
