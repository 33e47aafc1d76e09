"""What an HTTP answer means to a poll that waits for a condition.

Invariants: a status that is waited for is never an error, whatever it is; what may
be temporary is retried; what a retry cannot change is refused at once.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

#: The resource does not exist, is not ready, or is in another state: a poll waits for that to change.
_NOT_YET = frozenset({404, 409, 410, 423, 425})
#: The server, or something on the way to it, cannot answer at the moment.
_PASSING = frozenset({408, 429})


class PollAnswer(enum.Enum):
    """What to do about an answer."""

    EXPECTED = "expected"
    NOT_YET = "not yet"
    FAILED = "failed"
    REFUSED = "refused"


def judge_answer(status: int, expected: Collection[int]) -> PollAnswer:
    """Return what a status means.

    Args:
        status: Of the answer.
        expected: What is waited for.

    Example:
        >>> [judge(status, {200}).value for status in (200, 404, 503, 401)]
        ['expected', 'not yet', 'failed', 'refused']
    """
    if status in expected:
        return PollAnswer.EXPECTED
    if 200 <= status < 300 or status in _NOT_YET:
        return PollAnswer.NOT_YET
    if status >= 500 or status in _PASSING:
        return PollAnswer.FAILED
    return PollAnswer.REFUSED


def retry_after_seconds(header: str | None, maximum_seconds: float) -> float:
    """Return the seconds of a Retry-After header; 0 if it has another form.

    Args:
        header: The answer's `Retry-After`, whose other form, a date, is not read: it needs two clocks to agree.
        maximum_seconds: No server is obeyed for longer.
    """
    text = (header or "").strip()
    if not (text.isascii() and text.isdigit()):
        return 0.0
    return maximum_seconds if len(text) > 9 else min(float(text), maximum_seconds)
