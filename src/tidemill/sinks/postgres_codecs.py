"""How connections of a PostgreSQL sink send and read numeric, json and jsonb: columns, arrays, domains, parameters.

A float is sent to a numeric column as its shortest decimal form. The client alone would send its binary expansion, and
19.99 would arrive as 19.98999... The server's binary form is used for numeric, because the client does not support
ranges, composite types and COPY over types that are sent as text.

In a payload, a str for json is a JSON string and bytes are JSON text. Hooks use the same connections but follow the
client's own convention: text in, text out. The asyncio task that writes decides which convention applies.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from decimal import Decimal
from typing import Any, Final

import asyncpg
import msgspec

_WRITES_PAYLOADS: Final = ContextVar("writes_payloads", default=False)
#: The head of a numeric: the number of groups of four digits, the exponent of the first group, the sign, and the number
#: of digits shown after the point.
_HEAD: Final = struct.Struct("!HhHH")
_NEGATIVE: Final = 0x4000
_NAN: Final = 0xC000
_SPECIAL: Final = {"NaN": _NAN, "Infinity": 0xD000, "-Infinity": 0xF000}
_SPECIAL_NAMES: Final = {sign: name for name, sign in _SPECIAL.items()}
#: The digits that numeric can hold before and after the point.
MAX_WHOLE_DIGITS: Final = 131_072
MAX_FRACTION_DIGITS: Final = 16_383


class JsonCodec:
    """Encodes values of json columns as JSON text.

    Args:
        to_json: Encodes a value as JSON.
    """

    def __init__(self, to_json: Callable[[Any], bytes]) -> None:
        self._to_json = to_json

    def encode(self, value: Any) -> str:
        """Return the text for a json parameter."""
        if _WRITES_PAYLOADS.get():
            return self.encode_payload(value)
        return value if isinstance(value, str) else self._to_json(value).decode()

    def encode_payload(self, value: Any) -> str:
        """Return the text for a payload's value.

        Raises:
            TypeError: The value has no JSON form.
            ValueError: Bytes are not JSON, or JSON cannot represent a number.

        Example:
            >>> codec = JsonCodec(msgspec.json.encode)
            >>> codec.encode_payload("null"), codec.encode_payload(b"null"), codec.encode_payload([1])
            ('"null"', 'null', '[1]')
        """
        if isinstance(value, bytes):
            try:
                # Only validates the text: creates no values, and numbers keep all their digits.
                msgspec.json.decode(value, type=msgspec.Raw)
                return value.decode()
            except ValueError as error:
                raise ValueError(f"bytes for a json column must be JSON text: {error}") from None
        return self._to_json(value).decode()


async def set_codecs(connection: asyncpg.Connection, json: JsonCodec) -> None:
    """Set the codecs of a new connection."""
    await connection.set_type_codec(
        "numeric", schema="pg_catalog", encoder=encode_numeric, decoder=decode_numeric, format="binary"
    )
    for kind in ("json", "jsonb"):
        await connection.set_type_codec(kind, schema="pg_catalog", encoder=json.encode, decoder=str)


@contextlib.contextmanager
def writing_payloads() -> Iterator[None]:
    """Within this context, json columns follow the convention of payloads."""
    token = _WRITES_PAYLOADS.set(True)
    try:
        yield
    finally:
        _WRITES_PAYLOADS.reset(token)


def encode_numeric(value: Any) -> bytes:
    """Return a number in the binary form of numeric; a float by its shortest decimal form.

    Raises:
        ValueError: The number has more digits than numeric can hold.
    """
    text = float.__repr__(value) if isinstance(value, float) else str(Decimal(value))
    if "e" in text or "E" in text or not text[-1].isdecimal():
        number = Decimal(text)
        if not number.is_finite():
            return _HEAD.pack(0, 0, _NAN if number.is_nan() else _SPECIAL[str(number)], 0)
        text = _write_out(number)
    whole, _, fraction = text.partition(".")
    sign = 0
    if whole[0] == "-":
        sign, whole = _NEGATIVE, whole[1:]
    scale = len(fraction)
    if len(whole) > MAX_WHOLE_DIGITS or scale > MAX_FRACTION_DIGITS:
        raise _too_long()
    before = (len(whole) + 3) // 4
    digits = whole.rjust(4 * before, "0") + fraction.ljust((scale + 3) // 4 * 4, "0")
    groups = [int(digits[start : start + 4]) for start in range(0, len(digits), 4)]
    return struct.pack(f"!HhHH{len(groups)}H", len(groups), before - 1, sign, scale, *groups)


def _write_out(number: Decimal) -> str:
    """Return a number without an exponent; a number that is too long is refused before it is written out."""
    if number.adjusted() < -MAX_FRACTION_DIGITS or (number and number.adjusted() >= MAX_WHOLE_DIGITS):
        raise _too_long()
    return format(number, "f")


def _too_long() -> ValueError:
    return ValueError(
        f"numeric holds up to {MAX_WHOLE_DIGITS:,} digits before and {MAX_FRACTION_DIGITS:,} after the point"
    )


def decode_numeric(data: bytes) -> Decimal:
    """Return a number from the binary form of numeric, with as many digits after the point as the server shows.

    Example:
        >>> decode_numeric(encode_numeric(19.99)), decode_numeric(encode_numeric(Decimal("-1.10")))
        (Decimal('19.99'), Decimal('-1.10'))
    """
    count, weight, sign, scale = _HEAD.unpack_from(data)
    if sign in _SPECIAL_NAMES:
        return Decimal(_SPECIAL_NAMES[sign])
    length = 4 * (weight + 1) + scale
    digits = "".join([f"{group:04}" for group in struct.unpack_from(f"!{count}H", data, _HEAD.size)])
    shown = digits.ljust(length, "0")[: max(length, 0)] or "0"
    return Decimal(f"{'-' if sign == _NEGATIVE else ''}{shown}E-{scale}")
