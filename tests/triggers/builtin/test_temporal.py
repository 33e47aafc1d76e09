"""Triggers that wait for a moment."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from tests.triggers.builtin.triggers_contract import fired, made_again

from tidemill.triggers.builtin.temporal import LOOK_SECONDS, DateTimeTrigger, TimeDeltaTrigger, wait_until

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)


class Wall:
    """A clock on the wall that sleeping moves, and that somebody may set."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.slept: list[float] = []
        self.set_by: dict[int, timedelta] = {}

    def __call__(self) -> datetime:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        assert len(self.slept) < 10_000
        self.now += timedelta(seconds=seconds) + self.set_by.get(len(self.slept), timedelta())


async def test_a_moment_that_has_passed_fires_at_once_and_one_in_the_future_not_before_it():
    past = datetime.now(UTC) - timedelta(days=1)
    (event,) = await fired(DateTimeTrigger(past), seconds=30)
    assert event.payload == event.identity == past.isoformat()
    soon = datetime.now(UTC) + timedelta(seconds=0.2)
    await fired(DateTimeTrigger(soon))
    assert datetime.now(UTC) >= soon


async def test_a_far_moment_is_slept_for_in_pieces_and_never_beyond_it():
    wall = Wall(NOON - timedelta(days=2, seconds=1.5))
    await wait_until(NOON, wall, wall.sleep)
    assert max(wall.slept) == LOOK_SECONDS
    assert wall.now == NOON


async def test_a_moment_at_the_end_of_the_calendar_can_be_waited_for():
    waiting = asyncio.ensure_future(fired(DateTimeTrigger(datetime.max.replace(tzinfo=UTC)), seconds=60))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])


@pytest.mark.parametrize(("step", "slept"), [(timedelta(hours=1), 1), (-timedelta(hours=1), 180)])
async def test_a_clock_that_is_set_is_noticed_within_a_minute(step, slept):
    wall = Wall(NOON - timedelta(hours=1))
    wall.set_by = {1: step} if slept == 1 else {60: step * 2}
    await wait_until(NOON, wall, wall.sleep)
    assert wall.now >= NOON
    assert len(wall.slept) == slept


@pytest.mark.parametrize(
    "moment",
    [
        NOON,
        "2030-01-31T12:00:00+00:00",
        "2030-01-31T12:00:00Z",
        "2030-01-31T13:00+01:00",
        datetime(2030, 1, 31, 13, tzinfo=timezone(timedelta(hours=1))),
    ],
)
def test_a_moment_is_the_same_in_every_form_and_zone(moment):
    trigger = DateTimeTrigger(moment)
    assert trigger.moment == NOON
    assert trigger.serialize()[1] == {"moment": "2030-01-31T12:00:00+00:00"}
    made_again(trigger)


@pytest.mark.parametrize(
    ("moment", "error", "said"),
    [
        (datetime(2030, 1, 31, 12), ValueError, "has no time zone.*2030-01-31T12:00:00[+]00:00"),
        ("2030-01-31T12:00:00", ValueError, "has no time zone"),
        ("noon", ValueError, "'noon' is not a date and time in ISO 8601"),
        (date(2030, 1, 31), TypeError, "got date"),
        (1_900_000_000, TypeError, "got int"),
    ],
)
def test_a_value_that_is_not_a_moment_is_refused(moment, error, said):
    with pytest.raises(error, match=said):
        DateTimeTrigger(moment)


def test_a_duration_is_serialized_as_a_moment_so_that_its_clock_starts_once():
    before = datetime.now(UTC)
    trigger = TimeDeltaTrigger(timedelta(hours=1))
    after = datetime.now(UTC)
    again = made_again(trigger)
    assert type(again) is DateTimeTrigger
    assert before + timedelta(hours=1) <= again.moment <= after + timedelta(hours=1)
    assert again.moment == trigger.moment


async def test_a_duration_in_seconds_is_waited_for():
    trigger = TimeDeltaTrigger(0.2)
    await fired(trigger)
    assert datetime.now(UTC) >= trigger.moment


@pytest.mark.parametrize(
    ("delta", "error", "said"),
    [
        ("1h", TypeError, "got str"),
        (True, TypeError, "got bool"),
        (timedelta.max, ValueError, "ends outside the years 1 to 9999"),
        (1e300, ValueError, "ends outside the years 1 to 9999"),
        (float("nan"), ValueError, "ends outside the years 1 to 9999"),
    ],
)
def test_a_value_that_is_not_a_duration_is_refused(delta, error, said):
    with pytest.raises(error, match=said):
        TimeDeltaTrigger(delta)
