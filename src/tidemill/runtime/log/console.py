"""Formats log entries for people: `HH:MM:SS level event key=value`, exceptions with the user's own frames first.

Pure text: no clock, no terminal. Invariants: an entry cannot control the terminal, because unprintable characters are
escaped. An entry is one line; values of several lines follow indented.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tidemill.runtime.log.tracebacks import CodePaths, rearrange

_RESET, _BOLD, _DIM = "\x1b[0m", "\x1b[1m", "\x1b[2m"
_COLORS = {"debug": "\x1b[34m", "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
#: Wide enough for "warning", so that all events start in the same column.
_LEVEL_WIDTH = 7
_PLACED = ("timestamp", "level", "event", "exception", "stack")


class ConsoleFormat:
    """Turns entries into text.

    Args:
        context: The fields of every entry of this process, which are not repeated in each.
        colors: Whether the text is coloured.
        code_paths: Which files belong to the user.

    Example:
        >>> entry = {"timestamp": "2026-05-01T10:00:00", "level": "info", "event": "started", "n": 2, "worker_id": "w"}
        >>> ConsoleFormat({"worker_id": "w"}, colors=False).render(entry)
        '10:00:00 info    started n=2'
    """

    def __init__(self, context: Mapping[str, object], *, colors: bool, code_paths: CodePaths | None = None) -> None:
        self._context = {name: value for name, value in context.items() if name != "engine"}
        self._colors = colors
        self._code_paths = code_paths or CodePaths()

    def render(self, entry: Mapping[str, Any]) -> str:
        """Return an entry as text, without a trailing line break."""
        level = str(entry.get("level", "info"))
        event = escape_control(str(entry.get("event", "")))
        color = _COLORS.get(level, "")
        serious = level not in ("debug", "info")
        head = [
            self._paint(_format_time(str(entry.get("timestamp", ""))), _DIM),
            self._paint(level.ljust(_LEVEL_WIDTH), color),
            self._paint(event, _BOLD) if serious else event,
        ]
        long: list[tuple[str, str]] = []
        shown = rearrange(str(entry.get("exception") or ""), self._code_paths)
        for name, value in entry.items():
            if name in _PLACED or self._is_known(name, value) or (name == "error" and _says_same(str(value), shown)):
                continue
            if isinstance(value, str) and "\n" in value.strip():
                long.append((name, value))
            else:
                head.append(self._paint(f"{name}=", _DIM) + _format_value(value))
        lines = [" ".join(part for part in head if part)]
        for name, value in long:
            lines += [f"  {name}:", *_indent(rearrange(value, self._code_paths), 4)]
        if entry.get("stack"):
            lines += _indent(str(entry["stack"]), 2)
        lines += _indent(shown, 2)
        return "\n".join(lines)

    def _is_known(self, name: str, value: object) -> bool:
        if name == "logger":
            return str(value).partition(".")[0] in ("tidemill", "root", "__main__")
        return name in self._context and self._context[name] == value

    def _paint(self, text: str, color: str) -> str:
        return f"{color}{text}{_RESET}" if self._colors and color and text else text


def escape_control(text: str) -> str:
    r"""Return a text with its unprintable characters escaped.

    Example:
        >>> escape_control("red \x1b[31m")
        'red \\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _says_same(error: str, exception: str) -> bool:
    """Return whether the text of an error repeats the exception shown."""
    return bool(exception) and (exception.split("\n", 1)[0] in error or error in exception)


def _format_time(timestamp: str) -> str:
    """Return the time of day in this process's time zone."""
    try:
        return datetime.fromisoformat(timestamp).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return timestamp


def _format_value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, dict | list | tuple):
        text = json.dumps(value, ensure_ascii=False, default=str)
    elif isinstance(value, float):
        text = f"{value:g}"
    else:
        text = str(value).strip("\n")
        if not text or any(char in text for char in ' "='):
            text = json.dumps(text, ensure_ascii=False)
    return escape_control(text)


def _indent(text: str, columns: int) -> list[str]:
    return [f"{' ' * columns}{escape_control(line.expandtabs())}" for line in text.strip("\n").splitlines()]
