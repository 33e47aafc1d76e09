"""Sensors that wait for a point in time. Airflow's names ending in `Async` are aliases, because every sensor defers."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any, NoReturn
from zoneinfo import ZoneInfo

from tidemill.dags.arguments import check_duration
from tidemill.dags.exceptions import DagError, SensorTimeout, TaskSkipped
from tidemill.dags.sensors.base import BaseSensorOperator
from tidemill.runtime.store_clock import STORE_CLOCK
from tidemill.triggers.base import BaseTrigger, StartTriggerArgs
from tidemill.triggers.builtin.temporal import DateTimeTrigger, LaterTrigger, TimeOfDayTrigger

#: A template of the time of a run.
_RUN_TIME = "{{ dag_run.data_interval_end or dag_run.logical_date or dag_run.start_date }}"


class _MomentSensor(BaseSensorOperator):
    """Base of sensors that wait for a point in time.

    With `start_from_trigger=True` they use no worker at all, unless a subclass overrides `complete`.
    """

    def execute(self, context: Any) -> Any:
        """Defer until that time; return at once if it has passed."""
        moment, now = self.find_moment(context), STORE_CLOCK.now()
        if moment <= now:
            return None
        if moment - now > timedelta(seconds=max(self.timeout, 1.0)):
            self.refuse(moment, now)
        self.wait_for(DateTimeTrigger(moment))

    def refuse(self, moment: datetime, now: datetime) -> NoReturn:
        """Fail or skip now rather than after the timeout, because the time is beyond the timeout."""
        message = (
            f"the sensor waits for {moment.isoformat()}, which is {moment - now} away, but its timeout is "
            f"{timedelta(seconds=self.timeout)}; set a longer timeout"
        )
        if self.soft_fail or self.never_fail:
            raise TaskSkipped(message)
        raise SensorTimeout(message)

    def find_moment(self, context: Any) -> datetime:
        """Return the time to wait for."""
        raise NotImplementedError

    def complete(self, context: Any, event: Any = None) -> None:
        """Return None; the time carries no result."""
        return

    def wait_from_start(self, trigger: type[BaseTrigger], **kwargs: Any) -> StartTriggerArgs:
        """Return how the sensor starts, and ends, in a trigger with these arguments."""
        if self.start_trigger_args is not None:
            return self.start_trigger_args
        ends = type(self).complete is _MomentSensor.complete
        return self.start_with(trigger, {**kwargs, "end_from_trigger": ends}, ends=ends)


class DateTimeSensor(_MomentSensor):
    """Waits until a date and time.

    Args:
        target_time: A datetime, or a string in ISO 8601, which may be a template; without a time zone it is UTC.
        kwargs: The arguments of `BaseSensorOperator`.
    """

    template_fields = ("target_time",)

    def __init__(self, *, target_time: datetime | str, **kwargs: Any) -> None:
        """Store the time as a string, so that it can be rendered."""
        super().__init__(**kwargs)
        # `target_time` may also be the output of another task.
        self.target_time: Any = target_time.isoformat() if isinstance(target_time, datetime) else target_time

    def find_moment(self, context: Any) -> datetime:
        """Return the rendered time."""
        found = self.target_time
        moment = found if isinstance(found, datetime) else datetime.fromisoformat(str(found).strip())
        return moment.replace(tzinfo=UTC) if moment.utcoffset() is None else moment

    def make_start_args(self) -> StartTriggerArgs:
        """Return how the sensor starts in a trigger; see `BaseOperator.make_start_args`."""
        return self.wait_from_start(LaterTrigger, moment=self.target_time)


class TimeSensor(_MomentSensor):
    """Waits until a time on the day on which it starts.

    Args:
        target_time: The time; without a time zone, in the zone of the DAG's `start_date`.
        kwargs: The arguments of `BaseSensorOperator`.
    """

    def __init__(self, *, target_time: time, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not isinstance(target_time, time):
            raise DagError(f"task {self.task_id!r}: target_time must be a datetime.time, got {target_time!r}")
        self.target_time = target_time

    def find_moment(self, context: Any) -> datetime:
        """Return the time on the day on which the task started."""
        zone = self.target_time.tzinfo or ZoneInfo(self.dag.timetable.zone)
        started = context["ti"].start_date.astimezone(zone)
        return datetime.combine(started.date(), self.target_time.replace(tzinfo=None), zone)

    def make_start_args(self) -> StartTriggerArgs:
        """Return how the sensor starts in a trigger; see `BaseOperator.make_start_args`."""
        zone = self.dag.timetable.zone
        return self.wait_from_start(TimeOfDayTrigger, start="{{ start_date }}", time=self.target_time, zone=zone)


class TimeDeltaSensor(_MomentSensor):
    """Waits until a duration has passed since the time of the run.

    That time is the end of its data interval, or else its logical date, or else its start.

    Args:
        delta: The duration, as a timedelta or in seconds.
        kwargs: The arguments of `BaseSensorOperator`.
    """

    def __init__(self, *, delta: timedelta | float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.delta = check_duration(f"task {self.task_id!r}", "delta", delta, zero=True)

    def find_moment(self, context: Any) -> datetime:
        """Return the time to wait for."""
        run = context["dag_run"]
        begin: datetime = run.data_interval_end or run.logical_date or run.start_date
        return begin + self.delta

    def make_start_args(self) -> StartTriggerArgs:
        """Return how the sensor starts in a trigger; see `BaseOperator.make_start_args`."""
        return self.wait_from_start(LaterTrigger, moment=_RUN_TIME, delay=self.delta)


class DateTimeSensorAsync(DateTimeSensor):
    """The same as `DateTimeSensor`."""


class TimeSensorAsync(TimeSensor):
    """The same as `TimeSensor`."""


class TimeDeltaSensorAsync(TimeDeltaSensor):
    """The same as `TimeDeltaSensor`."""
