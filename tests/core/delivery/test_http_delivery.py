"""HTTP responses to deliveries: what they mean, and how long a server asks to wait."""

from __future__ import annotations

import datetime
import email.utils
import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.delivery.http_delivery import (
    MAX_TEXT_BYTES,
    HttpVerdict,
    describe_body,
    judge_response,
    parse_retry_after,
)

DATE = "Sun, 06 Nov 1994 08:49:37 GMT"
AT = datetime.datetime(1994, 11, 6, 8, 49, 37, tzinfo=datetime.UTC).timestamp()


def test_only_transient_failures_are_retried() -> None:
    for status in range(100, 1000):
        verdict = judge_response(status)
        assert (verdict is HttpVerdict.DELIVERED) == (200 <= status < 300)
        assert (verdict is HttpVerdict.OVERLOADED) == (status in (408, 429, 502, 503, 504))
        assert (verdict in (HttpVerdict.AGAIN, HttpVerdict.OVERLOADED)) == (status >= 500 or status in (408, 425, 429))


@given(st.integers(0, 10**12), st.floats(0, 1e6))
def test_seconds_are_bounded(seconds: int, bound: float) -> None:
    assert parse_retry_after(str(seconds), None, 0.0, bound) == min(seconds, bound)


@given(st.integers(0, 4_000_000_000), st.integers(-100_000, 100_000), st.floats(0, 1e6))
def test_dates_are_relative_to_the_servers_own_clock(now: int, later: int, bound: float) -> None:
    date, until = (email.utils.formatdate(at, usegmt=True) for at in (now, max(0, now + later)))
    expected = min(max(0.0, max(0, now + later) - now), bound)
    assert parse_retry_after(until, date, 0.0, bound) == expected
    assert parse_retry_after(until, None, now, bound) == expected


@pytest.mark.parametrize(
    "text", [DATE, "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994", "Sun, 06 Nov 1994 08:49:37 GMT "]
)
def test_the_three_formats_of_a_date_are_parsed(text: str) -> None:
    assert parse_retry_after(text, None, AT - 10, 60) == 10


def test_two_digit_years_are_recent_ones() -> None:
    assert parse_retry_after("Monday, 01-Jan-40 00:00:00 GMT", None, 0.0, 1e12) == pytest.approx(2208988800)


@pytest.mark.parametrize(
    "text", [None, "", "-5", "1.5", "soon", "Sun, 06 Foo 1994 08:49:37 GMT", "Sun, 66 Nov 1994 08:49:37 GMT", "\u0661"]
)
def test_an_invalid_header_is_ignored(text: str | None) -> None:
    assert parse_retry_after(text, "Sun", 0.0, 60) == 0.0


@given(st.text(), st.text())
def test_no_header_makes_it_raise(header: str, date: str) -> None:
    assert 0.0 <= parse_retry_after(header, date, 0.0, 60) <= 60


@pytest.mark.parametrize(
    ("status", "deleting", "again", "verdict"),
    [
        (404, True, True, HttpVerdict.DELIVERED),
        (404, True, False, HttpVerdict.REFUSED),
        (404, False, True, HttpVerdict.REFUSED),
        (410, True, False, HttpVerdict.DELIVERED),
        (410, False, True, HttpVerdict.REFUSED),
        (409, True, True, HttpVerdict.REFUSED),
    ],
)
def test_a_missing_resource_was_deleted(status: int, deleting: bool, again: bool, verdict: HttpVerdict) -> None:
    assert judge_response(status, deleting=deleting, again=again) is verdict


PLAIN = "sch\u00f6n ".encode() * 3


@pytest.mark.parametrize(
    ("content", "kind", "encoding", "text"),
    [
        (b"", None, None, ""),
        (PLAIN, None, None, "sch\u00f6n sch\u00f6n sch\u00f6n"),
        ("sch\u00f6n".encode("latin-1"), "text/plain; charset=ISO-8859-1", None, "sch\u00f6n"),
        (PLAIN, "text/plain; charset=no-such-thing", None, "sch\u00f6n sch\u00f6n sch\u00f6n"),
        (b"\xff", "text/plain; charset=utf-8", None, "\ufffd"),
        (b"abcd", "text/plain; charset=hex", None, "abcd"),
        (b"+2AA-", "text/plain; charset=utf-7", None, "?"),
        (b"a\r\n\x1b[31mred\x07\xc2\x9b \xe2\x80\xae b", "text/plain", None, "a [31mred b"),
        (b"\x89PNG\0\1", "image/png", None, "(binary)"),
        (gzip.compress(PLAIN), None, "GZIP", "sch\u00f6n sch\u00f6n sch\u00f6n"),
        (gzip.compress(PLAIN)[:-4], None, "gzip", "sch\u00f6n sch\u00f6n sch\u00f6n"),
        (zlib.compress(PLAIN), None, "deflate", "sch\u00f6n sch\u00f6n sch\u00f6n"),
        (b"no gzip", None, "gzip", "(7 bytes that are not gzip)"),
        (b"????", None, "br\x1b", "(4 bytes of br)"),
        (PLAIN, None, "identity", "sch\u00f6n sch\u00f6n sch\u00f6n"),
    ],
)
def test_the_start_of_a_body_is_described_on_one_line(
    content: bytes, kind: str | None, encoding: str | None, text: str
) -> None:
    assert describe_body(content, kind, encoding) == text


def test_a_body_that_decompresses_without_end_is_read_up_to_a_bound() -> None:
    packed = gzip.compress(b"x" * 50_000_000)
    assert len(describe_body(packed, None, "gzip")) == MAX_TEXT_BYTES
    assert len(describe_body(b"x" * 1_000_000)) == MAX_TEXT_BYTES


@given(st.binary(), st.none() | st.text(), st.none() | st.text() | st.sampled_from(["gzip", "deflate"]))
def test_the_description_of_any_body_can_be_logged(content: bytes, kind: str | None, encoding: str | None) -> None:
    text = describe_body(content, kind, encoding)
    text.encode()
    assert all(character.isprintable() for character in text)
