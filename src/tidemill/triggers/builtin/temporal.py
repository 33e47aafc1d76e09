"""Triggers that wait for a point in time.

The wall clock decides. It is read at least once a minute, so a clock change or a suspended machine is noticed soon. A
trigger never fires early.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from tidemill.core.plain_times import make_plain_duration, make_plain_moment
from tidemill.triggers.base import BaseTrigger, TriggerEvent

#: The longest sleep before the clock is read again.
LOOK_SECONDS: Final = 60.0


def _now() -> datetime:
    return datetime.now(UTC)


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

    Raises:
        TypeError: The argument is neither.
        ValueError: There is no time zone, or the string is not a date and time.
    """

    def __init__(self, moment: datetime | str) -> None:
        super().__init__()
        self.moment = _parse_moment(moment)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the classpath and arguments of this trigger."""
        return "tidemill.triggers.builtin.temporal.DateTimeTrigger", {"moment": self.moment.isoformat()}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, then fire."""
        await wait_until(self.moment)
        moment = self.moment.isoformat()
        yield TriggerEvent(moment, identity=moment)


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


def _parse_moment(moment: object) -> datetime:
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError as error:
            raise ValueError(
                f"moment {moment!r} is not a date and time in ISO 8601, like 2030-01-31T12:00:00+00:00"
            ) from error
    if not isinstance(moment, datetime):
        raise TypeError(f"moment must be a datetime or a string in ISO 8601, got {type(moment).__name__}")
    if moment.utcoffset() is None:
        raise ValueError(
            f"moment {moment.isoformat()} has no time zone, so its meaning would depend on the host; add a zone, for "
            f"example {moment.isoformat()}+00:00"
        )
    return make_plain_moment(moment).astimezone(UTC)
