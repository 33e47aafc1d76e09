"""Triggers that wait for a point in time.

The clock of the store decides, or without one the clock of the host. It is read at least once a minute, so a clock
change or a suspended machine is noticed soon. A trigger never fires early.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, time, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

from tidemill.core.plain_times import make_plain_duration, make_plain_moment
from tidemill.runtime.store_clock import STORE_CLOCK
from tidemill.triggers.base import BaseTrigger, TaskSuccessEvent, TriggerEvent

#: The longest sleep before the clock is read again.
LOOK_SECONDS: Final = 60.0


def _now() -> datetime:
    return STORE_CLOCK.now()


async def wait_until(
    moment: datetime,
    now: Callable[[], datetime] = _now,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Wait until a point in time; never return earlier."""
    while (left := (moment - now()).total_seconds()) > 0:
        await sleep(min(left, LOOK_SECONDS))


class DateTimeTrigger(BaseTrigger):
    """Fires once, at a point in time; at once if it has passed.

    The payload is that time, as ISO 8601 in UTC.

    Args:
        moment: A datetime with a time zone, or a string in ISO 8601 with one.
        end_from_trigger: Whether the event ends the waiting task as a success, without a worker.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no time zone, or the string is not a date and time.
    """

    def __init__(self, moment: datetime | str, *, end_from_trigger: bool = False) -> None:
        super().__init__()
        self.moment = _parse_moment(moment)
        self.end_from_trigger = end_from_trigger

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the classpath and arguments of this trigger."""
        ends = {"end_from_trigger": True} if self.end_from_trigger else {}
        return "tidemill.triggers.builtin.temporal.DateTimeTrigger", {"moment": self.moment.isoformat(), **ends}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, then fire."""
        await wait_until(self.moment)
        moment = self.moment.isoformat()
        yield TaskSuccessEvent() if self.end_from_trigger else TriggerEvent(moment, identity=moment)


class LaterTrigger(DateTimeTrigger):
    """Fires some time after a point in time, such as the time of a run.

    It serializes as a `DateTimeTrigger`.

    Args:
        moment: A datetime, or a string in ISO 8601; without a time zone it is UTC.
        delay: The time after it, as a timedelta or in seconds.
        end_from_trigger: See `DateTimeTrigger`.
    """

    def __init__(
        self, moment: datetime | str, *, delay: timedelta | float = 0.0, end_from_trigger: bool = False
    ) -> None:
        if isinstance(moment, str):
            moment = _read_text(moment)
        if isinstance(moment, datetime) and moment.utcoffset() is None:
            moment = moment.replace(tzinfo=UTC)
        super().__init__(moment, end_from_trigger=end_from_trigger)
        span = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
        self.moment = _parse_moment(self.moment + make_plain_duration(span))


class TimeOfDayTrigger(DateTimeTrigger):
    """Fires at a time of the day on which a task has started.

    It serializes as a `DateTimeTrigger`.

    Args:
        start: When the task started: a datetime with a time zone, or a string in ISO 8601 with one.
        time: The time of day.
        zone: The IANA name of the time zone, if the time has none.
        end_from_trigger: See `DateTimeTrigger`.
    """

    def __init__(self, start: datetime | str, *, time: time, zone: str = "UTC", end_from_trigger: bool = False) -> None:
        place = time.tzinfo or ZoneInfo(zone)
        day = _parse_moment(start).astimezone(place).date()
        moment = datetime.combine(day, time.replace(tzinfo=None), place)
        super().__init__(moment, end_from_trigger=end_from_trigger)


class TimeDeltaTrigger(DateTimeTrigger):
    """Fires once, some time after its first creation.

    It serializes as a `DateTimeTrigger`, so recreating it elsewhere does not restart the wait.

    Args:
        delta: The duration, as a timedelta or in seconds.

    Raises:
        TypeError: The argument is neither.
        ValueError: The resulting time is after the year 9999 or before the year 1.
    """

    def __init__(self, delta: timedelta | float) -> None:
        if isinstance(delta, bool) or not isinstance(delta, timedelta | int | float):
            raise TypeError(f"delta must be a timedelta or a number of seconds, got {type(delta).__name__}")
        try:
            span = make_plain_duration(delta if isinstance(delta, timedelta) else timedelta(seconds=delta))
            moment = _now() + span
        except (OverflowError, ValueError) as error:
            raise ValueError(f"delta {delta} ends outside the years 1 to 9999; give a shorter time") from error
        super().__init__(moment)


def _read_text(moment: str) -> datetime:
    try:
        return datetime.fromisoformat(moment.strip())
    except ValueError as error:
        raise ValueError(
            f"moment {moment!r} is not a date and time in ISO 8601, like 2030-01-31T12:00:00+00:00"
        ) from error


def _parse_moment(moment: object) -> datetime:
    if isinstance(moment, str):
        moment = _read_text(moment)
    if not isinstance(moment, datetime):
        raise TypeError(f"moment must be a datetime or a string in ISO 8601, got {type(moment).__name__}")
    if moment.utcoffset() is None:
        raise ValueError(
            f"moment {moment.isoformat()} has no time zone, so its meaning would depend on the host; add a zone, for "
            f"example {moment.isoformat()}+00:00"
        )
    return make_plain_moment(moment).astimezone(UTC)
