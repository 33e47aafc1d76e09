"""Judges HTTP responses to a poll that waits for a condition.

Invariants: an expected status is never an error, whatever it is; statuses that may be temporary are retried; statuses
that a retry cannot change are refused at once.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

#: The resource does not exist, is not ready, or is in another state: a poll waits for that to change.
_NOT_YET = frozenset({404, 409, 410, 423, 425})
#: The server, or a proxy in front of it, is temporarily unable to answer.
_TRANSIENT = frozenset({408, 429})


class PollAnswer(enum.Enum):
    EXPECTED = "expected"
    NOT_YET = "not yet"
    FAILED = "failed"
    REFUSED = "refused"


def judge_answer(status: int, expected: Collection[int]) -> PollAnswer:
    """Return the meaning of a status.

    Args:
        status: The status of the response.
        expected: The statuses that the poll waits for.

    Example:
        >>> [judge_answer(status, {200}).value for status in (200, 404, 503, 401)]
        ['expected', 'not yet', 'failed', 'refused']
    """
    if status in expected:
        return PollAnswer.EXPECTED
    if 200 <= status < 300 or status in _NOT_YET:
        return PollAnswer.NOT_YET
    if status >= 500 or status in _TRANSIENT:
        return PollAnswer.FAILED
    return PollAnswer.REFUSED


def parse_retry_after(header: str | None, maximum_seconds: float) -> float:
    """Return the seconds of a Retry-After header; 0 if it has another form.

    Args:
        header: The `Retry-After` header. A date is ignored, because it would need two clocks to agree.
        maximum_seconds: The upper bound of the result.
    """
    text = (header or "").strip()
    if not (text.isascii() and text.isdigit()):
        return 0.0
    return maximum_seconds if len(text) > 9 else min(float(text), maximum_seconds)
