"""Formats numbers and sentences for messages."""

from __future__ import annotations


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun, in the singular or the plural.

    Args:
        count: The number.
        noun: The noun in the singular; its plural ends in s, or in es after an s.

    Example:
        >>> format_count(1, "message"), format_count(1_200, "message"), format_count(0, "process")
        ('1 message', '1,200 messages', '0 processes')
    """
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def to_one_line(text: str) -> str:
    r"""Return a text on one line: line breaks become spaces, other control characters are escaped.

    Example:
        >>> to_one_line("the file is damaged:\n  no header\n"), to_one_line("a \x1b[31m key")
        ('the file is damaged: no header', 'a \\x1b[31m key')
    """
    if text.isprintable():
        return text
    joined = " ".join(line.strip() for line in text.splitlines() if line.strip())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in joined)


def shorten(text: str, length: int = 200) -> str:
    """Return a text, cut to `length` characters and "..." if it is longer.

    Example:
        >>> shorten("a long text", 6), shorten("short", 6)
        ('a long...', 'short')
    """
    return text if len(text) <= length else f"{text[:length]}..."
