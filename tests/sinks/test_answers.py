"""The account of answers that sinks keep while they send a batch in parts."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from tidemill.core.errors import RemoteError
from tidemill.sinks.base import WAITS, Answers, Encoded, Refusal

NEVER = Refusal("never", retryable=False)


def answers_for(*keys: Hashable) -> Answers:
    return Answers([Encoded(key, b"", 0) for key in keys])


def test_later_payloads_of_a_refused_key_wait_and_others_may_be_sent() -> None:
    answers = answers_for("a", "b", "a", None, None)
    answers.refuse(0, NEVER)
    answers.refuse(3, NEVER)
    assert list(answers.filter_sendable([1, 2, 4])) == [1, 4]
    answers.confirm([1, 4])
    assert answers.collect() == [NEVER, None, WAITS, NEVER, None]


def test_a_payload_does_not_wait_for_a_later_one_of_its_key() -> None:
    answers = answers_for("a", "a", "a", "a")
    answers.refuse(2, NEVER)
    assert list(answers.filter_sendable([0, 1, 3])) == [0, 1]
    answers.refuse(0, NEVER)
    assert list(answers.filter_sendable([1])) == []
    assert answers.collect() == [NEVER, WAITS, NEVER, WAITS]


def test_when_the_target_fails_half_way_what_waits_is_not_counted_as_tried() -> None:
    answers = answers_for("a", "b", "a", "c")
    answers.confirm([1])
    answers.refuse(0, NEVER)
    assert answers.collect(RemoteError("gone")) == [NEVER, None, WAITS, Refusal("gone", retryable=True)]


def test_a_target_that_fails_before_anything_is_known_fails_the_batch() -> None:
    with pytest.raises(RemoteError, match="gone"):
        answers_for("a", "b").collect(RemoteError("gone"))
