"""Aligned tables for people, as wide as the terminal allows, from 40 columns up; times are shown as ages.

Invariants: control characters in the data never reach a terminal. No line is longer than the width. Columns that are
left out or truncated are complete in the output of `--json`.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidemill.cli.terminal.status_text import count_cells

#: The gap between two columns.
_GAP = "  "
#: A detail column narrower than this moves to lines of its own.
_DETAIL_WIDTH = 24
_DETAIL_LINES = 3
_DETAIL_INDENT = "    "
#: Columns are truncated to this many characters at most.
_NAME_WIDTH = 8
_AGES = ((86_400, "d"), (3_600, "h"), (60, "m"))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: The heading.
        right: Whether to align values to the right, for numbers.
        optional: Whether to leave the column out in a narrow terminal; the last ones are left out first.
        cut: Whether values may be truncated in a narrow terminal.
        detail: Whether this last column has long texts, which move to lines of their own in a narrow terminal.
    """

    title: str
    right: bool = False
    optional: bool = False
    cut: bool = False
    detail: bool = False


def find_width() -> int | None:
    """Return the width of standard output; None if it is not a terminal, so that lines may have any length."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return None


def format_age(seconds: float) -> str:
    """Return a duration in its largest unit.

    Example:
        >>> [format_age(seconds) for seconds in (0.4, 59, 61, 7_300, 200_000)]
        ['0s', '59s', '1m', '2h', '2d']
    """
    for size, unit in _AGES:
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def format_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    r"""Yield the lines of a table: headings, then rows.

    Args:
        columns: The columns; only the last one may be a detail.
        rows: The rows, with a text for each column.
        width: The maximum line length, in terminal columns; None: no limit.

    Example:
        >>> columns = [Column("NAME", cut=True), Column("EVENTS", right=True), Column("ERROR", detail=True)]
        >>> print(*format_table(columns, [["fires", "12", ""], ["fails", "3", "no such file"]], 80), sep="\n")
        NAME   EVENTS  ERROR
        fires      12
        fails       3  no such file
    """
    cells = [[_clean(text) for text in row] for row in rows]
    sizes = [
        max(count_cells(column.title), *(count_cells(row[number]) for row in cells))
        if cells
        else count_cells(column.title)
        for number, column in enumerate(columns)
    ]
    # Leave out optional columns without values.
    shown = [
        number for number, column in enumerate(columns) if not column.optional or any(row[number] for row in cells)
    ]
    below = False
    if width is not None:
        shown, below = _choose_columns(columns, sizes, shown, width)
        _cut_columns(columns, sizes, [number for number in shown if not (below and columns[number].detail)], width)
    beside = [number for number in shown if not (below and columns[number].detail)]
    yield _format_line(columns, sizes, beside, [column.title for column in columns])
    for row in cells:
        yield _format_line(columns, sizes, beside, row)
        if below and row[-1]:
            yield from wrap(row[-1], width, indent=_DETAIL_INDENT, lines=_DETAIL_LINES)


def wrap(text: str, width: int | None, *, indent: str = "", lines: int | None = None) -> list[str]:
    """Return a text as lines that fit a width; longer words are broken.

    Args:
        text: A text without control characters.
        width: The maximum line length; None: no limit.
        indent: The beginning of each line.
        lines: The maximum number of lines; a truncated text ends with "...".
    """
    if width is None:
        return [indent + text]
    if count_cells(text) != len(text):
        width = max(len(indent) + 1, (width + len(indent)) // 2)  # wide characters take two columns each
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, max_lines=lines, placeholder=" ..."
    )


def _choose_columns(
    columns: Sequence[Column], sizes: Sequence[int], shown: list[int], width: int
) -> tuple[list[int], bool]:
    """Return the columns to show, and whether the detail moves to lines of its own."""

    def needed(numbers: Sequence[int]) -> int:
        fixed = (min(sizes[number], _DETAIL_WIDTH) if columns[number].detail else sizes[number] for number in numbers)
        return sum(fixed) + len(_GAP) * (len(numbers) - 1)

    for number in reversed(shown):
        if needed(shown) > width and columns[number].optional:
            shown = [other for other in shown if other != number]
    return shown, needed(shown) > width and any(columns[number].detail for number in shown)


def _cut_columns(columns: Sequence[Column], sizes: list[int], beside: Sequence[int], width: int) -> None:
    """Narrow columns until the line fits: first the detail, then columns that may be truncated, the widest first."""
    excess = sum(sizes[number] for number in beside) + len(_GAP) * (len(beside) - 1) - width
    for number in beside:
        if excess > 0 and columns[number].detail:
            taken = min(excess, max(0, sizes[number] - _DETAIL_WIDTH))
            sizes[number] -= taken
            excess -= taken
    while excess > 0:
        widest = max((number for number in beside if columns[number].cut), key=lambda number: sizes[number], default=-1)
        if widest < 0 or sizes[widest] <= _NAME_WIDTH:
            return
        sizes[widest] -= 1
        excess -= 1


def _format_line(columns: Sequence[Column], sizes: Sequence[int], shown: Sequence[int], row: Sequence[str]) -> str:
    return _GAP.join(_fit(row[number], sizes[number], right=columns[number].right) for number in shown).rstrip()


def _fit(text: str, size: int, *, right: bool) -> str:
    space = size - count_cells(text)
    if space >= 0:
        return " " * space + text if right else text + " " * space
    while text and count_cells(text) > size - 3:
        text = text[:-1]
    return text + "." * min(3, size)


def _clean(text: str) -> str:
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)
