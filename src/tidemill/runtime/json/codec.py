"""Turns values into text and back: XComs, params, constructor arguments of tasks and triggers, payloads of events.

The text is JSON. Values that JSON lacks are written as an object with a mark,
`{"$tidemill": "date", "value": "2026-01-31"}`; all others are plain, so that people and other programs can read them.

Invariants: a decoded value equals the encoded one. A value that cannot keep this promise is refused, and the message
names the part at fault. A text without marks, from any JSON encoder, is decoded as JSON.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec

from tidemill.core.errors import TidemillError
from tidemill.core.plain_times import make_plain_duration
from tidemill.core.wording import shorten

_MARK: Final = "$tidemill"
_VALUE: Final = "value"
_MARK_BYTES: Final = b'"$tidemill"'
#: Deeper values are refused; they usually contain themselves.
MAX_DEPTH: Final = 200
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
#: Longer names of parts are cut in messages.
_MAX_PATH: Final = 200

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder().decode


class EncodingError(TidemillError, ValueError):
    """A value cannot be encoded so that the decoded value is equal."""


def encode(value: Any, name: str = "value") -> str:
    """Return a value as text.

    Args:
        value: None, bool, int, float, str, bytes, datetime, date, time, timedelta, UUID, Decimal, and lists, tuples,
            sets and dicts of these.
        name: The value's name in a message.

    Raises:
        EncodingError: A part of it has another type, is NaN or infinite, is not Unicode text, or nested too deeply.

    Example:
        >>> encode({"a": [1, None]}), encode((1,))
        ('{"a":[1,null]}', '{"$tidemill":"tuple","value":[1]}')
    """
    return _encode_with(_encode, value, name)


def encode_sorted(value: Any, name: str = "value") -> str:
    """Encode with the keys of dicts in order, so that equal values of the same types give the same text."""
    return _encode_with(_encode_sorted, value, name)


def decode(text: str | bytes) -> Any:
    """Return the value that a text was encoded from; for a text without marks, its JSON value.

    Raises:
        ValueError: The text is not JSON.

    Example:
        >>> decode(encode({1: {2, 3}}))
        {1: {2, 3}}
    """
    raw = text.encode() if isinstance(text, str) else text
    try:
        value = _decode(raw)
    except msgspec.DecodeError:
        # Python's JSON allows escapes of lone surrogates, which texts of earlier versions and YAML files contain.
        value = json.loads(raw, parse_constant=_refuse_constant)
    return _restore(value) if _MARK_BYTES in raw else value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _encode_with(encoder: Callable[[Any], bytes], value: Any, name: str) -> str:
    # Most values are plain JSON. A value is plain if decoding its text returns an equal value.
    try:
        raw = encoder(value)
        if _MARK_BYTES not in raw and _is_same(_decode(raw), value) and not _may_be_deep(raw):
            return raw.decode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        pass
    return encoder(_mark(value, name, 0, is_sorted=encoder is _encode_sorted)).decode()


def _may_be_deep(raw: bytes) -> bool:
    """Return whether JSON may be nested too deeply; its reader may have less stack left than this process.

    Brackets in strings count, too; `_mark` decides.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return False
    brackets = raw.translate(_SQUARE, _NO_BRACKETS)
    for _ in range(MAX_DEPTH + 1):
        before = len(brackets)
        brackets = brackets.replace(b"[]", b"")  # one level
        if not brackets or len(brackets) == before:
            break
    return bool(brackets)


def _is_same(read: Any, value: Any) -> bool:
    """Compare without trusting the equality of other types."""
    kind = type(value)
    return (kind in _PLAIN or kind is float) and bool(read == value)


def _mark(value: Any, path: str, depth: int, *, is_sorted: bool) -> Any:
    """Return a value of plain JSON, with marks for values that JSON lacks; `is_sorted`: see `encode_sorted`."""
    if depth > MAX_DEPTH:
        raise EncodingError(
            f"{shorten(path, _MAX_PATH)} is nested more than {MAX_DEPTH} levels deep; "
            "check whether a part contains itself"
        )
    match value:
        case None | bool():
            return value
        case str():
            return _check_text(value, path)
        case int():
            # Few JSON decoders read a number beyond 64 bits as an integer.
            return int(value) if -(1 << 63) <= value < 1 << 64 else _marked("int", _write_digits(int(value), path))
        case float():
            _check_finite(math.isfinite(value), value, path)
            return float(value)
        case list():
            return _mark_items(value, path, depth, is_sorted=is_sorted)
        case tuple():
            return _marked("tuple", _mark_items(value, path, depth, is_sorted=is_sorted))
        case set() | frozenset():
            items = [_mark(item, f"{path}{{...}}", depth + 1, is_sorted=is_sorted) for item in value]
            # Sorted, because the order of a set differs from process to process.
            return _marked("set" if isinstance(value, set) else "frozenset", sorted(items, key=_encode_sorted))
        case dict():
            return _mark_dict(value, path, depth, is_sorted=is_sorted)
    return _mark_scalar(value, path)


