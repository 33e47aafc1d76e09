"""Rearranges the text of a traceback for its reader: the error first, then the user's own frames, then all others.

It works on text, not on exceptions, because errors of engines arrive as text. Invariants: a text of an unknown form,
such as an exception group, is returned unchanged. Only the marks below lines of code are left out.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')
_MARKS = re.compile(r"\s+[~^]+\s*")
#: Python's texts between an exception and its cause, and their replacements.
_LINKS = {
    "\n\nThe above exception was the direct cause of the following exception:\n\n": "caused by",
    "\n\nDuring handling of the above exception, another exception occurred:\n\n": "raised while handling",
}
_LINK = re.compile("(" + "|".join(re.escape(link) for link in _LINKS) + ")")


def _find_libraries() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages, the deepest first."""
    import sysconfig

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple(sorted({sysconfig.get_path(name) for name in names}, key=len, reverse=True))


@dataclass(frozen=True, slots=True)
class CodePaths:
    """The folders that tell the user's code from tidemill and libraries.

    Attributes:
        package: The folder that contains the package tidemill.
        libraries: Folders of the standard library and of installed packages.
        here: The current folder; paths below it are shown relative to it.
    """

    package: str = field(default_factory=lambda: str(Path(__file__).parents[3]))
    libraries: tuple[str, ...] = field(default_factory=_find_libraries)
    here: str = field(default_factory=os.getcwd)

    def is_users(self, file: str) -> bool:
        """Return whether a file belongs to neither tidemill nor a library."""
        if file.startswith("<") or "/site-packages/" in file or "/dist-packages/" in file:
            return False
        return not any(file.startswith(f"{folder}/") for folder in (f"{self.package}/tidemill", *self.libraries))

    def shorten(self, file: str) -> str:
        """Return a path relative to the current folder or to the folder of packages, if it is below one of them."""
        for folder in (self.here, self.package, *self.libraries):
            if file.startswith(f"{folder}/"):
                return file.removeprefix(f"{folder}/")
        return file


@dataclass(slots=True)
class _Frame:
    file: str
    line: str
    name: str
    code: list[str] = field(default_factory=list)


def rearrange(text: str, code_paths: CodePaths) -> str:
    """Return a text with its traceback rearranged, if it is one.

    Args:
        text: Python's text of an exception.
        code_paths: Which files belong to the user.

    Example:
        >>> places = CodePaths("/x", ("/lib",), "/home/me")
        >>> print(rearrange('''Traceback (most recent call last):
        ...   File "/lib/asyncio.py", line 9, in run
        ...     call()
        ...   File "/home/me/handler.py", line 3, in arrange
        ...     return 1 / 0
        ... ZeroDivisionError: division by zero''', places))
        ZeroDivisionError: division by zero
          handler.py:3 in arrange: return 1 / 0
          called from, innermost first:
          asyncio.py:9 in run: call()
    """
    if not text.startswith(_HEADER):
        return text
    parts = _LINK.split(text)
    shown: list[str] = []
    # Python shows the first cause first, but the last exception says the most.
    for position in range(len(parts) - 1, -1, -2):
        lines = _rearrange_one(parts[position], code_paths)
        if lines is None:
            return text
        if position + 1 < len(parts):
            lines[0] = f"{_LINKS[parts[position + 1]]} {lines[0]}"
        shown += lines
    return "\n".join(shown)


def _rearrange_one(text: str, code_paths: CodePaths) -> list[str] | None:
    lines = text.strip("\n").split("\n")
    if lines[0] != _HEADER:
        return None
    frames: list[_Frame] = []
    rest = len(lines)
    for number, line in enumerate(lines[1:], 1):
        if found := _FRAME.fullmatch(line):
            frames.append(_Frame(found["file"], found["line"], found["name"]))
        elif frames and line.startswith(("    ", "  [Previous line")):
            if not _MARKS.fullmatch(line):
                frames[-1].code.append(line.strip())
        else:
            rest = number
            break
    error = lines[rest:]
    if not error:
        return None
    own = [frame for frame in frames if code_paths.is_users(frame.file)]
    others = [frame for frame in frames if not code_paths.is_users(frame.file)]
    shown = [*error, *(f"  {_format_frame(frame, code_paths)}" for frame in reversed(own))]
    if own and others:
        shown.append("  called from, innermost first:")
    return [*shown, *(f"  {_format_frame(frame, code_paths)}" for frame in reversed(others))]


def _format_frame(frame: _Frame, code_paths: CodePaths) -> str:
    code = f": {' '.join(frame.code)}" if frame.code else ""
    return f"{code_paths.shorten(frame.file)}:{frame.line} in {frame.name}{code}"
