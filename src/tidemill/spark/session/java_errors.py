"""Describes a Java exception in one line: its innermost cause names the fault."""

from __future__ import annotations

import re

_CAUSE = re.compile(r"^Caused by: (.+)", re.MULTILINE)
#: The line that py4j puts before the exception.
_CALL = re.compile(r"\AAn error occurred while calling [^\n]+\n: (.+)")
#: The name of an exception class, with its package, before its message.
_CLASS = re.compile(r"\A(?:[\w$]+\.)+([\w$]+)(?=\Z|:)")


def find_cause(text: str) -> str:
    r"""Return the innermost cause in the text of an exception, or the first line of a text without causes.

    Example:
        >>> find_cause("An error occurred while calling o1.x.\n: a.b.E: one\n\tat x\nCaused by: a.c.F: two")
        'F: two'
        >>> find_cause("no Java here\nat all")
        'no Java here'
    """
    causes = _CAUSE.findall(text) or _CALL.findall(text)
    line = causes[-1] if causes else next(iter(text.strip().splitlines()), "")
    return _CLASS.sub(r"\1", line.strip())
