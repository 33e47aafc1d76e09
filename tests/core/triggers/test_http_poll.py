"""What HTTP responses mean to a poll."""

from __future__ import annotations

import pytest

from tidemill.core.triggers.http_poll import PollAnswer, judge_answer, parse_retry_after


@pytest.mark.parametrize("status", [200, 404, 401, 503, 302])
def test_an_expected_status_is_expected_whatever_it_is(status):
    assert judge_answer(status, {status}) is PollAnswer.EXPECTED


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (202, PollAnswer.NOT_YET),
        (404, PollAnswer.NOT_YET),
        (409, PollAnswer.NOT_YET),
        (408, PollAnswer.FAILED),
        (429, PollAnswer.FAILED),
        (500, PollAnswer.FAILED),
        (503, PollAnswer.FAILED),
        (301, PollAnswer.REFUSED),
        (400, PollAnswer.REFUSED),
        (401, PollAnswer.REFUSED),
        (403, PollAnswer.REFUSED),
    ],
)
def test_other_statuses_are_waited_out_retried_or_refused(status, answer):
    assert judge_answer(status, {200}) is answer


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0),
        ("", 0),
        (" 5 ", 5),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0),
        ("-3", 0),
        ("²", 0),
        ("9" * 5000, 60),
        ("61", 60),
    ],
)
def test_retry_after_is_honoured_within_bounds(header, seconds):
    assert parse_retry_after(header, 60.0) == seconds
