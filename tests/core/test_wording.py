"""Numbers in sentences, and sentences in one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.wording import format_count, shorten, to_one_line


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


@given(st.text())
def test_a_text_in_one_line_is_printable_and_keeps_what_was(text: str) -> None:
    line = to_one_line(text)

    assert line.isprintable()
    assert to_one_line(line) == line
    assert line == text or not text.isprintable()


def test_line_breaks_become_spaces_and_control_characters_are_escaped() -> None:
    assert to_one_line("the file is damaged:\n  no header\r\n\n") == "the file is damaged: no header"
    assert to_one_line("a \x1b[31m key") == "a \\x1b[31m key"


def test_a_text_is_cut_where_it_is_too_long() -> None:
    assert [shorten(text, 3) for text in ("", "abc", "abcd")] == ["", "abc", "abc..."]
    assert len(shorten("x" * 1_000)) == 203
