"""Help texts of all commands: as wide as the terminal, and without what only programmers read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from tidemill.cli.main import EXIT_CODES, app


def find_commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, child in getattr(command, "commands", {}).items():
        yield from find_commands(child, (*words, name))


COMMANDS = list(find_commands(typer.main.get_command(app)))


def show_help(words: tuple[str, ...], columns: int) -> str:
    result = CliRunner().invoke(app, [*words, "-h"], prog_name="tidemill", env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("columns", [40, 80])
def test_help_fits_the_terminal_and_is_in_words(words: tuple[str, ...], columns: int) -> None:
    text = show_help(words, columns)

    assert max(map(len, text.splitlines())) <= columns
    assert text.startswith(f"Usage: {' '.join(('tidemill', *words))}")
    assert not re.search(r"<\w+>|x[<>]=|\[\[|\{", text), "types and bounds are for programmers"
    assert text.count("[") == text.count("]")
    assert text.count("[CONFIG]") <= 1


def test_a_paragraph_of_help_is_filled_and_not_broken_where_its_source_is() -> None:
    text = show_help(("run",), 80)
    paragraph = text.split("\n\n")[2].splitlines()
    assert all(len(line) > 60 for line in paragraph[:-1])


def test_a_narrow_terminal_has_each_text_below_its_option() -> None:
    assert "\n  --plain\n    " in show_help(("run",), 40)
    assert "\n  --plain  " in show_help(("run",), 80)


def test_defaults_and_what_is_required_are_said() -> None:
    assert "[default: 50]" in show_help(("dlq", "list"), 100)
    assert "[required]" in show_help(("run",), 80)


def test_exit_codes_are_a_list() -> None:
    text = show_help((), 80)
    for line in EXIT_CODES.splitlines():
        code, _, meaning = line.partition("  ")
        assert f"\n  {code:<5}{meaning[:20]}" in text