def _mark_items(values: list[Any] | tuple[Any, ...], path: str, depth: int, *, is_sorted: bool) -> list[Any]:
    return [_mark(item, f"{path}[{number}]", depth + 1, is_sorted=is_sorted) for number, item in enumerate(values)]


def _mark_dict(value: dict[Any, Any], path: str, depth: int, *, is_sorted: bool) -> Any:
    parts = [(key, _mark(item, f"{path}[{key!r}]", depth + 1, is_sorted=is_sorted)) for key, item in value.items()]
    if _MARK not in value and all(isinstance(key, str) for key in value):
        return {_check_text(key, f"a key of {path}"): item for key, item in parts}
    pairs = [[_mark(key, f"a key of {path}", depth + 1, is_sorted=is_sorted), item] for key, item in parts]
    return _marked("dict", sorted(pairs, key=_encode_sorted) if is_sorted else pairs)


def _mark_scalar(value: Any, path: str) -> Any:
    match value:
        case datetime():
            return _marked("datetime", _split_moment(value))
        case date() | time():
            return _marked("time" if isinstance(value, time) else "date", _format_plain_time(value, path))
        case timedelta():
            plain = make_plain_duration(value)
            return _marked("timedelta", [plain.days, plain.seconds, plain.microseconds])
        case UUID():
            return _marked("uuid", str(value))
        case Decimal():
            _check_finite(value.is_finite(), value, path)
            return _marked("decimal", str(value))
        case bytes() | bytearray():
            return _marked("bytes", base64.b64encode(value).decode())
    kind = type(value)
    raise EncodingError(
        f"{shorten(path, _MAX_PATH)} is of type {kind.__module__}.{kind.__qualname__}, which cannot be encoded; "
        "use numbers, text, bytes, times, lists, tuples, sets and dicts"
    )


def _marked(mark: str, value: Any) -> dict[str, Any]:
    return {_MARK: mark, _VALUE: value}


def _split_moment(moment: datetime) -> list[Any]:
    """Return date and time without zone, the zone by name or as seconds from UTC, and the fold if it is set."""
    plain = datetime.isoformat(moment.replace(tzinfo=None, fold=0))
    zone: str | float | None
    if isinstance(moment.tzinfo, ZoneInfo) and moment.tzinfo.key:
        zone = moment.tzinfo.key
    else:
        offset = moment.utcoffset()
        zone = None if offset is None else offset / timedelta(seconds=1)
    return [plain, zone, moment.fold] if moment.fold else [plain, zone]


def _format_plain_time(value: date | time, path: str) -> str:
    if isinstance(value, time) and value.tzinfo is not None:
        raise EncodingError(
            f"{shorten(path, _MAX_PATH)} is a time of day with a time zone; use one without, or a datetime"
        )
    return value.isoformat()


def _check_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EncodingError(
            f"{shorten(path, _MAX_PATH)} is not Unicode text: {error.reason} at {error.start}"
        ) from None
    return str.__str__(text)


def _write_digits(number: int, path: str) -> str:
    try:
        return str(number)
    except ValueError:  # Python limits the number of digits, because their conversion takes quadratic time
        most = sys.get_int_max_str_digits()
        raise EncodingError(
            f"{shorten(path, _MAX_PATH)} is a number of more than {most:,} digits; use bytes, or hex()"
        ) from None


def _check_finite(finite: bool, value: object, path: str) -> None:
    if not finite:
        raise EncodingError(f"{shorten(path, _MAX_PATH)} is {value}, which JSON cannot represent; use None or text")


def _restore(value: Any) -> Any:
    if isinstance(value, list):
        return [_restore(item) for item in value]
    if not isinstance(value, dict):
        return value
    restore = _RESTORE.get(value[_MARK]) if value.keys() == {_MARK, _VALUE} and _is_text(value[_MARK]) else None
    if restore is None:
        return {key: _restore(item) for key, item in value.items()}
    return restore(value[_VALUE])


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _join_moment(parts: list[Any]) -> datetime:
    plain, zone, *fold = parts
    moment = datetime.fromisoformat(plain).replace(fold=fold[0] if fold else 0)
    if isinstance(zone, str):
        return moment.replace(tzinfo=ZoneInfo(zone))
    if zone is None:
        return moment
    return moment.replace(tzinfo=timezone(timedelta(seconds=zone)) if zone else UTC)


def _restore_dict(pairs: list[list[Any]]) -> dict[Any, Any]:
    return {_restore(key): _restore(item) for key, item in pairs}


_PLAIN: Final = frozenset({type(None), bool, int, str, list, dict})
_RESTORE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "int": int,
    "tuple": lambda items: tuple(_restore(items)),
    "set": lambda items: set(_restore(items)),
    "frozenset": lambda items: frozenset(_restore(items)),
    "dict": _restore_dict,
    "datetime": _join_moment,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "uuid": UUID,
    "decimal": Decimal,
    "bytes": base64.b64decode,
}
