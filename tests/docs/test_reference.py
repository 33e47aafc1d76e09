"""The reference says what the code says."""

from __future__ import annotations

from tests.docs.reference import PAGE, page


def test_the_configuration_page_is_the_one_that_the_code_gives():
    assert PAGE.read_text() == page(), "write it again: python -m tests.docs.reference"
