"""Numbers in sentences."""

from __future__ import annotations

import pytest

from tidemill.core.wording import count_of


@pytest.mark.parametrize(
    ("count", "noun", "plural", "expected"),
    [
        (0, "message", "", "0 messages"),
        (1, "message", "", "1 message"),
        (1_200, "message", "", "1,200 messages"),
        (1, "entry", "entries", "1 entry"),
        (2, "entry", "entries", "2 entries"),
    ],
)
def test_a_noun_follows_its_number(count: int, noun: str, plural: str, expected: str) -> None:
    assert count_of(count, noun, plural) == expected
