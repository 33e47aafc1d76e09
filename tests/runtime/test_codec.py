from __future__ import annotations

import json
import time
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidemill.runtime.json.codec import MAX_DEPTH, EncodingError, decode, encode, encode_sorted

text = st.text(st.characters(exclude_categories=("Cs",)))
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
    | st.just("$tidemill")
    | st.binary()
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.uuids()
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.datetimes()
    | st.datetimes(timezones=st.timezones())
    | st.datetimes(timezones=st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone))
)
hashables = st.recursive(
    scalars, lambda parts: st.tuples(parts, parts) | st.frozensets(parts, max_size=3), max_leaves=5
)
values = st.recursive(
    scalars,
    lambda parts: (
        st.lists(parts, max_size=4)
        | st.lists(parts, max_size=4).map(tuple)
        | st.sets(hashables, max_size=4)
        | st.dictionaries(text | st.just("$tidemill"), parts, max_size=4)
        | st.dictionaries(hashables, parts, max_size=4)
    ),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    """Compare values and their types, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, datetime):
        return left.replace(tzinfo=None) == right.replace(tzinfo=None) and left.utcoffset() == right.utcoffset()
    return bool(left == right)


@given(values)
def test_what_is_decoded_is_what_was_encoded(value: Any) -> None:
    assert same(decode(encode(value)), value)
    assert decode(encode_sorted(value)) == value
    json.loads(encode(value))


@given(st.dictionaries(text | st.just("$tidemill") | st.integers(), st.integers() | st.sets(st.integers())))
@example({"": 0, "$tidemill": 0})
@example({1: 0, 2: 0})
def test_sorted_text_does_not_depend_on_the_order_of_keys(value: dict[Any, Any]) -> None:
    backwards = dict(reversed(value.items()))
    assert encode_sorted(backwards) == encode_sorted(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        1.5,
        "ü",
        [1, [2]],
        {"a": {"b": [None]}, "nul": "\0"},
        {"value": 1, "tidemill": 2},
    ],
)
def test_plain_values_are_plain_json(value: Any) -> None:
    assert encode(value) == json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, float("nan")]}, r"result\['a'\]\[1\] is nan, which JSON cannot represent; use None or text"),
        (float("-inf"), "result is -inf, which JSON cannot represent"),
        ({"a": [10**5000]}, r"result\['a'\]\[0\] is a number of more than 4,300 digits; use bytes, or hex\(\)"),
        ([Decimal("NaN")], r"result\[0\] is NaN, which JSON cannot represent"),
        ({"a": {"b": object()}}, r"result\['a'\]\['b'\] is of type builtins.object, which cannot be encoded"),
        ({"a": "\ud800"}, r"result\['a'\] is not Unicode text: surrogates not allowed at 0"),
        ({"\ud800": 1}, "a key of result is not Unicode text"),
        ({(1, object()): 1}, r"a key of result\[1\] is of type builtins.object"),
        ({1: float("inf")}, r"result\[1\] is inf"),
        (date.today, "result is of type builtins.builtin_function_or_method"),
        (Enum("Color", "RED").RED, r"result is of type .*Color, which cannot be encoded"),
        ([datetime(2026, 1, 1, tzinfo=UTC).timetz()], r"result\[0\] is a time of day with a time zone"),
        ({"$tidemill": float("nan")}, r"result\['\$tidemill'\] is nan"),
    ],
)
def test_what_cannot_be_equal_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(EncodingError, match=f"^{message}"):
        encode(value, "result")


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(
        EncodingError, match="nested more than 200 levels deep; check whether a part contains itself"
    ) as refused:
        encode(endless)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("deepest", [[], (), {}])
def test_the_limit_of_nesting_is_the_same_for_plain_json_and_other_values(deepest: Any) -> None:
    value = deepest
    for _ in range(MAX_DEPTH):
        value = [value] if len(str(value)) % 2 else {"a": value}
    assert decode(encode(value)) == value
    with pytest.raises(EncodingError, match="nested more than 200 levels deep"):
        encode([value])


def test_many_values_and_brackets_in_texts_are_not_deep() -> None:
    for value in ([[{}] for _ in range(1000)], ["[" * 1000, "]{" * 1000], [["]" * 500]] * 500):
        assert decode(encode(value)) == value


class Level(IntEnum):
    LOW = 1


class Name(StrEnum):
    FIRST = "first"


@pytest.mark.parametrize(
    ("value", "plain"),
    [([Level.LOW], [1]), (Level.LOW, 1), ({"a": Name.FIRST}, {"a": "first"}), (bytearray(b"a"), b"a")],
)
def test_subclasses_are_decoded_as_what_they_equal(value: Any, plain: Any) -> None:
    assert decode(encode(value)) == plain == value


class AlwaysEqual(msgspec.Struct):
    number: int

    def __eq__(self, other: object) -> bool:
        return True


def test_a_struct_that_says_it_equals_everything_is_refused() -> None:
    with pytest.raises(EncodingError, match="AlwaysEqual"):
        encode(AlwaysEqual(1))


def test_two_times_of_one_clock_change_stay_two() -> None:
    vienna = ZoneInfo("Europe/Vienna")
    first = datetime(2026, 10, 25, 2, 30, tzinfo=vienna)
    second = first.replace(fold=1)
    read = decode(encode([first, second]))
    assert [moment.utcoffset() for moment in read] == [timedelta(hours=2), timedelta(hours=1)]


@pytest.mark.parametrize(
    "plain",
    [
        '{"$tidemill":"unknown","value":1}',
        '{"$tidemill":["tuple"],"value":1}',
        '{"$tidemill":"tuple","value":[1],"more":2}',
        '{"$tidemill":"tuple"}',
        '{"a": 1e3, "b": "\\u00fc"}',
    ],
)
def test_a_text_that_this_codec_did_not_write_is_decoded_as_json(plain: str) -> None:
    assert decode(plain) == json.loads(plain)
    assert decode(encode(json.loads(plain))) == json.loads(plain)


def test_marks_are_as_documented() -> None:
    value = (UUID(int=1), {2: timedelta(1)}, {"b", "a"})
    assert encode(value) == (
        '{"$tidemill":"tuple","value":[{"$tidemill":"uuid","value":"00000000-0000-0000-0000-000000000001"},'
        '{"$tidemill":"dict","value":[[2,{"$tidemill":"timedelta","value":[1,0,0]}]]},'
        '{"$tidemill":"set","value":["a","b"]}]}'
    )


def test_text_that_is_not_json_raises_a_value_error() -> None:
    with pytest.raises(ValueError, match="line 1 column 2"):
        decode("{")


def test_plain_values_are_encoded_about_as_fast_as_by_json() -> None:
    value = {"path": "/data/in.csv", "size_bytes": 1234, "rows": [{"id": n, "name": f"n{n}"} for n in range(20)]}

    def cost(function: Any) -> float:
        begun = time.process_time()
        for _ in range(2000):
            function(value)
        return time.process_time() - begun

    ratios = sorted(cost(encode) / cost(json.dumps) for _ in range(5))
    assert ratios[2] < 1.5


def test_half_a_character_is_read_as_python_writes_it() -> None:
    assert decode('{"text": "\\ud800"}') == {"text": "\ud800"}
    with pytest.raises(ValueError, match="NaN is not JSON"):
        decode("[NaN]")


class Length(timedelta):
    """Counts a negative length by its own rules, as that of pendulum does."""

    days = property(lambda self: -2)  # type: ignore[assignment]
    seconds = property(lambda self: -68_400)  # type: ignore[assignment]


def test_a_length_of_another_library_is_read_as_the_same_length() -> None:
    length = Length(days=-2, hours=5)
    assert decode(encode([length])) == [timedelta(days=-2, hours=5)]
