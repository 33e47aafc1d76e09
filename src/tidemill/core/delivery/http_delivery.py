"""Judges HTTP responses: whether the payload was delivered, refused or should be retried, and when to retry.

Invariants: a response that a retry cannot change is a refusal; `Retry-After` is honoured only up to the given bound,
and ignored if it cannot be parsed.
"""

from __future__ import annotations

import datetime
import enum
import re
import zlib

#: The number of bytes read from a body. It exceeds what is shown, so that a secret cut off at the end can still be
#: redacted.
MAX_TEXT_BYTES = 16 * 1024
_CHARSET = re.compile(r"charset=[\"']?([A-Za-z0-9._:-]{1,40})", re.IGNORECASE)
#: The 4xx statuses that are transient: request timeout, too early, too many requests.
_TRANSIENT = frozenset({408, 425, 429})
#: Statuses that say that the server as a whole is unavailable.
_OVERLOADED = frozenset({408, 429, 502, 503, 504})
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
#: The date formats of RFC 9110, section 5.6.7: IMF-fixdate and RFC 850's, then asctime's.
_DATES = (
    re.compile(r"\w+, (?P<day>\d\d?)[ -](?P<month>\w{3})[ -](?P<year>\d{4}|\d\d) (?P<time>\d\d:\d\d:\d\d) GMT"),
    re.compile(r"\w{3} (?P<month>\w{3}) +(?P<day>\d\d?) (?P<time>\d\d:\d\d:\d\d) (?P<year>\d{4})"),
)


class HttpVerdict(enum.Enum):
    DELIVERED = "delivered"
    REFUSED = "refused"
    AGAIN = "again"
    OVERLOADED = "overloaded"


def judge_response(status: int, *, deleting: bool = False, again: bool = False) -> HttpVerdict:
    """Return the verdict on a payload, given the status of the response.

    Args:
        status: The status of the response.
        deleting: Whether the request was a DELETE. It has succeeded if the resource is gone (410), or not found (404)
            on a retry.
        again: Whether the same request was sent before without a conclusive response.

    Example:
        >>> [judge_response(status).value for status in (204, 301, 404, 425, 500, 503)]
        ['delivered', 'refused', 'refused', 'again', 'again', 'overloaded']
    """
    if 200 <= status < 300 or (deleting and (status == 410 or (status == 404 and again))):
        return HttpVerdict.DELIVERED
    if status in _OVERLOADED:
        return HttpVerdict.OVERLOADED
    return HttpVerdict.AGAIN if status >= 500 or status in _TRANSIENT else HttpVerdict.REFUSED


def describe_body(content: bytes, content_type: str | None = None, content_encoding: str | None = None) -> str:
    """Return the start of a response's body as one printable line.

    Args:
        content: The start of the body, as received.
        content_type: The `Content-Type` header, which gives the character set.
        content_encoding: The `Content-Encoding` header. Of any encoding other than gzip and deflate, only the size is
            shown.

    Example:
        >>> describe_body(b"<h1>not   found</h1>", "text/html; charset=latin-1")
        '<h1>not found</h1>'
    """
    packed = (content_encoding or "").strip().lower()
    if packed in ("gzip", "x-gzip", "deflate"):
        try:
            # wbits=47 detects gzip and zlib headers. The output is bounded because a small body can decompress to
            # gigabytes.
            content = zlib.decompressobj(wbits=47).decompress(content, MAX_TEXT_BYTES)
        except zlib.error:
            return f"({len(content)} bytes that are not {packed})"
    elif packed not in ("", "identity"):
        return f"({len(content)} bytes of {_make_printable(packed)[:20]})"
    text = _decode(content[:MAX_TEXT_BYTES], content_type or "")
    return "(binary)" if "\0" in text else _make_printable(text)


def _decode(content: bytes, content_type: str) -> str:
    found = _CHARSET.search(content_type)
    try:
        text = content.decode(found[1] if found else "utf-8", "replace")
    except (LookupError, ValueError):
        text = content.decode("utf-8", "replace")
    # Some codecs produce lone surrogates.
    return text.encode("utf-8", "replace").decode()


def _make_printable(text: str) -> str:
    """Collapse a text to one line without control characters."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def parse_retry_after(header: str | None, date: str | None, now: float, maximum_seconds: float) -> float:
    """Return the seconds that a server asks its clients to wait, or 0.

    Args:
        header: The `Retry-After` header of the response: seconds, or a date.
        date: The `Date` header of the response. A `Retry-After` date is relative to it, since the server's clock may be
            wrong.
        now: The current time in seconds since the epoch, used if there is no `Date`.
        maximum_seconds: The upper bound of the result.
    """
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return maximum_seconds if len(text) > 9 else min(float(text), maximum_seconds)
    until = _parse_date(text)
    if until is None:
        return 0.0
    since = _parse_date((date or "").strip())
    return min(max(0.0, until - (now if since is None else since)), maximum_seconds)


def _parse_date(text: str) -> float | None:
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
