"""Checks the parts of a Kafka record before it is sent; the client would find errors only while sending.

Invariant: the client sends the returned values unchanged; nothing is cut off or replaced.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.core.wording import shorten

#: Partitions are numbered in 32 bits, timestamps in 64.
_MAX_PARTITION = 2**31 - 1
_MAX_TIMESTAMP = 2**63 - 1
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def to_record_bytes(field: str, value: Any) -> bytes | None:
    """Return bytes unchanged and text as UTF-8.

    Raises:
        TypeError: The value has another type.
        UnicodeEncodeError: The text has a lone surrogate.
    """
    if value is None or isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{field} of a KafkaPayload must be bytes, str or None, not {type(value).__name__}")
    return value.encode()


def to_record_headers(given: Any) -> tuple[tuple[str, bytes | None], ...]:
    """Return names and values in order, from a mapping or from pairs.

    Raises:
        TypeError: The headers are neither a mapping nor pairs, or a name or value has the wrong type.
        ValueError: A name is empty, or has a NUL or a lone surrogate.
    """
    if isinstance(given, Mapping):
        given = given.items()
    elif not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise TypeError(f"headers must be a mapping, or pairs of name and value, not {type(given).__name__}")
    headers = []
    for pair in given:
        if not isinstance(pair, Sequence) or isinstance(pair, (str, bytes)) or len(pair) != 2:
            raise TypeError(f"headers must be pairs of name and value, not {_show(pair)}")
        name, value = pair
        if not isinstance(name, str):
            raise TypeError(f"the name of a header must be str, not {type(name).__name__}")
        if not name or "\0" in name:
            # The client would cut off the name at the NUL.
            raise ValueError(f"{_show(name)} is not a valid header name: it is empty or contains a NUL character")
        name.encode()
        headers.append((name, to_record_bytes(f"header {_show(name)}", value)))
    return tuple(headers)


def to_record_partition(given: Any) -> int:
    """Return a partition's number, -1 for None.

    Raises:
        TypeError: The value is not a number.
        ValueError: The number is out of range for a partition.
    """
    if given is None:
        return -1
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"partition must be int or None, not {type(given).__name__}")
    if not 0 <= given <= _MAX_PARTITION:
        raise ValueError(f"partition must be from 0 to {_MAX_PARTITION}, not {_show_number(given)}")
    return given


def to_record_timestamp(given: Any) -> int:
    """Return milliseconds since the epoch, 0 for None.

    Raises:
        TypeError: The value is neither a number nor a datetime.
        ValueError: The value has no time zone, or is out of range.
    """
    if given is None:
        return 0
    if isinstance(given, datetime.datetime):
        if given.tzinfo is None:
            raise ValueError("timestamp is a datetime without a time zone; add one, or use milliseconds")
        given = (given - _EPOCH) // datetime.timedelta(milliseconds=1)
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"timestamp must be int (milliseconds), datetime or None, not {type(given).__name__}")
    # The client reads 0 as now.
    if not 1 <= given <= _MAX_TIMESTAMP:
        raise ValueError(f"timestamp must be after 1970 and within 64 bits of milliseconds, not {_show_number(given)}")
    return given


def _show(value: object) -> str:
    return shorten(repr(value), 60)


def _show_number(number: int) -> str:
    # Python refuses to print very long numbers.
    return str(number) if number.bit_length() < 200 else f"a number of {number.bit_length()} bits"
