"""Times of other libraries as Python's own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pendulum
import pytest
import pytz
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.plain_times import UnknownZoneError, find_zone, make_plain_duration, make_plain_moment

VIENNA = ZoneInfo("Europe/Vienna")


class Length(timedelta):
    """Counts a negative length by its own rules, and refuses arithmetic, as those of pendulum do."""

    days = seconds = microseconds = property(lambda self: 7)  # type: ignore[assignment]

    def __floordiv__(self, other: Any) -> Any:
        raise AttributeError("_to_microseconds")


class Moment(datetime):
    def __sub__(self, other: Any) -> Any:
        raise AttributeError("not this way")


class Zone(tzinfo):
    """The zone of a library."""

    def __init__(self, offset: timedelta | None, fixed: bool, **names: Any) -> None:
        vars(self).update(names)
        self._offset, self._fixed = offset, fixed

    def utcoffset(self, moment: datetime | None) -> timedelta | None:
        return self._offset if self._fixed or moment is not None else None


@given(st.timedeltas())
def test_a_length_stays_the_same_whatever_a_subclass_makes_of_it(length: timedelta):
    plain = make_plain_duration(Length(seconds=length.total_seconds()))
    assert type(plain) is timedelta
    assert plain == timedelta(seconds=length.total_seconds())


@pytest.mark.parametrize(
    ("zone", "expected"),
    [
        (UTC, UTC),
        (VIENNA, VIENNA),
        (timezone(timedelta(hours=2)), timezone(timedelta(hours=2))),
        (Zone(timedelta(hours=1), False, key="Europe/Vienna"), VIENNA),
        (Zone(timedelta(hours=1), False, zone="Europe/Vienna"), VIENNA),
        (Zone(timedelta(hours=1), False, zone=None, name="Europe/Vienna"), VIENNA),
        (Zone(timedelta(0), True, key="UTC"), UTC),
        (Zone(timedelta(0), True), UTC),
        (Zone(Length(hours=2), True, name="+02:00"), timezone(timedelta(hours=2))),
        (Zone(timedelta(hours=2), True, name="/etc"), timezone(timedelta(hours=2))),
    ],
)
def test_a_zone_is_found_by_its_name_or_is_a_fixed_offset(zone: tzinfo, expected: tzinfo):
    found = find_zone(zone)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("names", [{}, {"name": "Nowhere/Town"}, {"key": 7}])
def test_a_zone_without_a_name_that_is_known_is_refused(names: dict[str, Any]):
    with pytest.raises(UnknownZoneError, match="has no IANA name"):
        find_zone(Zone(timedelta(hours=1), False, **names))


def test_a_moment_keeps_its_clock_time_and_zone():
    plain = make_plain_moment(Moment(2026, 10, 25, 2, 30, 1, 5, tzinfo=VIENNA, fold=1))
    assert type(plain) is datetime
    assert (plain, plain.fold, plain.tzinfo) == (datetime(2026, 10, 25, 2, 30, 1, 5, VIENNA, fold=1), 1, VIENNA)
    assert make_plain_moment(Moment(2026, 1, 1)) == datetime(2026, 1, 1)


@pytest.mark.parametrize(("offset", "fold"), [(2, 0), (1, 1)])
def test_of_a_clock_time_that_comes_twice_the_offset_tells_which_one(offset: int, fold: int):
    zone = Zone(timedelta(hours=offset), False, zone="Europe/Vienna")
    plain = make_plain_moment(datetime(2026, 10, 25, 2, 30, tzinfo=zone))
    assert (plain.fold, plain.utcoffset()) == (fold, timedelta(hours=offset))


def test_a_clock_time_with_the_offset_of_another_century_is_read_by_the_rules_of_its_zone():
    """What `datetime(..., tzinfo=pytz.timezone(...))` gives."""
    zone = Zone(timedelta(hours=1, minutes=5), False, zone="Europe/Vienna")
    assert make_plain_moment(datetime(2026, 1, 1, tzinfo=zone)) == datetime(2026, 1, 1, tzinfo=VIENNA)


def test_those_of_pendulum_and_pytz_are_made_plain():
    moment = pendulum.datetime(2026, 10, 25, 2, 30, tz="Europe/Vienna")
    assert make_plain_moment(moment) == datetime(2026, 10, 25, 2, 30, tzinfo=VIENNA, fold=moment.fold)
    assert make_plain_moment(pendulum.datetime(2026, 1, 1)).tzinfo is UTC
    assert make_plain_moment(pendulum.datetime(2026, 1, 1, tz=2)).utcoffset() == timedelta(hours=2)
    length = make_plain_duration(pendulum.duration(months=1, days=-3, seconds=7))
    assert (type(length), length) == (timedelta, timedelta(days=27, seconds=7))
    local = pytz.timezone("Europe/Vienna").localize(datetime(2026, 1, 1))
    assert make_plain_moment(local) == datetime(2026, 1, 1, tzinfo=VIENNA)
    assert make_plain_moment(datetime(2026, 1, 1, tzinfo=pytz.utc)).tzinfo is UTC
