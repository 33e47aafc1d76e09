"""Tables for people: aligned, as wide as the terminal, readable from 40 columns up."""

from __future__ import annotations

import pytest

from tidemill.cli.terminal.status_text import count_cells
from tidemill.cli.terminal.tables import Column, find_width, format_age, format_table, wrap

COLUMNS = (
    Column("NAME", cut=True),
    Column("EVENTS", right=True),
    Column("RUNS IN", optional=True),
    Column("LIST", optional=True),
    Column("ERROR", detail=True),
)
ROWS = (
    ("orders", "12", "host/7", "", ""),
    ("a-trigger-with-a-long-name", "1,200", "host/8", "", "OSError: [Errno 28] No space left on device: '/data/x'"),
)


def table(width: int | None) -> list[str]:
    return list(format_table(COLUMNS, ROWS, width))


def test_with_room_everything_is_on_one_line_and_empty_columns_are_left_out() -> None:
    assert table(None) == [
        "NAME                        EVENTS  RUNS IN  ERROR",
        "orders                          12  host/7",
        "a-trigger-with-a-long-name   1,200  host/8   OSError: [Errno 28] No space left on device: '/data/x'",
    ]


def test_a_narrow_terminal_gets_fewer_columns_and_details_on_lines_of_their_own() -> None:
    assert table(40) == [
        "NAME                        EVENTS",
        "orders                          12",
        "a-trigger-with-a-long-name   1,200",
        "    OSError: [Errno 28] No space left on",
        "    device: '/data/x'",
    ]


def test_a_detail_is_cut_before_it_moves_down() -> None:
    assert table(80)[2] == "a-trigger-with-a-long-name   1,200  host/8   OSError: [Errno 28] No space lef..."


@pytest.mark.parametrize("width", range(20, 130))
def test_no_line_is_longer_than_the_width(width: int) -> None:
    rows = [*ROWS, ("\u6570\u636e" * 10, "3", "h", "l", "\u6570\u636e" * 60), ("x" * 200, "1", "", "", "y" * 500)]
    lines = list(format_table(COLUMNS, rows, width))
    assert max(map(count_cells, lines)) <= width, lines


def test_control_characters_of_the_data_never_reach_the_terminal() -> None:
    lines = list(format_table([Column("A"), Column("B")], [("\x1b[2J\n", "b\tc")], None))
    assert lines[1] == " [2J   b c"


def test_a_column_that_is_too_narrow_for_its_title_still_fits() -> None:
    assert list(format_table([Column("OUTSTANDING", right=True), Column("X")], [("3", "y")], None)) == [
        "OUTSTANDING  X",
        "          3  y",
    ]


@pytest.mark.parametrize(
    ("seconds", "age"),
    [(-5, "0s"), (0.9, "0s"), (59.9, "59s"), (60, "1m"), (3_599, "59m"), (3_600, "1h"), (86_400 * 400, "400d")],
)
def test_ages_are_in_their_largest_unit(seconds: float, age: str) -> None:
    assert format_age(seconds) == age


def test_a_text_is_wrapped_with_its_indent_and_at_most_so_many_lines() -> None:
    assert wrap("one two three four", 9, indent="  ", lines=2) == ["  one two", "  ..."]
    assert wrap("one two", None, indent=" ") == [" one two"]


def test_only_a_terminal_or_columns_limit_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert find_width() is None
    monkeypatch.setenv("COLUMNS", "57")
    assert find_width() == 57
