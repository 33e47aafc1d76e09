"""HTTP answers for deliveries: what they mean, and how long a server asks to be left alone."""

from __future__ import annotations

import datetime
import email.utils

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.http_delivery import Verdict, judge, retry_after_seconds

DATE = "Sun, 06 Nov 1994 08:49:37 GMT"
AT = datetime.datetime(1994, 11, 6, 8, 49, 37, tzinfo=datetime.UTC).timestamp()


@given(st.integers(100, 999))
def test_only_what_may_pass_is_sent_again(status: int) -> None:
    verdict = judge(status)
    assert (verdict is Verdict.DELIVERED) == (200 <= status < 300)
    assert (verdict in (Verdict.AGAIN, Verdict.OVERLOADED)) == (status >= 500 or status in (408, 425, 429))


@given(st.integers(0, 10**12), st.floats(0, 1e6))
def test_seconds_are_bounded(seconds: int, bound: float) -> None:
    assert retry_after_seconds(str(seconds), None, 0.0, bound) == min(seconds, bound)


@given(st.integers(0, 4_000_000_000), st.integers(-100_000, 100_000), st.floats(0, 1e6))
def test_dates_are_read_against_the_servers_own_clock(now: int, later: int, bound: float) -> None:
    date, until = (email.utils.formatdate(at, usegmt=True) for at in (now, max(0, now + later)))
    expected = min(max(0.0, max(0, now + later) - now), bound)
    assert retry_after_seconds(until, date, 0.0, bound) == expected
    assert retry_after_seconds(until, None, now, bound) == expected


@pytest.mark.parametrize(
    "text", [DATE, "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994", "Sun, 06 Nov 1994 08:49:37 GMT "]
)
def test_the_three_forms_of_a_date_are_read(text: str) -> None:
    assert retry_after_seconds(text, None, AT - 10, 60) == 10


def test_years_of_two_digits_are_near_ones() -> None:
    assert retry_after_seconds("Monday, 01-Jan-40 00:00:00 GMT", None, 0.0, 1e12) == pytest.approx(2208988800)


@pytest.mark.parametrize(
    "text", [None, "", "-5", "1.5", "soon", "Sun, 06 Foo 1994 08:49:37 GMT", "Sun, 66 Nov 1994 08:49:37 GMT", "\u0661"]
)
def test_what_cannot_be_read_counts_as_nothing(text: str | None) -> None:
    assert retry_after_seconds(text, "Sun", 0.0, 60) == 0.0


@given(st.text(), st.text())
def test_no_text_breaks_it(header: str, date: str) -> None:
    assert 0.0 <= retry_after_seconds(header, date, 0.0, 60) <= 60
