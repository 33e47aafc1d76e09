"""What an HTTP answer means for something that is to be delivered, and how long the server asks to be left alone.

Invariants: what asking again cannot change is refused at once; no server is obeyed for longer than the given bound, and
what cannot be read counts as nothing.
"""

from __future__ import annotations

import datetime
import enum
import re

#: Of 4xx, those that may pass: request time-out, too early, too many requests.
_PASSING = frozenset({408, 425, 429})
#: The server as a whole cannot do it now, whatever is sent.
_OVERLOADED = frozenset({408, 429, 502, 503, 504})
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
#: The forms of RFC 9110 5.6.7: IMF-fixdate and RFC 850's, then asctime's.
_DATES = (
    re.compile(r"\w+, (?P<day>\d\d?)[ -](?P<month>\w{3})[ -](?P<year>\d{4}|\d\d) (?P<time>\d\d:\d\d:\d\d) GMT"),
    re.compile(r"\w{3} (?P<month>\w{3}) +(?P<day>\d\d?) (?P<time>\d\d:\d\d:\d\d) (?P<year>\d{4})"),
)


class Verdict(enum.Enum):
    """What becomes of a payload after an answer."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    AGAIN = "again"
    OVERLOADED = "overloaded"


def judge(status: int) -> Verdict:
    """Return what a status means.

    Example:
        >>> [judge(status).value for status in (204, 301, 404, 425, 500, 503)]
        ['delivered', 'refused', 'refused', 'again', 'again', 'overloaded']
    """
    if 200 <= status < 300:
        return Verdict.DELIVERED
    if status in _OVERLOADED:
        return Verdict.OVERLOADED
    return Verdict.AGAIN if status >= 500 or status in _PASSING else Verdict.REFUSED


def retry_after_seconds(header: str | None, date: str | None, now: float, maximum_seconds: float) -> float:
    """Return how long a server asks to be left alone; 0 if it does not say so.

    Args:
        header: The answer's `Retry-After`: seconds, or a date.
        date: The answer's `Date`, against which a date is read: the clocks need not agree.
        now: Seconds since the epoch, used where there is no `Date`.
        maximum_seconds: The bound.
    """
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return maximum_seconds if len(text) > 9 else min(float(text), maximum_seconds)
    until = _epoch(text)
    if until is None:
        return 0.0
    since = _epoch((date or "").strip())
    return min(max(0.0, until - (now if since is None else since)), maximum_seconds)


def _epoch(text: str) -> float | None:
    found = next((match for form in _DATES if (match := form.fullmatch(text))), None)
    if found is None or found["month"].lower() not in _MONTHS:
        return None
    year = int(found["year"])
    if len(found["year"]) == 2:
        year += 2000 if year < 70 else 1900
    hour, minute, second = map(int, found["time"].split(":"))
    try:
        moment = datetime.datetime(
            year, _MONTHS.index(found["month"].lower()) + 1, int(found["day"]), hour, minute, min(second, 59),
            tzinfo=datetime.UTC,
        )  # fmt: skip
    except ValueError:
        return None
    return moment.timestamp()
