from __future__ import annotations

import zoneinfo
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.tasks.structure import ScheduleStructure
from tidemill.core.tasks.timetable import PRESETS, InvalidScheduleError, check_cron, next_time

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HOUR = 3_600_000_000


def us(*parts: int, zone: str = "UTC", fold: int = 0) -> int:
    moment = datetime(*parts, tzinfo=ZoneInfo(zone), fold=fold)  # type: ignore[arg-type,misc]
    return (moment.astimezone(UTC) - EPOCH) // timedelta(microseconds=1)


def show(time_us: int | None, zone: str = "UTC") -> str:
    assert time_us is not None
    return (EPOCH + timedelta(microseconds=time_us)).astimezone(ZoneInfo(zone)).strftime("%m-%d %H:%M %z")


def list_times(schedule: ScheduleStructure, after_us: int, count: int) -> list[int]:
    """Return what is due one after another, as if each were run at once."""
    found = []
    for _ in range(count):
        due = next_time(schedule, found[-1] if found else None, after_us, after_us)
        assert due is not None
        found.append(due)
    return found


def cron(expression: str, zone: str = "UTC", **more: int | bool | None) -> ScheduleStructure:
    return replace(ScheduleStructure("cron", cron=expression, zone=zone, start_us=0), **more)  # type: ignore[arg-type]


VIENNA = "Europe/Vienna"


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        # 02:30 does not exist on the day of the change: once, right after the gap.
        ("30 2 * * *", (2026, 3, 28, 12), ["03-29 03:00 +0200", "03-30 02:30 +0200"]),
        ("15,45 2 * * *", (2026, 3, 28, 12), ["03-29 03:00 +0200", "03-30 02:15 +0200"]),
        # 02:30 exists twice: the first time.
        ("30 2 * * *", (2026, 10, 24, 12), ["10-25 02:30 +0200", "10-26 02:30 +0100"]),
        ("0 3 * * *", (2026, 10, 24, 12), ["10-25 03:00 +0100", "10-26 03:00 +0100"]),
        # Elapsed time: half an hour is half an hour.
        (
            "*/30 * * * *",
            (2026, 10, 25, 2),
            ["10-25 02:30 +0200", "10-25 02:00 +0100", "10-25 02:30 +0100", "10-25 03:00 +0100"],
        ),
        ("*/30 * * * *", (2026, 3, 29, 1), ["03-29 01:30 +0100", "03-29 03:00 +0200", "03-29 03:30 +0200"]),
        ("0 * * * *", (2026, 10, 25, 1), ["10-25 02:00 +0200", "10-25 02:00 +0100", "10-25 03:00 +0100"]),
    ],
)
def test_where_clocks_change(expression: str, after: tuple[int, ...], expected: list[str]) -> None:
    found = list_times(cron(expression, VIENNA), us(*after, zone=VIENNA), len(expected))
    assert [show(time_us, VIENNA) for time_us in found] == expected


def test_what_ran_in_the_first_of_two_hours_does_not_run_in_the_second() -> None:
    # Known only since the second 02:10 of that night: the 02:30 that comes next on the clock has been.
    due = next_time(cron("30 2 * * *", VIENNA), None, us(2026, 10, 25, 2, 10, zone=VIENNA, fold=1), 0)
    assert show(due, VIENNA) == "10-26 02:30 +0100"


minutes = st.sampled_from(["*", "*/7", "0", "30", "5,35", "10-20", "59"])
hours = st.sampled_from(["*", "*/3", "0", "2", "1,2,3", "23", "0-4"])
days = st.sampled_from(["*", "1", "29", "31", "L", "LW", "*/2"])
months = st.sampled_from(["*", "3", "10", "*/2", "FEB"])
weekdays = st.sampled_from(["*", "0", "7", "MON-FRI", "5L", "MON#2"])
expressions = st.tuples(minutes, hours, days, months, weekdays).map(" ".join)
zones = st.sampled_from(sorted(zoneinfo.available_timezones()))
times = st.integers(us(1980, 1, 1), us(2037, 1, 1))


