"""The values of a PostgreSQL row: how the client can send them, their size, and the key that orders their row.

Invariants: a converted value does not change if its payload does. No text has a character that the protocol cannot
carry, so the text of one row never makes a whole statement fail.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import uuid
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from tidemill.config.redaction import redact
from tidemill.core.delivery.sql_plan import Row
from tidemill.core.wording import shorten
from tidemill.sinks.base import to_json
from tidemill.sinks.non_finite import is_model, read_dump

#: Immutable types that the client sends unchanged; text needs a check in addition.
_PLAIN = frozenset({type(None), bool, int, float, bytes})
#: Types whose values are equal in Python if they are equal in PostgreSQL.
_SAME_KEY = frozenset({type(None), bool, int, str, bytes})
_KNOWN = (
    *(decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, uuid.UUID),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Interface, ipaddress.IPv6Interface),
    *(ipaddress.IPv4Network, ipaddress.IPv6Network, int, float),
)


def convert_values(whose: str, names: Sequence[str], given: Iterable[Any]) -> tuple[list[Any], int, bool]:
    """Return values that the client can send, their approximate size in bytes, and whether one of them is not a scalar.

    Args:
        whose: The table or statement, for messages.
        names: The columns or parameters.
        given: The values.

    Raises:
        TypeError: PostgreSQL cannot represent a value.
        ValueError: A text has a character that PostgreSQL does not allow.
    """
    values = list(given)
    size, nested = 0, False
    for index, value in enumerate(values):
        kind = type(value)
        if kind is str:
            # Hot path: one flag and one search for each text of each row.
            size += len(value) if value.isascii() and "\0" not in value else _measure_text(whose, names[index], value)
        elif kind in _PLAIN:
            size += len(value) if kind is bytes else 8
        else:
            values[index], more, container = _convert_value(whose, names[index], value)
            size += more
            nested = nested or container
    return values, size, nested


def _measure_text(whose: str, name: str, value: str) -> int:
    if "\0" in value:
        raise ValueError(f"{name!r} of {whose} has a NUL character, which text in PostgreSQL cannot have; remove it")
    try:
        return len(value.encode())
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        raise ValueError(
            f"{name!r} of {whose} has the lone surrogate U+{code:04X} at {error.start}, which UTF-8 cannot encode; "
            "replace it"
        ) from None


def _convert_value(whose: str, name: str, value: Any) -> tuple[Any, int, bool]:
    """Return the form of a value that is not plain, its size, and whether it is not a scalar."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str):
        return value, _measure_text(whose, name, value), False
    if isinstance(value, bytes):
        return value, len(value), False
    if value is None or isinstance(value, _KNOWN):
        return value, 8, False
    if type(value).__module__.startswith("asyncpg."):
        return value, 8, True
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        # A json column gets the value as JSON, so a value without a JSON form must be found now. "null", because an
        # array of floats may have NaN, which JSON does not allow.
        size = len(to_json(list(value) if isinstance(value, (set, frozenset)) else value, "null"))
        return _copy(value), size, True
    raise TypeError(f"{name!r} of {whose} is of type {type(value).__name__}, which PostgreSQL cannot represent")


def _copy(value: Any) -> Any:
    """Return a copy of a container; its owner may change the original before it is sent."""
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_copy(item) for item in value)
    if isinstance(value, (list, set, frozenset)):
        return [_copy(item) for item in value]
    return read_dump(value) if is_model(value) else value


def make_row_key(table: str, identity: Sequence[str], source: Mapping[str, Any] | None) -> Hashable:
    """Return a key that is equal for payloads of the same row; None if no column identifies the row.

    Args:
        table: The table.
        identity: The columns that identify a row.
        source: Their values.
    """
    if not identity or source is None:
        return None
    key: Hashable
    if len(identity) == 1:
        name = identity[0]
        value = source[name]
        if type(value) in _SAME_KEY:
            return table, name, value
        key = table, name, _to_key(value)
    else:
        key = (table, *((name, _to_key(source[name])) for name in identity))
    try:
        hash(key)
    except TypeError:
        return repr(key)
    return key


def _to_key(value: Any) -> Any:
    """Return a form that is equal in Python for values that are equal in PostgreSQL."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, float):
        # As in a numeric column, so that a float and a Decimal name the same row.
        value = decimal.Decimal(float.__repr__(value))
    return "NaN" if isinstance(value, decimal.Decimal) and value.is_nan() else value


def name_row(row: Row) -> str:
    """Name a row by its identifying columns if they are known, otherwise by its values."""
    shape = row.shape
    names = (*shape.columns, *shape.where)
    values = dict(zip(names[len(shape.columns) :], row.values[len(shape.columns) :], strict=True)) or {
        name: value
        for name, value in zip(shape.columns, row.values, strict=False)
        if not shape.conflict or name in shape.conflict
    }
    # Cut before masking, too: a text may be large, and masking reads all of it.
    shown = redact(
        {name: value if isinstance(value, (int, float)) else str(value)[:2_000] for name, value in values.items()}
    )
    listed = ", ".join(f"{name}={shorten(str(value), 60)}" for name, value in shown.items())
    return f"{shape.operation} {shape.table} ({shorten(listed)})"
