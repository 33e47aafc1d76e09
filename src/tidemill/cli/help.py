"""Formats help as plain text that fits the terminal, from 40 columns up.

Types of options (`<bool>`) and bounds of numbers are left out; the names of values and the help texts say what is
valid.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_name

#: Longer lines are hard to read.
_MAX_WIDTH = 100
#: In narrower terminals, each help text stands below its option.
_BESIDE_WIDTH = 70
_INDENT = 6
_CODE = re.compile(r"(\d+)  (.+)")
#: What Typer adds to names, and to help texts of numbers with bounds.
_TYPE = re.compile(r" <[^<>]+>(?=$|,)")
_BOUNDS = r"(?:-?[\d.]+<=?)?x(?:[<>]=?-?[\d.]+)?"
_RANGE = re.compile(rf"\s*\[{_BOUNDS}\]|; {_BOUNDS}(?=[;\]])|(?<=\[){_BOUNDS}; ")


def find_help_width() -> int:
    """Return the width of help texts: the terminal's width, up to a limit."""
    return min(shutil.get_terminal_size().columns, _MAX_WIDTH) - 1


class _Help:
    """The common behaviour of commands and groups of commands; mixed into a Typer class."""

    params: list[Any]
    epilog: str | None

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.width = find_help_width()
        pieces = [piece.replace("{", "").replace("}", "") for piece in self.collect_usage_pieces(ctx)]  # type: ignore[attr-defined]
        formatter.write_usage(ctx.command_path, " ".join(pieces))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, options and commands."""
        for kind, title in (("argument", "Arguments"), ("option", "Options")):
            records = [_describe(param, ctx) for param in self.get_params(ctx) if param.param_type_name == kind]  # type: ignore[attr-defined]
            _write_section(formatter, title, [record for record in records if record is not None])
        if isinstance(self, TyperGroup):
            found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
            rows = [(name, _find_summary(command)) for name, command in found if command is not None]
            _write_section(formatter, "Commands", rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the exit codes, one per line, or any other text unchanged."""
        lines = (self.epilog or "").splitlines()
        codes = [match.groups() for line in lines if (match := _CODE.fullmatch(line))]
        if codes and len(codes) == len(lines):
            _write_section(formatter, "Exit codes", [(code, text) for code, text in codes], beside=True)
        elif lines:
            formatter.write_paragraph()
            formatter.write_text(self.epilog)


class HelpCommand(_Help, TyperCommand):
    """A command with tidemill's help format."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; remove the prefix of pydantic's messages from errors."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


class HelpGroup(_Help, TyperGroup):
    """A group of commands with tidemill's help format."""

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run or complete the command line of the process."""
        if os.environ.get("_TIDEMILL_COMPLETE", "").endswith("_bash"):
            from tidemill.cli.bash_words import register

            register()
        return super().main(*args, **settings)


class App(typer.Typer):
    """A `typer.Typer` whose commands use tidemill's help format."""

    def __init__(self, **settings: Any) -> None:
        """Set the options that all groups share.

        Args:
            settings: Options of `typer.Typer`.
        """
        # Typer's tracebacks would show the values of variables, including passwords.
        common = {
            "cls": HelpGroup,
            "rich_markup_mode": None,
            "pretty_exceptions_enable": False,
            "no_args_is_help": True,
        }
        super().__init__(**{**common, **settings})

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return typer.Typer.__call__(self._pick(sys.argv[1:2]), *args, **settings)

    def _pick(self, words: list[str]) -> App:
        """Return an app with only the command that was typed; preparing all commands takes longer than running many of
        them.
        """
        picked = copy.copy(self)
        picked.registered_commands = [
            each for each in self.registered_commands if [each.name or _name_of(each.callback)] == words
        ]
        picked.registered_groups = [each for each in self.registered_groups if [each.name] == words]
        is_known = picked.registered_commands or picked.registered_groups
        return picked if is_known and "_TIDEMILL_COMPLETE" not in os.environ else self

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Register a command; see `typer.Typer.command`."""
        return super().command(name, **{"cls": HelpCommand, **settings})


def _name_of(callback: Callable[..., Any] | None) -> str:
    return get_command_name(callback.__name__) if callback is not None else ""


def _describe(param: Any, ctx: Any) -> tuple[str, str] | None:
    record = param.get_help_record(ctx)
    if record is None:
        return None
    name, text = record
    return _TYPE.sub("", name), _RANGE.sub("", text).replace("  [", " [")


def _find_summary(command: Any) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split())


def _write_section(formatter: Any, title: str, rows: list[tuple[str, str]], *, beside: bool = False) -> None:
    if not rows:
        return
    with formatter.section(title):
        if beside or formatter.width >= _BESIDE_WIDTH:
            formatter.write_dl(rows)
            return
        for name, text in rows:
            formatter.write_text(name)
            with formatter.indentation():
                formatter.write_text(text)
