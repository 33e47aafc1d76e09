"""Texts that are recorded."""

from __future__ import annotations

from tidemill.recorder.format.recordable_text import MAX_NAME_CHARS, classify_error


def test_an_error_class_is_masked_before_it_is_cut() -> None:
    """Else half of an address would be left, without the @ that tells what is a password."""
    for length in range(960, 1_000):
        found = classify_error("x" * length + " http://me:hunter2hunter2hunter2@host/path")
        assert "hunter" not in found
        assert len(found) <= MAX_NAME_CHARS


def test_the_class_of_a_long_error_is_that_of_its_beginning() -> None:
    first, second = ("no room for order: " + "x" * 2_000 + end for end in ("a", "b"))
    assert classify_error(first) == classify_error(second)