def is_valid(expression: str) -> bool:
    try:
        check_cron(expression)
    except InvalidScheduleError:
        return False
    return True


@given(expressions.filter(is_valid), zones, times)
def test_times_rise_and_match_the_clock_of_the_zone(expression: str, zone: str, after_us: int) -> None:
    found = list_times(cron(expression, zone), after_us, 5)
    assert found == sorted(set(found))
    assert found[0] > after_us
    fields = expression.split()
    for time_us in found:
        moment = (EPOCH + timedelta(microseconds=time_us)).astimezone(ZoneInfo(zone))
        before = (moment.astimezone(UTC) - timedelta(minutes=1)).astimezone(ZoneInfo(zone))
        changed = moment.utcoffset() != before.utcoffset()
        if not changed and fields[0].isdigit():
            assert moment.minute == int(fields[0])
        if not changed and fields[1].isdigit():
            assert moment.hour == int(fields[1])


@given(st.sampled_from(["30 2 * * *", "0 0 * * *", "15 1 * * *", "59 23 * * *"]), zones, times)
def test_a_time_of_day_is_due_once_on_each_day(expression: str, zone: str, after_us: int) -> None:
    found = list_times(cron(expression, zone), after_us, 40)
    dates = [(EPOCH + timedelta(microseconds=time_us)).astimezone(ZoneInfo(zone)).date() for time_us in found]
    assert len(set(dates)) == len(dates)
    # A zone that changes sides of the date line leaves out a day.
    gaps = [(later - date).days for date, later in pairwise(dates)]
    assert set(gaps) <= {1, 2}
    assert gaps.count(2) <= 1


@given(expressions.filter(is_valid), zones, times, st.integers(0, 400 * 24 * HOUR))
def test_after_an_outage_only_the_last_time_is_due(expression: str, zone: str, last_us: int, away_us: int) -> None:
    schedule = cron(expression, zone)
    now_us = last_us + away_us
    due = next_time(schedule, last_us, 0, now_us)
    assert due is not None
    following = next_time(schedule, due, 0, 0)
    assert due > last_us
    assert following is None or following > now_us
    with_catchup = next_time(replace(schedule, catchup=True), last_us, 0, now_us)
    assert with_catchup == next_time(schedule, last_us, 0, 0)
    if with_catchup is not None and with_catchup > now_us:
        assert due == with_catchup


@given(
    st.integers(1, 100 * HOUR), st.none() | st.integers(0, 100 * HOUR), st.integers(0, 500 * HOUR), st.booleans(),
    st.integers(0, 1000 * HOUR),
)  # fmt: skip
def test_intervals_keep_their_rhythm(
    interval_us: int, start_us: int | None, known_us: int, catchup: bool, now_us: int
) -> None:
    schedule = ScheduleStructure("interval", interval_us=interval_us, start_us=start_us, catchup=catchup)
    first = next_time(schedule, None, known_us, now_us)
    assert first is not None
    anchor = known_us if start_us is None else start_us
    assert (first - anchor) % interval_us == 0
    if start_us is not None and catchup:
        assert first == start_us
    elif first > max(now_us, start_us or 0):
        assert first - interval_us <= max(known_us, (start_us or 0) - 1)
    second = next_time(schedule, first, known_us, 0)
    assert second is not None
    assert second > first
    assert (second - first) % interval_us == 0


def test_without_a_start_an_interval_begins_when_the_dag_is_known() -> None:
    schedule = ScheduleStructure("interval", interval_us=10)
    assert next_time(schedule, None, 100, 100) == 110
    assert next_time(schedule, 110, 100, 112) == 120
    assert next_time(schedule, 110, 100, 135) == 130
    assert next_time(replace(schedule, catchup=True), 110, 100, 135) == 120
    assert next_time(replace(schedule, catchup=True), None, 100, 135) == 110


