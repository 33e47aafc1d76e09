"""Numbers in sentences."""

from __future__ import annotations


def count_of(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the singular or the plural.

    Args:
        count: How many.
        noun: In the singular.
        plural: Where it does not end in a plain s.

    Example:
        >>> count_of(1, "message"), count_of(1_200, "message"), count_of(0, "entry", "entries")
        ('1 message', '1,200 messages', '0 entries')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
