"""Formats numbers, sizes and times for pages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from markupsafe import Markup
from markupsafe import escape as escape_markup

from tidemill.runtime.log.console import escape_control
from tidemill.runtime.store_clock import STORE_CLOCK

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def format_number(value: float | None) -> str:
    """Return a number with thousands separators; a dash for None.

    Example:
        >>> format_number(12345), format_number(0.25), format_number(None)
        ('12,345', '0.25', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:,.3g}"


def format_short(value: float | None) -> str:
    """Return a number in a few characters.

    Example:
        >>> format_short(950), format_short(12_345), format_short(999_700), format_short(7_654_321)
        ('950', '12.3k', '1M', '7.65M')
    """
    if value is None:
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        # a value that would round up to 1000 of the smaller unit takes the larger one
        if abs(value) >= (limit if unit == "k" else limit * 0.9995):
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return format_number(round(value) if abs(value) >= 10 else value)


def format_bytes(value: int | None) -> str:
    """Return a size in binary units.

    Example:
        >>> format_bytes(512), format_bytes(123_456_789)
        ('512 B', '118 MiB')
    """
    if value is None:
        return "–"
    size, unit = float(value), 0
    while size >= 999.5 and unit < len(_BINARY) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {_BINARY[unit]}"


def format_duration(seconds: float | None) -> str:
    """Return a duration in one or two units.

    Example:
        >>> [format_duration(value) for value in (0.0042, 3.21, 75, 4000, 200_000)]
        ['4.2 ms', '3.2 s', '1 min 15 s', '1 h 6 min', '2 d 7 h']
    """
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    if seconds < _HOUR:
        return f"{int(seconds // _MINUTE)} min {int(seconds % _MINUTE)} s"
    if seconds < _DAY:
        return f"{int(seconds // _HOUR)} h {int(seconds % _HOUR // _MINUTE)} min"
    return f"{int(seconds // _DAY)} d {int(seconds % _DAY // _HOUR)} h"


def format_minutes(seconds: float) -> str:
    """Return a duration in whole minutes, so that the text changes only once a minute.

    Example:
        >>> format_minutes(59), format_minutes(61), format_minutes(4000)
        ('less than a minute', '1 min', '1 h 6 min')
    """
    if seconds < _MINUTE:
        return "less than a minute"
    return f"{int(seconds // _MINUTE)} min" if seconds < _HOUR else format_duration(seconds)


def format_time(at: float | None) -> Markup | str:
    """Return a time in UTC as a `time` element, which the page's script shortens."""
    return _format_moment(at, "seconds")


def format_moment(at: float | None) -> Markup | str:
    """Return a time with millisecond precision; see `format_time`."""
    return _format_moment(at, "milliseconds")


def _format_moment(at: float | None, precision: str) -> Markup | str:
    if at is None:
        return "–"
    try:
        moment = datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):  # producers may write any number, but dates end with year 9999
        return f"{at:.0f} s after 1970"
    text = moment.replace(tzinfo=None).isoformat(" ", precision)
    whole = moment.isoformat(timespec="milliseconds")
    return Markup('<time datetime="{}" data-precision="{}">{} UTC</time>').format(whole, precision, text)


def format_ago(at: float | None) -> str:
    """Return how long ago a time was, in words."""
    return "–" if at is None else f"{format_duration(max(0.0, STORE_CLOCK.now_us() / 1e6 - at))} ago"


def make_visible(value: object) -> object:
    r"""Return a text with invisible and bidirectional control characters escaped; line breaks and tabs stay.

    Example:
        >>> make_visible("task\u202e-1\x00\n"), make_visible(5)
        ('task\\u202e-1\\x00\n', 5)
    """
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(char if char in "\n\t" else escape_control(char) for char in value)


def keep_as_typed(value: object) -> Markup:
    """Return a text unchanged for form fields: submitting the form again must send the same text."""
    return escape_markup(value)


#: The sparkline of a group of failures.
_SPARK_BARS, _SPARK_STEP, _SPARK_HEIGHT = 40, 3, 20


def spread_minutes(minutes: Sequence[tuple[int, int]], begin: float, end: float) -> list[tuple[int, int]]:
    """Return the bars of a sparkline: the horizontal position and the height of each.

    Args:
        minutes: Minutes since the epoch, with the count of each.
        begin: The left end, in seconds since the epoch; 0: the first of the minutes.
        end: The right end, in seconds since the epoch.

    Example:
        >>> spread_minutes([(10, 4), (19, 2)], 600, 1200)
        [(0, 20), (108, 10)]
    """
    first = begin / _MINUTE if begin else min((minute for minute, _ in minutes), default=0)
    width = max(1.0, end / _MINUTE - first) / _SPARK_BARS
    bars: dict[int, int] = {}
    for minute, count in minutes:
        index = min(_SPARK_BARS - 1, max(0, int((minute - first) / width)))
        bars[index] = bars.get(index, 0) + count
    highest = max(bars.values(), default=1)
    return [(index * _SPARK_STEP, max(2, _SPARK_HEIGHT * count // highest)) for index, count in sorted(bars.items())]


FILTERS = {
    "number": format_number,
    "short": format_short,
    "bytes": format_bytes,
    "duration": format_duration,
    "minutes": format_minutes,
    "time": format_time,
    "moment": format_moment,
    "ago": format_ago,
    "spread": spread_minutes,
    "as_typed": keep_as_typed,
}
