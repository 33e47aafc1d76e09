"""The page of the metrics says what the code says."""

from __future__ import annotations

from tests.docs.metrics_page import PAGE, TABLES, page


def test_the_tables_are_those_that_the_code_gives() -> None:
    text = PAGE.read_text()
    assert all(definition.full_name in text for definitions in TABLES.values() for definition in definitions)
    assert text == page(text), "write them again: python -m tests.docs.metrics_page"
