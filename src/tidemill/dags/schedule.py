"""Parses the `schedule`, `start_date` and `end_date` of a DAG."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tidemill.core.plain_times import UnknownZoneError, make_plain_moment
from tidemill.core.tasks.timetable import PRESETS, InvalidScheduleError, check_cron
from tidemill.dags.arguments import check_duration, suggest
from tidemill.dags.exceptions import DagError


@dataclass(frozen=True, slots=True)
class Schedule:
    """When runs of a DAG are due; see `core.tasks.structure.ScheduleStructure`. Times are UTC."""

    kind: str = "none"
    cron: str = ""
    zone: str = "UTC"
    interval: timedelta | None = None
    start: datetime | None = None
    end: datetime | None = None


def describe_schedule(owner: str, schedule: object, start_date: object, end_date: object) -> Schedule:
    """Return the schedule of a DAG.

    Args:
        owner: The name of the DAG, for messages.
        schedule: The `schedule` argument of the DAG.
        start_date: The `start_date` argument; without a time zone it is UTC.
        end_date: The `end_date` argument; without a time zone it is UTC.

    Raises:
        DagError: An argument is invalid.
    """
    start, end = _read_date(owner, "start_date", start_date), _read_date(owner, "end_date", end_date)
    if start is not None and end is not None and end < start:
        raise DagError(f"{owner}: end_date {end.isoformat()} is before start_date {start.isoformat()}; change one")
    if schedule is None:
        return Schedule(start=start, end=end)
    if isinstance(schedule, timedelta):
        return Schedule("interval", interval=check_duration(owner, "schedule", schedule), start=start, end=end)
    if not isinstance(schedule, str):
        raise DagError(
            f"{owner}: schedule must be a cron expression, a preset like '@daily', a timedelta or None, got "
            f"{type(schedule).__name__}"
        )
    if schedule == "@once":
        return Schedule("once", start=start, end=end)
    if schedule.startswith("@") and schedule not in PRESETS:
        raise DagError(f"{owner}: schedule is {schedule!r}; {suggest(schedule, ['@once', *PRESETS])}")
    cron = PRESETS.get(schedule, schedule)
    try:
        check_cron(cron)
    except InvalidScheduleError as error:
        raise DagError(f"{owner}: schedule {schedule!r} is not a valid cron expression: {error}") from None
    return Schedule("cron", cron=cron, zone=_find_zone(owner, start_date), start=start, end=end)


def _read_date(owner: str, name: str, value: object) -> datetime | None:
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise DagError(f"{owner}: {name} must be a datetime, got {value!r}; write datetime(2026, 1, 31)")
    try:
        value = make_plain_moment(value)
        moment = value.replace(tzinfo=UTC) if value.utcoffset() is None else value.astimezone(UTC)
    except UnknownZoneError as error:
        raise DagError(f"{owner}: {name} cannot be read: {error}") from None
    except OverflowError:
        raise DagError(f"{owner}: {name} {value.isoformat()} is outside the years 1 to 9999 in UTC") from None
    return moment


def _find_zone(owner: str, start_date: object) -> str:
    zone = make_plain_moment(start_date).tzinfo if isinstance(start_date, datetime) else None
    if zone is None or zone == UTC:
        return "UTC"
    if isinstance(zone, ZoneInfo) and zone.key:
        try:
            # The scheduler will look the zone up by name; a zone that was read from a file may have any key.
            ZoneInfo(zone.key)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise DagError(
                f"{owner}: this machine does not know {zone.key!r}, the time zone of start_date; correct the name, or "
                "install the package tzdata"
            ) from None
        return zone.key
    if isinstance(zone, timezone) and not zone.utcoffset(None):
        return "UTC"
    raise DagError(
        f"{owner}: the time zone of start_date, {zone}, has no name, so its daylight saving rules are unknown; use a "
        "named zone such as zoneinfo.ZoneInfo('Europe/Vienna')"
    )
