"""Times of users: what is read, what is written, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.times import format_iso, format_utc, parse_ago, parse_moment


@given(st.datetimes(timezones=st.just(UTC)))
def test_a_moment_is_read_to_the_microsecond(moment: datetime) -> None:
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    wanted = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    assert parse_moment(moment.isoformat()) == parse_moment(moment.replace(tzinfo=None).isoformat()) == wanted


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01", "0001-01-01T00:00+14:00"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_moment(text)


def test_an_age_has_a_unit() -> None:
    assert [parse_ago(text) for text in ("7s", "15m", "2 h", "1d", "1w")] == [
        seconds * 1_000_000 for seconds in (7, 900, 7_200, 86_400, 604_800)
    ]
    assert [parse_ago(text) for text in ("", "7", "2 parsecs", "١h", "-1h")] == [None] * 5
    with pytest.raises(ValueError):
        parse_ago("9" * 5_000 + "h")


def test_times_are_written_in_utc_with_milliseconds() -> None:
    assert (format_iso(None), format_iso(1_500)) == (None, "1970-01-01T00:00:00.001+00:00")
    assert format_utc(1_700_000_000_123_456) == "2023-11-14 22:13:20.123"
    assert format_utc(10**20) == "100000000000000000000 us"
