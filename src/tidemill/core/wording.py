"""Numbers in sentences."""

from __future__ import annotations


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun, in the singular or the plural.

    Args:
        count: How many.
        noun: In the singular; its plural ends in s, or in es after an s.

    Example:
        >>> format_count(1, "message"), format_count(1_200, "message"), format_count(0, "process")
        ('1 message', '1,200 messages', '0 processes')
    """
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"
