"""Two schedulers over a change of a zone's clocks, one of them late or frozen: each due time has one run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.tasks.structure import ScheduleStructure
from tidemill.core.tasks.timetable import next_time

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
MINUTE_US = 60_000_000
#: Changes by an hour, half an hour and two hours, at night and at midnight, and where summer is the standard time.
ZONES = (
    *("Europe/Vienna", "America/New_York", "America/Santiago", "Asia/Beirut", "Africa/Casablanca", "Europe/Dublin"),
    *("Australia/Lord_Howe", "Antarctica/Troll", "Pacific/Chatham"),
)
KINDS = ("30 2 * * *", "0 0 * * *", "15 1 * * *", "*/30 * * * *", "interval")
changes = st.sampled_from([(zone, number) for zone in ZONES for number in range(4)])
#: A turn: minutes since the one before, and for how many minutes its scheduler was frozen after it had read the time.
turns = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([0, 0, 1, 90, 600])), max_size=60)


def us(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


@cache
def find_changes(zone: str) -> list[datetime]:
    """Return when the clocks of a zone change in 2026 and 2027, to the minute."""
    place, found = ZoneInfo(zone), []
    hours = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=number) for number in range(2 * 8760)]
    for hour in hours:
        minutes = [hour + MINUTE * number for number in range(61)]
        if hour.astimezone(place).utcoffset() != minutes[-1].astimezone(place).utcoffset():
            offsets = [one.astimezone(place).utcoffset() for one in minutes]
            found.append(next(one for one, offset in zip(minutes, offsets, strict=True) if offset != offsets[0]))
    return found


@dataclass
class Times:
    """What is due around a change."""

    schedule: ScheduleStructure
    begin: datetime
    end: datetime
    due: list[int]


@cache
def list_due(zone: str, change: datetime, kind: str) -> Times:
    """Try each minute of three days."""
    begin, end, place = change - timedelta(hours=36), change + timedelta(hours=36), ZoneInfo(zone)
    begin = begin.replace(minute=7)
    minutes = [begin + MINUTE * number for number in range((end - begin) // MINUTE + 1)]
    if kind == "interval":
        due = [us(one) for one in minutes if (one - begin) % timedelta(minutes=45) == timedelta()]
        schedule = ScheduleStructure("interval", interval_us=45 * MINUTE_US)
    elif kind == "*/30 * * * *":
        due = [us(one) for one in minutes if one.astimezone(place).minute % 30 == 0]
        schedule = ScheduleStructure("cron", cron=kind, zone=zone)
    else:
        minute, hour = map(int, kind.split()[:2])
        days: dict[object, datetime] = {}
        for one in minutes:
            local = one.astimezone(place)
            if (local.hour, local.minute) >= (hour, minute):
                days.setdefault(local.date(), one)
        # The first date may have begun before.
        due = [us(one) for one in days.values() if one != begin]
        schedule = ScheduleStructure("cron", cron=kind, zone=zone)
    return Times(schedule, begin, end, due)


@dataclass
class Row:
    """A DAG's row, as `store.queries.dags.scheduling.schedule` treats it: one scheduler at a time."""

    schedule: ScheduleStructure
    known_us: int
    last_us: int | None = None
    runs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.next_us = next_time(self.schedule, None, self.known_us, self.known_us)

    def take_turn(self, now_us: int) -> bool:
        """Create the run that is due; return whether there was one."""
        if self.next_us is None or self.next_us > now_us:
            return False
        due_us = next_time(self.schedule, self.last_us, self.known_us, now_us)
        created = due_us is not None and due_us <= now_us
        if created:
            assert due_us is not None
            self.runs.append(due_us)
            self.last_us = due_us
        self.next_us = next_time(self.schedule, self.last_us, self.known_us, now_us)
        return created


@given(changes, st.sampled_from(KINDS), turns, st.booleans())
def test_each_due_time_has_one_run_whenever_two_schedulers_take_their_turns_over_a_change_of_clocks(
    change: tuple[str, int], kind: str, turns: list[tuple[int, int]], catchup: bool
) -> None:
    zone, number = change
    found = find_changes(zone)
    times = list_due(zone, found[number % len(found)], kind)
    begin_us, end_us = us(times.begin), us(times.end)
    # With a start, every time since then is made up for.
    schedule = replace(times.schedule, start_us=begin_us, catchup=catchup)
    # The DAG is known since the moment before.
    row, now_us = Row(schedule, begin_us - 1), begin_us
    seen: set[int] = set()
    for minutes, frozen in turns:
        now_us = min(now_us + minutes * MINUTE_US, end_us)
        read_us = now_us - frozen * MINUTE_US
        row.take_turn(read_us)
        # The time passed meanwhile for the other scheduler.
        if read_us >= max(seen, default=0):
            seen.add(read_us)
    while row.take_turn(end_us):
        pass

    assert row.runs == sorted(set(row.runs))
    if catchup:
        assert row.runs == times.due
    else:
        assert set(row.runs) <= set(times.due)
        assert row.runs[-1] == times.due[-1]
        # What was due between two turns that were in time has run.
        for due_us in times.due:
            following = min((one for one in times.due if one > due_us), default=end_us + 1)
            if any(due_us <= one < following for one in seen):
                assert due_us in row.runs


@pytest.mark.parametrize(("zone", "count"), [("Europe/Vienna", 4), ("Africa/Casablanca", 4)])
def test_the_zones_change_their_clocks_in_spring_and_autumn(zone: str, count: int) -> None:
    found = find_changes(zone)
    assert len(found) == count
