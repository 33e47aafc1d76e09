"""What is reported of the end of a trigger's run: each permanent end once, failures in words that suffice."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from tidemill.core.errors import ConfigError
from tidemill.core.triggers.lifecycle import CancelReason, EndVerdict, Next
from tidemill.services.triggerer.hosting.ending import format_fault, report_ending
from tidemill.store.records import TriggerSpec

SPEC = TriggerSpec("nightly", "tidemill.triggers.builtin.file.FileTrigger", '{"path": "x"}')


def test_a_trigger_that_ends_for_good_is_logged_without_a_reason_that_it_does_not_have() -> None:
    with capture_logs() as logs:
        report_ending(SPEC, 1, 1, Next(EndVerdict.FINISHED), None, None)
        report_ending(SPEC, 1, 1, Next(EndVerdict.CANCELLED), CancelReason.USER, None)
    entry = {"event": "a trigger ended", "log_level": "info", "trigger": "nightly"}
    assert logs == [entry | {"verdict": "finished"}, entry | {"verdict": "cancelled", "reason": "user"}]


def test_a_trigger_that_begins_again_each_time_does_not_fill_the_log() -> None:
    with capture_logs() as logs:
        change = report_ending(SPEC, 1, 1, Next(EndVerdict.FINISHED, pause_seconds=1.0), None, None)
    assert [entry["log_level"] for entry in logs] == ["debug"]
    assert change.error is None


def test_an_error_whose_message_says_everything_has_no_traceback_and_shows_no_secret() -> None:
    with capture_logs() as logs:
        change = report_ending(SPEC, 1, 1, Next(EndVerdict.FAILED, 2.0), None, ConfigError("API_TOKEN is not set"))
    assert change.error == logs[0]["error"] == "API_TOKEN is not set"
    assert "hunter2" not in format_fault(ConfigError("postgres://app:hunter2@db is not reached"))


def test_an_error_with_a_cause_and_an_unexpected_error_keep_their_traceback() -> None:
    with pytest.raises(ConfigError) as wrapped:
        try:
            raise ValueError("seven")
        except ValueError as error:
            raise ConfigError("not a number") from error
    assert "ValueError: seven" in format_fault(wrapped.value)
    assert "Traceback" in format_fault(wrapped.value)
    with pytest.raises(KeyError) as unexpected:
        {}["a"]
    assert "Traceback" in format_fault(unexpected.value)