def test_what_passed_before_the_dag_was_known_is_made_up_for_with_catchup_only() -> None:
    daily = cron("0 0 * * *", start_us=us(2026, 1, 1))
    known = us(2026, 1, 10, 12)
    assert show(next_time(daily, None, known, known)) == "01-11 00:00 +0000"
    assert show(next_time(replace(daily, catchup=True), None, known, known)) == "01-01 00:00 +0000"
    assert show(next_time(replace(daily, start_us=us(2026, 2, 1)), None, known, known)) == "02-01 00:00 +0000"
    # Paused from the 2nd to the 10th.
    assert show(next_time(daily, us(2026, 1, 2), known, known)) == "01-11 00:00 +0000"
    assert show(next_time(replace(daily, catchup=True), us(2026, 1, 2), known, known)) == "01-03 00:00 +0000"


def test_nothing_is_due_after_the_end() -> None:
    daily = cron("0 0 * * *", start_us=us(2026, 1, 1), end_us=us(2026, 1, 3))
    assert show(next_time(daily, us(2026, 1, 2), 0, 0)) == "01-03 00:00 +0000"
    assert next_time(daily, us(2026, 1, 3), 0, 0) is None
    # After an outage beyond the end the last time before it is due.
    assert show(next_time(daily, us(2026, 1, 1), 0, us(2026, 5, 1))) == "01-03 00:00 +0000"
    every = ScheduleStructure("interval", interval_us=10, start_us=0, end_us=25)
    assert next_time(every, 0, 0, 1000) == 20
    assert next_time(every, 20, 0, 1000) is None


def test_once_is_due_once() -> None:
    once = ScheduleStructure("once", start_us=50)
    assert next_time(once, None, 100, 100) == 50
    assert next_time(once, 50, 100, 100) is None
    assert next_time(ScheduleStructure("once"), None, 100, 200) == 100
    assert next_time(ScheduleStructure("once", start_us=50, end_us=40), None, 100, 100) is None


def test_without_a_schedule_nothing_is_due() -> None:
    assert next_time(ScheduleStructure(start_us=0), None, 0, HOUR) is None


def test_times_end_with_the_year_9999() -> None:
    last = us(9999, 12, 31, 23, 30)
    assert next_time(cron("0 0 * * *"), last, 0, 0) is None
    assert next_time(cron("0 0 1 1 *", zone=VIENNA), us(9999, 2, 1), 0, 0) is None
    assert next_time(cron("0 0 * * *"), last * 10, 0, 0) is None


def test_an_expression_that_no_day_matches_is_never_due() -> None:
    assert next_time(cron("0 0 */31 2 MON#5,TUE#5"), None, 0, 0) is None


def test_a_rare_time_is_found_long_after_an_outage() -> None:
    leap = cron("0 0 29 2 *", start_us=us(1980, 1, 1))
    assert next_time(leap, us(1980, 2, 29), 0, us(2027, 1, 1)) == us(2024, 2, 29)
    assert next_time(leap, us(2024, 2, 29), 0, us(2027, 1, 1)) == us(2028, 2, 29)
    assert next_time(leap, us(2020, 2, 29), 0, us(2027, 1, 1)) == us(2024, 2, 29)


@pytest.mark.parametrize("expression", [*PRESETS.values(), "*/5 8-18 * * MON-FRI", "0 0 29 2 *", "0 0 L * *"])
def test_expressions_are_accepted(expression: str) -> None:
    check_cron(expression)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "it has 0 fields; write 5"),
        ("* * * *", "it has 4 fields; write 5"),
        ("0 0 * * * *", "it has 6 fields; write 5"),
        ("60 * * * *", "bad minute"),
        ("* 24 * * *", "bad hour"),
        ("x * * * *", "bad minute"),
        ("0 0 30 2 *", "bad day-of-month"),
        ("0 0 1 13 *", "bad month"),
        ("0 0 * * 8", "bad day-of-week"),
        ("0 0 */31 2 MON#5,TUE#5", "no day matches it"),
    ],
)
def test_what_is_not_a_cron_expression_is_refused(expression: str, message: str) -> None:
    with pytest.raises(InvalidScheduleError, match=f"^{message}"):
        check_cron(expression)
