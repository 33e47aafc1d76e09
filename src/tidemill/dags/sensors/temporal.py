"""Sensors that wait for a time. Those under Airflow's names with `Async` are the same: all of them defer."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any, NoReturn
from zoneinfo import ZoneInfo

from tidemill.dags.arguments import check_duration
from tidemill.dags.exceptions import DagError, SensorTimeout, TaskSkipped
from tidemill.dags.sensors.base import BaseSensorOperator
from tidemill.triggers.builtin.temporal import DateTimeTrigger


class _MomentSensor(BaseSensorOperator):
    """Waits for a moment."""

    def execute(self, context: Any) -> Any:
        """Defer until the moment; at once if it has passed."""
        moment, now = self.find_moment(context), datetime.now(UTC)
        if moment <= now:
            return None
        if moment - now > timedelta(seconds=max(self.timeout, 1.0)):
            self.refuse(moment, now)
        self.wait_for(DateTimeTrigger(moment))

    def refuse(self, moment: datetime, now: datetime) -> NoReturn:
        """Fail, or skip, at once instead of after the timeout: the moment comes later."""
        message = (
            f"the moment that the sensor waits for, {moment.isoformat()}, comes in {moment - now}, which is beyond its "
            f"timeout of {timedelta(seconds=self.timeout)}; give it a longer timeout"
        )
        if self.soft_fail or self.never_fail:
            raise TaskSkipped(message)
        raise SensorTimeout(message)

    def find_moment(self, context: Any) -> datetime:
        """Return the moment."""
        raise NotImplementedError

    def complete(self, context: Any, event: Any = None) -> None:
        """Return nothing: the moment is known."""
        return


class DateTimeSensor(_MomentSensor):
    """Waits for a moment.

    Args:
        target_time: A datetime, or a text in ISO 8601, which may be a template; without a time zone it is UTC.
        kwargs: The arguments of `BaseSensorOperator`.
    """

    template_fields = ("target_time",)

    def __init__(self, *, target_time: datetime | str, **kwargs: Any) -> None:
        """Keep it as text, for the template."""
        super().__init__(**kwargs)
        # The output of another task is one, too.
        self.target_time: Any = target_time.isoformat() if isinstance(target_time, datetime) else target_time

    def find_moment(self, context: Any) -> datetime:
        """Return the rendered time."""
        found = self.target_time
        moment = found if isinstance(found, datetime) else datetime.fromisoformat(str(found).strip())
        return moment.replace(tzinfo=UTC) if moment.utcoffset() is None else moment


class TimeSensor(_MomentSensor):
    """Waits for a time of the day on which it starts.

    Args:
        target_time: The time; without a time zone it is in that of the DAG's `start_date`.
        kwargs: The arguments of `BaseSensorOperator`.
    """

    def __init__(self, *, target_time: time, **kwargs: Any) -> None:
        """Check it."""
        super().__init__(**kwargs)
        if not isinstance(target_time, time):
            raise DagError(f"task {self.task_id!r}: target_time must be a datetime.time, got {target_time!r}")
        self.target_time = target_time

    def find_moment(self, context: Any) -> datetime:
        """Return the time of today."""
        zone = self.target_time.tzinfo or ZoneInfo(self.dag.timetable.zone)
        started = context["ti"].start_date.astimezone(zone)
        return datetime.combine(started.date(), self.target_time.replace(tzinfo=None), zone)


class TimeDeltaSensor(_MomentSensor):
    """Waits until some time after the logical date; without one, after the begin of the run.

    Args:
        delta: The time, as a timedelta or in seconds.
        kwargs: The arguments of `BaseSensorOperator`.
    """

    def __init__(self, *, delta: timedelta | float, **kwargs: Any) -> None:
        """Check it."""
        super().__init__(**kwargs)
        self.delta = check_duration(f"task {self.task_id!r}", "delta", delta, zero=True)

    def find_moment(self, context: Any) -> datetime:
        """Return the moment."""
        run = context["dag_run"]
        begin: datetime = run.data_interval_end or run.logical_date or run.start_date
        return begin + self.delta


class DateTimeSensorAsync(DateTimeSensor):
    """A `DateTimeSensor`."""


class TimeSensorAsync(TimeSensor):
    """A `TimeSensor`."""


class TimeDeltaSensorAsync(TimeDeltaSensor):
    """A `TimeDeltaSensor`."""
