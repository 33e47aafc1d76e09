"""What an HTTP answer means for something that is to be delivered, what it says, and when the server is asked again.

Invariants: what asking again cannot change is refused at once; no server is obeyed for longer than the given bound, and
what cannot be read counts as nothing.
"""

from __future__ import annotations

import datetime
import enum
import re
import zlib

#: An answer's text is looked at this far: further than it is shown, so that no secret is cut where it is shown.
MAX_TEXT_BYTES = 16 * 1024
_CHARSET = re.compile(r"charset=[\"']?([A-Za-z0-9._:-]{1,40})", re.IGNORECASE)
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


class HttpVerdict(enum.Enum):
    """What becomes of a payload after an answer."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    AGAIN = "again"
    OVERLOADED = "overloaded"


def judge_response(status: int, *, deleting: bool = False, again: bool = False) -> HttpVerdict:
    """Return what a status means.

    Args:
        status: The answer's.
        deleting: Whether the request was a DELETE, after which there is nothing (410), or nothing any more (404).
        again: Whether the same request was sent before without a clear answer.

    Example:
        >>> [judge_response(status).value for status in (204, 301, 404, 425, 500, 503)]
        ['delivered', 'refused', 'refused', 'again', 'again', 'overloaded']
    """
    if 200 <= status < 300 or (deleting and (status == 410 or (status == 404 and again))):
        return HttpVerdict.DELIVERED
    if status in _OVERLOADED:
        return HttpVerdict.OVERLOADED
    return HttpVerdict.AGAIN if status >= 500 or status in _PASSING else HttpVerdict.REFUSED


def answer_text(content: bytes, content_type: str | None = None, content_encoding: str | None = None) -> str:
    """Return what the start of an answer's body says, on one line and with nothing that a log could not hold.

    Args:
        content: The start of the body, as it came.
        content_type: Its header, for the character set.
        content_encoding: Its header; of bodies packed otherwise than by gzip or deflate only the size is told.

    Example:
        >>> answer_text(b"<h1>not   found</h1>", "text/html; charset=latin-1")
        '<h1>not found</h1>'
    """
    packed = (content_encoding or "").strip().lower()
    if packed in ("gzip", "x-gzip", "deflate"):
        try:
            # Both forms by their own head; bounded, since what is packed can grow without end.
            content = zlib.decompressobj(wbits=47).decompress(content, MAX_TEXT_BYTES)
        except zlib.error:
            return f"({len(content)} bytes that are not {packed})"
    elif packed not in ("", "identity"):
        return f"({len(content)} bytes of {_visible(packed)[:20]})"
    text = _decoded(content[:MAX_TEXT_BYTES], content_type or "")
    return "(binary)" if "\0" in text else _visible(text)


def _decoded(content: bytes, content_type: str) -> str:
    found = _CHARSET.search(content_type)
    try:
        text = content.decode(found[1] if found else "utf-8", "replace")
    except (LookupError, ValueError):
        text = content.decode("utf-8", "replace")
    # Some character sets can make lone surrogates.
    return text.encode("utf-8", "replace").decode()


def _visible(text: str) -> str:
    """Return a text on one line, without what controls a terminal."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


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
