"""Times as users write and read them: ISO 8601, UTC unless a zone is given.

Internally, a time is a number of microseconds since the epoch.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

_MILLION = 1_000_000
_AGO = re.compile(r"(\d+)\s*([smhdw])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_moment(text: str) -> int:
    """Return a date or a time in microseconds since the epoch; without a zone it is UTC.

    Raises:
        ValueError: The text is not a time.

    Example:
        >>> parse_moment("1970-01-02"), parse_moment("1970-01-01T01:00:01+01:00")
        (86400000000, 1000000)
    """
    found = datetime.fromisoformat(text)
    try:
        since = (found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)) - _EPOCH
    except OverflowError:
        raise ValueError(f"{text} is outside the years 1 to 9999 in UTC") from None
    return (since.days * 86_400 + since.seconds) * _MILLION + since.microseconds


def parse_ago(text: str) -> int | None:
    """Return how long ago a text such as `15m`, `2h` or `1d` means, in microseconds; None for any other text.

    Raises:
        ValueError: The number has too many digits.

    Example:
        >>> parse_ago("2h"), parse_ago("2 parsecs")
        (7200000000, None)
    """
    found = _AGO.fullmatch(text)
    return None if found is None else int(found[1]) * _UNITS[found[2]] * _MILLION


def format_iso(microseconds: int | None) -> str | None:
    """Return a time as ISO 8601 in UTC, with milliseconds.

    Example:
        >>> format_iso(1_000_000)
        '1970-01-01T00:00:01.000+00:00'
    """
    if microseconds is None:
        return None
    return datetime.fromtimestamp(microseconds / _MILLION, UTC).isoformat(timespec="milliseconds")


def format_utc(microseconds: float) -> str:
    """Return a time in UTC for people, with milliseconds; cut it to 19 characters for seconds.

    Example:
        >>> format_utc(1_500_000), format_utc(10**20)
        ('1970-01-01 00:00:01.500', '100000000000000000000 us')
    """
    try:
        at = datetime.fromtimestamp(microseconds / _MILLION, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{microseconds} us"
    return at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
