"""Converts subclasses of datetime and timedelta (pendulum, pandas, pytz's zones) to the plain types of Python.

These subclasses override arithmetic, fields and text. Invariant: the result has the same moment, wall clock, zone and
length, and exactly the types `datetime`, `timedelta`, and `ZoneInfo` or `timezone`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo


class UnknownZoneError(ValueError):
    """A time zone has no name by which its rules can be found."""


def make_plain_duration(value: timedelta) -> timedelta:
    """Return the same duration as a timedelta.

    Example:
        >>> make_plain_duration(timedelta(days=-1, seconds=5))
        datetime.timedelta(days=-1, seconds=5)
    """
    # Bypass the attributes: a subclass may count the seconds of a negative duration differently.
    fields = (timedelta.days, timedelta.seconds, timedelta.microseconds)
    return timedelta(*(field.__get__(value) for field in fields))


def make_plain_moment(value: datetime) -> datetime:
    """Return the same moment as a datetime whose zone is the result of `find_zone`.

    Raises:
        UnknownZoneError: Its zone has no name.
    """
    zone = None if value.tzinfo is None else find_zone(value.tzinfo)
    clock = (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
    plain = datetime(*clock, tzinfo=zone, fold=value.fold)
    if isinstance(value.tzinfo, ZoneInfo) or plain.utcoffset() == value.utcoffset():
        return plain
    # For a clock time that occurs twice, pytz marks the later one with another zone.
    other = plain.replace(fold=1 - plain.fold)
    return other if other.utcoffset() == value.utcoffset() else plain


def find_zone(zone: tzinfo) -> tzinfo:
    """Return a zone of any library as a `ZoneInfo`, found by its `key`, `zone` or `name`, or as a `timezone`.

    Raises:
        UnknownZoneError: It has no known name and no fixed offset.

    Example:
        >>> find_zone(ZoneInfo("Europe/Vienna"))
        zoneinfo.ZoneInfo(key='Europe/Vienna')
    """
    if type(zone) in (ZoneInfo, timezone):
        return zone
    for attribute in ("key", "zone", "name"):
        name = getattr(zone, attribute, None)
        if isinstance(name, str) and name:
            try:
                return UTC if name == "UTC" else ZoneInfo(name)
            except (ValueError, OSError, KeyError):  # an unknown name; OSError: the name of a folder
                continue
    offset = zone.utcoffset(None)
    if offset is None:
        raise UnknownZoneError(
            f"the rules of time zone {zone!r} are unknown, because it has no IANA name; use a named zone, such as "
            "zoneinfo.ZoneInfo('Europe/Vienna')"
        )
    return timezone(make_plain_duration(offset)) if offset else UTC
