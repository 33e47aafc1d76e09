"""Computes when a DAG is due by its schedule.

A run is due at a time, which is its logical date: no run waits for the end of an interval. A cron expression is read in
a time zone, with the rules of Debian's cron for clock changes: a time of day that does not exist is due once, right
after the gap; a time that exists twice is due the first time. Expressions with a `*` as minute or hour follow the
elapsed time instead: every half hour is every half hour on those days, too.

Invariants: each time is after the previous one, and between start and end; the same arguments give the same time, in
every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from tidemill.core.tasks.structure import ScheduleStructure

PRESETS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "@hourly": "0 * * * *",
        "@daily": "0 0 * * *",
        "@weekly": "0 0 * * 0",
        "@monthly": "0 0 1 * *",
        "@quarterly": "0 0 1 */3 *",
        "@yearly": "0 0 1 1 *",
    }
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_FIELDS: Final = 5
#: The first window that is searched for the last time that has passed.
_FIRST_WINDOW_US: Final = 3_600_000_000


class InvalidScheduleError(ValueError):
    """The expression is not a cron expression, or is never due."""


def check_cron(expression: str) -> None:
    """Check a cron expression: minute, hour, day of the month, month, day of the week.

    Raises:
        InvalidScheduleError: It is not a cron expression, or no day matches it.

    Example:
        >>> check_cron("*/5 8-18 * * MON-FRI")
        >>> check_cron("60 * * * *")
        Traceback (most recent call last):
        tidemill.core.tasks.timetable.InvalidScheduleError: bad minute
    """
    fields = expression.split()
    if len(fields) != _FIELDS:
        raise InvalidScheduleError(
            f"it has {len(fields)} fields; write 5: minute, hour, day of the month, month, day of the week"
        )
    try:
        # A leap day is at most eight years away.
        next(CronSim(expression, _EPOCH))
    except CronSimError as error:
        text = str(error)
        raise InvalidScheduleError(text[:1].lower() + text[1:]) from None
    except StopIteration:
        raise InvalidScheduleError("no day matches it") from None


def next_time(schedule: ScheduleStructure, last_us: int | None, known_us: int, now_us: int) -> int | None:
    """Return when the next run is due, in UTC microseconds; None: never again.

    A time that has passed is due at once. Without `catchup`, times up to `known_us` are left out; if several have
    passed since then, as after an outage, only the last is due.

    Args:
        schedule: The schedule of the DAG.
        last_us: The time at which it was last due; None: never.
        known_us: Since when the DAG has been known and not paused.
        now_us: The current time.

    Example:
        >>> hourly = ScheduleStructure("cron", cron="0 * * * *", start_us=0)
        >>> next_time(hourly, last_us=None, known_us=1, now_us=2) == 3_600_000_000
        True
    """
    match schedule.kind:
        case "once":
            first_us = known_us if schedule.start_us is None else schedule.start_us
            found = first_us if last_us is None else None
        case "cron":
            found = _next_cron(schedule, last_us, known_us, now_us)
        case "interval":
            found = _next_interval(schedule, last_us, known_us, now_us)
        case _:
            return None
    beyond = found is None or (schedule.end_us is not None and found > schedule.end_us)
    return None if beyond else found


def _find_floor(schedule: ScheduleStructure, last_us: int | None, known_us: int) -> int:
    """Return the time after which the next due time is searched."""
    bounds = [] if schedule.start_us is None else [schedule.start_us - 1]
    if last_us is not None:
        bounds.append(last_us)
    if not schedule.catchup or not bounds:
        bounds.append(known_us)
    return max(bounds)


def _find_ceiling(schedule: ScheduleStructure, now_us: int) -> int:
    """Return the latest time that may be due now."""
    return now_us if schedule.end_us is None else min(now_us, schedule.end_us)


def _next_interval(schedule: ScheduleStructure, last_us: int | None, known_us: int, now_us: int) -> int:
    interval_us = schedule.interval_us or 1
    floor_us = _find_floor(schedule, last_us, known_us)
    # Without a start, the first run sets the rhythm.
    first_us = known_us if last_us is None else last_us
    anchor_us = first_us if schedule.start_us is None else schedule.start_us
    found = anchor_us + ((floor_us - anchor_us) // interval_us + 1) * interval_us
    ceiling_us = _find_ceiling(schedule, now_us)
    if schedule.catchup or found > ceiling_us:
        return found
    return found + (ceiling_us - found) // interval_us * interval_us


def _next_cron(schedule: ScheduleStructure, last_us: int | None, known_us: int, now_us: int) -> int | None:
    floor_us = _find_floor(schedule, last_us, known_us)
    found = _find_after(schedule, floor_us)
    ceiling_us = _find_ceiling(schedule, now_us)
    if found is None or schedule.catchup or found >= ceiling_us:
        return found
    window_us = _FIRST_WINDOW_US
    while True:
        # Usually the last due time is recent, and trying all since the first could take long.
        start_us = max(ceiling_us - window_us, found)
        passed = _find_last(schedule, start_us, ceiling_us)
        if passed is not None or start_us == found:
            return found if passed is None else passed
        window_us *= 16


def _find_last(schedule: ScheduleStructure, after_us: int, until_us: int) -> int | None:
    """Return the last due time after `after_us` and up to `until_us`, or None."""
    last = None
    found = _find_after(schedule, after_us)
    while found is not None and found <= until_us:
        last, found = found, _find_after(schedule, found)
    return last


def _find_after(schedule: ScheduleStructure, after_us: int) -> int | None:
    """Return the first due time after `after_us`, or None."""
    try:
        after = (_EPOCH + timedelta(microseconds=after_us)).astimezone(ZoneInfo(schedule.zone))
        times = CronSim(schedule.cron, after)
        # Within an hour that exists twice, the first time found may be in the hour that has passed.
        for found in times:
            found_us = (found.astimezone(UTC) - _EPOCH) // _MICROSECOND
            if found_us > after_us:
                return found_us
    except OverflowError:
        # Beyond the year 9999.
        return None
    return None
