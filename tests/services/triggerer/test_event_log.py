"""The log lines of stored events: one each, up to a limit, and a count of the others."""

from __future__ import annotations

from structlog.testing import capture_logs

from tidemill.core.triggers.event_plan import Duplicate, EventStored
from tidemill.services.triggerer.hosting.event_log import INTERVAL_SECONDS, MAX_LINES, HostEventLog


def test_each_event_has_a_line_up_to_the_limit_and_the_rest_is_counted() -> None:
    with capture_logs() as lines:
        events = HostEventLog(now=100.0)
        for number in range(MAX_LINES + 7):
            events.note("fires", EventStored(number), f"id-{number}")
        events.flush(100.0 + INTERVAL_SECONDS - 0.1)
        assert len(lines) == MAX_LINES
        events.flush(100.0 + INTERVAL_SECONDS)
    assert lines[0] == {
        "event": "event stored", "log_level": "info", "trigger": "fires", "sequence": 0, "identity": "id-0"
    }  # fmt: skip
    assert lines[MAX_LINES:] == [
        {"event": "more events stored", "log_level": "info", "left_out": 7, "in_seconds": INTERVAL_SECONDS}
    ]


def test_a_new_interval_has_lines_again_and_no_omission_is_logged_for_none() -> None:
    with capture_logs() as lines:
        events = HostEventLog(now=0.0)
        for number in range(MAX_LINES):
            events.note("fires", EventStored(number), None)
        events.flush(INTERVAL_SECONDS)
        events.note("fires", EventStored(MAX_LINES), None)
        events.flush(INTERVAL_SECONDS * 2)
    assert len(lines) == MAX_LINES + 1
    assert "identity" not in lines[-1]


def test_the_number_of_omitted_lines_is_logged_at_the_end_and_duplicates_are_not_events() -> None:
    with capture_logs() as lines:
        events = HostEventLog(now=0.0)
        for number in range(MAX_LINES):
            events.note("fires", Duplicate(number), "again")
        for number in range(MAX_LINES + 1):
            events.note("fires", EventStored(number), "x" * 1000)
        events.flush(0.5, last=True)
    assert len(lines) == MAX_LINES + 1
    assert lines[-1]["left_out"] == 1
    assert len(lines[0]["identity"]) == 100
