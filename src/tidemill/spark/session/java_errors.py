"""What a Java exception says, in one line: the innermost of its causes names the fault, the others where it came up."""

from __future__ import annotations

import re

_CAUSE = re.compile(r"^Caused by: (.+)", re.MULTILINE)
#: What py4j writes above the exception.
_CALL = re.compile(r"\AAn error occurred while calling [^\n]+\n: (.+)")
#: The name of a class of exceptions, with its package, before its message.
_CLASS = re.compile(r"\A(?:[\w$]+\.)+([\w$]+)(?=\Z|:)")


def find_cause(text: str) -> str:
    """Return the innermost cause in the text of an exception; of a text without causes, its first line.

    Example:
        >>> find_cause("An error occurred while calling o1.x.\\n: a.b.E: one\\n\\tat x\\nCaused by: a.c.F: two")
        'F: two'
        >>> find_cause("no Java here\\nat all")
        'no Java here'
    """
    causes = _CAUSE.findall(text) or _CALL.findall(text)
    line = causes[-1] if causes else next(iter(text.strip().splitlines()), "")
    return _CLASS.sub(r"\1", line.strip())
