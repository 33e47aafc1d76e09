"""Numbers in sentences."""

from __future__ import annotations

import pytest

from tidemill.core.wording import format_count


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [
        (0, "message", "0 messages"),
        (1, "message", "1 message"),
        (1_200, "message", "1,200 messages"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
    ],
)
def test_a_noun_follows_its_number(count: int, noun: str, expected: str) -> None:
    assert format_count(count, noun) == expected
